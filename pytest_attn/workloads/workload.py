"""The workload: what one attention call is asked to compute, without saying who computes it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_attn.workloads.fields import (
    DTYPES,
    as_tuple,
    dtype_name,
    require_bias,
    require_count,
    require_flag,
    require_positive_or_none,
)
from pytest_attn.workloads.functions import require_parameters
from pytest_attn.workloads.labels import shape_id
from pytest_attn.workloads.masks import BooleanMask, Document, Mask, Neighborhood, ScoreMod, as_mask
from pytest_attn.workloads.nearest import suggests_fields
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.visibility import visible_pairs

if TYPE_CHECKING:
    from typing_extensions import Self

Direction: TypeAlias = Literal["forward", "backward"]

#: in which a callable may take and return tensors: torch's, flash-attention's, and that of packed sequences
LAYOUTS = ("bhsd", "bshd", "thd")


@suggests_fields
@dataclass(frozen=True)
class Workload:
    """One attention problem: out = softmax(score) @ v, with score_ij = mods(scale * q_i . k_j) where the mask lets j be seen.

    The order of the score's steps is fixed: scale, softcap (cap * tanh(score / cap)), bias, ALiBi
    (-slope_h * |i + kv_len - q_len - j|, slope_h = 2 ** (-8 (h + 1) / heads)), score_mod, mask; a sink is one more logit
    per head in the softmax's denominator, without a value. lse is the natural logarithm of that denominator.

    Shapes (layout "bhsd"): q (batch, heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim),
    v (batch, kv_heads, kv_len, v_head_dim), out (batch, heads, q_len, v_head_dim), lse (batch, heads, q_len).
    Query head h uses key head h // (heads // kv_heads).

    Args:
        q_len: queries of the longest sequence.
        kv_len: keys of the longest sequence; by default q_len.
        batch: sequences; by default 1, or as many as there are lengths.
        heads: query heads.
        kv_heads: key heads, a divisor of heads (GQA); by default heads.
        head_dim: of q and k.
        v_head_dim: of v and out; by default head_dim.
        dtype: "bfloat16", "float16" or "float32", of q, k, v and out.
        mask: None, "causal" (top-left), "causal-bottom-right", a mask object, or mask_mod(b, h, q_idx, kv_idx) as
            FlexAttention's.
        softcap: cap of the scores, > 0.
        scale: factor on q . k; by default 1 / sqrt(head_dim).
        bias: the dimensions over which an additive bias of the dtype varies, a part of "bhqk" in this order.
        alibi: whether ALiBi is added.
        sinks: whether each head has a sink.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) as FlexAttention's.
        q_lens: packs sequences of these lengths end to end ("thd": q (sum(q_lens), heads, head_dim)).
        kv_lens: keys of each sequence; those from there on are padding.
        kv_pages: `Pages`: k and v lie in pools (pages, page size, kv_heads, head_dim) behind a page table.
        name: what reports and ids call it.

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
    alibi: bool = False
    sinks: bool = False
    score_mod: ScoreMod | None = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    kv_pages: Pages | None = None
    name: str | None = None

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
        for field in ("alibi", "sinks"):
            require_flag(field, getattr(self, field))
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise ValueError(f"Workload: name must be text, got {self.name!r}")
        if isinstance(self.kv_pages, int) and not isinstance(self.kv_pages, bool):
            object.__setattr__(self, "kv_pages", Pages(self.kv_pages))
        if self.kv_pages is not None and not isinstance(self.kv_pages, Pages):
            raise ValueError(f"Workload: kv_pages must be Pages(size) or a number of tokens, got {self.kv_pages!r}")
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

    def _check_score(self) -> None:
        for field in ("softcap", "scale"):
            require_positive_or_none(field, getattr(self, field))
        if self.bias is not None:
            require_bias(self.bias)
        if self.score_mod is not None:
            if not callable(self.score_mod):
                raise ValueError(f"Workload: score_mod must be a function, got {self.score_mod!r}")
            require_parameters("score_mod", self.score_mod, ("score", "b", "h", "q_idx", "kv_idx"))

    def _check_mask(self) -> None:
        mask = self.mask
        if isinstance(mask, Document) and not sum(mask.lengths) == self.q_len == self.kv_len:
            raise ValueError(
                f"Workload: Document lengths sum to {sum(mask.lengths)}, but q_len is {self.q_len} and kv_len {self.kv_len}"
            )
        if isinstance(mask, Neighborhood) and not math.prod(mask.shape) == self.q_len == self.kv_len:
            raise ValueError(
                f"Workload: Neighborhood shape {mask.shape} holds {math.prod(mask.shape)} tokens,"
                f" but q_len is {self.q_len} and kv_len {self.kv_len}"
            )
        if self.is_packed and (isinstance(mask, Document | Neighborhood | BooleanMask) or self.bias):
            raise ValueError(
                "Workload: q_lens (packed sequences) cannot be combined with Document, Neighborhood, BooleanMask or bias"
            )
        if self.is_packed and self.kv_pages:
            raise ValueError("Workload: q_lens (packed queries) cannot be combined with kv_pages; use q_len")

    # -- what the fields mean once settled ---------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """How many query heads share one key head."""
        return self.heads // self.kv_heads

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie end to end in one "thd" tensor."""
        return self.q_lens is not None

    @property
    def softmax_scale(self) -> float:
        """The factor on q . k: `scale`, or 1 / sqrt(head_dim)."""
        return self.scale if self.scale is not None else 1 / math.sqrt(self.head_dim)

    @property
    def plain_mask(self) -> Mask | None:
        """The mask, typed."""
        mask: Mask | None = self.mask
        return mask

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
        if "name" not in changes and set(changes) - {"dtype"}:
            changes["name"] = None
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @cached_property
    def id(self) -> str:
        """A short id that shows every field that differs from its default; a name stands for all but the dtype."""
        dtype = [] if self.dtype == "bfloat16" else [DTYPES[self.dtype][0]]
        return "-".join([self.name or self.shape_id, *dtype])

    @cached_property
    def shape_id(self) -> str:
        """The id without name and dtype."""
        return shape_id(self)

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
        width = DTYPES[self.dtype][1]
        rows = sum(self.q_lens) if self.q_lens else self.batch * self.q_len
        keys = sum(self.kv_lens) if self.kv_lens else self.batch * self.kv_len
        q, out = rows * self.heads * self.head_dim * width, rows * self.heads * self.v_head_dim * width
        kv = keys * self.kv_heads * (self.head_dim + self.v_head_dim) * width
        lse = 4 * rows * self.heads
        if direction == "forward":
            return q + kv + out + lse
        return 2 * (q + kv) + 2 * out + lse


def sequence_lengths(w: Workload) -> list[tuple[int, int]]:
    """Return (q_len, kv_len) of each batch entry."""
    q_lens = w.q_lens or (w.q_len,) * w.batch
    kv_lens = w.kv_lens or (w.kv_len,) * w.batch
    return list(zip(q_lens, kv_lens, strict=True))
