"""A rank: what one process of a pool knows, and how it answers the judge."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pytest_attn.correctness.contract import ContractError
from pytest_attn.latency.work import StaleError
from pytest_attn.ranks.collectives import watch_collectives
from pytest_attn.ranks.serving import RankServer
from pytest_attn.ranks.shared_gpu import BACKEND, permit_in_nccl, register_host_group
from pytest_attn.ranks.starts import Starts
from pytest_attn.ranks.team import Tensors
from pytest_attn.ranks.wire import COLLECTIVE, SOCKET_VARIABLE, STACK, STARTS, Line, Message, read_tensors, write_tensors

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: what torch imports in a first backward pass, or with a first group: no call of a callable should take so long
LATE_IMPORTS = ("torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes")


#: what calls the callable: its own frames follow
_CALLERS = (
    "ranks/serving.py",
    "ranks/timing.py",
    "ranks/clocks.py",
    "latency/work.py",
    "latency/work.py",
    "latency/cuda_timer.py",
)


class Steps(Protocol):
    """What times a callable on this rank, a step at a time (ranks/timing.py)."""

    def step(self, what: str, given: Mapping[str, Any]) -> Any:
        """Make a step of these keyword arguments; return what the judge learns from it."""


class CaseOverError(BaseException):
    """The judge has ended the case, of which this rank computes a part."""


class Rank:
    """One process of a pool.

    rank, ranks: its number and how many there are. is_over: whether the judge has ended the case. starts, collectives: where
    it begins a sample together with the others, and what is known of its collectives.
    """

    def __init__(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ.pop(SOCKET_VARIABLE))
        self._line = Line(connection)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._line.say(rank=self.rank, pid=os.getpid())
        start: Message = self._line.hear() or {}
        self._folder, self.kind, self._timeout = Path(start["folder"]), start["kind"], float(start["timeout"])
        self._share = start["share"]
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stack = (self._folder / STACK.format(self.rank)).open("w", encoding="utf-8")
        self.starts = Starts(self._folder / STARTS, self.rank, self.ranks)
        self._mesh: DeviceMesh | None = None
        self._results = 0
        self.is_over = False
        faulthandler.enable(self._stack)  # the judge aborts a rank that does not answer, and reads this
        threading.Thread(target=self._listen, daemon=True).start()

    def join_group(self) -> None:
        """Join the process group, as a program does that torchrun has started; say that the rank is ready."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        for name in LATE_IMPORTS:
            with suppress(ImportError):
                import_module(name)
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.collectives = watch_collectives(self._folder / COLLECTIVE.format(self.rank))
        given: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(seconds=self._timeout)}
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            os.environ["LOCAL_RANK"] = str(self.device.index)  # by which libraries choose a device
            given |= {"backend": "nccl", "device_id": self.device}
        if self._share == "gloo":
            register_host_group()
            given = {"backend": BACKEND, "timeout": given["timeout"]}
        elif self._share == "nccl":
            permit_in_nccl()
        dist.init_process_group(**given)
        self._line.say(ready=True)

    @property
    def device(self) -> torch.device:
        """The rank's own device."""
        import torch

        if self.kind != "cuda":
            return torch.device(self.kind)
        return torch.device("cuda", self.rank if self._share == "no" else self.rank % torch.cuda.device_count())

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        import torch.distributed as dist

        found = dist.group.WORLD
        assert found is not None
        return found

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh of one dimension, "ranks"."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(self.kind, (self.ranks,), mesh_dim_names=("ranks",))
        return self._mesh

    # -- the line ------------------------------------------------------------------------------------------------------

    def next_case(self) -> str | None:
        """Wait for a test that is to be run; return its name, None at the end."""
        while True:
            order = self._orders.get()
            if order["do"] in ("run", "end"):
                self.is_over = False
                return order.get("name")

    def end_case(self, outcome: str, text: str) -> None:
        """Say how the test of a case ended here."""
        self._line.say(ended=outcome, text=text)

    def serve(self, server: RankServer, timing: Steps, fn_name: str) -> Any:
        """Compute, and time, what the judge asks of one callable; return its verdict.

        Raises CaseOverError where the case is over.
        """
        self._line.say(checking=fn_name)
        while True:
            order = self._orders.get()
            if order["do"] == "next":
                with Path(order["verdict"]).open("rb") as file:
                    return pickle.load(file)
            if order["do"] in ("over", "end"):
                self.is_over = True
                raise CaseOverError
            self._answer(partial(self._timed, timing) if order["do"] == "step" else partial(self._computed, server), order)

    def _answer(self, answer: Callable[[Message], Any], order: Message) -> None:
        """Answer an order with its result, or with what went wrong."""
        try:
            self._line.say(result=answer(order))
        except ContractError as error:
            self._line.say(contract=str(error))
        except StaleError as error:
            self._line.say(stale=str(error))
        except Exception as error:
            self._line.say(raised=type(error).__name__, text=_told(error))

    def _timed(self, timing: Steps, order: Message) -> Any:
        return timing.step(order["what"], order["given"])

    def _computed(self, server: RankServer, order: Message) -> str:
        """Return the file with the shards of one call."""
        given = read_tensors(order["tensors"])
        self.collectives.is_late = order["late"] == self.rank
        if order["do"] == "forward":
            results: Tensors = server.forward(order["number"], given, order["backward"])
        else:
            results = server.backward(order["number"], given["dout"])
        self._results += 1
        path = self._folder / f"result-{self.rank}-{self._results}"
        write_tensors(path, results)
        return str(path)

    def _listen(self) -> None:
        """Put orders into the queue; end the process where the judge is gone, wherever the main thread waits."""
        while (order := self._line.hear()) is not None:
            self._orders.put(order)
        os._exit(1)


def _told(error: Exception) -> str:
    """Return the traceback from the user's own code on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if frame.filename.endswith(_CALLERS)]
    shown = frames[own[-1] + 1 :] if own else frames
    lines = [*traceback.format_list(shown), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()
