"""Records as the page carries them: every text once, numbers with the digits that are shown, nothing that is not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_attn.reports.html.machines import by_machine, facts_in_words, sentence
from pytest_attn.reports.html.verdicts import shown_verdict, words_of
from pytest_attn.reports.records import Record, name_of
from pytest_attn.verdict import Verdict

_DIGITS = 5
_SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim", "dtype", "mask", "flops", "bytes")
_FIGURES = ("z_element", "z_row", "z_head", "absmax", "mean_abs", "mse", "relative_l2", "cosine")
_DECISION = ("change", "interval", "detectable", "recorded", "runs")
_LATENCY = ("p50", "interval", "blocks", "mode", "calls", "l2", "host", "memory", "threads", "disturbances", "notes", "cupti")
#: what a row of the page says, in this order
CASE = (
    *("machine", "workload", "subject", "question", "verdict", "direction", "reason", "test", "command", "z", "worst"),
    *("tensors", "is_sampled", "compile", "profiles", "latency", "calls"),
)


def payload(records: Sequence[Record]) -> dict[str, Any]:
    """Return what the page's script reads, of types that JSON has."""
    machines = by_machine(records)
    texts, workloads, subjects, launches = Table(), Table(), Table(), Table()
    cases = [
        _case(number, record, texts, workloads, subjects, launches)
        for number, machine in enumerate(machines)
        for record in machine.records
    ]
    shown = dict.fromkeys([*(verdict.value for verdict in Verdict), *map(shown_verdict, records)])
    return {
        "machines": [{"sentence": sentence(one.records), "facts": facts_in_words(one)} for one in machines],
        "verdicts": [[verdict, *words_of(verdict)[:3]] for verdict in shown],
        "fields": CASE,
        "cases": cases,
        "workloads": workloads.rows,
        "subjects": subjects.rows,
        "launches": launches.rows,
        "texts": texts.rows,
    }


def to_script(value: Any) -> str:
    """Write JSON that no text in it can end the script element of, or open a comment in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


class Table:
    """Rows that many cases share, each kept once and named by its number."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number_of(self, key: Any, row: Any = None) -> int:
        """Return the number of a row; `key` tells rows apart, and is the row itself where none is given."""
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(key if row is None else row)
        return self._numbers[key]


def _case(number: int, record: Record, texts: Table, workloads: Table, subjects: Table, launches: Table) -> list[Any]:
    z = [short(z) for z in (record["z_element"], record["z_row"], record["z_head"])]
    worst = [record["tensor"], record["distribution"]] if record["tensor"] else None
    compilation = [short(record["compile_seconds"]), record["graph_breaks"]]
    row: list[Any] = [
        number,
        workloads.number_of(record["workload"], _workload(record)),
        subjects.number_of(record["subject"], _subject(record)),
        texts.number_of(record["question"]),
        texts.number_of(shown_verdict(record)),
        texts.number_of(record["direction"]),
        *(texts.number_of(str(text)) for text in (record["reason"], record["test"], record["command"])),
        z if record["z_element"] is not None else 0,
        [texts.number_of(text) for text in worst] if worst else 0,
        [_tensor(tensor, texts) for tensor in record["tensors"]] or 0,
        int(record["is_sampled"]),
        compilation if record["compile_seconds"] is not None else 0,
        [_profile(profile, launches) for profile in record["profiles"]] or 0,
        _latency(record["latency"]) or 0,
        [_call(call, texts) for call in record["calls"]] or 0,
    ]
    while row and row[-1] == 0:
        row.pop()
    return row


def _workload(record: Record) -> dict[str, Any]:
    shape = record["shape"] or {}
    known = {name: shape[name] for name in _SIZES if name in shape}
    return {"id": record["workload"], "group": record["group"], "aliases": list(record["aliases"]), **known}


def _subject(record: Record) -> dict[str, Any]:
    return {"name": record["subject"], **record["tags"], "version": record["version"]}


def _tensor(tensor: Mapping[str, Any], texts: Table) -> list[Any]:
    """Return a tensor's figures; where it is worst only of those that failed."""
    row: list[Any] = [texts.number_of(tensor["name"]), texts.number_of(tensor["distribution"]), int(tensor["passed"])]
    row += [short(tensor.get(figure)) for figure in _FIGURES]
    if not tensor["passed"]:
        row += [list(tensor.get("worst") or ()), *(short(tensor.get(figure)) for figure in ("found", "exact", "budget"))]
    return row


def _call(call: Mapping[str, Any], texts: Table) -> list[Any]:
    """Return the judgment of one attention call of a model; without z where nothing could be compared."""
    words = [texts.number_of(str(call[word])) for word in ("module", "workload", "tensor")]
    z = [short(call[level]) for level in ("z_element", "z_row", "z_head")]
    return [*words, int(call["passed"]), 0 if None in z else z]


def _profile(profile: Mapping[str, Any], launches: Table) -> dict[str, Any]:
    words = ("framework", "category", "architecture", "operation", "symbol")
    rows = []
    for launch in profile["launches"]:
        kernel = tuple(str(launch.get(word) or "") for word in words)
        rows.append([launches.number_of(kernel), launch["calls"], short(launch["seconds"])])
    shown = {key: short(profile.get(key)) for key in ("peak_memory", "flops", "roofline", "seconds")}
    return {"direction": profile["direction"], "launches": rows, **shown}


def _latency(latency: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not latency or not latency.get("p50"):
        return None
    shown = {key: short(latency[key]) for key in _LATENCY if latency.get(key)}
    decision, baseline = latency.get("decision") or {}, latency.get("baseline")
    shown["decision"] = {key: short(decision[key]) for key in _DECISION if decision.get(key)}
    if baseline:
        shown["baseline"] = short({key: baseline.get(key) for key in ("p50", "date", "reason", "history")})
    return shown


def short(value: Any) -> Any:
    """Shorten the numbers within a value; those that JSON has no word for become their names."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else name_of(value)
    if isinstance(value, Mapping):
        return {key: short(one) for key, one in value.items()}
    return [short(one) for one in value] if isinstance(value, (list, tuple)) else value
