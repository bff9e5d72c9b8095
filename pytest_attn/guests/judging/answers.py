"""What a judge is asked and answers, as JSON; knows no torch."""

from __future__ import annotations

from typing import Any

from pytest_attn.reports.strict_json import COUNT, NUMBER, TEXT, TRUTH, array_of, by_name, object_of, or_null, sealed
from pytest_attn.reports.verdict import Verdict

#: version of an answer
SCHEMA = 1
#: how much an answer gives back, the least first
FEEDBACK = ("verdict", "cause", "full")
#: the function of a file or a text, and the seconds of a judgment, where nobody says another
FUNCTION, BUDGET = "attention", 60.0
#: verdicts of a kernel that is wrong; with any other but `PASSED` nothing is known of it
WRONG = (Verdict.MISMATCH, Verdict.BROKEN, Verdict.RAISED, Verdict.NO_RESULT)
_LEVELS = ("z_element", "z_row", "z_head", "z_slope")
_SECONDS = {"type": "number", "minimum": 0}

_TIME = object_of(
    {
        "direction": {"enum": ["forward", "forward+backward"]},
        "p50": _SECONDS,
        "interval": array_of(_SECONDS, 2),
        "share_of_peak": {"type": "number"},
        "disturbances": array_of(TEXT),
    }
)
_ON_WORKLOAD = object_of(
    {
        "workload": TEXT,
        "verdict": {"enum": [one.value for one in (Verdict.PASSED, *WRONG, Verdict.SKIPPED)]},
        "times": array_of(sealed(_TIME)),
        "not_judged": array_of(sealed(object_of({"what": TEXT, "why": TEXT}))),
    },
    said=TEXT,
    faults=array_of(TEXT),
    outputs=array_of(
        sealed(object_of({"name": TEXT, "distribution": TEXT, "passed": TRUTH}, **dict.fromkeys(_LEVELS, NUMBER)))
    ),
    invariants=by_name({"enum": ["passed", "broken"]}),
    text=TEXT,
)
#: what `Judgment.as_dict` returns; where nothing could be judged, the first four fields
ANSWER = sealed(
    object_of(
        {
            "schema": {"type": "integer", "enum": [SCHEMA]},
            "right": or_null(TRUTH),
            "unjudged": TEXT,
            "workloads": array_of(sealed(_ON_WORKLOAD)),
        },
        subject=TEXT,
        device=TEXT,
        machine=TEXT,
        seed=COUNT,
        seconds=_SECONDS,
        feedback={"enum": [*FEEDBACK]},
        id={},
    )
)
#: a request of `judge --serve`; what it does not say is as on the command line
REQUEST = sealed(
    object_of(
        {"workloads": {"type": ["string", "object", "array"], "description": "names, or objects of a Workload's fields"}},
        kernel=TEXT,
        source={"type": "string", "pattern": "\n", "description": "the text of a file, of several lines"},
        function=TEXT,
        measure=TRUTH,
        backward=TRUTH,
        seed={"type": ["integer", "string"]},
        budget_s={"type": "number"},
        inputs=array_of(TEXT),
        feedback={"enum": [*FEEDBACK]},
        declared={"type": "object"},
        id={},
    )
)


def unjudged(why: str) -> dict[str, Any]:
    """Return the answer to what could not be judged."""
    return {"schema": SCHEMA, "right": None, "unjudged": why, "workloads": []}


def require_feedback(feedback: object) -> None:
    """Raise ValueError for what is none of `FEEDBACK`."""
    if feedback not in FEEDBACK:
        raise ValueError(f"judge: feedback must be {', '.join(FEEDBACK[:-1])} or {FEEDBACK[-1]}, got {feedback!r}")
