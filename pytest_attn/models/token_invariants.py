"""What must hold of a model of tokens whatever its weights: no reference is asked, the model is compared with itself.

Where the same sums run over the same shapes, rows must be bit-equal; where shapes differ, a row may move as far as honest
rounding does (`TokenModel.scatter`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_attn.models.interfaces import is_of_transformers
from pytest_attn.models.receptive_field import reach, wrong_masks
from pytest_attn.models.token_model import LIMIT, TokenModel

if TYPE_CHECKING:
    import torch


class NotApplicableError(Exception):
    """An invariant says nothing of this model; the text is why."""


class BrokenError(Exception):
    """An invariant does not hold; the text is the smallest evidence."""


@dataclass
class Asking:
    """One model, asked one invariant after the other. is_causal: whether a token may see only what stands before it."""

    of: TokenModel
    is_causal: bool

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows of the batch as it is."""
        return self.of.rows(self.of.ids)

    @cached_property
    def unit(self) -> float:
        """One honest scatter."""
        return max(self.of.scatter(), 1e-30)

    def changed(self, at: int) -> torch.Tensor:
        """Return the rows after the token at one position became another one in every sequence."""
        ids = self.of.ids.clone()
        ids[:, at] = other_tokens(ids, at)
        return self.of.rows(ids)

    def require_near(self, found: torch.Tensor, expected: torch.Tensor, what: str, first: int = 0) -> None:
        """Raise BrokenError where a row is further off than honest rounding explains. first: number of the first row."""
        distances = (found.double() - expected.double()).norm(dim=-1) / self.unit
        worst = float(distances.max())
        if not worst <= LIMIT:
            row = int(distances.flatten().argmax()) % distances.shape[-1] + first
            many = int((distances > LIMIT).sum())
            raise BrokenError(
                f"{what}: {many} of {distances.numel()} rows differ, row {row} by {worst:.3g} times what honest rounding does"
                f" (limit {LIMIT:g})"
            )


def other_tokens(ids: torch.Tensor, at: int) -> torch.Tensor:
    """Return tokens that differ from those at one position and occur in the batch."""
    import torch

    known: torch.Tensor = torch.unique(ids)
    places = torch.searchsorted(known, ids[:, at].contiguous())
    other: torch.Tensor = known[(places + 1) % len(known)]
    return other


def future(asking: Asking) -> None:
    """Rows before a token that changes stay bit-equal."""
    if not asking.is_causal:
        raise NotApplicableError("the model is not causal")
    tokens = asking.of.ids.shape[1]
    for at in sorted({tokens // 3, tokens // 2 + 1, tokens - 1}):
        moved = (asking.changed(at)[:, :at] != asking.rows[:, :at]).any(-1)
        if bool(moved.any()):
            seeing = moved.any(0).nonzero().flatten().tolist()
            raise BrokenError(f"another token at {at} changes rows before it: {len(seeing)} of {at}, the last is {seeing[-1]}")


def receptive_field(asking: Asking) -> None:
    """Each layer asks for the mask of the configuration, and rows beyond all windows are bit-equal."""
    config = asking.of.config
    if config is None or not getattr(config, "sliding_window", None):
        raise NotApplicableError("its configuration names no window")
    if wrong := wrong_masks(asking.of, config):
        raise BrokenError(wrong)
    field, tokens = reach(config), asking.of.ids.shape[1]
    if field is None or not asking.is_causal:
        return
    if tokens < field + 2:
        return
    beyond = (asking.changed(0)[:, field + 1 :] != asking.rows[:, field + 1 :]).any(-1)
    if bool(beyond.any()):
        row = int(beyond.any(0).nonzero()[-1]) + field + 1
        raise BrokenError(f"row {row} sees token 0, and the windows of all layers reach back {field} tokens only")


def padding(asking: Asking, side: str) -> None:
    """A sequence that is padded gives the rows that it gives without."""
    import torch

    of = asking.of
    if not of.takes("attention_mask"):
        raise NotApplicableError("its forward pass takes no attention_mask")
    ids, tokens, extra = of.ids, of.ids.shape[1], 7
    blank = ids[:, :1].expand(-1, extra)
    mask = torch.ones(len(ids), tokens + extra, dtype=torch.long, device=ids.device)
    is_left = side == "left"
    if is_left and not of.takes("position_ids"):
        raise NotApplicableError("its forward pass takes no position_ids")
    mask[:, slice(0, extra) if is_left else slice(tokens, None)] = 0
    padded = torch.cat([blank, ids] if is_left else [ids, blank], 1)
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if of.takes("position_ids") else {}
    found = of.rows(padded, attention_mask=mask, **more)
    found = found[:, extra:] if is_left else found[:, :tokens]
    asking.require_near(found, asking.rows, f"with {extra} tokens of padding on the {side}")


def packed(asking: Asking) -> None:
    """Two documents in one row, told apart by position_ids, give what each gives alone."""
    import torch

    of = asking.of
    if not (asking.is_causal and of.takes("position_ids") and is_of_transformers(of.model)):
        raise NotApplicableError("it is not a causal model of transformers that takes position_ids")
    length = of.ids.shape[1] // 2
    first, second = of.ids[:, :length], of.ids[:, length:]
    lengths = first.shape[1], second.shape[1]
    positions = torch.cat([torch.arange(n, device=of.ids.device) for n in lengths]).expand(len(of.ids), -1)
    found = of.rows(of.ids[:1], position_ids=positions[:1])  # packing is of batch 1 where kernels do it
    for name, at, ids in (("first", 0, first), ("second", length, second)):
        place = slice(at, at + ids.shape[1])
        asking.require_near(found[:, place], of.rows(ids[:1]), f"the {name} of two packed documents", at)


def decoding(asking: Asking, cache: str) -> None:
    """Prefill, then one token after the other through a cache, gives the rows of the whole."""
    of = asking.of
    if not (asking.is_causal and of.takes("past_key_values") and is_of_transformers(of.model)):
        raise NotApplicableError("it is not a causal model of transformers that takes past_key_values")
    transformers: Any = importlib.import_module("transformers")

    config, tokens = of.config, of.ids.shape[1]
    made: Any = transformers.StaticCache(config=config, max_cache_len=tokens + 3) if cache == "static" else None
    if cache == "dynamic":
        made = transformers.DynamicCache()
    if cache == "sliding":
        if not getattr(config, "sliding_window", None):
            raise NotApplicableError("its configuration names no window")
        made = transformers.DynamicCache(config=config)
    prefill = tokens // 2
    rows, _ = of.called(of.ids[:, :prefill], past_key_values=made, use_cache=True)
    asking.require_near(rows, asking.rows[:, :prefill], f"prefill with a {cache} cache")
    for at in range(prefill, tokens):
        rows, _ = of.called(of.ids[:, at : at + 1], past_key_values=made, use_cache=True)
        asking.require_near(rows, asking.rows[:, at : at + 1], f"decoding with a {cache} cache", at)


def batch_order(asking: Asking) -> None:
    """A sequence gives the same rows wherever it stands in the batch."""
    ids = asking.of.ids
    if len(ids) < 2:
        raise NotApplicableError("the batch has one sequence")
    asking.require_near(asking.of.rows(ids.flip(0)).flip(0), asking.rows, "with the batch in reverse")


def _of(asked: Callable[..., None], *args: Any) -> Callable[[Asking], None]:
    return lambda asking: asked(asking, *args)


#: by name, in the order in which they are asked
INVARIANTS: dict[str, Callable[[Asking], None]] = {
    "future": future,
    "field": receptive_field,
    "padded-left": _of(padding, "left"),
    "padded-right": _of(padding, "right"),
    "packed": packed,
    "dynamic": _of(decoding, "dynamic"),
    "static": _of(decoding, "static"),
    "sliding": _of(decoding, "sliding"),
    "order": batch_order,
}
