"""`python -m pytest_attn certify RUN.jsonl ... -o DIR`: a JSON file and a badge of each kernel, version and device.

A page of all certificates in a folder shows which kernel is right on which group of workloads. Each number is of the records:
in the checkout of their commit, the same records make the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from pytest_attn.guests.evidence.verify import CannotSayError, not_of_commit, not_whole, tree_of
from pytest_attn.reports import strict_json
from pytest_attn.reports.files import write_atomically
from pytest_attn.reports.lines import count, some, z_figure
from pytest_attn.reports.markdown import as_code, as_row, as_text
from pytest_attn.reports.merging import usage_errors
from pytest_attn.reports.records import Record, gathered, named_numbers, read_line, verdict_of
from pytest_attn.reports.runs import Run, RunFacts, read_runs
from pytest_attn.reports.strict_json import COUNT, NUMBER, TEXT, TRUTH, array_of, by_name, object_of, or_null, sealed
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.functions import printable

#: version of a certificate
SCHEMA = 1
#: how a case ended; one that was judged more than once ended as the first of these
_ENDS = ("wrong", "known", "right", "not_taken", "left_out")
_JUDGED = _ENDS[:3]
_RIGHT = (Verdict.PASSED, Verdict.APPROXIMATE, Verdict.HELD, Verdict.HELD_IN_PART, Verdict.UNEXPECTED)
_KNOWN = (Verdict.KNOWN_DEFECT, Verdict.EXPECTED)
#: those of a time that are of values
_OF_VALUES = (Verdict.MISMATCH, Verdict.NO_RESULT, Verdict.RAISED, Verdict.KNOWN_DEFECT)
#: what invariants say of bits: "seen-" of what was not promised, "bits-" of promises
_BITS = re.compile(r"\b(seen|bits)-(\w+)(: keeps its bits)?")
#: the group of workloads that have none, and the name of a kernel that a record does not know
_OTHERS, _UNKNOWN = "other", "-"
#: sentences on what is wrong, the cases that one names, and characters of a reason
_MOST_WRONG, _MOST_CASES, _LONGEST = 20, 3, 160

_CASES = sealed(object_of(dict.fromkeys((*_ENDS, "judged"), COUNT)))
_KEPT = sealed(object_of({"kept": COUNT, "of": COUNT}))
_OF_RUN = {**dict.fromkeys(("command", "choice", "digest"), TEXT), "seed": {"type": "integer"}}
#: fields of a certificate: the description of each, and its meaning
_FIELDS: dict[str, tuple[Mapping[str, Any], str]] = {
    "schema": ({"type": "integer", "enum": [SCHEMA]}, "version of this table"),
    "kernel": (TEXT, "name of the backend or callable, with its variant"),
    "version": (TEXT, "of its library; of a callable the commit"),
    "device": (TEXT, "name of the GPU or CPU"),
    "date": ({**TEXT, "pattern": r"^\d{4}-\d\d-\d\d$"}, "of the last judgment, UTC"),
    "commit": (TEXT, "of the tests, marked if there were uncommitted changes; empty without git"),
    "remarks": (array_of(TEXT), "why the run is not known to be of this commit"),
    "versions": (by_name(TEXT), "of torch, Python and pytest-attn"),
    "approximate": (TRUTH, "whether it quantizes, and was compared on its quantized inputs"),
    "cases": (
        _CASES,
        "a case is a workload in a direction, with every check and invariant of it. known: wrong, as a defect or an xfail"
        " says; judged: wrong, known or right; not_taken: declined by the kernel; left_out: skipped for another reason",
    ),
    "groups": (by_name(_CASES), f"the same by group of the catalog; {_OTHERS}: of no group"),
    "wrong": (array_of(TEXT), f"what failed in which cases, at most {_MOST_WRONG} sentences"),
    "z_worst": (or_null(NUMBER), "the largest z of an element in any check (limit 8)"),
    "bits": (by_name(_KEPT), "in how many cases bits were kept, by the promise, whether or not the kernel makes it"),
    "steady": (_KEPT, "in how many attn.check_steady passed"),
    "runs": (
        array_of(sealed(object_of({**_OF_RUN, "unchosen": COUNT}))),
        "as their closing lines have it; unchosen: tests that -k, -m and --deselect left out",
    ),
    "digest": (TEXT, "SHA-256 of the other fields, as JSON without spaces, keys in order"),
}
CERTIFICATE = sealed(object_of({name: {**kind, "title": meaning} for name, (kind, meaning) in _FIELDS.items()}))
Certificate: TypeAlias = dict[str, Any]
#: kernel, version and device
_Key: TypeAlias = tuple[str, str, str]


def run_certify(given: argparse.Namespace) -> int:
    """Write certificates, badges and the page; return 0, or 1 for what is not certified, which is said in one line."""
    folder = Path(given.output)
    if not given.output.strip() or (folder.exists() and not folder.is_dir()):
        given.error(f"-o must be a folder, got {given.output!r}")
    if given.page is not None and not given.page.endswith(".md"):
        given.error(f"--page must end in .md, got {given.page!r}")
    if not (given.files or given.page):
        given.error("name the .jsonl files of whole runs; or of certificates that are in -o the page: --page=FILE.md")
    if not (given.files or folder.exists()):
        given.error(f"there is no folder {given.output!r}; name that of the certificates: -o DIR")
    with usage_errors(given):
        made, refused = _of_files(given.files)
        if refused:
            others = f" ({len(refused) - 1} more: python -m pytest_attn verify)" if refused[1:] else ""
            print(f"certify: {refused[0]}{others}", file=sys.stderr)
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        for one in made:
            name = file_name(one)
            write_atomically(folder / f"{name}.json", to_json(one))
            write_atomically(folder / f"{name}.svg", badge(one))
            print(f"{printable(f'{folder / name}.json', 0)}: {_named(one)}: {_said(one)}")
        if given.page:
            page = Path(given.page)
            page.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(page, page_of(page, read_certificates(folder), folder))
    return 0


def _of_files(paths: Sequence[str]) -> tuple[list[Certificate], list[str]]:
    """Return the certificates of the runs in some files, and why they have none."""
    of_devices = list(gathered((_device_of(run), run) for path in paths for run in read_runs(path)).values())
    if refused := [said for runs in of_devices for said in not_whole(runs)]:
        return [], refused
    made = [one for runs in of_devices for one in certificates(runs)]
    if paths and not made:
        return [], [f"{paths[0]} has judged no values, expected check or check_invariants"]
    return made, [f"{_named(one)} is in two runs, expected one; certify them apart" for one in _twice(made)]


def _twice(made: Iterable[Certificate]) -> list[Certificate]:
    return [same[0] for same in gathered((file_name(one), one) for one in made).values() if same[1:]]


def _device_of(run: Run) -> str:
    return run.facts["device"] if run.facts else ""


# -- of records ------------------------------------------------------------------------------------------------------------


def certificates(runs: Sequence[Run]) -> Iterator[Certificate]:
    """Yield the certificates of whole runs on one device: of each kernel in each version of which a case was judged."""
    closed = [run.facts for run in runs if run.facts]
    records = [record for run in runs for line in run.lines if (record := read_line(line, run.path))]
    kernels, beside = _by_kernel(records, closed[0])
    of_runs = {
        "schema": SCHEMA,
        "commit": closed[0]["commit"],
        "remarks": list(dict.fromkeys(said for facts in closed for said in _remarks(facts))),
        "runs": [_run_of(facts) for facts in closed],
    }
    for (kernel, version, device), own in sorted(kernels.items()):
        groups, wrong = _judged(own)
        cases = {name: sum(one[name] for one in groups.values()) for name in _CASES["properties"]}
        counted = {"cases": cases, "groups": groups, "wrong": [*wrong, *beside][:_MOST_WRONG]}
        if cases["judged"]:
            named = {"kernel": kernel, "version": version, "device": device}
            found = named_numbers({**of_runs, **named, **counted, **_figures_of(own)})
            yield {**found, "digest": _digest(found)}


def _figures_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return what else a certificate has of the records of its kernel."""
    machine, z = records[0]["machine"], [one["z_element"] for one in records if one["z_element"] is not None]
    steady = [_end_of(one) == "right" for one in records if _is_steady(one) and _end_of(one) in _JUDGED]
    return {
        "date": max(one["date"] for one in records)[:10],
        "versions": {name: machine[name] for name in ("torch", "python", "pytest_attn") if name in machine},
        "approximate": any(one["is_approximate"] for one in records),
        "z_worst": max(z, key=lambda one: math.inf if math.isnan(one) else one, default=None),
        "bits": _bits(records),
        "steady": _kept(steady),
    }


def _remarks(facts: RunFacts) -> Iterator[str]:
    """Yield why a run is not known to be of its commit."""
    commit = facts["commit"].partition("+")[0]
    try:
        said = not_of_commit(facts, *tree_of(commit)) if commit else ["is of no commit"]
        yield from (one.partition(";")[0] for one in said)
    except CannotSayError:  # whose words may name folders of this machine
        yield "could not be held against its commit"


def _run_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: facts[name] for name in _OF_RUN}, "unchosen": len(facts["unchosen"])}


def _by_kernel(records: Iterable[Record], facts: RunFacts) -> tuple[dict[_Key, list[Record]], list[str]]:
    """Return the records of each kernel, and what failed where none is known.

    A failure that no judgment tells, as of a process that was killed, knows neither version nor device. It is of the kernels
    that its test has judged, or of all versions of the one that it names.
    """
    told: dict[bool, list[Record]] = {True: [], False: []}
    for record in records:
        told[bool(record["machine"]) and record["subject"] != _UNKNOWN].append(record)
    kernels = gathered((_key(one, facts), one) for one in told[True])
    of_tests = gathered((one["test"], one) for one in told[True])
    beside = []
    for record in told[False]:
        failed: Any = {"question": "check", "verdict": record["verdict"], "reason": record["reason"]}
        homes = [(_key(one, facts), one) for one in of_tests.get(record["test"], ())]
        for key, one in homes or [(key, record) for key in _keys_of(record["subject"], kernels, facts)]:
            kernels.setdefault(key, []).append({**one, **failed})
        if not homes and record["subject"] == _UNKNOWN:
            beside.append(printable(f"{record['test']}: {record['reason']}, of no kernel that is known", _LONGEST))
    return kernels, beside


def _keys_of(name: str, kernels: Iterable[_Key], facts: RunFacts) -> list[_Key]:
    known = [key for key in kernels if key[0] == name]
    return known or [(name, "", facts["device"])] * (name != _UNKNOWN)


def _key(record: Record, facts: RunFacts) -> _Key:
    commit, plus, _ = facts["commit"].partition("+")
    return record["subject"], record["version"] or commit[:10] + plus, record["machine"].get("name", "")


def _judged(records: Iterable[Record]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return how many cases of each group ended how, and in sentences what was wrong."""
    catalog, cases, wrong = builtin_catalog(), dict[tuple[str, str, str], str](), dict[str, dict[str, None]]()
    for record in records:
        end = _end_of(record)
        if end in ("wrong", "known"):
            said = printable(f"{record['verdict']}: {record['reason']}".rstrip(": "), _LONGEST)
            named = printable(f"{record['workload']}, {record['direction']}".rstrip(", "), _LONGEST)
            wrong.setdefault(said, {})[named] = None
        if end and not _is_steady(record):
            group = record["group"] or catalog.group_of(record["name"]) or _OTHERS
            case = group, record["workload"], record["direction"]
            cases[case] = min(end, cases.get(case, end), key=_ENDS.index)
    counted = {group: Counter(ends) for group, ends in gathered((case[0], end) for case, end in cases.items()).items()}
    groups = {
        group: {**{end: ends[end] for end in _ENDS}, "judged": sum(ends[end] for end in _JUDGED)}
        for group, ends in counted.items()
    }
    return groups, [f"{said} ({some(list(names), _MOST_CASES)})" for said, names in sorted(wrong.items())]


def _end_of(record: Record) -> str:
    """Return how a judgment ended, "" where it says nothing of right or wrong."""
    verdict = verdict_of(record)
    if verdict is Verdict.SKIPPED:
        return "not_taken" if record["cause"] == Cause.DECLINED else "left_out"
    if verdict in _RIGHT:
        return "" if {kind for kind, *_ in _bits_of(record)} == {"seen"} else "right"  # a look at bits finds nothing wrong
    if record["question"] == "latency" and verdict not in _OF_VALUES:
        return ""
    if verdict in _KNOWN:
        return "known"
    return "wrong" if verdict is None or verdict.is_wrong else ""


def _is_steady(record: Record) -> bool:
    return record["question"] == "steady"


def _bits(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    found = gathered((name, bool(kept)) for one in records for _, name, kept in _bits_of(one))
    return {name: _kept(each) for name, each in found.items()}


def _bits_of(record: Record) -> list[tuple[str, str, str]]:
    is_judged = record["question"] == "invariants" and record["verdict"] != Verdict.SKIPPED
    return _BITS.findall(record["reason"]) if is_judged else []


def _kept(each: Sequence[bool]) -> dict[str, int]:
    return {"kept": sum(each), "of": len(each)}


# -- files -----------------------------------------------------------------------------------------------------------------


def to_json(certificate: Certificate) -> str:
    """Return the text of its file."""
    return f"{json.dumps(certificate, indent=1, sort_keys=True, ensure_ascii=False)}\n"


def _digest(certificate: Certificate) -> str:
    rest = {name: value for name, value in certificate.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_name(certificate: Certificate) -> str:
    """Return the name of its file without the ending: "flash2-2.8.3-nvidia-h200"; names of other signs get a digest."""
    device = certificate["device"].lower().replace(" ", "-")
    words = f"{certificate['kernel']}-{certificate['version']}-{device}"
    plain = re.sub(r"[^\w.+-]+", "-", words, flags=re.ASCII).strip(".-")[:100]
    return plain if plain == words else f"{plain}-{hashlib.sha256(words.encode(errors='backslashreplace')).hexdigest()[:8]}"


def read_certificates(folder: Path) -> list[Certificate]:
    """Return the certificates in a folder, in order. Raises ValueError, with the file, for anything else."""
    return sorted(map(read_certificate, folder.glob("*.json")), key=lambda one: [one[key] for key in _ORDER])


_ORDER = ("device", "kernel", "version")


def read_certificate(path: Path) -> Certificate:
    """Return the certificate of a file. Raises ValueError for what is none, or was changed."""
    try:
        found: Certificate = strict_json.parse_json(path.read_text(encoding="utf-8"))
        fault = strict_json.first_fault(found, CERTIFICATE)
    except ValueError as error:
        fault = str(error)
    if fault:
        raise ValueError(f"{path}: {printable(fault, 0)}; expected what python -m pytest_attn certify wrote")
    if found["digest"] != _digest(found):
        raise ValueError(f"{path}: its digest is not that of what it says: it was changed; certify its run again")
    if path.stem != file_name(found):
        raise ValueError(f"{path}: is the certificate {file_name(found)}; give it that name again")
    return found


# -- the badge -------------------------------------------------------------------------------------------------------------

_GREEN, _ORANGE, _RED = "#1a7f37", "#9a6700", "#cf222e"
#: pixels of a character, and on both sides of a text
_WIDE, _MARGINS = 7, 12


def badge(certificate: Certificate) -> str:
    """Return a badge in SVG: red where values are wrong, orange where something else failed, as a known defect."""
    color = _RED if certificate["cases"]["wrong"] else _ORANGE if certificate["wrong"] else _GREEN
    texts = _named(certificate), _said(certificate)
    left, right = (_WIDE * len(text) + _MARGINS for text in texts)
    said = escape(": ".join(texts))
    parts = (
        f'<rect x="{x}" width="{width}" height="20" fill="{fill}"/>\n'
        f'<text x="{x + _MARGINS // 2}" y="14" fill="#fff" textLength="{width - _MARGINS}">{escape(text)}</text>\n'
        for text, x, width, fill in ((texts[0], 0, left, "#24292f"), (texts[1], left, right, color))
    )
    size, font = f'width="{left + right}" height="20"', 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label="{said}">'
    return f"{start}\n<title>{said}</title>\n{''.join(parts)}</svg>\n"


def _named(certificate: Certificate) -> str:
    return printable(f"{certificate['kernel']} {certificate['version']} on {certificate['device']}", 80)


def _said(certificate: Certificate) -> str:
    cases = certificate["cases"]
    return f"{cases['right']:,} of {cases['judged']:,} right{', approximate' * certificate['approximate']}"


# -- the page --------------------------------------------------------------------------------------------------------------

_PART = re.compile(r"^(<!-- generated: certificates -->\n).*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
_EMPTY = "# Conformance\n\n<!-- generated: certificates -->\n<!-- end -->\n"
_FIGURES = ("right", "known defects", "not taken", "largest z", "steady", "bits kept", "torch", "commit", "date")


def page_of(page: Path, found: Sequence[Certificate], folder: Path) -> str:
    """Return a page with what the certificates of a folder say between its marks; a new page where there is none."""
    text = page.read_text(encoding="utf-8") if page.exists() else _EMPTY
    if not _PART.search(text):
        raise ValueError(f"{page} lacks {_EMPTY.split(maxsplit=2)[2]!r}; add both lines, or name another page")
    lines = list(_lines(found, quote(Path(os.path.relpath(folder, page.parent)).as_posix()))) or [
        "No certificate is here yet.",
        "",
    ]
    return _PART.sub(lambda marks: "\n".join((marks[1], *lines, marks[2])), text)


def _lines(found: Iterable[Certificate], folder: str) -> Iterator[str]:
    for device, own in gathered((one["device"], one) for one in found).items():
        yield from (f"## {as_text(device)}", "")
        names = [f"[{as_code(one['kernel'])}]({folder}/{file_name(one)}.json) | {as_text(one['version'])}" for one in own]
        yield from _table(_FIGURES, names, map(_figures, own))
        groups = _in_order({name for one in own for name, cases in one["groups"].items() if cases["judged"]})
        yield from _table(map(as_text, groups), names, ([_cell(one, group) for group in groups] for one in own))
        yield from _beneath(own)


def _beneath(own: Sequence[Certificate]) -> Iterator[str]:
    yield from _list("Wrong", (f"{as_text(_named(one))}: {as_text(said)}" for one in own for said in one["wrong"]))
    yield from _list("Of these runs", (as_text(said) for one in own for said in one["remarks"]))
    yield from _list("Runs", (_command(run) for one in own for run in one["runs"]))


def _in_order(groups: Iterable[str]) -> list[str]:
    """Return groups in the order of the catalog, others last."""
    order = {entry.group: number for number, entry in enumerate(builtin_catalog())}
    return sorted(groups, key=lambda name: (order.get(name, len(order)), name))


def _figures(one: Certificate) -> Iterator[str]:
    cases, steady, z = one["cases"], one["steady"], one["z_worst"]
    yield from (_said(one), f"{cases['known']:,}", f"{cases['not_taken']:,}")
    yield "-" if z is None else z if isinstance(z, str) else z_figure(z)
    yield f"{steady['kept']}/{steady['of']}" if steady["of"] else "-"
    yield as_text(", ".join(f"{name} {kept['kept']}/{kept['of']}" for name, kept in sorted(one["bits"].items()))) or "-"
    yield from (as_text(one["versions"].get("torch", "-")), as_text(one["commit"][:10]) or "-", one["date"])


def _cell(one: Certificate, group: str) -> str:
    cases = one["groups"].get(group, {"judged": 0})
    if not cases["judged"]:
        return "-"
    of = f"/{cases['judged']}" if cases["right"] < cases["judged"] else ""
    return f"{'≈' * one['approximate']}{cases['right']}{of}"


def _command(run: Mapping[str, Any]) -> str:
    unchosen = f", {count(run['unchosen'], 'test')} not chosen" if run["unchosen"] else ""
    return f"{as_code(run['command'])}, seed {run['seed']}{unchosen}"


def _table(titles: Iterable[str], names: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    header = ["kernel", "version", *titles]
    yield from (as_row(*header), as_row(*["---"] * len(header)))
    yield from (as_row(name, *row) for name, row in zip(names, rows, strict=True))
    yield ""


def _list(title: str, lines: Iterable[str]) -> Iterator[str]:
    if found := [f"- {line}" for line in dict.fromkeys(lines)]:
        yield from (f"{title}:", "", *found, "")
