"""Faults of the online softmax, which no other attention amounts to: sums not brought to a new maximum, splits merged wrongly.

A few rows are computed tile by tile, as a kernel does, with the step done wrong. Tiles of keys have the sizes of `TILES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.correctness.backward_parts import Part, Place, places_of
from pytest_attn.correctness.comparison import Suggestion
from pytest_attn.correctness.confirm import WholeCase, unexplained
from pytest_attn.correctness.mask_mistakes import TILES
from pytest_attn.correctness.products import over_keys
from pytest_attn.correctness.reference import Reference
from pytest_attn.workloads.masks import Causal, Window

if TYPE_CHECKING:
    import torch

#: what one rounding of P may be off, with room for sums that grow too large
_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18, "float8_e4m3fn": 2.0**-4}
_SPLITS = (2, 3, 4, 8)


class Computed(NamedTuple):
    """What a wrong online softmax gives: a text that continues "an online softmax ...", out, and the variance of roundings."""

    text: str
    out: torch.Tensor
    variance: torch.Tensor


def name_online(bad: torch.Tensor, reference: Reference, case: WholeCase) -> list[Suggestion]:
    """Return the step of an online softmax that explains out on every distribution; nothing where none does."""
    place = next(places_of(reference, "dq", bad), None)
    if place is None:
        return []
    got = next(got for got, of in case.of("out") if of is reference)
    found = ((text, _left(one, got, reference, place, bad)) for text, one in _all(reference, place))
    for text, _ in sorted(((text, left) for text, left in found if left is not None), key=lambda one: one[1]):
        if all(_explains(text, got, of, place) for got, of in case.of("out")):
            return [Suggestion("online", {"tensor": "out", "text": text})]
    return []


def _explains(text: str, got: torch.Tensor, reference: Reference, place: Place) -> bool:
    computed = (one for found, one in _all(reference, place) if found == text)
    return any(_left(one, got, reference, place, None) is not None for one in computed)


def _all(reference: Reference, place: Place) -> Iterator[tuple[str, tuple[Part, Computed]]]:
    """Yield all faults of the rows of a place, by their texts."""
    part = Part(reference.inputs, reference.inputs.workload, place)
    seen: list[torch.Tensor] = []
    for tile in TILES:
        if part.scores.shape[-1] > tile:
            for one in _tile_by_tile(part, tile):
                yield one.text, (part, one)
        for number in _SPLITS:
            splits = _splits(part, tile, number)
            if int(splits.max()) == number - 1 and not any(splits.equal(other) for other in seen):
                seen.append(splits)
                for one in _merged(part, splits, number):
                    yield one.text, (part, one)


def _left(
    found: tuple[Part, Computed], got: torch.Tensor, reference: Reference, place: Place, bad: torch.Tensor | None
) -> float | None:
    part, computed = found
    expected = reference.tensors["out"]
    mine, exact, tau = (part.of_rows(t) for t in (got, expected.value, expected.tau))
    faulty = None if bad is None else part.of_rows(bad)
    return unexplained(mine, computed.out, computed.variance, exact, tau, faulty)


# -- tile by tile ------------------------------------------------------------------------------------------------------------


def _tile_by_tile(part: Part, tile: int) -> Iterator[Computed]:
    """Visit tiles of keys one after the other, and do one step wrong."""
    scores, squares = part.scores, part.v.square()
    top = scores.new_full((*scores.shape[:3], 1), -math.inf)
    total = unscaled_total = scores.new_zeros(top.shape)
    acc = unscaled = inverse = scores.new_zeros((*scores.shape[:3], part.v.shape[-1]))
    variance = of_inverse = acc
    for start in range(0, scores.shape[-1], tile):
        keys = slice(start, start + tile)
        new = top.maximum(scores[..., keys].amax(-1, keepdim=True))
        shift = new.masked_fill(new == -math.inf, 0)
        p, factor = (scores[..., keys] - shift).exp(), (top - shift).exp()
        pv, share = over_keys(p, part.v[:, :, keys]), p.sum(-1, keepdim=True)
        total, unscaled_total = total * factor + share, unscaled_total + share
        acc, unscaled = acc * factor + pv, unscaled + pv
        back, rounded = (1 / factor).masked_fill(factor == 0, 0), over_keys(p.square(), squares[:, :, keys])
        inverse, of_inverse = inverse * back + pv, of_inverse * back.square() + rounded
        variance = variance + rounded
        top = new
    sink = _share_of_sink(part, top)
    unit = _UNIT[part.block.workload.out_dtype] ** 2
    inversely = "whose sum of P v is multiplied by the inverse of the factor that brings it to a new maximum"
    for text, sums, of_sums, denominator in (
        ("whose sum of P v is not brought to a new maximum", unscaled, variance, total),
        ("whose denominator is not brought to a new maximum", acc, variance, unscaled_total),
        (inversely, inverse, of_inverse, total),
    ):
        below = (denominator + sink).clamp(min=1e-300)
        out = sums / below
        yield Computed(f"{text} (tiles of {tile} keys)", out, (of_sums / below.square() + out.square()) * unit)


def _share_of_sink(part: Part, top: torch.Tensor) -> torch.Tensor | float:
    sinks = part.block.segment.inputs.sinks
    if sinks is None or not part.block.workload.sinks:
        return 0.0
    return (sinks.to(top.device).double().view(1, -1, 1, 1) - top).exp()


# -- split by split -------------------------------------------------------------------------------------------------------


def _splits(part: Part, tile: int, number: int) -> torch.Tensor:
    """Return which split each key is in, (1, 1, rows, keys): whole tiles of those visited, as many in each but the last."""
    tiles = part.at // tile
    first, last = _visited(part, tile) if isinstance(part.block.workload.mask, Causal | Window) else (tiles[:1], tiles[-1:])
    size = -(-(last - first + 1).clamp(min=1) // number)
    return ((tiles - first.unsqueeze(-1)) // size.unsqueeze(-1)).clamp(0, number - 1).expand(1, 1, *part.scores.shape[2:])


def _visited(part: Part, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last tile of keys that each row's tile of rows visits, (1, 1, rows)."""
    import torch

    seen = (part.scores > -math.inf).any(1, keepdim=True)
    keys, sees = seen.shape[-1], seen.any(-1)
    first = seen.int().argmax(-1).masked_fill(~sees, keys)
    last = (keys - 1 - seen.flip(-1).int().argmax(-1)).masked_fill(~sees, 0)
    low = torch.cat([rows.amin(-1, keepdim=True).expand_as(rows) for rows in torch.split(first, tile, -1)], -1)
    high = torch.cat([rows.amax(-1, keepdim=True).expand_as(rows) for rows in torch.split(last, tile, -1)], -1)
    return low // tile, high // tile


def _merged(part: Part, splits: torch.Tensor, number: int) -> Iterator[Computed]:
    """Attend to each split of the keys alone, and merge the results wrongly."""
    import torch

    every = [part.scores.masked_fill(splits != split, -math.inf) for split in range(number)]
    lses = torch.stack([scores.logsumexp(-1, keepdim=True) for scores in every])
    outs, variances = [], []
    for scores, lse in zip(every, lses, strict=True):
        p = (scores - lse.masked_fill(lse == -math.inf, 0)).exp()
        outs.append(over_keys(p, part.v))
        variances.append(over_keys(p.square(), part.v.square()))
    whole = lses.logsumexp(0)
    of_keys = 1 / (1 + _share_of_sink(part, whole))  # the rest is the sink's
    unit = _UNIT[part.block.workload.out_dtype] ** 2
    even = torch.full_like(lses, 1 / number)
    in_base_2 = (lses * math.log(2)).softmax(0).nan_to_num(0)
    for text, weights in (
        ("that averages the results of {n} splits of the keys, whatever their denominators", even),
        ("that merges the results of {n} splits of the keys by a natural lse as if it were one of base 2", in_base_2),
    ):
        out = (weights * torch.stack(outs)).sum(0) * of_keys
        variance = (weights.square() * torch.stack(variances)).sum(0)
        yield Computed(text.format(n=number), out, (variance + out.square()) * unit)


# -- tiles in which a row sees nothing ---------------------------------------------------------------------------------------


def blind_tile(bad: torch.Tensor, reference: Reference) -> int:
    """Return the size of tiles for which the wrong rows are just those that see no key in the first tile visited; else 0."""
    places = list(places_of(reference, "dq", bad))
    if not places or not all(place.is_whole for place in places) or reference.inputs.workload.is_packed:
        return 0
    parts = [Part(reference.inputs, reference.inputs.workload, place) for place in places]
    for tile in TILES:
        if all(bool((_is_blind(part, tile) == part.of_rows(bad)).all()) for part in parts):
            return tile
    return 0


def _is_blind(part: Part, tile: int) -> torch.Tensor:
    """Return (1, heads, rows): whether a row sees keys, but none in the first tile that its tile of rows visits."""
    seen, (first, _) = part.scores > -math.inf, _visited(part, tile)
    in_first = part.at // tile == first.unsqueeze(-1)
    return seen.any(-1) & ~(seen & in_first).any(-1)
