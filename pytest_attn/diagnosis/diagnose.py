"""Why a result is wrong: the one diagnosis, of a callable, of a model's call, and of ranks.

For each likely fault it is computed what the callable would have returned: a few of the worst rows first, then all
distributions of inputs. A fault that explains these is named; nothing is where nothing does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from pytest_attn.backends.precision import RARE, SUGGESTED
from pytest_attn.correctness.comparison import (
    Comparison,
    Evidence,
    Hint,
    Location,
    Mismatch,
    TensorComparison,
    describe_rows,
    location_of,
    looked_at,
    wrong_rows,
)
from pytest_attn.correctness.reference import Reference, score_elements
from pytest_attn.diagnosis.attention import attention_faults
from pytest_attn.diagnosis.backward import (
    GradientOfRegion,
    WholeGradient,
    faults_of_steps,
    multiples_of_gradient,
    swapped_gradients,
)
from pytest_attn.diagnosis.case import Case, TimeBudget
from pytest_attn.diagnosis.faults import PRECISION
from pytest_attn.diagnosis.hypothesis import FaultHypothesis, Fit, Seen, explains
from pytest_attn.diagnosis.masks import TILES
from pytest_attn.diagnosis.online import OnlineRows, blind_tile, faults_of_running_sums
from pytest_attn.diagnosis.out import FEW_ROWS, MANY_ROWS, RowsOfOut, misplaced_rows, on_rows, spread_rows, worst_rows
from pytest_attn.diagnosis.precision import fitting_profiles, scale_or_profile
from pytest_attn.diagnosis.ranks import with_ranks
from pytest_attn.diagnosis.softmax import WholeResult, faults_of_extra, faults_of_lse
from pytest_attn.diagnosis.steps import regions_of
from pytest_attn.workloads.heads import repeated
from pytest_attn.workloads.parameters import is_of_parameter
from pytest_attn.workloads.sharding import Sharding

#: |lse| above which its exponential leaves float32
_EXP_REACH = 88
#: the least offset that counts as one that wraps
_LEAST_REACH = 1 << 15
#: scores of packed sequences, of which all rows are computed, above which no other attention is tried
_PACKED_ELEMENTS = 1 << 24
#: what is left out where time is over
_ATTENTIONS, _STEPS = "likely mistakes", "mistakes in steps of the backward pass"


def diagnose(
    comparison: Comparison, seconds: float = 60.0, keep_evidence: bool = False, sharding: Sharding | None = None
) -> Comparison:
    """Return a comparison with what explains the first tensor that is wrong; as it is where none is.

    seconds: for which it is looked for, 0 for no end. keep_evidence: keep the tensors of the mismatch with the comparison.
    sharding: of ranks that have computed the result, None where one process has.
    """
    mismatch = comparison.mismatch
    if mismatch is None or mismatch.evidence is None:
        return comparison
    evidence = mismatch.evidence
    case = Case(evidence.workload, evidence.returned, comparison.tensors, evidence.limits, TimeBudget(seconds))
    location, hints = _explanation(mismatch.row, evidence, case)
    if mismatch.hints:  # what strides or other calls change does not come from rounding
        hints = [hint for hint in hints if not hint.fault.startswith(PRECISION)]
    more = (*mismatch.hints, *_left_out(case.time))
    explained = Mismatch(mismatch.row, location, (*hints, *more), evidence if keep_evidence else None)
    if sharding is not None:
        explained = with_ranks(explained, evidence, sharding)
    return replace(comparison, mismatch=explained)


def _left_out(time: TimeBudget) -> Iterator[Hint]:
    if time.left_out:
        what = ", ".join(time.left_out)
        words = f"after {time.seconds:g} s (--attn-diagnosis-timeout), not all of these were tried: {what}"
        yield Hint("", words, "left out")


def _explanation(row: TensorComparison, evidence: Evidence, case: Case) -> tuple[Location, list[Hint]]:
    """Return where a tensor is wrong and what that suggests, most telling first."""
    _, reference, tensors = evidence.failed
    name, expected = row.name, reference.tensors[row.name]
    got = looked_at(name, tensors[name], expected, case.workload)
    bad = wrong_rows(row, got, expected)
    location = location_of(bad, expected.rows)
    if name in ("weights", "max") and (named := _of_extra(name, reference, case)):
        return location, named
    if row.wrong_positions:
        mended = got.where(got.isfinite(), expected.value.to(got.dtype))
        others = wrong_rows(replace(row, wrong_positions=0), mended, expected) & ~bad
        found = _non_finite(got, bad, reference, name, location)
        if row.exceeding and bool(others.any()):  # a fault of its own, which NaN must not hide
            location = location_of(bad | others, expected.rows)
            if name == "out":
                found += _of_out(got, others, reference, case)
        return location, found
    if _sees_no_key(_lse_of(bad, reference, name)):
        return location, _without_keys(got, bad, reference, name)
    if not bool(got.any()):
        return location, [Hint("all-zeros", f"{name} is all zeros")]
    return location, _of_tensor(row, got, bad, reference, case) or _traces(got, bad, name, expected.rows)


def _of_tensor(row: TensorComparison, got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    """Return the fault, or the profile, that explains the whole case."""
    if row.name == "out":
        return _of_out(got, bad, reference, case)
    if row.name == "lse":
        return _of_lse(reference, case)
    return [] if row.name in ("weights", "max") else _of_gradient(row, bad, reference, case)


# -- searches --------------------------------------------------------------------------------------------------------------


def _first(hypotheses: Iterable[FaultHypothesis[Seen]], every: Callable[[], Iterable[Seen]]) -> FaultHypothesis[Seen] | None:
    """Return the first hypothesis that explains what is seen on every distribution."""
    return next((one for one in hypotheses if all(explains(one, seen) for seen in every())), None)


def _best(
    hypotheses: Iterable[FaultHypothesis[Seen]], first: Seen, every: Callable[[], Iterable[Seen]], what: str, time: TimeBudget
) -> tuple[FaultHypothesis[Seen], Fit] | None:
    """Return the hypothesis that fits best what is seen first, of those that explain what is seen on every distribution."""
    tried = [(one, explains(one, first)) for one in time.each(what, hypotheses)]
    fitting = [(one, fit) for one, fit in tried if fit is not None]
    for one, fit in time.each(what, sorted(fitting, key=lambda found: found[1].rank)):
        if all(explains(one, seen) for seen in every()):
            return one, fit
    return None


# -- out -------------------------------------------------------------------------------------------------------------------


def _of_out(got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    """Return what explains out, heads-first, whose rows `bad` (batch, heads, rows) are wrong; nothing where nothing does."""
    few, many = (worst_rows(got, bad, reference, number) for number in (FEW_ROWS, MANY_ROWS))
    return (
        _other_attention(few, many, case)
        or _other_places(got, reference, case)
        or scale_or_profile(many, case)
        or _of_running_sums(bad, reference, case)
    )


def _other_attention(few: RowsOfOut, many: RowsOfOut, case: Case) -> list[Hint]:
    w = case.workload
    if w.is_packed and score_elements(w) > _PACKED_ELEMENTS:
        return []
    likely = (on_rows(fault, case.limits[0]) for fault in attention_faults(w, few.reference.inputs))
    fitting = [one for one in case.time.each(_ATTENTIONS, likely) if explains(one, few)]
    found = _best(fitting, many, lambda: spread_rows(case), _ATTENTIONS, case.time)
    return [Hint(found[0].fault, f"{found[0].words} (z {found[1].z:.1f} there)")] if found else []


def _other_places(got: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    def every() -> Iterator[RowsOfOut]:
        yield RowsOfOut.of(got, reference, None)
        for each, of in case.of("out"):
            yield RowsOfOut.of(each, of, None)

    is_sampled = reference.tensors["out"].rows is not None
    moves = misplaced_rows(got.shape, is_sampled, case.limits[0])
    return _hints(_first(case.time.each("other places of rows", moves), every))


def _of_running_sums(bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    what = "mistakes in running sums"
    region = next(regions_of(reference, "dq", bad), None)
    if region is None or case.time.is_over(what):
        return []
    got = next(got for got, of in case.of("out") if of is reference)
    first = OnlineRows.of(got, reference, region, bad)
    rows: list[OnlineRows] = []

    def every() -> list[OnlineRows]:
        if not rows:
            rows.extend(OnlineRows.of(each, of, region, None) for each, of in case.of("out"))
        return rows

    found = _best(faults_of_running_sums(first), first, every, what, case.time)
    return _hints(found[0] if found else None)


def _hints(found: FaultHypothesis[Seen] | None) -> list[Hint]:
    return [] if found is None else [Hint(found.fault, found.words)]


# -- what else is returned -------------------------------------------------------------------------------------------------


def _of_lse(reference: Reference, case: Case) -> list[Hint]:
    every = [WholeResult.of("lse", got, of) for got, of in case.of("lse")]
    hypotheses = case.time.each("mistakes of lse", faults_of_lse(case.workload, reference))
    moving = (name for name, profile in SUGGESTED.items() if profile.moves_lse and name not in RARE)
    return _hints(_first(hypotheses, lambda: every)) or fitting_profiles("lse", moving, case)


def _of_extra(name: str, reference: Reference, case: Case) -> list[Hint]:
    every = [WholeResult.of(name, got, of) for got, of in case.of(name)]
    return _hints(_first(faults_of_extra(name, reference), lambda: every))


# -- gradients -------------------------------------------------------------------------------------------------------------


def _of_gradient(row: TensorComparison, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    name = row.name
    every = [WholeGradient.of(name, got, of, bad if of is reference else None) for got, of in case.of(name)]
    multiple = _hints(_first(multiples_of_gradient(name, case.workload, row.alpha), lambda: every))
    if multiple or is_of_parameter(name):
        return multiple
    return (
        _hints(_first(swapped_gradients(name), lambda: every))
        or _of_steps(name, bad, reference, case)
        or fitting_profiles(name, SUGGESTED, case)
    )


def _of_steps(name: str, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    """Name the step that leaves least unexplained, of those that explain the whole case."""
    region = next(regions_of(reference, name, bad), None)
    if region is None:
        return []

    def every() -> Iterator[GradientOfRegion]:
        for got, of in case.of(name):
            yield from (GradientOfRegion(name, got, of, each, None) for each in regions_of(of, name, bad))

    got = next(got for got, of in case.of(name) if of is reference)
    first = GradientOfRegion(name, got, reference, region, bad)
    found = _best(faults_of_steps(name, reference), first, every, _STEPS, case.time)
    return _hints(found[0] if found else None)


# -- what neither is a number nor sees a key -------------------------------------------------------------------------------


def _non_finite(got: torch.Tensor, bad: torch.Tensor, reference: Reference, name: str, location: Location) -> list[Hint]:
    nans, infinities = int(got.isnan().sum()), int(got.isinf().sum())
    where = describe_rows(location.rows, location.length)
    found = [Hint("not-finite", f"{name} holds {nans:,} NaN and {infinities:,} infinite elements (rows: {where})")]
    lse = _lse_of(bad, reference, name)
    if _sees_no_key(lse):
        return found + _without_keys(got, bad, reference, name)
    if len(lse) and float(lse.abs().min()) > _EXP_REACH:
        lowest, largest = float(lse.min()), float(lse.max())
        if largest < 0:
            words = f"lse below -88 (at most {largest:.1f}), where exp(-lse) overflows in float32"
        else:
            words = f"lse beyond 88 ({lowest:.1f} to {largest:.1f}), where exp(lse) leaves float32"
        found.append(Hint("exp-overflow" if largest < 0 else "exp-out-of-reach", f"each of these rows has {words}"))
    elif name in ("out", "lse") and (tile := blind_tile(bad, reference)):
        words = f"each of these rows sees no key in the first tile of {tile} keys that is visited: -inf less -inf is NaN"
        found.append(Hint("blind-tile", words))
    return found


def _without_keys(got: torch.Tensor, bad: torch.Tensor, reference: Reference, name: str) -> list[Hint]:
    """Say that all wrong rows see no key, and what they hold instead of 0."""
    must_be = f"each of these rows sees no key at all: {name} must be {'-inf' if name in ('lse', 'max') else '0'} there"
    if name == "out" and bool(got[bad].isnan().any()):
        words = f'{must_be}, and is NaN (where that is meant, the marker says empty_rows="any")'
        return [Hint("empty-rows-nan", words)]
    if name == "out" and _is_mean_of_v(got, bad, reference):
        words = f'{must_be}, and is the mean of v (where that is meant, the marker says empty_rows="finite")'
        return [Hint("empty-rows-mean-of-v", words)]
    return [Hint("empty-rows", must_be)]


def _is_mean_of_v(got: torch.Tensor, bad: torch.Tensor, reference: Reference) -> bool:
    """Whether the rows hold the mean of v over all keys, as a softmax of equal scores does."""
    w = reference.inputs.workload
    if w.is_packed:
        return False
    v = reference.inputs.gathered()[1].double()
    mean = repeated(v.mean(2, keepdim=True), w).expand(got.shape)
    near = 2 * torch.finfo(got.dtype).eps * (mean.abs() + v.square().mean().sqrt() / v.shape[2] ** 0.5)
    counted = (w.kv_len, *(-(-w.kv_len // tile) * tile for tile in TILES))  # with the zeros that fill up the last tile
    return any(bool(((got.double() - mean * (w.kv_len / n)).abs() <= near)[bad].all()) for n in counted)


def _lse_of(bad: torch.Tensor, reference: Reference, name: str) -> torch.Tensor:
    """Return lse of these rows (batch, heads, rows) of out, lse or dq; nothing of other tensors, whose rows are keys."""
    lse = reference.tensors["lse"].value
    return lse[bad] if name in ("out", "lse", "dq") and lse.shape == bad.shape else lse[:0].flatten()


def _sees_no_key(lse: torch.Tensor) -> bool:
    """Whether these are rows, and none sees a key."""
    return bool(len(lse)) and bool((lse == -math.inf).all())


# -- where nothing explains it ---------------------------------------------------------------------------------------------


def _traces(got: torch.Tensor, bad: torch.Tensor, name: str, sampled: torch.Tensor | None) -> list[Hint]:
    """Return what the wrong rows (batch, heads, rows) of a tensor, heads-first, have in common."""
    if name == "lse":
        return []
    found = [] if bool(got[bad].any()) else [Hint("zeros-there", f"{name} is 0 in all of these rows")]
    if sampled is None and got.dim() == 4 and (reach := _reach(got, bad)):
        words = (
            f"{name} is wrong from element {reach:,} (2^{reach.bit_length() - 1}) on and right before: do offsets wrap there?"
        )
        found.append(Hint("offset-wraps", words))
    return found


def _reach(got: torch.Tensor, bad: torch.Tensor) -> int:
    """Return the power of two, 2 ** 15 or more, from which offset on all rows are wrong and none before; else 0.

    Offsets are those of contiguous memory. Where a head or a batch entry begins there, that may be the reason as well.
    """
    _, _, rows, dim = got.shape
    wrong = bad.flatten().nonzero().flatten()
    if not len(wrong) or len(wrong) != bad.numel() - int(wrong[0]):
        return 0
    first = int(wrong[0])
    last = (first + 1) * dim - 1
    power = 1 << max(last.bit_length() - 1, 0)
    return power if power >= _LEAST_REACH and power >= first * dim and first % rows else 0
