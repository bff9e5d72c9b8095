"""What a check costs: against a plain fp64 reference, for a second backend, and on long workloads (peak memory).

    python benchmarks/cost.py [--device cuda] [--long] [--small]

Prints ratios and times of one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.catalog import builtin_catalog


def timed(fn: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    fn()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def plain_reference(workload: Workload, device: torch.device, backward: bool) -> None:
    """What people write today: SDPA's MATH kernel on float64 copies, with autograd."""
    inputs = draw_inputs(workload, "structured", 0, device)
    q, k, v = (t.double().requires_grad_(backward) for t in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, is_causal=workload.mask is not None, enable_gqa=workload.group > 1)
    if backward:
        torch.autograd.grad(out, (q, k, v), inputs.dout.double())


def ratios(device: torch.device, is_small: bool) -> None:
    sizes = (
        [(2, 8, 8, 1024, 64), (1, 8, 2, 2048, 128)]
        if device.type == "cpu"
        else [(2, 16, 16, 2048, 64), (1, 24, 24, 4608, 128)]
    )
    backend = Registry()["sdpa_flash"]
    for batch, heads, kv_heads, length, dim in [(1, 2, 2, 128, 64)] if is_small else sizes:
        for mask in (None, "causal"):
            workload = Workload(length, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, mask=mask)
            for backward in (False, True):
                question = CheckSpec(workload, device, backward, ("structured",))
                plain_reference(workload, device, backward)
                judge(backend, question, ReferenceCache())
                plain = min(timed(lambda: plain_reference(workload, device, backward), device) for _ in range(3))
                cache = ReferenceCache()
                first = min(timed(lambda: judge(backend, question, ReferenceCache()), device) for _ in range(3))
                judge(backend, question, cache)
                computed = cache.computed
                again = timed(lambda: judge(backend, question, cache), device)
                assert cache.computed == computed, "the second backend computed a reference of its own"
                print(
                    f"{workload.id:28} {'backward' if backward else 'forward':8} check {first:.3f} s, "
                    f"plain fp64 {plain:.3f} s, ratio {first / plain:.2f}; "
                    f"second backend {again:.3f} s ({again / first:.2f} of the first)"
                )


def long_workloads(device: torch.device) -> None:
    registry, machine = Registry(), machine_of(device)
    for name in ("flux-L512", "flux-4k", "hunyuan-video"):
        (workload,) = builtin_catalog().select(name)
        cache = ReferenceCache(32 << 30)
        inputs_bytes = workload.bytes()
        for backend_name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"):
            backend = registry[backend_name]
            if backend.unavailable_because(machine):
                continue
            question = CheckSpec(workload, device, False, ("structured",))
            if name == "flux-L512":
                judge(backend, question, cache)
            torch.cuda.reset_peak_memory_stats()
            seconds = timed(lambda: judge(backend, question, cache), device)
            peak = torch.cuda.max_memory_allocated() - inputs_bytes
            size = f"{peak / 2**30:5.1f} GiB over its inputs of {inputs_bytes / 2**30:.1f} GiB"
            print(f"{name:16} {backend_name:16} {seconds:6.2f} s, {size}", flush=True)


def main() -> None:
    """Print the ratios, and where it is asked for what long workloads take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--long", action="store_true", help="long workloads too (CUDA)")
    parser.add_argument("--small", action="store_true", help="128 tokens alone")
    chosen = parser.parse_args()
    where = resolve_device(chosen.device)
    print(f"{machine_of(where).name}, torch {torch.__version__}")
    ratios(where, chosen.small)
    if chosen.long:
        long_workloads(where)


if __name__ == "__main__":
    main()
