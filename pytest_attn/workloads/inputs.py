"""The tensors of a workload: seeded, the same for every backend, process, device and torch version."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.workloads.distributions import Draw, distribution_names, draw_qkv
from pytest_attn.workloads.masks import MaskMod, Sequences
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.quantization import Descales, dense_descales, dequantized, dtype_of, factors_of, quantized
from pytest_attn.workloads.workload import Workload, pages_in_use, pages_per_sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Inputs:
    """What a kernel is given for one workload, in its native layout ("bhsd", or "thd" where packed).

    Args:
        workload: what is asked.
        device: where the tensors are.
        q: queries, of the workload's dtype.
        k: keys in the same layout, or of its kv_dtype; a page pool where the workload has kv_pages.
        v: values in the same layout; a view of k where the workload has v_in_k.
        dout: the gradient of out, of the dtype of out.
        bias: broadcasts to (batch, heads, q_len, kv_len), of the dtype of out.
        sinks: (heads,), of the dtype of out, or of their own.
        alibi_slopes: (heads,) float32, or (batch, heads) with alibi="batch".
        cu_seqlens: (batch + 1,) int32, of the queries, where packed.
        cu_seqlens_kv: (batch + 1,) int32, of the keys, where these are packed.
        kv_lens: (batch,) int32, where padded or paged.
        page_table: (batch, pages per sequence) int32, where paged.
        keep: what dropout leaves, boolean (batch, heads, q_len, kv_len), once a kernel has said it.
        descales: what q, k and v are still to be multiplied by.
        applied: what they have been multiplied by already.
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
    keep: torch.Tensor | None = None
    descales: Descales | None = None
    applied: Descales | None = None

    def dequantized(self) -> Inputs:
        """Return the inputs with the values of q, k and v, exactly, and without descales; as they are where there are none."""
        if self.descales is None:
            return self
        values = {
            name: dequantized(getattr(self, name), factors_of(name, self.descales, self.workload, self.page_table))
            for name in "qkv"
            if getattr(self.descales, name) is not None
        }
        return dataclasses.replace(self, descales=None, applied=self.descales, **values)  # type: ignore[arg-type]

    def mask_mod(self, q_len: int | None = None) -> MaskMod | None:
        """Return the mask, with padding, as FlexAttention's mask_mod over dense tensors; None where all is visible.

        q_len: how many queries the sequence has of which it is asked, where packed queries have keys in pages.
        """
        w, q_len = self.workload, self.workload.q_len if q_len is None else q_len
        over = Sequences(w.batch, w.heads, q_len, w.kv_len, self.device, kv_lens=self.kv_lens)
        inner = None if w.plain_mask is None else w.plain_mask.bind(over)
        if self.kv_lens is None:
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
    workload: Workload,
    distribution: str = "structured",
    seed: int = 0,
    device: torch.device | str = "cpu",
    with_dout: bool = True,
) -> Inputs:
    """Draw the tensors of a workload: the same on every device and in every process.

    Args:
        workload: what is asked.
        distribution: a name of docs/reference/workloads.md.
        seed: of the generator.
        device: where the tensors are put.
        with_dout: False leaves dout out, where a long workload has no backward pass: zeros that take no memory.

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
    draw = Draw(f"{w.name or w.shape_id}/{seed}", getattr(torch, w.out_dtype), device)
    q, k, v = draw_qkv(distribution, draw, w, (*dense_q, w.head_dim), (*dense_k, w.head_dim), (*dense_k, w.v_head_dim))
    if w.v_in_k:
        v = k[..., : w.v_head_dim]
    of_out = (*dense_q, w.v_head_dim)
    dout = draw.normal("dout", of_out) if with_dout else q.new_zeros(()).expand(of_out)
    extra = _auxiliary(draw, w, device)
    if w.kv_pages:
        k, v = (pool_of(t, extra["page_table"], w, draw, name) for name, t in (("k", k), ("v", v)))
    if w.is_packed:
        q, dout = (t[0].transpose(0, 1).contiguous() for t in (q, dout))
    if w.packs_keys:
        k, v = (t[0].transpose(0, 1).contiguous() for t in (k, v))
    inputs = Inputs(w, device, q, k, v, dout, **extra)
    inputs = _quantized(inputs) if w.is_quantized else inputs
    return dataclasses.replace(inputs, v=inputs.k[..., : w.v_head_dim]) if w.v_in_k else inputs


def _quantized(inputs: Inputs) -> Inputs:
    """Return the same inputs as kernels of quantized tensors take them, with their descales."""
    w, table = inputs.workload, inputs.page_table
    descales = dense_descales(w, inputs.device)
    if w.descales == "token" and w.kv_pages and table is not None:
        k, v = (descales_in_pool(t, table, w.kv_pages) for t in (descales.k, descales.v))
        descales = descales._replace(k=k, v=k if w.v_in_k else v)
    elements = {
        name: quantized(getattr(inputs, name), factors_of(name, descales, w, table), dtype_of(name, w))
        for name in "qkv"
        if getattr(descales, name) is not None
    }
    return dataclasses.replace(inputs, descales=descales, **elements)  # type: ignore[arg-type]


def _auxiliary(draw: Draw, w: Workload, device: torch.device) -> dict[str, Any]:
    import torch

    made: dict[str, Any] = {}
    if w.bias:
        sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
        made["bias"] = draw.normal("bias", tuple(sizes[d] if d in w.bias else 1 for d in "bhqk"))
    if w.sinks:
        own = draw if w.sinks is True else Draw(draw.key, getattr(torch, str(w.sinks)), device)
        made["sinks"] = own.normal("sinks", (w.heads,)) + math.log(w.kv_len + 1)  # as heavy as all keys of a flat row
    if w.alibi:
        made["alibi_slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / w.heads) for h in range(w.heads)], device=device)
    if w.alibi == "batch":
        steps = torch.tensor([2.0 ** (-b / w.batch) for b in range(w.batch)], device=device)
        made["alibi_slopes"] = made["alibi_slopes"] * steps[:, None]
    for name, lengths in (("cu_seqlens", w.q_lens), ("cu_seqlens_kv", w.kv_lens if w.packs_keys else None)):
        if lengths:
            ends = torch.tensor((0, *lengths)).cumsum(0)
            made[name] = ends.to(device, torch.int32)
    if w.kv_lens and not w.packs_keys:
        made["kv_lens"] = torch.tensor(w.kv_lens, dtype=torch.int32, device=device)
    if w.kv_pages:
        order = draw.bits("page_table", w.kv_pages.pool or pages_in_use(w)).argsort()[: pages_in_use(w)]
        made["page_table"] = order.view(w.batch, pages_per_sequence(w)).to(device, torch.int32)
    return made


# -- keys and values in a pool of pages ---------------------------------------------------------------------------------------


def pool_of(drawn: torch.Tensor, table: torch.Tensor, w: Workload, draw: Draw, name: str) -> torch.Tensor:
    """Scatter keys, (batch, kv_heads, kv_len, d), into a pool (pages, size, kv_heads, d) that the table reads back.

    Those of packed queries come end to end, (1, kv_heads, sum of kv_lens, d). What a page holds beyond kv_len is 0; other keys
    that no sequence has are noise, drawn as `name`.
    """
    assert w.kv_pages is not None
    dense = _side_by_side(drawn, w, draw, name) if w.is_packed else drawn
    pages = cut_into_pages(dense, table.shape[1], w.kv_pages.size)
    pool = pages.new_empty(pages.shape)
    if w.kv_pages.pool:
        pool = draw.normal(f"{name} of nobody", (w.kv_pages.pool, *pages.shape[1:]))
    pool[table.flatten().long()] = pages
    return pool


def descales_in_pool(dense: torch.Tensor, table: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Scatter descales of keys, (batch, kv_heads, kv_len), into (pages, size, kv_heads); 0 for keys that no sequence has."""
    cut = cut_into_pages(dense.unsqueeze(-1), table.shape[1], pages.size).squeeze(-1)
    pool = cut.new_zeros(pages.pool or len(cut), *cut.shape[1:])
    pool[table.flatten().long()] = cut
    return pool


def cut_into_pages(dense: torch.Tensor, per_sequence: int, size: int) -> torch.Tensor:
    """Cut keys, (batch, kv_heads, kv_len, d), into pages (batch * per_sequence, size, kv_heads, d), with 0 beyond kv_len."""
    batch, heads, length, dim = dense.shape
    padded = dense.new_zeros(batch, heads, per_sequence * size, dim)
    padded[:, :, :length] = dense
    return padded.view(batch, heads, per_sequence, size, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)


def _side_by_side(packed: torch.Tensor, w: Workload, draw: Draw, name: str) -> torch.Tensor:
    """Take sequences apart: (batch, kv_heads, kv_len, d), with noise beyond the length of each."""
    dense = draw.normal(f"{name} beyond", (w.batch, w.kv_heads, w.kv_len, packed.shape[-1]))
    start = 0
    for batch, length in enumerate(w.kv_lens or ()):
        dense[batch, :, :length] = packed[0, :, start : start + length]
        start += length
    return dense


# -- the page table as lists, without padding: FlashInfer's and SGLang's form -------------------------------------------------


class PageLists(NamedTuple):
    """Where each sequence's pages end in a list of all pages, that list, and the tokens of each last page; int32 each.

    indptr: (batch + 1,). indices: (pages in use,). last_page_len: (batch,), 0 for a sequence without keys.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def page_lists(inputs: Inputs) -> PageLists:
    """Return the page table of paged inputs as lists."""
    import torch

    assert inputs.workload.kv_pages is not None
    assert inputs.kv_lens is not None
    assert inputs.page_table is not None
    size, lengths = inputs.workload.kv_pages.size, inputs.kv_lens
    pages = (lengths + size - 1) // size
    ends = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).to(torch.int32)
    is_used = torch.arange(inputs.page_table.shape[1], device=inputs.device) < pages[:, None]
    return PageLists(ends, inputs.page_table[is_used], lengths - (pages - 1).clamp(min=0) * size)
