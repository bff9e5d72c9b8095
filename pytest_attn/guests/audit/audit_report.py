"""An audit, and what it says: in words, as Markdown and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_attn.guests.audit.audit_run import HONEST, AuditedTest, Fate, audited
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.reports.files import write_atomically
from pytest_attn.reports.lines import count
from pytest_attn.version import __version__

#: mutants that are named of a test, lines and notes that are
_NAMED, _LINES = 3, 8
_SUMMARIES = {mutant.name: mutant.summary.rstrip(".") for mutant in MUTANTS}


def run_audit(given: argparse.Namespace) -> int:
    """Audit what a command line names, print it, and write it; return 0, or 1 where no test could be audited."""
    progress = sys.stderr
    try:
        options = shlex.split(given.pytest)
    except ValueError as error:
        given.error(f"argument --pytest: {error}")
    try:
        tests = audited(
            [*given.files, *options],
            given.replace,
            given.layout,
            given.seconds,
            lambda name: print(f"audit: {name}", file=progress),
        )
    except ValueError as error:
        given.error(str(error))
    print(as_text(tests))
    if given.output:
        command = shlex.join(["python", "-m", "pytest_attn", *sys.argv[1:]])
        is_page = given.output.endswith(".md")
        text = as_markdown(tests, command) if is_page else json.dumps(as_json(tests, command), indent=1)
        try:
            write_atomically(given.output, f"{text}\n")
        except OSError as error:
            given.error(f"cannot write {given.output}: {error.strerror}")
    return int(not any(test.cases for test in tests))


def as_text(tests: Sequence[AuditedTest]) -> str:
    """Return an audit as a person reads it on a terminal."""
    blocks = ["\n".join([title, *(f"  {said}" for said in items)]) for title, items in _blocks(tests)]
    return "\n\n".join([*blocks, closing(tests)])


def as_markdown(tests: Sequence[AuditedTest], command: str) -> str:
    """Return an audit as a page."""
    blocks = ["\n".join([f"## {title}", "", *(f"- {said}" for said in items)]) for title, items in _blocks(tests)]
    facts = f"`{command}` with pytest-attn {__version__} and torch {torch.__version__}: {closing(tests)}."
    return "\n\n".join(["# Audit of attention tests", facts, *blocks])


def as_json(tests: Sequence[AuditedTest], command: str) -> dict[str, Any]:
    """Return an audit as an object of JSON."""
    return {
        "command": command,
        "versions": {"pytest_attn": __version__, "torch": torch.__version__},
        "faults": len(MUTANTS),
        "fault_free": ["its own", *HONEST],
        "tests": [_facts(test) for test in tests],
    }


def _facts(test: AuditedTest) -> dict[str, Any]:
    lines = [
        {"place": line.place, "asks": line.text, "fault_free_use": _finite(share), "tightest": line.left_at(share)}
        for line, share in ((line, test.honest[line]) for line in test.lines)
    ]
    passed = [
        {"name": name, "summary": _SUMMARIES[name], "off": _finite(test.passed[name].run.off)}
        for name in test.those(Fate.PASSED)
    ]
    others = {fate.name.lower(): test.those(fate) for fate in (Fate.FOUND, Fate.WITHIN_ROUNDING, Fate.NOT_TRIED)}
    return {
        "test": test.name,
        "cases": test.cases,
        "not_counted_because": test.because,
        "replaced": test.kernel,
        "passed": passed,
        **others,
        "not_asked": len(MUTANTS) - len(test.fates),
        "pass_at_the_tightest": test.pass_at_the_tightest(),
        "lines": lines,
        "notes": list(test.notes),
    }


def closing(tests: Sequence[AuditedTest]) -> str:
    """Say in a sentence what was audited."""
    counted = [test for test in tests if test.cases]
    found = {name for test in counted for name in test.those(Fate.FOUND)}
    passed = {name for test in counted for name in test.those(Fate.PASSED)} - found
    return (
        f"{len(counted)} of {count(len(tests), 'test')} audited with {len(MUTANTS)} faults: {len(found)} are found, and"
        f" {len(passed)} pass every test whose inputs show them"
    )


def _blocks(tests: Sequence[AuditedTest]) -> Iterator[tuple[str, list[str]]]:
    """Yield titles with what is said below, the test that lets most pass first."""
    for test in sorted((test for test in tests if test.cases), key=lambda test: -len(test.those(Fate.PASSED))):
        passed = len(test.those(Fate.PASSED))
        yield f"{test.name} passes {passed} of {count(passed + len(test.those(Fate.FOUND)), 'fault')}", list(_about(test))
    if others := [test for test in tests if test.because]:
        yield "not counted", [f"{one.name}{', for some parameters' * bool(one.cases)}: {one.because}" for one in others]


def _about(test: AuditedTest) -> Iterator[str]:
    """Yield what there is to say of one test that is counted."""
    facts = _facts(test)
    yield f"in place of {test.kernel}, {count(test.cases, 'case')}"
    for one in facts["passed"][:_NAMED]:
        off = "NaN or infinity" if one["off"] is None else f"off by {one['off']:.2g} of its norm"
        yield f"passes {one['name']}, {off}: {one['summary']}"
    for line in facts["lines"][:_LINES]:
        use = "no number" if line["fault_free_use"] is None else f"{line['fault_free_use']:.2g}"
        yield f"{line['place']} {line['asks']}: fault-free kernels use {use} of it; the tightest is {line['tightest']}"
    if facts["passed"]:
        fewer = f"at the tightest, it would pass {len(facts['pass_at_the_tightest'])}"
        yield fewer if facts["lines"] else "no line was read that compares what the kernel returns with a tolerance"
    apart = {
        "are of options or lengths that it does not use": facts["not_asked"],
        "are within rounding on its inputs": len(facts["within_rounding"]),
        "were not tried, for want of time": len(facts["not_tried"]),
    }
    yield f"apart: {', '.join(f'{number} {words}' for words, number in apart.items() if number)}"
    yield from facts["notes"][:_LINES]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
