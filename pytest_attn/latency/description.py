"""How a latency reads that fails its test: what changed, on what evidence, and what to type next."""

from __future__ import annotations

from statistics import median

from pytest_attn.latency.baseline import Baseline
from pytest_attn.latency.gate import Decision
from pytest_attn.latency.result import Latency
from pytest_attn.reports.lines import describe_ranks, duration, labeled
from pytest_attn.reports.verdict import Verdict

#: what accepts a slowdown, and what records a case that has no baseline that can be used
ACCEPT = '--attn-update-baselines "why it is slower"'
RECORD = '--attn-update-baselines "first recording"'


def describe_regression(decision: Decision, recorded: Baseline, latency: Latency, cases: int) -> str:
    """Return the text of a regression: what changed, and on what evidence. cases: how many the suite decides over."""
    runs = ", ".join(map(duration, decision.runs))
    moved = ", ".join(f"{name} {change:+.1%}" for name, change in (decision.anchors or {}).items())
    calls = "1 call" if latency.calls == 1 else f"{latency.calls} calls"
    span = f"{duration(min(recorded.p50))} to {duration(max(recorded.p50))} in {len(recorded.p50)} processes"
    lines = [
        f"regressed: {latency.subject} on {latency.workload}, {latency.direction}: {describe_change(decision)}",
        labeled("because", decision.reason) if decision.reason else "",
        labeled("runs", f"{duration(latency.p50)} in this process; decided on {runs}"),
        labeled("recorded", f"{span}, {recorded.date}: {recorded.reason}"),
        labeled("anchors", f"{moved or 'none'} (timed as {latency.mode}, {calls} a sample, L2 {latency.l2})"),
        labeled("ranks", describe_ranks(latency.ranks)) if latency.ranks else "",
        labeled("certainty", _certainty(decision.detectable, cases)) if decision.detectable is not None else "",
    ]
    return "\n".join(line for line in lines if line)


def describe_unconfirmed(name: str, decision: Decision) -> str:
    """Return the text of a time that looks slower, where no new process could confirm that. name: what was timed."""
    return f"looks slower: {name}: {describe_change(decision)}\n{labeled('but', decision.reason)}"


def describe_undecided(name: str, decision: Decision, command: str) -> str:
    """Return the text of a case over which nothing can be said, where that fails its test. command: what repeats the case."""
    is_inconclusive = decision.verdict == Verdict.INCONCLUSIVE
    is_disturbed = is_inconclusive and decision.change is None  # what was recorded is good, and not to be replaced
    remedy = "" if is_disturbed else RECORD if is_inconclusive else decision.remedy
    lines = [
        f"{decision.verdict}: {name}: {decision.reason}",
        labeled("repeat", f"{command}, when nothing else computes on this machine") if is_inconclusive else "",
        labeled("record", f"{command} {remedy}") if remedy else "",
        labeled("or", "--attn-latency=auto, which only says so"),
    ]
    return "\n".join(line for line in lines if line)


def describe_change(decision: Decision) -> str:
    """Say what the p50 is, what was recorded, and by how much they differ."""
    if not decision.runs or decision.recorded is None or decision.change is None or decision.interval is None:
        return "not compared"
    low, high = decision.interval
    return (
        f"p50 {duration(median(decision.runs))}, recorded {duration(decision.recorded)}"
        f" ({decision.change:+.1%}, 95 % interval {low:+.1%} to {high:+.1%})"
    )


def _certainty(detectable: float, cases: int) -> str:
    return (
        f"four of five suites would find a slowdown of {detectable:.1%};"
        f" of suites of {cases:,} cases, at most 1 % alarm falsely"
    )
