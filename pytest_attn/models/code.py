"""The workloads that a model asks, as code to paste into a marker or a conftest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pytest_attn.models.call import AttentionCall
from pytest_attn.workloads.masks import BooleanMask, Causal, MaskModMask
from pytest_attn.workloads.workload import Workload

#: modules that a comment names
_NAMES = 2


def workloads_as_code(calls: Iterable[AttentionCall]) -> str:
    """Return the distinct workloads of calls as Python, each with the number of its calls and who makes them.

    A mask that is a tensor, or a function of the model, cannot be code: it is left out, with a comment that says so.
    """
    counts: Counter[str] = Counter()
    makers: dict[str, list[str]] = {}
    names = {"Workload"}
    for call in calls:
        written = workload_as_code(call.workload)
        counts[written] += 1
        if call.module not in makers.setdefault(written, []):
            makers[written].append(call.module)
        if (
            hasattr(call.workload.mask, "left")
            or hasattr(call.workload.mask, "lengths")
            or hasattr(call.workload.mask, "kernel")
        ):
            names.add(type(call.workload.mask).__name__)
    lines = [f"from pytest_attn import {', '.join(sorted(names))}", "", "WORKLOADS = ["]
    for written, count in counts.most_common():
        code, _, missing = written.partition("  # ")
        shown = ", ".join(makers[written][:_NAMES]) + (", ..." if len(makers[written]) > _NAMES else "")
        note = f"; {missing}" if missing else ""
        lines.append(f"    {code},  # {count} {'call' if count == 1 else 'calls'} of {shown or 'no module'}{note}")
    return "\n".join([*lines, "]"])


def workload_as_code(workload: Workload) -> str:
    """Return a workload as the expression that makes it, with a comment on what cannot be said."""
    given: list[str] = [str(workload.q_len)] if workload.q_lens is None else []
    missing: list[str] = []
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if field.name == "q_len" or _is_settled(workload, field.name, value):
            continue
        if isinstance(value, BooleanMask | MaskModMask) or field.name == "score_mod":
            missing.append(f"its {field.name} is the model's own")
            continue
        given.append(f"{field.name}={_written(value)}")
    return f"Workload({', '.join(given)})" + (f"  # {'; '.join(missing)}" if missing else "")


def _is_settled(workload: Workload, name: str, value: Any) -> bool:
    """Whether a field has the value that it gets where it is left out."""
    follows = {
        "kv_len": max(workload.kv_lens) if workload.kv_lens else workload.q_len,
        "batch": len(workload.kv_lens) if workload.kv_lens else 1,
        "kv_heads": workload.heads,
        "v_head_dim": workload.head_dim,
    }
    if name == "kv_lens" and workload.q_lens is not None:
        return bool(value == workload.q_lens)
    default = follows.get(name, next(f.default for f in dataclasses.fields(workload) if f.name == name))
    return bool(value == default)


def _written(value: object) -> str:
    if isinstance(value, Causal):
        return '"causal-bottom-right"' if value.bottom_right else '"causal"'
    return f'"{value}"' if isinstance(value, str) else repr(value)
