"""From a decision to a verdict and its words: accuracy and memory are held against the baseline, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pytest_attn.latency.baseline import Baseline
from pytest_attn.latency.gate import Decision, Policy
from pytest_attn.latency.protocol import Latency

#: by how much a z may exceed the recorded one, and the peak memory the recorded bytes, before a case is a regression
_Z_RATIO, _Z_MORE = 1.5, 0.25
_MEMORY_RATIO, _MEMORY_MORE = 1.05, 1 << 20
#: slower than the first recording by this many times what counts as slower is said, however it was accepted since
_CREEP = 2.5
_LEVELS = ("an element", "a row", "a head")


def with_other_gates(
    decision: Decision, recorded: Baseline, latency: Latency, z: Sequence[float] | None, policy: Policy
) -> Decision:
    """Make a regression of a case that became less accurate or takes more memory; say where small changes add up.

    z: the largest residuals of the check over an element, a row and a head, None where it was not checked here.
    """
    worse = [words for words in (_memory_words(recorded, latency), *_accuracy_words(recorded, z)) if words]
    reasons = [decision.reason] if decision.reason else []
    if worse:
        return replace(decision, verdict="regressed", reason="; ".join(reasons + worse))
    if decision.verdict == "passed" and (crept := _creep_words(recorded, decision, policy)):
        return replace(decision, reason=crept)
    return decision


def _memory_words(recorded: Baseline, latency: Latency) -> str:
    if recorded.memory is None or latency.memory is None:
        return ""
    more = latency.memory - recorded.memory
    if more <= max(_MEMORY_MORE, (_MEMORY_RATIO - 1) * recorded.memory):
        return ""
    return f"peak memory {latency.memory / 2**20:,.1f} MiB, recorded {recorded.memory / 2**20:,.1f} MiB"


def _accuracy_words(recorded: Baseline, z: Sequence[float] | None) -> list[str]:
    return [
        f"less accurate: z {now:.3g} over {level}, recorded {then:.3g}"
        for level, now, then in zip(_LEVELS, z or (), recorded.z or (), strict=False)
        if now > _Z_RATIO * then + _Z_MORE
    ]


def _creep_words(recorded: Baseline, decision: Decision, policy: Policy) -> str:
    if len(recorded.history) < 2 or decision.change is None:
        return ""
    date, first, _ = recorded.history[0]
    crept = median(recorded.p50) * (1 + decision.change) / first - 1
    return f"{crept:+.1%} since the first recording on {date}" if crept > _CREEP * policy.slowdown else ""


def regression_text(decision: Decision, recorded: Baseline, latency: Latency, cases: int, command: str) -> str:
    """Write a regression: what changed, on what evidence, and the two commands that follow from it."""
    lines = [f"regressed: {latency.subject} on {latency.workload}, {latency.direction}: {change_words(decision)}"]
    lines += [f"  because    {decision.reason}"] if decision.reason else []
    runs = ", ".join(map(duration, decision.runs))
    lines.append(f"  runs       {duration(latency.p50)} in this process; decided on {runs}")
    lines.append(
        f"  recorded   {duration(min(recorded.p50))} to {duration(max(recorded.p50))} in {len(recorded.p50)} processes,"
        f" {recorded.date}: {recorded.reason}"
    )
    moved = ", ".join(f"{name} {change:+.1%}" for name, change in (decision.anchors or {}).items())
    calls = "1 call" if latency.calls == 1 else f"{latency.calls} calls"
    lines.append(f"  anchors    {moved or 'none'} (timed as {latency.mode}, {calls} a sample, L2 {latency.l2})")
    if decision.detectable is not None:
        lines.append(
            f"  certainty  four of five suites would find a slowdown of {decision.detectable:.1%};"
            f" of suites of {cases:,} cases, at most 1 % alarm falsely"
        )
    lines.append(f"  reproduce  {command}")
    lines.append(f'  accept     {command} --attn-update-baselines "why it is slower"')
    return "\n".join(lines)


def change_words(decision: Decision) -> str:
    """Say what the p50 is, what was recorded, and by how much they differ."""
    if not decision.runs or decision.recorded is None or decision.change is None or decision.interval is None:
        return "not compared"
    low, high = decision.interval
    return (
        f"p50 {duration(median(decision.runs))}, recorded {duration(decision.recorded)}"
        f" ({decision.change:+.1%}, 95 % interval {low:+.1%} to {high:+.1%})"
    )


def duration(seconds: float) -> str:
    """Return a time with its unit: "6.81 us", "0.398 ms", "1.21 s"."""
    for limit, factor, unit in ((1e-4, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"
