"""How many faulty kernels of pytest_attn/mutants are found: by check, with check_invariants, and by the rules of others.

    python benchmarks/mutation.py [--groups smoke,edges,features] [--classes masks,...] [--out FILE.json]

    --classes none: only the fault-free kernels

Every mutant runs on every workload of the groups whose options reach its fault, forward and backward, until it is found. The
rules of others get what they use themselves: their input distribution, exact attention as the truth, the fault-free kernel in
one tile as the twin where they compare with one, and their tolerances for out, dq, dk, dv. At the end the fault-free kernels
run through all of it: a rule that refuses one of them alarms falsely. CPU, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rules import RULES

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.invariants.check import judge_invariants
from pytest_attn.mutants import MUTANTS
from pytest_attn.mutants.mutant import Mutant
from pytest_attn.suite.test_correctness import INPUTS
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.kv_layout import handed_over
from pytest_attn.workloads.workload import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from honest.variants import VARIANTS

CPU = torch.device("cpu")
CACHE = ReferenceCache(2 << 30)
#: what it takes to see these is asked with --attn-thorough only
THOROUGH = ("strides",)
Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """One workload in one direction."""

    workload: Workload
    backward: bool


def call(backend: Backend, inputs: Inputs, backward: bool) -> Tensors:
    """Return out and, with backward, the gradients, each on tensors of its own."""
    k, v = handed_over(inputs.workload, inputs.k, inputs.v)
    leaves = [t.requires_grad_(backward) for t in (inputs.q.clone(), k, v)]
    out = backend.prepare(inputs, backward)(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    found = {"out": out.detach()}
    if backward:
        found |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout), strict=True))
    return found


class Peers:
    """The rules of others on one kernel, with truths and twins kept."""

    def __init__(self) -> None:
        self._truths: dict[tuple[Case, str], tuple[Inputs, Tensors, Tensors]] = {}

    def refused_by(self, backend: Backend, case: Case, names: list[str]) -> set[str]:
        """Return the rules that find the kernel wrong. A kernel that raises is found by all."""
        found: set[str] = set()
        results: dict[str, Tensors | None] = {}
        for name in names:
            rule = RULES[name]
            inputs, exact, twin = self._truth(case, rule.inputs)
            if rule.inputs not in results:
                try:
                    results[rule.inputs] = call(backend, inputs, case.backward)
                except Exception:
                    results[rule.inputs] = None
            got = results[rule.inputs]
            if got is None or any(
                got[t].shape != exact[t].shape or not rule.accepts(t, got[t], exact[t], twin[t], inputs.q.dtype) for t in exact
            ):
                found.add(name)
        return found

    def _truth(self, case: Case, distribution: str) -> tuple[Inputs, Tensors, Tensors]:
        if (case, distribution) not in self._truths:
            workload, backward = case
            reference = CACHE.get(workload, distribution, 0, CPU, precision_named("flash"), backward)
            names = ("out", "dq", "dk", "dv") if backward else ("out",)
            exact = {name: _native(reference.tensors[name].value, workload) for name in names}
            inputs = draw_inputs(workload, distribution, 0, CPU)
            self._truths[case, distribution] = (inputs, exact, call(_twin(), inputs, backward))
        return self._truths[case, distribution]


def _twin() -> Backend:
    """Return an implementation in the workload's own dtype that takes every workload."""
    return next(variant for variant in VARIANTS if variant.name == "one-tile").backend()


def _native(tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    return tensor[0].transpose(0, 1) if workload.is_packed else tensor


def cases_of(workloads: list[Workload]) -> list[Case]:
    """Return the cases of those that the kernels take: none drops probabilities or dequantizes."""
    taken = [w for w in workloads if not (w.dropout or w.is_quantized)]
    return [Case(w, backward) for w in taken for backward in (False, True) if not (backward and w.has_no_gradient_because)]


def found_by_check(mutant: Mutant, cases: list[Case]) -> bool:
    """Whether attn.check finds the mutant on one of the cases, on the suite's inputs; one kernel lives through them all."""
    backend = mutant.backend()
    return any(is_refused(backend, case) for case in cases)


def is_refused(backend: Backend, case: Case) -> bool:
    """Whether attn.check fails; a kernel that raises does, too."""
    try:
        return not judge(backend, CheckSpec(case.workload, CPU, case.backward, INPUTS), CACHE).passed
    except Exception:
        return True


def found_by_invariants(mutant: Mutant, cases: list[Case]) -> str:
    """Return the invariant that finds the mutant, "" where none does."""
    for case in cases:
        spec, is_thorough = CheckSpec(case.workload, CPU, case.backward), mutant.condition in THOROUGH
        try:
            report = judge_invariants(mutant.backend(), spec, CACHE, thorough=is_thorough)
        except TypeError:  # a mistake in a call from here is nothing that a mutant was caught by
            raise
        except Exception as error:
            return type(error).__name__
        if report.broken:
            return report.broken[0].invariant
    return ""


def main() -> None:
    """Print the table by class, the survivors, and the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="smoke,edges,features")
    parser.add_argument("--classes", default=",".join(dict.fromkeys(mutant.kind for mutant in MUTANTS)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    everything = cases_of([w for group in options.groups.split(",") for w in builtin_catalog().select(group)])
    chosen = [mutant for mutant in MUTANTS if mutant.kind in options.classes.split(",")]
    began, peers, rows = time.monotonic(), Peers(), []
    for mutant in chosen:
        cases = [case for case in everything if mutant.applies(case.workload, case.backward)]
        by_check = bool(cases) and found_by_check(mutant, cases)
        by_invariant = "" if by_check or not cases else found_by_invariants(mutant, cases)
        left, backend = list(RULES), mutant.backend()
        for case in cases:
            left = [name for name in left if name not in peers.refused_by(backend, case, left)]
            if not left:
                break
        rows.append(
            {
                "name": mutant.name,
                "kind": mutant.kind,
                "condition": mutant.condition,
                "reached": bool(cases),
                "check": by_check,
                "invariant": by_invariant,
                "peers": [name for name in RULES if cases and name not in left],
            }
        )
        print(f"{time.monotonic() - began:6.0f} s {mutant.kind:10} {mutant.name:42} {_word(rows[-1])}", flush=True)
    if rows:
        report(rows)
    false_alarms(everything, peers)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def _word(row: dict[str, Any]) -> str:
    if not row["reached"]:
        return "not reached"
    return "check" if row["check"] else row["invariant"] or "SURVIVED"


def report(rows: list[dict[str, Any]]) -> None:
    """Print how many of the reached mutants each judge finds, by class."""
    judges: dict[str, Callable[[dict[str, Any]], bool]] = {
        "check": lambda row: row["check"],
        "check + invariants": lambda row: row["check"] or bool(row["invariant"]),
    }
    judges |= {name: lambda row, name=name: name in row["peers"] for name in RULES}  # type: ignore[misc]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    print(f"\n{'found, in %':24}", *(f"{kind[:9]:>9}" for kind in [*kinds, "all"]))
    for name, finds in judges.items():
        cells = [_share(rows, finds, kind) for kind in [*kinds, None]]
        print(f"{name:24}", *(f"{cell:>9}" for cell in cells))
    counts = [sum(row["kind"] == kind or kind is None for row in rows) for kind in [*kinds, None]]
    print(f"{'mutants':24}", *(f"{count:>9}" for count in counts))
    for row in rows:
        if not row["check"] and not row["invariant"]:
            print(f"survivor: {row['kind']} {row['name']} ({row['condition']}{'' if row['reached'] else ', not reached'})")


def _share(rows: list[dict[str, Any]], finds: Callable[[dict[str, Any]], bool], kind: str | None) -> str:
    found = [finds(row) for row in rows if kind in (None, row["kind"])]
    return f"{sum(found) / len(found):.0%}"


def false_alarms(cases: list[Case], peers: Peers) -> None:
    """Print how often each judge refuses a fault-free kernel, and what ours refuse."""
    alarms = dict.fromkeys(["check", "check_invariants", *RULES], 0)
    number = 0
    for variant in VARIANTS:
        for case in cases:
            number += 1
            backend = variant.backend()
            question = CheckSpec(case.workload, CPU, case.backward)
            alarms["check"] += not judge(backend, CheckSpec(case.workload, CPU, case.backward, INPUTS), CACHE).passed
            broken = judge_invariants(variant.backend(), question, CACHE).broken
            alarms["check_invariants"] += bool(broken)
            for finding in broken:
                where = f"{variant.name} on {case.workload.id}{', backward' * case.backward}"
                print(f"false alarm: {where}: {finding.invariant}: {finding.evidence}", flush=True)
            for name in peers.refused_by(backend, case, list(RULES)):
                alarms[name] += 1
    print(
        f"\n{number} cases of fault-free kernels; refused by", ", ".join(f"{name}: {count}" for name, count in alarms.items())
    )


if __name__ == "__main__":
    main()
