"""Judgment of a kernel in a running server: other lengths, batches and offsets, again and again.

The first two rounds may compile. From the third on nothing may compile, hold more memory, or make the host wait.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import unlimited_recompiles
from pytest_attn.backends.gradients import gradients_of
from pytest_attn.backends.subject import RefusedError, Subject
from pytest_attn.cases.case import AttentionCase, context_of
from pytest_attn.cases.conclude import conclude
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator
from pytest_attn.cases.judgment import FailureEvidence, Judgment
from pytest_attn.correctness.contract import check_contract
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.guests.steady.compilations import Watch, watching
from pytest_attn.guests.steady.growth import LOOKS, TIMED_FROM, Growth, tracing
from pytest_attn.invariants.invariant import Probe, Tensors
from pytest_attn.latency.work import PeakMemory, first_of
from pytest_attn.reports.lines import count, labeled
from pytest_attn.reports.verdict import Verdict
from pytest_attn.workloads.fields import is_whole
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.workload import Workload

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: lengths beside which kernels are specialized; those of a workload and parts of it are asked, too
_LENGTHS = (17, 16)
_BATCHES = (1, 2, 3, 5)
#: calls of a shape in one round: what is captured in a graph is captured at the second
_CALLS = 2
#: calls in all of which something grows that does grow; seconds after which fewer are enough for tensors, and their rounds;
#: seconds after which nobody waits for the rounds that are timed, unless something else grows
_ENOUGH_CALLS, _ENOUGH, _FEWER_ROUNDS, _SOON = 4096, 30.0, 32, 1.0
_SHOWN = 6
#: copies of a workload's tensors that a device must have room for
_COPIES = 32
#: what CUDA calls where the host waits for a device, as the profiler names it
_WAITS = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize", "CtxSynchronize")
_CALL = "pytest_attn: a call"
_ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
_ADVICE = "compile once for all lengths, as torch.compile(dynamic=True) does; or declare all that there are, as variants=8"


@dataclass(frozen=True)
class Steadiness:
    """The steady state of a kernel.

    shapes: how many were called. calls: of them all. compiled: what was compiled after the warm-up, by shape. seconds: of the
    first call.
    """

    shapes: int
    calls: int
    compiled: tuple[str, ...]
    seconds: float


def check_steady(
    case: AttentionCase,
    fn: Callable[..., Any] | Backend | str,
    variants: int = 3,
    name: str | None = None,
    first_call: float | None = None,
    first_memory: float | None = None,
) -> Steadiness:
    """Call `fn` with other lengths, batches and offsets in rounds: nothing may compile, grow or wait once these are known.

    fn: as for `attn.check`; a callable must take any shape up to that of the workload. variants: at how many shapes it may
    compile after the first call. name: as for `attn.check`. first_call: the CPU seconds that the first call may take at most,
    those of the compilers that it starts included; None for any. first_memory: the bytes of a CUDA device that the first call
    may hold at its peak, beyond what was held before; None for any.

    Returns what was seen. Raises AssertionError where it is not steady; the text names the first shape.
    """
    __tracebackhide__ = True
    if not is_whole(variants, 0):
        raise ValueError(f"attn.check_steady: variants must be a whole number >= 0, got {variants!r}")
    if not (callable(fn) or isinstance(fn, Backend | str)):
        raise TypeError(f"attn.check_steady takes a callable or a backend, got {describe(fn)}")
    for limited, limit, unit in (("first_call", first_call, "seconds"), ("first_memory", first_memory, "bytes")):
        if not (limit is None or (type(limit) in (int, float) and limit > 0)):
            raise ValueError(f"attn.check_steady: {limited} must be a number of {unit} > 0, got {limit!r}")
    subject = case._subject(fn, name)
    return conclude(context_of(case), SteadyEvaluator(subject, case._spec, variants, first_call, first_memory))


class UnsteadyError(Exception):
    """A kernel is not steady; the text says what was seen first, and each of `lines` more of it."""

    def __init__(self, words: str, *lines: tuple[str, str]) -> None:
        super().__init__(words)
        self.lines = lines


# -- shapes ----------------------------------------------------------------------------------------------------------------


def shapes(inputs: Inputs) -> Iterator[Inputs]:
    """Yield the workload's shape, one with another length and batch, then others that change one of them."""
    w = inputs.workload
    yield inputs
    lengths = [w.kv_len - 1, w.kv_len * 3 // 4, w.kv_len // 2 + 1, w.kv_len // 2, *_LENGTHS]
    lengths = list(dict.fromkeys(length for length in lengths if 1 < length < w.kv_len))
    batches = list(dict.fromkeys(batch for batch in (w.batch - 1, *_BATCHES) if 0 < batch < w.batch))
    wanted = [(w.batch, length) for length in lengths] + [(batch, w.kv_len) for batch in batches]
    if lengths and batches:
        wanted[0] = batches[0], lengths[0]
    yield from (_part(inputs, batch, length) for batch, length in wanted)


def _part(inputs: Inputs, batch: int, kv_len: int) -> Inputs:
    w = inputs.workload
    q_len = kv_len if w.q_len == w.kv_len else min(w.q_len, kv_len)
    changed = w.replace(batch=batch, q_len=q_len, kv_len=kv_len, name=None)
    rows = {"q": q_len, "k": kv_len, "v": kv_len, "dout": q_len}
    parts = {name: getattr(inputs, name)[:batch, :, :length].contiguous() for name, length in rows.items()}
    if w.v_in_k:
        parts["v"] = parts["k"][..., : w.v_head_dim]
    return replace(inputs, workload=changed, **parts)


def _words(w: Workload, whole: Workload) -> str:
    length = f"q_len {w.q_len}" if w.q_len == w.kv_len else f"q_len {w.q_len}, kv_len {w.kv_len}"
    return length if w.batch == whole.batch else f"{length}, batch {w.batch}"


def _bound_because(w: Workload) -> str:
    """Say which options of a workload belong to its very shape, "" where none does."""
    bound = {
        "lengths": bool(w.kv_lens or w.q_lens or w.cached),
        "pages": w.kv_pages is not None,
        "bias": bool(w.bias) or w.alibi == "batch",
        "mask": w.band is None,
        "score_mod": w.score_mod is not None,
        "descales": w.is_quantized,
    }
    return ", ".join(name for name, is_bound in bound.items() if is_bound)


# -- calls -----------------------------------------------------------------------------------------------------------------


class Visit:
    """One shape, with the tensors that each call of it is handed: the same. is_view: k and v are parts of a longer buffer."""

    def __init__(self, probe: Probe, whole: Workload, watch: Watch, is_view: bool = False) -> None:
        self._probe, self._watch, self._is_known = probe, watch, False
        self.words = _words(probe.workload, whole) + (", k and v from row 1 on of a longer buffer" if is_view else "")
        given = probe.handed()
        if is_view:
            rows = 1 if probe.spec.layout == "bshd" else 2
            given = replace(given, k=_view(given.k, rows), v=_view(given.v, rows))
        self._given = given

    def calls(self, named: bool = False) -> list[str]:
        """Call the kernel; return what that has compiled. named: for a profiler."""
        probe = self._probe
        self._watch.taken()
        for _ in range(_CALLS):
            with record_function(_CALL) if named else nullcontext():
                result = called(probe, self._given, self._watch)
            if not self._is_known:
                known = Reference(probe.inputs, probe.spec.profile)
                check_contract(result, probe.spec.results, known, probe.workload, probe.spec.layout)
                self._is_known = True
        return self._watch.taken()


def called(probe: Probe, given: Tensors, watch: Watch) -> Any:
    """Call a kernel, backward too where its spec says so; return what it returned."""
    __tracebackhide__ = True
    spec = probe.spec
    leaves = [getattr(given, name).detach() for name in "qkv"]
    if spec.backward:
        leaves = [leaf.requires_grad_(name in spec.leaves) for name, leaf in zip("qkv", leaves, strict=True)]
    with probe.calling(), nullcontext() if spec.backward else torch.no_grad():
        watch.renew()
        result = probe.kernel(*leaves)
        if spec.backward:
            gradients_of([first_of(result)], [leaf for leaf in leaves if leaf.requires_grad], [given.dout])
    return result


def _view(tensor: Tensor, rows: int) -> Tensor:
    sizes = [size + (dim == rows) for dim, size in enumerate(tensor.shape)]
    view = tensor.new_zeros(sizes).narrow(rows, 1, tensor.shape[rows])
    return view.copy_(tensor)


# -- the judgment ----------------------------------------------------------------------------------------------------------


class SteadyEvaluator(Evaluator[Steadiness]):
    """Calls a subject with many shapes, round after round, up to the first thing that is not steady."""

    question, wrong = "steady", Verdict.BROKEN

    def __init__(
        self, subject: Subject, spec: CheckSpec, variants: int, first_call: float | None, first_memory: float | None
    ) -> None:
        self.subject: Subject = subject
        self._first_call, self._first_memory = first_call, first_memory
        self._spec, self._variants, self.workload = spec, variants, spec.workload
        self.doing, self.on = f"calling {subject.name} in other shapes", spec.workload.id
        self._compiled: list[str] = []

    @property
    def evidence(self) -> FailureEvidence:
        return FailureEvidence(self._spec, self.subject)

    def judge(self, context: CaseContext) -> Judgment[Steadiness]:
        __tracebackhide__ = True
        w, executor = self.workload, context.executor.of(self.subject)
        if bound := _bound_because(w):
            return Judgment.refused(self.subject, f"{w.id} has no other shapes: {bound} belong to this one")
        if executor.elsewhere or executor.is_expendable:
            return Judgment.refused(
                self.subject, "what compiles is seen in this process only: leave out ranks, --attn-isolated"
            )
        if _COPIES * w.bytes("backward") > context.machine.memory:
            return Judgment.refused(
                self.subject, f"{_COPIES} shapes of {w.id} do not fit into the device's memory; name a smaller one"
            )
        with watching() as watch, unlimited_recompiles(), KeptSwitches(self._spec.device.type):
            visits = self._visits(context, watch)
            peak, start, computed = PeakMemory(self._spec.device), time.perf_counter(), cpu_seconds()
            with peak:
                made = visits[0].calls()
            seconds, computed = time.perf_counter() - start, cpu_seconds() - computed
            is_uncounted = self._first_memory is not None and self._spec.device.type != "cuda"
            untested = ("first_memory: it is counted on CUDA only",) if is_uncounted else ()
            fields = {"compile_seconds": seconds if made else None, "memory": peak.bytes, "untested": untested}
            facts: Any = {"fields": fields}
            try:
                self._require_modest(seconds, computed, peak.bytes, made)
                rounds, said = self._rounds(visits)
            except UnsteadyError as error:
                lines = [f"not steady: {self.subject.name} ({self.workload.id})", *(labeled(*line) for line in error.lines)]
                return Judgment(Verdict.BROKEN, reason=str(error), text="\n".join(lines), **facts)
        found = Steadiness(len(visits), rounds * len(visits) * _CALLS, tuple(self._compiled), seconds)
        return Judgment(Verdict.HELD, found, said, **facts)

    def _visits(self, context: CaseContext, watch: Watch) -> list[Visit]:
        """Return the shapes that the subject takes, the workload's first."""
        spec = self._spec.for_subject(self.subject)
        inputs = draw_inputs(self.workload, spec.inputs[0], spec.seed, spec.device)
        deadline, found = context.deadline(self.subject), []
        for part in shapes(inputs):
            obstacle = self.subject.is_backend and self.subject.obstacle(part.workload, context.machine, spec.backward)
            if not obstacle:
                probe = Probe(self.subject, replace(spec, workload=part.workload), part, deadline)
                found.append(Visit(probe, self.workload, watch))
        if not (spec.declared.contiguous or self.workload.v_in_k):
            found.append(Visit(Probe(self.subject, spec, inputs, deadline), self.workload, watch, is_view=True))
        return found

    def _require_modest(self, seconds: float, computed: float, memory: int, made: list[str]) -> None:
        """Raise UnsteadyError where the first call has computed for longer, or held more memory, than it may."""
        if self._first_call is not None and computed > self._first_call:
            words = f"the first call takes {computed:.1f} s of CPU, more than first_call={self._first_call:g}"
        elif self._first_memory is not None and memory > self._first_memory:
            words = f"the first call holds {memory:,} bytes of the device, more than first_memory={self._first_memory:,}"
        else:
            return
        compiled = (("compiled", one) for one in made[:_SHOWN])
        raise UnsteadyError(words, ("first call", f"{words}; {seconds:.1f} s on the clock"), *compiled)

    def _rounds(self, visits: list[Visit]) -> tuple[int, str]:
        """Call all in rounds, as many as it takes to tell; return how many, and what could not be told."""
        growth, began = Growth(self._spec.device), time.monotonic()
        with tracing() as begin:
            for number in range(1, LOOKS[-1] + 1):
                if number == LOOKS[0]:
                    growth.begin()
                    begin()
                is_profiled = number == LOOKS[0] + 1 and self._spec.device.type == "cuda"
                watched = waiting_for_nothing() if is_profiled else growth.counting() if number in LOOKS else nullcontext()
                with watched, growth.timing():
                    self._round(number, visits, is_profiled)
                if number in LOOKS:
                    growth.look()
                calls, seconds = number * len(visits) * _CALLS, time.monotonic() - began
                is_seen = number > TIMED_FROM or seconds > _SOON
                is_told = calls >= _ENOUGH_CALLS or (is_seen and not growth.grown)
                if (seconds > _ENOUGH and number >= LOOKS[1]) or (number in LOOKS[1:] and is_told):
                    break
        was_growing = growth.grown
        if calls < _ENOUGH_CALLS:
            growth.keep_large()
        if growth.grown and (calls >= _ENOUGH_CALLS or number >= _FEWER_ROUNDS):
            words = growth.words(calls=len(visits) * _CALLS)[:_SHOWN]
            raise UnsteadyError(f"grows: {words[0]}", *(("grows", one) for one in words))
        return number, f"whether it grows is not known after {_ENOUGH:g} s" if was_growing else ""

    def _round(self, number: int, visits: list[Visit], is_profiled: bool) -> None:
        """Call each shape. Those that a subject declines are left out, but for the workload's."""
        for visit in list(visits):
            self.on = f"{self.workload.id}, at {visit.words}"
            try:
                made = visit.calls(is_profiled)
            except RefusedError:
                if visit is visits[0]:
                    raise
                visits.remove(visit)
                continue
            if made:
                self._note(number, visit.words, "; ".join(made))

    def _note(self, number: int, words: str, made: str) -> None:
        """Note that a shape was compiled for. Raises UnsteadyError where that is one too many, or has been compiled for."""
        self._compiled.append(f"{words}, round {number}: {made}")
        lines = [("compiled", one) for one in self._compiled[-_SHOWN:]]
        if number > 2:
            advice = ("instead", "keep what was compiled for each shape: this was compiled for before, and forgotten")
            raise UnsteadyError(f"compiled again at {words}, in round {number}: {made}", *lines, advice)
        if len(self._compiled) > self._variants:
            allowed = ("allowed", f"variants={self._variants} after the first call; this is one more, and others may follow")
            raise UnsteadyError(f"new kernel at {self._compiled[0]}", *lines, allowed, ("instead", _ADVICE))


def cpu_seconds() -> float:
    """Return the seconds that this process and all that it has started have computed; clocks show others' work as well."""
    return sum(os.times()[:4]) + sum(map(_computed, _started_by("self")))


def _started_by(process: str) -> Iterator[str]:
    """Yield the processes that one has started, and these in turn, as far as they run."""
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in listed.read_text().split():
                yield child
                yield from _started_by(child)


def _computed(process: str) -> float:
    with suppress(OSError, ValueError):
        times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return 0.0


@contextmanager
def waiting_for_nothing() -> Iterator[None]:
    """Raise UnsteadyError at the end where the host has waited for the device in a call within."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said, profile(activities=_ACTIVITIES) as seen:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
    events = [one for one in seen.events() or () if one.device_type.name == "CPU"]
    calls = [one.time_range for one in events if one.name == _CALL]
    waits = [one for one in events if one.name.endswith(_WAITS)]
    within = [one.name for one in waits if any(call.start <= one.time_range.start <= call.end for call in calls)]
    lines = [f"{one.filename}:{one.lineno}" for one in said if "synchronizing CUDA operation" in str(one.message)]
    if within or lines:
        named = ", ".join(dict.fromkeys(within)) or "an operation"
        often = f"{count(max(len(within), len(lines)), 'time')} in {count(len(calls), 'call')}"
        where = [("at", one) for one in list(dict.fromkeys(lines))[:_SHOWN]]
        advice = "keep on the device what decides (no .item(), .tolist(), .cpu(), torch.cuda.synchronize())"
        words = f"the host waits for the device: {named}, {often}"
        raise UnsteadyError(words, ("waits", words), *where, ("instead", advice))
