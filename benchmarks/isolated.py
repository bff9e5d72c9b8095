"""What a process of its own costs: honest kernels by their names, checked and measured here and under --attn-isolated.

    python benchmarks/isolated.py [--device cuda] [--kernels plain,compiled,flash,triton_rows]

Prints for each case its outcome and seconds both ways, the ratio of all cases but the first of each kernel, and each p50 with
its ratio. Status 1 where an honest kernel fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parent.parent

KERNELS = {
    "plain": """
from torch.nn.functional import scaled_dot_product_attention as sdpa


def attention(q, k, v, workload):
    return sdpa(q, k, v, is_causal=workload.mask is not None, enable_gqa=True)
""",
    "compiled": """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


@torch.compile(dynamic=False)
def full(q, k, v):
    return sdpa(q, k, v, enable_gqa=True)


@torch.compile(dynamic=False)
def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def attention(q, k, v, workload):
    return full(q, k, v) if workload.mask is None else causal(q, k, v)
""",
    "flash": """
from flash_attn import flash_attn_func


def attention(q, k, v, workload):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flash_attn_func(q, k, v, causal=workload.mask is not None).transpose(1, 2)
""",
    "triton_rows": """
import torch
import triton
import triton.language as tl


@triton.jit
def rows(Q, K, V, Out, scale, q_len, kv_len, group, sqb, sqh, sqm, skb, skh, skn, svb, svh, svn, sob, soh, som, heads,
         D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):
    start, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    m, d = start * M + tl.arange(0, M), tl.arange(0, D)
    q = tl.load(Q + b * sqb + h * sqh + m[:, None] * sqm + d[None], mask=m[:, None] < q_len, other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for first in range(0, kv_len, N):
        n = first + tl.arange(0, N)
        there = n[:, None] < kv_len
        k = tl.load(K + b * skb + (h // group) * skh + n[:, None] * skn + d[None], mask=there, other=0.0)
        v = tl.load(V + b * svb + (h // group) * svh + n[:, None] * svn + d[None], mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        seen = (n[None] < kv_len) & (m[:, None] < q_len)
        if CAUSAL:
            seen = seen & (n[None] <= m[:, None])
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(score - safe[:, None])
        factor = tl.exp(top - safe)
        total = total * factor + tl.sum(p, 1)
        acc = acc * factor[:, None] + tl.dot(p.to(v.dtype), v)
        top = new
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(Out + b * sob + h * soh + m[:, None] * som + d[None], out.to(Out.dtype.element_ty), mask=m[:, None] < q_len)


def attention(q, k, v, workload):
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    (batch, heads, q_len, dim), kv_len = q.shape, k.shape[2]
    out = torch.empty((batch, heads, q_len, dim), dtype=q.dtype, device=q.device)
    strides = (s for t in (q, k, v, out) for s in t.stride()[:3])
    rows[(triton.cdiv(q_len, 64), batch * heads)](
        q, k, v, out, workload.softmax_scale, q_len, kv_len, heads // k.shape[1], *strides, heads,
        D=dim, M=64, N=64, CAUSAL=workload.mask is not None,
    )
    return out
""",
}
TESTS = """
import pytest
from pytest_attn import Workload

SIZES = {sizes}
CASES = [Workload(n, batch=2, heads=8, kv_heads=kv, head_dim=64, mask=mask)
         for n in SIZES for kv, mask in ((8, None), (2, "causal"))]


@pytest.mark.attention(*CASES, backward={backward}, precision="{precision}")
def test_check(attn):
    attn.check("{module}:attention")


@pytest.mark.attention(CASES[0], backward={backward}, precision="{precision}")
def test_invariants(attn):
    attn.check_invariants("{module}:attention")


@pytest.mark.attention(*CASES[-2:], precision="{precision}")
def test_measure(attn):
    attn.measure("{module}:attention")
"""


def run(folder: Path, options: list[str]) -> tuple[dict[str, tuple[str, float]], dict[str, float]]:
    """Run all tests of a folder; return outcome and seconds of each, and the p50 of each that has one."""
    file, records = folder / "junit.xml", folder / "records.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfEs", f"--junitxml={file}", *options]
    command.append(f"--attn-output={records}")
    if not any(point.value == "pytest_attn.plugin" for point in entry_points(group="pytest11")):
        command += ["-p", "pytest_attn.plugin"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = (kinds[0] if kinds else "passed", float(case.get("time", 0)))
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    return found, {line["test"]: line["latency"]["p50"] for line in lines if line.get("latency")}


def main() -> int:
    """Run both ways, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", default="plain,compiled")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = (64, 100, 256) if given.device == "cpu" else (512, 1000, 4096)
        for module in given.kernels.split(","):
            (folder / f"{module}.py").write_text(KERNELS[module])
            precision = "torch_cpu" if given.device == "cpu" else "flash"
            is_differentiable = module != "triton_rows"
            tests = TESTS.format(module=module, sizes=sizes, backward=is_differentiable, precision=precision)
            (folder / f"test_{module}.py").write_text(tests)
        options = [f"--attn-device={given.device}"]
        here, p50s = run(folder, options)
        isolated, their_p50s = run(folder, [*options, "--attn-isolated"])
        times = [0.0, 0.0]
        seen: set[str] = set()
        for case, (outcome, seconds) in here.items():
            other, theirs = isolated.get(case, ("missing", 0.0))
            print(f"{case:60} here {outcome:8} {seconds:7.2f} s   isolated {other:8} {theirs:7.2f} s")
            failed += other in ("failure", "error", "missing") and outcome == "passed"
            if (kernel := case.partition("::")[0]) in seen and "measure" not in case:
                times = [times[0] + seconds, times[1] + theirs]
            seen.add(kernel)
        print(f"all but the first case of each kernel, without measure: {times[1] / max(times[0], 1e-9):.2f} times")
        for case, p50 in p50s.items():
            theirs = their_p50s.get(case, math.nan)
            print(f"{case:60} here {p50 * 1e6:9.2f} us, isolated {theirs * 1e6:9.2f} us, {theirs / p50:.3f} times")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
