"""What a failure says of its cause, held against the cause: every mutant, and the faults of hints.py.

    python benchmarks/diagnosis.py [--classes masks,...] [--names NAME,...] [--cases N] [--out FILE.json]

Each mutant runs, forward and backward, on the workloads of `features`, `edges` and `smoke` that reach its fault, until N cases
failed (3). Printed are the hints, and whether the first one names the fault; at the end the shares of
cases whose first hint names the fault, that have none, and in which any hint asserts what is not the fault. Exits with 1 where
that last share is over 2 %. CPU, one thread.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from hints import FAULTS, OBSERVED, RIGHT
from mutation import Case, cases_of, workloads_of

from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.references import ReferenceCache
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.messages.mismatch import describe
from pytest_attn.mutants.catalog import MUTANTS
from pytest_attn.mutants.mutant import Mutant
from pytest_attn.suite.test_correctness import INPUTS

CPU = torch.device("cpu")
CACHE = ReferenceCache(2 << 30)
#: cases of one mutant that are tried at most
TRIED = 40
#: the lines of a failure that suggest something, and the largest share of them that may be wrong
LABELS, MOST_WRONG = ("suggests", "strides", "state", "rerun"), 0.02


class Row(NamedTuple):
    """One failing case: the fault, on what, which tensor, what was said of it, and whether that is right."""

    kind: str
    fault: str
    workload: str
    tensor: str
    hints: list[str]
    verdict: str


def rows_of(mutant: Mutant, cases: list[Case], wanted: int) -> Iterator[Row]:
    """Yield the failing cases of a mutant."""
    found = 0
    for workload, backward in [case for case in cases if mutant.applies(*case)][:TRIED]:
        row = row_of(
            mutant.kind, mutant.name, mutant.backend(), CheckSpec(workload, CPU, backward, INPUTS), RIGHT.get(mutant.name)
        )
        if row is not None:
            found += 1
            yield row
        if found == wanted:
            return


def row_of(kind: str, fault: str, subject: Subject, spec: CheckSpec, right: str | None) -> Row | None:
    """Judge one case; None where it passes."""
    direction = "+backward" if spec.backward else ""
    try:
        comparison = diagnose(judge(subject, spec, CACHE))
    except ContractError as error:
        hints = [str(error).splitlines()[0]]
        return Row(kind, fault, spec.workload.id + direction, "-", hints, verdict_on(hints, right))
    if comparison.passed:
        return None
    lines = [line.strip().split(None, 1) for line in describe(comparison).splitlines()]
    hints = [line[1] for line in lines if line[0] in LABELS]
    assert comparison.mismatch is not None
    return Row(kind, fault, spec.workload.id + direction, comparison.mismatch.row.name, hints, verdict_on(hints, right))


def verdict_on(hints: list[str], right: str | None) -> str:
    """Return "named" if the first hint is right, "wrong" if any asserts what is not the fault, else "none"."""
    names = [right is not None and bool(re.search(right, hint)) for hint in hints]
    asserts = [name or not re.search(OBSERVED, hint) for name, hint in zip(names, hints, strict=True)]
    if any(asserted and not name for asserted, name in zip(asserts, names, strict=True)):
        return "wrong"
    return "named" if any(names) else "none"


def main() -> int:
    """Print every case and the shares; return 1 where too many hints are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default=",".join([*dict.fromkeys(mutant.kind for mutant in MUTANTS), "named"]))
    parser.add_argument("--names", default="")
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds, names = options.classes.split(","), [name for name in options.names.split(",") if name]
    cases = cases_of([w for group in ("features", "edges", "smoke") for w in workloads_of(group)])
    began, rows, silent = time.monotonic(), [], []
    for mutant in MUTANTS:
        if mutant.kind in kinds and (not names or mutant.name in names):
            found = [shown(row, began) for row in rows_of(mutant, cases, options.cases)]
            rows += found
            silent += [] if found else [mutant.name]
    for fault in FAULTS if "named" in kinds else ():
        if not names or fault.name in names:
            spec = CheckSpec(fault.workload, CPU, fault.backward, INPUTS, Declaration(returns_lse=fault.returns_lse))
            row = row_of("named", fault.name, spec.subject(Registry(), fault.kernel), spec, fault.right)
            if row is None:
                silent.append(fault.name)
            else:
                rows.append(shown(row, began))
    if options.out:
        options.out.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return report(rows, silent, time.monotonic() - began)


def shown(row: Row, began: float) -> Row:
    """Print a row, and return it."""
    seconds = time.monotonic() - began
    print(f"{seconds:4.0f} s {row.verdict:5} {row.kind:9} {row.fault} on {row.workload}, {row.tensor}", flush=True)
    for hint in row.hints:
        print(f"             {hint}")
    return row


def report(rows: list[Row], silent: list[str], seconds: float) -> int:
    """Print the shares, by class and of all."""
    print(f"\n{'first hint, in %':20} {'named':>6} {'none':>6} {'wrong':>6} {'cases':>6}")
    for kind in [*dict.fromkeys(row.kind for row in rows), "all"]:
        of_kind = [row.verdict for row in rows if kind in (row.kind, "all")]
        shares = [of_kind.count(verdict) / len(of_kind) for verdict in ("named", "none", "wrong")]
        print(f"{kind:20} {shares[0]:6.0%} {shares[1]:6.0%} {shares[2]:6.1%} {len(of_kind):6}")
    print(f"not found by a check of one call: {', '.join(silent) or 'none'}\n{seconds:.0f} s")
    return int(bool(rows) and sum(row.verdict == "wrong" for row in rows) > MOST_WRONG * len(rows))


if __name__ == "__main__":
    sys.exit(main())
