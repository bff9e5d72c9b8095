"""The record of one judgement: its fields, and the file of --attn-json, one JSON object per line.

A line is whole or not there: it is written in one piece as soon as its test is done. Numbers that JSON has no word for are
the strings "Infinity", "-Infinity" and "NaN" in the file, and numbers again when read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

Record = Mapping[str, Any]
#: of the lines; a reader takes those of its own and older schemas
SCHEMA = 1

#: name, type in JSON, meaning
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("schema", "integer", "version of this table; a field may be added without a new version, never changed or left out"),
    ("date", "string", "when the test was done: ISO 8601, UTC"),
    ("test", "string", "pytest's id of the test"),
    ("line", "integer", "of its file, counted from 1"),
    ("question", "string", "what was asked: check, invariants or latency"),
    (
        "verdict",
        "string",
        "of a check: passed, mismatch, known defect, expected, skipped, raised; of invariants: held, broken, known defect,"
        " expected, skipped, raised; of a latency: passed, regressed, inconclusive, no baseline, recorded, unrecorded,"
        " unconfirmed, untimed, raised",
    ),
    ("reason", "string", "why: of a skip, defect or failure, in one line"),
    ("workload", "string", "id of the workload"),
    ("name", "string", "its name in the catalog, whatever its dtype; empty where it has none"),
    ("group", "string", "the group of that name"),
    ("aliases", "array of strings", "other names of the same workload"),
    (
        "shape",
        "object",
        "id, batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, dtype, mask; flops and bytes (both objects:"
        " forward, backward)",
    ),
    ("subject", "string", "name of the backend or callable, with its variant"),
    ("tags", "object", "family (the library), backend (without variant), compile (none, compile, max_autotune or graph)"),
    ("version", "string", "of the library; empty for a callable"),
    ("direction", "string", "forward, backward or forward+backward (that, of a check: out and gradients)"),
    ("backward", "boolean", "whether gradients were asked for"),
    ("tensor", "string", "of all tensors and input distributions, the one closest to its limits, or furthest over them"),
    ("distribution", "string", "its input distribution"),
    ("z_element", "number or null", "its largest residual over an element, in budgets (limit 8)"),
    ("z_row", "number or null", "the largest RMS over a row (limit 4)"),
    ("z_head", "number or null", "the largest RMS over a head (limit 1.5)"),
    (
        "tensors",
        "array of objects",
        "every tensor and distribution: name, distribution, passed, z_element, z_row, z_head, absmax, mean_abs, mse,"
        " relative_l2, cosine, worst (index), found, exact, budget, wrong_positions (elements that are NaN or infinite"
        " and should not be, or should be and are not)",
    ),
    ("is_sampled", "boolean", "whether only some rows and keys of a long workload were compared"),
    ("is_approximate", "boolean", "whether the kernel quantises, and was held to its quantised inputs"),
    ("compile_seconds", "number or null", "what the first calls of a compiled kernel took"),
    ("graph_breaks", "integer", "of torch.compile"),
    (
        "profiles",
        "array of objects",
        "with --attn-profile: direction, launches (symbol, words, seconds), peak_memory, flops, roofline (seconds)",
    ),
    (
        "latency",
        "object or null",
        "workload, subject, direction, verdict, key (of its baseline), p50 (seconds), interval"
        " (low, high, confidence), samples (with --attn-json-samples), blocks, spent (seconds), mode, calls, l2, host"
        " (seconds of launching), anchors, memory (bytes), threads, disturbances, notes, conditions, cupti, decision"
        " (verdict, reason, change, detectable, ...), baseline (p50 of each process, date, reason, history)",
    ),
    ("machine", "object", "name, device, kind, architecture, memory (bytes), torch, python, pytest_attn"),
    ("seconds", "number", "how long the test took, all its questions together"),
    ("command", "string", "what to type to run this case again"),
)

#: verdicts that fail a test, and those that someone should look at
WRONG = ("mismatch", "broken", "raised", "regressed", "unconfirmed", "unrecorded")
DOUBTFUL = ("inconclusive", "known defect")


class RecordWriter:
    """Writes the file of --attn-json. The file of an earlier run is replaced when the first record comes."""

    def __init__(self, path: str, with_samples: bool = False) -> None:
        self.path, self.with_samples = Path(path), with_samples
        self._file: IO[str] | None = None

    def write(self, records: Iterable[Record]) -> None:
        """Append records, and make sure that they are on their way to the disk. Raises OSError where that fails."""
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8", newline="\n")
        self._file.write("".join(f"{to_line(record, self.with_samples)}\n" for record in records))
        self._file.flush()

    def close(self) -> None:
        """Leave a file behind even where there was no record."""
        self.write(())
        assert self._file is not None
        self._file.close()


def to_line(record: Record, with_samples: bool = False) -> str:
    """Return a record as one line of strict JSON, its fields in the order of `FIELDS`."""
    complete = {"schema": SCHEMA, **record}
    latency = complete.get("latency")
    if latency and not with_samples:
        complete["latency"] = {key: value for key, value in latency.items() if key != "samples"}
    ordered = {name: complete[name] for name, _, _ in FIELDS if name in complete}
    return json.dumps(_named(ordered), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read_records(*paths: str | Path) -> list[dict[str, Any]]:
    """Return the records of one or more files of --attn-json, in their order.

    The last line of a run that was killed may be cut short, and is left out. Raises ValueError, with file and line, for
    anything else that is no record, or is of a newer schema.
    """
    found = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 ({error.reason}); expected a file that --attn-json wrote") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                is_cut = number == len(lines) and line.startswith("{")  # every whole line ends with a newline
                found += [record] if (record := _read(line, f"{path}, line {number}", is_cut)) else []
    return found


def _read(line: str, where: str, is_cut: bool) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if is_cut:
            return None
        raise ValueError(f"{where}: is not JSON ({error}); expected a line that --attn-json wrote") from None
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise ValueError(f'{where}: has no "schema"; expected a line that --attn-json wrote')
    if record["schema"] > SCHEMA:
        raise ValueError(f"{where}: is of schema {record['schema']}, this pytest-attn reads {SCHEMA}; install a newer one")
    for name, kind, _ in FIELDS:
        if (name in record or name in _REQUIRED) and not isinstance(record.get(name), _KINDS[kind]):
            found = f"{name} = {record[name]!r:.60}" if name in record else f'no "{name}"'
            raise ValueError(f"{where}: has {found}, expected {kind}; is it a line that --attn-json wrote?")
    return {key: value if key in _TEXTS else _numbers(value) for key, value in record.items()}


#: without which a record says nothing
_REQUIRED = frozenset(("question", "verdict", "workload", "subject"))
_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float, str),
    "number or null": (int, float, str, _NONE),
    "object": (dict,),
    "object or null": (dict, _NONE),
    "array of strings": (list,),
    "array of objects": (list,),
}
_TEXTS = frozenset(name for name, kind, _ in FIELDS if kind == "string")
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def name_of(number: float) -> str:
    """Return what stands for a number that JSON cannot say."""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _named(value: Any) -> Any:
    """Replace the numbers that JSON cannot say by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return name_of(value)
    if isinstance(value, Mapping):
        return {str(key): _named(one) for key, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, (list, tuple)) else value


def _numbers(value: Any) -> Any:
    """Turn these names into numbers again."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value
