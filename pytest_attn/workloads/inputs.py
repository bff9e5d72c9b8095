"""The tensors of a workload: seeded, the same for every backend, process, device and torch version."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.workloads.distributions import distribution_names, draw_qkv
from pytest_attn.workloads.generator import Draw
from pytest_attn.workloads.masks import MaskMod
from pytest_attn.workloads.visibility import bind
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Inputs:
    """What a kernel is given for one workload, in its native layout ("bhsd", or "thd" where packed).

    Args:
        workload: what is asked.
        device: where the tensors are.
        q: queries, of the workload's dtype.
        k: keys, likewise; a page pool where the workload has kv_pages.
        v: values, likewise.
        dout: the gradient of out, likewise.
        bias: broadcasts to (batch, heads, q_len, kv_len), of the workload's dtype.
        sinks: (heads,), of the workload's dtype.
        alibi_slopes: (heads,) float32.
        cu_seqlens: (batch + 1,) int32, of the queries, where packed.
        cu_seqlens_kv: (batch + 1,) int32, of the keys, where packed.
        kv_lens: (batch,) int32, where padded or paged.
        page_table: (batch, pages per sequence) int32, where paged.
    """

    workload: Workload
    device: torch.device
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    def mask_mod(self) -> MaskMod | None:
        """Return the mask, with padding, as FlexAttention's mask_mod over dense tensors; None where all is visible."""
        w = self.workload
        lens = self.kv_lens if self.kv_lens is not None else w.kv_len
        inner = None if w.plain_mask is None else bind(w.plain_mask, w.batch, w.heads, w.q_len, w.kv_len, lens, self.device)
        if self.kv_lens is None or w.is_packed:
            return inner
        kv_lens = self.kv_lens

        def padded(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            inside = kv < kv_lens[b]
            return inside if inner is None else inside & inner(b, h, q, kv)

        return padded

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v as dense (batch, kv_heads, kv_len, dim) tensors, read through the page table where paged."""
        if self.page_table is None:
            return self.k, self.v
        table = self.page_table.long()
        k, v = (pool[table].flatten(1, 2)[:, : self.workload.kv_len].transpose(1, 2) for pool in (self.k, self.v))
        return k, v


def draw_inputs(
    workload: Workload, distribution: str = "structured", seed: int = 0, device: torch.device | str = "cpu"
) -> Inputs:
    """Draw the tensors of a workload: the same on every device and in every process.

    Args:
        workload: what is asked.
        distribution: a name of docs/reference/workloads.md.
        seed: of the generator.
        device: where the tensors are put.

    Returns:
        The tensors, in the workload's native layout and dtype.

    Raises:
        ValueError: the distribution is unknown.
    """
    import torch

    distribution_names(distribution)
    device = torch.device(device)
    w = workload
    dense_q = (1, w.heads, sum(w.q_lens)) if w.q_lens else (w.batch, w.heads, w.q_len)
    dense_k = (1, w.kv_heads, sum(w.kv_lens)) if w.q_lens and w.kv_lens else (w.batch, w.kv_heads, w.kv_len)
    draw = Draw(f"{w.name or w.shape_id}/{seed}", getattr(torch, w.dtype), device)
    q, k, v = draw_qkv(distribution, draw, w, (*dense_q, w.head_dim), (*dense_k, w.head_dim), (*dense_k, w.v_head_dim))
    dout = draw.normal("dout", (*dense_q, w.v_head_dim))
    extra = _auxiliary(draw, w, device)
    if w.is_packed:
        q, k, v, dout = (t[0].transpose(0, 1).contiguous() for t in (q, k, v, dout))
    if w.kv_pages:
        k, v = (_into_pages(t, extra["page_table"], w.kv_pages.size) for t in (k, v))
    return Inputs(w, device, q, k, v, dout, **extra)


def _auxiliary(draw: Draw, w: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    import torch

    made: dict[str, torch.Tensor] = {}
    if w.bias:
        sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
        made["bias"] = draw.normal("bias", tuple(sizes[d] if d in w.bias else 1 for d in "bhqk"))
    if w.sinks:
        made["sinks"] = draw.normal("sinks", (w.heads,)) + math.log(w.kv_len + 1)  # as heavy as all keys of a flat row
    if w.alibi:
        made["alibi_slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / w.heads) for h in range(w.heads)], device=device)
    if w.q_lens and w.kv_lens:
        for name, lengths in (("cu_seqlens", w.q_lens), ("cu_seqlens_kv", w.kv_lens)):
            ends = torch.tensor((0, *lengths)).cumsum(0)
            made[name] = ends.to(device, torch.int32)
    elif w.kv_lens:
        made["kv_lens"] = torch.tensor(w.kv_lens, dtype=torch.int32, device=device)
    if w.kv_pages:
        per_sequence = math.ceil(w.kv_len / w.kv_pages.size)
        order = draw.bits("page_table", w.batch * per_sequence).argsort()
        made["page_table"] = order.view(w.batch, per_sequence).to(device, torch.int32)
    return made


def _into_pages(dense: torch.Tensor, table: torch.Tensor, size: int) -> torch.Tensor:
    """Scatter (batch, kv_heads, kv_len, d) into a pool (pages, size, kv_heads, d) that the table reads back."""
    batch, heads, length, dim = dense.shape
    per_sequence = table.shape[1]
    padded = dense.new_zeros(batch, heads, per_sequence * size, dim)
    padded[:, :, :length] = dense
    pages = padded.view(batch, heads, per_sequence, size, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
    pool = dense.new_zeros(pages.shape)
    pool[table.flatten().long()] = pages
    return pool
