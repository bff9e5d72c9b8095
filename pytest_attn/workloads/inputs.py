"""The tensors of a workload: seeded, the same for every backend, process, device and torch version."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.workloads.distributions import Draw, distribution_names, draw_qkv
from pytest_attn.workloads.dtypes import QUANTIZED_DTYPES
from pytest_attn.workloads.masks import MaskMod, Sequences
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload, pages_in_use

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Descales(NamedTuple):
    """Factors that give q, k and v their values: float32 tensors, None for a tensor in its own values.

    Per tensor (); per head (batch, kv_heads), that of q too; per token (batch, heads, q_len) and (batch, kv_heads, kv_len).
    If the workload has kv_pages, those of k and v per token lie in pools (pages, page size, kv_heads).
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor

    def to(self, device: torch.device) -> Descales:
        """Return them on another device."""
        return Descales(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]

    def clone(self) -> Descales:
        """Return copies."""
        return Descales(*(None if t is None else t.clone() for t in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Inputs:
    """The tensors of one workload, in its native layout ("bhsd", or "thd" where packed).

    Args:
        workload: what is asked.
        device: where the tensors are.
        q: queries, of the workload's dtype.
        k: keys in the same layout, or of its kv_dtype; a page pool where the workload has kv_pages.
        v: values in the same layout; a view of k where the workload has v_in_k.
        dout: the gradient of out, of the dtype of out.
        bias: broadcasts to (batch, heads, q_len, kv_len), of the dtype of out, or of its own.
        sinks: (heads,), of the dtype of out, or of their own.
        alibi_slopes: (heads,) float32, or (batch, heads) with alibi="batch".
        cu_seqlens: (batch + 1,) int32, of the queries, where packed.
        cu_seqlens_kv: (batch + 1,) int32, of the keys, where these are packed.
        kv_lens: (batch,) int32, where padded or paged.
        page_table: (batch, pages per sequence) int32, where paged.
        keep: what dropout leaves, boolean (batch, heads, q_len, kv_len), once a kernel has said it.
        descales: what q, k and v are still to be multiplied by.
        applied: what they have been multiplied by already.
        bias_of: makes the bias of q, where a kernel does; then a gradient of q goes through it.
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
    bias_of: Callable[[torch.Tensor], torch.Tensor] | None = None

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
    extra = {**_score_tensors(draw, w), **_layout_tensors(draw, w, device)}
    if w.kv_pages:
        k, v = (pool_of(t, extra["page_table"], w, draw, name) for name, t in (("k", k), ("v", v)))
    if w.is_packed:
        q, dout = (t[0].transpose(0, 1).contiguous() for t in (q, dout))
    if w.packs_keys:
        k, v = (t[0].transpose(0, 1).contiguous() for t in (k, v))
    inputs = Inputs(w, device, q, k, v, dout, **extra)
    inputs = _quantized(inputs) if w.is_quantized else inputs
    return dataclasses.replace(inputs, v=inputs.k[..., : w.v_head_dim]) if w.v_in_k else inputs


def _score_tensors(draw: Draw, w: Workload) -> dict[str, Any]:
    """Return the tensors that change scores and the softmax: the bias, sinks, ALiBi's slopes."""
    import torch

    made: dict[str, Any] = {}
    if w.bias:
        sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
        own = Draw(draw.key, getattr(torch, w.bias_dtype), draw.device) if w.bias_dtype else draw
        made["bias"] = own.normal("bias", tuple(sizes[d] if d in w.bias else 1 for d in "bhqk"))
    if w.sinks:
        own = Draw(draw.key, getattr(torch, w.sinks_dtype), draw.device)
        made["sinks"] = own.normal("sinks", (w.heads,)) + math.log(w.kv_len + 1)  # as heavy as all keys of a flat row
        if w.fixed_sink is not None:
            made["sinks"] = torch.full_like(made["sinks"], w.fixed_sink)
    if w.alibi:
        made["alibi_slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / w.heads) for h in range(w.heads)], device=draw.device)
    if w.alibi == "batch":
        steps = torch.tensor([2.0 ** (-b / w.batch) for b in range(w.batch)], device=draw.device)
        made["alibi_slopes"] = made["alibi_slopes"] * steps[:, None]
    return made


def _layout_tensors(draw: Draw, w: Workload, device: torch.device) -> dict[str, Any]:
    """Return the tensors that say where keys lie: lengths of packed and padded sequences, and the page table; int32."""
    import torch

    made: dict[str, Any] = {}
    for name, lengths in (("cu_seqlens", w.q_lens), ("cu_seqlens_kv", w.kv_lens if w.packs_keys else None)):
        if lengths:
            ends = torch.tensor((0, *lengths)).cumsum(0)
            made[name] = ends.to(device, torch.int32)
    if w.kv_lens and not w.packs_keys:
        made["kv_lens"] = torch.tensor(w.kv_lens, dtype=torch.int32, device=device)
    if w.kv_pages:
        order = draw.bits("page_table", w.kv_pages.pool or pages_in_use(w)).argsort()[: pages_in_use(w)]
        common, others = order[: w.kv_pages.shared], order[w.kv_pages.shared :].view(w.batch, -1)
        made["page_table"] = torch.cat([common.expand(w.batch, -1), others], 1).to(device, torch.int32)
    return made


# -- quantized q, k and v: the descales that they come with, and the values that they stand for ------------------------------

# The values of a tensor are its elements times its descale. Descales are small numbers whose products with every element are
# exact in bfloat16: so a kernel that dequantizes first rounds no more than one that multiplies scores and sums by descales.
# They do not depend on the distribution of the inputs, because a callable closes over them.

#: descales of e4m3, which has 4 significant bits, have 4 more, so that the 8 of bfloat16 hold the product
_EIGHTHS, _EXPONENTS = (9, 13, 11, 15, 10), (0, -2, 1, -1)
#: descales of int8 are powers of two: 2 ** -5, 2 ** -3, 2 ** -4
_INT8_EXPONENTS = (-5, -3, -4)
#: where q, k and v begin in the sequences above, so that no two of them have equal descales
_FIRST = {"q": 0, "k": 6, "v": 13}


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


def dtype_of(name: str, w: Workload) -> str:
    """Return the dtype of q, k or v."""
    return w.dtype if name == "q" else w.kv_dtype or w.dtype


def dense_descales(w: Workload, device: torch.device) -> Descales:
    """Return the descales of a workload, those per token as of dense keys."""
    per_head = (w.batch, w.kv_heads)
    of_q, of_keys = {
        "tensor": ((), ()),
        "head": (per_head, per_head),
        "token": ((w.batch, w.heads, w.q_len), (*per_head, w.kv_len)),
    }[w.descales or "tensor"]
    q = _values("q", w, of_q, device) if dtype_of("q", w) in QUANTIZED_DTYPES else None
    k, v = (_values(name, w, of_keys, device) for name in "kv")
    return Descales(q, k, k if w.v_in_k else v)


def _values(name: str, w: Workload, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return descales of which neighbors differ by more than rounding hides."""
    import torch

    number = torch.arange(math.prod(shape), dtype=torch.int64) + _FIRST[name]
    if dtype_of(name, w) == "int8":
        values = torch.tensor(_INT8_EXPONENTS)[number % len(_INT8_EXPONENTS)].float().exp2()
    else:
        values = torch.tensor(_EIGHTHS)[number % len(_EIGHTHS)] / 8
        values = values * torch.tensor(_EXPONENTS)[number % len(_EXPONENTS)].float().exp2()
    return values.view(shape).to(device)


def quantized(tensor: torch.Tensor, factors: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the elements whose products with `factors` are nearest to the tensor, as far as the dtype reaches."""
    import torch

    to = QUANTIZED_DTYPES[dtype]
    scaled = (tensor.float() / factors.where(factors != 0, 1)).clamp(-to.largest, to.largest)
    return (scaled.round() if to.is_whole else scaled).to(getattr(torch, dtype))


def dequantized(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the values that elements stand for, exactly: in float64, in float32 on a device without it."""
    import torch

    exact = torch.float32 if tensor.device.type == "mps" else torch.float64
    return tensor.to(exact) * factors.to(exact)


def factors_of(name: str, descales: Descales, w: Workload, page_table: torch.Tensor | None) -> torch.Tensor:
    """Return what q, k or v is multiplied by, broadcastable to it in its native layout."""
    factors: torch.Tensor | None = getattr(descales, name)
    assert factors is not None
    if factors.dim() == 0:
        return factors
    if factors.dim() == 3:  # per token, with the dimensions of the tensor itself
        return factors.unsqueeze(-1)
    if name == "q":
        factors = factors.repeat_interleave(w.group, 1)
    if page_table is not None and name != "q":
        # each page has the factors of the batch entry that reads it: (pages, 1, kv_heads, 1), 0 for a page that none reads
        pool = w.kv_pages.pool if w.kv_pages else None
        of_pages = factors.new_zeros(pool or page_table.numel(), factors.shape[1])
        of_pages[page_table.flatten().long()] = factors.repeat_interleave(page_table.shape[1], 0)
        return of_pages[:, None, :, None]
    lengths = w.q_lens if name == "q" else w.kv_lens
    if w.is_packed and lengths is not None:
        return factors.repeat_interleave(factors.new_tensor(lengths).long(), 0).unsqueeze(-1)
    return factors[:, :, None, None]


# -- keys and values in a pool of pages ---------------------------------------------------------------------------------------


def pool_of(drawn: torch.Tensor, table: torch.Tensor, w: Workload, draw: Draw, name: str) -> torch.Tensor:
    """Scatter keys, (batch, kv_heads, kv_len, d), into a pool (pages, size, kv_heads, d) that the table reads back.

    Those of packed queries come end to end, (1, kv_heads, sum of kv_lens, d). What a page holds beyond kv_len is 0; other keys
    that no sequence has are noise, drawn as `name`.
    """
    assert w.kv_pages is not None
    dense = _side_by_side(drawn, w, draw, name) if w.is_packed else drawn
    pages = cut_into_pages(dense, table.shape[1], w.kv_pages.size)
    of_sequences = pages.view(*table.shape, *pages.shape[1:])
    of_sequences[:, : w.kv_pages.shared] = of_sequences[:1, : w.kv_pages.shared]
    pool = pages.new_empty((pages_in_use(w), *pages.shape[1:]))
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
    """Ends of each sequence's pages in a list of all pages, that list, and the tokens of each last page; int32 each.

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
