"""The faults that forward passes are known for: of out, of the online softmax, of lse, weights and maxima."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.arithmetic import over_keys, sinks_of, weights_given
from pytest_attn.correctness.judge import LSE_TOLERANCE
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements
from pytest_attn.diagnosis.attention_faults import (
    TILES,
    attention_faults,
    exchanged_entries,
    in_order,
    modified_by,
    other_places,
    read_heads_first,
    read_rows_first,
    rounded_scores,
    seen_by,
)
from pytest_attn.diagnosis.faults import FAULTS
from pytest_attn.diagnosis.hypothesis import (
    OF_FLOAT32,
    OF_STEPS,
    AttentionFault,
    FaultHypothesis,
    Other,
    Prediction,
    Tolerance,
    View,
)
from pytest_attn.diagnosis.steps import UNIT, Region, RegionScores, regions_of
from pytest_attn.reports.lines import told_apart
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: wrong rows, and as many right ones, on which a fault is tried: a few first, and these if it fits them
FEW_ROWS, MANY_ROWS = 4, 32


@dataclass(frozen=True, eq=False)
class RowsOfOut:
    """Some rows of out, heads-first, and where they are; None for all.

    precision: that a kernel is taken to have. faulty: (batch, heads, rows) outside of which it has no fault; None: it has
    the fault in all of it.
    """

    view: View
    reference: Reference
    rows: torch.Tensor | None
    precision: Precision
    faulty: torch.Tensor | None = None

    @classmethod
    def of(cls, got: torch.Tensor, reference: Reference, chosen: torch.Tensor | None) -> RowsOfOut:
        """Return these rows of those that the reference has, which `got` holds; all where None are chosen."""
        expected = reference.tensors["out"]
        if chosen is None:
            return cls(View(got, expected.value, expected.tau), reference, None, reference.precision)
        at = chosen.to(expected.value.device)
        view = View(got[:, :, chosen.to(got.device)], expected.value[:, :, at], expected.tau[:, :, at])
        return cls(view, reference, at if expected.rows is None else expected.rows[at], reference.precision)


def on_rows(fault: AttentionFault, limits: Limits) -> FaultHypothesis[RowsOfOut]:
    """Return what predicts rows of out: another attention has a budget of its own, so the limits are those of a check."""

    def predict(seen: RowsOfOut) -> Prediction:
        inputs, w = fault.attention(seen.reference.inputs)
        expected = compute_reference(inputs, seen.precision, rows=seen.rows, workload=w).tensors["out"]
        if seen.faulty is None:
            return Prediction(expected.value, lambda: expected.tau)
        there = seen.faulty.unsqueeze(-1)
        value = expected.value.where(there, seen.view.exact)
        return Prediction(value, lambda: expected.tau.where(there, seen.view.std))

    words = f"it equals attention {fault.words}"
    return FaultHypothesis(fault.fault, words, predict, Tolerance(element=limits.element, row=limits.row))


def worst_rows(got: torch.Tensor, bad: torch.Tensor, reference: Reference, number: int) -> RowsOfOut:
    """Choose some wrong and some right rows; packed sequences are small, all their rows are taken.

    got: out, heads-first, where the reference looked. bad: (batch, heads, rows), True where it is wrong.
    """
    if reference.workload.is_packed:
        return RowsOfOut.of(got, reference, None)
    faulty = bad.any(0).any(0)
    some = [evenly_spread(rows.nonzero().flatten(), number) for rows in (faulty, ~faulty)]
    return RowsOfOut.of(got, reference, torch.cat(some).sort().values)


def evenly_spread(positions: torch.Tensor, number: int) -> torch.Tensor:
    """Return at most so many of the positions, evenly spread, the first and the last among them."""
    last = len(positions) - 1
    return positions if last < number else positions[[i * last // (number - 1) for i in range(number)]]


# -- other places ----------------------------------------------------------------------------------------------------------


def misplaced_rows(shape: torch.Size, is_sampled: bool, limits: Limits) -> Iterator[FaultHypothesis[RowsOfOut]]:
    """Yield right rows in the wrong place, of all rows of an out of this shape."""
    batch, heads, rows, _ = shape

    def fault(name: str, words: str, move: Callable[[torch.Tensor], torch.Tensor]) -> FaultHypothesis[RowsOfOut]:
        def predict(seen: RowsOfOut) -> Prediction:
            return Prediction(move(seen.view.exact), lambda: move(seen.view.std))

        return FaultHypothesis(name, words, predict, Tolerance(element=limits.element))

    for shift in range(1, heads):
        words = f"head h holds what belongs to head h - {shift}: heads are swapped"
        yield fault("heads-shifted", words, partial(torch.roll, shifts=shift, dims=1))
    for whose, order in other_places(heads):
        yield fault("heads-shifted", f"heads of out are those of others: {whose}", partial(in_order, 1, order))
    for shift in range(1, min(batch, 8)):
        words = f"batch entry b holds what belongs to batch entry b - {shift}: batch entries are swapped"
        yield fault("batch-entries-shifted", words, partial(torch.roll, shifts=shift, dims=0))
    for entries, order in exchanged_entries(batch):
        yield fault("batch-entries-shifted", f"{entries} of out are exchanged", partial(in_order, 0, order))
    if not is_sampled and 1 < heads != rows > 1:
        for words, move in (
            ("(batch, heads, rows, dim) viewed as (batch, rows, heads, dim)", read_heads_first),
            ("(batch, rows, heads, dim) viewed as (batch, heads, rows, dim)", read_rows_first),
        ):
            words = f"out is {words}, where a transpose belongs"
            yield fault("out-viewed-not-transposed", words, move)
    if not is_sampled and heads == rows > 1:
        words = "out has its heads and rows swapped, which no shape shows where these are equal"
        yield fault("heads-and-rows-swapped", words, lambda t: t.transpose(1, 2))
    if not is_sampled and batch == heads > 1:
        words = "out has its batch entries and heads swapped, which no shape shows where these are equal"
        yield fault("batch-and-heads-swapped", words, lambda t: t.transpose(0, 1))


def misplaced_columns(seen: RowsOfOut, limits: Limits) -> Iterator[FaultHypothesis[RowsOfOut]]:
    """Yield out whose columns hold those of others, by which comes nearest. seen: rows by which that is known."""
    got, exact = (t.double().flatten(0, -2) for t in (seen.view.got, seen.view.exact))
    if not bool(got.isfinite().all()):
        return
    apart = got.square().sum(0)[:, None] - 2 * got.T @ exact + exact.square().sum(0)
    order = apart.argmin(1)
    moved = (order != torch.arange(len(order), device=order.device)).nonzero()
    if not len(moved):
        return

    def predict(seen: RowsOfOut) -> Prediction:
        return Prediction(seen.view.exact[..., order], lambda: seen.view.std[..., order])

    first = int(moved[0])
    words = f"columns of out are those of others: column {first} holds what belongs to column {int(order[first])}, ..."
    yield FaultHypothesis("columns-misplaced", words, predict, Tolerance(element=limits.element))


def heads_as_rows(w: Workload, limits: Limits) -> Iterator[FaultHypothesis[RowsOfOut]]:
    """Yield attention over heads in place of rows, as of a kernel that has another layout than its marker says."""
    if w.is_packed or w.kv_pages or w.q_len != w.kv_len:
        return

    def predict(seen: RowsOfOut) -> Prediction:
        inputs = seen.reference.inputs
        tensors = {name: getattr(inputs, name).transpose(1, 2) for name in ("q", "k", "v", "dout")}
        swapped = w.replace(heads=w.q_len, kv_heads=w.kv_len, q_len=w.heads, kv_len=w.kv_heads)
        expected = compute_reference(replace(inputs, workload=swapped, **tensors), seen.precision).tensors["out"]
        return Prediction(expected.value.transpose(1, 2), lambda: expected.tau.transpose(1, 2))

    words = "it equals attention that takes heads for tokens: say the other layout, 'bhsd' (the default) or 'bshd'"
    yield FaultHypothesis("heads-taken-for-rows", words, predict, Tolerance(limits.element, limits.row))


#: how far from 1 the factors are that rounding a denominator makes
_NEAR_ONE = 1 / 16


def scaled_rows(seen: RowsOfOut, limits: Limits) -> Iterator[FaultHypothesis[RowsOfOut]]:
    """Yield exact rows that are off by a factor: the same for all, then one for each row. seen: those of which it is known."""

    def fault(name: str, words: str, factors: Callable[[View], torch.Tensor]) -> FaultHypothesis[RowsOfOut]:
        def predict(seen: RowsOfOut) -> Prediction:
            return Prediction(seen.view.exact * factors(seen.view), lambda: seen.view.std)

        return FaultHypothesis(name, words, predict, Tolerance(limits.element, limits.row, left=0.5))

    def of_rows(view: View) -> torch.Tensor:
        found = factor(view.got, view.exact, -1)
        if not 0.5 <= float(found.min()) <= float(found.max()) <= 2:  # as of rows of zeros
            raise ValueError
        return found

    of_all = factor(seen.view.got, seen.view.exact, (0, 1, 2, 3))
    yield fault("out-scaled", f"out is {told_apart(float(of_all), 1, 4)[0]} times exact attention", lambda view: of_all)
    found = factor(seen.view.got, seen.view.exact, -1)
    is_near = bool(((found - 1).abs() < _NEAR_ONE).all())
    words = (
        f"each row of out is exact attention times a factor of its own ({float(found.min()):.4f} to {float(found.max()):.4f}):"
        f" is the denominator {'rounded, or summed in a smaller dtype' if is_near else 'that of all keys'}?"
    )
    yield fault("denominator-off", words, of_rows)


def factor(got: torch.Tensor, exact: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Return by which factor the exact result comes nearest to the other along dimensions, 1 where it is 0."""
    size = exact.square().sum(dim, keepdim=True)
    overlap = (got.double().nan_to_num(0, 0, 0) * exact).sum(dim, keepdim=True)
    return (overlap / size).where(size > 0, 1.0)


_SPLITS = (2, 3, 4, 8)


@dataclass(frozen=True, eq=False)
class OnlineRows:
    """Rows of out of one batch entry. by_tile, by_split: what was computed of them, for several hypotheses."""

    view: View
    scores: RegionScores
    by_tile: dict[int, dict[str, _Sums]] = field(default_factory=dict)
    by_split: dict[tuple[int, int], _Splits] = field(default_factory=dict)

    @classmethod
    def of(cls, got: torch.Tensor, reference: Reference, region: Region, bad: torch.Tensor | None) -> OnlineRows:
        """Return what is seen of out, heads-first, in a region."""
        scores = RegionScores(reference.inputs, reference.inputs.workload, region)
        expected = reference.tensors["out"]
        mine, exact, std = (scores.of_rows(t) for t in (got, expected.value, expected.tau))
        return cls(View(mine, exact, std, None if bad is None else scores.of_rows(bad)), scores)

    def sums(self, tile: int) -> dict[str, _Sums]:
        """Return the sums of an online softmax over tiles of keys."""
        if tile not in self.by_tile:
            self.by_tile[tile] = _tile_by_tile(self.scores, tile)
        return self.by_tile[tile]

    def splits(self, tile: int, number: int) -> _Splits:
        """Return the results of splits of the keys, alone."""
        if (tile, number) not in self.by_split:
            self.by_split[tile, number] = _split_by_split(self.scores, _split_of_keys(self.scores, tile, number), number)
        return self.by_split[tile, number]

    def prediction(self, out: torch.Tensor, variance: Callable[[], torch.Tensor], dtype: str = "") -> Prediction:
        """Return out with what is rounded on the way to it. variance: of P v, in squared units of a dtype, that of out."""
        unit = UNIT[dtype or self.scores.workload.out_dtype]
        return Prediction(out, lambda: (self.view.std.double().square() + (variance() + out.square()) * unit**2).sqrt())


OnlineFault: TypeAlias = FaultHypothesis[OnlineRows]


def faults_of_running_sums(seen: OnlineRows) -> Iterator[OnlineFault]:
    """Yield the faults of an online softmax. seen: those rows which are looked at first."""
    found: list[torch.Tensor] = []
    for tile in TILES:
        if seen.scores.scores.shape[-1] > tile:
            yield from _of_tiles(tile)
        for number in _SPLITS:
            splits = _split_of_keys(seen.scores, tile, number)
            if int(splits.max()) == number - 1 and not any(splits.equal(other) for other in found):
                found.append(splits)
                yield from _of_splits(tile, number, seen.scores)


def _of_tiles(tile: int) -> Iterator[OnlineFault]:
    def predict(acc: str, total: str, variance: str, seen: OnlineRows) -> Prediction:
        sums = seen.sums(tile)
        by = sums[total].total
        return seen.prediction(sums[acc].acc / by, lambda: sums[variance].variance / by.square())

    for name, which, more in (
        ("sum-not-rescaled", ("plain", "right", "plain"), ""),
        ("denominator-not-rescaled", ("right", "plain", "plain"), ""),
        ("sum-not-rescaled", ("plain", "plain", "plain"), ", nor is the denominator"),
        ("rescaled-inversely", ("inverse", "right", "inverse"), ""),
        ("p-below-maximum-of-tile", ("local", "local", "local"), ""),
    ):
        words = f"out is that of an online softmax in which {FAULTS[name]}{more} (tiles of {tile} keys)"
        yield FaultHypothesis(name, words, partial(predict, *which), OF_STEPS)


def _of_splits(tile: int, number: int, part: RegionScores) -> Iterator[OnlineFault]:
    def fault(name: str, weigh: Callable[..., torch.Tensor], more: str = "") -> OnlineFault:
        def predict(seen: OnlineRows) -> Prediction:
            splits = seen.splits(tile, number)
            weights = weigh(splits.lse).nan_to_num(0)
            out = (weights * splits.out).sum(0) * splits.of_keys
            return seen.prediction(out, lambda: (weights.square() * splits.variance()).sum(0))

        return FaultHypothesis(
            name, f"out is that of an online softmax in which {number} {FAULTS[name]}{more}", predict, OF_STEPS
        )

    yield fault("splits-averaged", lambda lse: torch.full_like(lse, 1 / number))
    yield fault("splits-merged-in-base-2", lambda lse: (lse * math.log(2)).softmax(0))
    yield fault("splits-merged-as-natural", lambda lse: (lse / math.log(2)).softmax(0))
    for whose, order in other_places(part.scores.shape[1], few=True):
        yield fault("splits-merged-by-another-head", lambda lse, order=order: lse[:, :, order].softmax(0), f": {whose}")
    rows, last = part.rows, int(part.rows[-1]) + 1
    for several in (last, *(tile for tile in TILES if tile < last)):
        at = torch.searchsorted(rows, rows // several * several)
        if rows[at].equal(rows // several * several):  # of all of these the region has the first
            first = f": that of the first of {several}"
            yield fault("splits-merged-by-another-row", lambda lse, at=at: lse[:, :, :, at].softmax(0), first)


# -- tile by tile ------------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """P v and the denominator of an online softmax, and the variance of P v, in units squared."""

    acc: torch.Tensor
    total: torch.Tensor
    variance: torch.Tensor

    def with_tile(self, of_tile: _Sums, kept: torch.Tensor | float, added: torch.Tensor | float = 1.0) -> _Sums:
        """Return the sums with those of one tile more. kept, added: the factors of either."""
        factors = (kept, added), (kept, added), (kept**2, added**2)
        return _Sums(*(old * a + new * b for old, new, (a, b) in zip(self, of_tile, factors, strict=True)))


def _tile_by_tile(part: RegionScores, tile: int) -> dict[str, _Sums]:
    """Visit tiles of keys one after the other; return right and wrong sums, (1, heads, rows, dim), and 1 for dim of totals.

    plain: nothing is rescaled. inverse: by the inverse of the factor. local: each tile has its own maximum.
    """
    scores, squares = part.scores, part.v.square()
    top = scores.new_full((*scores.shape[:3], 1), -math.inf)
    nothing = scores.new_zeros((*scores.shape[:3], part.v.shape[-1]))
    sums = dict.fromkeys(("right", "plain", "inverse", "local"), _Sums(nothing, scores.new_zeros(top.shape), nothing))
    for start in range(0, scores.shape[-1], tile):
        keys = slice(start, start + tile)
        largest = scores[..., keys].amax(-1, keepdim=True)
        new = top.maximum(largest)
        shift = new.masked_fill(new == -math.inf, 0)
        p, factor = (scores[..., keys] - shift).exp(), (top - shift).exp()
        of_tile = _Sums(over_keys(p, part.v[:, :, keys]), p.sum(-1, keepdim=True), over_keys(p.square(), squares[:, :, keys]))
        sums = {
            "right": sums["right"].with_tile(of_tile, factor),
            "plain": sums["plain"].with_tile(of_tile, 1.0),
            "inverse": sums["inverse"].with_tile(of_tile, (1 / factor).masked_fill(factor == 0, 0)),
            "local": sums["local"].with_tile(of_tile, factor, (shift - largest).exp().nan_to_num(0, 0, 0)),
        }
        top = new
    sink = _share_of_sink(part, top)
    return {name: one._replace(total=(one.total + sink).clamp(min=1e-300)) for name, one in sums.items()}


def _share_of_sink(part: RegionScores, top: torch.Tensor) -> torch.Tensor | float:
    sinks = sinks_of(part)
    return 0.0 if sinks is None else (sinks - top).exp()


#: steps of a sum above which repeating it takes long
_MOST_STEPS = 256


def sums_in_few_bits(seen: OnlineRows) -> Iterator[OnlineFault]:
    """Yield sums of P v that are rounded as they are formed, with the last maximum (tile 0) or that of the tiles so far."""
    keys, of_out = seen.scores.scores.shape[-1], seen.scores.workload.out_dtype
    names = ("bfloat16", "float16") if of_out == "float32" else (of_out,)
    steps = {**{step: f"every {step} keys" for step in (*TILES, 8)}, 1: "each key"}
    for name, tile, step, in_dtype in itertools.product(names, (0, *TILES), steps, (False, True)):
        if step < keys <= _MOST_STEPS * step and (not tile or step in (tile, TILES[-1])):
            terms = ", and so is each of its terms" if in_dtype else ""
            words = f"out is that of a sum of P v that is rounded to {name} after {steps[step]}{terms}"
            summed = partial(_summed, name, tile, step, in_dtype)
            yield FaultHypothesis("sums-in-few-bits", words + f" (tiles of {tile} keys)" * (tile > 0), summed, OF_STEPS)


def _summed(dtype: str, tile: int, step: int, in_dtype: bool, seen: OnlineRows) -> Prediction:
    part, of_sums, of_out = seen.scores, getattr(torch, dtype), getattr(torch, seen.scores.workload.out_dtype)
    of_terms = of_sums if in_dtype else torch.float64
    top = part.scores.new_full((), -math.inf) if tile else part.scores.amax(-1, keepdim=True)
    total, acc = torch.zeros_like(top), torch.zeros_like(seen.view.exact)
    for scores, v in zip(torch.split(part.scores, tile or step, -1), torch.split(part.v, tile or step, 2), strict=True):
        new = top.maximum(scores.amax(-1, keepdim=True))
        shift = new.masked_fill(new == -math.inf, 0)
        p, kept = (scores - shift).exp(), (top - shift).exp()
        total, acc, top = total * kept + p.sum(-1, keepdim=True), (acc * kept).to(of_terms).double(), new
        for some, of_some in zip(torch.split(p.to(of_out).double(), step, -1), torch.split(v, step, 2), strict=True):
            acc = (acc + over_keys(some, of_some).to(of_terms)).to(of_sums).double()
    out = (acc / (total + _share_of_sink(part, top)).clamp(min=1e-300)).to(of_out).double()
    p = weights_given(part.scores, part.scores.logsumexp(-1, keepdim=True))
    return seen.prediction(out, lambda: over_keys(p.square(), part.v.square()), dtype)


# -- split by split -------------------------------------------------------------------------------------------------------


class _Splits(NamedTuple):
    """Results of splits of the keys alone: lse (splits, 1, heads, rows, 1), out and the variance of P v (splits, ..., dim).

    of_keys: the share of each row's keys, without its sink, (1, heads, rows, 1).
    """

    lse: torch.Tensor
    out: torch.Tensor
    variance: Callable[[], torch.Tensor]
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
    each_p = [weights_given(scores, lse) for scores, lse in zip(every, lses, strict=True)]
    of_keys = 1 / (1 + _share_of_sink(part, lses.logsumexp(0)))  # the rest is the sink's
    outs = torch.stack([over_keys(p, part.v) for p in each_p])
    squares = part.v.square()
    return _Splits(lses, outs, lambda: torch.stack([over_keys(p.square(), squares) for p in each_p]), torch.as_tensor(of_keys))


# -- keys that count never or twice: fitted, then tried as any fault ---------------------------------------------------------

# Where keys of weight P_ij count m_j times, row i of out is o_i = sum_j m_j P_ij v_j / sum_j m_j P_ij, so that sum_j m_j P_ij
# (v_j - o_i) = 0: linear in m, with an equation for each element of out.

#: keys above which only the end of those that are seen is fitted, and rows of heads by which that is
_MOST_KEYS, _ROWS = 1024, 4
#: squared ratio of a key's share to its noise, from which it is known how often it counts
_KNOWN = 25.0
#: by how much a count may be off a whole number, and for which part of the keys
_NEAR_COUNT, _MOST_CLEAR = 0.35, 0.95
_LONGEST_PERIOD = 256


def faults_of_counts(w: Workload, seen: OnlineRows) -> Iterator[AttentionFault]:
    """Yield attention in which some keys count never, or twice, as what is seen has them; nothing where it has none."""
    p = weights_given(seen.scores.scores, seen.scores.scores.logsumexp(-1, keepdim=True))
    v = seen.scores.v.repeat_interleave(p.shape[1] // seen.scores.v.shape[1], 1)
    got, keys = seen.view.got.double(), p.shape[-1]
    if w.sinks or w.dropout or w.is_quantized or not bool(got.isfinite().all()):
        return
    if keys > _MOST_KEYS or got.numel() < 2 * keys:
        found = _end_of_seen(p, v, got, seen.view.bad)
        ends = (max(round(found / step), 1) * step for step in (1024, 256, 64, 16, 1))
        for end in dict.fromkeys(ends):  # what the last keys weigh is less than the noise of all
            if end < keys:
                yield _fault(w, "keys-beyond-unseen", f"without the keys from {end} on", 0, partial(_between, end, keys))
        return
    counts, known = _counts(p[0], v[0], got[0], float(seen.view.std.double().square().mean()))
    whole = counts.round()
    is_clear = (counts - whole).abs() <= _NEAR_COUNT
    if len(known) and float(is_clear.double().mean()) >= _MOST_CLEAR:
        known, whole = known[is_clear], whole[is_clear]
        for count in (0, 2):
            if bool((whole == count).any()) and bool(((whole == count) | (whole == 1)).all()):
                yield from _patterns(w, known, whole == count, count, keys)


def _counts(p: torch.Tensor, v: torch.Tensor, out: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often keys count, in units of what most count, and which keys these are, of (heads, rows, keys or dim)."""
    crossed = p * (out @ v.mT)
    gram = (p.mT @ p) * (v @ v.mT) - crossed.mT @ p - p.mT @ crossed + (p * out.square().sum(-1, keepdim=True)).mT @ p
    gram = gram.sum(0) / max(noise, 1e-300)
    found = torch.linalg.solve(gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device), gram.new_ones(len(gram)))
    known = (gram.diagonal() > _KNOWN).nonzero().flatten()
    some = found[known]
    if not len(some):
        return some, known
    return some / some[some > 0.4 * some.max()].median(), known


def _patterns(w: Workload, known: torch.Tensor, differs: torch.Tensor, count: int, keys: int) -> Iterator[AttentionFault]:
    """Yield a span of keys that count so, or a period of them. known: keys, ascending; differs: whether they count so."""
    what = "without" if count == 0 else "that counts twice"
    those, others = known[differs], known[~differs]
    first, last = int(those[0]), int(those[-1])
    inside = others[(others > first) & (others < last)]
    if not len(inside):
        before, after = others[others < first], others[others > last]
        start = _rounded_down(int(before[-1]) + 1 if len(before) else 0, first)
        end = int(after[0]) if len(after) else keys
        end = end if end == keys else _rounded_down(last + 1, end)
        where = f"{start} to {end - 1}" if end < keys else f"from {start} on"
        fault = "keys-counted-twice" if count else "keys-beyond-unseen" if end == keys else "keys-unseen"
        yield _fault(w, fault, f"{what} the keys {where}", count, partial(_between, start, end))
        return
    for step in range(2, min(_LONGEST_PERIOD, keys // 2) + 1):
        phases = sorted(set((those % step).tolist()))
        if not bool(_at_phases(step, phases, others).any()):
            places = f"at {phases[0]}" + (f" to {phases[-1]}" if len(phases) > 1 else "")
            words = f"{what} {len(phases)} of each {step} keys ({places} modulo {step})"
            fault = "keys-counted-twice" if count else "keys-missing-with-a-period"
            yield _fault(w, fault, words, count, partial(_at_phases, step, phases))
            return


def _rounded_down(least: int, most: int) -> int:
    """Return the roundest number from `least` to `most`: what lies between is not known."""
    for power in (256, 128, 64, 32, 16, 8, 4, 2):
        if -(-least // power) * power <= most:
            return -(-least // power) * power
    return most


def _between(start: int, end: int, kv: torch.Tensor) -> torch.Tensor:
    return (kv >= start) & (kv < end)


def _at_phases(step: int, phases: list[int], kv: torch.Tensor) -> torch.Tensor:
    return torch.isin(kv % step, kv.new_tensor(phases))


def _fault(w: Workload, fault: str, words: str, count: int, differs: Callable[[torch.Tensor], torch.Tensor]) -> AttentionFault:
    def attention(inputs: Inputs) -> Other:
        if count:
            more = math.log(count)
            return inputs, w.replace(score_mod=modified_by(w, lambda s, b, h, q, kv: s + more * differs(kv)))
        visible = seen_by(inputs, w)

        def shown(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return visible(b, h, q, kv) & ~differs(kv)

        return inputs, w.replace(mask=shown)

    return AttentionFault(fault, words, attention)


def _end_of_seen(p: torch.Tensor, v: torch.Tensor, got: torch.Tensor, bad: torch.Tensor | None) -> int:
    """Return before which key those end that some wrong rows see, by what leaves least of them."""
    places = (got[..., 0] > -math.inf if bad is None else bad)[0].nonzero()[:_ROWS].tolist()
    left: torch.Tensor | float = 0.0
    for head, row in places:
        weights = p[0, head, row, :, None]
        partial_sums = (weights * v[0, head]).cumsum(0) / weights.cumsum(0).clamp(min=1e-300)
        left = left + (partial_sums - got[0, head, row]).square().sum(-1)
    return int(left.argmin()) + 1 if isinstance(left, torch.Tensor) else 0


# -- tiles in which a row sees nothing ---------------------------------------------------------------------------------------


def blind_tile(bad: torch.Tensor, reference: Reference) -> int:
    """Return the size of tiles for which the wrong rows are just those that see no key in the first tile visited; else 0."""
    parts = [] if reference.inputs.workload.is_packed else _whole_parts(bad, reference)
    blind = (tile for tile in TILES if all(bool((_is_blind(part, tile) == part.of_rows(bad)).all()) for part in parts))
    return next(blind, 0) if parts else 0


def _whole_parts(bad: torch.Tensor, reference: Reference) -> list[RegionScores]:
    """Return all regions of out; none where some rows or keys would be left out."""
    regions = list(regions_of(reference, "dq", bad))
    are_whole = all(region.rows is None for region in regions)
    return [RegionScores(reference.inputs, reference.inputs.workload, region) for region in regions] if are_whole else []


def blind_split(bad: torch.Tensor, reference: Reference) -> tuple[int, int]:
    """Return the number and tiles of splits for which the wrong rows are those that see no key in one of them; else 0, 0."""
    w = reference.inputs.workload
    if w.kv_lens or bool(bad.all()) or not (parts := _whole_parts(bad, reference)):  # padding that is read makes NaN as well
        return 0, 0
    for number, tile in itertools.product(_SPLITS, reversed(TILES)):
        size = math.ceil(math.ceil(w.kv_len / tile) / number) * tile
        if size * (number - 1) < w.kv_len and all(bool((_sees_part(part, size) == part.of_rows(bad)).all()) for part in parts):
            return number, tile
    return 0, 0


def _sees_part(part: RegionScores, size: int) -> torch.Tensor:
    """Return (1, heads, rows): whether a row sees keys, but none in one of the splits, each of so many keys."""
    seen = torch.split(part.scores > -math.inf, size, -1)
    each = torch.stack([split.any(-1) for split in seen])
    return each.any(0) & ~each.all(0)


def _is_blind(part: RegionScores, tile: int) -> torch.Tensor:
    """Return (1, heads, rows): whether a row sees keys, but none in the first tile that its tile of rows visits."""
    seen, (first, _) = part.scores > -math.inf, _visited(part, tile)
    in_first = part.at // tile == first.unsqueeze(-1)
    return seen.any(-1) & ~(seen & in_first).any(-1)


#: how far lse or a maximum, and a weight, may be from the one that explains it, as a part of its size
_NEAR, _NEAR_WEIGHT = 1e-4, 0.02
#: scores above which no other lse is computed
_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class WholeResult:
    """All of lse, of the weights or of the maxima, (batch, heads, rows, keys), with 1 for the keys of those that have none."""

    view: View
    reference: Reference

    @classmethod
    def of(cls, name: str, got: torch.Tensor, reference: Reference) -> WholeResult:
        """Return what is seen of a heads-first result."""
        exact = _with_keys(reference.tensors[name].value)
        return cls(View(_with_keys(got), exact, torch.zeros_like(exact)), reference)

    @cached_property
    def results(self) -> dict[str, torch.Tensor]:
        """Exact lse, weights and maxima."""
        seen, extra = self.reference, ("weights", "max")
        computed = compute_reference(seen.inputs, seen.precision, rows=seen.rows, extra=extra)
        return {name: computed.tensors[name].value for name in ("lse", "weights", "max")}


ResultFault: TypeAlias = FaultHypothesis[WholeResult]
#: what else a result may be, heads-first
Value: TypeAlias = Callable[[WholeResult], torch.Tensor]


def _with_keys(result: torch.Tensor) -> torch.Tensor:
    return result if result.dim() == 4 else result.unsqueeze(-1)


def _hypothesis(fault: str, words: str, value: Value, near: float = _NEAR, floor: float = 1.0) -> ResultFault:
    """Return what predicts a value; elements may be off by a part of their size, or of `floor` where they are small.

    There is no prediction where it leaves most of the deviation from the exact result, as of a fault that does not change it.
    """

    def predict(seen: WholeResult) -> Prediction:
        got, exact = seen.view.got.double(), seen.view.exact.to(seen.view.got.device)
        found = _with_keys(value(seen)).to(got.device)
        left, deviation = ((got - other).nan_to_num(0, 0, 0) for other in (found, exact))
        is_off = bool((deviation.abs() > LSE_TOLERANCE * (1 + exact.abs())).any())
        if not found.isfinite().equal(got.isfinite()) or (is_off and left.norm() > deviation.norm() / 2):
            raise ValueError
        return Prediction(found, lambda: near * (floor + found.abs()))

    return FaultHypothesis(fault, words, predict, OF_FLOAT32)


# -- lse -------------------------------------------------------------------------------------------------------------------


def faults_of_lse(w: Workload, reference: Reference) -> Iterator[ResultFault]:
    """Yield what lse may be, the cheapest to find out first."""
    twice = "ln 2: it was converted from base 2 twice, or is natural where lse_base=2 is said"
    base_2 = "log2 e: it is in base 2 (where that is meant, the marker says lse_base=2)"
    for fault, factor, shift, words in (
        ("lse-base-2", 1 / math.log(2), 0.0, f"off by a factor of {base_2}"),
        ("lse-converted-twice", math.log(2), 0.0, f"off by a factor of {twice}"),
        ("lse-negative", -1.0, 0.0, "off by a factor of -1"),
        ("lse-ln-2-too-large", 1.0, math.log(2), "ln 2 too large in every row"),
        ("lse-ln-2-too-small", 1.0, -math.log(2), "ln 2 too small in every row"),
    ):
        yield _hypothesis(fault, f"lse is {words}", partial(_scaled, factor, shift))
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        predict = partial(_rounded_to, dtype)
        yield FaultHypothesis("lse-rounded", f"lse is rounded to {name}; float32 expected", predict, OF_FLOAT32)
    if not reference.is_sampled:
        for one, other, order in ((1, 2, "(batch, rows, heads)"), (0, 1, "(heads, batch, rows)")):
            words = f"lse lies in memory as {order}; (batch, heads, rows) expected"
            yield _hypothesis("lse-layout", words, partial(_swapped, one, other, False), LSE_TOLERANCE)
            words = f"lse is read as {order}, which it is not, and transposed"
            yield _hypothesis("lse-layout", words, partial(_swapped, one, other, True), LSE_TOLERANCE)
    if score_elements(w) > _ELEMENTS:
        return
    words = "lse is the logarithm of the sum relative to the row's maximum: the maximum is not added"
    yield _hypothesis("lse-without-maximum", words, lambda seen: _exact(seen) - seen.results["max"])
    if w.sinks:
        yield _hypothesis("lse-without-maximum", words, lambda seen: _exact(seen) - _maxima_with_sinks(seen))
    words = "lse is the row's maximum: the logarithm of the sum is not added"
    yield _hypothesis("lse-is-maximum", words, lambda seen: seen.results["max"])
    for likely in (*attention_faults(w, reference.inputs), *rounded_scores(w)):
        yield _hypothesis(likely.fault, f"lse is that of attention {likely.words}", partial(_of_attention, likely))


def _exact(seen: WholeResult) -> torch.Tensor:
    return seen.reference.tensors["lse"].value


def _scaled(factor: float, shift: float, seen: WholeResult) -> torch.Tensor:
    return _exact(seen) * factor + shift


def _rounded_to(dtype: torch.dtype, seen: WholeResult) -> Prediction:
    """Predict the numbers of a smaller dtype which are nearest to the exact ones; there is none for others."""
    exact, rounded = seen.view.exact, seen.view.got.to(dtype)
    if not bool(((rounded.to(seen.view.got.dtype) == seen.view.got) | ~seen.view.got.isfinite()).all()):
        raise ValueError
    return Prediction(exact, lambda: exact.abs() * torch.finfo(dtype).eps)


def _swapped(one: int, other: int, is_read: bool, seen: WholeResult) -> torch.Tensor:
    """Return lse as it lies in memory with two dimensions swapped, which shapes need not show, or as it is read then."""
    exact = _exact(seen)
    if exact.shape[one] == 1 or exact.shape[other] == 1:
        raise ValueError
    swapped = exact.transpose(one, other)
    return exact.reshape(swapped.shape).transpose(one, other) if is_read else swapped.reshape(exact.shape)


def _of_attention(fault: AttentionFault, seen: WholeResult) -> torch.Tensor:
    inputs, w = fault.attention(seen.reference.inputs)
    reference = seen.reference
    return compute_reference(inputs, reference.precision, rows=reference.rows, workload=w).tensors["lse"].value


def _maxima_with_sinks(seen: WholeResult) -> torch.Tensor:
    """Return the largest final score of each row, or its sink, heads-first."""
    maxima, sinks = seen.results["max"], seen.reference.inputs.sinks
    return maxima if sinks is None else maxima.maximum(sinks.to(maxima.device).double()[:, None])


# -- weights and maxima ----------------------------------------------------------------------------------------------------


def faults_of_extra(name: str, reference: Reference) -> Iterator[ResultFault]:
    """Yield what the "weights" or the "max" may be."""
    near, floor = (_NEAR_WEIGHT, 1e-4) if name == "weights" else (_NEAR, 1.0)
    if not reference.is_sampled:
        for fault, words, value in _other_maxima(reference) if name == "max" else _other_weights(reference):
            yield _hypothesis(fault, f"{name} is {words}", value, near, floor)


def _other_maxima(reference: Reference) -> Iterator[tuple[str, str, Value]]:
    scale = reference.inputs.workload.softmax_scale
    words = "in base 2: log2 e times the maximum (say lse_base=2 if that is meant)"
    yield "max-base-2", words, lambda r: r.results["max"] / math.log(2)
    yield "max-converted-twice", "converted from base 2 once too often", lambda r: r.results["max"] * math.log(2)
    yield "max-before-scale", "the maximum before the scale", lambda r: r.results["max"] / scale
    yield "max-is-lse", "lse, not the maximum", lambda r: r.results["lse"]


def _other_weights(reference: Reference) -> Iterator[tuple[str, str, Value]]:
    w = reference.inputs.workload

    def weights(r: WholeResult) -> torch.Tensor:
        return r.results["weights"]

    def sums(r: WholeResult) -> torch.Tensor:
        return _beside_keys((r.results["lse"] - r.results["max"]).exp())

    yield "weights-not-divided", "not divided by the row's sum: exp(score - max)", lambda r: weights(r) * sums(r)
    words = "exp(score), neither shifted nor divided"
    yield "weights-not-shifted", words, lambda r: weights(r) * _beside_keys(r.results["lse"].exp())
    words = "the scores: the softmax is missing"
    yield "weights-are-scores", words, lambda r: weights(r).log() + _beside_keys(r.results["lse"])
    yield "weights-are-logarithms", "the logarithms of the weights", lambda r: weights(r).log()
    if w.sinks:
        words = "divided by the row's sum without its sink"
        yield "weights-without-sink", words, lambda r: weights(r) / _beside_keys(weights(r).sum(-1))
    if w.heads > 1:
        mean: Value = lambda r: weights(r).mean(1, keepdim=True).expand_as(weights(r))  # noqa: E731
        yield "weights-averaged-over-heads", "the mean over all heads", mean
    if w.q_len == w.kv_len:
        yield "weights-transposed", "transposed: (batch, heads, keys, rows)", lambda r: weights(r).mT


def _beside_keys(rows: torch.Tensor) -> torch.Tensor:
    """Return one number per row, -inf as 0, beside the keys."""
    return rows.masked_fill(rows == -math.inf, 0).unsqueeze(-1)
