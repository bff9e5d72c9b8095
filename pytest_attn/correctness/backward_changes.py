"""The mistakes that backward passes are known for, each as one step of exact attention's backward pass that is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.correctness.backward_parts import Part, Place, row_sums
from pytest_attn.correctness.exact import modify, softmax
from pytest_attn.correctness.mask_mistakes import TILES
from pytest_attn.correctness.mistakes import Other, likely_mistakes
from pytest_attn.correctness.products import over_group, over_keys, over_rows, per_key
from pytest_attn.correctness.reference import Reference
from pytest_attn.workloads.workload import Workload, sequence_lengths

if TYPE_CHECKING:
    import torch

#: what one rounding of P or dS may be off, with room for what else a wrong step does to it
_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18, "float8_e4m3fn": 2.0**-4}


@dataclass(frozen=True)
class Steps:
    """What a backward pass starts from, and its steps: those of an honest one, unless they are replaced.

    part: scores and slopes; lse (1, heads, rows, 1); row_sum: D, alike, and row_sum_var: its variance, in units
    squared. dscores: (P, dP, D) -> dS. summed: sums a gradient of
    the keys over the query heads of each key head. of_dv: P as dv takes it. slope: of the modifications, "part" for its own.
    """

    part: Part
    lse: torch.Tensor
    row_sum: torch.Tensor
    row_sum_var: torch.Tensor
    slope: torch.Tensor | None = None
    dscores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = lambda p, dp, d: p * (dp - d)
    summed: Callable[[torch.Tensor, int], torch.Tensor] = over_group
    seen: Callable[[torch.Tensor], torch.Tensor] = lambda p: p

    def gradient(self, name: str) -> torch.Tensor:
        """Return a gradient of the part."""
        if name == "dv":
            return self._over_rows(self.seen(self._p()), self.part.dout)
        ds, _ = self._ds()
        return over_keys(ds, self.part.k) if name == "dq" else self._over_rows(self.seen(ds), self.part.q)

    def variance(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the variance of what is rounded on the way to a gradient."""
        part, unit_squared = self.part, _UNIT[self.part.block.workload.out_dtype] ** 2
        if name == "dv":
            return (self._over_rows(self.seen(self._p()).square(), part.dout.square()) + value.square()) * unit_squared
        ds, weight = self._ds()
        if name == "dq":
            drift = over_keys(weight, part.k).square() * self.row_sum_var
            return (over_keys(ds.square(), part.k.square()) + value.square() + drift) * unit_squared
        terms = self.seen(ds).square() + self.seen(weight).square() * self.row_sum_var
        return (self._over_rows(terms, part.q.square()) + value.square()) * unit_squared

    def _p(self) -> torch.Tensor:
        hidden = self.part.scores == -math.inf
        return (self.part.scores - self.lse.masked_fill(self.lse == -math.inf, 0)).exp().masked_fill(hidden, 0)

    def _ds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dS as the products take it, and how much of D's own error enters."""
        part, p = self.part, self._p()
        slope = part.block.workload.softmax_scale * (1.0 if self.slope is None else self.slope)
        dp = per_key(part.dout, part.v)
        ds = self.dscores(p, dp, self.row_sum) * slope
        return ds, self.dscores(p, dp, self.row_sum + 1) * slope - ds

    def _over_rows(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.summed(over_rows(a, b, b.shape[1]), self.part.block.workload.group)


@dataclass(frozen=True)
class Change:
    """A changed backward pass: a text that continues "dq is that of a backward pass ...", and what makes its steps."""

    text: str
    steps: Callable[[], Steps]


def likely_changes(reference: Reference, name: str, place: Place) -> Iterator[Change]:
    """Yield likely changes, of those that amount to the same the plainest first."""
    honest = _honest(reference, place)
    yield from _of_row_sums(reference, honest)
    yield from _of_lse(reference, honest)
    yield from _of_slopes(reference, honest, place)
    if name == "dv" and place.keys is None:
        below = (honest.lse - honest.part.scores.amax(-1, keepdim=True)).nan_to_num(0, 0, 0).exp()
        yield Change("that takes P without its denominator", lambda: replace(honest, seen=lambda p: p * below))
    if name != "dq":
        yield from _of_groups(honest)
        yield from _of_row_tiles(honest, place)
    yield from _of_attention(reference, honest, place)


def _honest(reference: Reference, place: Place) -> Steps:
    part = Part(reference.inputs, reference.inputs.workload, place)
    lse = part.of_rows(reference.tensors["lse"].value).unsqueeze(-1)
    out = part.of_rows(reference.tensors["out"].value)
    of_out = (part.dout * out).square().sum(-1, keepdim=True)
    of_p = (
        ((part.scores - lse.masked_fill(lse == -math.inf, 0)).exp() * per_key(part.dout, part.v))
        .square()
        .sum(-1, keepdim=True)
    )
    return Steps(part, lse, part.of_rows(row_sums(reference)), of_out + of_p, part.slope)


def _of_row_sums(reference: Reference, honest: Steps) -> Iterator[Change]:
    yield Change("without D: dS = P * dP", lambda: replace(honest, dscores=lambda p, dp, d: p * dp))
    yield Change("that adds D: dS = P * (dP + D)", lambda: replace(honest, dscores=lambda p, dp, d: p * (dp + d)))
    yield Change("without P in dS: dS = dP - D", lambda: replace(honest, dscores=lambda p, dp, d: (dp - d) * (p > 0)))
    if reference.inputs.workload.heads > 1:
        yield Change("with D of the next head", lambda: replace(honest, row_sum=honest.row_sum.roll(-1, 1)))
        yield Change("with D of the head before", lambda: replace(honest, row_sum=honest.row_sum.roll(1, 1)))


def _of_lse(reference: Reference, honest: Steps) -> Iterator[Change]:
    w, lse = reference.inputs.workload, honest.lse
    yield Change("that computes P again without lse: exp(s)", lambda: replace(honest, lse=lse * 0))
    yield Change("that takes lse for one of base 2", lambda: replace(honest, lse=lse * math.log(2)))
    yield Change("that takes lse of base 2 for a natural one", lambda: replace(honest, lse=lse / math.log(2)))
    if w.batch > 1 and not w.is_packed:
        first = reference.tensors["lse"].value[:1, :, honest.part.rows].unsqueeze(-1)
        yield Change("with lse of the first batch entry for all", lambda: replace(honest, lse=first))
    if w.heads > 1:
        yield Change("with lse of the next head", lambda: replace(honest, lse=lse.roll(-1, 1)))
    sinks = reference.inputs.sinks
    if w.sinks and sinks is not None:
        share = (sinks.to(lse.device).double().view(1, -1, 1, 1) - lse).exp()
        without = lse + (1 - share).clamp(min=0).log()
        yield Change("that computes P again without the sink's share of lse", lambda: replace(honest, lse=without))


def _of_slopes(reference: Reference, honest: Steps, place: Place) -> Iterator[Change]:
    w, inputs, part = reference.inputs.workload, reference.inputs, honest.part
    if w.softcap is None and w.score_mod is None:
        return
    cap = w.softcap
    of_cap = 1.0 if cap is None else 1 - (part.scaled / cap).tanh().square()
    of_mod: torch.Tensor | float = 1.0
    if w.score_mod is not None:
        capped = part.scaled if cap is None else cap * (part.scaled / cap).tanh()
        _, slope = modify(capped.clone(), Part(inputs, w.replace(softcap=None), place))
        of_mod = 1.0 if slope is None else slope
        yield Change("without score_mod's derivative", lambda: replace(honest, slope=of_cap + 0 * part.scaled))
    if cap is not None:
        yield Change("without softcap's derivative", lambda: replace(honest, slope=of_mod + 0 * part.scaled))
        of_capped = 1 - (part.scaled / cap).tanh().tanh().square()
        text = "with softcap's derivative at the capped score, not at the score"
        yield Change(text, lambda: replace(honest, slope=of_capped * of_mod))


def _of_groups(honest: Steps) -> Iterator[Change]:
    group = honest.part.block.workload.group
    if group == 1:
        return

    def one(which: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        return lambda x, group: x[:, which % group :: group]

    def interleaved(x: torch.Tensor, group: int) -> torch.Tensor:
        return x.view(x.shape[0], group, -1, *x.shape[2:]).sum(1)

    yield Change("that keeps only the last query head of each group", lambda: replace(honest, summed=one(-1)))
    yield Change("that keeps only the first query head of each group", lambda: replace(honest, summed=one(0)))
    yield Change("that adds query head h to key head h % kv_heads", lambda: replace(honest, summed=interleaved))


def _of_row_tiles(honest: Steps, place: Place) -> Iterator[Change]:
    """Yield sums over rows of which only the last tile's share is left: it overwrote the others."""
    part = honest.part
    rows = part.block.segment.lengths[0]
    for tile in TILES[1:]:
        if place.rows is None and rows > tile:
            text = f"that keeps only the last tile of {tile} rows: its share overwrites the others"
            yield Change(text, partial(_of_last_tile, honest, tile))


def _of_last_tile(honest: Steps, tile: int) -> Steps:
    return replace(honest, seen=_last_tile_of(honest.part, tile))


def _last_tile_of(part: Part, tile: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep of each key those rows that are in the last tile of rows which sees any key of its tile."""
    sees = (part.scores > -math.inf).any(1, keepdim=True).any(0, keepdim=True)
    of_rows, of_keys = part.rows // tile, part.at // tile
    last = of_keys.new_tensor(
        [
            int(of_rows[sees[0, 0][:, of_keys == key].any(-1)].amax()) if bool(sees[0, 0][:, of_keys == key].any()) else -1
            for key in of_keys
        ]
    )
    kept = of_rows[:, None] == last
    return lambda a: a * kept


def _of_attention(reference: Reference, honest: Steps, place: Place) -> Iterator[Change]:
    """Yield backward passes that compute P again as another attention would, and those that belong to another attention."""
    inputs, w = reference.inputs, reference.inputs.workload

    def steps(make: Callable[[], Other], is_consistent: bool) -> Steps:
        other, variant = make()
        if not _has_the_same_shape(variant, w) or other.k.shape != inputs.k.shape:
            raise ValueError
        part = Part(other, variant, place)
        if not is_consistent:
            return replace(honest, part=part, slope=part.slope)
        p, lse = softmax(part.scores.clone(), part)
        out = over_keys(p, part.v)
        return replace(
            honest, part=part, slope=part.slope, lse=lse.unsqueeze(-1), row_sum=(part.dout * out).sum(-1, keepdim=True)
        )

    for mistake in likely_mistakes(inputs, w):
        make = mistake.attention
        yield Change(f"that computes P again {mistake.text}", partial(steps, make, False))
        if place.keys is None:
            yield Change(f"of attention {mistake.text}", partial(steps, make, True))


def _has_the_same_shape(variant: Workload, w: Workload) -> bool:
    return (variant.kv_heads, sequence_lengths(variant)) == (w.kv_heads, sequence_lengths(w))
