"""The decision over one latency, from what was recorded, what was measured, and a function that times it in new processes.

The rule by which a p50 is slower is in gate.py. Nothing here knows pytest, and nothing is changed but what is known of the
machine, in `SharedCpu`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pytest_attn.latency.anchors import anchor_hashes
from pytest_attn.latency.baseline_file import (
    Baseline,
    BaselineError,
    BaselineFile,
    Identity,
    find,
    recorded_elsewhere,
    recorded_otherwise,
)
from pytest_attn.latency.gate import Decision, GateContext, Policy, decide, screen, shared_prior
from pytest_attn.latency.protocol import protocol_of
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Prior, Recording, Run
from pytest_attn.reports.lines import compared_by, duration, labeled, said_by_guests, timed_as, z_figure
from pytest_attn.reports.verdict import Cause, Verdict

#: what accepts a slowdown, and what records a case that has no baseline that can be used
ACCEPT = '--attn-update-baselines "why it is slower"'
RECORD = '--attn-update-baselines "first recording"'
_RECORD_ANEW = '--attn-update-baselines "recorded while nothing else computes"'
#: by how much a z may exceed the recorded one, and the peak memory the recorded bytes, before a case is a regression
_Z_RATIO, _Z_MORE = 1.5, 0.25
_MEMORY_RATIO, _MEMORY_MORE = 1.05, 1 << 20
#: slower than the first recording by this many times what counts as slower is said, however it was accepted since
_CREEP = 2.5
_LEVELS = ("one element", "one row", "one head")
_CERTAINTY = "a slowdown of {:.1%} is found in four of five runs; where nothing is slower, at most 1 run in 100 fails"


def with_other_gates(
    decision: Decision, recorded: Baseline, latency: Latency, z: Sequence[float] | None, policy: Policy
) -> Decision:
    """Make a regression of a case that became less accurate or takes more memory; say where small changes add up.

    z: the largest residuals of the check over an element, a row and a head, None where it was not checked here.
    """
    accuracy = (
        f"less accurate: z {z_figure(now)} in {level}, recorded {z_figure(then)}"
        for level, now, then in zip(_LEVELS, z or (), recorded.z or (), strict=False)
        if is_less_accurate(now, then)
    )
    worse = [reason for reason in (_describe_memory(recorded, latency), *accuracy) if reason]
    reasons = [decision.reason] if decision.reason else []
    if worse:
        return replace(decision, verdict=Verdict.REGRESSED, reason="; ".join(reasons + worse))
    if decision.verdict == Verdict.PASSED and (crept := _describe_creep(recorded, decision, policy)):
        return replace(decision, reason=crept)
    return decision


def is_less_accurate(now: float, then: float) -> bool:
    """Return whether a largest z is a worse one."""
    return now > _Z_RATIO * then + _Z_MORE


def takes_more(now: int, then: int) -> bool:
    """Return whether a number of bytes is a larger one."""
    return now - then > max(_MEMORY_MORE, (_MEMORY_RATIO - 1) * then)


def _describe_memory(recorded: Baseline, latency: Latency) -> str:
    if recorded.memory is None or latency.memory is None:
        return ""
    if not takes_more(latency.memory, recorded.memory):
        return ""
    return f"peak memory {latency.memory / 2**20:,.1f} MiB, recorded {recorded.memory / 2**20:,.1f} MiB"


def _describe_creep(recorded: Baseline, decision: Decision, policy: Policy) -> str:
    if len(recorded.history) < 2 or decision.change is None:
        return ""
    date, first, _ = recorded.history[0]
    crept = median(recorded.p50) * (1 + decision.change) / first - 1
    return f"{crept:+.1%} since the first recording on {date}" if crept > _CREEP * policy.slowdown else ""


class FreshError(Exception):
    """New processes did not time what they should have; the text says why."""


class DisturbedError(FreshError):
    """Too many new processes were disturbed; the text says by what."""


class StartError(FreshError):
    """A new process could not run the test at all; the text is the last of what it said."""


@dataclass
class DeviceBaselines:
    """The baselines of one device, as read from their file. problem: why they cannot be used, "" where they can."""

    file: BaselineFile | None = None
    fits: Mapping[str, Recording] | None = None
    prior: Prior | None = None
    problem: str = ""

    @classmethod
    def read(cls, folder: Path, identity: Identity, kind: str) -> DeviceBaselines:
        """Read the file of a machine. A damaged one is a problem of every case, and no error."""
        protocol = protocol_of(kind)
        try:
            file = find(folder, identity, anchor_hashes(kind), protocol)
        except BaselineError as error:
            return cls(problem=str(error))
        try:
            fits = {key: case.fit() for key, case in file.cases.items() if case.protocol == protocol}
        except (ValueError, TypeError) as error:
            return cls(problem=f"{file.path}: is damaged ({error}); restore it from version control")
        return cls(file, fits, shared_prior(list(fits.values()), kind))

    def of(self, key: str) -> Baseline | None:
        """Return what was recorded of a case, of whatever protocol and shape."""
        return self.file.cases.get(key) if self.file else None


@dataclass(frozen=True)
class Measured:
    """One measurement, with all that its baseline must agree with.

    key: of its baseline. shape: the workload's, in full. version: of the library. check, z: what the check before it depended
    on, and the largest residuals that it found. conditions: the soft keys of the machine. gpu: which of those of its name.
    kind: of the device. folder: of the baselines.
    """

    latency: Latency
    key: str
    shape: str
    version: str
    check: str
    z: tuple[float, float, float] | None
    conditions: Mapping[str, str]
    gpu: str
    kind: str
    folder: Path

    @property
    def protocol(self) -> int:
        """Protocol by which it was taken."""
        return protocol_of(self.kind)

    @property
    def launch(self) -> float:
        """Seconds of launching a call, 0 where the host's clock is what was timed."""
        return 0.0 if self.latency.mode == "host" else self.latency.launch


@dataclass
class SharedCpu:
    """Note that a CPU is shared so much that new processes were disturbed as well, when they were last asked."""

    is_there: bool = False


def judge_latency(
    measured: Measured,
    baselines: DeviceBaselines,
    policy: Policy,
    cases: int,
    fresh_runs: Callable[[], Sequence[Run]],
    crowd: SharedCpu,
) -> Decision:
    """Hold a measurement against its baseline.

    policy: what counts as slower. cases: how many the whole suite decides over. fresh_runs: times the case in new processes,
    asked where the one measurement does not decide by itself; raises FreshError. crowd: of the run, kept up to date.
    """
    baseline = baselines.of(measured.key)
    missing = _unusable_because(baseline, baselines, measured)
    if missing or baseline is None or baselines.fits is None or baselines.prior is None:
        return missing or Decision(Verdict.NO_BASELINE)
    is_same_device = measured.kind != "cuda" or measured.gpu == baseline.gpu != ""
    agreed = baseline.conditions == measured.conditions and baseline.version == measured.version
    context = GateContext(baselines.fits[measured.key], baselines.prior, policy, cases, agreed, is_same_device)
    decision, needs_others = _first_look(measured, context, crowd)
    if needs_others:
        try:
            decision = _confirmed(fresh_runs, context)
        except FreshError as error:
            crowd.is_there |= isinstance(error, DisturbedError) and measured.kind == "cpu"
            decision = _unconfirmed(decision, error, policy)
    z = measured.z if baseline.check == measured.check else None
    return with_other_gates(decision, baseline, measured.latency, z, policy)


def _confirmed(fresh_runs: Callable[[], Sequence[Run]], context: GateContext) -> Decision:
    """Return what new processes say; on a shared device others must say so again some time later before a case fails."""
    runs, pause = fresh_runs(), context.policy.pause
    decision = decide(runs, context)
    if decision.verdict != Verdict.REGRESSED or not context.policy.is_shared:
        return decision
    time.sleep(pause)
    later = fresh_runs()
    both = decide([*runs, *later], context)
    if decide(later, context).verdict == Verdict.REGRESSED:
        return both
    return replace(
        both, verdict=Verdict.INCONCLUSIVE, reason=f"new processes {pause:.0f} s later do not confirm that it is slower"
    )


def _first_look(measured: Measured, context: GateContext, crowd: SharedCpu) -> tuple[Decision, bool]:
    """Return what the one measurement says, and whether new processes must be asked."""
    latency = measured.latency
    if latency.disturbances:
        needs_others = measured.kind == "cpu" and not crowd.is_there
        return Decision(Verdict.INCONCLUSIVE, "; ".join(latency.disturbances)), needs_others
    if measured.kind == "cpu":
        crowd.is_there = False
    return screen(Run(latency.p50, latency.anchors, measured.launch), context)


def _unconfirmed(first: Decision, error: FreshError, policy: Policy) -> Decision:
    """Return what becomes of a first look that new processes could not confirm; a disturbed one stays what it is."""
    if first.change is None:
        return first if isinstance(error, DisturbedError) else replace(first, reason=f"{first.reason}; {error}")
    if isinstance(error, StartError):
        verdict = Verdict.UNCONFIRMED if first.change >= policy.slowdown else Verdict.INCONCLUSIVE
        return replace(first, verdict=verdict, reason=str(error))
    return replace(first, verdict=Verdict.INCONCLUSIVE, reason=f"not confirmed: {error}")


def _unusable_because(baseline: Baseline | None, baselines: DeviceBaselines, measured: Measured) -> Decision | None:
    """Return the decision over a case whose baseline is missing or of something else, None where it can be compared."""

    def without(cause: Cause, reason: str) -> Decision:
        remedy = "" if cause is Cause.UNUSABLE_FILE else RECORD
        return Decision(Verdict.NO_BASELINE, reason, cause=cause.value, remedy=remedy)

    if baselines.problem:
        return without(Cause.UNUSABLE_FILE, baselines.problem)
    if baseline is None:
        if measured.folder.is_file():
            return without(Cause.UNUSABLE_FILE, f"{measured.folder}: is a file; --attn-baselines must be a folder")
        if reason := recorded_otherwise(measured.key, baselines.file.cases if baselines.file else ()):
            return without(Cause.RECORDED_OTHERWISE, reason)
        elsewhere = recorded_elsewhere(measured.key, measured.shape, baselines.file, measured.folder)
        return without(Cause.NONE_RECORDED, f"none recorded in {measured.folder}{elsewhere}")
    if baseline.protocol != measured.protocol:
        reason = f"recorded with protocol {baseline.protocol}, this is {measured.protocol}"
        return without(Cause.ANOTHER_PROTOCOL, reason)
    if baseline.shape != measured.shape:
        return without(Cause.ANOTHER_SHAPE, f"recorded for {baseline.shape}, this is {measured.shape}")
    return None


def describe_regression(decision: Decision, recorded: Baseline, latency: Latency) -> str:
    """Return the text of a regression: what changed, and on what evidence."""
    runs = ", ".join(map(duration, decision.runs))
    moved = ", ".join(f"{name} {change:+.1%}" for name, change in (decision.anchors or {}).items())
    span = f"{duration(min(recorded.p50))} to {duration(max(recorded.p50))} in {len(recorded.p50)} processes"
    lines = [
        f"regressed: {latency.subject} on {latency.workload}, {latency.direction}: {describe_change(decision)}",
        labeled("because", decision.reason) if decision.reason else "",
        labeled("runs", f"{duration(latency.p50)} in this process; decided on {runs}"),
        labeled("recorded", f"{span}, {recorded.date}: {recorded.reason}"),
        labeled("controls", f"{moved}: fixed operations that were timed beside it") if moved else "",
        labeled("timed", timed_as(latency.mode, latency.calls, latency.l2)),
        *(labeled(name, text) for name, text in said_by_guests(latency.more)),
        labeled("certainty", _CERTAINTY.format(decision.detectable)) if decision.detectable is not None else "",
    ]
    return "\n".join(line for line in lines if line)


def describe_unconfirmed(name: str, decision: Decision) -> str:
    """Return the text of a time that looks slower, where no new process could confirm that. name: what was timed."""
    return f"looks slower: {name}: {describe_change(decision)}\n{labeled('but', decision.reason)}"


def describe_undecided(name: str, decision: Decision, latency: Latency, command: str) -> str:
    """Return the text of a case over which nothing can be said, where that fails its test. command: what repeats the case."""
    is_inconclusive = decision.verdict == Verdict.INCONCLUSIVE
    is_disturbed = is_inconclusive and decision.change is None  # what was recorded is good, and not to be replaced
    remedy = "" if is_disturbed else _RECORD_ANEW if is_inconclusive else decision.remedy
    otherwise = "auto, which only says so" if decision.cause != Cause.UNUSABLE_FILE else "off, which times nothing"
    lines = [
        f"{decision.verdict}: {name}: {decision.reason}",
        labeled("repeat", f"{command}, when nothing else computes on this machine") if is_inconclusive else "",
        labeled("record", f"{command} {remedy}") if remedy else "",
        labeled("compare", words) if is_inconclusive and latency.threads and (words := compared_by()) else "",
        labeled("or", f"--attn-latency={otherwise}"),
    ]
    return "\n".join(line for line in lines if line)


def describe_change(decision: Decision, other: str = "recorded") -> str:
    """Say what the p50 is, what was recorded, or what else the other is called, and by how much they differ."""
    if not decision.runs or decision.recorded is None or decision.change is None or decision.interval is None:
        return "not compared"
    low, high = decision.interval
    return (
        f"p50 {duration(median(decision.runs))}, {other} {duration(decision.recorded)}"
        f" ({decision.change:+.1%}, 95 % interval {low:+.1%} to {high:+.1%})"
    )
