"""The groups "long-64k", "long-256k" and "long-1m", which are ours: contexts in which indices and chunks go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_attn.workloads.group import Group
from pytest_attn.workloads.masks import Window
from pytest_attn.workloads.workload import Workload

#: group -> its tokens
LONG_GROUPS = {"long-64k": 1 << 16, "long-256k": 1 << 18, "long-1m": 1 << 20}


def long_workloads() -> Iterator[Group]:
    """Yield the groups; each is asked for by name only."""
    for name, tokens in LONG_GROUPS.items():
        yield Group(name, f"ours: {tokens:,} tokens on one GPU, asked for by name", _of(name, tokens), on_request=True)


def is_for_gpu(workload: Workload) -> bool:
    """Whether a workload is of one of these groups."""
    return (workload.name or "").rpartition("-")[0] in LONG_GROUPS


def _of(name: str, tokens: int) -> list[Workload]:
    of = partial(Workload, head_dim=128)
    return [
        of(tokens, heads=8, mask="causal", name=f"{name}-causal"),
        of(tokens, heads=8, mask=Window(4095, 0), name=f"{name}-window"),
        of(tokens, heads=32, kv_heads=8, mask="causal", name=f"{name}-gqa"),
        of(tokens + 37, heads=2, mask="causal", name=f"{name}-tail"),
        of(1, tokens, heads=32, kv_heads=8, mask="causal-bottom-right", name=f"{name}-decode"),
    ]
