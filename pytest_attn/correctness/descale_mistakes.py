"""Likely mistakes with descales: a forgotten one, that of another tensor, one for all heads or tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.correctness.packed_mistakes import Read
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.quantized import dequantized, factors_of
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def descale_mistakes(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield other descales for q, k and v. `inputs` are values; what made them is `inputs.applied`."""
    applied = inputs.applied
    if applied is None or not w.is_quantized:
        return
    names = [name for name in "qkv" if getattr(applied, name) is not None]
    for name in names:
        ones = (getattr(applied, name) != 0).float()
        yield f"without the descale of {name}", partial(_with, inputs, w, name, ones)
    if not w.v_in_k:
        for name, other in (("v", "k"), ("k", "v")):
            yield f"with the descale of {other} for {name}", partial(_with, inputs, w, name, getattr(applied, other))
    for name in names:
        descale = getattr(applied, name)
        if descale.dim() == 2 and descale.shape[1] > 1:
            first = descale[:, :1].expand_as(descale)
            yield f"with {name}'s descale of the first head for all", partial(_with, inputs, w, name, first)
        if descale.dim() >= 2 and descale.shape[0] > 1 and not (w.kv_pages and descale.dim() == 3):
            first = descale[:1].expand_as(descale)
            yield f"with {name}'s descale of the first batch entry for all", partial(_with, inputs, w, name, first)


def _with(inputs: Inputs, w: Workload, name: str, descale: torch.Tensor) -> tuple[Inputs, Workload]:
    """Multiply q, k or v by another descale, in place of its own."""
    assert inputs.applied is not None
    own, other = (
        factors_of(name, d, w, inputs.page_table) for d in (inputs.applied, inputs.applied._replace(**{name: descale}))
    )
    values: torch.Tensor = getattr(inputs, name)
    changed = dequantized(values / own.where(own != 0, 1).to(values.dtype), other)
    if w.v_in_k and name == "k":
        return dataclasses.replace(inputs, k=changed, v=changed[..., : w.v_head_dim]), w
    return dataclasses.replace(inputs, **{name: changed}), w  # type: ignore[arg-type]
