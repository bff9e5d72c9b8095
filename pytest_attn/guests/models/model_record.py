"""What a record says of a model, and the terminal of it: its calls, what its compiled run gave, what its step took."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict

from pytest_attn.reports.lines import count, duration
from pytest_attn.reports.records import OF_LEVELS
from pytest_attn.reports.strict_json import BY_NAME, COUNT, NUMBER, TEXT, TRUTH, array_of, object_of, or_null
from pytest_attn.reports.terminal import RED, Line, in_table, levels_of


class ModelFields(TypedDict):
    """The fields of a model's records."""

    calls: Annotated[
        Sequence[dict[str, Any]],
        "of a model, for each call: module, function, kernel (what computed it, if known), workload, passed,"
        " backward, tensor, z_element, z_row, z_head, z_slope, reason, faults",
        array_of(
            object_of(
                {"module": TEXT, "function": TEXT, "workload": TEXT, "passed": TRUTH, "tensor": TEXT, **OF_LEVELS},
                kernel=or_null(TEXT),
                z_slope=or_null(NUMBER),
            )
        ),
    ]
    notes: Annotated[
        Sequence[str],
        "of a model: faults that cannot be seen in it, and layers that were not judged",
        array_of(TEXT),
    ]
    compiled: Annotated[
        dict[str, Any] | None,
        "of a compiled model, its compiled run: ratios (distance of each tensor from exact attention in units of honest"
        " rounding), limits, graphs, breaks, recompiled (graphs in a second run), kernels, unknown (why nothing was compared)",
        or_null(
            object_of(
                {
                    **dict.fromkeys(("graphs", "breaks", "recompiled"), COUNT),
                    "ratios": BY_NAME,
                    "kernels": array_of(TEXT),
                    "unknown": TEXT,
                }
            )
        ),
    ]
    ratios: Annotated[
        dict[str, Any],
        "of a model: deviation of each output, of the loss and of each parameter's gradient, in units of honest scatter",
        BY_NAME,
    ]
    model: Annotated[str, "class of the model whose attention was judged or whose step was timed; empty for a workload"]
    step: Annotated[
        dict[str, Any],
        "of a model that was timed: optimizer, first_call (seconds), graphs and graph_breaks (of torch.compile, in the first"
        " step), attention (seconds, interval, share, ceiling: the step's largest speed-up, calls, is_seen; or unknown: why)",
    ]


# -- text of the terminal ---------------------------------------------------------------------------------------------------

#: outputs and gradients that are printed, those furthest from exact first
_MOST_RATIOS = 3


def call_tables(records: Sequence[Mapping[str, Any]], width: int | None) -> Iterator[Line]:
    """Yield a table per model, a row per attention call in the order of its layers; nothing where no model was checked."""
    for r in records:
        if not r["calls"]:
            continue
        yield "", {}
        yield f"{r['subject']} in {r['workload']}", {"bold": True}
        table: list[tuple[str, ...]] = [("layer", "function", "kernel", "workload", "worst", "z", "row", "head")]
        table += [
            (c["module"], c["function"], c.get("kernel") or "-", c["workload"], c["tensor"], *levels_of(c)) for c in r["calls"]
        ]
        yield from in_table(table, [{} if call["passed"] else RED for call in r["calls"]], (5, 6, 7), width)
        ratios = {name: ratio for name, ratio in r["ratios"].items() if name != "loss"}  # a single number scatters too much
        for name, ratio in sorted(ratios.items(), key=lambda item: -item[1])[:_MOST_RATIOS]:
            yield f"  {name}: {ratio:.2f} times as far from exact attention as honest rounding", {}
        yield from _compiled(r["compiled"])
        for note in r["notes"]:
            yield f"  note: {note}", {}


def _compiled(run: Mapping[str, Any] | None) -> Iterator[Line]:
    if run is None:
        return
    again = f", compiled again in the second run ({run['recompiled']})" if run["recompiled"] else ""
    launched = f", launched {', '.join(run['kernels'])}" if run["kernels"] else ""
    yield f"  compiled: {count(run['graphs'], 'graph')}, {count(run['breaks'], 'graph break')}{again}{launched}", {}
    if run["unknown"]:
        yield f"  compiled: not compared: {run['unknown']}", {}
    for name, ratio in sorted(run["ratios"].items(), key=lambda item: -item[1])[:1]:
        yield f"  compiled: {name}: {ratio:.2f} times as far from exact attention as honest rounding", {}


def step_lines(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per model and backend that was timed."""
    for r in records:
        if "first_call" in r["step"]:
            with_optimizer = f", {r['step']['optimizer']}'s included" if r["step"]["optimizer"] else ""
            said = [f"first call {duration(r['step']['first_call'])}"]
            if r["step"]["graphs"]:
                breaks = count(r["step"]["graph_breaks"], "graph break")
                said.append(f"compiled to {count(r['step']['graphs'], 'graph')}, {breaks}")
            said += _share(r["step"])
            yield f"step          {r['subject']} in {r['workload']}{with_optimizer}: {'; '.join(said)}"


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
