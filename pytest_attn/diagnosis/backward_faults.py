"""The faults that backward passes are known for, each as one step of exact attention's backward pass that is changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TypeAlias

import torch

from pytest_attn.correctness.arithmetic import modify, over_keys, sinks_of, softmax
from pytest_attn.correctness.reference import Reference
from pytest_attn.diagnosis.attention_faults import TILES, attention_faults, read_heads_first, read_rows_first
from pytest_attn.diagnosis.faults import RECOMPUTED
from pytest_attn.diagnosis.hypothesis import OF_STEPS, AttentionFault, FaultHypothesis, Prediction, Tolerance, View
from pytest_attn.diagnosis.steps import AttentionSteps, Region, RegionScores, honest_steps
from pytest_attn.reports.lines import told_apart
from pytest_attn.workloads.workload import Workload, sequence_lengths

#: of a gradient that is a multiple of the exact one: it has that one's budget, and little is left of what it is off
_OF_A_FACTOR = Tolerance(element=8.0, left=0.1)


# -- whole gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WholeGradient:
    """All of a gradient, heads-first."""

    view: View
    reference: Reference

    @classmethod
    def of(cls, name: str, got: torch.Tensor, reference: Reference, bad: torch.Tensor | None) -> WholeGradient:
        """Return what is seen of a gradient."""
        expected = reference.tensors[name]
        return cls(View(got.to(expected.value.device), expected.value, expected.tau, bad), reference)


def multiples_of_gradient(name: str, w: Workload, slope: float) -> Iterator[FaultHypothesis[WholeGradient]]:
    """Yield factors that a gradient has too much, or lacks. slope: of what was returned over the exact gradient."""
    scale = w.softmax_scale
    for fault, factor, words in (
        ("gradient-scale-missing", 1 / scale, "the factor softmax_scale is missing"),
        ("gradient-scale-applied-twice", scale, "the factor softmax_scale was applied twice"),
        (
            "gradient-averaged-over-group",
            1 / w.group,
            f"it looks like the mean over the {w.group} query heads of a group, not their sum",
        ),
        ("gradient-sign-flipped", -1.0, "its sign is flipped"),
        ("gradient-ln-2-too-much", math.log(2), "a factor of ln 2 too much"),
        ("gradient-ln-2-missing", 1 / math.log(2), "a factor of ln 2 is missing"),
        ("softcap-slope-scaled", w.softcap or 1.0, "softcap's derivative has a factor softcap too much"),
        ("softcap-slope-scaled", 1 / (w.softcap or 1.0), "softcap's derivative lacks a factor softcap"),
        ("dropout-not-rescaled", 1 - w.dropout, "what dropout leaves is not divided by 1 - dropout"),
    ):
        if factor != 1:
            words = f"{name} is {slope:.4g} times the exact gradient: {words}"
            yield FaultHypothesis(fault, words, partial(_multiple, factor), _OF_A_FACTOR)


def scaled_gradient(name: str, slope: float) -> FaultHypothesis[WholeGradient]:
    """Return the hypothesis that a gradient is off by a factor that has no other name. slope: as above."""
    words = f"{name} is {told_apart(slope, 1, 4)[0]} times the exact gradient: is a factor of a derivative wrong?"
    return FaultHypothesis("gradient-scaled", words, partial(_multiple, slope), OF_STEPS)


def _multiple(factor: float, seen: WholeGradient) -> Prediction:
    return Prediction(seen.view.exact * factor, lambda: seen.view.std * max(abs(factor), 1.0))


def swapped_gradients(name: str) -> Iterator[FaultHypothesis[WholeGradient]]:
    """Yield other gradients that this one may hold: dq, too, without its part that goes through a bias made of q."""
    if name == "dq":
        words = "dq lacks what comes through the bias, which is made of q"
        yield FaultHypothesis("bias-path-missing", words, _without_path_of_bias, OF_STEPS)
    for other in sorted({"dq", "dk", "dv"} - {name}):
        yield FaultHypothesis("gradients-swapped", f"{name} holds {other}", partial(_other_gradient, other), OF_STEPS)


def _other_gradient(other: str, seen: WholeGradient) -> Prediction:
    expected = seen.reference.tensors[other]
    if not bool(seen.view.exact.any()):
        raise ValueError
    return Prediction(expected.value, lambda: expected.tau)


def _without_path_of_bias(seen: WholeGradient) -> Prediction:
    if (path := seen.reference.path_of_bias) is None:
        raise ValueError
    return Prediction(seen.view.exact - path, lambda: seen.view.std)


# -- steps -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GradientOfRegion:
    """Some rows of dq, or keys of dk or dv, with the steps by which they come about."""

    name: str
    got: torch.Tensor
    reference: Reference
    region: Region
    bad: torch.Tensor | None

    @cached_property
    def honest(self) -> AttentionSteps:
        """The right steps."""
        return honest_steps(self.reference, self.region)

    @cached_property
    def view(self) -> View:
        """The region of the gradient."""
        scores, expected = self.honest.region, self.reference.tensors[self.name]
        select, device = scores.of_rows if self.name == "dq" else scores.of_keys, scores.scores.device
        got, exact, std = (select(t).to(device) for t in (self.got, expected.value, expected.tau))
        return View(got, exact, std, None if self.bad is None else select(self.bad).to(device))


Hypothesis: TypeAlias = FaultHypothesis[GradientOfRegion]
#: makes the steps with the fault from what is seen; raises ValueError where a region cannot show it
Changed: TypeAlias = Callable[[GradientOfRegion], AttentionSteps]


def faults_of_steps(name: str, reference: Reference) -> Iterator[Hypothesis]:
    """Yield likely faults of "dq", "dk" or "dv", of those that amount to the same the plainest first."""
    for fault, words, changed in _changed_steps(name, reference):
        words = f"{name} is that of a backward pass {words}"
        yield FaultHypothesis(fault, words, partial(_gradient, changed), OF_STEPS)


def _gradient(changed: Changed, seen: GradientOfRegion) -> Prediction:
    steps = changed(seen)
    value = steps.gradient(seen.name)
    return Prediction(value, lambda: (seen.view.std.double().square() + steps.variance(seen.name, value)).sqrt())


def _changed_steps(name: str, reference: Reference) -> Iterator[tuple[str, str, Changed]]:
    w = reference.inputs.workload
    yield "d-missing", "without D: dS = P * dP", _replaced(dscores=lambda p, dp, d: p * dp)
    yield "d-added", "that adds D: dS = P * (dP + D)", _replaced(dscores=lambda p, dp, d: p * (dp + d))
    yield "p-missing-in-ds", "without P in dS: dS = dP - D", _replaced(dscores=lambda p, dp, d: (dp - d) * (p > 0))
    if w.heads > 1:
        yield "d-of-next-head", "with D of the next head", partial(_with_row_sum_of, -1)
        yield "d-of-previous-head", "with D of the head before", partial(_with_row_sum_of, 1)
    yield from _of_lse(w)
    yield from _of_slopes(w)
    for tile in TILES if name != "dv" else ():
        if w.kv_len > tile:
            words = f"through the maximum of each tile of {tile} keys, which is not detached where results are merged"
            yield "maximum-not-detached", words, partial(_through_maxima, tile)
    if name == "dv":
        yield "dv-without-denominator", "that takes P without its denominator", _without_denominator
    if name != "dq":
        yield from _of_groups(w)
        for tile in TILES[1:]:
            words = f"that keeps only the last tile of {tile} rows: its share overwrites the others"
            yield "row-tiles-overwrite", words, partial(_of_last_tile, tile)
    for fault in attention_faults(w, reference.inputs):
        scores = lru_cache(1)(partial(_scores_of, fault))
        yield RECOMPUTED + fault.fault, f"that recomputes P {fault.words}", partial(_with_p_of, scores)
        yield fault.fault, f"of attention {fault.words}", partial(_of_attention, scores)


def _replaced(**steps: object) -> Changed:
    """Return what replaces steps by others that no region needs to tell."""
    return lambda seen: dataclasses.replace(seen.honest, **steps)  # type: ignore[arg-type]


def _through_maxima(tile: int, seen: GradientOfRegion) -> AttentionSteps:
    """Add to dS of each tile's largest score what all of the tile have: exp(maximum - M) is differentiated, too."""
    _require_all_keys(seen)
    scores = seen.honest.region.scores

    def dscores(p: torch.Tensor, dp: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        ds = p * (dp - d)
        tiles = zip(torch.split(ds, tile, -1), torch.split(scores, tile, -1), strict=True)
        more = [part.new_zeros(part.shape).scatter(-1, of.argmax(-1, True), part.sum(-1, True)) for part, of in tiles]
        return ds + torch.cat(more, -1)

    return dataclasses.replace(seen.honest, dscores=dscores)


def _with_row_sum_of(shift: int, seen: GradientOfRegion) -> AttentionSteps:
    return dataclasses.replace(seen.honest, row_sum=seen.honest.row_sum.roll(shift, 1))


def _of_lse(w: Workload) -> Iterator[tuple[str, str, Changed]]:
    def with_lse(changed: Callable[..., torch.Tensor]) -> Changed:
        return lambda seen: dataclasses.replace(seen.honest, lse=changed(seen.honest.lse))

    yield "lse-missing-in-backward", "that recomputes P without lse: exp(s)", with_lse(lambda lse: lse * 0)
    yield "lse-taken-for-base-2", "that takes lse for one of base 2", with_lse(lambda lse: lse * math.log(2))
    yield "lse-taken-for-natural", "that takes lse of base 2 for a natural one", with_lse(lambda lse: lse / math.log(2))
    for dtype in (torch.bfloat16, torch.float16):
        words = f"that takes lse rounded to {str(dtype).removeprefix('torch.')}"
        yield "lse-rounded", words, with_lse(lambda lse, dtype=dtype: lse.to(dtype).double())
    if w.batch > 1 and not w.is_packed:
        yield "lse-of-first-batch-entry", "with lse of the first batch entry for all", _with_lse_of_first
    if w.heads > 1:
        yield "lse-of-next-head", "with lse of the next head", with_lse(lambda lse: lse.roll(-1, 1))
    for is_read, lies, read in (
        ("(batch, heads, rows)", "(batch, rows, heads)", read_heads_first),
        ("(batch, rows, heads)", "(batch, heads, rows)", read_rows_first),
    ):
        if w.heads > 1 and not w.is_packed:
            words = f"that reads lse as {is_read}, where it lies as {lies}"
            yield RECOMPUTED + "lse-layout", words, partial(_with_lse_read, read)
    if w.sinks:
        yield "sink-missing-in-lse", "that recomputes P without the sink's share of lse", _without_sink


def _with_lse_of_first(seen: GradientOfRegion) -> AttentionSteps:
    first = seen.reference.tensors["lse"].value[:1, :, seen.honest.region.rows].unsqueeze(-1)
    return dataclasses.replace(seen.honest, lse=first)


def _with_lse_read(read: Callable[[torch.Tensor], torch.Tensor], seen: GradientOfRegion) -> AttentionSteps:
    lse = seen.honest.region.of_rows(read(seen.reference.tensors["lse"].value.unsqueeze(-1)))
    return dataclasses.replace(seen.honest, lse=lse)


def _without_sink(seen: GradientOfRegion) -> AttentionSteps:
    lse, sinks = seen.honest.lse, sinks_of(seen.honest.region)
    assert sinks is not None
    share = (sinks - lse).exp()
    return dataclasses.replace(seen.honest, lse=lse + (1 - share).clamp(min=0).log())


def _of_slopes(w: Workload) -> Iterator[tuple[str, str, Changed]]:
    if w.score_mod is not None:
        yield "score-mod-slope-missing", "without score_mod's derivative", partial(_with_slopes, _slope_of_cap, None)
    if w.softcap is not None:
        yield "softcap-slope-missing", "without softcap's derivative", partial(_with_slopes, None, _slope_of_score_mod)
        words = "with softcap's derivative at the capped score, not at the score"
        yield "softcap-slope-of-capped-score", words, partial(_with_slopes, _slope_at_capped, _slope_of_score_mod)


def with_rounded_dp(seen: GradientOfRegion) -> torch.Tensor:
    """Return the gradient of a backward pass that rounds dP to the dtype, as autograd does behind P.to(dtype) @ v."""
    dtype = getattr(torch, seen.reference.inputs.workload.out_dtype)

    def dscores(p: torch.Tensor, dp: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        lost = dp - dp.to(dtype).double()
        return p * (dp - lost - d + (p * lost).sum(-1, keepdim=True))

    return dataclasses.replace(seen.honest, dscores=dscores).gradient(seen.name)


def wrong_slope_of_cap(seen: GradientOfRegion) -> Iterator[Hypothesis]:
    """Yield the derivative 1 - c tanh^2 of softcap that comes nearest to dq or dk, where c is another than 1; and 1 - tanh."""
    cap = seen.reference.inputs.workload.softcap
    if cap is None or seen.name == "dv":
        return

    def fault(words: str, slope: Callable[[torch.Tensor], torch.Tensor]) -> Hypothesis:
        def of_cap(seen: GradientOfRegion) -> torch.Tensor:
            return slope((seen.honest.region.scaled / cap).tanh())

        changed = partial(_with_slopes, of_cap, _slope_of_score_mod)
        words = f"{seen.name} is that of a backward pass with {words} for softcap's derivative, not 1 - tanh(s / softcap)^2"
        return FaultHypothesis("softcap-slope-wrong", words, partial(_gradient, changed), OF_STEPS)

    yield fault("1 - tanh(s / softcap)", lambda t: 1 - t)
    plain, squared = (
        _with_slopes(of_cap, _slope_of_score_mod, seen).gradient(seen.name)
        for of_cap in (None, lambda seen: (seen.honest.region.scaled / cap).tanh().square())
    )
    weight = 1 / seen.view.std.double().where(seen.view.std > 0, 1)
    over, along = ((t * weight).nan_to_num(0, 0, 0) for t in (plain - seen.view.got.double(), squared))
    size = float(along.square().sum())
    factor = float((over * along).sum()) / size if size else 1.0
    if not math.isclose(factor, 1, rel_tol=0.02):
        words = f"1 {'+' if factor < 0 else '-'} {abs(factor):.3g} tanh(s / softcap)^2"
        if math.isclose(factor, cap**2, rel_tol=0.1):
            words += " (is the capped score squared, and not divided by softcap?)"
        yield fault(words, lambda t: 1 - factor * t.square())


#: derivative of one modification in a region
Slope: TypeAlias = Callable[[GradientOfRegion], "torch.Tensor | float"]


def _with_slopes(of_cap: Slope | None, of_score_mod: Slope | None, seen: GradientOfRegion) -> AttentionSteps:
    """Replace the slope of the modifications by the product of two; None for 1."""
    slope = seen.honest.region.scaled.new_ones(())
    for of in (of_cap, of_score_mod):
        slope = slope if of is None else slope * of(seen)
    return dataclasses.replace(seen.honest, slope=slope)


def _slope_of_cap(seen: GradientOfRegion) -> torch.Tensor | float:
    cap = seen.honest.region.workload.softcap
    return 1.0 if cap is None else 1 - (seen.honest.region.scaled / cap).tanh().square()


def _slope_at_capped(seen: GradientOfRegion) -> torch.Tensor:
    cap = seen.honest.region.workload.softcap
    assert cap is not None
    return 1 - (seen.honest.region.scaled / cap).tanh().tanh().square()


def _slope_of_score_mod(seen: GradientOfRegion) -> torch.Tensor | float:
    """Return the derivative at the capped scores."""
    region, w = seen.honest.region, seen.honest.region.workload
    if w.score_mod is None:
        return 1.0
    capped = region.scaled if w.softcap is None else w.softcap * (region.scaled / w.softcap).tanh()
    _, slope = modify(capped.clone(), RegionScores(seen.reference.inputs, w.replace(softcap=None), seen.region))
    return 1.0 if slope is None else slope


def _without_denominator(seen: GradientOfRegion) -> AttentionSteps:
    _require_all_keys(seen)
    below = (seen.honest.lse - seen.honest.region.scores.amax(-1, keepdim=True)).nan_to_num(0, 0, 0).exp()
    return dataclasses.replace(seen.honest, weigh=lambda p: p * below)


def _require_all_keys(seen: GradientOfRegion) -> None:
    if seen.region.keys is not None:
        raise ValueError


def _of_groups(w: Workload) -> Iterator[tuple[str, str, Changed]]:
    if w.group == 1:
        return

    def one(which: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        return lambda x, group: x[:, which % group :: group]

    def interleaved(x: torch.Tensor, group: int) -> torch.Tensor:
        return x.view(x.shape[0], group, -1, *x.shape[2:]).sum(1)

    yield "group-overwritten", "that keeps only the last query head of each group", _replaced(summed=one(-1))
    yield "group-first-head-only", "that keeps only the first query head of each group", _replaced(summed=one(0))
    yield "group-summed-interleaved", "that adds query head h to key head h % kv_heads", _replaced(summed=interleaved)


def _of_last_tile(tile: int, seen: GradientOfRegion) -> AttentionSteps:
    """Keep of each key those rows that are in the last tile of rows which sees any key of its tile."""
    part = seen.honest.region
    if seen.region.rows is not None or part.block.segment.lengths[0] <= tile:
        raise ValueError
    sees = (part.scores > -math.inf).any(1).any(0)  # (rows, keys)
    of_rows, of_keys = part.rows // tile, part.at // tile
    last = torch.full_like(of_keys, -1)
    for key_tile in set(of_keys.tolist()):
        mine = of_keys == key_tile
        seeing = of_rows[sees[:, mine].any(-1)]
        if len(seeing):
            last[mine] = seeing.amax()
    kept = of_rows[:, None] == last
    return dataclasses.replace(seen.honest, weigh=lambda a: a * kept)


# -- another attention's P -------------------------------------------------------------------------------------------------


def _scores_of(fault: AttentionFault, seen: GradientOfRegion) -> RegionScores:
    """Return the scores of another attention; raises ValueError where it has another shape."""
    inputs, w = seen.reference.inputs, seen.reference.inputs.workload
    other, variant = fault.attention(inputs)
    has_its_shape = (variant.kv_heads, sequence_lengths(variant)) == (w.kv_heads, sequence_lengths(w))
    if not has_its_shape or other.k.shape != inputs.k.shape:
        raise ValueError
    return RegionScores(other, variant, seen.region)


def _with_p_of(scores: Callable[[GradientOfRegion], RegionScores], seen: GradientOfRegion) -> AttentionSteps:
    part = scores(seen)
    return dataclasses.replace(seen.honest, region=part, slope=part.slope)


def _of_attention(scores: Callable[[GradientOfRegion], RegionScores], seen: GradientOfRegion) -> AttentionSteps:
    _require_all_keys(seen)
    part = scores(seen)
    p, lse = softmax(part.scores.clone(), part)
    row_sum = (part.dout * over_keys(p, part.v)).sum(-1, keepdim=True)
    return dataclasses.replace(seen.honest, region=part, slope=part.slope, lse=lse.unsqueeze(-1), row_sum=row_sum)
