"""How far float32 kernels with tf32 products are from exact attention, under the profiles tf32 and flash, on a GPU.

    python benchmarks/tf32.py [--groups smoke,edges,features] [--device cuda]

A Triton kernel with tl.dot's default precision (forward), and torch's own products with allow_tf32 (forward and backward),
on the groups smoke, edges and features in float32 and every distribution of inputs. Exits with 1 where one fails under tf32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS
from pytest_attn.workloads.masks import Causal
from pytest_attn.workloads.workload import Workload

TILE = 64

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def _forward(
        q, k, v, out, scale, q_len, kv_len, group, heads, offset, causal: tl.constexpr, dim: tl.constexpr, tile: tl.constexpr
    ):
        """One tile of rows of one head: the online softmax over tiles of keys."""
        head, rows, cols = tl.program_id(1), tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, dim)
        kv_head = (head // heads) * (heads // group) + (head % heads) // group
        at = rows[:, None] * dim + cols[None, :]
        query = tl.load(q + head * q_len * dim + at, mask=rows[:, None] < q_len, other=0.0)
        top = tl.full((tile,), -float("inf"), tl.float32)
        total, acc = tl.zeros((tile,), tl.float32), tl.zeros((tile, dim), tl.float32)
        for start in range(0, kv_len, tile):
            keys = start + tl.arange(0, tile)
            there = kv_head * kv_len * dim + keys[:, None] * dim + cols[None, :]
            key = tl.load(k + there, mask=keys[:, None] < kv_len, other=0.0)
            value = tl.load(v + there, mask=keys[:, None] < kv_len, other=0.0)
            scores = tl.dot(query, tl.trans(key)) * scale
            seen = keys[None, :] < kv_len
            if causal:
                seen = seen & (keys[None, :] <= rows[:, None] + offset)
            scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new == -float("inf"), 0.0, new)
            p = tl.exp(scores - shift[:, None])
            factor = tl.exp(top - shift)
            total, acc, top = total * factor + tl.sum(p, 1), acc * factor[:, None] + tl.dot(p, value), new
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + head * q_len * dim + at, acc, mask=rows[:, None] < q_len)


def triton_kernel(w: Workload) -> Callable[..., Any] | None:
    """Return a Triton kernel for plain and causal workloads, None for others."""
    options = w.kv_lens, w.cached, w.kv_pages, w.bias, w.alibi, w.sinks, w.score_mod, w.softcap, w.dropout
    is_plain = not (w.is_packed or w.is_quantized or any(options))
    fits = w.head_dim == w.v_head_dim and w.head_dim in (16, 32, 64, 128) and w.head_groups == "contiguous"
    if triton is None or not is_plain or not fits or not (w.mask is None or isinstance(w.mask, Causal)):
        return None
    offset = w.kv_len - w.q_len if isinstance(w.mask, Causal) and w.mask.bottom_right else 0

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.contiguous() for t in (q, k, v))
        out = torch.empty_like(q)
        grid = (triton.cdiv(w.q_len, TILE), w.batch * w.heads)
        sizes = (w.q_len, w.kv_len, w.group, w.heads, offset, w.mask is not None, w.head_dim, TILE)
        _forward[grid](q, k, v, out, w.softmax_scale, *sizes)
        return out

    return call


def main() -> int:
    """Print the largest z of each kernel, tensor and profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="smoke,edges,features")
    parser.add_argument("--device", default="cuda", help="a CPU has no tf32, and no Triton: a try of this script alone")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = True
    name = machine_of(device).name
    print(f"{name}, torch {torch.__version__}, triton {getattr(triton, '__version__', 'none')}")
    catalog = builtin_catalog()
    small = [w.replace(dtype="float32") for group in options.groups.split(",") for w in catalog.select(group)]
    worst: dict[tuple[str, str, str], list[float]] = {}
    cases, failed = 0, []
    for profile in ("tf32", "flash"):
        references, eager = ReferenceCache(), torch_with_tf32(profile)
        for w in small:
            has_gradients = not w.has_no_gradient_because
            takes = not eager.obstacle(w, machine_of(device), has_gradients)
            for name, kernel in (
                ("triton", triton_kernel(w) if device.type == "cuda" else None),
                ("eager", eager if takes else None),
            ):
                if kernel is None:
                    continue
                backward = name == "eager" and has_gradients
                spec = CheckSpec(w, device, backward, tuple(DISTRIBUTIONS), Declaration(precision=profile))
                found = judge(spec.subject(Registry(), kernel, None if kernel is eager else name), spec, references)
                for row in found.tensors:
                    levels = worst.setdefault((profile, name, row.name), [0.0] * 3)
                    worst[profile, name, row.name] = [*map(max, levels, (row.z_element, row.z_row, row.z_head))]
                if profile == "tf32":
                    cases += 1
                    failed += [] if found.passed else [f"{name} on {w.id}: {found.worst.name} of {found.worst.distribution}"]
    for (profile, name, tensor), levels in worst.items():
        print(f"{profile:6} {name:7} {tensor:4} element {levels[0]:12,.1f}  row {levels[1]:12,.1f}  head {levels[2]:12,.2f}")
    print(f"{cases} cases under tf32, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


def torch_with_tf32(profile: str) -> Backend:
    """Return torch's own attention, which declares a profile."""
    eager = Registry()["eager"]
    eager.precision = profile
    return eager


if __name__ == "__main__":
    sys.exit(main())
