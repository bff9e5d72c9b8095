"""What the terminal says of a model's step beside its time: the first call, what was compiled, what attention takes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_attn.messages.durations import duration
from pytest_attn.reports.records import Record
from pytest_attn.reports.terminal import count


def step_lines(records: Iterable[Record]) -> Iterator[str]:
    """Yield a line per model and backend that was timed."""
    for r in records:
        if "first_call" in r["step"]:
            with_optimizer = f", {r['step']['optimizer']}'s included" if r["step"]["optimizer"] else ""
            said = [f"first call {duration(r['step']['first_call'])}", *_compiled(r["step"]), *_share(r["step"])]
            yield f"step          {r['subject']} in {r['workload']}{with_optimizer}: {'; '.join(said)}"


def _compiled(step: Mapping[str, Any]) -> Iterator[str]:
    if step["graphs"]:
        yield f"compiled to {count(step['graphs'], 'graph')}, {count(step['graph_breaks'], 'graph break')}"


def _share(step: Mapping[str, Any]) -> Iterator[str]:
    attention = step.get("attention")
    if not attention:
        return
    if "unknown" in attention:
        yield f"attention's share is not known: {attention['unknown']}"
    elif not attention["is_seen"]:
        yield "attention's share is less than the scatter of the step"
    else:
        share = f"attention takes {attention['share']:.0%} of it"
        yield f"{share}, so a faster kernel speeds it up {attention['ceiling']:.2f} times at most"
