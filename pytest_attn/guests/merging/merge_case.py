"""Judgment of a merge: attention over parts of the keys is put together by their lse, and held against float64.

A part is its out and lse, rounded as a kernel returns them. Exact is the merge of these very parts, so only the merge is
judged. With weights w_i = exp(lse_i - lse) and the unit roundoff u of out's dtype, the budget of an element is

    tau^2 = (n - 1) (u^2 out^2 + s^2 sum_i ((w_i o_i)^2 + (o_i - out)^2)) + eps^2 out^2 + sum_i (eps_i w_i (o_i - out))^2

of the result, of weighted parts and of the differences by which some merges correct a sum, rounded each time that one of n
parts is added, s being at least what a fast exp loses; eps is what float32 loses of an lse. Gradients are d o_i = w_i dout and
d lse_i = w_i g_i, where g_i = dout . (o_i - out) + dlse, within

    tau^2 = (n - 1) s^2 (2 w_i^2 + (1 - w_i)^2) dout^2 + (eps^2 + eps_i^2) (w_i dout)^2
    tau^2 = (n - 1) s^2 ((g_i - dlse)^2 + dlse^2 + 3 w_i^2 m)
            + w_i^2 ((eps^2 + eps_i^2) g_i^2 + sum_j (eps_j w_j g_j)^2 + (eps dout . out)^2)

of weights, of gradients, of the products and sums of dout . o, m being the largest of those of a part, squared, and of out as
a backward pass may read it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_attn.backends.declaration import Declaration, one_of, turned
from pytest_attn.backends.gradients import gradients_of, nodes_behind
from pytest_attn.backends.precision import FLOOR, LSE_UNIT, SHARED, UNIT
from pytest_attn.backends.raised import declined_because
from pytest_attn.backends.subject import RefusedError
from pytest_attn.cases.case import AttentionCase, context_of
from pytest_attn.cases.case_records import figures_of
from pytest_attn.cases.conclude import conclude
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator
from pytest_attn.cases.judgment import Judgment
from pytest_attn.correctness import mismatch_text
from pytest_attn.correctness.comparison import Comparison, Evidence, Hint, Mismatch, Returned
from pytest_attn.correctness.contract import ContractError, check_tensor, elements, plain
from pytest_attn.correctness.judge import LSE_TOLERANCE, compare_all, mismatch_of
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import Expected, Reference, heads_first
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.hypothesis import OF_STEPS, FaultHypothesis, Prediction, View, explains
from pytest_attn.diagnosis.steps import Region, RegionScores
from pytest_attn.reports.verdict import Verdict
from pytest_attn.workloads.fields import is_whole
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload, sequence_lengths

__tracebackhide__ = True  # pytest shows a merge's own frames, not ours

#: identity -> what is wrong
FAULTS_OF_MERGES = {
    "merge-base": "lse is taken in another base",
    "merge-base-of-a-part": "the lse of one part is taken in another base",
    "merge-lse-overwritten": "lse is written over a part's before its weight is taken",
    "merge-empty-as-zero": "an lse of -inf is taken as 0",
    "merge-weights-of-another-part": "parts have the weights of others",
    "merge-part-scaled": "one part has a factor of its own, or its lse has",
    "merge-not-normalized": "weights are not divided by their sum",
    "merge-part-missing": "one part is left out",
    "merge-part-twice": "one part counts twice",
    "merge-lse-layout": "lse is read in another order of its dimensions",
    "merge-mean": "parts are averaged, whatever their lse",
    "merge-of-one-part": "the result is that of one part",
    "merge-lse-of-largest": "lse is the largest of the parts', and not their sum",
    "merge-nan-without-keys": "rows in which a part, or each, has no keys are NaN",
    "merge-overflow": "exp(lse) overflows, as no maximum is subtracted before",
    "merge-gradient-missing": "a part's out or lse has no gradient",
    "merge-gradient-weight": "the gradient of a part's out has another weight",
    "merge-gradient-sum": "the gradient of lse lacks a term",
    "merge-gradient-base": "the gradient of lse has the factor of another base",
}
#: relative error of the exp of GPUs that is fast
_FAST_EXP = 2.0**-22
#: what lse is moved by, up and down: exp of it is beyond float32
_FAR = 200.0
#: scores that are computed at once, and of a workload at most
_CHUNK, _MOST = 1 << 22, 1 << 32
#: by how much a factor may differ from that between bases
_OF_BASE = 0.01
_ORDINALS = ("first", "second", "third", "fourth")


def check_merge(
    case: AttentionCase, fn: Callable[..., Any], parts: int = 2, name: str | None = None, empty_parts: bool = True
) -> Comparison:
    """Hold a merge of `parts` partial results against float64, in arrangements that split the workload's keys.

    fn: takes (out_a, lse_a, out_b, lse_b), of more than two parts the lists (outs, lses), in the marker's layout, lse_layout
    and lse_base; returns out, or (out, lse), and may write them over what it was given. name: what reports call it.
    empty_parts: whether a part may have no keys, for all rows or some; where no caller hands over such a part, as in a ring
    that begins with its own keys, False leaves them out.

    Where the marker says backward=True, and out requires grad, gradients of each part's out and lse are judged as well.

    Returns the comparison. Raises AssertionError where the merge is wrong, naming the arrangement.
    """
    __tracebackhide__ = True
    if not is_whole(parts, 2):
        raise ValueError(f"attn.check_merge: parts must be a whole number >= 2, got {parts!r}")
    if not callable(fn):
        raise TypeError(f"attn.check_merge takes a callable, got {describe(fn)}")
    one_of(True, False)("attn.check_merge: empty_parts", empty_parts)
    context = context_of(case)
    subject = context.subject(fn, name, case._spec).name
    return conclude(context, MergeEvaluator(fn, parts, subject, case._spec, empty_parts))


class Parts(NamedTuple):
    """Partial results, a dimension of parts before those of (batch, heads, rows, dim); lse is natural, without the last.

    words: the arrangement. is_strided: whether lse lies in memory in another order than its dimensions.
    """

    words: str
    outs: Tensor
    lses: Tensor
    is_strided: bool = False

    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return out, lse, and the weights of parts, (parts, batch, heads, rows, 1)."""
        lse = self.lses.logsumexp(0)
        weights = (self.lses - lse).exp().nan_to_num(0.0).unsqueeze(-1)
        return (weights * self.outs).sum(0), lse, weights

    def named(self) -> tuple[list[str], list[str]]:
        """Return what a merge calls the outs and the lses of parts."""
        if len(self.outs) == 2:
            return ["out_a", "out_b"], ["lse_a", "lse_b"]
        first, second = ([f"{of}[{n}]" for n in range(len(self.outs))] for of in ("outs", "lses"))
        return first, second


class Arriving(NamedTuple):
    """Gradients in float64 that arrive at out, (batch, heads, rows, dim), and at natural lse, (batch, heads, rows, 1)."""

    dout: Tensor
    dlse: Tensor

    def at_parts(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return what arrives at the weighted outs, and at the weights of parts, less dout . out: g_i / w_i."""
        of_parts, of_out = ((self.dout * x).sum(-1, keepdim=True) for x in (parts.outs, parts.merged()[0]))
        return self.dout.expand_as(parts.outs), of_parts - of_out + self.dlse


# -- arrangements ----------------------------------------------------------------------------------------------------------


def arrangements(inputs: Inputs, count: int, takes_strides: bool, may_be_empty: bool) -> Iterator[Parts]:
    """Yield parts in float64, those of very unequal lengths first. A row without keys is 0 with lse 0 unless that may be."""
    for parts in _arranged(inputs, count, takes_strides, may_be_empty):
        yield parts if may_be_empty else parts._replace(lses=parts.lses.masked_fill(parts.lses == -math.inf, 0.0))


def _arranged(inputs: Inputs, count: int, takes_strides: bool, may_be_empty: bool) -> Iterator[Parts]:
    w = inputs.workload
    length = max(keys for _, keys in sequence_lengths(w)) if w.is_packed else w.kv_len
    sizes = _unequal(length, count)
    outs, lses = _partial(inputs, count, _unequal)
    yield Parts(_words(sizes), outs, lses)
    yield Parts(_words(sizes[::-1]), outs.flip(0), lses.flip(0))
    outs, lses = _partial(inputs, count, _even)
    words = _words(_even(length, count))
    yield Parts(words, outs, lses)
    rows = torch.arange(lses.shape[-1], device=lses.device)
    if may_be_empty:
        for part in range(count):
            missing = torch.arange(count, device=lses.device) == part
            yield _without(Parts(f"the {_ordinal(part)} part has no keys", outs, lses), missing.view(-1, 1, 1, 1))
        yield _without(Parts("no part has keys in every third row", outs, lses), rows % 3 == 0)
    if takes_strides:
        yield Parts(f"{words}, lse strided", outs, lses, is_strided=True)
    places = rows + torch.arange(lses.shape[2], device=lses.device).unsqueeze(-1)
    of_parts = torch.arange(count, device=lses.device).view(-1, 1, 1, 1) * (places % 7 == 0)
    signs = 1 - 2 * ((places + of_parts) % 2)
    for far, said in ((_FAR, "higher or lower"), (-_FAR, "lower or higher")):  # as few rows have parts apart one way only
        yield Parts(f"{words}, lse {_FAR:g} {said}, in some rows by part", outs, lses + far * signs)


def _unequal(length: int, count: int) -> list[int]:
    ones = [int(part < length) for part in range(count - 1)]
    return [*ones, length - sum(ones)]


def _even(length: int, count: int) -> list[int]:
    return [length * (part + 1) // count - length * part // count for part in range(count)]


def _words(sizes: Sequence[int]) -> str:
    return f"parts of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} keys"


def _ordinal(part: int) -> str:
    return _ORDINALS[part] if part < len(_ORDINALS) else f"{part + 1}th"


def _without(parts: Parts, missing: Tensor) -> Parts:
    outs = parts.outs.masked_fill(missing.unsqueeze(-1), 0.0)
    return parts._replace(outs=outs, lses=parts.lses.masked_fill(missing, -math.inf))


def _partial(inputs: Inputs, count: int, split: Callable[[int, int], list[int]]) -> tuple[Tensor, Tensor]:
    """Return exact attention over each part of the keys, without sinks, of each sequence."""
    w, found = inputs.workload, []
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        step = max(1, _CHUNK // max(1, w.heads * kv_len))
        positions = torch.arange(q_len, device=inputs.device)
        chunks = (Region(batch, positions[start : start + step]) for start in range(0, q_len, step))
        some = [_rows_of(inputs, region, count, split) for region in chunks]
        found.append([torch.cat(tensors, 3) for tensors in zip(*some, strict=True)])
    outs, lses = zip(*found, strict=True)
    dim = 3 if w.is_packed else 1
    return torch.cat(outs, dim), torch.cat(lses, dim)


def _rows_of(inputs: Inputs, rows: Region, count: int, split: Callable[[int, int], list[int]]) -> tuple[Tensor, Tensor]:
    region = RegionScores(inputs, inputs.workload, rows)
    ends, outs, lses, group = [0, *accumulate(split(len(region.at), count))], [], [], inputs.workload.group
    for start, end in pairwise(ends):
        scores, v = region.scores[..., start:end], region.v[:, :, start:end]
        lses.append(scores.logsumexp(-1))
        p = (scores - lses[-1].unsqueeze(-1)).exp().nan_to_num(0.0)
        outs.append(p @ v.double().repeat_interleave(group, 1))
    return torch.stack(outs), torch.stack(lses)


# -- the judgment ----------------------------------------------------------------------------------------------------------


class MergeEvaluator(Evaluator[Comparison]):
    """Holds a merge against float64 in all arrangements, up to the first in which it is wrong."""

    question = "merge"

    def __init__(self, fn: Callable[..., Any], parts: int, subject: str, spec: CheckSpec, may_be_empty: bool) -> None:
        self._fn, self._parts, self._spec, self.subject, self._may_be_empty = fn, parts, spec, subject, may_be_empty
        self.workload, self.on, self.doing = spec.workload, spec.workload.id, f"merging parts by {subject}"

    def judge(self, context: CaseContext) -> Judgment[Comparison]:
        __tracebackhide__ = True
        w, declared = self.workload, self._spec.declared
        if w.heads * sum(queries * keys for queries, keys in sequence_lengths(w)) > _MOST:
            return Judgment.refused(self.subject, f"parts of {w.id} take more than {_MOST:,} scores; merge shorter ones")
        distribution = self._spec.inputs[0]
        drawn = context.session.references.reference_of(self._spec, distribution)
        of_results, of_gradients = limits_named(self._spec.limits)  # of gradients of lse an element is a row
        limits = of_results, replace(of_gradients.without_slope, row=of_gradients.element)
        comparison = Comparison(w.id, str(self.subject), ())
        for exact in arrangements(drawn.inputs, self._parts, not declared.contiguous, self._may_be_empty):
            given = Handed(exact, w, declared)
            self.on = f"{w.id}, given {given.words}"
            with context.session.deadline.around(f"{self.subject} on {w.id}, {context.item.nodeid}"):
                results = given.results_of(self._fn, drawn.inputs, self._spec.backward)
            reference = Reference(drawn.inputs, self._spec.profile, given.expected())
            returned = Returned(f"{distribution}, {exact.words}", reference, results)
            rows = compare_all(returned.distribution, results, reference, w, limits)
            unjudged = (f"gradients of a merge: {given.unjudged}",) if given.unjudged else ()
            comparison = replace(comparison, tensors=(*comparison.tensors, *rows), unjudged=unjudged)
            if wrong := [row for row in rows if not row.passed]:
                mismatch = mismatch_of(wrong[0], Evidence(w, returned, (returned,), limits))
                comparison = replace(comparison, mismatch=replace(mismatch, hints=given.hints(mismatch), evidence=None))
                break
        facts: Any = {"fields": figures_of(comparison)}
        if comparison.passed:
            return Judgment(Verdict.PASSED, comparison, **facts)
        facts |= {"text": mismatch_text.describe(comparison), "evidence": "the parts of a merge are not kept"}
        return Judgment(Verdict.MISMATCH, reason=mismatch_text.headline(comparison), **facts)


class Handed:
    """Parts as a merge gets them: rounded, in the layouts and the base of a declaration.

    parts: of the rounded values, in float64. arriving: gradients that a merge was given, None where it has no backward pass,
    or none was asked for. unjudged: why gradients that were asked for are not judged.
    """

    def __init__(self, exact: Parts, w: Workload, declared: Declaration) -> None:
        self._workload, self._declared, self._strided = w, declared, exact.is_strided
        self._native = ("bhtd", "thd") if w.is_packed else ("bhsd", "bhsd"), ("bhs", "hs" if w.is_packed else "bhs")
        self._unit = math.log(2) if declared.lse_base == 2 else 1.0
        self._outs, self._lses = exact.outs.to(getattr(torch, w.out_dtype)), (exact.lses / self._unit).float()
        self.parts = exact._replace(outs=self._outs.double(), lses=self._lses.double() * self._unit)
        self.arriving: Arriving | None = None
        self.unjudged = ""

    @property
    def words(self) -> str:
        """What a merge is called with, and the shapes of a part."""
        out, lse = self._laid_out("out", self._outs[0]), self._laid_out("lse", self._lses[0])
        names = "out_a, lse_a, out_b, lse_b" if len(self._outs) == 2 else f"lists of {len(self._outs)} outs and lses"
        return f"{names} of shapes {tuple(out.shape)} and {tuple(lse.shape)}"

    def results_of(self, fn: Callable[..., Any], inputs: Inputs, backward: bool = False) -> dict[str, Tensor]:
        """Call a merge; return its results by name, in native layout, with the gradients that it has.

        Raises ContractError for what cannot be compared.
        """
        __tracebackhide__ = True
        outs, lses = ([self._laid_out(name, one) for one in of] for name, of in (("out", self._outs), ("lse", self._lses)))
        if not backward:
            returned = self._called(fn, outs, lses, inputs)
        else:
            given = [leaf.requires_grad_().clone() for leaf in (*outs, *lses)]  # which a merge may write over
            returned = self._called(fn, given[: len(outs)], given[len(outs) :], inputs)
        results = {name: self._native_result(name, tensor.detach()) for name, tensor in returned.items()}
        return results | self._gradients(returned, [*outs, *lses], given, inputs) if backward else results

    def _gradients(
        self, returned: dict[str, Tensor], leaves: list[Tensor], given: list[Tensor], inputs: Inputs
    ) -> dict[str, Tensor]:
        """Return the gradients of each part by the names of what fn takes, in native layout; none where there are none."""
        __tracebackhide__ = True
        written = [name for name, tensor in returned.items() if _is_written_over(tensor, leaves, given)]
        ends = [name for name, tensor in returned.items() if tensor.requires_grad and name not in written]
        if written:
            self.unjudged = "it writes over a part without autograd"
        elif "out" not in ends:
            self.unjudged = "what it returns does not require grad"
        if "out" not in ends:
            return {}
        dout = heads_first(inputs.dout, self._workload)
        self.arriving = Arriving(dout.double(), dout[..., :1].double() * ("lse" in ends))
        arriving = {"out": dout, "lse": dout[..., 0].double() * self._unit}
        arrived = [self._laid_out(name, arriving[name]).to(returned[name].dtype) for name in ends]
        found = gradients_of([returned[name] for name in ends], leaves, arrived)
        gradients = {}
        named = zip(chain(*self.parts.named()), leaves, found, self._left_out(), strict=True)
        for name, leaf, gradient, left_out in named:
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            kind = name[:3]
            seen = turned(gradient, self._declared.letters(kind, self._workload.is_packed)[1], self._native[kind == "lse"][0])
            seen = seen.double().unsqueeze(-1) / self._unit if kind == "lse" else seen
            gradients[f"d{name}"] = turned(seen.masked_fill(left_out, 0.0), *self._native[0])
        return gradients

    def _left_out(self) -> Iterator[Tensor]:
        """Yield in which rows no gradient of each out and lse is judged: no part has keys, or the one whose lse it is."""
        no_keys = self.parts.lses.logsumexp(0) == -math.inf
        yield from (no_keys.unsqueeze(-1) for _ in self.parts.outs)
        yield from (lse.unsqueeze(-1) == -math.inf for lse in self.parts.lses)

    def _called(self, fn: Callable[..., Any], outs: list[Tensor], lses: list[Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """Return what a merge returns, by name."""
        __tracebackhide__ = True
        shapes = [tuple(outs[0].shape), tuple(lses[0].shape)]
        try:
            result = fn(outs[0], lses[0], outs[1], lses[1]) if len(outs) == 2 else fn(outs, lses)
        except NotImplementedError as error:
            if reason := declined_because(error):
                raise RefusedError(reason) from None
            raise
        several = [result] if (found := elements(result)) is None else found
        if result is None or not 1 <= len(several) <= 2:
            returned = "nothing (None)" if result is None else f"a {type(result).__name__} of {len(several)}"
            raise ContractError(
                f"the callable returned {returned}; expected out or (out, lse): return the tensors that it writes over, too"
            )
        results = {}
        for name, shape, value in zip(("out", "lse"), shapes, several, strict=False):
            tensor = plain(name, value)
            is_wide = name == "out" and getattr(tensor, "dtype", None) == torch.float32
            check_tensor(name, tensor.to(self._outs.dtype) if is_wide else tensor, shape, inputs)
            results[name] = tensor
        return results

    def _laid_out(self, name: str, tensor: Tensor) -> Tensor:
        heads_before, _ = self._native[name == "lse"]
        _, users = self._declared.letters(name, self._workload.is_packed)
        tensor = turned(tensor, heads_before, users)
        if self._strided and name == "lse":
            return tensor.mT.clone(memory_format=torch.contiguous_format).mT
        return tensor.clone(memory_format=torch.contiguous_format)

    def _native_result(self, name: str, tensor: Tensor) -> Tensor:
        """Return a result as it is compared, in base e; what the caller leaves to a merge where no part has keys is right."""
        _, users = self._declared.letters(name, self._workload.is_packed)
        tensor = turned(tensor, users, self._native[name == "lse"][1])
        if name == "lse":
            tensor = tensor.double() * self._unit
        if self._declared.empty_rows == "zero":
            return tensor
        seen = heads_first(tensor, self._workload)
        numbers = seen if name == "lse" else (seen * 0).sum(-1)  # NaN where any element is none
        is_free = (self.parts.lses.logsumexp(0) == -math.inf) & (~numbers.isnan() | (self._declared.empty_rows == "any"))
        kept = seen.masked_fill(is_free, -math.inf) if name == "lse" else seen.masked_fill(is_free.unsqueeze(-1), 0.0)
        return turned(kept, *self._native[name == "lse"])

    def expected(self) -> dict[str, Expected]:
        """Return the exact merge, with the budget of out; with its gradients, where any arrive."""
        out, lse, weights = self.parts.merged()
        dtype, outs = self._workload.out_dtype, self.parts.outs
        step, floor = max(UNIT[dtype], _FAST_EXP) ** 2 * (len(outs) - 1), FLOOR[dtype] ** 2 * (len(outs) - 1)
        steps = (weights * outs).square().sum(0) + (outs - out).square().sum(0)
        rounded = out.square() * UNIT[dtype] ** 2 * (len(outs) - 1) + steps * step + floor
        eps, eps_of_parts = (
            (x.where(x.isfinite(), 0.0).abs() + 4).mul(SHARED * LSE_UNIT).unsqueeze(-1) for x in (lse, self.parts.lses)
        )
        drift = (eps * out).square() + (eps_of_parts * weights * (outs - out)).square().sum(0)
        tau = (rounded + drift).sqrt().masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
        found = {"out": Expected(out, tau.float()), "lse": Expected(lse, torch.zeros_like(lse).float())}
        if self.arriving is None:
            return found
        dout, g = self.arriving.at_parts(self.parts)
        largest = ((dout * outs).square().sum(-1, keepdim=True) + (dout * outs).sum(-1, keepdim=True).square()).amax(0)
        apart, shares = eps**2 + eps_of_parts**2, weights.square()
        of_outs = (step * (2 * shares + (1 - weights).square()) + apart * shares) * dout.square() + floor
        of_out = (eps * (dout * out).sum(-1, keepdim=True)).square()
        of_sums = apart * g.square() + (eps_of_parts * weights * g).square().sum(0) + of_out
        cancelling = (g - self.arriving.dlse).square() + self.arriving.dlse.square()  # which may cancel out in g
        of_lses = step * (cancelling + 3 * shares * largest) + shares * of_sums
        of_both = chain(*self.parts.named()), (*(weights * dout), *(weights * g)), (*of_outs, *of_lses)
        for name, value, variance, left_out in zip(*of_both, self._left_out(), strict=True):
            found[f"d{name}"] = Expected(value.masked_fill(left_out, 0.0), variance.sqrt().masked_fill(left_out, 0.0).float())
        return found

    def hints(self, mismatch: Mismatch) -> tuple[Hint, ...]:
        """Return what explains a mismatch, most telling first."""
        assert mismatch.evidence is not None
        name, failed = mismatch.row.name, mismatch.evidence.failed
        got = heads_first(failed.tensors[name], self._workload)
        exact = failed.reference.tensors[name]
        if mismatch.row.wrong_positions:
            return tuple(self._about_numbers(got))
        value, tau = exact.value, exact.tau.double()
        if name == "lse":
            got, value, tau = (x.unsqueeze(-1) for x in (got, value, LSE_TOLERANCE * (1 + value.abs())))
        seen = Seen(View(got, value, tau, (got.double() - value).abs().gt(tau).any(-1)))
        found = []
        for fault, words, other in self._others(name, got, value):
            value = other.unsqueeze(-1) if name == "lse" else other
            std = tau + value.abs() * UNIT[self._workload.out_dtype] * (name == "out")
            hypothesis = FaultHypothesis(fault, words, _predicts(value, std), OF_STEPS)
            if fit := explains(hypothesis, seen):
                is_fitted = fault == "merge-part-scaled"  # and so explains what has a cause without a factor as well
                found.append(((is_fitted, fit.rank), Hint(fault, words)))
        return tuple(hint for _, hint in sorted(found, key=lambda one: one[0])[:1])

    def _others(self, name: str, got: Tensor, exact: Tensor) -> Iterator[tuple[str, str, Tensor]]:
        """Return the faults that a result may have, each with words and what it would be with them."""
        if name == "lse":
            return _other_lses(self.parts)
        if name == "out":
            return _other_outs(self.parts, got)
        assert self.arriving is not None
        return _other_gradients(self.parts, self.arriving, name, got, exact)

    def _about_numbers(self, got: Tensor) -> Iterator[Hint]:
        """Explain NaN and infinities where exact results have none."""
        lse, is_missing = self.parts.lses.logsumexp(0), self.parts.lses == -math.inf
        bad = got.isnan() | got.isposinf() if got.dim() == 3 else ~got.isfinite().all(-1)
        if bool(bad.any()) and bool((lse[bad] == -math.inf).all()):
            said = "lse - lse is -inf - (-inf) there; take 0 as the weight, and -inf as lse"
            yield Hint("merge-nan-without-keys", f"NaN in rows in which no part has keys: {said}")
        elif bool(bad.any()) and bool(is_missing.any(0)[bad].all()):
            said = "-inf - (-inf) is NaN; say empty_parts=False where no caller hands over such a part"
            yield Hint("merge-nan-without-keys", f"NaN in rows in which one part has no keys: {said}")
        elif bool(bad.any()) and bool((lse[bad].abs() > _FAR / 2).all()):
            yield Hint("merge-overflow", "exp(lse) is beyond float32: subtract the largest lse of the parts before exp")


def _is_written_over(result: Tensor, leaves: list[Tensor], given: list[Tensor]) -> bool:
    """Return whether a result lies in the memory of a part, and autograd knows no more of it than that part."""
    memory = {one.untyped_storage().data_ptr() for one in given}
    reached = {id(getattr(node, "variable", None)) for node in nodes_behind(result)}
    return result.untyped_storage().data_ptr() in memory and sum(id(leaf) in reached for leaf in leaves) == 1


# -- what merges are known to get wrong --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One tensor of one arrangement."""

    view: View


def _predicts(value: Tensor, std: Tensor) -> Callable[[Seen], Prediction]:
    return lambda _: Prediction(value, lambda: std)


def _other_outs(parts: Parts, got: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield identities of faults, words, and what out would be with them."""
    outs, lses = parts.outs, parts.lses
    right, _, weights = parts.merged()

    def by(lse: Tensor, part: int | None = None) -> Tensor:
        other = lse if part is None else lses.index_copy(0, torch.tensor([part], device=lses.device), lse.unsqueeze(0))
        return parts._replace(lses=other).merged()[0]

    bases = (("2", "e", math.log(2)), ("e", "2", 1 / math.log(2)))
    for base, given, factor in bases:
        words = f"lse in base {given} is taken as in base {base}"
        yield "merge-base", f"out is the merge in which {words}", by(lses * factor)
        for part in range(len(outs)):
            said = f"out is the merge in which {words} in the {_ordinal(part)} part"
            yield "merge-base-of-a-part", said, by(lses[part] * factor, part)
    for swapped in (weights.flip(0), *(weights.roll(step, 0) for step in range(1, len(outs)))):
        words = "out is the merge in which each part has the weight of another one"
        yield "merge-weights-of-another-part", words, (swapped * outs).sum(0)
    heads, rows = lses.shape[2:]
    as_rows_heads = lses.reshape(*lses.shape[:2], rows, heads).mT
    as_heads_rows = lses.mT.reshape(lses.shape)
    for order, other in (("(batch, rows, heads)", as_rows_heads), ("(batch, heads, rows)", as_heads_rows)):
        yield "merge-lse-layout", f"out is the merge in which the memory of lse is read as contiguous {order}", by(other)
    empty_as_zero = lses.masked_fill(lses == -math.inf, 0.0)
    yield "merge-empty-as-zero", "out is the merge in which an lse of -inf is taken as 0", by(empty_as_zero)
    yield "merge-mean", "out is the mean of the parts, whatever their lse", outs.mean(0)
    words = "out is the merge in which weights are not divided by their sum"
    yield "merge-not-normalized", words, (weights / weights.amax(0).clamp(min=1e-30) * outs).sum(0)
    for part in range(len(outs)):
        which = _ordinal(part)
        words = f"out is the merge in which the {which} part's lse is overwritten before its weight is taken"
        yield "merge-lse-overwritten", words, by(lses.logsumexp(0), part)
        if len(outs) > 2:
            yield "merge-part-missing", f"out is the merge without the {which} part", _without_part(parts, part)[0]
        yield (
            "merge-part-twice",
            f"out is the merge in which the {which} part counts twice",
            by(lses[part] + math.log(2), part),
        )
        yield "merge-of-one-part", f"out is that of the {which} part", outs[part]
        share = weights[part] * outs[part]
        factor = float(1 + ((got.double() - right) * share).sum() / share.square().sum())
        words = f"out is the merge in which the {which} part is multiplied by {factor:.3g}"
        yield "merge-part-scaled", words, right + (factor - 1) * share
        factor = _factor_of_lse(parts, part, got)
        words = f"out is the merge in which the {which} part's lse is multiplied by {factor:.3g}"
        yield "merge-part-scaled", words, by(lses[part] * factor, part)


def _without_part(parts: Parts, part: int) -> tuple[Tensor, Tensor, Tensor]:
    return parts._replace(lses=parts.lses.index_fill(0, torch.tensor(part, device=parts.lses.device), -math.inf)).merged()


def _factor_of_lse(parts: Parts, part: int, got: Tensor) -> float:
    """Return what the lse of a part would be multiplied by, as the weight of the part in a result says it."""
    others, lse, _ = _without_part(parts, part)
    towards = parts.outs[part] - others
    weight = ((got.double() - others) * towards).sum(-1) / towards.square().sum(-1)
    telling = (weight - 0.5).abs() < 0.45  # else rounding of out says more than the weight
    return float(((weight.logit() + lse) / parts.lses[part]).where(telling, math.nan).nanmedian())


def _other_lses(parts: Parts) -> Iterator[tuple[str, str, Tensor]]:
    """Yield identities of faults, words, and what lse would be with them."""
    lses, lse = parts.lses, parts.lses.logsumexp(0)
    yield "merge-lse-of-largest", "lse is the largest of the parts', and not the logarithm of their sum", lses.amax(0)
    for part in range(len(lses)):
        yield "merge-of-one-part", f"lse is that of the {_ordinal(part)} part", lses[part]
    for given, base, factor in (("e", "2", math.log(2)), ("2", "e", 1 / math.log(2))):
        yield "merge-base", f"lse is returned in base {base}, and given in base {given}", lse / factor
        summed = (lses * factor).logsumexp(0) / factor
        yield "merge-base", f"lse is added up as if it were in base {base}, and given in base {given}", summed


def _other_gradients(
    parts: Parts, arriving: Arriving, name: str, got: Tensor, exact: Tensor
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield identities of faults, words, and what the gradient of a part would be with them."""
    is_of_out = name[1:] in parts.named()[0]
    part = parts.named()[not is_of_out].index(name[1:])
    if not bool(got.any()):
        words = f"{name} is 0: are weights detached, or is it not handed back?"
        yield "merge-gradient-missing", words, torch.zeros_like(exact)
        return
    _, _, weights = parts.merged()
    dout, g = arriving.at_parts(parts)
    for other in range(len(weights)):
        if other != part:
            words = f"{name} has the weight of the {_ordinal(other)} part"
            yield "merge-gradient-weight", words, weights[other] * (dout if is_of_out else g)[part]
    yield "merge-gradient-weight", f"{name} has no weight", (dout if is_of_out else g)[part]
    if not is_of_out:
        of_out = (arriving.dout * parts.merged()[0]).sum(-1, keepdim=True)
        yield "merge-gradient-sum", f"{name} lacks - dout . out, as lse moves with each part's", exact + weights[part] * of_out
        yield "merge-gradient-sum", f"{name} lacks what arrives at lse", exact - weights[part] * arriving.dlse
    factor = float((got.double() * exact).sum() / exact.square().sum())
    is_of_base = not is_of_out and min(abs(factor - base) for base in (math.log(2), 1 / math.log(2))) < _OF_BASE
    fault, said = ("merge-gradient-base", ", as of another base") if is_of_base else ("merge-gradient-weight", "")
    yield fault, f"{name} is multiplied by {factor:.3g}{said}", factor * exact
