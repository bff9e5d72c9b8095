"""A callable in a process of its own, as the process sees it that judges: it hands over copies, and believes nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pytest_attn.backends.named import OFFERED, NamedFunction, is_imported_from_a_test
from pytest_attn.backends.raised import EndsTestError, RemoteRaisedError
from pytest_attn.correctness.contract import ContractError, elements
from pytest_attn.guests.isolation.timed_row import WORD
from pytest_attn.guests.isolation.wire import (
    MOST_TEXT,
    FrameSocket,
    GarbageError,
    pickled,
    put,
    read_bytes,
    released,
    shared_memory,
)
from pytest_attn.latency.disturbance import thread_waited
from pytest_attn.latency.work import WrongResultError
from pytest_attn.processes.fork_server import Command, ServerError
from pytest_attn.processes.last_words import end_of_output, ending, last_words
from pytest_attn.processes.launcher import Launcher
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.session.worker_pool import worker_environment
from pytest_attn.workloads.inputs import Inputs

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: seconds that a call may take where --attn-timeout says nothing
SECONDS = 300.0
#: those that a process may take to start, to import a module, beyond those of a call, and to end
_START_SECONDS, _IMPORT_SECONDS, _END_SECONDS = 300.0, 60.0, 5.0
#: those that a measurement may pause, and take
_PAUSE_SECONDS, _MEASURE_SECONDS = 60.0, 1800.0
#: bytes of an answer, and tensors and dimensions in a result
_LONGEST, _MOST_TENSORS, _MOST_DIMENSIONS = 1 << 24, 64, 16
#: bytes that a result may have: so many, and so many times those that were given
_BYTES, _TIMES = 1 << 30, 32
#: dtypes that a result may have, by their names
_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


class IsolatedRaisedError(RemoteRaisedError):
    """The callable raised an exception in its process, or cannot be imported there; the text says it."""


class IsolatedLostError(DeadlineError):
    """The process of a callable has ended, does not answer in time, or answers nothing that can be read; the text says it.

    No `except Exception` of a judgment takes it for an answer of the kernel.
    """


class IsolatedProcess:
    """The process of one function. seconds: how long a call may take. file: of its module, or "". until: by time.monotonic.

    wanted: what the function is handed beside q, k and v. Raises IsolatedRaisedError where it cannot be imported,
    IsolatedLostError.
    """

    def __init__(
        self, name: str, seconds: float, launcher: Launcher, is_forked: bool, file: str = "", until: float = math.inf
    ) -> None:
        self.name, self._seconds, self.is_forked, self._until = name, seconds, is_forked, until
        self._sent, self._returned = shared_memory(), shared_memory()
        self._folder = ProcessFolder()
        path = [os.path.dirname(file), *sys.path] if file else sys.path
        output, message = Path(self._folder.name) / "output", {"path": path, "file": file}
        command = Command([], worker_environment(), Path.cwd(), output, message, "pytest_attn.guests.isolation.call_server")
        self._process = launcher.start(command, is_forked)
        end = socket.socket(fileno=os.dup(self._process.channel.fileno()))
        self._frames = FrameSocket(end)
        with suppress(OSError):  # it has ended, as is soon heard
            socket.send_fds(end, [b"m"], [self._sent, self._returned])
        self._is_closed = False
        self._next_answer("while it started", _START_SECONDS)
        answer = self._answer_to(name.encode(), "while its module was imported", self._seconds + _IMPORT_SECONDS)
        if "unimportable" in answer:
            self.close()
            raise IsolatedRaisedError(_text(answer["unimportable"]))
        self.wanted = tuple(one for one in OFFERED if one in _list(answer.get("wanted"), len(OFFERED)))

    @property
    def is_usable(self) -> bool:
        """True where it can be called."""
        return not self._is_closed and not self._has_ended()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ask(self, text: bytes, tensors: Sequence[Tensor], seconds: float = 0.0) -> tuple[dict[str, Any], list[Tensor]]:
        """Have it do what `pickled` has written; return its answer, and the storages of the tensors as bytes.

        seconds: that it may take where it says meanwhile that it lives, 0 for those of a call.
        Raises ContractError, EndsTestError, NotImplementedError where the function declines, IsolatedRaisedError,
        IsolatedLostError.
        """
        released(self._sent)
        parcel, storages = put(self._sent, tensors)
        answer = self._answer_to(pickle.dumps((parcel, text)), "while it was called")
        end = time.monotonic() + seconds
        while seconds and answer.get("alive") is True:
            if time.monotonic() > end:
                self.give_up(f"no time after {seconds:g} s")
            answer = self._next_answer("while it was timed", self._seconds + _PAUSE_SECONDS)
        for said, kind in (("contract", ContractError), ("stale", WrongResultError), ("declined", NotImplementedError)):
            if said in answer:
                raise kind(_text(answer[said]))
        if "ends" in answer:
            raise EndsTestError(_text(answer["ends"]), _text(answer.get("where", "")))
        if "raised" in answer:
            raised, frames = _text(answer["raised"]), _text(answer.get("text", ""))
            raise IsolatedRaisedError(f"{self.name} raised {raised}\n{frames}".rstrip())
        return answer, storages

    def go(self, seed: int) -> tuple[float, Tensor]:
        """Have it make the calls for which it is ready; return the seconds until their digests are here, and these.

        seed: of what they are given, which it could not know before.
        """
        begun = time.perf_counter()
        words = self._answer_to(seed.to_bytes(WORD, "little"), "while it was called in a row").get("done")
        if type(words) is not int or not 0 <= words <= _LONGEST:
            self.give_up("its process did not make the calls that were asked for")
        (found,) = self.read([words * WORD])
        return time.perf_counter() - begun, found.view(torch.int64)

    def read(self, lengths: Sequence[int]) -> list[Tensor]:
        """Return copies of bytes that it has returned."""
        try:
            return read_bytes(self._returned, lengths)
        except (GarbageError, OSError, RuntimeError, MemoryError) as error:
            self.give_up(f"its process returned {error}")

    def give_up(self, what: str) -> NoReturn:
        """End it, and raise IsolatedLostError."""
        self._close()
        printed = last_words(end_of_output(self._process.command.output, MOST_TEXT), silence="")
        self._folder.cleanup()
        raise IsolatedLostError(f"{self.name}: {what}{printed and f'; its last words: {_text(printed)}'}")

    def close(self) -> None:
        """End it, with what it has started."""
        self._close()
        self._folder.cleanup()

    # -- details -------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._frames.close()
        self._process.kill()
        os.close(self._sent)
        os.close(self._returned)

    def _has_ended(self, seconds: float = 0.0) -> bool:
        try:
            return self._process.returncode(seconds) is not None
        except ServerError:
            return True

    def _answer_to(self, frame: bytes, when: str, seconds: float = 0.0) -> dict[str, Any]:
        with suppress(OSError):  # it has ended, as is soon heard
            self._frames.send(frame, self._seconds)
        return self._next_answer(when, seconds or self._seconds)

    def _next_answer(self, when: str, seconds: float) -> dict[str, Any]:
        end = min(time.monotonic() + seconds, self._until)
        try:
            frame = self._frames.receive(end, _LONGEST, self._has_ended)
        except TimeoutError:
            if end == self._until:
                self.give_up(f"no time is left of the budget, {when}")
            self.give_up(f"no result after {seconds:g} s (--attn-timeout), {when}")
        except (GarbageError, OSError) as error:
            self.give_up(f"its process sent garbage, {when}: {error}")
        except BaseException:
            self.close()
            raise
        if frame is None:
            self.give_up(f"its process {self._end()} {when}")
        try:
            answer = json.loads(frame)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.give_up(f"its process sent garbage, {when}: {len(frame):,} bytes")
        return answer

    def _end(self) -> str:
        if not self._has_ended(_END_SECONDS):
            return "has closed its channel"
        try:
            return ending(self._process.returncode())
        except ServerError:
            return ending(None)


# -- the function ------------------------------------------------------------------------------------------------------------


class IsolatedFunction(NamedFunction):
    """A function whose calls go to a process of its own, which a call that it does not survive replaces by another one."""

    is_isolated = True
    _numbers = itertools.count(1)

    def __init__(
        self,
        name: str,
        seconds: float,
        launcher: Launcher,
        executor: Callable[[IsolatedFunction, Any], Any],
        file: str = "",
        end: float = math.inf,
    ) -> None:
        """Start nothing yet. seconds: a call may take. executor: makes what runs it, in place of that of its case.

        file: of its module, where that is not searched for. end: of all its calls, by time.monotonic.
        """
        super().__init__(name)
        self._seconds, self._launcher, self._executor = seconds, launcher, executor
        self._file, self._end = file, end
        self._process: IsolatedProcess | None = None
        self._recorded: list[Recorded] | None = None
        self._replayed: Recorded | None = None

    def start(self) -> IsolatedProcess:
        """Return its process, a new one where the last has ended.

        Raises IsolatedRaisedError where it cannot be imported, or is in this process as well; IsolatedLostError.
        """
        if self._process is None or not self._process.is_usable:
            _require_absent(self.name)
            if self._process is not None:
                self._process.close()
            self._process = IsolatedProcess(
                self.name, self._seconds, self._launcher, is_forked=True, file=self._file, until=self._end
            )
        return self._process

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.close()

    @property
    def wanted(self) -> Sequence[str]:
        return self.start().wanted

    def executor(self, executor: Any) -> Any:
        return self._executor(self, executor)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        """Hand copies over; return a copy of what it returns, and put what it has changed into what was given."""
        return self._called((q, k, v), given, None)

    def on(self, inputs: Inputs) -> Callable[..., Any]:
        """Return it with what it takes of some inputs; where probabilities are dropped, under torch's seed."""

        def call(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
            offered = {name: getattr(inputs, name) for name in self.wanted}
            return self._called((q, k, v), {**offered, **given}, torch.initial_seed() if inputs.workload.dropout else None)

        return call

    @contextmanager
    def recording(self) -> Iterator[list[Recorded]]:
        """Collect the calls that are made within."""
        found: list[Recorded] = []
        self._recorded = found
        try:
            yield found
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, recorded: Recorded) -> Iterator[None]:
        """Have calls return what is recorded."""
        self._replayed = recorded
        try:
            yield
        finally:
            self._replayed = None

    def measured(self, **order: Any) -> dict[str, Any]:
        """Have it time itself; return what it says."""
        answer, _ = self.start().ask(*pickled({"do": "measure", **order}), _MEASURE_SECONDS)
        claimed = answer.get("latency")
        if not isinstance(claimed, dict):
            self.start().give_up("its process returned garbage")
        return claimed

    def in_a_row(
        self, call: Recorded, direction: str, calls: int, seed: int, is_replayed: bool
    ) -> tuple[float, float | None, Tensor]:
        """Have it make a recorded call again and again, each time on data of which it learns when the time begins: `RowData`.

        is_replayed: from a graph of a GPU, where it can be captured.

        Returns the seconds, by the clock of this process, until digests of all results are here; those for which the thread
        that answers waited for a core, None where the system does not say; and the digests.
        """
        process = self.start()
        order = {"do": "repeat", "call": (call.given, call.keywords, call.douts), "direction": direction, "calls": calls}
        answer, _ = process.ask(*pickled({**order, "replayed": is_replayed, "threads": torch.get_num_threads()}))
        if answer.get("ready") is not True:
            process.give_up("its process returned garbage")
        waited = thread_waited(process.pid)
        seconds, digests = process.go(seed)
        waited = thread_waited(process.pid) - waited
        is_seen = Path(f"/proc/{process.pid}/schedstat").exists()
        return seconds, waited if is_seen else None, digests

    def _called(self, given: tuple[Tensor, ...], keywords: dict[str, Any], seed: int | None) -> Any:
        if self._replayed is not None:
            result = self._replayed.again(given)
            return keywords["out"].copy_(result) if "out" in keywords else result
        grad = torch.is_grad_enabled()
        threads = torch.get_num_threads()
        order = {"do": "call", "given": given, "keywords": keywords, "seed": seed, "grad": grad, "threads": threads}
        call = IsolatedCall(self.start(), {**order, "number": next(self._numbers)})
        if self._recorded is not None:
            self._recorded.append(Recorded(given, keywords, call))
        if grad and any(tensor.requires_grad for tensor in call.tensors):
            return call.built(_Differentiable.apply(call, *call.tensors))  # type: ignore[no-untyped-call]
        return call.built(call.forward())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: IsolatedCall, *_: Tensor) -> Any:
        ctx.call = call
        results = call.forward()
        ctx.hides_casts = call.casts
        ctx.mark_non_differentiable(*(one for one, needs in zip(results, call.needs_grad, strict=True) if not needs))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        return None, *ctx.call.backward(douts)


class IsolatedCall:
    """One call. tensors: all that it is given. needs_grad: which of the tensors that it returns need a gradient.

    casts: whether the graph of one may round dP, as its process says.
    """

    def __init__(self, process: IsolatedProcess, order: dict[str, Any]) -> None:
        self._process, self._number = process, order["number"]
        try:
            self._text, self.tensors = pickled(order)
        except Exception as error:
            raise IsolatedRaisedError(
                f"{process.name}: its process cannot be told of this workload: {error}; define masks and score_mods at the top"
                " of a module"
            ) from None
        self.needs_grad: list[bool] = []
        self.casts = False
        self.douts: Sequence[Tensor | None] = ()
        self.known: Sequence[Tensor | None] | None = None  # gradients that a replay returns
        self._storages: list[Tensor] = []
        self._structure: Any = None

    def forward(self) -> list[Tensor]:
        """Return the tensors that it returns."""
        answer, self._storages = self._process.ask(self._text, self.tensors)
        self.casts = answer.get("casts") is True
        return self._results(answer)

    def backward(self, douts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of all that was given, None where there is none."""
        if self.known is not None:
            return self.known
        self.douts = douts
        text, tensors = pickled({"do": "backward", "number": self._number, "douts": list(douts)})
        answer, _ = self._process.ask(text, tensors)
        gradients: Sequence[Tensor | None] = self.built(self._results(answer))
        if not isinstance(gradients, list) or len(gradients) != len(self.tensors):
            self._process.give_up("its process returned other gradients than were asked for")
        return gradients

    def fetched(self, number: int) -> tuple[Any, list[Tensor]]:
        """Return the result of one of the calls that were made in a row, and the tensors in it."""
        text, tensors = pickled({"do": "result", "number": number})
        answer, _ = self._process.ask(text, tensors)
        results = self._results(answer)
        return self.built(results), results

    def built(self, results: Sequence[Tensor]) -> Any:
        """Return what the function has returned. results: the tensors in it."""
        try:
            return _built(self._structure, results, self.tensors)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            self.give_up()

    def give_up(self) -> NoReturn:
        """End the process, which returns garbage."""
        self._process.give_up("its process returned garbage")

    def _results(self, answer: dict[str, Any]) -> list[Tensor]:
        """Return copies of the tensors of an answer, and put what was changed into what was given."""
        most = _BYTES + _TIMES * sum(one.numel() for one in self._storages)
        try:
            described = [_described(one) for one in _list(answer["tensors"], _MOST_TENSORS)]
            changed = [self._storages[at] for at in dict.fromkeys(_list(answer["changed"], len(self._storages)))]
            lengths = [math.prod(size) * dtype.itemsize for dtype, size, _, _ in described]
            if sum(lengths) > most:
                raise ValueError(f"{sum(lengths):,} bytes; at most {most:,} are taken")
        except (LookupError, TypeError, ValueError) as error:
            self._process.give_up(f"its process returned garbage: {_text(error)}")
        read = self._process.read([*lengths, *(one.numel() for one in changed)])
        for given, now in zip(changed, read[len(lengths) :], strict=True):
            given.copy_(now)
        self._structure, self.needs_grad = answer.get("result"), [needs_grad for *_, needs_grad in described]
        device = self.tensors[0].device
        results = []
        for (dtype, size, is_host, _), one in zip(described, read, strict=False):
            made = one.view(dtype).view(size) if one.numel() else torch.empty(size, dtype=dtype)
            results.append(made if is_host else made.to(device))
        return results


class Recorded:
    """A call that was made once, with what it was given. result, gradients: in their place when it is made again."""

    def __init__(self, given: tuple[Tensor, ...], keywords: dict[str, Any], call: IsolatedCall) -> None:
        self.given, self.keywords, self.call = given, keywords, call
        self.result: Any = None
        self.gradients: list[Tensor | None] = []

    @property
    def douts(self) -> list[Tensor | None]:
        """What its backward pass was given."""
        return [*self.call.douts]

    def keep(self, fetched: Any, direction: str) -> None:
        """Keep what it has returned in a direction: of both, a list of the result and the gradients."""
        if direction == "forward":
            self.result = fetched
            return
        try:
            self.result, gradients = fetched if direction == "forward+backward" else (None, fetched)
            self.gradients = [*gradients]
        except (TypeError, ValueError):
            self.call.give_up()
        self.call.known = [*self.gradients, *[None] * (len(self.call.tensors) - len(self.given))]

    def again(self, given: tuple[Tensor, ...]) -> Any:
        """Return the result, which has the gradients that are kept."""
        if not self.call.douts:
            return self.result
        at, dout = next((at, dout) for at, dout in enumerate(self.call.douts) if dout is not None)
        several = elements(self.result)
        parts = [self.result] if several is None else [*several]
        places = [place for place, one in enumerate(parts) if isinstance(one, Tensor)]
        if at >= len(places) or parts[places[at]].shape != dout.shape:
            self.call.give_up()
        parts[places[at]] = _Replayed.apply(self, parts[places[at]], *given)  # type: ignore[no-untyped-call]
        return parts[0] if several is None else tuple(parts)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: Recorded, result: Tensor, *given: Tensor) -> Tensor:
        ctx.recorded = recorded
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *ctx.recorded.gradients


def _described(one: Any) -> tuple[torch.dtype, tuple[int, ...], bool, bool]:
    """Return what was said of a tensor: dtype, size, whether it is the host's, and whether it needs a gradient."""
    size = tuple(_list(one["size"], _MOST_DIMENSIONS))
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in size):
        raise ValueError(f"a size of {size}")
    return _DTYPES[one["dtype"]], size, one["device"] == "cpu", one["needs_grad"] is True


def _built(structure: Any, results: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    ((kind, value),) = [(kind, value) for kind, value in structure.items() if kind != "has_shape"]
    if kind == "tensor":
        return results[value]
    if kind == "given":
        return given[value]
    if kind in ("tuple", "list"):
        parts = [_built(one, results, given) for one in _list(value, _MOST_TENSORS)]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "plain":
        return value
    module, name = map(_text, _list(value, 2))
    shape = {"shape": ()} if structure["has_shape"] else {}
    return type(name, (), {"__module__": module, **shape})()  # what messages describe in its place


def _list(value: Any, most: int) -> list[Any]:
    """Return a list of at most so many elements. Raises ValueError for anything else."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"no list of at most {most}")
    return value


def _text(value: object) -> str:
    """Return text that a terminal can show."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(value)[:MOST_TEXT])


def _require_absent(name: str) -> None:
    """Raise IsolatedRaisedError where the module of a function is imported here, and is none that is installed."""
    module = name.partition(":")[0]
    if is_imported_from_a_test(module):
        raise IsolatedRaisedError(
            f"{name}: {module} is imported in the process that judges, too, which --attn-isolated is to keep its code out of:"
            " import it in no test or conftest"
        )
