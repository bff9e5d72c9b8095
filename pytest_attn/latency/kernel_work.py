"""A kernel as what is timed: each call on data of its own, and its results compared with exact attention."""

from __future__ import annotations

import atexit
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.gradients import Gradients
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.correctness.call import glimpse
from pytest_attn.correctness.contract import ContractError, elements, plain
from pytest_attn.correctness.spec import CheckSpec, quantized_by
from pytest_attn.correctness.switches import KeptSwitches, kept_from_running_later
from pytest_attn.latency.exact_results import Attention
from pytest_attn.latency.fresh_data import Places, RandomPool
from pytest_attn.latency.work import DISTRIBUTION, LatencyDirection, Work, WrongResultError, first_of, names_of
from pytest_attn.workloads.inputs import draw_inputs

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class Given(NamedTuple):
    """Places of the data of a call in the random pools."""

    qkv: Places
    dout: Places


class CallResults(NamedTuple):
    """Results of a call, by name, and the places of its data in the random pools."""

    given: Given
    results: dict[str, torch.Tensor]


class Call:
    """One call of a kernel, ready to be made.

    tensors: q, k and v as it is given them. at: their set. given: where its data lie in the pool, where it has no set, in
    which others may still be put.
    """

    def __init__(self, work: KernelWork, tensors: list[torch.Tensor], at: int, given: Given | None) -> None:
        self.tensors, self.at, self._given, self._work = tensors, at, given, work
        self.make: Callable[[], Any] = lambda: None

    def __call__(self) -> Any:
        """Make it."""
        return self.make()

    @property
    def given(self) -> Given:
        """Places of its data in the random pools."""
        return self._given or self._work.given_at(self.at)

    def seen(self, value: Any) -> CallResults:
        """Return what it has just returned, and where the data of that lie."""
        return CallResults(self.given, self._work.results(value))


_AT_EXIT = "the callable had a function of its own called when the process ends"


class _Begun(NamedTuple):
    """A call without dout: q, k and v, their set, their places where they have none, and out where that is not timed."""

    tensors: list[torch.Tensor]
    at: int
    places: Places | None
    out: torch.Tensor | None


#: results that are looked at together
_TURNS = (("out",), ("lse",), ("weights",), ("max",), ("dq",), ("dk", "dv"))
#: seconds of looking at kept results, as a share of all, beyond which, after the fewest, one of so many blocks is looked at
_SHARE_OF_LOOKS, _FEWEST_LOOKS, _BLOCKS_OF_A_LOOK = 0.04, 4, 4


class KernelWork(Work):
    """A kernel in one direction.

    Without sets of tensors a call is given views of the pool, each call others. With sets, whose memory stays, data are copied
    there before each call, on the stream that launches it. tensors, dout: all of them; `Attention` says which part the kernel
    is given. needs_sets: whether it is given a part, or is known to write to q, k or v. chosen: draws the data.
    """

    def __init__(
        self,
        kernel: AttentionFn,
        tensors: list[torch.Tensor],
        dout: torch.Tensor,
        direction: LatencyDirection,
        attention: Attention,
        needs_sets: bool = False,
        chosen: random.Random | None = None,
    ) -> None:
        self.kernel, self.direction, self._attention = kernel, direction, attention
        self._gradients, self.workload = Gradients(), attention.workload
        chosen = chosen or attention.chosen
        self._pool, self._pool_of_dout = RandomPool(tensors, chosen), RandomPool([dout], chosen)
        self.dout, (self._places_of_dout,) = attention.dout(dout).clone(), self._pool_of_dout.draw()
        self.sets: list[list[torch.Tensor]] = []
        self._captured: set[int] = set()  # sets from which graphs of a backward pass start
        self._fewest_sets, self._turn = int(needs_sets), 0
        self.rotate_over(1 if self.device.type == "cuda" else 0)
        self._forward_results = len({*attention.names} - {*names_of("backward")})
        self._kept: CallResults | None = None
        self._room: torch.Tensor | None = None  # for what is kept
        self._turns, self._turn_to_look = [turn for turn in _TURNS if {*turn} & {*attention.names}], 0
        self._told = self._looks = self._unseen = 0
        self._looking, self._made = 0.0, time.perf_counter()
        self._later: KeptSwitches | None = None  # until it is timed
        self._threads, self._exits = set[threading.Thread](), math.inf

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.sets[0] if self.sets else self._pool.at(*self._pool.draw())))

    @property
    def device(self) -> torch.device:
        return self.dout.device

    def rotate_over(self, number: int) -> None:
        """Have `number` sets, each at another offset within its allocation; 0 for views of the pool. No graph starts there."""
        self._captured.clear()
        number = max(self._fewest_sets, number)
        if number != len(self.sets):
            self._sets = self._attention.sets_of(self._pool, number)
            self._own_tensors()

    def move(self) -> None:
        self._sets.move()
        self._own_tensors()
        self.dout = self.dout.clone()

    def given_at(self, at: int) -> Given:
        """Return where what is in a set now lies in the pool."""
        return Given(self._sets.places(at), self._places_of_dout)

    def stage(self, replayed: bool = False) -> Call:
        (call,) = self._staged(1, replayed)
        return call

    def stage_several(self, number: int) -> list[Call]:
        return self._staged(number, replayed=False)

    def _staged(self, number: int, replayed: bool) -> list[Call]:
        begun = [self._begun(replayed) for _ in range(number)]
        if not replayed:
            self._pool_of_dout.move()  # after all forward passes that are not timed, which could prepare gradients
        return [self._finished(one, replayed) for one in begun]

    def _begun(self, replayed: bool) -> _Begun:
        """Do what is not timed of a call, but for dout."""
        self.on_call()
        at, places = 0, None
        if self.sets:
            at = self._turn % len(self.sets)
            tensors = self.sets[at]
            self._turn += 1
            if not replayed and at not in self._captured:
                self._sets.renew([at])
            elif self.direction == "backward":
                self._captured.add(at)
        else:
            places = self._pool.draw_handed()
            tensors = [t.requires_grad_(self.direction != "forward") for t in self._pool.handed(places)]
        return _Begun(tensors, at, places, self._out(tensors) if self.direction == "backward" else None)

    def _finished(self, begun: _Begun, replayed: bool) -> Call:
        """Return the call, with a dout that the forward pass cannot have known."""
        tensors, at, places, out = begun
        if self.direction == "forward":
            call = Call(self, tensors, at, Given(places, self._places_of_dout) if places else None)
            call.make = lambda: self.kernel(*tensors)
            return call
        given = Given(places, self._pool_of_dout.draw_handed()) if places else None
        call = Call(self, tensors, at, given)
        dout = self._next_dout(given)
        if out is None:
            call.make = lambda: self._both(tensors, dout)
        else:
            call.make = lambda: self._gradients([out], tensors, [dout], retain_graph=replayed)
        return call

    def stage_again(self, calls: Sequence[Call]) -> None:
        """Put other data in place for calls that a graph has captured."""
        self.on_call()
        if self.direction != "backward":
            self._sets.renew([call.at for call in calls])
        if self.direction != "forward":
            self._next_dout(None)

    def result(self, value: Any) -> torch.Tensor:
        """Return out, or dq of a backward pass. Raises ContractError for what is not a plain tensor."""
        tensor: torch.Tensor = plain(self._attention.names[0], first_of(value))
        return tensor.detach()

    def results(self, value: Any) -> dict[str, torch.Tensor]:
        """Return what can be looked at of what a call has returned, or of the first of it."""
        several = elements(value)
        if several is None or len(self._attention.names) == 1:
            return {self._attention.names[0]: self.result(value)}
        return {name: plain(name, one).detach() for name, one in zip(self._attention.names, several, strict=False)}

    def verify_call(self, what: str, call: Any, value: Any) -> None:
        """Raise WrongResultError unless what a call returned is attention on its data.

        All of it is looked at the first time; then one result, or dk and dv, in turn.
        """
        self._require_nothing_later(is_warm=False)
        given, results = call.seen(value)
        if self._room is not None:
            self._verify_given(what, given, self._next_of(results))
            return
        sizes = []
        for _ in self._turns:
            turn = self._next_of(results)
            sizes.append(sum(one.nbytes for one in turn.values()))
            self._verify_given(what, given, turn)
        self._room = next(iter(results.values())).new_empty(max(sizes), dtype=torch.uint8)  # before anything is timed

    def begin(self) -> None:
        self._later, self._threads, self._exits = kept_from_running_later(), {*threading.enumerate()}, math.inf

    def glance(self, values: Sequence[Any]) -> Callable[[], object]:
        seen = [self._some_of(value) for value in values]

        def look_again() -> None:
            self._require_nothing_later()
            for one, value in zip(seen, values, strict=True):
                self._require_same(one, self._some_of(value))

        return look_again

    def _require_nothing_later(self, is_warm: bool = True) -> None:
        """Raise ContractError where calls have left behind what runs their code later."""
        if self._later is None:
            return
        exits = atexit._ncallbacks()
        if left := self._later.put_back() or (f"{_AT_EXIT}: restore what it changes" if exits > self._exits else ""):
            raise ContractError(f"while it was timed, {left}")
        if not is_warm:
            self._exits = exits

    def _some_of(self, value: Any) -> dict[str, torch.Tensor]:
        return {name: glimpse(one) for name, one in self._next_of(self.results(value)).items()}

    def _require_same(self, seen: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
        for name, one in seen.items():
            if not torch.equal(one, now[name]):
                new = ", ".join(one.name for one in threading.enumerate() if one not in self._threads)
                raise WrongResultError(
                    f"timed: {name} was written after the call had returned, and its time was taken"
                    f"{f' (threads that came since: {new})' if new else ''}; a call has to wait for what it starts"
                )

    def verify_on(self, what: str, tensors: Sequence[torch.Tensor], dout: torch.Tensor, value: Any) -> None:
        """Raise WrongResultError unless what has its turn of a call's results is attention on these tensors."""
        self._verify(what, tensors, dout, self._next_of(self.results(value)))

    def keep(self, call: Any, value: Any) -> None:
        """Keep a copy of what has its turn: of one of the calls that come here, each as likely as the others."""
        self._told += 1
        if not self._attention.chosen.randrange(self._told):
            self._copy_results(call, value)
        self._pool.move()

    def _copy_results(self, call: Any, value: Any) -> None:
        given, results = call.seen(value)
        results, kept, start = self._next_of(results), {}, 0
        size = sum(one.nbytes for one in results.values())
        if self._room is None or self._room.numel() < size:
            self._room = next(iter(results.values())).new_empty(size, dtype=torch.uint8)
        for name, one in results.items():
            kept[name] = self._room[start : start + one.nbytes].view(one.dtype).view(one.shape).copy_(one)
            start += one.nbytes
        self._kept = CallResults(given, kept)

    def verify_kept(self, is_last: bool = False) -> None:
        """Raise WrongResultError unless the result that was kept is attention on the data of its call, and let go of it.

        Where looking takes long, it stays for a few blocks as one of all calls since, and is looked at if that is the last.
        """
        begun = time.perf_counter()
        is_costly = self._looking > _SHARE_OF_LOOKS * (begun - self._made) and self._looks >= _FEWEST_LOOKS
        self._unseen += 1
        if self._kept is None or (is_costly and self._unseen < _BLOCKS_OF_A_LOOK and not is_last):
            return
        kept, self._kept, self._told, self._unseen = self._kept, None, 0, 0
        self._verify_given("timed", kept.given, kept.results)
        self._looks += 1
        self._looking += time.perf_counter() - begun

    def _out(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        tensor: torch.Tensor = plain("out", first_of(self.kernel(*tensors)))
        return tensor

    def _both(self, tensors: list[torch.Tensor], dout: torch.Tensor) -> Sequence[Any]:
        """Return the results of a forward pass that are looked at, and the gradients."""
        returned = self.kernel(*tensors)
        results = elements(returned) or [returned]
        return *results[: self._forward_results], *self._gradients([plain("out", results[0])], tensors, [dout])

    def _own_tensors(self) -> None:
        """Take the sets for those of the calls."""
        self.sets = self._sets.tensors
        for tensors in self.sets:
            for one in tensors:
                one.requires_grad_(self.direction != "forward")

    def _next_of(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return which results of a call have their turn."""
        turn = {name: results[name] for name in self._turns[self._turn_to_look] if name in results}
        return turn or dict([next(iter(results.items()))])

    def _verify_given(self, what: str, given: Given, results: dict[str, torch.Tensor]) -> None:
        (dout,) = self._pool_of_dout.at(given.dout)
        self._verify(what, self._pool.at(given.qkv), dout, results)

    def _verify(
        self, what: str, tensors: Sequence[torch.Tensor], dout: torch.Tensor, results: dict[str, torch.Tensor]
    ) -> None:
        """Look at results, after which others have their turn, in an order that is drawn once all have had theirs."""
        self._turn_to_look = (self._turn_to_look + 1) % len(self._turns)
        if not self._turn_to_look:
            self._attention.chosen.shuffle(self._turns)
        if fault := self._attention.fault_of(results, tensors, dout):
            how = f"{what}, without gradients" if self.direction == "forward" else what
            raise WrongResultError(f"{how}: its result is not that of the data it was given ({fault})")

    def _next_dout(self, given: Given | None) -> torch.Tensor:
        """Return a call's own dout; where it has none, that of all calls, with other data."""
        if given is not None:
            return self._attention.dout(*self._pool_of_dout.handed(given.dout))
        (self._places_of_dout,) = self._pool_of_dout.draw()
        return self.dout.copy_(self._attention.dout(*self._pool_of_dout.at(self._places_of_dout)))


def work_of(
    subject: Subject,
    spec: CheckSpec,
    direction: LatencyDirection,
    machine: Machine | None = None,
    attention: type[Attention] = Attention,
) -> KernelWork:
    """Return the work of a subject on the spec's workload, in the layout that it takes.

    machine: on which a result that a known defect of the subject explains is not refused. attention: what results must be.
    """
    spec, is_backward = spec.for_subject(subject), direction != "forward"
    inputs = draw_inputs(spec.workload, DISTRIBUTION, spec.seed, spec.device)
    kernel = subject.prepare_timed(inputs, backward=is_backward)
    known = of_timed(subject.defects_on(spec.workload, machine, is_backward)) if machine else []
    quantized = partial(quantized_by, subject) if subject.has_own_inputs else None
    tensors, dout = list(spec.handed(inputs)), spec.in_layout(inputs.dout)
    returned = () if subject.is_backend else spec.declared.timed_results[1:]
    wanted = attention(spec, inputs, direction, quantized, known, ("out", *returned))
    return KernelWork(kernel, tensors, dout, direction, wanted, needs_sets=bool(subject.known_to_change))


def of_timed(defects: Sequence[KnownDefect]) -> list[KnownDefect]:
    """Return those that what is timed can have."""
    return [one for one in defects if not one.invariants and one.inputs in (None, DISTRIBUTION)]
