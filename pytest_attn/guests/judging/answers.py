"""What a judge is asked and answers, as JSON; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_attn.backends.declaration import Declaration, arguments_of
from pytest_attn.guests.judging.flashinfer_trace import read_trace
from pytest_attn.reports.records import LEVELS
from pytest_attn.reports.strict_json import COUNT, NUMBER, TEXT, TRUTH, array_of, by_name, object_of, or_null, sealed
from pytest_attn.reports.verdict import Verdict
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.masks import mask_from_dict
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

#: version of an answer
SCHEMA = 1
#: how much an answer gives back, the least first
FEEDBACK = ("verdict", "cause", "full")
#: seconds of a judgment, where nobody says another
BUDGET = 60.0
#: verdicts of a kernel that is wrong; with any other but `PASSED` nothing is known of it
WRONG = (Verdict.MISMATCH, Verdict.BROKEN, Verdict.RAISED, Verdict.NO_RESULT)
#: those of z, in the order of a message
Z_LEVELS = (*LEVELS, "z_slope")
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
        sealed(object_of({"name": TEXT, "distribution": TEXT, "passed": TRUTH}, **dict.fromkeys(Z_LEVELS, NUMBER)))
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
        measure=TRUTH,
        backward=TRUTH,
        seed={"type": ["integer", "string"]},
        budget_s={"type": "number"},
        feedback={"enum": [*FEEDBACK]},
        declared=sealed(object_of(**{one.name: {} for one in arguments_of(Declaration)})),
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


# -- workloads -------------------------------------------------------------------------------------------------------------


def workloads_of(given: object) -> list[Workload]:
    """Return workloads: of names of the catalog, by commas, of files of flashinfer-trace, and of fields. Raises ValueError."""
    catalog, found = builtin_catalog(), list[Workload]()
    for one in given if isinstance(given, list | tuple) else [given]:
        if isinstance(one, str):
            for name in one.split(","):
                found += read_trace(Path(name)) if name.endswith(".jsonl") else catalog.select(name.strip())
        else:
            found.append(one if isinstance(one, Workload) else _workload_of(one))
    if not found:
        raise ValueError("judge: no workload is given; expected a name of the catalog or a Workload")
    return found


def _workload_of(fields: Any) -> Workload:
    """Return the workload of a JSON object: its fields, a mask as a word or as {"kind": "Window", "left": 31, "right": 0}.

    Raises ValueError for anything else, and for all that would import a function.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"judge: a workload is a name, a Workload, or an object of its fields, got {fields!r}")
    made = as_python(fields)
    mask, pages = made.get("mask"), made.get("kv_pages")
    if "score_mod" in made or (isinstance(mask, dict) and "function" in mask):
        raise ValueError("judge: a workload of JSON has no functions: no score_mod, and masks by their numbers")
    try:
        made |= {"mask": mask_from_dict(as_python(mask))} if isinstance(mask, dict) else {}
        made |= {"kv_pages": Pages(**pages)} if isinstance(pages, dict) else {}
        return Workload(**made)
    except (TypeError, KeyError) as error:
        raise ValueError(f"judge: workload: {error}") from None


def as_python(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with tuples in place of lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
