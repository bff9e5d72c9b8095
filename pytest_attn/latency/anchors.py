"""Anchors: two frozen operations that are timed beside every kernel, which separates a slow machine from a slow kernel.

One is bound by arithmetic, one by memory; a CPU has the reference loop of its core, too, and beside a kernel exact attention
of its shape. What they do is written down as text, whose hash is kept with every baseline: times beside other anchors cannot
be compared.
"""

import hashlib
import math
import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_attn.latency.disturbance import REFERENCE_LOOP
from pytest_attn.latency.timer import SHORTEST_HOST_SAMPLE, Item
from pytest_attn.workloads.dtypes import QUANTIZED_DTYPES
from pytest_attn.workloads.workload import Workload

COMPUTE, MEMORY, ATTENTION = "compute", "memory", "attention"
#: of a CPU, those that not every case is timed beside
NOT_BESIDE_ALL = frozenset((REFERENCE_LOOP, ATTENTION))
#: scores of the attention control, at most: more would take the memory and the time of a long context
_MOST_SCORES = 1 << 24


class Anchor(NamedTuple):
    """One operation, as it is kept with baselines and as it is called; calls: in one sample."""

    definition: str
    call: Callable[[], object]
    calls: int = 1


DEFINITIONS = {
    "cuda": {
        COMPUTE: "torch.mm(a, b, out=c), three times; a, b, c float16 (4096, 4096), zeros; v2",
        MEMORY: "target.copy_(source); uint8 (268435456,), zeros; v1",
    },
    "cpu": {
        COMPUTE: "torch.mm(a, b, out=c); a, b, c float32 (384, 384), randn, seed 0; v1",
        MEMORY: "target.copy_(source); uint8 (33554432,), zeros; v1",
        REFERENCE_LOOP: "sum(range(6000)), the fastest of a measurement; v1",
        ATTENTION: "softmax(q k^T) v of the case's shape and dtype, into the same memory, up to 2^24 scores, randn; v1",
    },
}


def hash_of(definition: str) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a definition."""
    return hashlib.sha256(definition.encode()).hexdigest()[:12]


def anchor_hashes(kind: str) -> dict[str, str]:
    """Return the hashes of the anchors of a type of device; other types have those of "cuda"."""
    return {name: hash_of(text) for name, text in _definitions(kind).items()}


def make_anchors(device: torch.device) -> dict[str, Anchor]:
    """Allocate the anchors of a device; their tensors live as long as they do (about 0.6 GB on a GPU).

    A GPU multiplies zero matrices, so that the anchor runs at the clock of flash attention and follows its steps. Random data
    draws more power, so that the clock is lower and its steps hardly show.
    """
    if device.type == "cpu":
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(384, 384, generator=generator) for _ in range(2))
        products, copied = 1, 1 << 25
    else:
        a, b = (torch.zeros(4096, 4096, dtype=torch.float16, device=device) for _ in range(2))
        products, copied = 3, 1 << 28
    c = torch.empty_like(a)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    definitions = _definitions(device.type)
    return {
        COMPUTE: Anchor(definitions[COMPUTE], lambda: torch.mm(a, b, out=c), products),
        MEMORY: Anchor(definitions[MEMORY], lambda: target.copy_(source)),
    }


def attention_like(workload: Workload) -> Anchor:
    """Allocate exact attention of a workload's shape on a CPU: what slows its core, caches or memory slows both alike."""
    w = workload
    rows = max(1, min(w.q_len, _MOST_SCORES // w.kv_len))
    heads = max(1, min(w.batch * w.heads, _MOST_SCORES // (rows * w.kv_len)))
    dtype = torch.float32 if w.dtype in QUANTIZED_DTYPES else getattr(torch, w.dtype)  # torch multiplies no float8 on a CPU
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, length, dim, generator=generator).to(dtype)
        for length, dim in ((rows, w.head_dim), (w.kv_len, w.head_dim), (w.kv_len, w.v_head_dim))
    )
    scores, weights, out = (
        q.new_empty(heads, rows, w.kv_len),
        q.new_empty(heads, rows, w.kv_len),
        v.new_empty(heads, rows, w.v_head_dim),
    )

    def call() -> None:
        torch.bmm(q, k.mT, out=scores)
        torch.softmax(scores, dim=-1, out=weights)
        torch.bmm(weights, v, out=out)

    seconds = min(timeit.repeat(call, number=1, repeat=3))
    return Anchor(DEFINITIONS["cpu"][ATTENTION], call, math.ceil(SHORTEST_HOST_SAMPLE / seconds))


def anchor_item(name: str, anchor: Anchor) -> Item:
    """Return one sample of an anchor."""

    def sample() -> None:
        for _ in range(anchor.calls):
            anchor.call()

    return Item(name, lambda: sample, anchor.calls)


def _definitions(kind: str) -> dict[str, str]:
    return DEFINITIONS["cpu" if kind == "cpu" else "cuda"]
