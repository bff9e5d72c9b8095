"""The process of an isolated callable: it imports the callable's module, and nothing of the tests; it serves calls.

What it answers is JSON, and bytes in shared memory. It knows no reference, and what it says of itself is believed by nobody.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import pickle
import socket
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_attn.backends.contexts import judged_code, no_collection
from pytest_attn.backends.gradients import Gradients, casts_weights, hides_casts
from pytest_attn.backends.machine import current, wait
from pytest_attn.backends.named import NamedFunction, UnimportableError, imported, offered_to
from pytest_attn.backends.raised import EndsTestError, declined_because
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.streams import side_stream
from pytest_attn.correctness.call import is_cuda_error
from pytest_attn.correctness.contract import ContractError, elements, plain, require_dense
from pytest_attn.correctness.replaced_functions import functions_kept
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.guests.isolation.timed_row import RowData, bytes_of, digest, replayed
from pytest_attn.guests.isolation.wire import MOST_TEXT, FrameSocket, Parcel, released, storage_of, taken, unpickled, write
from pytest_attn.latency.exact_results import Attention
from pytest_attn.latency.kernel_work import work_of
from pytest_attn.latency.protocol import stopwatch_of, threads
from pytest_attn.latency.work import WrongResultError
from pytest_attn.processes.channel import Channel
from pytest_attn.processes.lifetime import inherited_channel
from pytest_attn.reports.lines import raised_words

#: calls of which a backward pass may still follow
_KEPT = 4
#: bytes of a call whose memory is kept
_MOST_KEPT = 64 << 20
#: for how long a GPU works before calls are made in a row
_WARM_SECONDS = 0.1
#: of mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: frames of a traceback that are ours
_OWN = "pytest_attn"


class AnyResult(Attention):
    """Results of what cannot be told here, which the process that judges compares with what they must be."""

    def fault_of(self, results: Mapping[str, Tensor], tensors: Sequence[Tensor], dout: Tensor) -> str:
        """Find none."""
        return ""


class _ServedCall(NamedTuple):
    """One call: its tensors, what their storages held, and the tensors that it returned."""

    tensors: list[Tensor]
    storages: list[Tensor]
    kept: list[Tensor]
    results: list[Tensor]


class CallServer:
    """Serves the calls of one function. sent, returned: memory in which tensors come and go. file: of its module, or ""."""

    def __init__(self, frames: FrameSocket, sent: int, returned: int, file: str = "") -> None:
        self._frames, self._sent, self._returned, self._file = frames, sent, returned, file
        self._calls: OrderedDict[int, _ServedCall] = OrderedDict()
        self._last: list[tuple[Tensor, Tensor]] = []
        self._memory: OrderedDict[Parcel, list[Tensor]] = OrderedDict()
        self._row: list[Any] = []
        self._words = 0  # of the digests of its results
        self._gradients = Gradients()

    def serve(self) -> None:
        """Import the function that the judge names, and call it until the judge is gone."""
        self._answer(ready=True)
        name = self._frames.receive()
        if name is None:
            return
        self._name = name.decode()
        try:
            self._function = imported(self._name, self._file)
        except UnimportableError as error:
            self._answer(unimportable=str(error))
            return
        self._answer(wanted=list(offered_to(self._function)))
        while (frame := self._frames.receive()) is not None:
            self._answer(**self._answer_of(frame))

    # -- details -------------------------------------------------------------------------------------------------------

    def _answer(self, **answer: object) -> None:
        cut = {name: one[:MOST_TEXT] if isinstance(one, str) else one for name, one in answer.items()}
        self._frames.send(json.dumps(cut).encode())

    def _answer_of(self, frame: bytes) -> dict[str, Any]:
        """Return the answer to an order, or what went wrong. A device that is lost takes the process with it."""
        try:
            parcel, text = pickle.loads(frame)
            tensors, storages = taken(self._sent, parcel, self._memory.get(parcel, ()))
            order = unpickled(text, tensors)
            if order["do"] == "call" and sum(parcel.storages) <= _MOST_KEPT:
                self._keep(parcel, storages)
            with judged_code(self._name, is_quiet=False), functions_kept():
                return self._done(order, tensors, storages)
        except ContractError as error:
            return {"contract": str(error)}
        except WrongResultError as error:
            return {"stale": str(error)}
        except EndsTestError as error:
            return {"ends": str(error), "where": error.where}
        except BaseException as error:
            if (declined := declined_because(error)) is not None:
                return {"declined": declined}
            if isinstance(error, Exception) and is_cuda_error(error):
                self._answer(**_raised(error))
                os._exit(1)
            return _raised(error)

    def _keep(self, parcel: Parcel, storages: list[Tensor]) -> None:
        """Have what comes of the same places lie where this does: only then is seen what keeps results by their addresses."""
        self._memory[parcel] = storages
        self._memory.move_to_end(parcel)
        while len(self._memory) > _KEPT:
            self._memory.popitem(last=False)

    def _done(self, order: dict[str, Any], tensors: list[Tensor], storages: list[Tensor]) -> dict[str, Any]:
        if order["do"] == "call":
            return self._called(order, tensors, storages)
        if order["do"] == "measure":
            return {"latency": self._measured(order)}
        if order["do"] == "repeat":
            self._row = self._in_a_row(order)
            return {"done": self._words}
        if order["do"] == "result":
            return self._returns(self._row[order["number"]], _ServedCall([], [], [], []))
        call = self._calls.pop(order["number"])
        self._gradients = Gradients()
        return self._returns(self._gradients_of(call.results, call.tensors, order["douts"]), call)

    def _called(self, order: dict[str, Any], tensors: list[Tensor], storages: list[Tensor]) -> dict[str, Any]:
        kept = [one.clone() for one in storages]
        device = tensors[0].device
        if order["threads"] != torch.get_num_threads():
            torch.set_num_threads(order["threads"])
        if order["seed"] is not None:
            torch.manual_seed(order["seed"])
        with current(str(device)), torch.set_grad_enabled(order["grad"]), KeptSwitches(device.type):
            result = self._function(*order["given"], **order["keywords"])
        wait(device)
        for tensor, before in self._last:
            if not torch.equal(storage_of(tensor.detach()), before):
                raise ContractError("the callable changed the out of an earlier call, which is in use")
        call = _ServedCall(tensors, storages, kept, [])
        answer = self._returns(result, call)
        given = {0, *(one.data_ptr() for one in storages)}
        own = [one for one in call.results if one.untyped_storage().data_ptr() not in given]
        self._last = [(one, storage_of(one.detach()).clone()) for one in own]
        if followed := [one for one in call.results if one.requires_grad]:
            answer["casts"] = any(casts_weights(one) or hides_casts(one) for one in followed)
            self._calls[order["number"]] = call
            while len(self._calls) > _KEPT:
                self._calls.popitem(last=False)
        return answer

    def _measured(self, order: dict[str, Any]) -> dict[str, Any]:
        """Time the function by the usual protocol, as it would be in the process that judges."""
        spec, last = order["spec"], [time.monotonic()]

        def ping() -> None:
            if time.monotonic() > last[0] + 1:
                last[0] = time.monotonic()
                self._answer(alive=True)

        with current(str(spec.device)), threads(order["threads"]), KeptSwitches(spec.device.type):
            subject = spec.subject(Registry(), NamedFunction(self._name))
            work = work_of(subject, spec, order["direction"], attention=Attention if order["is_told"] else AnyResult)
            work.on_call = ping
            stopwatch = stopwatch_of(spec.device, order["cold"], frozenset((os.getpid(), os.getppid(), *order["own"])))
            latency = stopwatch.measure(work, "", "", order["mode"])
        return dataclasses.asdict(latency)

    def _in_a_row(self, order: dict[str, Any]) -> list[Any]:
        """Call the function on data that the judge draws when the time begins; return what it returned."""
        given, device = order["call"][0], order["call"][0][0].device
        with (
            current(str(device)),
            side_stream(device) if order["replayed"] else nullcontext(),
            threads(order["threads"]),
            torch.set_grad_enabled(order["direction"] != "forward"),
        ):
            row = _CallsInARow(self._function, self._gradients_of, order)
            again = None
            if order["replayed"]:
                data = row.data(seed=0)
                row.run(data, calls=1)  # which makes what this stream needs
                with suppress(Exception):  # what cannot be captured is not verified then, where its launches take longer
                    again = replayed(partial(row.run, data), device)
            self._get_ready(given, order["calls"])
            self._answer(ready=True)
            if (frame := self._frames.receive()) is None:
                return []
            seed = int.from_bytes(frame, "little")
            with no_collection():
                if again:
                    data.draw(seed)
                    again()
                else:
                    row.run(row.data(seed))
                write(self._returned, [bytes_of(torch.cat(row.digests))])
        self._words = sum(map(len, row.digests))
        return row.results

    def _gradients_of(
        self, result: object, given: Sequence[Tensor], douts: Sequence[Tensor | None], retain_graph: bool = False
    ) -> list[Tensor | None]:
        found: list[Tensor] = []
        _structure(result, found, given)
        pairs = [(out, dout) for out, dout in zip(found, douts, strict=True) if dout is not None]
        leaves = [one for one in given if one.requires_grad]
        gradients = iter(self._gradients([out for out, _ in pairs], leaves, [dout for _, dout in pairs], retain_graph))
        return [next(gradients) if one.requires_grad else None for one in given]

    def _get_ready(self, given: Sequence[Tensor], calls: int) -> None:
        """Have memory for the results of so many calls at hand, and a GPU at its clock."""
        device, gradients = given[0].device, [one for one in given if one.requires_grad]
        sizes = [*(before.numel() for _, before in self._last), *(one.nbytes for one in gradients)]
        rooms = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(calls) for size in sizes]
        del rooms
        if device.type == "cuda":
            work, end = torch.ones(2048, 2048, device=device, dtype=torch.float16), time.monotonic() + _WARM_SECONDS
            while time.monotonic() < end:
                work.mm(work)
                wait(device)
        wait(device)

    def _returns(self, result: object, call: _ServedCall) -> dict[str, Any]:
        """Write a result, and what was changed of what was given; return how the judge finds them."""
        found: list[Tensor] = []
        structure = _structure(result, found, call.tensors)
        changed = [
            at for at, (now, kept) in enumerate(zip(call.storages, call.kept, strict=True)) if not torch.equal(now, kept)
        ]
        for at in changed:
            call.kept[at].copy_(call.storages[at])
        released(self._returned)
        write(self._returned, [*map(bytes_of, found), *(call.storages[at] for at in changed)])
        if not call.results:
            call.results[:] = found
        return {"result": structure, "tensors": [_described(one) for one in found], "changed": changed}


class _CallsInARow:
    """Calls on data of which each depends on the one before: what they returned last, and digests of that."""

    def __init__(self, function: Callable[..., Any], gradients_of: Callable[..., Any], order: dict[str, Any]) -> None:
        given, keywords, douts = order["call"]
        self._function, self._gradients_of, self._direction = function, gradients_of, order["direction"]
        self.data = partial(RowData, given, douts, self._direction)
        is_backward, calls = self._direction == "backward", order["calls"]
        self._retains_graph = is_backward and order["replayed"]  # for a graph of a GPU reads what the forward pass saved
        self._outs = [function(*given, **keywords) if is_backward else None for _ in range(calls)]
        out = keywords.get("out")
        self._keywords = [{**keywords, **({} if out is None else {"out": torch.empty_like(out)})} for _ in range(calls)]
        self.results: list[Any] = []
        self.digests: list[Tensor] = []

    def run(self, data: RowData, calls: int | None = None) -> None:
        """Make the calls, or the first of them."""
        self.results.clear()
        self.digests.clear()
        for result, keywords in itertools.islice(zip(self._outs, self._keywords, strict=True), calls):
            given, douts = data.after(self.digests[-1] if self.digests else None)
            if self._direction != "backward":
                result = self._function(*given, **keywords)
                result = keywords.get("out", result)  # where it was given memory to write to
            if self._direction != "forward":
                gradients = self._gradients_of(result, given, douts, self._retains_graph)
                result = gradients if self._direction == "backward" else [result, gradients]
            self.results.append(result)
            found: list[Tensor] = []
            _structure(result, found, ())
            self.digests.append(digest(found))


def _structure(result: object, found: list[Tensor], given: Sequence[Tensor]) -> Any:
    """Return how a result is made up, for JSON. found: gets its tensors."""
    if (several := elements(result)) is not None:
        return {"tuple" if isinstance(result, tuple) else "list": [_structure(one, found, given) for one in several]}
    result = plain("out", result)
    if type(result) in (Tensor, torch.nn.Parameter):
        require_dense("out", result)  # type: ignore[arg-type]
        if result.is_meta:  # type: ignore[attr-defined]
            raise ContractError("out is on meta; expected a device that holds its elements")
        for number, one in enumerate(given):
            if one is result and not one.requires_grad:
                return {"given": number}
        found.append(result)  # type: ignore[arg-type]
        return {"tensor": len(found) - 1}
    if result is None or type(result) in (bool, int, float, str):
        return {"plain": result}
    shape = getattr(result, "shape", None)
    return {"other": [type(result).__module__, type(result).__name__], "has_shape": shape is not None}


def _described(one: Tensor) -> dict[str, Any]:
    dtype = str(one.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(one.shape), "device": str(one.device), "needs_grad": one.requires_grad}


def _raised(error: BaseException) -> dict[str, str]:
    kind, _, said = traceback.format_exception_only(type(error), error)[0].partition(":")
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if f"{_OWN}{os.sep}" not in one.filename]
    return {
        "raised": raised_words(kind, said),
        "text": "".join(traceback.format_list(own or frames)) + "".join(traceback.format_exception_only(type(error), error)),
    }


def _keep_memory() -> None:
    """Have the C library keep what is freed: calls in a row keep their results, and memory that is new takes time."""
    if hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, 32 << 20)  # where it stops growing by itself
        library.mallopt(_TRIM_THRESHOLD, 1 << 30)


def main() -> None:
    """Serve as long as the process lives that has started this one."""
    descriptor = inherited_channel()
    if descriptor is None:
        raise SystemExit("is started by pytest --attn-isolated")
    message = Channel.of_descriptor(os.dup(descriptor)).recv()
    if message is None:
        return
    sys.path[:] = message["path"]
    _keep_memory()
    end = socket.socket(fileno=descriptor)
    _, memory, _, _ = socket.recv_fds(end, 1, 2)
    for one in (descriptor, *memory):
        os.set_inheritable(one, False)
    sent, returned = memory
    CallServer(FrameSocket(end), sent, returned, message["file"]).serve()


if __name__ == "__main__":
    main()
