"""The judgment: call a kernel on every distribution of inputs, and compare each result with the reference."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import starmap
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.gradients import casts_weights, hides_casts
from pytest_attn.backends.machine import current
from pytest_attn.backends.precision import default_on
from pytest_attn.backends.raised import EndsTestError
from pytest_attn.backends.subject import AttentionFn, RefusedError, Subject, compilation_of
from pytest_attn.correctness.call import (
    CONTIGUOUS,
    PROJECTED,
    REWRITTEN_KEYS,
    KeptResult,
    StridePattern,
    call_kernel,
    fault_of_change,
    is_cuda_error,
    late_refusals_of,
    refusals,
    set_among,
)
from pytest_attn.correctness.comparison import (
    Comparison,
    Evidence,
    Hint,
    Mismatch,
    Returned,
    TensorComparison,
    head_slopes,
    location_of,
    looked_at,
    residual_over_budget,
    wrong_rows,
)
from pytest_attn.correctness.contract import (
    ContractError,
    EmptyRows,
    as_out,
    check_contract,
    require_fair,
    require_same,
    require_unlike,
    with_mask,
)
from pytest_attn.correctness.limits import Limits, limits_named, limits_of
from pytest_attn.correctness.reference import Expected, Reference, always_sampled, as_compared, compute_reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.reports.verdict import LONG_SUMS
from pytest_attn.workloads.masks.band import Window
from pytest_attn.workloads.parameters import LEAVES, PARAMETERS, parameters_of
from pytest_attn.workloads.workload import Workload

#: With fewer rows the RMS over a head adds nothing to that of its rows, and the row's limit applies.
FEW_ROWS = 16
#: With fewer rows the standard error of a head's slope is not known well enough.
_SLOPE_ROWS = 64
#: Where scores are rounded, the lse of a query is off for all its keys. Where it has most of the weight, that is a factor.
_SUMS_OVER_QUERIES = ("dk", "dv")
#: With more terms what tensor cores cut from a sum, of a whole head alike, comes near what a slope may be off.
_MOST_TERMS = 1 << 17
LSE_TOLERANCE = 1e-5  # of 1 + |lse|: float32 sums of exponentials are that good
LSE_BUDGETS = 8.0  # of the scores' noise


@dataclass(frozen=True)
class Kernel:
    """A subject under a spec, which says on what it is judged and what it declares."""

    subject: Subject
    spec: CheckSpec

    def compared(self, references: ReferenceCache, deadline: Callable[[], AbstractContextManager[object]]) -> Comparison:
        """Return the comparison, as `judge` does."""
        __tracebackhide__ = True
        return judge(self.subject, self.spec, references, deadline)


@dataclass(frozen=True)
class Output:
    """One output, already computed and in the spec's layout, of which `reference` has the exact values."""

    out: object
    spec: CheckSpec
    reference: Reference

    def compared(self, references: ReferenceCache, deadline: Callable[[], AbstractContextManager[object]]) -> Comparison:
        """Return the comparison, as `judge_output` does."""
        return judge_output(self.out, self.spec, references.after_call(self.reference))


def judge(
    subject: Subject,
    spec: CheckSpec,
    references: ReferenceCache,
    deadline: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Comparison:
    """Hold `subject` against exact attention on every input distribution of the spec.

    Returns the comparison; its mismatch has the evidence for a diagnosis. Raises ContractError for a result that cannot be
    compared or for changed inputs. Raises RefusedError where a backend refuses, or a function declines, as late as in a call,
    unless an earlier result was wrong. Other exceptions of the kernel pass through. deadline: makes a context that surrounds
    each call.
    """
    __tracebackhide__ = True
    spec, named = spec.for_subject(subject), tuple(spec.parameters)
    if subject.is_backend:  # which is prepared for tensors that need a gradient, and closes over none of a test's
        spec = replace(spec, parameters={})
    judgment = _Judgment(subject, spec, references, deadline, named)
    try:
        with current(spec.device):
            for number, distribution in enumerate(spec.inputs):
                reference = references.reference_of(judgment.spec, distribution, subject)
                judgment.judge_distribution(distribution, reference, PROJECTED if number == 1 else CONTIGUOUS)
                if judgment.failed is None:  # else a diagnosis asks for them
                    for one in (reference, judgment.returned[-1].reference):
                        one.free_inputs()
            judgment.judge_again()
            judgment.judge_parameters()
    except RefusedError:
        if judgment.failed is None:  # else the refusal must not hide that a call before was wrong
            raise
    return judgment.comparison()


def judge_output(out: object, spec: CheckSpec, reference: Reference) -> Comparison:
    """Compare one output, already computed and in the spec's layout, with its reference; arguments as those of `judge`."""
    if spec.workload.dropout:
        raise ValueError("with dropout, out alone says not what was dropped; use attn.check")
    out = out if spec.declared.is_plain else as_out(out, spec.declared, reference.inputs)
    (tensor,) = check_contract(out, ("out",), reference, spec.workload, spec.layout)
    empty_rows = EmptyRows(reference.called_with, spec.declared.empty_rows)
    limits, tensors = limits_named(spec.limits), empty_rows.forget({"out": spec.in_layout(tensor).detach().clone()})
    (row,) = compare_all(spec.inputs[0], tensors, reference, spec.workload, limits)
    returned = Returned(row.distribution, reference, tensors)
    mismatch = None if row.passed else mismatch_of(row, Evidence(spec.workload, returned, [returned], limits))
    return Comparison(spec.workload.id, "out", (row,), reference.is_sampled, mismatch=mismatch, sampled=reference.sampled)


#: what is said of a kernel whose calls differ
RERUN = Hint(
    "calls-differ",
    "equal calls return different results: is dropout on, is there a race, or is memory read that this call did not write?",
    "rerun",
)
#: up to which part of a limit equal calls differ by the order of their sums
_BY_CHANCE = 0.5
#: and of one whose gradients do, while out is right
_LOST_ADDS = Hint(
    "calls-differ",
    "not deterministic, by more than the order of its sums explains: are adds lost (a race, a store where an atomic add is"
    " needed), or is memory read that this call did not write?",
    "rerun",
)
#: and of one whose next result is larger by all but this part of the exact one
_GROWN = 0.1
_GROWS = Hint("adds-to-earlier-calls", "grows by the exact result with each call: is its memory never cleared?", "rerun")
_CHANGED_LATER = Hint("result-changes-later", "its result was right, and has changed while others were computed", "state")
_CHANGED_BY_CALLS = Hint("other-calls-matter", "the same call was right before others came between", "state")


class _Judgment:
    """What is found of one subject: on each distribution of inputs, and on the first one again after the others."""

    def __init__(
        self,
        subject: Subject,
        spec: CheckSpec,
        references: ReferenceCache,
        deadline: Callable[[], AbstractContextManager[object]],
        named: tuple[str, ...] = (),
    ) -> None:
        """named: the parameters whose gradients are asked for by name, of a backend as well."""
        self.named, self.unjudged, self.lost = named, dict[str, str](), dict[str, None]()
        self.subject, self.spec, self.references, self.deadline = subject, spec, references, deadline
        self.kernel: AttentionFn | None = None
        self.rows: list[TensorComparison] = []
        self.changes: dict[str, float] = {}
        self.returned: list[Returned] = []
        self.failed: _Failed | None = None
        self.first: _Result | None = None
        self.keep: torch.Tensor | None = None
        self.is_sampled = self.is_approximate = False
        self.sampled: dict[str, tuple[int, int]] = {}
        self.unshown = list(without_each(spec.workload))

    def judge_distribution(self, distribution: str, reference: Reference, pattern: StridePattern) -> None:
        """Judge the results on one distribution, of tensors that lie in memory as wished.

        They are contiguous where other strides would be compiled anew, and where these are refused.
        """
        __tracebackhide__ = True
        self.is_approximate = self.subject.is_approximate
        _require_numbers(distribution, reference)
        tensors, pattern = self._results(distribution, reference, pattern)
        if self.keep is not None:
            reference = with_mask(reference, self.keep, self.spec.backward)
        if self.spec.declared.skips is not None:
            reference = self._as_left_out(distribution, reference, tensors)
        reference = self.references.after_call(reference)
        if may_round_dp(tensors["out"], self.spec, self.subject) and not all(
            row.passed for row in self._compared(distribution, reference, tensors)
        ):
            self.spec = with_autograd(self.spec)
            wider = self.references.reference_of(self.spec, distribution, self.subject)
            wider = wider if self.keep is None else with_mask(wider, self.keep, backward=True)
            reference = self.references.after_call(wider, reference.tensors["out"].rows)
        if reference.is_sampled:
            self.is_sampled = True
            self.sampled |= reference.sampled
        if self.first is None:
            kept = {name: KeptResult(t) for name, t in tensors.items()} if len(self.spec.inputs) > 1 else {}
            self.first = _Result(distribution, reference, tensors, kept)
        w = self.spec.workload
        rows = self._compared(distribution, reference, tensors)
        self.rows += rows
        self.lost |= dict.fromkeys(lost_gradients(reference))
        for row in rows:
            if not row.passed and self.failed is None:
                tensors = {name: t.clone() for name, t in tensors.items()}  # a kernel may write to them again
                hints = self._about_strides(row, reference, pattern)
                hints = hints or self._about_equal_calls(row, reference, tensors, pattern)
                self.failed = _Failed(row, Returned(distribution, reference, tensors), hints)
        self.returned.append(Returned(distribution, reference, tensors))
        if self.failed is None and self.unshown:
            self.unshown = unshown_by(reference, w, tuple(tensors), self.unshown)

    def _as_left_out(self, distribution: str, reference: Reference, tensors: dict[str, torch.Tensor]) -> Reference:
        """Return the reference, or that of a kernel that leaves nothing out, as it may, where only this one explains all."""
        spec = self.spec
        whole = replace(spec, declared=replace(spec.declared, skips=None))
        either = reference, self.references.reference_of(whole, distribution, self.subject)
        right = (one for one in either if all(row.passed for row in self._compared("", one, tensors)))
        return next(right, reference)

    def judge_again(self) -> None:
        """Judge the first distribution once more, where its results are others now: nothing may be left of other calls."""
        __tracebackhide__ = True
        if self.failed or self.first is None or not self.first.kept:
            return
        distribution, reference, handed_out, kept = self.first
        if any(result.is_large for result in kept.values()):
            del self.returned[1:]  # memory for another call, of which these would only explain a fault
        self._judge_once_more(handed_out, CONTIGUOUS, _CHANGED_LATER)
        if self.failed is None:
            again, pattern = self._results(distribution, reference, REWRITTEN_KEYS)
            self._judge_once_more(again, pattern, _CHANGED_BY_CALLS)
            if self.failed is None:
                reference.free_inputs()

    def judge_parameters(self) -> None:
        """Judge, by a call of its own, the gradients of sinks, bias and slopes that were not asked for, where there are any.

        Those of a backend that were are refused where autograd does not reach them.
        """
        __tracebackhide__ = True
        spec = self.spec
        if self.failed or self.first is None or not spec.backward:
            return
        asked = self.named or (PARAMETERS if spec.leaves == LEAVES else ())
        names = [name for name in parameters_of(spec.workload, asked) if name not in spec.parameters]
        if self.subject.bias_of is not None and "bias" in names:
            names.remove("bias")  # whose gradient goes to q
        if not names:
            return
        if why := self._unasked_because():
            self.unjudged = dict.fromkeys(names, why)
        else:
            self._judge_gradients_of(names)
        if self.unjudged and self.named and not self.failed:
            name, why = next(iter(self.unjudged.items()))
            raise RefusedError(f"has no gradient of {name} that can be compared: {why}")

    def _unasked_because(self) -> str:
        """Return why gradients of parameters are not looked at, "" where they are."""
        assert self.first is not None
        assert self.kernel is not None
        is_compiled = self.subject.compiles or compilation_of(self.kernel) is not None
        reasons = {
            "only samples of a long workload are exact": self.first.reference.is_sampled,
            "the kernel quantizes its inputs": self.subject.is_approximate,
            "the kernel runs in other processes": self.subject.needs_all_gradients,
            "it would be compiled anew; backward=(..., NAME) compares it": is_compiled and not self.named,
        }
        return next((why for why, applies in reasons.items() if applies), "")

    def _judge_gradients_of(self, names: Sequence[str]) -> None:
        __tracebackhide__ = True
        assert self.first is not None
        distribution, reference, handed_out, _ = self.first
        try:
            found = self._gradients_of(names, reference)
        except EndsTestError:
            raise
        except Exception as error:
            if is_cuda_error(error):
                raise
            text = " ".join(str(error).split())
            self.unjudged = dict.fromkeys(
                names, f"where they need a gradient the kernel raises {type(error).__name__}: {text[:200]}"
            )
            return
        self.unjudged = dict.fromkeys(
            [name for name in names if f"d{name}" not in found], "autograd does not reach it from out"
        )
        if not found:
            return
        asked = replace(self.spec, parameters={name[1:]: tensor for name, tensor in found.items()})
        exact = self.references.reference_of(asked, distribution, self.subject)
        if self.keep is not None:
            exact = with_mask(exact, self.keep, backward=True)
        for row in compare_all(distribution, found, exact, self.spec.workload, limits_named(self.spec.limits)):
            self.rows.append(row)
            if not row.passed and self.failed is None:
                self.failed = _Failed(row, Returned(distribution, exact, {**handed_out, **found}))
                self.returned = [self.failed.returned]

    def _gradients_of(self, names: Sequence[str], reference: Reference) -> dict[str, torch.Tensor]:
        """Return gradients of parameters by the names of results, of those at which autograd arrives where they need one."""
        __tracebackhide__ = True
        subject, given = self.subject, reference.called_with
        drawn = {PARAMETERS[name].tensor: getattr(given, PARAMETERS[name].tensor).detach().clone() for name in names}
        spec = replace(self.spec, parameters={name: drawn[PARAMETERS[name].tensor] for name in names})
        where = f"{subject.name} on {spec.workload.id}, inputs {spec.inputs[0]}"
        with self.deadline(), subject.calling(), _placing_faults(where), _needing(subject.closed_over().values()):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}
            kernel = subject.prepare(replace(given, **leaves), True)
            tensors, _ = call_kernel(kernel, spec, reference, CONTIGUOUS, optional=names)
        return {f"d{name}": tensors[f"d{name}"] for name in names if f"d{name}" in tensors}

    def _judge_once_more(self, tensors: dict[str, torch.Tensor], pattern: StridePattern, event: Hint) -> None:
        """Judge those of the first distribution's tensors that are not what they were. event: what happened in between."""
        __tracebackhide__ = True
        assert self.first is not None
        distribution, reference, _, kept = self.first
        differing = set_among({name: kept[name].differs(tensor) for name, tensor in tensors.items()})
        if not differing:
            return
        for row in self._compared(distribution, reference, {name: tensors[name] for name in differing}):
            if not row.passed:
                self.rows.append(row)
                if self.failed is None:
                    hints = self._about_strides(row, reference, pattern) or (event,)
                    self.failed = _Failed(row, Returned(distribution, reference, dict(tensors)), hints)
                    self.returned.append(self.failed.returned)

    def comparison(self) -> Comparison:
        """Return what was found, with the evidence of the first tensor that is wrong."""
        mismatch = None
        if self.failed:
            limits, returned = limits_named(self.spec.limits), self.failed.returned
            evidence = Evidence(self.spec.workload, returned, self.returned, limits)
            mismatch = mismatch_of(self.failed.row, evidence, self.failed.hints)
        return Comparison(
            self.spec.workload.id,
            self.subject.name,
            tuple(self.rows),
            self.is_sampled,
            self.is_approximate,
            mismatch,
            self.changes,
            compilation_of(self.kernel) if self.kernel else None,
            self.sampled,
            () if self.failed else untested(self.spec.workload, self.unshown),
            (*starmap("d{}: {}".format, self.unjudged.items()), *self.lost),
        )

    # -- details -------------------------------------------------------------------------------------------------------

    def _results(
        self, distribution: str, reference: Reference, pattern: StridePattern
    ) -> tuple[dict[str, torch.Tensor], StridePattern]:
        """Call the subject; return its results, and how the tensors that it took lay in memory."""
        __tracebackhide__ = True
        where = f"{self.subject.name} on {self.spec.workload.id}, inputs {distribution}"
        with self.deadline(), self.subject.calling(), _placing_faults(where), late_refusals_of(self.subject):
            if self.kernel is None:
                given = reference.called_with
                self.kernel = self.references.prepared(self.subject, self.spec, distribution, given)
            is_compiled = compilation_of(self.kernel) is not None  # other strides would cost another compilation
            if is_compiled or self.spec.declared.contiguous or self.spec.workload.kv_pages:
                pattern = CONTIGUOUS
            refused = None
            if pattern != CONTIGUOUS:
                try:
                    with refusals():
                        tensors, changes = call_kernel(self.kernel, self.spec, reference, pattern)
                except RefusedError as error:
                    pattern, refused, strides = CONTIGUOUS, error.__cause__, pattern
            if pattern == CONTIGUOUS:
                tensors, changes = call_kernel(self.kernel, self.spec, reference, pattern)
            if refused is not None:
                self._require_refusal(refused, self.kernel, reference, strides)
            self.changes |= changes
            if (keep := tensors.pop("keep", None)) is not None:
                require_same(keep, self.keep)
                if self.keep is None:
                    require_fair(keep, reference.called_with)
                    self.keep = keep.clone()
                    otherwise = replace(self.spec, seed=self.spec.seed + 1, backward=False)
                    others, _ = call_kernel(self.kernel, otherwise, reference, pattern)
                    require_unlike(self.keep, others["keep"], reference.called_with)
            if changes and not self.subject.known_to_change.issuperset(changes):
                raise ContractError(fault_of_change(changes), fault="input-changed")
        return tensors, pattern

    def _require_refusal(
        self, refused: BaseException, kernel: AttentionFn, reference: Reference, pattern: StridePattern
    ) -> None:
        """Raise what a kernel raised on tensors with these strides, where it takes them now: it was not because of them."""
        __tracebackhide__ = True
        try:
            with refusals():
                call_kernel(kernel, self.spec, reference, pattern)
        except RefusedError:
            return
        raise refused

    def _compared(self, distribution: str, reference: Reference, tensors: dict[str, torch.Tensor]) -> list[TensorComparison]:
        return compare_all(distribution, tensors, reference, self.spec.workload, limits_named(self.spec.limits))

    def _about_strides(self, row: TensorComparison, reference: Reference, pattern: StridePattern) -> tuple[Hint, ...]:
        """Say how the tensors lay, if contiguous ones give the right result, and these another one, a wrong one, each time."""
        __tracebackhide__ = True
        if pattern == CONTIGUOUS:
            return ()
        contiguous, is_right = self._again(CONTIGUOUS, row, reference)
        if not is_right:
            return ()
        again = [self._again(pattern, row, reference) for _ in range(2)]
        if any(is_right for _, is_right in again):
            return (RERUN,)  # the same tensors, which were wrong before
        if not apart(row, again[0][0], contiguous, reference, self.spec.workload)[1]:
            return ()
        text = f"{pattern.describe(self.spec.layout)}; contiguous tensors give the right result"
        return (Hint("strides-misread", text, "strides"),)

    def _again(self, pattern: StridePattern, row: TensorComparison, reference: Reference) -> tuple[torch.Tensor, bool]:
        """Return the tensor of another call, and whether it is right."""
        __tracebackhide__ = True
        tensors, _ = self._results(row.distribution, reference, pattern)
        (again,) = self._compared(row.distribution, reference, {row.name: tensors[row.name]})
        return tensors[row.name], again.passed

    def _about_equal_calls(
        self, row: TensorComparison, reference: Reference, tensors: Mapping[str, torch.Tensor], pattern: StridePattern
    ) -> tuple[Hint, ...]:
        """Say that equal calls return different results, by more than rounding explains."""
        __tracebackhide__ = True
        if row.name == "lse":
            return ()
        try:
            again, _ = self._results(row.distribution, reference, pattern)
        except Exception:  # the user gets the first fault
            return ()
        by, is_unlike = apart(row, tensors[row.name], again[row.name], reference, self.spec.workload)
        (repeated,) = self._compared(row.distribution, reference, {row.name: again[row.name]})
        is_gradient = row.name.startswith("d")
        if by <= (2 if is_gradient and not repeated.passed else _BY_CHANCE) and not is_unlike:
            return ()
        with suppress(Exception):
            if self._grows(row.name):
                return (_GROWS._replace(words=f"{row.name} {_GROWS.words}"),)
        return (_LOST_ADDS._replace(words=f"{row.name} is {_LOST_ADDS.words}") if is_gradient else RERUN,)

    def _grows(self, name: str) -> bool:
        """Return whether the first distribution's result is larger by itself after one more call."""
        assert self.first is not None
        distribution, reference, _, _ = self.first
        exact, w = reference.tensors[name], self.spec.workload
        calls = (self._results(distribution, reference, CONTIGUOUS)[0] for _ in range(2))
        earlier, later = (looked_at(name, one[name], exact, w).double().clone() for one in calls)
        return float((later - earlier - exact.value.to(later.device)).norm()) < _GROWN * float(exact.value.norm())


def may_round_dp(out: torch.Tensor, spec: CheckSpec, subject: Subject) -> bool:
    """Return whether autograd rounds dP, or may, behind the result of a kernel that declares nothing."""
    if not spec.backward or spec.declared.skips or spec.declared.precision != default_on(spec.device.type):
        return False
    return casts_weights(out) or (hides_casts(out) and not subject.is_backend)


def with_autograd(spec: CheckSpec) -> CheckSpec:
    """Return what a check depends on where autograd rounds dP."""
    return replace(spec, declared=replace(spec.declared, precision=spec.profile.with_autograd()))


@contextmanager
def _needing(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have tensors need a gradient for a while."""
    before = [(tensor, tensor.requires_grad) for tensor in tensors]
    try:
        for tensor, _ in before:
            tensor.requires_grad_()
        yield
    finally:
        for tensor, needs in before:
            tensor.requires_grad_(needs)


class _Result(NamedTuple):
    """What a subject handed out on one distribution, and copies of it."""

    distribution: str
    reference: Reference
    handed_out: dict[str, torch.Tensor]
    kept: dict[str, KeptResult]


class _Failed(NamedTuple):
    """The first tensor that is wrong, among all of its distribution, with what is known of how it came about."""

    row: TensorComparison
    returned: Returned
    hints: tuple[Hint, ...] = ()


#: wrong rows of those that were drawn that a command names
_NAMED = 4


def mismatch_of(row: TensorComparison, evidence: Evidence, hints: tuple[Hint, ...] = ()) -> Mismatch:
    """Return where the tensor of a row that did not pass is wrong, with the evidence for a diagnosis."""
    _, reference, tensors = evidence.failed
    expected = reference.tensors[row.name]
    got = looked_at(row.name, tensors[row.name], expected, evidence.workload)
    location = location_of(wrong_rows(row, got, expected), expected.rows)
    drawn: tuple[int, ...] = ()
    if expected.rows is not None:
        w, is_of_keys = evidence.workload, row.name in ("dk", "dv")
        always = always_sampled(w, *((w.kv_heads, w.kv_len) if is_of_keys else (w.heads, w.q_len)))
        drawn = location.rows.found[:_NAMED] if always.isdisjoint(location.rows.found) else ()
    return Mismatch(row, location, hints, drawn, evidence)


@contextmanager
def _placing_faults(where: str) -> Iterator[None]:
    """Say of a broken contract whose it was, and on what."""
    try:
        yield
    except ContractError as error:
        raise ContractError(str(error), where, error.fault) from None


def _require_numbers(distribution: str, reference: Reference) -> None:
    """Raise ValueError where exact attention gives no number at all: a kernel that gives none would be right."""
    if reference.tensors["out"].value.isnan().all():
        raise ValueError(
            f"exact attention on {reference.workload.id}, inputs {distribution}, is NaN everywhere, so nothing can be judged;"
            " what do its score_mod, bias and scale give?"
        )


# -- one tensor: residual over budget, at four levels, and the usual figures beside it -----------------------------------


def compare_all(
    distribution: str,
    tensors: Mapping[str, torch.Tensor],
    reference: Reference,
    workload: Workload,
    limits: tuple[Limits, Limits],
) -> list[TensorComparison]:
    """Compare tensors by their names, native ones. limits: of out and lse, and of gradients."""
    precision, measured = reference.precision, []
    queries, keys = max(workload.q_lens or [workload.q_len]), max(workload.kv_lens or [workload.kv_len])
    is_long = max(keys, queries * workload.group) > _MOST_TERMS
    has_no_slopes = is_long or precision.scales_heads or (precision.rounds_sinks and bool(workload.sinks))
    for name, tensor in tensors.items():
        own, expected = limits_of(name, limits), reference.tensors[name]
        if has_no_slopes or (precision.has_noisy_scores and name in _SUMS_OVER_QUERIES):
            own = own.without_slope
        got, faults = as_compared(name, tensor.detach(), workload), 0
        if expected.rows is not None:
            got, faults = _compared_rows(got, expected)
        measured.append(_measured(name, distribution, got, expected, workload, own, faults))
    return _rows_of(measured)


def compare_rows(
    name: str, distribution: str, got: torch.Tensor, expected: Expected, workload: Workload, limits: Limits
) -> TensorComparison:
    """Compare those rows of a tensor, (batch, heads, rows, dim), that are exact; not the slopes of its heads."""
    (row,) = _rows_of([_measured(name, distribution, got, expected, workload, limits.without_slope)])
    return row


class _Measured(NamedTuple):
    """A comparison before its numbers are read back from their device. to_row: makes the row of them."""

    numbers: dict[str, torch.Tensor]
    to_row: Callable[[Mapping[str, float]], TensorComparison]


def _rows_of(measured: Sequence[_Measured]) -> list[TensorComparison]:
    """Read the numbers of all at once: whoever reads waits, also for other processes' work on the device."""
    numbers = [number.double() for one in measured for number in one.numbers.values()]
    read = iter(torch.stack(numbers).tolist() if numbers else [])
    return [one.to_row(dict(zip(one.numbers, read, strict=False))) for one in measured]


def _measured(
    name: str,
    distribution: str,
    got: torch.Tensor,
    expected: Expected,
    workload: Workload,
    limits: Limits,
    unsampled_faults: int = 0,
) -> _Measured:
    """Measure the rows that are exact. unsampled_faults: how many elements are not finite, in others."""
    if is_of_heads := name[1:] in PARAMETERS and PARAMETERS[name[1:]].is_of_heads:  # an element for each makes no row
        limits = replace(limits, row=limits.element, head=limits.element)
    if is_of_rows := name in ("lse", "max"):
        got, expected, limits = got.double(), replace(expected, tau=_allowed_of_lse(expected)), Limits(1, 1, 1)
    # one rounding of a query's row sum D, or of its lse, moves the gradients of all keys that it sees
    independent = min(got.shape[2], sum(workload.q_lens or (workload.q_len,))) if name in ("dk", "dv") else got.shape[2]
    if independent < FEW_ROWS:
        limits = replace(limits, head=limits.row)
    has_slopes = limits.slope < math.inf and independent >= _SLOPE_ROWS and not is_of_rows
    residual, wrong = _residual(got, expected)
    z = residual_over_budget(residual, expected.tau)
    magnitude, rows = z.abs(), z.square() if is_of_rows else z.square().mean(-1)
    place = torch.where(wrong, math.nan, magnitude).argmax()  # NaN counts as the largest
    shape = z.shape
    found, exact, budget = (t.take(place) for t in (got, expected.value, expected.tau))  # an index in [] would be read back
    numbers = {
        "z_element": magnitude.max(),
        "row": rows.max(),
        "head": rows.mean(-1).max(),
        "exceeding": (magnitude > limits.element).sum(),
        "wrong": wrong.sum(),
        "place": place,
        "found": found,
        "exact": exact,
        "budget": budget,
        **_familiar(residual, expected.value),
        **(_steepest(z, expected) if has_slopes else {}),
    }

    def to_row(read: Mapping[str, float]) -> TensorComparison:
        levels = read["z_element"], read["row"] ** 0.5, read["head"] ** 0.5, read.get("z_slope", 0.0)
        z_element, z_row, z_head, z_slope = levels
        wrong_count = int(read["wrong"]) if is_of_rows else max(int(read["wrong"]), unsampled_faults)
        at = unraveled(int(read["place"]), shape)
        return TensorComparison(
            name=name,
            distribution=distribution,
            passed=not wrong_count and limits.excess(*levels) <= 1,
            z_element=z_element,
            z_row=z_row,
            z_head=z_head,
            elements=shape.numel(),
            exceeding=int(read["exceeding"]),
            wrong_positions=wrong_count,
            worst=at[1:2] if is_of_heads else _true_index(at, expected),
            found=read["found"],
            exact=read["exact"],
            budget=read["budget"],
            limits=limits,
            z_slope=z_slope,
            slope=1 + read.get("slope_off", 0.0),
            slope_error=read.get("slope_error", 0.0),
            slope_head=() if is_of_rows else unraveled(int(read.get("slope_place", 0)), shape[:2]),
            **_familiar_figures(read, shape.numel()),
        )

    return _Measured(numbers, to_row)


def lost_gradients(reference: Reference) -> tuple[str, ...]:
    """Say how many rows of which gradients are not judged, as `Comparison.unjudged`."""
    precision, is_half = reference.precision, reference.workload.out_dtype == "float16"
    if not (is_half and (precision.rounds_scores or precision.rounds_dp) and "dq" in reference.tensors):
        return ()
    lost = {name: reference.tensors[name].tau.isinf().any(-1) for name in ("dq", "dk")}
    return tuple(
        f"{name}: where dP is beyond float16, as in {int(rows.sum()):,} of its {rows.numel():,} rows, eager code's own is NaN"
        for name, rows in lost.items()
        if bool(rows.any())
    )


def _steepest(z: torch.Tensor, expected: Expected) -> dict[str, torch.Tensor]:
    off, error, allowed = head_slopes(z, expected)
    level = (off.abs() / allowed).nan_to_num_(0)
    place = level.argmax()
    return {"z_slope": level.max(), "slope_off": off.take(place), "slope_error": error.take(place), "slope_place": place}


#: by how much more than the nearer of two results is from exact they may differ where both round in their own way
_APART = 3.0


def apart(
    row: TensorComparison, one: torch.Tensor, other: torch.Tensor, reference: Reference, workload: Workload
) -> tuple[float, bool]:
    """Return how far two native tensors are from each other over the limits of `row`, and whether by more than rounding.

    What their dtype rounds them by is allowed as well. A kernel that rounds much, and takes another path, differs from itself
    by about as much as either result from exact.
    """
    expected = reference.tensors[row.name]
    got, instead = (looked_at(row.name, tensor, expected, workload) for tensor in (one, other))
    value = instead.to(expected.value.device).double()
    tau = expected.tau + value.abs().nan_to_num(0, 0, 0) * torch.finfo(other.dtype).eps
    pairs = (got, replace(expected, value=value, tau=tau)), (got, expected), (instead, expected)
    between, *both = (compare_rows(row.name, "", tensor, of, workload, row.limits).excess for tensor, of in pairs)
    return between, between > max(1.0, _APART * min(both))


def _compared_rows(got: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, int]:
    """Return the rows that were computed exactly, and how many elements of all rows are not finite, where all should be."""
    assert expected.rows is not None
    are_finite = bool((expected.value.isfinite() & expected.tau.isfinite()).all())
    looked_through = got.flatten(0, 1) if are_finite else got[:0]
    faults = sum(int((~head.isfinite()).sum()) for head in looked_through)  # one at a time: each takes memory
    return got[:, :, expected.rows.to(got.device)], faults


def _residual(got: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual in float64, zero at non-finite places, and where NaN or infinity is not as expected.

    An exact value beyond the dtype's largest number is expected to be infinite, and any is where nothing may be expected.
    """
    value = expected.value.to(got.device)
    as_dtype = value.to(got.dtype)
    both = got.isfinite() & as_dtype.isfinite()
    alike = both | (got == as_dtype) | (got.isnan() & as_dtype.isnan()) | expected.tau.to(got.device).isinf()
    return torch.where(both, got.double() - value, 0.0), ~alike


def _allowed_of_lse(expected: Expected) -> torch.Tensor:
    """Return by how much lse, or a maximum, may be off."""
    exact = expected.value.where(expected.value.isfinite(), 0.0)
    return LSE_TOLERANCE * (1 + exact.abs()) + LSE_BUDGETS * expected.tau.to(exact.device)


def _familiar(residual: torch.Tensor, exact: torch.Tensor) -> dict[str, torch.Tensor]:
    exact = exact.where(exact.isfinite(), exact.new_zeros(()))
    got = exact + residual
    return {
        "absmax": residual.abs().max(),
        "mean_abs": residual.abs().mean(),
        "mse": residual.square().mean(),
        "energy": exact.square().sum(),
        "overlap": (got * exact).sum(),
        "norm": got.norm(),
    }


def _familiar_figures(read: Mapping[str, float], elements: int) -> dict[str, float]:
    mse, energy, overlap = read["mse"], read["energy"], read["overlap"]
    norms = math.sqrt(energy) * read["norm"]
    return {
        "absmax": read["absmax"],
        "mean_abs": read["mean_abs"],
        "mse": mse,
        "relative_l2": math.sqrt(mse * elements / energy) if energy else 0.0,
        "cosine": overlap / norms if norms else (1.0 if not energy and not read["norm"] else 0.0),
        "alpha": overlap / energy if energy else 1.0,
    }


def unraveled(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a place of the flattened tensor."""
    at: tuple[int, ...] = ()
    for size in reversed(shape):  # torch.unravel_index imports sympy, which takes half a second
        place, last = divmod(place, size)
        at = (last, *at)
    return at


def _true_index(at: tuple[int, ...], expected: Expected) -> tuple[int, ...]:
    if expected.rows is None:
        return at
    return (*at[:2], int(expected.rows[at[2]]), *at[3:])


# -- what nothing would have shown ---------------------------------------------------------------------------------------

#: keys that show a sum in a half precision, which passes with 600
_LONG = 2048
#: rows that are tried before all are
_TRIED_ROWS = 32


@cache  # of the workloads of a run
def without_each(w: Workload) -> dict[str, Workload]:
    """Return the workload without each option that it has: softcap, window, sinks, bias, ALiBi, score_mod."""
    fields: dict[str, tuple[object, dict[str, Any]]] = {
        "softcap": (w.softcap, {"softcap": None, "bias_before_softcap": False}),
        "window": (isinstance(w.mask, Window), {"mask": Window(None, 0 if getattr(w.mask, "right", None) == 0 else None)}),
        "sinks": (w.sinks, {"sinks": False}),
        "bias": (w.bias, {"bias": None, "bias_before_softcap": False, "bias_dtype": None}),
        "alibi": (w.alibi, {"alibi": False}),
        "score_mod": (w.score_mod, {"score_mod": None}),
    }
    others = {name: replace(w, **changes) for name, (is_there, changes) in fields.items() if is_there}
    return {name: other for name, other in others.items() if other != w}


def unshown_by(reference: Reference, workload: Workload, judged: tuple[str, ...], options: Sequence[str]) -> list[str]:
    """Return those options without which exact attention is within the limits of all tensors that are judged."""
    without, unshown = without_each(workload), []
    for option in options:
        key = (option, *judged)
        if key not in reference.shown:
            reference.shown[key] = f"d{option}" in judged or _is_shown(reference, without[option], judged)
        if not reference.shown[key]:
            unshown.append(option)
    return unshown


def _is_shown(reference: Reference, without: Workload, judged: tuple[str, ...]) -> bool:
    out, limits = reference.tensors["out"], limits_named("default")
    compute = partial(compute_reference, reference.inputs, reference.precision, workload=without)
    if not without.is_packed and out.value.shape[2] > _TRIED_ROWS:
        at = torch.linspace(0, out.value.shape[2] - 1, _TRIED_ROWS).round().long().to(out.value.device)
        some = Expected(out.value[:, :, at], out.tau[:, :, at])
        found = compute(rows=at if out.rows is None else out.rows.to(at.device)[at]).tensors["out"].value
        if not compare_rows("out", "", found, some, without, replace(limits_of("out", limits), head=math.inf)).passed:
            return True
    exact = compute("dq" in judged, out.rows, keys=reference.keys).tensors
    return not all(
        compare_rows(name, "", exact[name].value, reference.tensors[name], without, limits_of(name, limits)).passed
        for name in judged
        if name in exact and name in reference.tensors
    )


def untested(workload: Workload, unshown: Sequence[str]) -> tuple[str, ...]:
    """Return what a judgment that passed cannot have shown, as `Comparison.untested`."""
    is_half = workload.dtype in ("bfloat16", "float16")
    longest = max(workload.kv_lens or [workload.kv_len])
    return (*unshown, *((LONG_SUMS,) if is_half and longest < _LONG else ()))
