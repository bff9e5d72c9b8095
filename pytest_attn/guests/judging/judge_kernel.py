"""`pytest_attn.judge`: one verdict on a kernel and all workloads that it is to take, as data, within a budget of seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.backends.declaration import Declared
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.raised import EndsTestError, RemoteRaisedError, message_of
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.api import declaration_of, judged_in_words, takes_declaration, timed
from pytest_attn.correctness import mismatch_text
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import Kernel
from pytest_attn.correctness.known_pair import JudgeChangedError
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.correctness.switches import RUNS_ELSEWHERE
from pytest_attn.diagnosis.diagnose import Context, judged
from pytest_attn.guests.isolation.isolated_executor import time_isolated
from pytest_attn.guests.isolation.isolated_function import IsolatedFunction
from pytest_attn.guests.judging.answers import BUDGET, SCHEMA, WRONG, Z_LEVELS, require_feedback, workloads_of
from pytest_attn.guests.judging.candidate import isolated as in_own_process
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.invariants.report import InvariantReport, describe_invariants
from pytest_attn.latency.kernel_work import KernelWork
from pytest_attn.latency.profiler import ceilings_of
from pytest_attn.latency.protocol import stopwatch_of
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import LatencyDirection, StaleError
from pytest_attn.reports.lines import raised_words
from pytest_attn.reports.records import named_numbers
from pytest_attn.reports.verdict import LONG_SUMS, Verdict
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.session.option_types import RANDOM, random_seed
from pytest_attn.workloads.workload import Direction, Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: held by a thread that judges: what another turns meanwhile, as a seed, would be laid to its kernel
_ALONE = threading.RLock()

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


class NotJudged(NamedTuple):
    """A part of a workload that was not judged, and why."""

    what: str
    why: str


class Time(NamedTuple):
    """A time of a kernel. peak: the least seconds that the device's measured FLOP/s and bytes/s allow."""

    latency: Latency
    peak: float

    def as_dict(self) -> dict[str, Any]:
        """Return builtin types."""
        latency = self.latency
        return {
            "direction": latency.direction,
            "p50": latency.p50,
            "interval": [latency.interval.low, latency.interval.high],
            "share_of_peak": self.peak / latency.p50,
            "disturbances": [*latency.disturbances],
        }


@dataclass(frozen=True)
class WorkloadJudgment:
    """The findings on one workload.

    verdict: PASSED; SKIPPED of what could not be judged; else what is wrong. said: what the kernel did in place of returning
    a result, or how its process ended. text: what is wrong with its numbers. times: none where it was not timed.
    """

    workload: Workload
    verdict: Verdict
    said: str = ""
    text: str = ""
    faults: tuple[str, ...] = ()
    comparison: Comparison | None = None
    invariants: InvariantReport | None = None
    times: tuple[Time, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()

    def as_dict(self, feedback: str) -> dict[str, Any]:
        """Return builtin types, as much of them as `feedback` gives back."""
        rows = self.comparison.tensors if self.comparison else ()
        shown: dict[str, Any] = {
            "workload": self.workload.id,
            "verdict": self.verdict.value,
            "times": [one.as_dict() for one in self.times],
            "not_judged": [one._asdict() for one in self.not_judged],
        }
        if feedback == "verdict":
            return shown
        levels = Z_LEVELS if feedback == "full" else ()
        findings = self.invariants.applied if self.invariants else ()
        shown |= {
            "said": self.said,
            "faults": list(self.faults),
            "outputs": [{name: getattr(row, name) for name in ("name", "distribution", "passed", *levels)} for row in rows],
            "invariants": {one.invariant: one.outcome for one in findings},
        }
        return shown if feedback == "cause" else {**shown, "text": self.text}


@dataclass(frozen=True)
class Judgment:
    """The verdict on a kernel.

    Args:
        subject: what it is called.
        device: on which it was judged.
        machine: the name of that device.
        seed: of the inputs.
        seconds: that it took.
        workloads: the findings on each.
        unjudged: why nothing could be judged, "" where something was.
    """

    subject: str
    device: str
    machine: str
    seed: int
    seconds: float
    workloads: tuple[WorkloadJudgment, ...]
    unjudged: str = ""

    @property
    def right(self) -> bool | None:
        """Whether the kernel is right on all workloads; None where it is wrong on none, and not judged on some."""
        verdicts = [one.verdict for one in self.workloads]
        if any(verdict in WRONG for verdict in verdicts):
            return False
        return True if verdicts and all(verdict == Verdict.PASSED for verdict in verdicts) else None

    @property
    def exit_code(self) -> int:
        """0 where the kernel is right, 1 where it is wrong, 2 where that is not known."""
        return {True: 0, False: 1, None: 2}[self.right]

    def as_dict(self, feedback: str = "full") -> dict[str, Any]:
        """Return builtin types, as the schema `judgment.json` describes them.

        feedback: "verdict" gives back what is right and how fast; "cause" also which outputs and invariants are wrong, and
        the identities of faults, but no number that depends on exact attention; "full" all.
        """
        require_feedback(feedback)
        found = {
            "schema": SCHEMA,
            "right": self.right,
            "subject": self.subject,
            "device": self.device,
            "machine": self.machine,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "feedback": feedback,
            "unjudged": self.unjudged,
            "workloads": [one.as_dict(feedback) for one in self.workloads],
        }
        named: dict[str, Any] = named_numbers(found)
        return named


@takes_declaration
def judge(
    fn_or_source: Callable[..., Any] | str,
    workload_or_group: Workload | str | Mapping[str, Any] | Sequence[Workload | str | Mapping[str, Any]],
    *,
    isolated: bool = True,
    measure: bool = False,
    seed: int | str = RANDOM,
    budget_s: float = BUDGET,
    backward: bool = False,
    device: str = "auto",
    feedback: str = "full",
    **declared: Unpack[Declared],
) -> Judgment:
    """Judge a kernel on workloads: exact attention, then invariants, then its time; nothing that it does is raised.

    Threads take turns.

    Args:
        fn_or_source: "FILE.py:FUNCTION", "module:FUNCTION" or the text of a file, whose function is `attention`; with
            isolated=False what `check` takes.
        workload_or_group: a `Workload`, a name of the catalog, a WORKLOADS.jsonl of flashinfer-trace, or several.
        isolated: run the kernel in a process of its own; none of its code runs in this one.
        measure: time it on each workload on which it is right; with `backward` also with gradients.
        seed: of the inputs; "random" draws one, which the judgment says.
        budget_s: seconds after which a process of the kernel is ended, and nothing more is begun.
        backward: compare and time dq, dk and dv as well.
        device: as for `check`.
        feedback: as for `Judgment.as_dict`; with "verdict" no explanation is looked for.
        **declared: what the kernel says of itself (`Declaration`).

    Returns:
        The judgment.

    Raises:
        ValueError: there is no such file or workload, or an argument is none of the known.
        RuntimeError: with isolated=False, the kernel has changed its judge.
    """
    require_feedback(feedback)
    if type(budget_s) not in (int, float) or not 0 < budget_s < math.inf:
        raise ValueError(f"judge: budget_s must be a number of seconds > 0, got {budget_s!r}")
    number: Any = int(random_seed()) if seed == RANDOM else seed
    where, made = resolve_device(device), declaration_of(judge, declared)
    specs = [CheckSpec(one, where, backward, declared=made, seed=number) for one in workloads_of(workload_or_group)]
    with _ALONE:
        begun = time.monotonic()
        if measure:  # before any code of the kernel could make the device slower
            for dtype in {spec.workload.out_dtype for spec in specs}:
                ceilings_of(where, dtype)
        judging = _Judging(begun + budget_s, measure, feedback != "verdict")
        with in_own_process(fn_or_source, judging.end) if isolated else nullcontext(fn_or_source) as target:
            subjects = [spec.subject(Registry(), target) for spec in specs]
            unjudged, found = copy_context().run(judging.all, subjects, specs)
        seconds = time.monotonic() - begun
    return Judgment(subjects[0].name, str(where), machine_of(where).name, number, seconds, found, unjudged)


class _Judging:
    """One judgment that is made. end: of it, by time.monotonic."""

    def __init__(self, end: float, measures: bool, explains: bool) -> None:
        self.end, self._measures, self._explains = end, measures, explains

    def all(self, subjects: Sequence[Subject], specs: Sequence[CheckSpec]) -> tuple[str, tuple[WorkloadJudgment, ...]]:
        """Judge a kernel as the subject of each spec; return why nothing could be judged, and the findings."""
        if isinstance(function := subjects[0].named, IsolatedFunction):
            RUNS_ELSEWHERE.set(True)
            try:
                function.start()
            except (RemoteRaisedError, DeadlineError) as error:
                return str(error), ()
        return "", tuple(map(self._on, subjects, specs))

    @property
    def _left(self) -> float:
        return self.end - time.monotonic()

    def _on(self, subject: Subject, spec: CheckSpec) -> WorkloadJudgment:
        """Judge a kernel on one workload."""
        w = spec.workload
        if self._left <= 0:
            return _skipped(w, "no time is left of the budget")
        try:
            return self._judged(subject, spec)
        except NotImplementedError as error:
            return _skipped(w, str(error))
        except ContractError as error:
            return WorkloadJudgment(w, Verdict.MISMATCH, str(error), faults=(error.fault,) if error.fault else ())
        except StaleError as error:
            said = str(error).partition(" (")[0]  # what follows is how far it is off
            return WorkloadJudgment(w, Verdict.MISMATCH, said, str(error))
        except (EndsTestError, RemoteRaisedError) as error:
            return WorkloadJudgment(w, Verdict.RAISED, str(error))
        except DeadlineError as error:
            return self._lost(w, error)
        except JudgeChangedError:
            raise
        except Exception as error:
            if subject.named:  # none of the kernel's code runs here: it is the judge's own
                raise
            if subject.is_backend and isinstance(error, ValueError):  # it refuses the workload
                return _skipped(w, str(error))
            return WorkloadJudgment(w, Verdict.RAISED, raised_words(type(error).__name__, message_of(error)))

    def _lost(self, w: Workload, error: DeadlineError) -> WorkloadJudgment:
        """Return what it means that a process has ended: nothing is known of a kernel that the budget has ended."""
        return _skipped(w, str(error)) if self._left <= 0 else WorkloadJudgment(w, Verdict.NO_RESULT, str(error))

    def _judged(self, subject: Subject, spec: CheckSpec) -> WorkloadJudgment:
        w, references = spec.workload, ReferenceCache()
        comparison = judged_in_words(subject, spec, lambda: self._compared(subject, spec, references))
        facts: dict[str, Any] = {"comparison": comparison, "faults": comparison.faults}
        if not comparison.passed:
            return WorkloadJudgment(w, Verdict.MISMATCH, text=mismatch_text.describe(comparison), **facts)
        report = judged_in_words(subject, spec, lambda: judge_invariants(subject, spec, references))
        facts |= {"invariants": report, "not_judged": _not_judged(spec, comparison, report)}
        if not report.passed:
            return WorkloadJudgment(w, Verdict.BROKEN, text=describe_invariants(report), **facts)
        right = WorkloadJudgment(w, Verdict.PASSED, **facts)
        return self._with_times(right, subject, spec) if self._measures else right

    def _compared(self, subject: Subject, spec: CheckSpec, references: ReferenceCache) -> Comparison:
        context = Context(references, diagnosis_timeout=max(self._left, 1.0))
        if not self._explains:
            context = replace(context, is_known=lambda comparison: True)
        return judged(Kernel(subject, spec), context)

    def _with_times(self, found: WorkloadJudgment, subject: Subject, spec: CheckSpec) -> WorkloadJudgment:
        """Add the times of what was judged right, without gradients and, if asked, with; none that could not be verified."""
        function, w = subject.named, spec.workload

        def take(work: KernelWork) -> Latency:
            if isinstance(function, IsolatedFunction):
                return time_isolated(function, subject, spec, work, None, True)
            return stopwatch_of(spec.device).measure(work, w.id, subject.name)

        flops, nbytes = ceilings_of(spec.device, w.out_dtype)
        passes: tuple[Direction, ...] = ("forward", "backward") if spec.backward else ("forward",)
        directions: tuple[LatencyDirection, ...] = ("forward", "forward+backward")
        floors = [max(w.flops(one) / flops, w.bytes(one) / nbytes) for one in passes]
        for number, direction in enumerate(directions[: len(passes)], 1):
            latency = timed(subject, spec, direction, take)
            if latency.decision is None:
                found = replace(found, times=(*found.times, Time(latency, sum(floors[:number]))))
            else:
                found = replace(found, not_judged=(*found.not_judged, NotJudged(direction, latency.decision.reason)))
        return found


def _skipped(w: Workload, why: str) -> WorkloadJudgment:
    return WorkloadJudgment(w, Verdict.SKIPPED, not_judged=(NotJudged("all", why),))


#: why a check that passed could not see an option, or what else it could not see
_WITHOUT = "exact attention without it is also within every limit"
_UNTESTED = {LONG_SUMS: "sums in a half precision show over 2,048 keys and more"}


def _not_judged(spec: CheckSpec, comparison: Comparison, report: InvariantReport) -> tuple[NotJudged, ...]:
    """Return what a judgment that passed has not looked at."""
    found = [NotJudged(one["invariant"], one["reason"]) for one in report.inapplicable]
    found += [NotJudged(one, _UNTESTED.get(one, _WITHOUT)) for one in comparison.untested]
    found += [NotJudged(*one.split(": ", 1)) for one in comparison.unjudged]
    found += [NotJudged(name, f"{some} of {every} were compared") for name, (some, every) in comparison.sampled.items()]
    if not spec.backward:
        found.append(NotJudged("dq, dk, dv", "backward=True was not asked for"))
    return tuple(found)
