"""False alarms: every available exact backend on honest cases; prints the largest z of each level.

    python benchmarks/calibrate.py [--device cuda] [--backends ...] [--out results.json]

Cases: backends x shapes x masks x distributions x dtypes x forward and backward. Exits with 1 if any honest case
fails; failures that a backend carries as known defects are listed apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product

from pytest_attn import Workload
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.distributions import DISTRIBUTIONS

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
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backends", default="math,eager,sdpa,sdpa_flash,sdpa_efficient,sdpa_cudnn")
    parser.add_argument("--distributions", default=",".join(d for d in DISTRIBUTIONS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = resolve_device(args.device)
    machine, registry, cache = machine_of(device), Registry(), ReferenceCache(16 << 30)
    largest: dict[str, list[float]] = {}
    failures, known, cases, started = [], [], 0, time.time()
    for workload in workloads("cpu" if device.type == "cpu" else "cuda", args.dtypes.split(",")):
        for name, backward in product(args.backends.split(","), (False, True)):
            backend = registry[name]
            if backend.obstacle(workload, machine, backward):
                continue
            for distribution in args.distributions.split(","):
                if name == "eager" and distribution == "large":
                    continue  # rounding scores of 50,000 to the dtype moves them by 100: no budget can be honest there
                comparison = judge(backend, CheckSpec(workload, device, backward, (distribution,)), cache)
                cases += 1
                for tensor in comparison.tensors:
                    key = f"{name} {workload.dtype} {tensor.name}"
                    levels = (tensor.z_element, tensor.z_row, tensor.z_head)
                    so_far = largest.get(key, [0.0, 0.0, 0.0])
                    largest[key] = [max(pair) for pair in zip(so_far, levels, strict=True)]
                reaching = (d for d in backend.known_defects if d.applies(workload, machine))
                defect = next((d for d in reaching if d.explains(comparison, workload)), None)
                if not comparison.passed and defect is not None:
                    known.append(f"{name} {workload.id} {distribution}: {defect.issue}")
                elif not comparison.passed:
                    failures.append(describe(comparison))
                    print(describe(comparison), flush=True)
    print(f"{machine.name}, torch {machine.torch_version}")
    print(f"{cases} cases in {time.time() - started:.0f} s, {len(failures)} failed")
    print(*(f"known defect: {line}" for line in known), sep="\n")
    print(f"{'backend dtype tensor':42} element    row   head")
    for key, (element, row, head) in sorted(largest.items()):
        print(f"{key:42} {element:7.2f} {row:6.2f} {head:6.2f}")
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
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
