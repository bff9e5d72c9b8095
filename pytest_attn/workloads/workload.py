"""The workload: what one attention call is asked to compute, without saying who computes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_attn.workloads.dtypes import DTYPES, QUANTIZED_DTYPES, dtype_name, element_bytes, short_dtype
from pytest_attn.workloads.fields import (
    as_tuple,
    is_whole,
    require_bias,
    require_count,
    require_dropout,
    require_flag,
    require_one_of,
    require_positive_or_none,
    settled_quantization,
    settled_sinks,
    short_lengths,
    suggests_fields,
)
from pytest_attn.workloads.functions import function_label, printable, require_parameters
from pytest_attn.workloads.masks import Band, Mask, ScoreMod, Sequences, as_mask, mask_kinds, visible_pairs
from pytest_attn.workloads.pages import Pages

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

Direction: TypeAlias = Literal["forward", "backward"]

#: in which a callable may take and return tensors: torch's, flash-attention's, and that of packed sequences
LAYOUTS = ("bhsd", "bshd", "thd")
#: query head h uses key head h // group, as most models have it, or h % kv_heads
HEAD_GROUPS = ("contiguous", "interleaved")


@suggests_fields
@dataclass(frozen=True)
class Workload:
    """One attention problem: out = softmax(score) @ v, with score_ij = mods(scale * q_i . k_j) where the mask lets j be seen.

    The order of the score's steps is fixed: scale, softcap, bias, ALiBi, score_mod, mask. Softcap is cap * tanh(score / cap).
    ALiBi is -slope_h * |i + kv_len - q_len - j| with slope_h = 2 ** (-8 (h + 1) / heads). A sink is one more logit per head
    in the softmax's denominator, without a value. lse is the natural logarithm of that denominator.
    `bias_before_softcap` puts the bias before the softcap. `alibi="batch"` has slopes (batch, heads), `sinks="float32"` and
    `bias_dtype="float32"` have sinks and a bias of that dtype, whatever the workload's. `sinks=0.0` is one more key of score
    0 and value 0, as of add_zero_attn.

    Shapes (layout "bhsd"): q (batch, heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim),
    v (batch, kv_heads, kv_len, v_head_dim), out (batch, heads, q_len, v_head_dim), lse (batch, heads, q_len).
    Query head h uses key head h // (heads // kv_heads), with head_groups="interleaved" h % kv_heads.

    Args:
        q_len: queries of the longest sequence.
        kv_len: keys of the longest sequence; by default q_len.
        batch: sequences; by default 1, or as many as there are lengths.
        heads: query heads.
        kv_heads: key heads, a divisor of heads (GQA); by default heads.
        head_dim: of q and k.
        v_head_dim: of v and out; by default head_dim.
        dtype: "bfloat16", "float16" or "float32", of q, k, v and out; "float8_e4m3fn" of q, k and v, with out in bfloat16.
        mask: None, "causal" (query i sees keys 0 to i), "causal-bottom-right", a mask object, or mask_mod(b, h, q_idx, kv_idx)
            as FlexAttention's.
        softcap: cap of the scores, > 0.
        scale: factor on q . k; by default 1 / sqrt(head_dim).
        bias: the dimensions over which an additive bias varies, letters of "bhqk" in this order; the others are 1: "hqk" is
            (1, heads, q_len, kv_len).
        alibi: whether ALiBi is added: True with slopes (heads,), "batch" with slopes (batch, heads).
        sinks: whether each head has a sink: True in the workload's dtype, or the dtype of the sinks; a number is that of all.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) as FlexAttention's.
        q_lens: packs sequences of these lengths end to end ("thd": q (sum(q_lens), heads, head_dim)).
        kv_lens: keys of each sequence; those beyond are padding.
        kv_pages: `Pages`: k and v lie in pools (pages, page size, kv_heads, head_dim) behind a page table.
        cached: how many keys of each sequence are already in a cache; the others are new, one for each query.
        pad: the side on which keys are padded, "right" or "left".
        kv_dtype: "float8_e4m3fn" or "int8", of k and v alone.
        descales: what shares one descale in quantized tensors: "tensor", "head" or "token".
        v_in_k: v is k[..., :v_head_dim], in the same memory (MLA).
        name: its name in reports and ids.
        head_groups: "contiguous": query head h uses key head h // (heads // kv_heads); "interleaved": h % kv_heads.
        bias_before_softcap: whether the bias is added before the softcap, not after.
        dropout: the probability with which each softmax weight is dropped; the others are divided by 1 - dropout.
        bias_dtype: of the bias; by default that of out.

    Raises:
        ValueError: a field does not fit; the text names it, what was found and what was expected.
        TypeError: there is no such field.
    """

    q_len: int = None  # type: ignore[assignment]
    kv_len: int = None  # type: ignore[assignment]
    batch: int = None  # type: ignore[assignment]
    heads: int = 1
    kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = 64
    v_head_dim: int = None  # type: ignore[assignment]
    dtype: str = "bfloat16"
    mask: Any = None
    softcap: float | None = None
    scale: float | None = None
    bias: str | None = None
    alibi: bool | str = False
    sinks: bool | str | float = False
    score_mod: ScoreMod | None = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    kv_pages: Pages | None = None
    cached: Any = None
    pad: str = "right"
    kv_dtype: str | None = None
    descales: str | None = None
    v_in_k: bool = False
    name: str | None = None
    head_groups: str = "contiguous"
    bias_before_softcap: bool = False
    dropout: float = 0.0
    bias_dtype: str | None = None

    def __post_init__(self) -> None:
        self._settle_lengths()
        self._settle("kv_heads", self.heads)
        self._settle("v_head_dim", self.head_dim)
        for field in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim"):
            require_count(field, getattr(self, field))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Workload: heads must be a multiple of kv_heads, got heads={self.heads} and kv_heads={self.kv_heads}"
            )
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "mask", as_mask(self.mask))
        kv_dtype, descales = settled_quantization(self.dtype, self.kv_dtype, self.descales)
        object.__setattr__(self, "kv_dtype", kv_dtype)
        object.__setattr__(self, "descales", descales)
        require_one_of("alibi", self.alibi, (False, True, "batch"))
        object.__setattr__(self, "sinks", settled_sinks(self.sinks))
        require_one_of("head_groups", self.head_groups, HEAD_GROUPS)
        for field in ("bias_before_softcap", "v_in_k"):
            require_flag(field, getattr(self, field))
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise ValueError(f"Workload: name must be text, got {self.name!r}")
        object.__setattr__(self, "name", self.name and printable(self.name))
        _settle_pages(self)
        _check_padding(self)
        require_dropout(self.dropout, self.is_packed)
        self._check_score()
        self._check_mask()

    # Five lengths may be left out: they are declared without None, as they have a number once the object exists.
    def _settle(self, field: str, value: object) -> None:
        if getattr(self, field) is None:
            object.__setattr__(self, field, value)

    def _settle_lengths(self) -> None:
        for field in ("q_lens", "kv_lens"):
            lengths = getattr(self, field)
            if lengths is None:
                continue
            lengths = as_tuple(f"Workload: {field}", lengths)
            if not lengths or min(lengths) < 0 or max(lengths) == 0:
                raise ValueError(f"Workload: {field} must be whole numbers >= 0, not all zero, got {lengths!r}")
            object.__setattr__(self, field, lengths)
        if self.cached is not None:
            self._settle_cached()
        if self.q_lens is not None:
            self._settle("kv_lens", self.q_lens)
            self._settle("q_len", max(self.q_lens))
        if self.kv_lens is not None:
            self._settle("batch", len(self.kv_lens))
            self._settle("kv_len", max(self.kv_lens))
        if self.q_len is None:
            raise ValueError("Workload: q_len is missing; say Workload(q_len=...)")
        self._settle("kv_len", self.q_len)
        self._settle("batch", 1)
        if self.kv_pages is not None:
            self._settle("kv_lens", (self.kv_len,) * self.batch)
        for field, longest in (("q_lens", self.q_len), ("kv_lens", self.kv_len)):
            lengths = getattr(self, field)
            if lengths is None:
                continue
            if len(lengths) != self.batch:
                raise ValueError(f"Workload: {field} must have one length per batch entry ({self.batch}), got {lengths!r}")
            if max(lengths) > longest:
                raise ValueError(f"Workload: {field} must not exceed {longest}, got {lengths!r}")

    def _settle_cached(self) -> None:
        """Turn `cached` into one number per batch entry, and let kv_lens follow: new keys are as many as queries."""
        prefixes = _prefixes(self)
        object.__setattr__(self, "cached", prefixes)
        if self.q_lens is None and self.q_len is None:
            return
        new = self.q_lens or (self.q_len,) * len(prefixes)
        needed = tuple(old + more for old, more in zip(prefixes, new, strict=True))
        found = self.kv_lens or (needed if self.kv_len is None else (self.kv_len,) * len(prefixes))
        if found != needed:
            raise ValueError(
                f"Workload: cached={prefixes} with as many new keys as queries makes kv_lens {needed}, got {found};"
                " leave out kv_len and kv_lens"
            )
        if self.q_lens is not None or self.kv_pages is not None or len(set(needed)) > 1:
            self._settle("kv_lens", needed)
        else:
            self._settle("kv_len", needed[0])
        self._settle("batch", len(prefixes))

    def _check_score(self) -> None:
        for field in ("softcap", "scale"):
            require_positive_or_none(field, getattr(self, field))
        if self.bias is not None:
            require_bias(self.bias)
        if self.bias_dtype is not None:
            require_one_of("bias_dtype", self.bias_dtype, tuple(DTYPES))
            if self.bias is None:
                raise ValueError(f"Workload: bias_dtype={self.bias_dtype!r} needs a bias")
        if self.bias_before_softcap and (self.bias is None or self.softcap is None):
            raise ValueError("Workload: bias_before_softcap needs a bias and a softcap")
        if self.score_mod is not None:
            if not callable(self.score_mod):
                raise ValueError(f"Workload: score_mod must be a function, got {self.score_mod!r}")
            require_parameters("score_mod", self.score_mod, ("score", "b", "h", "q_idx", "kv_idx"))

    def _check_mask(self) -> None:
        mask = self.plain_mask
        if mask is not None:
            mask.require_lengths(self.q_len, self.kv_len)
        if self.is_packed and (self.bias or not (mask is None or mask.is_packable)):
            unpacked = ", ".join(kind.__name__ for kind in mask_kinds() if not kind.is_packable)
            raise ValueError(f"Workload: q_lens (packed sequences) cannot be combined with {unpacked} or bias")
        if self.is_packed and self.descales == "token":
            raise ValueError('Workload: q_lens (packed sequences) take descales per "tensor" or "head", not per "token"')
        if self.v_in_k and self.v_head_dim > self.head_dim:
            raise ValueError(f"Workload: v_in_k needs v_head_dim <= head_dim, got {self.v_head_dim} and {self.head_dim}")

    # -- what the fields mean once settled ---------------------------------------------------------------------------

    @cached_property
    def group(self) -> int:
        """The number of query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def fixed_sink(self) -> float | None:
        """The number that all sinks are, None where they are drawn, or there are none."""
        return None if isinstance(self.sinks, bool) or self.sinks in DTYPES else float(self.sinks)

    @property
    def sinks_dtype(self) -> str:
        """The dtype of the sinks."""
        return str(self.sinks) if self.sinks in DTYPES else self.out_dtype

    @cached_property
    def is_packed(self) -> bool:
        """True where queries lie end to end in one "thd" tensor."""
        return self.q_lens is not None

    @property
    def packs_keys(self) -> bool:
        """True where keys lie end to end, too: those of packed queries do, unless they are in pages."""
        return self.is_packed and self.kv_pages is None

    @property
    def is_quantized(self) -> bool:
        """True where k and v, and q where its dtype is fp8, are to be multiplied by descales."""
        return self.descales is not None

    @cached_property
    def out_dtype(self) -> str:
        """The dtype of out, dout, bias and sinks, and of what fault-free kernels round in between: bfloat16 where q is fp8."""
        return "bfloat16" if self.dtype in QUANTIZED_DTYPES else self.dtype

    @property
    def has_no_gradient_because(self) -> str | None:
        """The reason why no kernel has a backward pass for it, or None."""
        if self.kv_pages is not None:
            return "a paged KV cache has no gradient"
        if self.cached is not None:
            return "cached keys have no gradient"
        if self.pad == "left":
            return "keys padded on the left have no gradient"
        if self.is_quantized:
            return "quantized q, k and v have no gradient"
        return "v is a part of k, so only their combined gradient is meaningful" if self.v_in_k else None

    @property
    def softmax_scale(self) -> float:
        """The factor on q . k: `scale`, or 1 / sqrt(head_dim)."""
        return self.scale if self.scale is not None else 1 / math.sqrt(self.head_dim)

    @property
    def plain_mask(self) -> Mask | None:
        """The mask, typed."""
        mask: Mask | None = self.mask
        return mask

    @property
    def band(self) -> Band | None:
        """The mask as a band, open on both sides where there is no mask; None for a mask of another form."""
        return Band(None, None, top_left=False) if self.plain_mask is None else self.plain_mask.band

    @property
    def documents(self) -> tuple[int, ...]:
        """The lengths of the documents in each sequence; empty where the mask knows none."""
        return () if self.plain_mask is None else self.plain_mask.documents

    @property
    def has_positional_mask(self) -> bool:
        """True where what is seen depends on positions alone, not on the batch entry and the head: so it is without a mask."""
        return self.plain_mask is None or self.plain_mask.is_positional

    def replace(self, **changes: object) -> Self:
        """Return a copy with other fields; fields that were equal to a changed one follow it.

        Args:
            changes: fields with their new values.

        Returns:
            The copy. It loses its name, unless a name is given or only the dtype changes.

        Raises:
            ValueError: a field does not fit.
            TypeError: there is no such field.
        """
        for leader, follower in (("heads", "kv_heads"), ("q_len", "kv_len"), ("head_dim", "v_head_dim")):
            if leader in changes and getattr(self, leader) == getattr(self, follower):
                changes.setdefault(follower, None)
        bias, softcap = changes.get("bias", self.bias), changes.get("softcap", self.softcap)
        is_meaningless = {
            "cached": LENGTHS & set(changes),
            "pad": {"kv_lens", "q_lens", "kv_pages"} & set(changes),
            "bias_before_softcap": not (bias and softcap),
            "bias_dtype": not bias,
        }
        for field, default in ((field, getattr(Workload, field)) for field, is_so in is_meaningless.items() if is_so):
            if getattr(self, field) != default:
                changes.setdefault(field, default)
        if "name" not in changes and set(changes) - {"dtype"}:
            changes["name"] = None
        return dataclasses.replace(self, **changes, **self._requantized(changes))  # type: ignore[arg-type]

    def _requantized(self, changes: dict[str, object]) -> dict[str, None]:
        """Return the fields of quantization that another dtype leaves without meaning."""
        dtype = changes.get("dtype")
        if dtype is not None and dtype_name(dtype) in QUANTIZED_DTYPES:
            lost = "kv_dtype"
        elif changes.get("kv_dtype", self.kv_dtype) is None and {"dtype", "kv_dtype"} & set(changes):
            lost = "descales"
        else:
            return {}
        return {} if lost in changes else {lost: None}

    @cached_property
    def id(self) -> str:
        """A short id that shows every field that differs from its default; a name stands for all but the dtype."""
        dtype = [] if self.dtype == "bfloat16" else [short_dtype(self.dtype)]
        return "-".join([self.name or self.shape_id, *dtype])

    @property
    def __name__(self) -> str:
        """The id, of which pytest makes that of a test."""
        return self.id

    @cached_property
    def shape_id(self) -> str:
        """The id without name and dtype."""
        return _shape_id(self)

    def pairs(self) -> int:
        """Count the visible (query, key) pairs of one head over the batch; function masks count as full rectangles."""
        counted: dict[tuple[int, int], int] = {}
        total = 0
        for pair in sequence_lengths(self):
            if pair not in counted:
                counted[pair] = visible_pairs(self.plain_mask, *pair)
            total += counted[pair]
        return total

    def flops(self, direction: Direction = "forward") -> int:
        """Count floating-point operations of the matrix products over visible pairs; softmax is not counted.

        Forward: q k^T and P v, 2 (d + d_v) per pair. Backward: q k^T again, dO v^T, P^T dO, dS k, dS^T q, so
        2 (3 d + 2 d_v) per pair. (flash-attention counts the same way: 4 S^2 d and 2.5 times as much.)
        """
        d, dv = self.head_dim, self.v_head_dim
        per_pair = {"forward": 2 * (d + dv), "backward": 2 * (3 * d + 2 * dv)}[direction]
        return per_pair * self.pairs() * self.heads

    def bytes(self, direction: Direction = "forward") -> int:
        """Count the bytes of the tensors that must be read and written once: q, k, v, out, lse; backward also gradients."""
        width, of_keys, of_out = (element_bytes(name) for name in (self.dtype, self.kv_dtype or self.dtype, self.out_dtype))
        rows = sum(self.q_lens) if self.q_lens else self.batch * self.q_len
        keys = sum(self.kv_lens) if self.kv_lens else self.batch * self.kv_len
        q, out = rows * self.heads * self.head_dim * width, rows * self.heads * self.v_head_dim * of_out
        kv = keys * self.kv_heads * (self.head_dim + (0 if self.v_in_k else self.v_head_dim)) * of_keys
        lse = 4 * rows * self.heads
        if direction == "forward":
            return q + kv + out + lse
        return 2 * (q + kv) + 2 * out + lse


def sequence_lengths(w: Workload) -> list[tuple[int, int]]:
    """Return (q_len, kv_len) of each batch entry."""
    q_lens = w.q_lens or (w.q_len,) * w.batch
    kv_lens = w.kv_lens or (w.kv_len,) * w.batch
    return list(zip(q_lens, kv_lens, strict=True))


def sequences_of(w: Workload, device: torch.device) -> Sequences:
    """Return what the workload's mask is laid over, each sequence with its own lengths."""
    import torch

    lengths = sequence_lengths(w)
    q_lens, kv_lens = torch.tensor(lengths, device=device).unbind(1)
    return Sequences(w.batch, w.heads, w.q_len, w.kv_len, device, q_lens, kv_lens, tuple(lengths), tuple(key_heads(w)))


# -- which key head a query head uses -----------------------------------------------------------------------------------------


def key_heads(w: Workload) -> list[int]:
    """Return the key head of every query head of a Workload."""
    if w.head_groups == "interleaved":
        return [h % w.kv_heads for h in range(w.heads)]
    return [h // w.group for h in range(w.heads)]


def grouped_order(w: Workload) -> list[int]:
    """Return the query heads in an order in which those of one key head follow each other."""
    of_key = key_heads(w)
    return sorted(range(w.heads), key=lambda h: of_key[h])


def is_interleaved(w: Workload) -> bool:
    """Return whether query heads of one key head are not next to each other."""
    return w.head_groups == "interleaved" and 1 < w.kv_heads < w.heads


def grouped(tensor: torch.Tensor, w: Workload, dim: int = 1) -> torch.Tensor:
    """Return a tensor of query heads with those of one key head next to each other."""
    return tensor[(slice(None),) * dim + (grouped_order(w),)] if is_interleaved(w) else tensor


def ungrouped(tensor: torch.Tensor, w: Workload, dim: int = 1) -> torch.Tensor:
    """Undo `grouped`."""
    if not is_interleaved(w):
        return tensor
    order = grouped_order(w)
    return tensor[(slice(None),) * dim + (sorted(range(w.heads), key=lambda at: order[at]),)]


def repeated(tensor: torch.Tensor, w: Workload, dim: int = 1) -> torch.Tensor:
    """Return k or v with a key head of its own for every query head."""
    if w.group == 1:
        return tensor
    if w.head_groups == "contiguous":  # whose gradient is rounded once, and not with each head, as that of an index is
        return tensor.repeat_interleave(w.group, dim)
    return tensor.repeat([w.group if at == dim else 1 for at in range(tensor.dim())])


# -- as serving has it: pages, a cached prefix, padding on the left -----------------------------------------------------------

#: on which side of the keys of a padded batch entry its padding is
SIDES = ("right", "left")
#: fields whose change leaves no meaning to `cached`
LENGTHS = frozenset(("q_len", "kv_len", "batch", "q_lens", "kv_lens"))


def _prefixes(w: Workload) -> tuple[int, ...]:
    """Return `cached` as one number per batch entry. Raises ValueError where there are others."""
    prefixes = as_tuple("Workload: cached", [w.cached] if is_whole(w.cached) else w.cached)
    if not prefixes or min(prefixes) < 0:
        raise ValueError(f"Workload: cached must be numbers of keys >= 0, got {w.cached!r}")
    lengths = w.q_lens or w.kv_lens
    batch = len(lengths) if lengths else w.batch or len(prefixes)
    prefixes = prefixes * batch if len(prefixes) == 1 else prefixes
    if len(prefixes) != batch:
        raise ValueError(f"Workload: cached must be one number, or one per batch entry ({batch}), got {w.cached!r}")
    return prefixes


def _settle_pages(w: Workload) -> None:
    """Turn the kv_pages of a Workload into `Pages`. Raises ValueError for others, and where they do not fit the workload."""
    pages = Pages(w.kv_pages) if is_whole(w.kv_pages) else w.kv_pages
    if pages is None:
        return
    if not isinstance(pages, Pages):
        raise ValueError(f"Workload: kv_pages must be Pages(size) or a number of tokens, got {pages!r}")
    object.__setattr__(w, "kv_pages", pages)
    if pages.fused and w.head_dim != w.v_head_dim:
        raise ValueError(
            f"Workload: Pages(fused=True) needs v_head_dim equal to head_dim, got {w.v_head_dim} and {w.head_dim}"
        )
    if pages.fused and w.v_in_k:
        raise ValueError("Workload: Pages(fused=True) holds k and v side by side; v_in_k has v inside k")
    if pages.shared:
        _check_shared(w, pages)
    if pages.pool is not None and pages.pool < (in_use := pages_in_use(w)):
        raise ValueError(f"Workload: Pages(pool={pages.pool}) holds fewer pages than the {in_use} of the page table")


def _check_shared(w: Workload, pages: Pages) -> None:
    """Raise ValueError where sequences are shorter than the pages that they share, or those have descales of their own."""
    own, needed = min(*(w.cached or ()), *(w.kv_lens or ())), pages.shared * pages.size
    if own < needed:
        raise ValueError(
            f"Workload: Pages({pages.size}, shared={pages.shared}) needs {needed} old keys or more in each sequence, got {own}"
        )
    if w.descales not in (None, "tensor"):
        raise ValueError(f'Workload: Pages(shared=...) takes descales per "tensor" only, not per "{w.descales}"')


def pages_in_use(w: Workload) -> int:
    """Return how many pages the page table names."""
    assert w.kv_pages is not None
    of_longest = math.ceil(w.kv_len / w.kv_pages.size)  # a row of the table
    return w.batch * (of_longest - w.kv_pages.shared) + w.kv_pages.shared


def _check_padding(w: Workload) -> None:
    """Raise ValueError where a Workload's `pad` is not a side, or there is nothing dense to pad."""
    if w.pad not in SIDES:
        raise ValueError(f"Workload: pad must be one of {', '.join(SIDES)}, got {w.pad!r}")
    if w.pad == "left" and (w.kv_lens is None or w.q_lens is not None or w.kv_pages is not None):
        raise ValueError('Workload: pad="left" needs kv_lens, or unequal numbers of cached keys, without q_lens and kv_pages')
    if w.pad == "left" and "k" in (w.bias or ""):
        raise ValueError('Workload: pad="left" cannot be combined with a bias that varies over keys')
    if w.descales is not None and w.pad == "left":
        raise ValueError('Workload: pad="left" cannot be combined with quantized k and v (dtype, kv_dtype)')


# -- its id: every field that differs from its default, in a fixed order ------------------------------------------------------


#: how the id shows a field that a workload has, in the order of the id
_SHOWN: dict[str, Callable[[Any], str]] = {
    "mask": lambda w: w.mask.label,
    "softcap": lambda w: f"softcap{w.softcap:g}",
    "scale": lambda w: f"scale{w.scale:g}",
    "bias": lambda w: f"bias.{w.bias}.{w.bias_dtype}" if w.bias_dtype else f"bias.{w.bias}",
    "bias_before_softcap": lambda w: "biasfirst",
    "alibi": lambda w: "alibi.b" if w.alibi == "batch" else "alibi",
    "sinks": lambda w: (
        "sinks" if w.sinks is True else f"sinks.{w.sinks}" if w.fixed_sink is None else f"sinks{w.fixed_sink:g}"
    ),
    "dropout": lambda w: f"dropout{w.dropout:g}",
    "score_mod": lambda w: f"mod.{function_label(w.score_mod)}",
    "kv_pages": lambda w: w.kv_pages.label,
    "cached": lambda w: f"cached{short_lengths(w.cached if len(set(w.cached)) > 1 else w.cached[:1])}",
    "kv_dtype": lambda w: f"kv{short_dtype(w.kv_dtype)}",
    "descales": lambda w: "" if w.descales == "tensor" else f"descale.{w.descales}",
    "v_in_k": lambda w: "vink",
}


def _shape_id(w: Workload) -> str:
    """Return the id of a workload without name and dtype."""
    parts = [
        f"b{w.batch}" if w.batch != 1 and not w.is_packed else "",
        f"h{w.heads}" if w.heads != 1 else "",
        f"kv{w.kv_heads}" if w.kv_heads != w.heads else "",
        "interleaved" if w.head_groups == "interleaved" else "",
        _lengths(w),
        f"d{w.head_dim}",
        f"dv{w.v_head_dim}" if w.v_head_dim != w.head_dim else "",
        *(show(w) for field, show in _SHOWN.items() if getattr(w, field)),
    ]
    return printable("-".join(filter(None, parts)), 0)


def _lengths(w: Workload) -> str:
    if w.q_lens is not None and w.kv_lens is not None:
        packed = f"packed{short_lengths(w.q_lens)}"
        return packed if w.kv_lens == w.q_lens else f"{packed}-k{short_lengths(w.kv_lens)}"
    shape = f"s{w.q_len}" if w.q_len == w.kv_len else f"q{w.q_len}-k{w.kv_len}"
    if w.kv_lens is None or (set(w.kv_lens) == {w.kv_len} and w.pad == "right"):
        return shape
    return f"{shape}-{'left' if w.pad == 'left' else ''}pad{short_lengths(w.kv_lens)}"
