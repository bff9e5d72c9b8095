"""Gate against slower kernels: the runs of today's new processes against the recorded ones, case by case.

One run is one process: samples within a process agree far better than processes do, so a process counts as one value.
Values are logarithms of p50s, adjusted for what the anchors say of the machine; their variance is moderated across cases
(latency/statistics.py). A case is regressed when its slowdown is certain at a suite-wide false-alarm rate, large enough to
matter, and seen in nearly every run. On a device that others may share unseen, a CPU, the times as they are and those
relative to attention like it must both say so. docs/explanation/gate.md has the rule, docs/results/latency.md its measured
rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, variance
from typing import Any

from pytest_attn.latency.disturbance import REFERENCE_LOOP
from pytest_attn.latency.statistics import SENSITIVITY_SD, Prior, Recording, Run, moderated, prior_of
from pytest_attn.reports.student import t_quantile, t_tail
from pytest_attn.reports.verdict import Verdict

#: the fewest new processes whose runs make a baseline
FEWEST_RUNS = 10
#: probability with which a suite without any slowdown shows a regression
SUITE_ALPHA = 0.01
#: one-sided, of the first run: "no slower" is rejected below it, and so is "slower by what fails"; see `screen`
_SCREEN_ALPHA = 0.02
_BOUND_ALPHA = 0.05
#: by how much launching a call may exceed the slowest recorded one: as a factor, and in seconds
_LAUNCH_RATIO, _LAUNCH_MORE = 2.0, 100e-6
#: variance of a case without other data, with the weight of so many degrees of freedom
_DEFAULT_PRIOR = {"cuda": Prior(0.003**2, 4.0), "cpu": Prior(0.03**2, 4.0)}


@dataclass(frozen=True)
class Policy:
    """Rules of what counts as slower.

    slowdown: share below which no change fails. floor: the same in seconds. runs: new processes that confirm a suspect.
    anchors: by how much, as a share, anchors may have moved before nothing can be said. between: how far, as a share (a
    standard deviation), two devices of one name differ in a kernel's time, or two hours of a shared one. is_shared: whether
    others may slow a kernel where no counter tells of them; then new processes must show a slowdown again, `pause` seconds
    later.
    """

    slowdown: float
    floor: float
    runs: int
    anchors: float
    between: float = 0.0
    is_shared: bool = False
    pause: float = 0.0
    #: a case passes where a slowdown of this many times `slowdown` is excluded
    margin: float = 2.5
    alpha: float = SUITE_ALPHA


POLICIES = {
    "cuda": Policy(0.02, 0.2e-6, 3, 0.10, between=0.01),
    "cpu": Policy(0.10, 5e-6, 3, 0.10, between=0.05, is_shared=True, pause=10.0),
}


def policy_for(kind: str) -> Policy:
    """Return the default policy of a type of device."""
    return POLICIES.get(kind, POLICIES["cpu"])


@dataclass(frozen=True)
class Decision:
    """Verdict of the gate on one case.

    verdict: one of those of a latency (reports/verdict.py). change: adjusted change of the p50, as a share;
    interval: its 95 % bounds. detectable: the smallest slowdown that would be found in four of five suites. recorded: the
    median of the baseline's p50s, runs: p50s of the processes that were decided on, in seconds. anchors: their changes.
    """

    verdict: Verdict
    reason: str = ""
    change: float | None = None
    interval: tuple[float, float] | None = None
    detectable: float | None = None
    recorded: float | None = None
    runs: tuple[float, ...] = ()
    anchors: Mapping[str, float] | None = None
    is_faster: bool = False
    cause: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types."""
        return {**asdict(self), "verdict": self.verdict.value, "anchors": dict(self.anchors or {})}


def shared_prior(fits: Sequence[Recording], kind: str) -> Prior:
    """Return what the scatter of all recorded cases says of the scatter of one."""
    usable = [f for f in fits if len(f.values) >= FEWEST_RUNS]
    if len(usable) < 3:
        return _DEFAULT_PRIOR.get(kind, _DEFAULT_PRIOR["cpu"])
    return prior_of([f.variance for f in usable], usable[0].degrees)


@dataclass(frozen=True)
class GateContext:
    """Recording that runs are compared with.

    recorded, prior: of the baseline. cases: how many the whole suite decides over. agreed: whether the soft keys of the
    machine are those of the recording; where not, the anchors must be, too. is_same_device: whether it is the very device of
    the recording; another of its name may be faster or slower by itself.
    """

    recorded: Recording
    prior: Prior
    policy: Policy
    cases: int
    agreed: bool = True
    is_same_device: bool = True


def decide(runs: Sequence[Run], context: GateContext) -> Decision:
    """Decide over the runs of new processes."""
    return _agreed([_decision_from(_Figures(runs, view), view) for view in _views(context)])


def screen(run: Run, context: GateContext) -> tuple[Decision, bool]:
    """Look at the one run of this process; return what it says and whether new processes must confirm it.

    They must in three cases: the run is slower by what can fail; it is slower for sure, and may be by so much; it does
    not pass by itself.
    """
    looks = [_screen(run, view) for view in _views(context)]
    return _agreed([decision for decision, _ in looks]), any(is_suspect for _, is_suspect in looks)


def _views(context: GateContext) -> list[GateContext]:
    """Return how the recording is looked at: relative to its controls; on a shared device also as it was timed."""
    as_timed = replace(context, recorded=context.recorded.as_timed())
    return [context, as_timed] if context.policy.is_shared else [context]


def _agreed(decisions: Sequence[Decision]) -> Decision:
    """Return the decision on which all views agree; else the case is inconclusive."""
    first = decisions[0]
    undecided = next((one for one in decisions if one.verdict == Verdict.INCONCLUSIVE), None)
    if undecided is None and any(one.verdict != first.verdict for one in decisions):
        changes = " and ".join(f"{one.change:+.1%}" for one in decisions)
        undecided = replace(
            first, verdict=Verdict.INCONCLUSIVE, reason=f"relative to its control and as timed it changed by {changes}"
        )
    is_faster = all(one.is_faster for one in decisions)
    return replace(undecided or first, is_faster=is_faster)


def _screen(run: Run, context: GateContext) -> tuple[Decision, bool]:
    figures = _Figures([run], context)
    at_most = figures.change + t_quantile(_SCREEN_ALPHA, figures.degrees) * figures.scatter
    may_fail = at_most >= figures.can_fail
    decision = _decision_from(figures, context)
    if decision.verdict == Verdict.INCONCLUSIVE:  # on another device, others of its processes may know no better
        return decision, context.is_same_device or may_fail
    is_slower = figures.tail < _SCREEN_ALPHA and may_fail
    return decision, figures.change >= figures.can_fail or is_slower or decision.verdict == Verdict.REGRESSED


def _decision_from(figures: _Figures, context: GateContext) -> Decision:
    recorded, policy = context.recorded, context.policy
    doubt = _anchor_doubt(figures.drift, recorded, policy, context.agreed)
    slower = Verdict.INCONCLUSIVE if doubt else Verdict.REGRESSED
    if launches := _slower_launches(figures.runs, recorded.runs):
        return figures.decision(slower, doubt or launches)
    if figures.change >= figures.least and figures.is_certain:
        return figures.decision(slower, doubt)
    if doubt and (policy.is_shared or math.expm1(figures.change) >= policy.slowdown):
        return figures.decision(Verdict.INCONCLUSIVE, doubt)
    if math.expm1(figures.upper) < _relevant(policy.margin * policy.slowdown, recorded, policy):
        return figures.decision(Verdict.PASSED)
    reason = f"a slowdown of {policy.margin * policy.slowdown:.0%} cannot be excluded"
    reason += "" if context.is_same_device else "; not known to be recorded on this very device"
    return figures.decision(Verdict.INCONCLUSIVE, doubt or reason)


def _slower_launches(now: Sequence[Run], then: Sequence[Run]) -> str:
    """Say that launching takes far longer than it ever took the host, which the device's time does not show; "" if not."""
    slowest = max(run.launch for run in then)
    if slowest <= 0 or min(run.launch for run in now) <= max(_LAUNCH_RATIO * slowest, slowest + _LAUNCH_MORE):
        return ""
    launch = median(run.launch for run in now)
    return f"the host takes {launch * 1e6:,.0f} us to launch a call, recorded at most {slowest * 1e6:,.0f} us"


def _relevant(slowdown: float, recorded: Recording, policy: Policy) -> float:
    """Return a slowdown, or the share of the recorded time that the floor of seconds is, where that is more."""
    return max(slowdown, policy.floor / math.exp(recorded.center))


class _Figures:
    """The figures behind a decision, in logarithms.

    least: the smallest change that fails; can_fail: the smallest that can be certain, too. scatter: the standard error of
    the change between processes, with its degrees of freedom; error: and between devices. tail: the probability of such a
    change by chance; level: below which it is certain, where nearly each run is slow, too. upper: the bound of the change.
    values: of the runs, adjusted.
    """

    def __init__(self, runs: Sequence[Run], context: GateContext) -> None:
        if not runs:
            raise ValueError("nothing to decide over: no runs")
        self.recorded, self.runs, policy = context.recorded, runs, context.policy
        scattered, self.degrees = moderated(self.recorded.variance, self.recorded.degrees, context.prior)
        self.values = tuple(self.recorded.adjusted(run) for run in runs)
        if policy.is_shared and len(runs) > 1:  # where processes differ by more than recorded ones did, that is the scatter
            scattered = max(scattered, variance(self.values))
        self.drift = self.recorded.drift(runs)
        unsure = 2 * SENSITIVITY_SD if policy.is_shared else SENSITIVITY_SD  # of how a case follows a control
        doubtful = unsure**2 * sum(self.drift[name] ** 2 for name in self.recorded.sensitivity if name in self.drift)

        def scatter_of(processes: int) -> float:
            return math.sqrt(scattered * (1 / len(self.recorded.values) + 1 / processes) + doubtful)

        self.change = fmean(self.values) - self.recorded.center
        self.level = policy.alpha / max(1, context.cases)
        between = policy.between if policy.is_shared or not context.is_same_device else 0.0
        self.scatter = scatter_of(len(runs))
        self.error, self.degrees_of_error = _with_known(self.scatter, self.degrees, between)
        later_error, degrees_of_later = _with_known(scatter_of(policy.runs), self.degrees, between)
        certain, likely = t_quantile(self.level, degrees_of_later), t_quantile(0.2, degrees_of_later)
        self.least = math.log1p(_relevant(policy.slowdown, self.recorded, policy))
        self.can_fail = max(self.least, certain * between)
        self.tail = t_tail(self.change / self.error, self.degrees_of_error)
        # chance alone does not make such a change, nor one slow process
        slow_runs, may_stray = sum(value > self.recorded.slow for value in self.values), 0 if policy.is_shared else 1
        self.is_certain = self.tail < self.level and slow_runs >= max(1, len(runs) - may_stray)
        # one process may be lucky where others share the device: alone it may differ from others by twice as much
        error, degrees = _with_known(self.scatter, self.degrees, between * (2 if policy.is_shared and len(runs) == 1 else 1))
        self.upper = self.change + t_quantile(_BOUND_ALPHA, degrees) * error
        self.detectable = math.expm1(max(certain * later_error, self.least) + likely * later_error)

    def decision(self, verdict: Verdict, reason: str = "") -> Decision:
        """Put the figures into a decision."""
        reach = t_quantile(0.025, self.degrees_of_error) * self.error
        return Decision(
            verdict=verdict,
            reason=reason,
            change=math.expm1(self.change),
            interval=(math.expm1(self.change - reach), math.expm1(self.change + reach)),
            detectable=self.detectable,
            recorded=median(run.p50 for run in self.recorded.runs),
            runs=tuple(run.p50 for run in self.runs),
            anchors={name: math.expm1(moved) for name, moved in self.drift.items()},
            is_faster=1 - self.tail < self.level and verdict == Verdict.PASSED,
        )


def _with_known(error: float, degrees: float, known: float) -> tuple[float, float]:
    """Return a standard error and its degrees of freedom once a known one is added (Satterthwaite 1946).

    These are a thousand at most, beyond which they tell little, so that cases share their quantiles.
    """
    total = error**2 + known**2
    return math.sqrt(total), min(degrees * (total / error**2) ** 2, max(degrees, 1000.0)) if known else degrees


def _anchor_doubt(drift: Mapping[str, float], recorded: Recording, policy: Policy, agreed: bool) -> str:
    """Say which anchor has moved too far for a slowdown to be the kernel's; "" where none has."""
    for name, moved in drift.items():
        if name == REFERENCE_LOOP and not agreed:  # of another interpreter, say
            continue
        limit = policy.anchors if agreed else max(0.015, 4 * _scatter(recorded, name))
        if abs(moved) > math.log1p(min(limit, policy.anchors)):
            why = "" if agreed else ", and the software is another"
            return f"the {name} control moved by {math.expm1(moved):+.1%} since the recording{why}"
    return ""


def _scatter(recorded: Recording, anchor: str) -> float:
    center = recorded.anchor_centers[anchor]
    squares = [(math.log(run.anchors[anchor]) - center) ** 2 for run in recorded.runs]
    return math.sqrt(sum(squares) / max(1, len(squares) - 1))
