"""How many faulty kernels are found: by check, with check_invariants, and by the rules of others; and false alarms.

    python benchmarks/mutation.py [--kernels mutants,reported,honest,twins] [--groups smoke,edges,features]
                                  [--names NAME,...] [--judges ours,others] [--out FILE.json]

mutants: those of pytest_attn/guests/mutants. reported: those of tests/reported_faults, written from others' reports. Each
runs on every workload of the groups that reaches its fault, forward and backward, until it is found; its kernel lives through
them all, as a library does. honest, twins: the variants of tests/honest and the reported kernels without their faults, on
all of it: a judge that refuses one of them alarms falsely.

The rules of others get what they use themselves: their input distribution, exact attention as the truth, attention written
out in the workload's dtype as the twin where they compare with one, and their tolerances for the results that they look at,
at the commits that docs/explanation/others.md names.
Dropout, quantized inputs and gradients of parameters are put to ours alone. CPU, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.mutant import Mutant
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.suite.test_correctness import INPUTS
from pytest_attn.workloads import distributions
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.kv_layout import handed_over
from pytest_attn.workloads.workload import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from honest.variants import VARIANTS
from reported_faults.judging import MISSED, UNREACHED, Case, cases_of, check, check_invariants, fails, find, where
from reported_faults.kernel import KernelBackend
from reported_faults.table import FAULTS, Fault

CPU = torch.device("cpu")
CACHE = ReferenceCache(2 << 30)
#: what it takes to see these is asked with --attn-thorough only
THOROUGH = ("strides",)
Tensors = dict[str, torch.Tensor]


def _uniform(
    low: float, high: float, draw: distributions.Draw, w: Workload, *shapes: distributions.Shape
) -> list[torch.Tensor]:
    """Return uniform q, k and v, made of normal ones."""
    drawn = [draw.normal(name, shape) for name, shape in zip("qkv", shapes, strict=True)]
    return [(torch.special.ndtr(t.double()) * (high - low) + low).to(t.dtype) for t in drawn]


#: of rules that draw what no test of ours does: torch.rand, and gpuemu's
UNIFORM = {"rand": partial(_uniform, 0.0, 1.0), "uniform-10": partial(_uniform, -10.0, 10.0)}
distributions.DISTRIBUTIONS.update(dict.fromkeys(UNIFORM, "uniform"))
distributions._DRAWN_BY.update(UNIFORM)  # type: ignore[arg-type]


OUT, WITH_GRADIENTS = ("out",), ("out", "dq", "dk", "dv")


class Rule(NamedTuple):
    """What others assert.

    accepts: of (name, tensor, exact, twin, workload). inputs: the distribution that they draw. judges: the results that they
    look at.
    """

    inputs: str
    accepts: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor, Workload], bool]
    judges: tuple[str, ...] = WITH_GRADIENTS


ByDtype = dict[str, float]


def dtype_of(w: Workload) -> torch.dtype:
    """Return what the results are rounded to."""
    return getattr(torch, w.dtype)  # type: ignore[no-any-return]


def close(atol: ByDtype, rtol: ByDtype, atol_of_gradients: ByDtype, rtol_of_gradients: ByDtype) -> Any:
    """Return |a - b| <= atol + rtol |b| with tolerances by dtype."""

    def accepts(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
        key = w.dtype
        a, r = (atol[key], rtol[key]) if name == "out" else (atol_of_gradients[key], rtol_of_gradients[key])
        return torch.allclose(got.double(), exact, atol=a, rtol=r)

    return accepts


def assert_close_defaults(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """torch.testing.assert_close against the exact result, rounded."""
    try:
        torch.testing.assert_close(got, exact.to(dtype_of(w)))
    except AssertionError:
        return False
    return True


def get_tolerances(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """PyTorch's test_transformers.py: tolerances from the twin's largest absolute and largest relative deviation."""
    fudge = {"out": 1, "dq": 4, "dk": 8, "dv": 7}[name]
    deviation = (exact - twin.double()).abs()
    least = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3}.get(dtype_of(w), 1.3e-6)
    relative = float((deviation / exact.abs()).nan_to_num(0.0).max())
    rtol = fudge * max(relative if relative < 1e30 else least, least)
    return torch.allclose(got.double(), exact, atol=fudge * max(float(deviation.max()), 1e-3), rtol=rtol)


def flash_attention(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """flash-attention: at most twice, for gradients three times, the twin's largest error."""
    times = 2 if name == "out" else 3
    return float((got.double() - exact).abs().max()) <= times * float((twin.double() - exact).abs().max()) + 1e-5


def flash_attention_3(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """flash-attention's hopper tests: 2x, with a soft-cap 3x, and what adding 0.3 and taking it away again does, twice."""
    kept = exact.to(dtype_of(w))
    atol = 2 * float((kept + 0.3 - 0.3 - kept).abs().max()) + (3e-4 if w.softcap and name != "out" else 0)
    reference, times = kept.double(), 3 if w.softcap else 2
    return float((got.double() - reference).abs().max()) <= times * float((twin.double() - reference).abs().max()) + atol


def flashinfer_bench(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """flashinfer-bench: finite, and no element off by both 1e-2 and a relative 1e-2."""
    x, y = got.float(), exact.to(got.dtype).float()
    error = (x - y).abs()
    return bool(x.isfinite().all()) and not bool(((error > 1e-2) & (error / (y.abs() + 1e-8) > 1e-2)).any())


def tritonbench(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """As tritonbench's flash_attention: no NaN, and assert_close with wider tolerances in half precision."""
    wider = {} if w.dtype == "float32" else {"rtol": 1e-2, "atol": 2e-2}
    try:
        torch.testing.assert_close(got, exact.to(dtype_of(w)), **wider)
    except AssertionError:
        return False
    return True


def rounded(accepts: Any) -> Any:
    """Return a rule that compares with the exact result as the dtype holds it, and wants finite numbers."""

    def of_rounded(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
        return bool(got.isfinite().all()) and bool(accepts(name, got, exact.to(dtype_of(w)).double(), twin, w))

    return of_rounded


def cosine(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """Cosine similarity of the whole tensor."""
    a, b = got.double().flatten(), exact.flatten()
    return bool(torch.nn.functional.cosine_similarity(a, b, 0) >= 0.99) or float(b.norm()) == 0


def all_dtypes(fp32: float, fp16: float, bf16: float) -> ByDtype:
    return {"float32": fp32, "float16": fp16, "bfloat16": bf16}


def both(tolerances: ByDtype) -> Any:
    """Return |a - b| <= t + t |b|."""
    return close(tolerances, tolerances, tolerances, tolerances)


#: of its daemon; of its Python client, which recommends 2.5 times its base tolerances for attention
GPUEMU_ATOL, GPUEMU_RTOL = all_dtypes(2.5e-5, 2.5e-3, 2.5e-2), all_dtypes(2.5e-4, 2.5e-2, 0.25)
GPUEMU, NONE = all_dtypes(1e-5, 1e-3, 1e-3), all_dtypes(0, 0, 0)
RULES = {
    "gpuemu, defaults": Rule("uniform-10", rounded(close(GPUEMU, NONE, GPUEMU, NONE)), OUT),
    "gpuemu, attention": Rule("randn", rounded(close(*[GPUEMU_ATOL, GPUEMU_RTOL] * 2)), OUT),
    "gpucheck": Rule("randn", both(all_dtypes(1e-4, 1e-2, 5e-2))),
    "flashinfer-bench": Rule("randn", flashinfer_bench, OUT),
    "tritonbench": Rule("randn", tritonbench, OUT),
    "KernelBench": Rule("rand", both(all_dtypes(1e-4, 1e-2, 1e-2)), OUT),
    "assert_close, defaults": Rule("randn", assert_close_defaults),
    "PyTorch get_tolerances": Rule("randn", get_tolerances),
    "flash-attention 2x": Rule("randn", flash_attention),
    "flash-attention 3": Rule("randn", flash_attention_3),
    "xformers": Rule(
        "peaky",
        close(
            all_dtypes(3e-4, 4e-3, 2e-2), all_dtypes(2e-5, 4e-4, 5e-3), all_dtypes(9e-4, 0.2, 0.9), all_dtypes(1e-4, 2e-2, 0.1)
        ),
    ),
    "Transformer Engine": Rule("flat", close(*[all_dtypes(1e-3, 1e-3, 1.5e-2)] * 4)),
    "vLLM": Rule("randn", close(*[all_dtypes(1.5e-2, 1.5e-2, 1.5e-2), all_dtypes(1e-2, 1e-2, 1e-2)] * 2)),
    "cosine >= .99": Rule("randn", cosine),
}


class Row(NamedTuple):
    """Who found one faulty kernel. by: "check", an invariant or an error; MISSED or UNREACHED. others: None if not asked."""

    name: str
    kind: str
    condition: str
    by: str
    others: list[str] | None


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


class Others:
    """The rules of others on one kernel, with truths and twins kept."""

    def __init__(self) -> None:
        self._truths: dict[tuple[Case, str], tuple[Inputs, Tensors, Tensors]] = {}

    def finders(self, backend: Backend, cases: list[Case]) -> list[str]:
        """Return the rules that find the kernel wrong on one of the cases."""
        left = list(RULES)
        for case in cases:
            refused = self.refused_by(backend, case, left)
            left = [name for name in left if name not in refused]
        return [name for name in RULES if name not in left]

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
                got[t].shape != exact[t].shape or not rule.accepts(t, got[t], exact[t], twin[t], case.workload)
                for t in exact
                if t in rule.judges
            ):
                found.add(name)
        return found

    def _truth(self, case: Case, distribution: str) -> tuple[Inputs, Tensors, Tensors]:
        if (case, distribution) not in self._truths:
            workload, backward = case.workload, case.backward
            reference = CACHE.reference_of(CheckSpec(workload, CPU, backward, (distribution,)))
            names = ("out", "dq", "dk", "dv") if backward else ("out",)
            exact = {name: _native(reference.tensors[name].value, workload) for name in names}
            inputs = draw_inputs(workload, distribution, 0, CPU)
            self._truths[case, distribution] = (inputs, exact, call(_twin(workload), inputs, backward))
        return self._truths[case, distribution]


def _twin(workload: Workload) -> Backend:
    """Return attention written out in the workload's own dtype; a fault-free kernel in one tile where that takes it not."""
    eager = Registry()["eager"]
    if not eager.unsupported_because(workload, machine_of(CPU), not workload.has_no_gradient_because):
        return eager
    return next(variant for variant in VARIANTS if variant.name == "one-tile").backend()


def _native(tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    return tensor[0].transpose(0, 1) if workload.is_packed else tensor


def directions(workloads: list[Workload]) -> list[Case]:
    """Return every workload forward and, where it has gradients, backward."""
    return [Case(w, backward) for w in workloads for backward in (False, True) if not (backward and w.has_no_gradient_because)]


def for_kernels(cases: list[Case]) -> list[Case]:
    """Return those that mutants, honest variants and the rules of others take: none drops probabilities or dequantizes."""
    return [case for case in cases if not (case.workload.dropout or case.workload.is_quantized)]


def is_refused(backend: Backend, case: Case) -> bool:
    """Whether attn.check fails on the suite's inputs; a kernel that raises does, too."""
    try:
        return not judge(backend, CheckSpec(case.workload, CPU, case.backward, INPUTS), CACHE).passed
    except Exception:
        return True


def broken_invariant(backend: Backend, case: Case, thorough: bool = False) -> str:
    """Return the first invariant that does not hold and why, or the error that asking raised; "" where all hold."""
    try:
        report = judge_invariants(backend, CheckSpec(case.workload, CPU, case.backward), CACHE, thorough=thorough)
    except TypeError:  # a mistake in a call from here is nothing that a kernel was caught by
        raise
    except Exception as error:
        return type(error).__name__
    return f"{report.broken[0].invariant}: {report.broken[0].evidence}" if report.broken else ""


def finder_of_mutant(mutant: Mutant, cases: list[Case]) -> str:
    """Return what of ours finds a mutant."""
    backend = mutant.backend()
    if not cases:
        return UNREACHED
    if any(is_refused(backend, case) for case in cases):
        return "check"
    thorough = mutant.condition in THOROUGH
    broken = (broken_invariant(mutant.backend(), case, thorough) for case in cases)
    return next((said.partition(":")[0] for said in broken if said), MISSED)


def rows_of_mutants(names: list[str], cases: list[Case], judges: list[str], others: Others) -> Iterator[Row]:
    """Judge the mutants."""
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        reached = [case for case in for_kernels(cases) if mutant.applies(case.workload, case.backward)]
        yield Row(
            mutant.name,
            mutant.kind,
            mutant.condition,
            finder_of_mutant(mutant, reached) if "ours" in judges else "",
            others.finders(mutant.backend(), reached) if "others" in judges else None,
        )


def rows_of_reported(names: list[str], cases: list[Case], judges: list[str], others: Others) -> Iterator[Row]:
    """Judge the faults of reports."""
    workloads = list(dict.fromkeys(case.workload for case in cases))
    for fault in FAULTS:
        if names and fault.name not in names:
            continue
        reached = list(cases_of(fault, workloads))
        by = find(fault, reached).by if "ours" in judges else ""
        asked = [] if fault.parameters else for_kernels(reached)
        found = others.finders(KernelBackend(fault.name, fault.kernel()), asked) if "others" in judges and asked else None
        yield Row(fault.name, "reported", fault.report, by, found)


def report(title: str, rows: list[Row]) -> None:
    """Print how many of them each judge finds, by class, and what ours miss."""
    judges: dict[str, Callable[[Row], bool | None]] = {}
    if any(row.by for row in rows):
        judges["check"] = lambda row: row.by == "check"
        judges["check + invariants"] = lambda row: row.by not in (MISSED, UNREACHED)
    for name in RULES if any(row.others is not None for row in rows) else ():
        judges[name] = lambda row, name=name: None if row.others is None else name in row.others  # type: ignore[misc]
    kinds = [*dict.fromkeys(row.kind for row in rows), None]
    print(f"\n{title + ': found, in %':24}", *(f"{(kind or 'all')[:9]:>9}" for kind in kinds))
    for name, finds in judges.items():
        print(f"{name:24}", *(f"{_share([finds(row) for row in rows if kind in (None, row.kind)]):>9}" for kind in kinds))
    print(f"{'kernels':24}", *(f"{sum(kind in (None, row.kind) for row in rows):>9}" for kind in kinds))
    for row in rows:
        if row.by in (MISSED, UNREACHED):
            print(f"{row.by}: {row.name} ({row.condition})")
    if alone := [row.name for row in rows if row.others is None and judges.keys() & RULES.keys()]:
        print(f"put to ours alone: {len(alone)}: {', '.join(alone)}")


def _share(found: list[bool | None]) -> str:
    asked = [one for one in found if one is not None]
    return f"{sum(asked) / len(asked):.0%}" if asked else "-"


def false_alarms_on_honest(names: list[str], cases: list[Case], judges: list[str], others: Others) -> None:
    """Print how often each judge refuses a fault-free kernel, and what ours refuse."""
    alarms: Counter[str] = Counter()
    kernels: dict[str, set[str]] = {}
    number = 0
    variants = [variant for variant in VARIANTS if not names or variant.name in names]
    for variant in variants:
        for case in for_kernels(cases):
            number += 1
            refused = others.refused_by(variant.backend(), case, list(RULES)) if "others" in judges else set()
            if "ours" in judges:
                if is_refused(variant.backend(), case):
                    refused.add("check")
                if said := broken_invariant(variant.backend(), case):
                    refused.add("check_invariants")
                    print(f"false alarm: {variant.name} on {where(case)}: {said}", flush=True)
            alarms.update(refused)
            for name in refused:
                kernels.setdefault(name, set()).add(variant.name)
    print(f"\n{number} cases of {len(variants)} fault-free kernels")
    asked = [*(("check", "check_invariants") if "ours" in judges else ()), *(RULES if "others" in judges else ())]
    for name in asked:
        of = sorted(kernels.get(name, ()))
        few = f": {', '.join(of)}" if 0 < len(of) < 7 else ""
        print(f"{name:24} refuses {alarms[name]:5} cases, of {len(of)} kernels{few}")


def false_alarms_on_twins(faults: list[Fault], cases: list[Case]) -> None:
    """Run every reported kernel without its fault through both of ours; print and count what fails."""
    alarms = judged = 0
    parameters = tuple({name for fault in faults for name in fault.parameters})
    for twin in dict.fromkeys(fault.twin for fault in faults):
        for case in cases:
            for ask in (check, check_invariants):
                judged += 1
                asked = case._replace(parameters=parameters) if case.backward and ask is check else case
                if said := fails(ask, twin(), asked):
                    alarms += 1
                    print(f"FALSE ALARM: {twin.__name__} on {where(case)}: {said}", flush=True)
    print(f"{judged} judgments of reported kernels without a fault, {alarms} false alarms")


def main() -> None:
    """Print a line for each faulty kernel, a table by class, what is not found, and the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="mutants,reported,honest,twins")
    parser.add_argument("--groups", default="smoke,edges,features")
    parser.add_argument("--names", default="")
    parser.add_argument("--judges", default="ours,others")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = directions([w for group in options.groups.split(",") for w in builtin_catalog().select(group)])
    names, judges, kernels = (
        options.names.split(",") if options.names else [],
        options.judges.split(","),
        options.kernels.split(","),
    )
    began, others, kept = time.monotonic(), Others(), []
    for title, rows_of in (("mutants", rows_of_mutants), ("reported", rows_of_reported)):
        if title in kernels:
            rows = []
            for row in rows_of(names, cases, judges, others):
                rows.append(row)
                found = "-" if row.others is None else f"{len(row.others)} of {len(RULES)} rules"
                print(f"{time.monotonic() - began:6.0f} s {row.kind:10} {row.name:48} {row.by:16} {found}", flush=True)
            report(title, rows)
            kept += rows
    if options.out:
        options.out.write_text(json.dumps([row._asdict() for row in kept], indent=1) + "\n")
    if "honest" in kernels:
        false_alarms_on_honest(names, cases, judges, others)
    if "twins" in kernels and "ours" in judges:
        false_alarms_on_twins([fault for fault in FAULTS if not names or fault.name in names], cases)


if __name__ == "__main__":
    main()
