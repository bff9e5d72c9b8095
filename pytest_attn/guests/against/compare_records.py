"""`python -m pytest_attn compare BASE.jsonl HEAD.jsonl`: what changed between two runs; `bisect` for `git bisect run`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_attn.latency.gate import Decision, GateContext, decide, policy_for, shared_prior
from pytest_attn.latency.regression import is_less_accurate, takes_more
from pytest_attn.latency.statistics import Run, fit
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.reports.latency_output import decided
from pytest_attn.reports.lines import count, duration, some, z_figure
from pytest_attn.reports.markdown import as_code, as_row, as_text
from pytest_attn.reports.merging import usage_errors
from pytest_attn.reports.records import LEVELS, Record, gathered, is_wrong, latency_of, read_records
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.repository import git
from pytest_attn.workloads.functions import printable

#: exit codes by which git skips a revision, and by which git bisect run ends: any below 128 would call the revision bad
_CANNOT_SAY, _CANNOT_GO_ON = 125, 128
#: by what factor a compilation must differ to be named, and in seconds
_COMPILE_RATIO, _COMPILE_MORE = 1.5, 1.0


# -- compare -------------------------------------------------------------------------------------------------------------


def run_compare(given: argparse.Namespace) -> int:
    """Print what changed; return 0. Files that cannot be compared are a usage error: exit 2."""
    base, head = (_read(path, given) for path in (given.base, given.head))
    print("\n".join((_page if given.md else _lines)(base, head)))
    return 0


def _read(path: str, given: argparse.Namespace) -> list[Record]:
    """Return the records of a file, of which there must be one."""
    with usage_errors(given):
        found = read_records(path)
    if not found:
        given.error(f"{path} has no records; was its run stopped before the first test? run it again")
    return found


def _lines(base: Sequence[Record], head: Sequence[Record]) -> Iterator[str]:
    for now, what, before, after in changes(base, head):
        yield printable(f"{what:13} {now['subject']} on {now['workload']}: {before} -> {after}", 0)
    yield from _closing(base, head)


def _page(base: Sequence[Record], head: Sequence[Record]) -> Iterator[str]:
    yield from ("## Attention, before and now", "")
    if found := [*changes(base, head)]:
        yield from ("| what | kernel | workload | before | now | again |", "| --- | --- | --- | --- | --- | --- |")
        for now, *values in found:
            what, before, after = map(as_text, values)
            yield as_row(what, as_code(now["subject"]), as_code(now["workload"]), before, after, as_code(now["command"]))
        yield ""
    yield from (f"- {as_text(one)}" for one in _closing(base, head))


def changes(base: Sequence[Record], head: Sequence[Record]) -> Iterator[tuple[Record, str, str, str]]:
    """Yield what differs in the judgments of both runs: the record, what it is, before, and now."""
    pairs = _pairs(base, head)
    for before, now in pairs:
        for found in (_verdicts, _shapes, _times, _residuals, _sizes, _launches):
            for what, then, here in found(before, now, len(pairs)):
                yield now, what, then, here


def told_apart(base: Sequence[Record], head: Sequence[Record]) -> Iterator[tuple[Record, float]]:
    """Yield the times that can be compared with those before, each with the least slowdown that would have shown."""
    pairs = _pairs(base, head)
    decisions = ((now, _decision(before, now, len(pairs))) for before, now in pairs)
    yield from ((now, decision.detectable or 0.0) for now, decision in decisions if decision)


def _closing(base: Sequence[Record], head: Sequence[Record]) -> Iterator[str]:
    """Yield in sentences what was compared, and what could have been seen."""
    pairs, (old, new) = _pairs(base, head), (judged(base).keys(), judged(head).keys())
    text = f"{count(len(pairs), 'judgment')} in both runs"
    for only, where in ((old - new, "before"), (new - old, "now")):
        text += f", {len(only)} only {where} ({some(sorted({key[0] for key in only}), 2)})" if only else ""
    yield text
    seen = sorted(least for _, least in told_apart(base, head))
    if seen:
        span = " to ".join(dict.fromkeys(f"{one:.1%}" for one in (seen[0], seen[-1])))
        yield f"{count(len(seen), 'p50')} compared; the least slowdown that would have shown: {span}"
    if disturbed := sum(any(latency_of(r).get("disturbances") for r in pair) for pair in pairs):
        yield f"{count(disturbed, 'p50')} not compared: other work disturbed one of the two times"
    for what, names in (("machine", "name"), ("torch", "torch"), ("pytest-attn", "pytest_attn")):
        told = [{str(r["machine"].get(names, "")) for r in run if r["machine"]} for run in (base, head)]
        if told[0] != told[1]:
            text = f"another {what}: {some(sorted(told[0]))} before, {some(sorted(told[1]))} now"
            yield f"{text}; times are not compared" if what == "machine" else text


def judged(records: Sequence[Record]) -> dict[tuple[str, ...], list[Record]]:
    """Return records by what they judge."""
    return gathered(((r["test"], r["question"], r["subject"], r["workload"], r["direction"]), r) for r in records)


def _pairs(base: Sequence[Record], head: Sequence[Record]) -> list[tuple[Record, Record]]:
    before, now = judged(base), judged(head)
    return [pair for key in now if key in before for pair in zip(before[key], now[key], strict=False)]


def _verdicts(before: Record, now: Record, cases: int) -> Iterator[tuple[str, str, str]]:
    if before["verdict"] != now["verdict"]:
        yield "verdict", _verdict(before), _verdict(now)


def _verdict(record: Record) -> str:
    return f"{record['verdict']} ({record['reason']})" if record["reason"] else record["verdict"]


def _shapes(before: Record, now: Record, cases: int) -> Iterator[tuple[str, str, str]]:
    if not _is_same_shape(before, now):
        yield "shape", before["shape"]["id"], now["shape"]["id"]


def _is_same_shape(before: Record, now: Record) -> bool:
    """Return whether a workload, which has a name perhaps, is the same problem in both."""
    return len({r["shape"].get("id") for r in (before, now)} - {None}) < 2


def _times(before: Record, now: Record, cases: int) -> Iterator[tuple[str, str, str]]:
    forth, back = _decision(before, now, cases), _decision(now, before, cases)
    if forth is None or back is None or Verdict.REGRESSED not in (forth.verdict, back.verdict):
        return
    p50s = [duration(decided(latency_of(r))) for r in (before, now)]
    what = "slower" if forth.verdict == Verdict.REGRESSED else "faster"
    yield what, p50s[0], f"{p50s[1]} ({forth.change:+.1%}; {forth.detectable:.1%} would have shown)"


def _decision(before: Record, now: Record, cases: int) -> Decision | None:
    """Return what the gate says of two times, on devices that may be two of a name; None where they cannot be compared."""
    taken = [latency_of(r) for r in (before, now)]
    is_usable = all(one.get("p50") and not one.get("disturbances") for one in taken)
    if not is_usable or not _is_same_shape(before, now) or before["machine"].get("name") != now["machine"].get("name"):
        return None
    kind = str(now["machine"].get("kind", "cpu"))
    old, new = (_runs(one, kind) for one in taken)
    recorded = fit(old, {})
    return decide(new, GateContext(recorded, shared_prior([recorded], kind), policy_for(kind), cases, is_same_device=False))


def _runs(latency: dict[str, Any], kind: str) -> list[Run]:
    """Return the processes of a time; on a CPU the one whose controls are known."""
    p50s = (latency.get("decision") or {}).get("runs") if kind == "cuda" else ()
    return [Run(p50, latency.get("anchors") or {}) for p50 in p50s or [latency["p50"]]]


def _residuals(before: Record, now: Record, cases: int) -> Iterator[tuple[str, str, str]]:
    for level in LEVELS:
        then, here = (r.get(level) for r in (before, now))
        if (
            isinstance(then, float)
            and isinstance(here, float)
            and (is_less_accurate(here, then) or is_less_accurate(then, here))
        ):
            yield level.replace("_", ", "), z_figure(then), z_figure(here)


def _sizes(before: Record, now: Record, cases: int) -> Iterator[tuple[str, str, str]]:
    """Yield what a check and a call hold at their peak, and how long compilers took."""
    pairs = {
        "memory": (before["memory"], now["memory"]),
        "memory of a call": (latency_of(before).get("memory") or 0, latency_of(now).get("memory") or 0),
    }
    for what, (then, here) in pairs.items():
        if takes_more(here, then) or takes_more(then, here):
            yield what, f"{then / 2**20:,.1f} MiB", f"{here / 2**20:,.1f} MiB"
    took, takes = (r["compile_seconds"] or 0.0 for r in (before, now))
    if max(took, takes) > _COMPILE_RATIO * min(took, takes) + _COMPILE_MORE:
        yield "first calls", f"{took:.1f} s", f"{takes:.1f} s"


def _launches(before: Record, now: Record, cases: int) -> Iterator[tuple[str, str, str]]:
    then, here = ({one.get("symbol") for p in r["profiles"] for one in p["launches"]} for r in (before, now))
    if then and here and then != here:
        yield "kernels", some(sorted(map(str, then - here)), 2) or "-", some(sorted(map(str, here - then)), 2) or "-"


# -- bisect --------------------------------------------------------------------------------------------------------------


def run_bisect(given: argparse.Namespace) -> int:
    """Compare the tree with the oldest good revision of git bisect; return 0, 1, 125, or 128, which ends git bisect."""
    if {"-h", "--help"}.intersection(given.arguments):
        print(given.help())
        return _CANNOT_GO_ON
    term = git(Path(), "bisect", "terms", "--term-old").decode().strip() or "good"
    listed = git(Path(), "for-each-ref", "--sort=committerdate", "--format=%(objectname)", f"refs/bisect/{term}-*")
    good = listed.decode().split()
    if not given.arguments or not good:
        lacking = "there is no good revision" if given.arguments else "name the test that became slower"
        typed = "git bisect start BAD GOOD, then git bisect run python -m pytest_attn bisect TEST"
        print(f"bisect: {lacking}; type {typed}", file=sys.stderr)
        return _CANNOT_GO_ON
    with ProcessFolder() as folder:
        path = Path(folder) / "run.jsonl"
        own = [f"--attn-against={good[0]}", f"--attn-output={path}"]
        _pytest(*given.arguments, *own)
        records = read_records(path) if path.exists() else []
    code, why = bisected(records)
    print(f"bisect: {why}")
    return code


def _pytest(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False)


def bisected(records: Sequence[Record]) -> tuple[int, str]:
    """Return the exit code for git bisect, and why."""
    verdicts = {r["verdict"] for r in records if r["question"] == "latency"}
    if wrong := [r["test"] for r in records if is_wrong(r) and r["verdict"] != Verdict.SLOWER]:
        return _CANNOT_SAY, f"{wrong[0]} fails, so its time does not count"
    if Verdict.SLOWER in verdicts:
        return 1, "slower"
    if not verdicts or not verdicts <= {Verdict.ALIKE, Verdict.FASTER}:
        return _CANNOT_SAY, f"cannot say: {', '.join(sorted(verdicts)) or 'nothing was timed'}"
    return 0, "not slower"
