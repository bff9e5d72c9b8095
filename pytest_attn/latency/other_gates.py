"""What is gated beside the time: accuracy and memory are compared with the baseline, too, and small changes that add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pytest_attn.latency.baseline import Baseline
from pytest_attn.latency.gate import Decision, Policy
from pytest_attn.latency.result import Latency
from pytest_attn.verdict import Verdict

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
    worse = [reason for reason in (_describe_memory(recorded, latency), *_describe_accuracy(recorded, z)) if reason]
    reasons = [decision.reason] if decision.reason else []
    if worse:
        return replace(decision, verdict=Verdict.REGRESSED, reason="; ".join(reasons + worse))
    if decision.verdict == Verdict.PASSED and (crept := _describe_creep(recorded, decision, policy)):
        return replace(decision, reason=crept)
    return decision


def _describe_memory(recorded: Baseline, latency: Latency) -> str:
    if recorded.memory is None or latency.memory is None:
        return ""
    more = latency.memory - recorded.memory
    if more <= max(_MEMORY_MORE, (_MEMORY_RATIO - 1) * recorded.memory):
        return ""
    return f"peak memory {latency.memory / 2**20:,.1f} MiB, recorded {recorded.memory / 2**20:,.1f} MiB"


def _describe_accuracy(recorded: Baseline, z: Sequence[float] | None) -> list[str]:
    return [
        f"less accurate: z {now:.3g} over {level}, recorded {then:.3g}"
        for level, now, then in zip(_LEVELS, z or (), recorded.z or (), strict=False)
        if now > _Z_RATIO * then + _Z_MORE
    ]


def _describe_creep(recorded: Baseline, decision: Decision, policy: Policy) -> str:
    if len(recorded.history) < 2 or decision.change is None:
        return ""
    date, first, _ = recorded.history[0]
    crept = median(recorded.p50) * (1 + decision.change) / first - 1
    return f"{crept:+.1%} since the first recording on {date}" if crept > _CREEP * policy.slowdown else ""
