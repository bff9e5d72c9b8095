"""What a record says of a model."""

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from pytest_attn.reports.strict_json import BY_NAME, COUNT, NUMBER, TEXT, TRUTH, array_of, object_of, or_null

_LEVELS = dict.fromkeys(("z_element", "z_row", "z_head"), or_null(NUMBER))


class ModelFields(TypedDict):
    """The fields of a model's records."""

    calls: Annotated[
        Sequence[dict[str, Any]],
        "of a model, for each call: module, function, kernel (what computed it, if known), workload, passed,"
        " backward, tensor, z_element, z_row, z_head, z_slope, reason, faults",
        array_of(
            object_of(
                {"module": TEXT, "function": TEXT, "workload": TEXT, "passed": TRUTH, "tensor": TEXT, **_LEVELS},
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
