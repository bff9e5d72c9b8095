"""The page of --attn-output=FILE.html: one file that opens offline, loads nothing, and runs no script but its own.

The page carries every text once, numbers with the digits that are shown, and nothing that is not. Times of two machines never
meet in one plot. Its charts are in charts.py, what draws them in the .js files beside it.
"""

import base64
import functools
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from string import Template
from typing import Any, NamedTuple

from pytest_attn.reports.lines import count
from pytest_attn.reports.records import LEVELS, RUN, Record, gathered, is_judged, mapped, name_of, verdict_of
from pytest_attn.reports.terminal import ending, inapplicable, untested
from pytest_attn.reports.verdict import Tone, Verdict
from pytest_attn.seam import each
from pytest_attn.workloads.functions import printable_lines

# -- the page ----------------------------------------------------------------------------------------------------------

INSTALL = 'pip install "pytest-attn[report]"'
_SCRIPTS = (
    *("dom", "data", "table", "plot", "problems", "details", "matrix", "layers", "latency", "errors", "roofline", "cases"),
    "main",
)


def missing_libraries() -> list[str]:
    """Return which modules of the extra `report` are not installed; imports none of them."""
    return [name for name in ("altair", "vl_convert") if find_spec(name) is None]


def report_page(records: Sequence[Record], title: str = "pytest-attn report") -> str:
    """Return the whole page. records: those of a run, or what `read_records` returns, of any number of machines.

    Raises ImportError where the extra `report` is not installed.
    """
    from pytest_attn.reports.html.charts import charts

    records = mapped(records, lambda one: printable_lines(one) if isinstance(one, str) else one)
    script = '"use strict";\n(() => {\n' + "\n".join(asset(f"{name}.js") for name in _SCRIPTS) + "\n})();"
    library = _library()
    return Template(asset("page.html")).substitute(
        title=escape(title),
        policy=policy(script, library),
        style=asset("style.css"),
        header=_header(records),
        data=to_script(payload(records)),
        charts=to_script(charts()),
        script=script,
        library=library,
    )


def asset(name: str) -> str:
    """Return the text of a file beside this one."""
    return files("pytest_attn.reports.html").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, of the version that Altair writes for, or else the newest."""
    import altair
    import vl_convert

    version = altair.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
    known = version in vl_convert.get_vegalite_versions()
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version if known else None)
    inert = bundle.replace("</script", r"<\/script").replace("<!--", r"<\!--")
    return f"(() => {{ {inert}\n }})();"


def policy(*scripts: str) -> str:
    """Return a content security policy under which nothing is loaded, and no script runs but these.

    Vega writes style attributes, which have no hash.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    sources = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return f"{sources}; base-uri 'none'; form-action 'none'"


def _header(records: Sequence[Record]) -> str:
    """Write how the run went and where, so that it is read before, and without, any script."""
    machines = by_machine(records)
    if not machines:
        return f'<p id="sentence" class="sentence">{escape(sentence(records))}</p>'
    first = machines[0]
    tone = "bad" if _wrong(first.records) else "fine"
    facts = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in facts_in_words(first))
    return (
        f'<p id="sentence" class="sentence {tone}">{escape(sentence(first.records))}</p>'
        f'<p id="why" class="reason">{escape(why(first.records))}</p>'
        f'<dl id="facts" class="facts">{facts}</dl>'
    )


# -- records as the page carries them ----------------------------------------------------------------------------------

_DIGITS = 5
_SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim", "dtype", "mask", "flops", "bytes")
_FIGURES = ("z_element", "z_row", "z_head", "z_slope", "absmax", "mean_abs", "mse", "relative_l2", "cosine")
_DECISION = ("change", "interval", "detectable", "recorded", "runs")
_LATENCY = ("p50", "interval", "blocks", "mode", "calls", "l2", "host", "memory", "threads", "disturbances", "notes", "cupti")


def payload(records: Sequence[Record]) -> dict[str, Any]:
    """Return what the page's script reads, of types that JSON has."""
    machines = by_machine(records)
    texts, workloads, subjects, launches = Interned(), Interned(), Interned(), Interned()
    cases = [
        _case(number, record, texts, workloads, subjects, launches)
        for number, machine in enumerate(machines)
        for record in machine.records
    ]
    shown = dict.fromkeys([*(verdict.value for verdict in Verdict), *map(shown_verdict, records)])
    return {
        "machines": [
            {"sentence": sentence(one.records), "why": why(one.records), "facts": facts_in_words(one)} for one in machines
        ],
        "verdicts": [[verdict, *words_of(verdict)[:3]] for verdict in shown],
        "fields": list(cases[0]) if cases else [],
        "cases": [_row(case) for case in cases],
        "workloads": workloads.rows,
        "subjects": subjects.rows,
        "launches": launches.rows,
        "texts": texts.rows,
    }


def to_script(value: Any) -> str:
    """Write JSON that no text in it can end the script element of, or open a comment in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


class Interned:
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


def _case(
    number: int, record: Record, texts: Interned, workloads: Interned, subjects: Interned, launches: Interned
) -> dict[str, Any]:
    """Return what the page says of a record; 0 for what there is not."""
    z = [short(z) for z in (record["z_element"], record["z_row"], record["z_head"])]
    compilation = [short(record["compile_seconds"]), record["graph_breaks"]]
    subject = {"name": record["subject"], **record["tags"], "version": record["version"]}
    number_of = texts.number_of
    calls: Any = record.get("calls", ())  # a guest's
    return {
        "machine": number,
        "workload": workloads.number_of(record["workload"], _workload(record)),
        "subject": subjects.number_of(record["subject"], subject),
        "question": number_of(record["question"]),
        "verdict": number_of(shown_verdict(record)),
        "direction": number_of(record["direction"]),
        "reason": number_of(record["reason"]),
        "explanation": [[number_of(line["label"]), number_of(line["text"])] for line in record["explanation"]] or 0,
        "test": number_of(record["test"]),
        "command": number_of(record["command"]),
        "z": z if record["z_element"] is not None else 0,
        "worst": [number_of(record["tensor"]), number_of(record["distribution"])] if record["tensor"] else 0,
        "tensors": [_tensor(tensor, texts) for tensor in record["tensors"]] or 0,
        "is_sampled": int(record["is_sampled"]),
        "compile": compilation if record["compile_seconds"] is not None else 0,
        "profiles": [_profile(profile, launches) for profile in record["profiles"]] or 0,
        "latency": _latency(record["latency"]) or 0,
        "calls": [_call(call, texts) for call in calls] or 0,
    }


def _row(case: Mapping[str, Any]) -> list[Any]:
    """Return the values of a case, without the zeros at its end."""
    row = list(case.values())
    while row and row[-1] == 0:
        row.pop()
    return row


def _workload(record: Record) -> dict[str, Any]:
    shape = record["shape"] or {}
    known = {name: shape[name] for name in _SIZES if name in shape}
    return {"id": record["workload"], "group": record["group"], "aliases": list(record["aliases"]), **known}


def _tensor(tensor: Mapping[str, Any], texts: Interned) -> list[Any]:
    """Return a tensor's figures; where it is worst only of those that failed."""
    row: list[Any] = [texts.number_of(tensor["name"]), texts.number_of(tensor["distribution"]), int(tensor["passed"])]
    row += [short(tensor.get(figure)) for figure in _FIGURES]
    if not tensor["passed"]:
        row += [list(tensor.get("worst") or ()), *(short(tensor.get(figure)) for figure in ("found", "exact", "budget"))]
    return row


def _call(call: Mapping[str, Any], texts: Interned) -> list[Any]:
    """Return the judgment of one of several calls; without z where nothing could be compared."""
    words = [texts.number_of(str(call[word])) for word in ("module", "workload", "tensor")]
    z = [short(call[level]) for level in LEVELS]
    return [*words, int(call["passed"]), 0 if None in z else z]


def _profile(profile: Mapping[str, Any], launches: Interned) -> dict[str, Any]:
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

    def shortened(one: Any) -> Any:
        if not isinstance(one, float):
            return one
        return float(f"{one:.{_DIGITS}g}") if math.isfinite(one) else name_of(one)

    return mapped(value, shortened)


# -- whose records these are -------------------------------------------------------------------------------------------

#: of a GPU among others of its kind
_INDEX = re.compile(r":\d+$")


class MachineRecords(NamedTuple):
    """One machine with its software, and what was judged on it."""

    facts: Mapping[str, Any]
    records: Sequence[Record]


def by_machine(records: Sequence[Record]) -> list[MachineRecords]:
    """Separate records by machine and software, those where most is wrong first; GPUs of one kind are one machine.

    A test that raised before its machine was known belongs to the only machine, if there is only one.
    """
    found = gathered((_identity(record["machine"]), record) for record in records)
    nameless = found.pop((), [])
    if nameless:
        owner = next(iter(found)) if len(found) == 1 else ()
        found.setdefault(owner, []).extend(nameless)
    machines = [MachineRecords(max((record["machine"] for record in mine), key=len), mine) for mine in found.values()]
    return sorted(machines, key=lambda machine: -_wrong(machine.records))


def _identity(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what distinguishes a machine, () where nothing is known of it."""
    return tuple(f"{key}={_INDEX.sub('', str(value))}" for key, value in sorted(facts.items()))


def sentence(records: Sequence[Record]) -> str:
    """Say how the run went, what is wrong first."""
    if not records:
        return "No attention test ran."
    judged = [record for record in records if is_judged(record)]
    counts = Counter(shown_verdict(record) for record in judged)
    wrong, doubtful, fine = _counted(counts, "bad"), _counted(counts, "doubt"), _counted(counts, "good", "plain", "none")
    said = list(ending(records))
    if wrong:
        said.append(f"{_wrong(judged):,} of {count(len(judged), 'judgment')} went wrong: {wrong}.")
    if beside := sum(not is_judged(record) and record["phase"] != RUN for record in records):
        said.append(f"{beside:,} {Verdict.FAILED.counted}.")
    if not said and not _counted(counts, "good", "doubt"):
        return f"Nothing was found right or wrong: {fine}."
    rest = f"The rest: {fine}." if said else f"{fine[:1].upper()}{fine[1:]}."
    said = said or ["No attention test went wrong."]
    said += [f"To look at: {doubtful}."] * bool(doubtful) + [rest] * bool(fine)
    return " ".join(said)


def why(records: Sequence[Record]) -> str:
    """Say what the gravest finding is, and what it suggests; "" where nothing is wrong."""
    order = [verdict.value for verdict in Verdict]
    wrong = [record for record in records if words_of(shown_verdict(record)).tone == "bad"]
    if not wrong:
        return ""
    alike = Counter((record["verdict"], record["subject"]) for record in wrong)

    def place(record: Record) -> tuple[int, bool, int, float]:
        often = alike[record["verdict"], record["subject"]]
        return order.index(record["verdict"]), not _suggested(record), -often, -(record["z_element"] or 0)

    first = min(wrong, key=place)  # as in the list of what is wrong: of those as grave, what most cases have, then z
    named = f"{first['subject']} on {first['workload']}" if is_judged(first) else first["test"] or "the run"
    return f"{named}: {'; '.join([first['reason'], *_suggested(first)[:1]])}"


def _suggested(record: Record) -> list[str]:
    return [line["text"] for line in record["explanation"] if line["label"] == "suggests"]


def _wrong(records: Sequence[Record]) -> int:
    return sum(words_of(shown_verdict(record)).tone == "bad" for record in records)


def _counted(counts: Counter[str], *tones: str) -> str:
    names = [verdict.value for verdict in Verdict]
    known = [*names, *(name for name in counts if name not in names)]
    shown = [(counts[v], words_of(v)) for v in known if counts[v] and words_of(v).tone in tones]
    return ", ".join(f"{number:,} {words.counted}" for number, words in shown)


def facts_in_words(machine: MachineRecords) -> list[tuple[str, str]]:
    """Return what is known of a machine and its run, as terms and descriptions."""
    facts = machine.facts
    dates = sorted(str(record["date"]) for record in machine.records if record["date"])
    memory = facts.get("memory")
    seconds = sum({record["test"]: record["seconds"] for record in machine.records}.values())  # each has its whole test's
    rows = [
        ("Machine", facts.get("name", "not known")),
        ("Device", " · ".join(dict.fromkeys(str(facts[key]) for key in ("device", "architecture") if facts.get(key)))),
        ("Memory", f"{memory / 2**30:,.0f} GiB" if isinstance(memory, (int, float)) else ""),
        ("Run", _span(dates)),
        ("Time in tests", f"{seconds:,.0f} s" if seconds >= 1 else ""),
        ("torch", facts.get("torch", "")),
        ("Python", facts.get("python", "")),
        ("pytest-attn", facts.get("pytest_attn", "")),
        ("Untested", "; ".join(untested(machine.records))),
        ("Did not apply", "; ".join(inapplicable(machine.records))),
        *((title, " ".join(texts)) for results in each("results") for title, texts in results(machine.records)),
        ("Libraries", ", ".join(f"{library} {version}" for library, version in _libraries(machine.records))),
    ]
    return [(term, str(text)) for term, text in rows if text]


def _span(dates: Sequence[str]) -> str:
    """Write when a run began and ended: "2026-11-21 19:34 to 19:40 UTC"."""
    if not dates:
        return ""
    (day, begun), (last, ended) = ((date[:10], date[11:16]) for date in (dates[0], dates[-1]))
    end = "" if (day, begun) == (last, ended) else f" to {ended}" if day == last else f" to {last} {ended}"
    return f"{day} {begun}{end} UTC"


def _libraries(records: Sequence[Record]) -> list[tuple[str, str]]:
    found = {
        (str(record["tags"].get("family", "")), str(record["version"]))
        for record in records
        if record["version"] and record["verdict"] != "skipped"
    }
    return sorted(found)


# -- what the page calls a verdict, those of newer versions included ---------------------------------------------------


class Words(NamedTuple):
    """One verdict as a reader meets it; counted: its words behind a number."""

    word: str
    glyph: str
    tone: str
    counted: str


def shown_verdict(record: Record) -> str:
    """Return the name under which the page shows a record's verdict."""
    verdict = verdict_of(record)
    return verdict.value if verdict else record["verdict"]


def words_of(name: str) -> Words:
    """Return what the page calls a verdict; one that it does not know is a doubt."""
    verdict = Verdict.named(name)
    if verdict is None:
        return Words(name, "?", Tone.DOUBT.value, name)
    return Words(verdict.word, verdict.glyph, verdict.tone.value, verdict.counted)
