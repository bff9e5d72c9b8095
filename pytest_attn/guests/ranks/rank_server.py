"""A rank: what one process of a pool knows, and how it answers the judge; and the plugin of pytest that runs tests in it.

`-p pytest_attn.guests.ranks.rank_server` is on the command line of each rank, which collects and runs the one test that the
judge names, again and again, and reports nothing itself. PYTEST_DONT_REWRITE: see processes/worker.py.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist
from _pytest.runner import runtestprotocol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_attn.backends.contexts import judged_code
from pytest_attn.backends.gradients import gradients_of
from pytest_attn.backends.raised import declined_because
from pytest_attn.correctness.call import changes_of, fault_of_change
from pytest_attn.correctness.contract import ContractError, elements, plain
from pytest_attn.correctness.replaced_functions import functions_kept
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.guests.ranks.communication import watch_collectives
from pytest_attn.guests.ranks.rank_group import COLLECTIVE, STACK, Tensors, read_tensors, write_tensors
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.shards import cut, parts_of
from pytest_attn.latency.work import WrongResultError
from pytest_attn.processes.channel import Message
from pytest_attn.processes.worker import Worker
from pytest_attn.reports.lines import raised_words
from pytest_attn.workloads.functions import describe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has

#: by how much the common moment lies after the last rank's arrival, so that the others have seen it
_AHEAD_NANOSECONDS = 20_000
_WORD = 8
#: lets others have the core: sleeping takes a hundred times as long
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class StartBarrier:
    """Each rank says from when on it can begin, on the clock that all processes of a host share; the latest moment counts.

    Moments of successive starts lie in two banks: a rank that is one start ahead must not overwrite what another still reads.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        size = 2 * ranks * _WORD
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, size)
            self._moments = memoryview(mmap.mmap(file, size)).cast("q")
        finally:
            os.close(file)
        self._bank, self._last = 0, 0

    def wait(self) -> float:
        """Wait for the others, then for the common moment; return how many seconds after it this rank begins."""
        self._bank = 1 - self._bank
        first = self._bank * self._ranks
        moments = self._moments[first : first + self._ranks]
        moments[self._rank] = time.perf_counter_ns() + _AHEAD_NANOSECONDS
        while min(moments) <= self._last:  # of the start before the last one, or of none yet
            _yield_core()
        self._last = max(moments)
        while (now := time.perf_counter_ns()) < self._last:
            pass
        return (now - self._last) * 1e-9


#: calls of which a backward pass may still follow
_KEPT = 4


class _RankCall(NamedTuple):
    """One call: its leaves, copies of them, and its result."""

    given: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]
    out: torch.Tensor


class RankServer:
    """Serves the calls of one callable on one rank. device: the rank's own."""

    def __init__(
        self,
        fn: Callable[..., Any],
        sharding: Sharding,
        rank: int,
        layout: str,
        returns_lse: bool,
        device: torch.device | None = None,
    ) -> None:
        self._fn, self._sharding, self._rank = fn, sharding, rank
        self._layout, self._returns_lse, self._device = layout, returns_lse, device
        self._calls: OrderedDict[int, _RankCall] = OrderedDict()
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, number: int, tensors: Tensors, backward: bool) -> dict[str, torch.Tensor]:
        """Return the rank's shards of out, and lse. Raises ContractError; what the callable raises passes through."""
        parts = parts_of(tensors, self._sharding, self._layout, self._rank, self._device)
        given = {name: part.detach().requires_grad_(backward) for name, part in parts.items()}
        kept = {name: shard.detach().clone() for name, shard in given.items()}
        with torch.set_grad_enabled(backward):
            returned = self._fn(*given.values())
            with self._naming_rank():
                results = self._named(returned)
        with self._naming_rank():
            _require_unchanged(given, kept)
            if self._last is not None and not bool(((self._last[0] == self._last[1]) | self._last[1].isnan()).all()):
                raise ContractError("the callable changed the out of an earlier call, which is in use")
            self._last = (results["out"].detach(), results["out"].detach().clone())
            if backward and not results["out"].requires_grad:
                raise ContractError("out carries no gradient; backward=True needs a callable that autograd can follow")
        if backward:
            self._calls[number] = _RankCall(given, kept, results["out"])
            while len(self._calls) > _KEPT:
                self._calls.popitem(last=False)
        return {name: result.detach().clone() for name, result in results.items()}

    def backward(self, number: int, dout: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rank's shards of dq, dk and dv. Raises as `forward` does."""
        call = self._calls[number]
        dout = dout.detach()
        if call.out.shape == dout.shape:  # out is whole on every rank
            mine = dout.clone().to(self._device or dout.device)
        else:
            mine = cut(dout, "dout", self._sharding, self._layout, self._rank, self._device)
        found = gradients_of([call.out], list(call.given.values()), [mine], retain_graph=True)
        with self._naming_rank():
            _require_unchanged(call.given, call.kept)
            return {f"d{name}": _checked(name, leaf, one) for (name, leaf), one in zip(call.given.items(), found, strict=True)}

    def _named(self, result: object) -> dict[str, torch.Tensor]:
        """Return the results by name; raise ContractError where these are other than expected."""
        several = elements(result)
        results: list[Any] = [result] if several is None else several
        names = ("out", "lse") if self._returns_lse else ("out",)
        if len(results) == len(names):
            results = [plain(*one) for one in zip(names, results, strict=True)]
        if len(results) != len(names) or not all(isinstance(one, torch.Tensor) for one in results):
            found = describe(result) if several is None else "(" + ", ".join(map(describe, results)) + ")"
            wanted = "(out, lse), its shards" if self._returns_lse else "its shard of out"
            advice = "; say returns_lse=True in the marker if it returns (out, lse)" if len(results) == 2 else ""
            raise ContractError(f"the callable returned {found}; expected {wanted}{advice}")
        return dict(zip(names, results, strict=True))

    @contextmanager
    def _naming_rank(self) -> Iterator[None]:
        try:
            yield
        except ContractError as error:
            raise ContractError(f"rank {self._rank}: {error}") from None


def _require_unchanged(given: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    if changes := changes_of(given, kept):
        raise ContractError(fault_of_change(changes))


def _checked(name: str, leaf: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of an input; raise ContractError where it cannot be compared."""
    if gradient is None:
        raise ContractError(f"d{name} is missing: out does not depend on {name}, as autograd sees it")
    gradient = plain(f"d{name}", gradient)
    if gradient.dtype != leaf.dtype:
        raise ContractError(f"d{name} has dtype {gradient.dtype}; expected {leaf.dtype}")
    return gradient.detach().clone()


#: what torch imports in a first backward pass, or with a first group: no call of a callable should take so long
LATE_IMPORTS = ("torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes")

#: what NCCL 2.30 reads as a process begins to use it
_SEVERAL_RANKS_ON_A_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
#: what calls the callable: its own frames follow
_CALLERS = ("guests/ranks/rank_server.py", "guests/ranks/worker_timing.py", "latency/kernel_work.py")

#: makes a step of the timer of a callable on this rank (ranks/worker_timing.py): its name, and keyword arguments
Step: TypeAlias = Callable[[str, Mapping[str, Any]], Any]


class CaseOverError(BaseException):
    """The judge has ended the case, of which this rank computes a part."""


class Rank:
    """One process of a pool.

    rank, ranks: its number and how many there are. is_over: whether the judge has ended the case. barrier, collectives: where
    it begins a sample together with the others, and what is known of its collectives.
    """

    def __init__(self, worker: Worker) -> None:
        self._channel, message = worker.channel, worker.told
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._folder, self.kind, self._timeout = Path(message["folder"]), message["kind"], float(message["timeout"])
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stack = (self._folder / STACK.format(self.rank)).open("w", encoding="utf-8")
        self.barrier = StartBarrier(self._folder / "starts", self.rank, self.ranks)
        self._mesh: DeviceMesh | None = None
        self._results = 0
        self.is_over = False
        faulthandler.enable(self._stack)  # the judge aborts a rank that does not answer, and reads this
        threading.Thread(target=self._listen, daemon=True).start()

    def join_group(self) -> None:
        """Join the process group, as a program does that torchrun has started; say that the rank is ready."""
        for name in LATE_IMPORTS:
            with suppress(ImportError):
                import_module(name)
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.collectives = watch_collectives(self._folder / COLLECTIVE.format(self.rank))
        # at a port, anybody on this host could join in
        store = dist.FileStore(str(self._folder / "store"), self.ranks)  # type: ignore[attr-defined]
        given: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(seconds=self._timeout), "store": store}
        given |= {"rank": self.rank, "world_size": self.ranks}
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            os.environ["LOCAL_RANK"] = str(self.device.index)  # by which libraries choose a device
            given |= {"backend": "nccl", "device_id": self.device}
            if self.ranks > torch.cuda.device_count():
                os.environ |= _SEVERAL_RANKS_ON_A_GPU
        dist.init_process_group(**given)
        self._channel.send(ready=True)

    @property
    def device(self) -> torch.device:
        """The rank's own device."""
        if self.kind != "cuda":
            return torch.device(self.kind)
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        found = dist.group.WORLD
        assert found is not None
        return found

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh of one dimension, "ranks"."""
        if self._mesh is None:
            self._mesh = init_device_mesh(self.kind, (self.ranks,), mesh_dim_names=("ranks",))
        return self._mesh

    # -- the channel ------------------------------------------------------------------------------------------------------

    def next_case(self) -> str | None:
        """Wait for a test that is to be run; return its name, None at the end."""
        while True:
            order = self._orders.get()
            if order["do"] in ("run", "end"):
                self.is_over = False
                return order.get("name")

    def end_case(self, outcome: str, text: str) -> None:
        """Say how the test of a case ended here."""
        self._channel.send(ended=outcome, text=text)

    def serve(self, server: RankServer, step: Step, fn_name: str) -> Any:
        """Compute, and time, what the judge asks of one callable; return its verdict.

        Raises CaseOverError where the case is over.
        """
        self._channel.send(checking=fn_name)
        while True:
            order = self._orders.get()
            if order["do"] == "next":
                return pickle.loads(Path(order["verdict"]).read_bytes())
            if order["do"] in ("over", "end"):
                self.is_over = True
                raise CaseOverError
            self._answer(order, server, step, fn_name or "the callable")

    def _answer(self, order: Message, server: RankServer, step: Step, fn_name: str) -> None:
        try:
            is_step = order["do"] == "step"
            with judged_code(fn_name, is_quiet=False), functions_kept():
                result = step(order["what"], order["given"]) if is_step else self._computed(server, order)
            self._channel.send(result=result)
        except ContractError as error:
            self._channel.send(contract=str(error))
        except WrongResultError as error:
            self._channel.send(stale=str(error))
        except Exception as error:
            kind, _, said = traceback.format_exception_only(type(error), error)[0].partition(":")
            self._channel.send(raised=raised_words(kind, said), text=_told(error), declined=declined_because(error))

    def _computed(self, server: RankServer, order: Message) -> str:
        """Return the file with the shards of one call."""
        given = read_tensors(order["tensors"])
        self.collectives.is_late = order["late"] == self.rank
        with KeptSwitches(self.kind):
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
        while (order := self._channel.recv()) is not None:
            self._orders.put(order)
        os._exit(1)


def _told(error: Exception) -> str:
    """Return the traceback from the user's own code on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if frame.filename.endswith(_CALLERS)]
    shown = frames[own[-1] + 1 :] if own else frames
    lines = [*traceback.format_list(shown), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


# -- the plugin ----------------------------------------------------------------------------------------------------------

#: the rank that this process is; not there in any other
RANK = pytest.StashKey[Rank]()


def rank_of(config: pytest.Config) -> Rank | None:
    """Return the rank that this process is, None where it is none."""
    return config.stash.get(RANK, None)


def pytest_configure(config: pytest.Config) -> None:
    """Meet the judge and the other ranks."""
    worker = Worker.of_this_process()
    assert worker is not None
    rank = config.stash[RANK] = Rank(worker)
    rank.join_group()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> object:
    """Collect nothing yet."""
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run what the judge names."""
    rank = session.config.stash[RANK]
    while (name := rank.next_case()) is not None:
        rank.end_case(*_run(session, rank, name))
    return True


def _run(session: pytest.Session, rank: Rank, name: str) -> tuple[str, str]:
    try:
        items = session.perform_collect([name])
    except pytest.UsageError as error:
        return "failed", f"it cannot be collected: {error}"
    if len(items) != 1:
        return "failed", f"it cannot be collected: {len(items)} tests have this name"
    for report in runtestprotocol(items[0], log=False, nextitem=None):
        is_expected = report.when == "call" and rank.is_over
        if report.outcome != "passed" and not is_expected:
            return report.outcome, report.longreprtext
    return "passed", ""
