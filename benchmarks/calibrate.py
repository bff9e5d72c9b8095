"""False alarms: every available exact backend, and kernels without a fault, on honest cases; the largest of each level.

    python benchmarks/calibrate.py [--device cuda] [--backends ...] [--seeds 5] [--seconds 500] [--out results.json]

Cases: backends x shapes x masks x distributions x dtypes x forward and backward; then the fault-free kernels of
tests/honest/variants.py, and eager code that writes each step of its scores in the dtype, on the groups smoke and edges, with
some seeds. Each is a judgment; the last line is "alarms: A in N honest judgments of kernels". Exits with 1 if any honest case
fails; failures that a backend carries as known defects are listed apart. Nothing is begun after --seconds. Slopes are those of
a head over exact attention, with what they may be off; --seeds 0 --seconds 50 looks at backends alone, on shapes by chance.
--factors prints by how much one head of four must be off to be found: by element, row and RMS of a head, and by its slope.
--beside 10000 judges so many honest cases of each form of tests/correctness/test_assert_rounded.py, and a tenth of faults.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

from pytest_attn import Workload
from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.precision import PRECISIONS, default_on
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import compare_all, judge
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS
from pytest_attn.workloads.inputs import draw_inputs

SHAPES = {
    "cpu": [(1, 4, 4, 127, 127, 64), (1, 4, 2, 256, 256, 64), (1, 2, 2, 65, 193, 64), (1, 6, 2, 320, 320, 32)],
    "cuda": [
        (2, 8, 8, 127, 127, 64),
        (2, 8, 2, 1024, 1024, 64),
        (1, 4, 4, 704, 704, 128),
        (1, 6, 2, 2048, 2048, 128),
        (1, 4, 4, 333, 1024, 64),
        (1, 24, 24, 4608, 4608, 128),
    ],
}


def workloads(kind: str, dtypes: list[str]) -> list[Workload]:
    found = []
    for (batch, heads, kv_heads, q_len, kv_len, dim), mask, dtype in product(SHAPES[kind], (None, "causal"), dtypes):
        found.append(
            Workload(q_len, kv_len, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, mask=mask, dtype=dtype)
        )
    random.Random(0).shuffle(found)
    return found


#: exact attention, and results in float64
Draw: TypeAlias = tuple[Reference, dict[str, torch.Tensor]]


class Case(NamedTuple):
    """One judgment: of a backend, called by a name."""

    name: str
    backend: Backend
    spec: CheckSpec


def of_backends(names: list[str], device: torch.device, dtypes: list[str], distributions: list[str]) -> Iterator[Case]:
    """Yield what the backends of the registry can compute here."""
    registry, machine = Registry(), machine_of(device)
    for workload in workloads("cpu" if device.type == "cpu" else "cuda", dtypes):
        for name, backward in product(names, (False, True)):
            if registry[name].obstacle(workload, machine, backward):
                continue
            for distribution in distributions:
                if name == "eager" and distribution == "large":
                    continue  # rounding scores of 50,000 to the dtype moves them by 100: no budget can be honest there
                yield Case(name, registry[name], CheckSpec(workload, device, backward, (distribution,)))


def of_variants(device: torch.device, seeds: int) -> Iterator[Case]:
    """Yield the fault-free kernels of the tests, and eager code, on small workloads."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from honest.variants import VARIANTS

    catalog, eager = builtin_catalog(), Registry()["eager"]
    for seed, workload in product(range(seeds), (*catalog.select("smoke"), *catalog.select("edges"))):
        backward = not workload.has_no_gradient_because
        for variant in VARIANTS:
            yield Case(f"kernel {variant.name}", variant.backend(), CheckSpec(workload, device, backward, seed=seed))
        if not eager.obstacle(workload, machine_of(device), backward):
            yield Case("eager", eager, CheckSpec(workload, device, backward, seed=seed))


def smallest_factor(name: str, draws: list[Draw], has_slopes: bool) -> float:
    """Return the least part by which the last head of a tensor must be too large to be found on any draw."""
    least, most = 1e-8, 0.1
    for _ in range(18):
        middle = (least * most) ** 0.5
        found = False
        for reference, tensors in draws:
            w, tensor = reference.workload, tensors[name].clone()
            tensor[:, -1] *= 1 + middle
            rounded = {name: tensor.to(getattr(torch, w.dtype))}
            (row,) = compare_all("", rounded, reference, w, limits_named("default"))
            found |= row.limits.excess(*row.levels[: 4 if has_slopes else 3]) > 1
        least, most = (least, middle) if found else (middle, most)
    return most


def print_factors(device: torch.device, dtypes: list[str]) -> None:
    """Print these of attention that rounds each result once, under the profile of a kernel that declares none."""
    profile = PRECISIONS[default_on(device.type)]
    for dtype, tokens in product(dtypes, (128, 512, 2048)):
        w, draws = Workload(tokens, heads=4, dtype=dtype), list[Draw]()
        for distribution in ("structured", "flat"):
            inputs = draw_inputs(w, distribution, 0, device)
            q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
            out = scaled_dot_product_attention(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
            exact = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
            draws.append((compute_reference(inputs, profile, backward=True), exact))
        of_each = (f"{n} {smallest_factor(n, draws, False):.2g} {smallest_factor(n, draws, True):.2g}" for n in draws[0][1])
        print(f"{profile.name} {dtype:8} {tokens:4}", *of_each, sep="  ", flush=True)


def judge_beside(cases: int) -> int:
    """Judge honest kernels beside attention, and planted faults; return 1 where one is refused, or a fault passes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from correctness.test_assert_rounded import PROBLEMS, Dice, judged

    wrong = 0
    for name, problem in PROBLEMS.items():
        honest, faults = ([*product(range(cases), kernels.values())] for kernels in (problem.honest, problem.faults))
        refused = [isinstance(judged(problem, kernel, Dice(seed)), str) for seed, kernel in honest[:cases]]
        found = [isinstance(judged(problem, kernel, Dice(seed, True)), str) for seed, kernel in faults[: cases // 10]]
        wrong += sum(refused) + found.count(False)
        print(
            f"{name:20} {sum(refused)} of {len(refused):,} honest refused, {sum(found):,} of {len(found):,} faults", flush=True
        )
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backends", default="math,eager,sdpa,sdpa_flash,sdpa_efficient,sdpa_cudnn")
    parser.add_argument("--distributions", default=",".join(d for d in DISTRIBUTIONS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--seeds", type=int, default=5, help="of each kernel of the tests and each small workload")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out")
    parser.add_argument("--factors", action="store_true")
    parser.add_argument("--beside", type=int, metavar="CASES")
    args = parser.parse_args()
    if args.beside:
        return judge_beside(args.beside)
    device = resolve_device(args.device)
    if args.factors:
        print_factors(device, args.dtypes.split(","))
        return 0
    machine, cache = machine_of(device), ReferenceCache(16 << 30)
    largest: dict[str, list[float]] = {}
    slopes: dict[str, tuple[float, float, float]] = {}
    shares: dict[str, tuple[float, str]] = {}
    failures, known, cases, started = [], [], 0, time.time()
    distributions = args.distributions.split(",")
    of_registry = of_backends(args.backends.split(","), device, args.dtypes.split(","), distributions)
    for name, backend, spec in (*of_registry, *of_variants(device, args.seeds)):
        if time.time() - started > args.seconds:
            print(f"the time is over after {cases} cases")
            break
        workload = spec.workload
        comparison = judge(backend, spec, cache)
        cases += 1
        profile = spec.for_subject(spec.subject(Registry(), backend)).profile.name
        for tensor in comparison.tensors:
            key = f"{name} {profile} {workload.dtype} {tensor.name}"
            largest[key] = [*map(max, largest.get(key, [0.0] * 4), tensor.levels)]
            off = abs(tensor.slope - 1)
            if tensor.z_slope:
                slopes[key] = max(slopes.get(key, (0.0, 0.0, 0.0)), (tensor.z_slope, off, off / tensor.z_slope))
            where = f"{workload.id}, {tensor.distribution}, seed {spec.seed}"
            shares[key] = max(shares.get(key, (0.0, "")), (tensor.excess, where))
        reaching = (d for d in backend.known_defects if d.applies(workload, machine))
        defect = next((d for d in reaching if d.explains(comparison, workload)), None)
        if not comparison.passed and defect is not None:
            known.append(f"{name} {workload.id}: {defect.issue}")
        elif not comparison.passed:
            failures.append(f"{name}: {describe(comparison)}")
            print(failures[-1], flush=True)
    print(f"{machine.name}, torch {machine.torch_version}")
    print(f"{cases} cases in {time.time() - started:.0f} s, {len(failures)} failed")
    print(*(f"known defect: {line}" for line in known), sep="\n")
    print(f"{'backend profile dtype tensor':42} element    row   head  slope  |slope-1| of limit  largest share of a limit")
    for key, (element, row, head, slope) in sorted(largest.items()):
        (share, where), (_, off, limit) = shares[key], slopes.get(key, (0.0, 0.0, 0.0))
        figures = f"{element:7.2f} {row:6.2f} {head:6.2f} {slope:6.2f}  {off:.5f} of {limit:.5f}"
        print(f"{key:42} {figures}  {share:.2f} ({where})")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            result = {
                "machine": machine.name,
                "torch": machine.torch_version,
                "cases": cases,
                "failures": failures,
                "known": known,
            }
            json.dump({**result, "largest": largest}, file, indent=1, sort_keys=True)
    print(f"alarms: {len(failures)} in {cases:,} honest judgments of kernels")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
