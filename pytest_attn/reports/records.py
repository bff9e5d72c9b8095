"""The record of one judgment: its fields, and a .jsonl file, one JSON object per line.

A line is whole or not there: it is written in one piece as soon as its test is done. Numbers that JSON has no word for are
the strings "Infinity", "-Infinity" and "NaN" in the file, and numbers again when read.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, cast, get_args, get_type_hints

from pytest_attn.reports.files import ESCAPED
from pytest_attn.reports.strict_json import (
    COUNT,
    NUMBER,
    TEXT,
    TRUTH,
    array_of,
    by_name,
    first_fault,
    object_of,
    or_empty,
    or_null,
    parse_json,
)
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.seam import added, each
from pytest_attn.workloads.functions import printable

#: of the lines; a reader takes those of its own and older schemas
SCHEMA = 1
OUR_SCHEMA = {"type": "integer", "minimum": 1, "maximum": SCHEMA}
#: the field of a line that closes a run, and is not a record itself
RUN = "run"
#: the question of a test that failed, and not by a judgment
TEST = "test"
#: phases in which pytest counts no failure
_NOT_COUNTED = ("rerun", RUN)
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Record(TypedDict):
    """One judgment, of builtin types only, so that it travels from an xdist worker on a test report.

    This is the one definition of a record, each field with its meaning: the lines of a .jsonl file, what reports read, and the
    table of the documentation follow it.
    """

    schema: Annotated[int, "version of this table; fields may be added without a new version, but not changed or removed"]
    date: Annotated[str, "when the test was done: ISO 8601, UTC"]
    test: Annotated[str, "pytest's id of the test"]
    line: Annotated[int, "of the test in its file, counted from 1"]
    phase: Annotated[
        str,
        "of the test: setup, call or teardown; rerun if the test was run again after it; collect of a file that could not be"
        " collected; run of a run that was stopped",
    ]
    question: Annotated[str, "what was asked: check, invariants or latency; test, of a failure outside of any judgment"]
    verdict: Annotated[
        str,
        "of any: no result; of a test: failed; of all others: raised; of a check: passed, mismatch, known defect, expected,"
        " skipped; of invariants: held, broken, known defect, expected, skipped; of a latency: passed, mismatch, regressed,"
        " inconclusive, no baseline, recorded, unrecorded, unconfirmed, untimed, slower, faster, no difference",
    ]
    reason: Annotated[str, "why a case was skipped or failed, or what its known defect is, in one line"]
    explanation: Annotated[
        Sequence[dict[str, Any]],
        "the lines of a failure in a terminal but the last, which is command: label (worst, largest z, ...; empty in lines"
        " without one), text",
    ]
    cause: Annotated[
        str,
        "the reason as a fixed word for programs, else empty; of no baseline: none recorded, recorded otherwise, another"
        " protocol, another shape, unusable file; of a check that passed: defect not shown; of a skip: declined, not here",
    ]
    remedy: Annotated[str, "options to add to the command that help; empty if none do"]
    source: Annotated[str, "fuzz, if --attn-fuzz drew the workload, else empty"]
    workload: Annotated[str, "id of the workload"]
    name: Annotated[str, "its name in the catalog, without the dtype; empty if it has none"]
    group: Annotated[str, "the group of that name"]
    aliases: Annotated[Sequence[str], "other names of the same workload"]
    shape: Annotated[
        dict[str, Any],
        "id, batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, dtype, mask; flops and bytes (both objects:"
        " forward, backward)",
    ]
    subject: Annotated[str, "name of the backend or callable, with its variant"]
    tags: Annotated[
        dict[str, Any], "family (the library), backend (without variant), compile (none, compile, max_autotune or graph)"
    ]
    version: Annotated[str, "of the library; empty for a callable"]
    declared: Annotated[dict[str, Any], "arguments of the marker that declare the callable and are not the default"]
    direction: Annotated[str, "forward, backward or forward+backward (for a check: out and gradients)"]
    backward: Annotated[bool, "whether gradients were compared"]
    tensor: Annotated[str, "the first tensor above its limits; if the case passed, the one closest to them"]
    distribution: Annotated[str, "its input distribution"]
    z_element: Annotated[float | None, "its largest z: the error of an element divided by its budget (limit 8)"]
    z_row: Annotated[float | None, "the largest RMS of a row (limit 4)"]
    z_head: Annotated[float | None, "the largest RMS of a head (limit 1.5)"]
    z_slope: Annotated[
        float | None, "distance from 1 of the worst slope of a head over exact attention, by what it may be (limit 1)"
    ]
    tensors: Annotated[
        Sequence[dict[str, Any]],
        "every tensor and distribution: name, distribution, passed, z_element, z_row, z_head, z_slope, slope (of that"
        " head), absmax, mean_abs, mse, relative_l2, cosine, worst (index), found, exact, budget, wrong_positions (elements"
        " that are NaN or infinite and should not be, or should be and are not)",
    ]
    faults: Annotated[
        Sequence[str],
        "identities of the faults that explain a mismatch or are observed in it, the most telling first: see below",
    ]
    untested: Annotated[
        Sequence[str],
        "of a check that passed, what it could not see: softcap, window, sinks, bias, alibi or score_mod, if exact attention"
        " without it is also within every limit; long sums in a half precision, with fewer than 2,048 keys; gradients of"
        " sinks, bias or alibi that were not compared, with why: dsinks: ...",
    ]
    inapplicable: Annotated[
        Sequence[dict[str, Any]], "of invariants, those that were asked and did not apply: invariant, reason"
    ]
    is_sampled: Annotated[bool, "whether only some rows and keys of a long workload were compared"]
    sampled: Annotated[dict[str, Any], "if only some were: rows and keys, each with how many, and of how many; else empty"]
    memory: Annotated[int, "bytes held on a CUDA device at the peak of a check; 0 elsewhere"]
    is_approximate: Annotated[bool, "whether the kernel quantizes, and was compared on its quantized inputs"]
    compile_seconds: Annotated[float | None, "time of the first calls of a compiled kernel"]
    graph_breaks: Annotated[int, "of torch.compile"]
    profiles: Annotated[
        Sequence[dict[str, Any]],
        "with --attn-profile: direction, launches (symbol, words, seconds), peak_memory, flops, roofline (seconds)",
    ]
    latency: Annotated[
        dict[str, Any] | None,
        "workload, subject, direction, verdict, key (of its baseline), p50 (seconds), interval"
        " (low, high, confidence), samples (with --attn-json-samples), blocks, spent (seconds), mode, calls, l2, host"
        " (seconds of launching), anchors, memory (bytes), threads, disturbances, notes, conditions, cupti,"
        " decision (verdict, reason, change, detectable, ...), baseline (p50 of each process, date, reason, history)",
    ]
    machine: Annotated[dict[str, Any], "name, device, kind, architecture, memory (bytes), torch, python, pytest_attn"]
    seconds: Annotated[float, "how long the test took, with all its judgments"]
    command: Annotated[str, "the command that runs this case again"]


_OBJECT = {"type": "object"}
#: type in Python -> type in JSON, its description, and the value of a field that nobody filled in
_TYPES: dict[Any, tuple[str, Mapping[str, Any], Any]] = {
    str: ("string", TEXT, ""),
    bool: ("boolean", TRUTH, False),
    int: ("integer", {"type": "integer"}, 0),
    float: ("number", NUMBER, 0.0),
    float | None: ("number or null", or_null(NUMBER), None),
    dict[str, Any]: ("object", _OBJECT, {}),
    dict[str, Any] | None: ("object or null", or_null(_OBJECT), None),
    Sequence[str]: ("array of strings", array_of(TEXT), ()),
    Sequence[dict[str, Any]]: ("array of objects", array_of(_OBJECT), ()),
}


class Field(NamedTuple):
    """A field of a record: its type in JSON, its meaning, its value where nobody filled it in, its description."""

    kind: str
    meaning: str
    empty: Any
    description: Mapping[str, Any]


@cache
def fields() -> dict[str, Field]:
    """Return the fields of a record by their names, with those that guests add."""
    found = {}
    of_guests = "".join(f", {name} ({field.meaning})" for name, field in added("latency").items())
    for declared in (Record, *each("fields")):
        for name, hint in get_type_hints(declared, include_extras=True).items():
            kind, meaning, *within = get_args(hint)
            json_kind, description, empty = _TYPES[kind]
            meaning += of_guests if name == "latency" else ""
            found[name] = Field(json_kind, meaning, empty, within[0] if within else _WITHIN.get(name, description))
    return found


@cache
def line_description() -> dict[str, Any]:
    """Return the description of the line of a record."""
    described = {name: {**field.description, "title": field.meaning} for name, field in fields().items()}
    return {**_OBJECT, "required": _REQUIRED, "properties": described}


def new_record(**known: Any) -> Record:
    """Return a record of the fields that are known; the others are empty. Raises TypeError for a field that there is not."""
    if unknown := known.keys() - fields().keys():
        raise TypeError(f"a record has no field {', '.join(sorted(unknown))}")
    return cast(Record, {**_empty(), **known})


def changed(record: Record, **changes: Any) -> Record:
    """Return a record with other values in some fields. Raises TypeError for a field that there is not."""
    return new_record(**{**record, **changes})


def _empty(there: Collection[str] = ()) -> dict[str, Any]:
    """Return a value for each field but those that are there: one that says nothing, and is shared with no other record."""
    empty = {name: copy.copy(field.empty) for name, field in fields().items() if name not in there}
    return empty if "schema" in there else {**empty, "schema": SCHEMA}


def function_of(record: Record) -> str:
    """Return the test without its case."""
    return str(record["test"]).partition("[")[0]


def gathered(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, both in the order in which they come."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def latency_of(record: Record) -> dict[str, Any]:
    """Return what a record says of a time, nothing where it is of a check."""
    return record["latency"] or {}


def verdict_of(record: Record) -> Verdict | None:
    """Return the verdict of a record as a report shows it; None if it is newer than this version.

    JSON's "passed" stands for several: an approximate kernel, a time, and a known defect that did not show; "held" for some of
    the invariants as well.
    """
    verdict = Verdict.named(record["verdict"])
    if verdict is Verdict.HELD and record["inapplicable"]:
        return Verdict.HELD_IN_PART
    if verdict is not Verdict.PASSED:
        return verdict
    if record["question"] == "latency":
        return Verdict.FAST
    if record["cause"] == Cause.DEFECT_NOT_SHOWN:
        return Verdict.UNEXPECTED
    return Verdict.APPROXIMATE if record["is_approximate"] else Verdict.PASSED


def is_wrong(record: Record) -> bool:
    """Return whether a record ends a run with a failure, as far as this version knows its verdict."""
    verdict = verdict_of(record)
    return verdict is not None and verdict.is_wrong


def is_judged(record: Record) -> bool:
    """Return whether a record is of a judgment, and not of a test that failed outside of one."""
    return record["question"] != TEST


def failures(records: Iterable[Record]) -> int:
    """Return how many tests failed, as pytest counts them: one whose teardown fails, too, is a failure and an error."""
    failed = (r for r in records if is_wrong(r) and r["verdict"] != Verdict.UNRECORDED and r["phase"] not in _NOT_COUNTED)
    return len({(r["test"], r["phase"], r["date"]) for r in failed})


class RecordWriter:
    """Writes a .jsonl file of --attn-output. The file of an earlier run is replaced when the first record comes.

    If it cannot be written, the run goes on: `problem` says why, "" where there is none. written: the SHA-256 of the file.
    """

    def __init__(self, path: str, with_samples: bool = False) -> None:
        self.path, self.with_samples = path, with_samples
        self.problem = ""
        self.written = hashlib.sha256()
        self._mode = "w"

    def write(self, records: Iterable[Record]) -> None:
        """Append records; none leaves an empty file behind where there was none before."""
        self.write_lines(to_line(record, self.with_samples) for record in records)

    def write_lines(self, lines: Iterable[str]) -> None:
        """Append lines in the same way."""
        if self.problem:
            return
        text = "".join(f"{line}\n" for line in lines).encode(errors=ESCAPED)
        self.written.update(text)
        try:
            with open(self.path, f"{self._mode}b") as file:
                file.write(text)
        except OSError as error:
            self.problem = f"--attn-output: cannot write {self.path}: {error}"
        self._mode = "a"


def to_line(record: Record, with_samples: bool = False) -> str:
    """Return a record as one line of strict JSON, its fields in the order of `fields`."""
    complete: dict[str, Any] = {"schema": SCHEMA, **record}
    latency = complete.get("latency")
    if latency and not with_samples:
        complete["latency"] = {key: value for key, value in latency.items() if key != "samples"}
    ordered = {name: complete[name] for name in fields() if name in complete}
    return json.dumps(named_numbers(ordered), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read_records(*paths: str | Path) -> list[Record]:
    """Return the records of one or more .jsonl files of --attn-output, in their order; fields that a file lacks are empty.

    The closing lines of runs are left out, and so is the last line of a run that was killed, which may be cut short. Raises
    ValueError, with file and line, for any other line that is not a record, or is of a newer schema.
    """
    found = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: is not UTF-8 ({error.reason}); expected a .jsonl file that --attn-output wrote"
            ) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                is_cut = number == len(lines) and line.startswith("{")  # every whole line ends with a newline
                found += [record] if (record := read_line(line, f"{path}, line {number}", is_cut)) else []
    return found


def read_line(line: str, where: str, is_cut: bool = False) -> Record | None:
    """Return the record of a line; None for the closing line of a run, and where `is_cut` allows that it is not whole.

    where: of the line, for the ValueError that any other line raises.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        if is_cut:
            return None
        raise ValueError(
            f"{where}: is not JSON ({error}); expected a line of a .jsonl file that --attn-output wrote"
        ) from None
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise ValueError(f'{where}: has no "schema"; expected a line of a .jsonl file that --attn-output wrote')
    if record["schema"] > SCHEMA:
        raise ValueError(f"{where}: is of schema {record['schema']}, this pytest-attn reads {SCHEMA}; install a newer one")
    if RUN in record and "question" not in record:
        return None
    require_described(record, line_description(), where)
    known, described = record, line_description()["properties"]
    if any(word in line for word in _QUOTED):  # most lines hold none, and looking at each value takes longest
        known = {key: _numbers(value, described.get(key, {})) for key, value in record.items()}
    return cast(Record, {**_empty(known), **known})


def require_described(line: Any, description: Mapping[str, Any], where: str) -> None:
    """Raise ValueError where a line is not as described."""
    if fault := first_fault(line, description):
        raise ValueError(f"{where}: {printable(fault, 0)}; is it a line of a .jsonl file that --attn-output wrote?")


_SECONDS = {"type": "number", "minimum": 0}
_TIME = {**_SECONDS, "minimum": 5e-324, "description": "seconds, more than 0"}
#: the levels at which z has a limit
LEVELS = ("z_element", "z_row", "z_head")
OF_LEVELS = dict.fromkeys(LEVELS, or_null(NUMBER))
_WORK = by_name({"type": "number"})
_WORDS_OF_LAUNCHES = dict.fromkeys(("framework", "category", "architecture", "operation"), or_null(TEXT))
#: what is within the fields that hold more than one value, as far as reports read it: a part of JSON Schema
_WITHIN: dict[str, dict[str, Any]] = {
    "schema": OUR_SCHEMA,
    "explanation": array_of(object_of({"label": TEXT, "text": TEXT})),
    "inapplicable": array_of(object_of({"invariant": TEXT, "reason": TEXT})),
    "shape": or_empty(
        {"dtype": TEXT, "flops": _WORK, "bytes": _WORK},
        id=TEXT,
        mask=TEXT,
        **dict.fromkeys(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim"), COUNT),
    ),
    "tags": by_name(TEXT),
    "tensors": array_of(
        object_of(
            {"name": TEXT, "distribution": TEXT, "passed": TRUTH},
            **dict.fromkeys(
                ("absmax", "mean_abs", "mse", "relative_l2", "cosine", "found", "exact", "budget"), or_null(NUMBER)
            ),
            **OF_LEVELS,
            **dict.fromkeys(("z_slope", "slope"), or_null(NUMBER)),
            worst=or_null(array_of({"type": "integer"})),
        )
    ),
    "sampled": by_name(array_of(COUNT, 2)),
    "profiles": array_of(
        object_of(
            {
                "direction": TEXT,
                "launches": array_of(
                    object_of({"calls": COUNT, "seconds": NUMBER, **_WORDS_OF_LAUNCHES}, symbol=or_null(TEXT))
                ),
                **dict.fromkeys(("flops", "seconds"), NUMBER),
                **dict.fromkeys(("peak_memory", "roofline"), or_null(NUMBER)),
            }
        )
    ),
    "latency": or_null(
        {"dependentRequired": {"p50": ["interval", "mode", "l2", "calls"]}}
        | object_of(
            p50=or_null(_TIME),
            interval=array_of(_SECONDS, 3),
            mode=TEXT,
            l2=TEXT,
            direction=TEXT,
            key=TEXT,
            calls=COUNT,
            anchors=by_name(_SECONDS),
            disturbances=array_of(TEXT),
            notes=array_of(TEXT),
            decision=or_null(object_of(change=or_null(NUMBER), runs=array_of(_TIME), detectable=or_null(NUMBER))),
            baseline=or_null(object_of(p50=array_of(_TIME), date=TEXT, reason=TEXT, history={"type": "array"})),
        )
    ),
    "machine": object_of(
        **dict.fromkeys(("name", "device", "kind", "architecture", "torch", "python", "pytest_attn"), TEXT), memory=NUMBER
    ),
}

#: without which a record says nothing
_REQUIRED = ["schema", "question", "verdict", "workload", "subject"]
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_QUOTED = tuple(f'"{word}"' for word in _WORDS)


def name_of(number: float) -> str:
    """Return what stands for a number that JSON cannot say."""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def named_numbers(value: Any) -> Any:
    """Replace the numbers that JSON cannot say by their names."""
    return mapped(value, lambda one: name_of(one) if isinstance(one, float) and not math.isfinite(one) else one)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all that it holds changed, keys as well; tuples become lists."""
    if isinstance(value, Mapping):
        return {change(str(key)): mapped(one, change) for key, one in value.items()}
    return [mapped(one, change) for one in value] if isinstance(value, (list, tuple)) else change(value)


def _numbers(value: Any, described: Mapping[str, Any]) -> Any:
    """Turn these names into numbers again, but where a text is described."""
    if isinstance(value, str):
        return value if described.get("type") in ("string", ["string", "null"]) else _WORDS.get(value, value)
    if isinstance(value, dict):
        known, others = described.get("properties", {}), described.get("additionalProperties", {})
        return {key: _numbers(one, known.get(key, others)) for key, one in value.items()}
    return [_numbers(one, described.get("items", {})) for one in value] if isinstance(value, list) else value
