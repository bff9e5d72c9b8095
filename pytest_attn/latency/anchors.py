"""Anchors: two frozen operations that are timed beside every kernel, which separates a slow machine from a slow kernel.

One is bound by arithmetic, one by memory; a CPU has a third, the reference loop of its core. What they do is written down as
text, whose hash is kept with every baseline: times beside other anchors cannot be compared.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_attn.latency.disturbance import REFERENCE_LOOP
from pytest_attn.latency.timer import Item

COMPUTE, MEMORY = "compute", "memory"


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


def anchor_item(name: str, anchor: Anchor) -> Item:
    """Return one sample of an anchor."""

    def sample() -> None:
        for _ in range(anchor.calls):
            anchor.call()

    return Item(name, lambda: sample, anchor.calls)


def _definitions(kind: str) -> dict[str, str]:
    return DEFINITIONS["cpu" if kind == "cpu" else "cuda"]
