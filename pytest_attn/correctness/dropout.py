"""Dropout: the keep mask that a kernel says it used, held to what a fair coin for every probability gives.

The chance that a check refuses a fair mask is below `CHANCE`. Of n coins, a rate whose Kullback-Leibler divergence from the
declared one is d has a chance of at most 2 exp(-n d) (Chernoff's bound; Hoeffding 1963, theorem 1). Two slices of m fair coins
agree with chance (p^2 + (1 - p)^2)^m. The rate may be off by 1/256, as some kernels draw bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from pytest_attn.backends.dense import index_tensors
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import Inputs

CHANCE = 1e-9
#: by how much the rate of a kernel that draws bytes may be off
_STEP = 1 / 256
#: coins per slice that are compared, and slices
_COINS, _SLICES = 4096, 2048
_AXES = ("batch entries", "heads", "rows", "keys")


@contextmanager
def seeded(spec: CheckSpec) -> Iterator[None]:
    """Have torch's generators start anew for a kernel with dropout, and leave them as they were."""
    if not spec.workload.dropout:
        yield
        return
    devices = [spec.device] if spec.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(spec.seed)
        yield


def with_mask(reference: Reference, keep: Tensor, backward: bool) -> Reference:
    """Return exact attention with this mask (batch, heads, q_len, kv_len), True = kept; that of `reference` if it has it."""
    own = reference.inputs.keep
    if own is not None and torch.equal(own, keep):
        return reference
    made = compute_reference(
        replace(reference.inputs, keep=keep),
        reference.precision,
        backward,
        parameters=reference.parameters,
        extra=reference.extra,
    )
    made.given = reference.given and replace(reference.given, keep=keep)
    return made


def require_same(keep: Tensor, before: Tensor | None) -> None:
    """Raise ContractError where two calls under one seed of torch's drop different probabilities."""
    if before is None:
        return
    moved = int((keep != before).sum())
    if moved:
        raise ContractError(
            f"two calls after torch.manual_seed with the same seed drop other probabilities ({moved:,} of {keep.numel():,});"
            " let the callable draw from torch's generator, or from a seed that it sets for each call"
        )


def require_fair(keep: Tensor, inputs: Inputs) -> None:
    """Raise ContractError where a mask is not drawn fairly for each visible probability; hidden ones may be anything."""
    seen = _visible(inputs)
    _require_rate(keep, seen, inputs.workload.dropout)
    for axis, name in enumerate(_AXES):
        _require_unlike(keep, seen, axis, name, inputs.workload.dropout)


def _visible(inputs: Inputs) -> Tensor:
    """Return which probabilities are not 0 by the mask, (batch, heads, q_len, kv_len)."""
    w, mask_mod = inputs.workload, inputs.mask_mod()
    sizes = (w.batch, w.heads, w.q_len, w.kv_len)
    if mask_mod is None:
        return torch.ones(sizes, dtype=torch.bool, device=inputs.device)
    return mask_mod(*index_tensors(w, inputs.device)).expand(sizes)


def _require_rate(keep: Tensor, seen: Tensor, dropout: float) -> None:
    n = int(seen.sum())
    kept = int((keep & seen).sum())
    if not n:
        return
    rate = kept / n
    nearest = min(max(rate, 1 - dropout - _STEP), 1 - dropout + _STEP)
    if n * _divergence(rate, nearest) > math.log(2 / CHANCE):
        raise ContractError(
            f"the keep mask keeps {rate:.2%} of {n:,} visible probabilities, where dropout={dropout:g} keeps {1 - dropout:.2%}"
            f" (the chance of that is below {CHANCE:g})"
        )


def _divergence(rate: float, expected: float) -> float:
    """Return the Kullback-Leibler divergence of two coins; infinite where what happened could not."""
    total = 0.0
    for one, other in ((rate, expected), (1 - rate, 1 - expected)):
        if one > 0:
            total += one * math.log(one / other) if other > 0 else math.inf
    return total


def _require_unlike(keep: Tensor, seen: Tensor, axis: int, name: str, dropout: float) -> None:
    """Raise ContractError where two slices along an axis, say two heads, have the same mask, and not by chance."""
    slices = min(keep.shape[axis], _SLICES)
    if slices < 2:
        return
    signs = torch.where(keep, 1.0, -1.0) * seen
    signs = signs.movedim(axis, 0).flatten(1)[:slices]
    step = max(1, signs.shape[1] // _COINS)
    signs = signs[:, ::step]
    agreeing, shared = signs @ signs.T, signs.abs() @ signs.abs().T
    pairs = slices * (slices - 1) / 2
    enough = math.log(CHANCE / pairs) / math.log(dropout**2 + (1 - dropout) ** 2)
    same = ((agreeing == shared) & (shared >= enough)).triu(1)
    if bool(same.any()):
        one, other = same.nonzero()[0].tolist()
        raise ContractError(
            f"the keep mask repeats: {name} {one} and {other} drop the same of {int(shared[one, other]):,} probabilities"
            f" ({int(same.sum()):,} of {pairs:,.0f} pairs of {name} do)"
        )
