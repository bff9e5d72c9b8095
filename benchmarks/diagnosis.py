"""What a failure says of its cause, held against the cause: every mutant, and the faults of tests/planted_faults.py.

    python benchmarks/diagnosis.py [--classes masks,...] [--names NAME,...] [--cases N] [--out FILE.json] [--table FILE.md]

Each mutant runs, forward and backward, on the workloads of `features`, `edges` and `smoke` that reach its fault, until N cases
failed (3). Printed are the hints, and whether the first one names the fault; at the end the shares of
cases whose first hint names the fault, that have none, and in which any hint asserts what is not the fault. Each hint that
tells a user what to declare is followed, also those to a mutant that returns out alone, and faulty kernels are counted that
pass so: "meant" where their fault is what a user declares so, as lse in base 2. `--classes models` (needs transformers)
follows what a check of a model suggests with the faults of model_faults.py in it, in half precision, with sharp and with
almost uniform attention. `--classes narrow` judges the kernels of tests/reported_faults that take little, each a backend that
declares what it takes, as a run judges it where nobody names workloads; `--table` writes what is found of them, and why. Exits
with 1 where a share of over 2 % is wrong, or a fault passes that nobody means. CPU, one
thread.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from mutation import directions, for_kernels  # noqa: E402
from planted_faults import PLANTED, judgment_of  # noqa: E402
from reported_faults.judging import CHECK, INVARIANTS, MISSED, Case, callable_of, check_invariants, fails  # noqa: E402
from reported_faults.narrow import Narrow, NarrowBackend, asked  # noqa: E402
from reported_faults.narrow_reports import NARROW  # noqa: E402

from pytest_attn.backends.declaration import Declaration, Declared  # noqa: E402
from pytest_attn.backends.registry import Registry  # noqa: E402
from pytest_attn.backends.subject import AttentionFn, Subject  # noqa: E402
from pytest_attn.correctness.comparison import Hint  # noqa: E402
from pytest_attn.correctness.contract import AdaptedKernel, ContractError  # noqa: E402
from pytest_attn.correctness.judge import judge  # noqa: E402
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache  # noqa: E402
from pytest_attn.diagnosis.diagnose import diagnose  # noqa: E402
from pytest_attn.diagnosis.faults import EMPTY_ROWS, PRECISION  # noqa: E402
from pytest_attn.guests.mutants.all_mutants import MUTANTS  # noqa: E402
from pytest_attn.guests.mutants.kernel import KernelBackend  # noqa: E402
from pytest_attn.guests.mutants.mutant import Mutant  # noqa: E402
from pytest_attn.suite.test_correctness import INPUTS  # noqa: E402
from pytest_attn.workloads.catalog import builtin_catalog  # noqa: E402
from pytest_attn.workloads.inputs import Inputs  # noqa: E402

CPU = torch.device("cpu")
CACHE = ReferenceCache(2 << 30)
#: cases of one mutant that are tried at most
TRIED = 40
#: the largest share of cases in which a hint may be wrong
MOST_WRONG = 0.02
#: how a text says what to declare
SAID = re.compile(r"""\b(\w+)=("[^"]*"|'[^']*'|\([^)]*\)|\w+)""")
#: faults that some users mean, and declare: then it is right that the kernel passes
MEANT = ("lse-base-2", "max-base-2", *EMPTY_ROWS)


#: fields of a row about hints that are followed
FOLLOWING = ("followed", "let_in", "meant")


class Row(NamedTuple):
    """One failing case: the fault, on what, which tensor, what was said of it, and whether that is right.

    followed: what hints told to declare. let_in: those of them with which the kernel passes, faulty as it is; meant: those
    whose declaration is what the kernel does. seconds: for which the cause was looked for, where that was
    counted.
    """

    kind: str
    fault: str
    workload: str
    tensor: str
    hints: list[str]
    verdict: str
    followed: list[str]
    let_in: list[str]
    meant: list[str]
    seconds: float | None = None


class DeclaredBackend(KernelBackend):
    """A mutant in a test that declares what it takes and returns, as one does of a callable."""

    def __init__(self, plain: KernelBackend, declared: Declaration) -> None:
        super().__init__(plain.name, plain.kernel, returns_lse=declared.returns_lse)
        self.declared = declared

    def declares(self, asked: Declaration, kind: str) -> Declaration:
        """Return what the test declares."""
        return self.declared

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Turn what the mutant returns as an adapted callable does."""
        return AdaptedKernel(super().prepare(inputs, backward), self.declared, inputs)


def rows_of(mutant: Mutant, cases: list[Case], wanted: int) -> Iterator[Row]:
    """Yield the failing cases of a mutant."""
    found = 0

    def anew(spec: CheckSpec) -> Subject:
        return DeclaredBackend(mutant.backend(), spec.declared)

    for workload, backward, _ in [case for case in cases if mutant.applies(*case[:2])][:TRIED]:
        spec = CheckSpec(workload, CPU, backward, INPUTS, Declaration(returns_lse=True))
        row = row_of(mutant.kind, mutant.name, anew, spec, mutant.faults)
        if row is None:
            continue
        found += 1
        alone = row_of(mutant.kind, mutant.name, anew, replace(spec, declared=Declaration()), mutant.faults)
        if alone is not None:
            both = {name: [*dict.fromkeys(getattr(row, name) + getattr(alone, name))] for name in FOLLOWING}
            row = row._replace(**both)
        yield row
        if found == wanted:
            return


def row_of(kind: str, name: str, anew: Callable[[CheckSpec], Subject], spec: CheckSpec, faults: tuple[str, ...]) -> Row | None:
    """Judge one case; None where it passes. anew: returns the kernel with nothing left in it. faults: of right hints."""
    on, tensor, seconds = spec.workload.id + ("+backward" if spec.backward else ""), "-", None
    try:
        comparison, began = judge(anew(spec), spec, CACHE), time.perf_counter()
        mismatch, seconds = diagnose(comparison).mismatch, time.perf_counter() - began
        if mismatch is None:
            return None
        tensor, hints = mismatch.row.name, mismatch.hints
    except ContractError as error:
        hints = (Hint(error.fault, str(error)),)
    followed: dict[str, str] = {}  # what is declared, and of which fault a hint says so
    for hint in hints:
        followed |= dict.fromkeys(declared_by([hint], spec.declared), hint.fault)
    passing = [said for said in followed if passes_with(said, anew, spec)]
    meant = [said for said in passing if is_meant(followed[said], faults)]
    let_in = [said for said in passing if said not in meant]
    words = [hint.words.splitlines()[0] for hint in hints if hint.fault or tensor == "-"]
    return Row(kind, name, on, tensor, words, judgment_of(hints, faults), list(followed), let_in, meant, seconds)


# -- hints that are followed -----------------------------------------------------------------------------------------------


def declared_by(hints: Iterable[Hint], declared: Declaration) -> Iterator[str]:
    """Yield what the texts of hints tell a user to declare who has not."""
    for name, value in (match.groups() for hint in hints for match in SAID.finditer(hint.words)):
        if name in Declared.__annotations__ and getattr(declared, name) != ast.literal_eval(value):
            yield f"{name}={value}"


def passes_with(said: str, anew: Callable[[CheckSpec], Subject], spec: CheckSpec) -> bool:
    """Whether a kernel passes where this is declared."""
    name, _, value = said.partition("=")
    try:
        spec = replace(spec, declared=replace(spec.declared, **{name: ast.literal_eval(value)}))
        return judge(anew(spec), spec, CACHE).passed
    except (ContractError, ValueError):
        return False


def is_meant(fault: str, faults: tuple[str, ...]) -> bool:
    """Whether a kernel has no other fault than one that a user may declare, and the hint is about it."""
    return fault in faults and all(one in MEANT or one.startswith(PRECISION) for one in faults)


# -- models ------------------------------------------------------------------------------------------------------------------

#: how the text of a check of a model says what to pass to it
SAID_OF_MODELS = re.compile(r"""\b(precision|inline|backward|limits)=("[^"]*"|'[^']*'|\[[^]]*\]|\w+)""")


def rows_of_models(only: list[str]) -> Iterator[Row]:
    """Yield what checks of models say of the faults planted in them, which have no identities. only: names of models."""
    from model_faults import FAULTS, build, ids_of

    from pytest_attn.guests.models.check_model import judge_model

    ids = ids_of(2)
    for sharper, fault, name in ((s, one, name) for s in (8, 1) for one in FAULTS for name in one.models.split()):
        if only and name not in only:
            continue

        def found(sharper: int = sharper, fault: Any = fault, name: str = name, **options: Any) -> Any:
            model = build(name, torch.bfloat16, sharper)
            with fault.seam(model, fault.change()):
                return judge_model(model, lambda: model(input_ids=ids, labels=ids), scatter=0, **options)

        comparison = found()
        if comparison.passed:
            continue
        followed = dict.fromkeys(match.groups() for match in SAID_OF_MODELS.finditer(comparison.message))
        let_in = [f"{key}={value}" for key, value in followed if found(**{key: ast.literal_eval(value)}).passed]
        wrong = [call.comparison.mismatch for call in comparison.calls if call.comparison and call.comparison.mismatch]
        hints = list(dict.fromkeys(hint.words.splitlines()[0] for one in wrong for hint in one.hints))
        on, tensor = f"{name}, q and k times {sharper}", wrong[0].row.name if wrong else "-"
        yield Row("models", fault.name, on, tensor, hints, "-", [f"{key}={value}" for key, value in followed], let_in, [])


# -- kernels that take little ----------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """One faulty kernel that takes little: how many cases it gets, by what it is found, and the first cases that fail."""

    name: str
    narrow: Narrow
    cases: int
    by: str
    rows: list[Row]


def found_by_default(name: str, narrow: Narrow, wanted: int) -> Found:
    """Judge a kernel on all that it gets by default, until so many cases failed; ask the invariants where none does."""
    drops = any(w.dropout for w in asked(narrow, declares=False))  # which a callable can say, and no backend
    kernel, rows, workloads = narrow.kernel(), [], asked(narrow, declares=not drops)
    declared = Declaration(returns=("out", "keep") if drops else ("out", "lse"))

    def again(spec: CheckSpec) -> Subject:
        if drops:
            return spec.subject(Registry(), callable_of(kernel, spec.workload))
        backend = NarrowBackend(name, narrow)
        backend.kernel = kernel
        return backend

    def row(workload: str, tensor: str, words: str) -> Row:
        return Row("narrow", name, workload, tensor, [words], "none", [], [], [])

    for w in workloads:
        try:
            failing = row_of("narrow", name, again, CheckSpec(w, CPU, narrow.backward, declared=declared), narrow.causes)
        except Exception as error:
            failing = row(w.id, "raised", f"{type(error).__name__}: {error}")
        rows += [failing] if failing else []
        if len(rows) == wanted:
            break
    if rows:
        return Found(name, narrow, len(workloads), CHECK, rows)
    for w in workloads:
        if said := fails(check_invariants, kernel, Case(w, narrow.backward)):
            is_named = any(f"| {cause} " in said for cause in narrow.causes)
            broken = row(w.id, "invariants", said)._replace(verdict="named" if is_named else "none")
            return Found(name, narrow, len(workloads), INVARIANTS, [broken])
    return Found(name, narrow, len(workloads), MISSED, [])


def table_of(found: list[Found]) -> str:
    """Return what is found of each report as a table of columns, then the counts."""
    lines = [("report", "fault", "by default", "cause")]
    reported = [one for one in found if one.narrow.report]
    for one in reported:
        first = one.rows[0] if one.rows else None
        named = {"named": " or ".join(one.narrow.causes), "wrong": "another"}
        cause = named.get(first.verdict, "-") if first else "-"
        by = first.workload + ", invariants" * (one.by == INVARIANTS) if first else MISSED
        lines.append((one.narrow.report, one.name, by, cause))
    judged = [one for one in reported if one.rows]
    firsts = [one.rows[0].verdict for one in judged]
    wrong = sum(row.verdict == "wrong" for one in found for row in one.rows)
    kinds = [one for one in found if not one.narrow.report]
    counts = (
        f"{len(judged)} of {len(reported)} found; the first case that fails says the cause of {firsts.count('named')};"
        f" {wrong} wrong causes in {sum(len(one.rows) for one in found)} cases; of {len(kinds)} kinds"
        f" {sum(bool(one.rows) for one in kinds)} found"
    )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(["```text", *table, "```", "", counts, ""])


# -- the run -----------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Print every case and the shares; return 1 where too many hints are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default=",".join([*dict.fromkeys(mutant.kind for mutant in MUTANTS), "planted"]))
    parser.add_argument("--names", default="")
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds, names = options.classes.split(","), [name for name in options.names.split(",") if name]
    cases = for_kernels(directions([w for group in ("features", "edges", "smoke") for w in builtin_catalog().select(group)]))
    began, rows, silent = time.monotonic(), [], []
    for mutant in MUTANTS:
        if mutant.kind in kinds and (not names or mutant.name in names):
            found = [shown(row, began) for row in rows_of(mutant, cases, options.cases)]
            rows += found
            silent += [] if found else [mutant.name]
    for planted in PLANTED if "planted" in kinds else ():
        if not names or planted.name in names:
            spec = CheckSpec(planted.workload, CPU, planted.backward, INPUTS, Declaration(returns_lse=planted.returns_lse))
            row = row_of("planted", planted.name, of_callable(planted.kernel), spec, planted.faults)
            if row is None:
                silent.append(planted.name)
            else:
                rows.append(shown(row, began))
    if "models" in kinds:
        rows += [shown(row, began) for row in rows_of_models(names)]
    if "narrow" in kinds:
        found = [
            found_by_default(name, narrow, options.cases) for name, narrow in NARROW.items() if not names or name in names
        ]
        rows += [shown(row, began) for one in found for row in one.rows]
        silent += [one.name for one in found if not one.rows]
        if options.table:
            options.table.write_text(table_of(found))
    if options.out:
        options.out.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return report(rows, silent, time.monotonic() - began)


def of_callable(kernel: Callable[..., Any]) -> Callable[[CheckSpec], Subject]:
    """Return what makes a subject of a callable."""
    return lambda spec: spec.subject(Registry(), kernel)


def shown(row: Row, began: float) -> Row:
    """Print a row, and return it."""
    seconds = time.monotonic() - began
    print(f"{seconds:4.0f} s {row.verdict:5} {row.kind:9} {row.fault} on {row.workload}, {row.tensor}", flush=True)
    for hint in row.hints:
        print(f"             {hint}")
    for said in row.let_in:
        print(f"             PASSES with {said}")
    return row


def report(rows: list[Row], silent: list[str], seconds: float) -> int:
    """Print the shares, by class and of all."""
    print(f"\n{'first hint, in %':20} {'named':>6} {'none':>6} {'wrong':>6} {'cases':>6}")
    for kind in [*dict.fromkeys(row.kind for row in rows if row.verdict != "-"), "all"]:
        of_kind = [row.verdict for row in rows if kind in (row.kind, "all") and row.verdict != "-"] or ["-"]
        shares = [of_kind.count(verdict) / len(of_kind) for verdict in ("named", "none", "wrong")]
        print(f"{kind:20} {shares[0]:6.0%} {shares[1]:6.0%} {shares[2]:6.1%} {len(of_kind):6}")
    print(f"not found by a check of one call: {', '.join(silent) or 'none'}")
    print(f"\n{'hints followed':20} {'times':>6} {'pass':>6} {'meant':>6}")
    followed = {said.partition("=")[0] for row in rows for said in row.followed}
    for name in sorted(followed):
        numbers = [sum(said.startswith(f"{name}=") for row in rows for said in getattr(row, field)) for field in FOLLOWING]
        print(f"{name:20} " + " ".join(f"{number:6}" for number in numbers))
    each = [row.seconds for row in rows if row.seconds is not None] or [0.0]
    took = f"{sum(each):.1f} s, the median {statistics.median(each):.2f}, the longest {max(each):.2f}"
    print(f"\n{seconds:.0f} s, of which looking for causes {took}")
    wrong = sum(row.verdict == "wrong" for row in rows)
    return int(wrong > MOST_WRONG * len(rows) or any(row.let_in for row in rows))


if __name__ == "__main__":
    sys.exit(main())
