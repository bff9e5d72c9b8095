"""Diagnosis of a wrong result: of a callable, of one output, of a call that a guest has seen.

For each likely fault it is computed what the callable would have returned: a few of the worst rows first, then all
distributions of inputs. A fault that explains these is named; nothing is where nothing does.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Protocol, TypeAlias, TypeVar

import torch

from pytest_attn.backends.precision import RARE, SUGGESTED, Precision
from pytest_attn.correctness.comparison import (
    Comparison,
    Evidence,
    Hint,
    Location,
    Mismatch,
    Returned,
    TensorComparison,
    describe_rows,
    location_of,
    looked_at,
    wrong_rows,
)
from pytest_attn.correctness.judge import compare_all
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.reference import Reference, compute_reference, few_threads, score_elements
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.diagnosis import backward_faults, forward_faults
from pytest_attn.diagnosis.attention_faults import LEAST_BITS, TILES, attention_faults, rounded_scores, roundings
from pytest_attn.diagnosis.backward_faults import GradientOfRegion, WholeGradient
from pytest_attn.diagnosis.faults import PRECISION, is_of_rounding
from pytest_attn.diagnosis.forward_faults import FEW_ROWS, MANY_ROWS, OnlineFault, OnlineRows, RowsOfOut, WholeResult, on_rows
from pytest_attn.diagnosis.hypothesis import (
    AttentionFault,
    FaultHypothesis,
    Fit,
    Other,
    Seen,
    Tolerance,
    View,
    explains,
    of_tensors,
    of_workload,
)
from pytest_attn.diagnosis.steps import Region, regions_of
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.workload import Workload, is_interleaved, key_heads, repeated, sequence_lengths

_Tried = TypeVar("_Tried")
#: adds to an explained mismatch, of which there is this evidence
Locate: TypeAlias = Callable[[Mismatch, Evidence], Mismatch]


class TimeBudget:
    """Ends a search between two of its steps: a long workload takes seconds for each hypothesis that is tried.

    seconds: 0 for as long as it takes, counted from the first step; clock: theirs. left_out: what was not tried, or not to its
    end, in words.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._begun: float | None = None
        self.left_out: list[str] = []

    def each(self, what: str, some: Iterable[_Tried]) -> Iterator[_Tried]:
        """Yield what is to be tried as long as there is time. what: it is, in words."""
        for one in some:
            if self.is_over(what):
                return
            yield one

    def is_over(self, what: str) -> bool:
        """Return whether there is no time left; what: is left out then."""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if not self.seconds or now - self._begun < self.seconds:
            return False
        if what not in self.left_out:
            self.left_out.append(what)
        return True


@dataclass(frozen=True)
class Case:
    """Results of a callable on each distribution of inputs, and how they compare.

    limits: of out and lse, and of gradients. time: for which an explanation is looked for.
    """

    workload: Workload
    returned: Sequence[Returned]
    rows: Sequence[TensorComparison]
    limits: tuple[Limits, Limits]
    time: TimeBudget

    def of(self, name: str) -> Iterator[tuple[torch.Tensor, Reference]]:
        """Yield what was returned under a name on each distribution, heads-first and where the reference looked, with that."""
        for one in self.returned:
            if name in one.tensors:
                expected = one.reference.tensors[name]
                yield looked_at(name, one.tensors[name], expected, self.workload), one.reference

    @property
    def scores_are_exact(self) -> bool:
        """True where lse was returned, and is right under a profile whose scores are: they are not what is rounded."""
        of_lse = [row for row in self.rows if row.name == "lse"]
        declared = self.returned[0].reference.precision
        return bool(of_lse) and not declared.moves_lse and all(row.passed for row in of_lse)


#: |lse| above which its exponential leaves float32
_EXP_REACH = 88
#: scores of packed sequences, of which all rows are computed, above which no other attention is tried
_PACKED_ELEMENTS = 1 << 24
#: what is left out where time is over
_ATTENTIONS, _STEPS = "likely mistakes", "mistakes in steps of the backward pass"


class Judged(Protocol):
    """Something that is compared with exact attention: a kernel on a workload, one output, a call."""

    def compared(self, references: ReferenceCache, deadline: Callable[[], AbstractContextManager[object]]) -> Comparison:
        """Return the comparison; its mismatch has the evidence for a diagnosis."""


@dataclass(frozen=True)
class Context:
    """The means of a judgment, and what it is to keep.

    Args:
        references: exact results, and the inputs that these are of.
        deadline: makes a context that surrounds each call of a kernel.
        comparing: surrounds the comparison, as what counts its memory.
        diagnosis_timeout: seconds in which what explains a fault is looked for, 0 for no end.
        diagnosing: makes a context that surrounds the diagnosis, as of a line of progress.
        keeps_evidence: keep the tensors of a mismatch with the comparison.
        is_known: whether a mismatch is explained already, as by a known defect; then nothing else is looked for.
        locate: adds what is known of where a result was computed.
    """

    references: ReferenceCache = field(default_factory=ReferenceCache)
    deadline: Callable[[], AbstractContextManager[object]] = nullcontext
    comparing: AbstractContextManager[object] = field(default_factory=nullcontext)
    diagnosis_timeout: float = 60.0
    diagnosing: Callable[[], AbstractContextManager[object]] = nullcontext
    keeps_evidence: bool = False
    is_known: Callable[[Comparison], bool] = lambda comparison: False
    locate: Locate | None = None


def judged(subject: Judged, context: Context) -> Comparison:
    """Return how far a subject is from exact attention, and what explains it where it is wrong. Raises as its `compared`."""
    __tracebackhide__ = True
    with context.comparing:
        comparison = subject.compared(context.references, context.deadline)
    if comparison.passed or context.is_known(comparison):
        return comparison
    with context.diagnosing():
        return diagnose(comparison, context.diagnosis_timeout, context.keeps_evidence, context.locate)


def diagnose(
    comparison: Comparison, seconds: float = 60.0, keep_evidence: bool = False, locate: Locate | None = None
) -> Comparison:
    """Return a comparison with what explains the first tensor that is wrong; as it is where none is.

    Arguments are those of `Context`.
    """
    mismatch = comparison.mismatch
    if mismatch is None or mismatch.evidence is None:
        return comparison
    evidence = mismatch.evidence
    case = Case(evidence.workload, evidence.returned, comparison.tensors, evidence.limits, TimeBudget(seconds))
    with few_threads(evidence.workload):
        location, hints = _explanation(mismatch.row, evidence, case)
    if mismatch.hints:  # what strides or other calls change does not come from rounding
        hints = [hint for hint in hints if not is_of_rounding(hint.fault)]
    hints += mismatch.hints
    if case.time.left_out:
        left_out = f"not all of these were tried: {', '.join(case.time.left_out)}"
        hints.append(Hint("", f"after {seconds:g} s (--attn-diagnosis-timeout), {left_out}", "left out"))
    explained = replace(mismatch, location=location, hints=tuple(hints), evidence=evidence if keep_evidence else None)
    return replace(comparison, mismatch=locate(explained, evidence) if locate else explained)


def _explanation(row: TensorComparison, evidence: Evidence, case: Case) -> tuple[Location, list[Hint]]:
    """Return where a tensor is wrong and what that suggests, most telling first."""
    _, reference, tensors = evidence.failed
    name, expected = row.name, reference.tensors[row.name]
    got = looked_at(name, tensors[name], expected, case.workload)
    bad = wrong_rows(row, got, expected)
    location = location_of(bad, expected.rows)
    if name in ("weights", "max"):
        results = [WholeResult.of(name, got, of) for got, of in case.of(name)]
        if named := _hints(_first(forward_faults.faults_of_extra(name, reference), lambda: results)):
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
    is_left_out = name == "dq" and not bool(got[bad].any())  # which a row that sees one key makes of a mask, too
    found = [] if is_left_out else _of_tensor(row, got, bad, reference, case)
    found = found or _traces(got, bad, name, expected.rows)
    return location, found or (_out_of_scope(got, bad, reference) if name == "out" else [])


def _of_tensor(row: TensorComparison, got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    """Return the fault, or the profile, that explains the whole case."""
    if row.name == "out":
        return _of_out(got, bad, reference, case)
    if row.name == "lse":
        return _of_lse(reference, case)
    return [] if row.name in ("weights", "max") else _of_gradient(row, bad, reference, case)


def _first(hypotheses: Iterable[FaultHypothesis[Seen]], every: Callable[[], Iterable[Seen]]) -> FaultHypothesis[Seen] | None:
    """Return the first hypothesis that explains what is seen on every distribution."""
    return next((one for one in hypotheses if all(explains(one, seen) for seen in every())), None)


def _best(
    hypotheses: Iterable[FaultHypothesis[Seen]], first: Seen, every: Callable[[], Iterable[Seen]], what: str, time: TimeBudget
) -> tuple[FaultHypothesis[Seen], Fit] | None:
    """Return the hypothesis that fits best what is seen first, of those that explain what is seen on every distribution."""
    tried = [(one, explains(one, first)) for one in time.each(what, hypotheses)]
    fitting = [(one, fit) for one, fit in tried if fit is not None]
    by_rank = sorted(fitting, key=lambda found: float(f"{found[1].rank:.3g}"))  # of those that amount to the same the first
    for one, fit in time.each(what, by_rank):
        if all(explains(one, seen) for seen in every()):
            return one, fit
    return None


# -- out -------------------------------------------------------------------------------------------------------------------


def _of_out(got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    """Return what explains out, heads-first, whose rows `bad` (batch, heads, rows) are wrong; nothing where nothing does."""
    few, many = (forward_faults.worst_rows(got, bad, reference, number) for number in (FEW_ROWS, MANY_ROWS))
    return (
        _in_smaller_dtype(few, case)
        or _other_attention(few, many, case)
        or _other_places(got, reference, case)
        or _of_counted_keys(bad, reference, many, case)
        or _of_sums("mistakes in running sums", forward_faults.faults_of_running_sums, bad, reference, case)
        or _in_part(bad, few, many, case)
        or _of_factors(got, bad, reference, case)
        or scale_or_profile(many, case)
        or _of_sums("sums in few bits", forward_faults.sums_in_few_bits, bad, reference, case)
    )


def _in_smaller_dtype(few: RowsOfOut, case: Case) -> list[Hint]:
    """Name the dtype whose numbers alone a float32 out holds, where attention in that dtype explains it."""
    w = case.workload
    for name in ("bfloat16", "float16") if w.dtype == "float32" else ():
        dtype = getattr(torch, name)
        if not torch.equal(few.view.got, few.view.got.to(dtype).float()):
            continue
        factor = float(forward_faults.factor(few.view.got, few.view.exact, (0, 1, 2, 3)))
        for times, words in ((1.0, f"in {name}"), (factor, f"in {name}, times {factor:.4g}")):
            attention = of_tensors(w.replace(dtype=name), partial(_cast, dtype, times))
            fault = on_rows(AttentionFault("smaller-dtype", words, attention), case.limits[0])
            if (fit := explains(fault, few)) and all(explains(fault, rows) for rows in _spread_rows(case)):
                words = f"{fault.words}, and holds no other numbers: what is cast to it? (z {fit.z:.1f} there)"
                return [Hint(fault.fault, words)]
    return []


def _cast(dtype: torch.dtype, factor: float, inputs: Inputs) -> dict[str, torch.Tensor]:
    cast = {name: getattr(inputs, name).to(dtype) for name in ("q", "k", "dout")}
    return {**cast, "v": inputs.v.to(dtype).double() * factor}


def _other_attention(few: RowsOfOut, many: RowsOfOut, case: Case) -> list[Hint]:
    w = case.workload
    if w.is_packed and score_elements(w) > _PACKED_ELEMENTS:
        return []
    faults = attention_faults(w, few.reference.inputs)
    return _named(faults, few, many, lambda: _spread_rows(case), _ATTENTIONS, case)


def _named(
    faults: Iterable[AttentionFault],
    few: RowsOfOut,
    many: RowsOfOut,
    spread: Callable[[], Iterable[RowsOfOut]],
    what: str,
    case: Case,
    where: str = "",
) -> list[Hint]:
    """Name the attention that explains a few rows, and all others best. what: is tried, in words; where: added to the name."""
    likely = (on_rows(fault, case.limits[0]) for fault in faults)
    fitting = [one for one in case.time.each(what, likely) if explains(one, few)]
    # what is exact attention here, as a mask that no row tells from the right one, leaves all of the deviation
    told = [replace(one, tolerance=one.tolerance._replace(left=_MOST_LEFT)) for one in fitting]
    found = _best(told, _in_all_rows(many), spread, what, case.time)
    return [Hint(found[0].fault, f"{found[0].words}{where} (z {found[1].z:.1f} there)")] if found else []


def _in_part(bad: torch.Tensor, few: RowsOfOut, many: RowsOfOut, case: Case) -> list[Hint]:
    """Name another attention that batch entries have alone, or heads, where the others are right."""
    what, where = "likely mistakes in a part", _part(bad, case.workload)
    if where is None or case.time.is_over(what):
        return []
    words, faulty = where

    def there(rows: RowsOfOut) -> RowsOfOut:
        return replace(rows, faulty=faulty if rows.rows is None else faulty[:, :, rows.rows])

    faults: Iterable[AttentionFault] = (
        fault
        for fault in attention_faults(case.workload, few.reference.inputs)
        if not fault.fault.endswith("ignored")  # no part ignores an option that others read
    )
    if (found := _online_rows(bad, few.reference, case, what)) is not None:
        faults = chain(faults, forward_faults.faults_of_counts(case.workload, found[1]))
    return _named(faults, there(few), there(many), lambda: map(there, _spread_rows(case)), what, case, f", {words} alone")


def _part(bad: torch.Tensor, w: Workload) -> tuple[str, torch.Tensor] | None:
    """Return which batch entries, or heads, are wrong of those there are, and where that is; None where all are."""
    rows = bad.shape[-1]
    if w.is_packed:
        lengths = [q_len for q_len, _ in sequence_lengths(w)]
        entry = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        if len(entry) != rows:
            return None
        wrong = torch.zeros(len(lengths), dtype=torch.bool).index_put((entry,), bad.cpu().any(1)[0], accumulate=True)
        faulty = wrong[entry].to(bad.device).expand(bad.shape)
    else:
        wrong = bad.any(2).any(1).cpu()
        faulty = wrong[:, None, None].to(bad.device).expand(bad.shape)
    of_heads = bad.any(2).any(0).cpu()
    if bool(wrong.all()) and not bool(of_heads.all()):
        return f"in heads {_listed(of_heads)}", of_heads[None, :, None].to(bad.device).expand(bad.shape)
    return None if bool(wrong.all()) else (f"in batch entries {_listed(wrong)}", faulty)


def _listed(which: torch.Tensor) -> str:
    return ", ".join(map(str, which.nonzero().flatten().tolist()[:8])) + ", ..." * (int(which.sum()) > 8)


def _other_places(got: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    def every() -> Iterator[RowsOfOut]:
        yield RowsOfOut.of(got, reference, None)
        for each, of in case.of("out"):
            yield RowsOfOut.of(each, of, None)

    is_sampled = reference.tensors["out"].rows is not None
    moves = chain(
        forward_faults.misplaced_rows(got.shape, is_sampled, case.limits[0]),
        forward_faults.misplaced_columns(RowsOfOut.of(got, reference, None), case.limits[0]),
        () if is_sampled else forward_faults.heads_as_rows(case.workload, case.limits[0]),
    )
    return _hints(_first(case.time.each("other places of rows", moves), every))


def _of_counted_keys(bad: torch.Tensor, reference: Reference, many: RowsOfOut, case: Case) -> list[Hint]:
    what = "keys that count never or twice"
    if (found_rows := _online_rows(bad, reference, case, what)) is None:
        return []
    faults = forward_faults.faults_of_counts(case.workload, found_rows[1])
    return _named(faults, many, many, lambda: _spread_rows(case), what, case)


def _of_factors(got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    seen = RowsOfOut.of(got, reference, None)
    first = replace(seen, view=seen.view._replace(bad=bad))
    every = [first, *(RowsOfOut.of(each, of, None) for each, of in case.of("out") if of is not reference)]
    return _hints(_first(case.time.each("factors of rows", forward_faults.scaled_rows(first, case.limits[0])), lambda: every))


def _of_sums(
    what: str, faults_of: Callable[[OnlineRows], Iterator[OnlineFault]], bad: torch.Tensor, reference: Reference, case: Case
) -> list[Hint]:
    if (found_rows := _online_rows(bad, reference, case, what)) is None:
        return []
    region, first = found_rows
    rows: list[OnlineRows] = []

    def every() -> list[OnlineRows]:
        if not rows:
            rows.extend(OnlineRows.of(each, of, region, None) for each, of in case.of("out"))
        return rows

    found = _best(faults_of(first), first, every, what, case.time)
    return _hints(found[0] if found else None)


def _online_rows(bad: torch.Tensor, reference: Reference, case: Case, what: str) -> tuple[Region, OnlineRows] | None:
    """Return a region with its wrong rows of out, in which `what` is looked for; None where there are none, or no time."""
    region = next(regions_of(reference, "dq", bad), None)
    if region is None or case.time.is_over(what):
        return None
    got = next(got for got, of in case.of("out") if of is reference)
    return region, OnlineRows.of(got, reference, region, bad)


def _hints(found: FaultHypothesis[Seen] | None) -> list[Hint]:
    return [] if found is None else [Hint(found.fault, found.words)]


def _of_lse(reference: Reference, case: Case) -> list[Hint]:
    every = [WholeResult.of("lse", got, of) for got, of in case.of("lse")]
    hypotheses = case.time.each("mistakes of lse", forward_faults.faults_of_lse(case.workload, reference))
    moving = (name for name, profile in SUGGESTED.items() if profile.moves_lse and name not in RARE)
    return _hints(_first(hypotheses, lambda: every)) or fitting_profiles("lse", moving, case)


# -- gradients -------------------------------------------------------------------------------------------------------------


def _of_gradient(row: TensorComparison, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    name = row.name
    every = [WholeGradient.of(name, got, of, bad if of is reference else None) for got, of in case.of(name)]
    multiple = _hints(_first(backward_faults.multiples_of_gradient(name, case.workload, row.alpha), lambda: every))
    if multiple or name[1:] in PARAMETERS:
        return multiple
    return (
        _hints(_first(backward_faults.swapped_gradients(name), lambda: every))
        or _of_slope(row, case)
        or _of_steps(name, bad, reference, case)
        or _hints(_first([backward_faults.scaled_gradient(name, row.alpha)], lambda: every))
        or fitting_profiles(name, _profiles_of_gradient(name, bad, reference, case), case)
    )


def _profiles_of_gradient(name: str, bad: torch.Tensor, reference: Reference, case: Case) -> Iterator[str]:
    """Yield profiles, those that round dP only where its rounding, repeated, explains the gradient."""
    for profile, precision in SUGGESTED.items():
        if precision.rounds_dp:
            seen = _seen_first(name, bad, reference, case)
            if seen is None or not _moves_alike(backward_faults.with_rounded_dp(seen), seen.view):
                continue
        yield profile


def _moves_alike(value: torch.Tensor, view: View) -> bool:
    """Return whether the deviation from what is exact is that of a value, and what else is rounded, in budgets."""
    weight = 1 / view.std.double().where(view.std > 0, 1)
    moves, off = (((t.double() - view.exact) * weight).nan_to_num(0, 0, 0) for t in (value, view.got))
    return float((moves * off).sum()) > float(moves.square().sum()) / 2 > 0


def _seen_first(name: str, bad: torch.Tensor, reference: Reference, case: Case) -> GradientOfRegion | None:
    """Return the region of a gradient in which most is wrong, None where regions would be too large."""
    got = next(got for got, of in case.of(name) if of is reference)
    region = next(regions_of(reference, name, bad), None)
    return None if region is None else GradientOfRegion(name, got, reference, region, bad)


def _of_slope(row: TensorComparison, case: Case) -> list[Hint]:
    """Name the scale that makes dq and dk so much larger, where all passes with it, and out is nearer to what it gives."""
    w, slope, what = case.workload, row.alpha, "another scale"
    is_long = score_elements(w) > _AGAIN_ELEMENTS or any(one.reference.is_sampled for one in case.returned)
    if row.name not in ("dq", "dk") or is_long or slope <= 0 or abs(math.log(slope)) < _LEAST_OFF or case.time.is_over(what):
        return []
    scale, overlap, size = slope * w.softmax_scale, 0.0, 0.0
    variant, limits = w.replace(scale=scale), (case.limits[0], row.limits)
    for distribution, reference, tensors in case.time.each(what, case.returned):
        other = _exact_with(reference, reference.precision, variant, backward=True)
        if not all(found.passed for found in compare_all(distribution, tensors, other, w, limits)):
            return []
        exact = reference.tensors["out"]
        got = looked_at("out", tensors["out"], exact, w).to(exact.value.device)
        moves, off = (((t - exact.value) / exact.tau).nan_to_num(0, 0, 0) for t in (other.tensors["out"].value, got))
        overlap, size = overlap + float((moves * off).sum()), size + float(moves.square().sum())
    if size < _FACTOR_STDS**2:
        words = f"{row.name} is {slope:.4g} times the exact gradient: is the scale {scale:.4g}, not {w.softmax_scale:.4g}"
        return [Hint("gradient-scaled", f"{words} (out hardly shows it here), or is a factor of a derivative wrong?")]
    words = f"it equals attention with scale {scale:.4g}, not {w.softmax_scale:.4g}: {row.name} is {slope:.4g} times as large"
    return [Hint("scale-wrong", words)] if overlap > size / 2 else []


def _of_steps(name: str, bad: torch.Tensor, reference: Reference, case: Case) -> list[Hint]:
    """Name the step that leaves least unexplained, of those that explain the whole case."""
    first = _seen_first(name, bad, reference, case)
    if first is None:
        return []

    def every() -> Iterator[GradientOfRegion]:
        for got, of in case.of(name):
            yield from (GradientOfRegion(name, got, of, each, None) for each in regions_of(of, name, bad))

    known = _best(backward_faults.faults_of_steps(name, reference), first, every, _STEPS, case.time)
    found = known or _best(
        backward_faults.wrong_slope_of_cap(first), first, every, _STEPS, case.time
    )  # which is fitted, and comes nearer
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
    elif name in ("out", "lse") and (tile := forward_faults.blind_tile(bad, reference)):
        words = f"each of these rows sees no key in the first tile of {tile} keys that is visited: -inf less -inf is NaN"
        found.append(Hint("blind-tile", words))
    elif name == "out" and not infinities and (splits := forward_faults.blind_split(bad, reference))[0]:
        words = f"each of these rows sees no key in one of {splits[0]} splits of the keys (whole tiles of {splits[1]})"
        found.append(Hint("blind-split", f"{words}: its share of 0 / 0 is NaN"))
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
    """Return whether the rows hold the mean of v over all keys, as a softmax of equal scores does."""
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
    """Return whether these are rows, and none sees a key."""
    return bool(len(lse)) and bool((lse == -math.inf).all())


# -- where nothing explains it ---------------------------------------------------------------------------------------------


def _traces(got: torch.Tensor, bad: torch.Tensor, name: str, sampled: torch.Tensor | None) -> list[Hint]:
    """Return what the wrong rows (batch, heads, rows) of a tensor, heads-first, have in common."""
    found = [] if bool(got[bad].any()) else [Hint("zeros-there", f"{name} is 0 in all of these rows")]
    if name != "lse" and sampled is None and got.dim() == 4 and (reach := _reach(got, bad)):
        words = (
            f"{name} is wrong from element {reach:,} (2^{reach.bit_length() - 1}) on and right before: do offsets wrap there?"
        )
        found.append(Hint("offset-wraps", words))
    return found


#: by which part of their size means of v by other weights are off, and no rows of another place, and of which part of the rows
_FAR, _RANDOM, _MOST_ROWS = 0.1, 0.6, 0.95


def _out_of_scope(got: torch.Tensor, bad: torch.Tensor, reference: Reference) -> list[Hint]:
    """Say that another function than softmax attention is not judged here, where all rows are far from exact attention.

    Of a kernel that reads a page table nothing: that is misread more often.
    """
    exact = reference.tensors["out"].value
    off = float((got.double().to(exact.device) - exact).norm() / exact.norm()) if bool(exact.any()) else 0.0
    if reference.workload.kv_pages or not _FAR < off < _RANDOM or float(bad.double().mean()) < _MOST_ROWS:
        return []
    words = (
        f"no known cause fits, and out is off by {off:.0%} in all rows: if it has no softmax, or approximates attention by"
        " design (FAVOR+, linear or ReLU attention), it is out of scope"
    )
    return [Hint("", words, "scope")]


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
    return power if power >= 1 << LEAST_BITS and power >= first * dim and first % rows else 0


#: scores of a workload above which its exact attention takes long
_AGAIN_ELEMENTS = 1 << 26
_SCALE_STEPS = 6
#: by how much the logarithm of a scale is off, at least
_LEAST_OFF = 1e-3
GRADIENTS = frozenset(("dq", "dk", "dv"))
#: what is left out where time is over
_PROFILES = "precision profiles"
#: under a profile, or with a scale, that is suggested: the part of each limit that is reached at most, and where roundings are
#: repeated the part of the deviation that is left at most
_ROOM, _MOST_LEFT, _MOST_LEFT_BY_TF32 = 5 / 8, 0.9, 0.5
#: the part of a head's limit: short heads, of which all is rounded alike, come near 1 of 1.5
_ROOM_OF_HEADS = 0.7
#: a factor that is off explains this share of a deviation, and more than chance does so many stds away
_FACTOR_SHARE, _FACTOR_STDS = 0.1, 5.0


def _is_rounded_scale(scale: float, w: Workload) -> bool:
    """Return whether a scale is the workload's, kept in its dtype."""
    kept = float(torch.tensor(w.softmax_scale, dtype=getattr(torch, w.dtype)))
    return kept != w.softmax_scale and math.isclose(scale, kept, rel_tol=5e-4)


def scale_or_profile(tried: RowsOfOut, case: Case) -> list[Hint]:
    """Name the scale that explains out, or the precision profiles whose roundings do: what leaves less of the deviation."""
    w = case.workload
    profiles = fitting_profiles("out", SUGGESTED, case)
    scale = None if case.time.is_over("another scale") else _fitted_scale(tried, case)
    if scale is not None:
        words = f"with scale {scale:.4g}, not {w.softmax_scale:.4g}"
        other = on_rows(AttentionFault("scale-wrong", words, of_workload(w, scale=scale)), case.limits[0])
        near = replace(other, tolerance=other.tolerance._replace(element=_ROOM * case.limits[0].element))
        fit = explains(other if _is_rounded_scale(scale, w) else near, tried)
        if fit is not None and all(explains(other, rows) for rows in _spread_rows(case)):
            return [Hint(other.fault, f"{other.words} (z {fit.z:.1f} there)")]
    return profiles or _rounded_scores(tried, case)


def _rounded_scores(tried: RowsOfOut, case: Case) -> list[Hint]:
    """Name another dtype than the workload's to which the scores are rounded."""
    seen = _in_all_rows(tried)
    for other in case.time.each("other dtypes of scores", rounded_scores(case.workload)):
        fault = on_rows(other, case.limits[0])
        told = replace(fault, tolerance=fault.tolerance._replace(left=_MOST_LEFT))
        if (fit := explains(told, seen)) and all(explains(fault, rows) for rows in _spread_rows(case)):
            return [Hint(fault.fault, f"{fault.words} (z {fit.z:.1f} there)")]
        # scores at the border of two numbers round to the other one, which is far beyond the budget of a float32
        repeated = replace(fault, tolerance=Tolerance(left=_MOST_LEFT_BY_TF32))
        if all(explains(repeated, _in_all_rows(rows)) for rows in (tried, *_spread_rows(case))):
            return [Hint(fault.fault, fault.words)]
    return []


def _in_all_rows(tried: RowsOfOut) -> RowsOfOut:
    """Return rows of out all of whose deviation has to be explained."""
    return replace(tried, view=tried.view._replace(bad=torch.ones_like(tried.view.got[..., 0], dtype=torch.bool)))


def _fitted_scale(tried: RowsOfOut, case: Case) -> float | None:
    """Return the scale that explains the rows best, by Gauss-Newton in its logarithm.

    None where it is the workload's own, or explains too little of the deviation to be told from rounding.
    """
    w, got = case.workload, tried.view.got
    inputs, precision = tried.reference.inputs, tried.reference.precision

    def out(scale: float) -> torch.Tensor:
        return compute_reference(inputs, precision, rows=tried.rows, workload=w.replace(scale=scale)).tensors["out"].value

    scale, step = w.softmax_scale, 0.01
    for _ in range(_SCALE_STEPS):
        at = out(scale)
        slope = (out(scale * math.exp(step)) - at) / step
        steepness = float(slope.square().sum())
        off = (got.double() - at).nan_to_num(0, 0, 0)
        change = float((off * slope).sum()) / steepness if steepness else 0.0
        if not math.isfinite(change):
            return None
        scale *= math.exp(max(-1.0, min(1.0, change)))
        if abs(change) < 1e-5:
            break
    rest, deviation = (float((got.double() - value).nan_to_num(0, 0, 0).norm()) for value in (out(scale), tried.view.exact))
    is_told = rest <= _MOST_LEFT * deviation
    return scale if is_told and abs(math.log(scale / w.softmax_scale)) > _LEAST_OFF else None


def fitting_profiles(name: str, profiles: Iterable[str], case: Case) -> list[Hint]:
    """Name those of the profiles under which the whole case would pass with room, and whose roundings explain the tensor.

    Rare ones where no other does.
    """
    declared = case.returned[0].reference.precision.name
    names = [one for one in profiles if one != declared and not (SUGGESTED[one].moves_lse and case.scores_are_exact)]
    for some in ([one for one in names if one not in RARE], [one for one in names if one in RARE]):
        tried = {profile: _z_under(SUGGESTED[profile], name, case) for profile in case.time.each(_PROFILES, some)}
        fitting = {profile: z for profile, z in tried.items() if z is not None}
        if fitting:
            return [_hint_of_profiles(fitting, declared, case.workload.out_dtype)]
    return []


def _hint_of_profiles(fitting: Mapping[str, float], declared: str, dtype: str) -> Hint:
    """Return what to say of profiles that fit, with the largest z under each."""
    first = next(iter(fitting))
    profiles = ", ".join(f"{profile!r} (z {z:.1f} there)" for profile, z in fitting.items())
    other = "with tf32 off" if dtype == "float32" else "in float32"
    words = (
        f"it fits the precision profile {profiles}, not {declared!r}; if it really {SUGGESTED[first].words(dtype)},"
        f" say precision={first!r}. A scale off by 1 % may look the same: compare {other} first, which must pass as it is"
    )
    return Hint(PRECISION + first, words)


def _rounds_so(profile: Precision, name: str, case: Case) -> bool:
    """Return whether the roundings of a profile, repeated, explain the deviation on the distribution that failed.

    Of sums, whose order nobody knows, it is asked that neither another scale nor a factor of the result explains any of it.
    """
    w = case.workload
    row = next(row for row in case.rows if row.name == name and not row.passed)
    one = next(one for one in case.returned if one.distribution == row.distribution)
    expected = one.reference.tensors[name]
    if one.reference.is_sampled and name != "out":
        return False
    weight = 1 / expected.tau.where(expected.tau > 0, 1)
    got = looked_at(name, one.tensors[name], expected, w).double().to(weight.device)

    def off(attention: Callable[[Inputs], Other]) -> torch.Tensor:
        """Return what another attention leaves, in budgets of the declared profile."""
        inputs, variant = attention(one.reference.inputs)
        backward, rows = name.startswith("d"), one.reference.rows
        other = compute_reference(inputs, profile, backward, rows, workload=variant)
        return ((got - other.tensors[name].value) * weight).nan_to_num(0, 0, 0)

    plain = ((got - expected.value) * weight).nan_to_num(0, 0, 0)
    repeated = [off(attention) for attention in roundings(profile, w)]
    if repeated:
        left = min(repeated, key=lambda one: float(one.norm()))
        if profile.operand_unit:  # P is cut, too, which is not repeated
            return float(left.norm()) <= _MOST_LEFT_BY_TF32 * float(plain.norm())
        of_heads = float(left.square().flatten(2).mean(-1).max()) ** 0.5
        return float(left.norm()) <= _MOST_LEFT * float(plain.norm()) and of_heads <= max(1.0, row.limits.head)
    share = max(_FACTOR_SHARE, _FACTOR_STDS**2 / math.prod(plain.shape[:3]))
    of_scale = plain - off(of_workload(w, scale=w.softmax_scale * 1.01))
    return all(_share_along(direction, plain) <= share for direction in (of_scale, expected.value * weight))


def _share_along(direction: torch.Tensor, left: torch.Tensor) -> float:
    """Return which share of the square of a deviation is a multiple of a direction."""
    size, square = float(direction.square().sum()), float(left.square().sum())
    return float((direction * left).sum()) ** 2 / size / square if size and square else 0.0


def _z_under(profile: Precision, name: str, case: Case) -> float | None:
    """Return the largest |z| of tensors of this name under another profile.

    None unless the whole case passes with room, and its roundings explain the tensor.
    """
    is_long = score_elements(case.workload) > _AGAIN_ELEMENTS  # but for sampled rows of out
    is_of_few_rows = any(one.reference.is_sampled for one in case.returned)
    has_gradients = any(not GRADIENTS.isdisjoint(one.tensors) for one in case.returned)
    if (is_long and (has_gradients or not is_of_few_rows)) or _fails_on_one_head(profile, name, case):
        return None
    if not _rounds_so(profile, name, case):
        return None
    largest = 0.0
    for distribution, reference, tensors in case.returned:
        other = _exact_with(reference, profile, case.workload, backward=not GRADIENTS.isdisjoint(tensors))
        for row in compare_all(distribution, tensors, other, case.workload, case.limits):
            if not row.passed or not _has_room(row):
                return None
            largest = max(largest, row.z_element if row.name == name else 0.0)
    return largest


def _exact_with(reference: Reference, profile: Precision, w: Workload, backward: bool) -> Reference:
    """Return what a reference has of the same inputs, with the budget of a profile and the options of a workload."""
    more = reference.parameters, reference.extra
    return compute_reference(reference.inputs, profile, backward, reference.rows, w, *more, keys=reference.keys)


def _has_room(row: TensorComparison) -> bool:
    """Return whether a tensor is far from its limits; heads of gradients are near theirs where nothing is wrong."""
    has_room = row.limits.excess(row.z_element, row.z_row, 0.0, row.z_slope) <= _ROOM
    return has_room and (row.name.startswith("d") or row.z_head <= _ROOM_OF_HEADS * row.limits.head)


def _fails_on_one_head(profile: Precision, name: str, case: Case) -> bool:
    """Return whether the worst head alone fails under a profile, which costs little to find out where heads are alike."""
    row = next((row for row in case.rows if row.name == name and not row.passed), None)
    if row is None or case.returned[0].reference.is_sampled or not _has_heads_alike(case.workload):
        return False
    w, one = case.workload, next(one for one in case.returned if one.distribution == row.distribution)
    batch, head = row.worst[0], row.worst[1] if name in ("dk", "dv") else key_heads(w)[row.worst[1]]
    of_keys = (slice(batch, batch + 1), slice(head, head + 1))
    mine = slice(head, None, w.kv_heads) if is_interleaved(w) else slice(head * w.group, (head + 1) * w.group)
    of_queries = (of_keys[0], mine)
    alone, inputs = w.replace(batch=1, heads=w.group, kv_heads=1), one.reference.inputs
    q, dout = inputs.q[of_queries], inputs.dout[of_queries]
    inputs = dataclasses.replace(inputs, workload=alone, q=q, dout=dout, k=inputs.k[of_keys], v=inputs.v[of_keys])
    reference = compute_reference(inputs, profile, backward=name.startswith("d"))
    got = one.tensors[name][of_keys if name in ("dk", "dv") else of_queries]
    return not all(found.passed for found in compare_all(row.distribution, {name: got}, reference, alone, case.limits))


def _has_heads_alike(w: Workload) -> bool:
    """Return whether there are several key heads, or entries, and one is an attention with q, k and v of its own alone."""
    has_own_tensors = w.bias or w.alibi or w.sinks or w.score_mod or not w.has_positional_mask
    return w.batch * w.kv_heads > 1 and not (has_own_tensors or w.is_packed or w.kv_lens)


def _spread_rows(case: Case) -> Iterator[RowsOfOut]:
    """Yield rows of out on each distribution, evenly spread; all of packed sequences."""
    for got, reference in case.of("out"):
        every = torch.arange(got.shape[2], device=got.device)
        yield RowsOfOut.of(got, reference, None if case.workload.is_packed else forward_faults.evenly_spread(every, MANY_ROWS))
