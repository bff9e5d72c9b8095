"""Faults of the online softmax, which no other attention amounts to: sums not brought to a new maximum, splits merged wrongly.

A few rows are computed tile by tile, as a kernel does, with the step done wrong. Tiles of keys have the sizes of `TILES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from pytest_attn.correctness.exact import over_keys
from pytest_attn.correctness.reference import Reference
from pytest_attn.diagnosis.hypothesis import OF_STEPS, FaultHypothesis, Prediction, View
from pytest_attn.diagnosis.masks import TILES
from pytest_attn.diagnosis.steps import UNIT, Region, RegionScores, regions_of

_SPLITS = (2, 3, 4, 8)


@dataclass(frozen=True, eq=False)
class OnlineRows:
    """Rows of out of one batch entry. by_tile, by_split: what was computed of them, for several hypotheses."""

    view: View
    scores: RegionScores
    by_tile: dict[int, _Sums] = field(default_factory=dict)
    by_split: dict[tuple[int, int], _Splits] = field(default_factory=dict)

    @classmethod
    def of(cls, got: torch.Tensor, reference: Reference, region: Region, bad: torch.Tensor | None) -> OnlineRows:
        """Return what is seen of out, heads-first, in a region."""
        scores = RegionScores(reference.inputs, reference.inputs.workload, region)
        expected = reference.tensors["out"]
        mine, exact, std = (scores.of_rows(t) for t in (got, expected.value, expected.tau))
        return cls(View(mine, exact, std, None if bad is None else scores.of_rows(bad)), scores)

    def sums(self, tile: int) -> _Sums:
        """Return the sums of an online softmax over tiles of keys."""
        if tile not in self.by_tile:
            self.by_tile[tile] = _tile_by_tile(self.scores, tile)
        return self.by_tile[tile]

    def splits(self, tile: int, number: int) -> _Splits:
        """Return the results of splits of the keys, alone."""
        if (tile, number) not in self.by_split:
            self.by_split[tile, number] = _split_by_split(self.scores, _split_of_keys(self.scores, tile, number), number)
        return self.by_split[tile, number]

    def prediction(self, out: torch.Tensor, variance: torch.Tensor) -> Prediction:
        """Return out with what is rounded on the way to it. variance: of P v, in units squared."""
        unit = UNIT[self.scores.workload.out_dtype]
        return Prediction(out, lambda: (self.view.std.double().square() + (variance + out.square()) * unit**2).sqrt())


Hypothesis: TypeAlias = FaultHypothesis[OnlineRows]


def faults_of_running_sums(seen: OnlineRows) -> Iterator[Hypothesis]:
    """Yield the faults of an online softmax. seen: those rows which are looked at first."""
    found: list[torch.Tensor] = []
    for tile in TILES:
        if seen.scores.scores.shape[-1] > tile:
            yield from _of_tiles(tile)
        for number in _SPLITS:
            splits = _split_of_keys(seen.scores, tile, number)
            if int(splits.max()) == number - 1 and not any(splits.equal(other) for other in found):
                found.append(splits)
                yield from _of_splits(tile, number)


def _of_tiles(tile: int) -> Iterator[Hypothesis]:
    where = f"(tiles of {tile} keys)"
    for fault, words, of_tiles in (
        ("sum-not-rescaled", "whose sum of P v is not brought to a new maximum", _with_plain_sum),
        ("denominator-not-rescaled", "whose denominator is not brought to a new maximum", _with_plain_denominator),
        (
            "rescaled-inversely",
            "whose sum of P v is multiplied by the inverse of the factor that brings it to a new maximum",
            _rescaled_inversely,
        ),
    ):
        words = f"out is that of an online softmax {words} {where}"
        yield FaultHypothesis(fault, words, partial(of_tiles, tile), OF_STEPS)


def _of_splits(tile: int, number: int) -> Iterator[Hypothesis]:
    for fault, words, merged in (
        ("splits-averaged", "that averages the results of {n} splits of the keys, whatever their denominators", _averaged),
        (
            "splits-merged-in-base-2",
            "that merges the results of {n} splits of the keys by a natural lse as if it were one of base 2",
            _merged_in_base_2,
        ),
    ):
        words = f"out is that of an online softmax {words.format(n=number)}"
        yield FaultHypothesis(fault, words, partial(merged, tile, number), OF_STEPS)


# -- tile by tile ------------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """P v and the denominator of an online softmax, right and wrong, with variances in units squared."""

    acc: torch.Tensor
    total: torch.Tensor
    plain_acc: torch.Tensor
    plain_total: torch.Tensor
    inverse_acc: torch.Tensor
    variance: torch.Tensor
    inverse_variance: torch.Tensor


def _tile_by_tile(part: RegionScores, tile: int) -> _Sums:
    """Visit tiles of keys one after the other. Shapes (1, heads, rows, dim), and 1 for dim of denominators."""
    scores, squares = part.scores, part.v.square()
    top = scores.new_full((*scores.shape[:3], 1), -math.inf)
    total = plain_total = scores.new_zeros(top.shape)
    acc = plain = inverse = scores.new_zeros((*scores.shape[:3], part.v.shape[-1]))
    variance = of_inverse = acc
    for start in range(0, scores.shape[-1], tile):
        keys = slice(start, start + tile)
        new = top.maximum(scores[..., keys].amax(-1, keepdim=True))
        shift = new.masked_fill(new == -math.inf, 0)
        p, factor = (scores[..., keys] - shift).exp(), (top - shift).exp()
        pv, share = over_keys(p, part.v[:, :, keys]), p.sum(-1, keepdim=True)
        total, plain_total = total * factor + share, plain_total + share
        acc, plain = acc * factor + pv, plain + pv
        back, rounded = (1 / factor).masked_fill(factor == 0, 0), over_keys(p.square(), squares[:, :, keys])
        inverse, of_inverse = inverse * back + pv, of_inverse * back.square() + rounded
        variance = variance + rounded
        top = new
    sink = _share_of_sink(part, top)
    total, plain_total = ((t + sink).clamp(min=1e-300) for t in (total, plain_total))
    return _Sums(acc, total, plain, plain_total, inverse, variance, of_inverse)


def _with_plain_sum(tile: int, seen: OnlineRows) -> Prediction:
    sums = seen.sums(tile)
    return seen.prediction(sums.plain_acc / sums.total, sums.variance / sums.total.square())


def _with_plain_denominator(tile: int, seen: OnlineRows) -> Prediction:
    sums = seen.sums(tile)
    return seen.prediction(sums.acc / sums.plain_total, sums.variance / sums.plain_total.square())


def _rescaled_inversely(tile: int, seen: OnlineRows) -> Prediction:
    sums = seen.sums(tile)
    return seen.prediction(sums.inverse_acc / sums.total, sums.inverse_variance / sums.total.square())


def _share_of_sink(part: RegionScores, top: torch.Tensor) -> torch.Tensor | float:
    sinks = part.block.segment.inputs.sinks
    if sinks is None or not part.workload.sinks:
        return 0.0
    return (sinks.to(top.device).double().view(1, -1, 1, 1) - top).exp()


# -- split by split -------------------------------------------------------------------------------------------------------


class _Splits(NamedTuple):
    """What splits of the keys give alone: lse (splits, 1, heads, rows, 1), out and the variance of P v (splits, ..., dim).

    of_keys: the share of each row's keys, without its sink, (1, heads, rows, 1).
    """

    lse: torch.Tensor
    out: torch.Tensor
    variance: torch.Tensor
    of_keys: torch.Tensor


def _split_of_keys(part: RegionScores, tile: int, number: int) -> torch.Tensor:
    """Return which split each key is in, (1, 1, rows, keys): whole tiles of those visited, as many in each but the last."""
    tiles = part.at // tile
    first, last = (
        _visited(part, tile) if part.workload.mask is not None and part.workload.band is not None else (tiles[:1], tiles[-1:])
    )
    size = -(-(last - first + 1).clamp(min=1) // number)
    return ((tiles - first.unsqueeze(-1)) // size.unsqueeze(-1)).clamp(0, number - 1).expand(1, 1, *part.scores.shape[2:])


def _visited(part: RegionScores, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last tile of keys that each row's tile of rows visits, (1, 1, rows)."""
    seen = (part.scores > -math.inf).any(1, keepdim=True)
    keys, sees = seen.shape[-1], seen.any(-1)
    first = seen.int().argmax(-1).masked_fill(~sees, keys)
    last = (keys - 1 - seen.flip(-1).int().argmax(-1)).masked_fill(~sees, 0)
    low = torch.cat([rows.amin(-1, keepdim=True).expand_as(rows) for rows in torch.split(first, tile, -1)], -1)
    high = torch.cat([rows.amax(-1, keepdim=True).expand_as(rows) for rows in torch.split(last, tile, -1)], -1)
    return low // tile, high // tile


def _split_by_split(part: RegionScores, splits: torch.Tensor, number: int) -> _Splits:
    """Attend to each split of the keys alone."""
    every = [part.scores.masked_fill(splits != split, -math.inf) for split in range(number)]
    lses = torch.stack([scores.logsumexp(-1, keepdim=True) for scores in every])
    outs, variances = [], []
    for scores, lse in zip(every, lses, strict=True):
        p = (scores - lse.masked_fill(lse == -math.inf, 0)).exp()
        outs.append(over_keys(p, part.v))
        variances.append(over_keys(p.square(), part.v.square()))
    of_keys = 1 / (1 + _share_of_sink(part, lses.logsumexp(0)))  # the rest is the sink's
    return _Splits(lses, torch.stack(outs), torch.stack(variances), torch.as_tensor(of_keys))


def _averaged(tile: int, number: int, seen: OnlineRows) -> Prediction:
    return _merged(seen, seen.splits(tile, number), torch.full_like(seen.splits(tile, number).lse, 1 / number))


def _merged_in_base_2(tile: int, number: int, seen: OnlineRows) -> Prediction:
    splits = seen.splits(tile, number)
    return _merged(seen, splits, (splits.lse * math.log(2)).softmax(0).nan_to_num(0))


def _merged(seen: OnlineRows, splits: _Splits, weights: torch.Tensor) -> Prediction:
    out = (weights * splits.out).sum(0) * splits.of_keys
    return seen.prediction(out, (weights.square() * splits.variance).sum(0))


# -- tiles in which a row sees nothing ---------------------------------------------------------------------------------------


def blind_tile(bad: torch.Tensor, reference: Reference) -> int:
    """Return the size of tiles for which the wrong rows are just those that see no key in the first tile visited; else 0."""
    regions = list(regions_of(reference, "dq", bad))
    if not regions or not all(region.is_whole for region in regions) or reference.inputs.workload.is_packed:
        return 0
    parts = [RegionScores(reference.inputs, reference.inputs.workload, region) for region in regions]
    for tile in TILES:
        if all(bool((_is_blind(part, tile) == part.of_rows(bad)).all()) for part in parts):
            return tile
    return 0


def _is_blind(part: RegionScores, tile: int) -> torch.Tensor:
    """Return (1, heads, rows): whether a row sees keys, but none in the first tile that its tile of rows visits."""
    seen, (first, _) = part.scores > -math.inf, _visited(part, tile)
    in_first = part.at // tile == first.unsqueeze(-1)
    return seen.any(-1) & ~(seen & in_first).any(-1)
