"""What a failure says of its cause, held against the cause: every mutant, and the faults of tests/planted_faults.py.

    python benchmarks/diagnosis.py [--classes masks,...] [--names NAME,...] [--cases N] [--out FILE.json]

Each mutant runs, forward and backward, on the workloads of `features`, `edges` and `smoke` that reach its fault, until N cases
failed (3). Printed are the hints, and whether the first one names the fault; at the end the shares of
cases whose first hint names the fault, that have none, and in which any hint asserts what is not the fault. Exits with 1 where
that last share is over 2 %. CPU, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from mutation import Case, cases_of, workloads_of  # noqa: E402
from planted_faults import PLANTED, judgment_of  # noqa: E402

from pytest_attn.backends.declaration import Declaration  # noqa: E402
from pytest_attn.backends.registry import Registry  # noqa: E402
from pytest_attn.backends.subject import Subject  # noqa: E402
from pytest_attn.correctness.comparison import Hint  # noqa: E402
from pytest_attn.correctness.contract import ContractError  # noqa: E402
from pytest_attn.correctness.judge import judge  # noqa: E402
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache  # noqa: E402
from pytest_attn.diagnosis.diagnose import diagnose  # noqa: E402
from pytest_attn.mutants import MUTANTS  # noqa: E402
from pytest_attn.mutants.mutant import Mutant  # noqa: E402
from pytest_attn.suite.test_correctness import INPUTS  # noqa: E402

CPU = torch.device("cpu")
CACHE = ReferenceCache(2 << 30)
#: cases of one mutant that are tried at most
TRIED = 40
#: the largest share of cases in which a hint may be wrong
MOST_WRONG = 0.02


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
        spec = CheckSpec(workload, CPU, backward, INPUTS)
        row = row_of(mutant.kind, mutant.name, mutant.backend(), spec, mutant.faults)
        if row is not None:
            found += 1
            yield row
        if found == wanted:
            return


def row_of(kind: str, name: str, subject: Subject, spec: CheckSpec, faults: tuple[str, ...]) -> Row | None:
    """Judge one case; None where it passes. faults: the identities of right hints."""
    on = spec.workload.id + ("+backward" if spec.backward else "")
    try:
        comparison = diagnose(judge(subject, spec, CACHE))
    except ContractError as error:
        hints = [Hint(error.fault, str(error).splitlines()[0])]
        return Row(kind, name, on, "-", [hint.words for hint in hints], judgment_of(hints, faults))
    mismatch = comparison.mismatch
    if mismatch is None:
        return None
    words = [hint.words for hint in mismatch.hints if hint.fault]
    return Row(kind, name, on, mismatch.row.name, words, judgment_of(mismatch.hints, faults))


def main() -> int:
    """Print every case and the shares; return 1 where too many hints are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default=",".join([*dict.fromkeys(mutant.kind for mutant in MUTANTS), "planted"]))
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
    for planted in PLANTED if "planted" in kinds else ():
        if not names or planted.name in names:
            spec = CheckSpec(planted.workload, CPU, planted.backward, INPUTS, Declaration(returns_lse=planted.returns_lse))
            row = row_of("planted", planted.name, spec.subject(Registry(), planted.kernel), spec, planted.faults)
            if row is None:
                silent.append(planted.name)
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
