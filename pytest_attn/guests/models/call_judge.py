"""Hold one call of a model against exact attention on its own tensors, forward and backward, at the limits of every check.

The budget takes rounding errors as independent. In a model whose attention is almost uniform they are not: all rows of out
are nearly equal, are rounded alike, and what D_i inherits of it adds up over the rows. So where a call is beyond the limits,
correctly rounded kernels are emulated on the same tensors, with the grid of their roundings moved from one to the next; a
level may reach their mean and some standard deviations more. Where errors are independent, their levels hardly differ,
and the limits stay what they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, stdev

import torch

from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.call import fault_of_change
from pytest_attn.correctness.comparison import Comparison, Evidence, Mismatch, Returned, TensorComparison
from pytest_attn.correctness.contract import ContractError, check_contract
from pytest_attn.correctness.judge import compare_all, lost_gradients, mismatch_of, unshown_by, untested, without_each
from pytest_attn.correctness.limits import Limits, limits_named
from pytest_attn.correctness.reference import Expected, Reference, compute_reference, score_elements
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.diagnosis.diagnose import Context, judged
from pytest_attn.guests.models.capture import AttentionCall
from pytest_attn.guests.models.exact_attention import Passes, Rounder
from pytest_attn.workloads.inputs import Inputs

#: by what share of itself, and how many of its taus, a gradient of sinks is off that is another one
_OTHER, _FAR_ROUNDING = 0.2, 32.0
#: what reports call the inputs of a call
DISTRIBUTION = "of the model"


def judge_call(call: AttentionCall, limits: str = "default", context: Context | None = None) -> Comparison:
    """Return how far a call is from exact attention, and what explains it. Raises as `ModelCall.compared`."""
    return _in_a_model(judged(ModelCall(call, limits), context or Context()))


@dataclass(frozen=True)
class ModelCall:
    """A call of a model, under the limits of a name."""

    call: AttentionCall
    limits: str = "default"

    def compared(self, references: ReferenceCache, deadline: Callable[[], AbstractContextManager[object]]) -> Comparison:
        """Compare the call with exact attention on its own tensors; gradients, where they arrived.

        A subject that quantizes is held to what it makes of q, k and v. Rows that see no key must be finite: libraries return
        there what they like, and no loss may depend on it. Raises ContractError for a result that cannot be compared.
        """
        call, workload = self.call, self.call.workload
        is_approximate = call.subject is not None and call.subject.is_approximate
        inputs = self._inputs()
        reference = references.after_call(self._reference(inputs, references.rows))
        tensors = self._results(inputs, reference)
        both = limits_named(self.limits)
        rows = tuple(compare_all(DISTRIBUTION, tensors, reference, workload, both))
        rows = with_empirical_limits(rows, tensors, reference, inputs)
        failed = next((row for row in rows if not row.passed), None)
        mismatch: Mismatch | None = None
        unshown: tuple[str, ...] = ()
        if failed is None:
            unshown = untested(workload, unshown_by(reference, workload, tuple(tensors), list(without_each(workload))))
        else:
            _require_finite(inputs)
            returned = Returned(DISTRIBUTION, reference, tensors)
            mismatch = mismatch_of(failed, Evidence(workload, returned, [returned], both))
        return Comparison(
            workload.id,
            call.subject.name if call.subject else call.function,
            rows,
            reference.is_sampled,
            is_approximate,
            mismatch,
            call.changes,
            sampled=reference.sampled,
            untested=unshown,
            unjudged=lost_gradients(reference),
        )

    @property
    def _gradients(self) -> Mapping[str, torch.Tensor]:
        return self.call.gradients if self.call.has_dout else {}

    def _inputs(self) -> Inputs:
        """Return what the call was given, as its subject takes it. Raises ContractError where that was changed, or unused."""
        call, subject = self.call, self.call.subject
        if call.missing:
            name = call.missing[0]
            raise ContractError(f"{name} is missing: out does not depend on {name[1:]}, as autograd sees it")
        if call.changes and not (subject and subject.known_to_change.issuperset(call.changes)):
            raise ContractError(fault_of_change(call.changes))
        inputs = call.complete_inputs()
        return subject.dequantized(inputs) if subject is not None and subject.is_approximate else inputs

    def _reference(self, inputs: Inputs, rows: tuple[int, ...]) -> Reference:
        """Return exact attention; that of the gradient of sinks, too, where there is one that can be computed.

        rows: of a long call that are looked at in any case.
        """
        dsinks, w, backward = self.call.dsinks, self.call.workload, bool(self._gradients)
        has_sinks = dsinks is not None and backward and dsinks.numel() == w.heads and score_elements(w) <= _MOST_SCORES
        profile, parameters = precision_named(self.call.precision), ("sinks",) if has_sinks else ()
        reference = compute_reference(inputs, profile, backward, parameters=parameters, positions=rows)
        if dsinks is not None and has_sinks:
            _require_near(dsinks, reference.tensors["dsinks"])
        return reference

    def _results(self, inputs: Inputs, reference: Reference) -> dict[str, torch.Tensor]:
        """Return out and the gradients, without what may be anything. Raises ContractError for other shapes than expected."""
        call, workload = self.call, self.call.workload
        tensors = {"out": call.out.to(inputs.device)}
        tensors |= {name: tensor.to(inputs.device) for name, tensor in sorted(self._gradients.items())}
        check_contract(tensors["out"], ("out",), reference, workload, "thd" if workload.is_packed else "bhsd")
        for name, tensor in tensors.items():
            expected = getattr(inputs, "out" if name == "out" else name[1:], None)
            if expected is not None and tensor.shape != expected.shape:
                raise ContractError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(expected.shape)}")
        return tensors if call.empty_rows is None else call.empty_rows.forget(tensors)


def _require_near(found: torch.Tensor, expected: Expected) -> None:
    """Raise ContractError for a gradient of sinks that is another one, and not by rounding, which all rows may share."""
    exact, tau = (t.flatten().double().cpu() for t in (expected.value, expected.tau))
    distance = (found.flatten().double().cpu() - exact).norm()
    if distance > _OTHER * exact.norm() and distance > _FAR_ROUNDING * tau.norm():
        times = float(found.double().cpu() @ exact / exact.square().sum())
        raise ContractError(f"dsinks is not the gradient of its sinks: {times:.2g} times what exact attention gives")


def _require_finite(inputs: Inputs) -> None:
    """Raise ContractError for q, k or v with NaN or infinite elements: what is wrong was wrong before attention."""
    for name in "qkv":
        finite = getattr(inputs, name).isfinite()
        if not finite.all():
            number = int(finite.numel() - finite.sum())
            raise ContractError(
                f"its {name} holds {number:,} elements that are NaN or infinite, so nothing can be said of this call; what"
                " computed them? the first call that is named may be where the model diverges"
            )


def _in_a_model(comparison: Comparison) -> Comparison:
    """Say of rows that see no key what holds in a model: its marker has no empty_rows."""
    mismatch = comparison.mismatch
    if mismatch is None:
        return comparison
    words = f"each of these rows sees no key at all: {mismatch.row.name} must be finite there"
    is_of_markers = ("empty-rows", "empty-rows-nan")
    hints = (hint._replace(words=words) if hint.fault in is_of_markers else hint for hint in mismatch.hints)
    return replace(comparison, mismatch=replace(mismatch, hints=tuple(hints)))


# -- limits of emulated kernels ----------------------------------------------------------------------------------------------


#: emulated kernels, and by how many of their standard deviations a level may exceed their mean: of few, then of many where
#: what a call shows is not further off than this. Of few the deviation itself is known to a quarter only, and where all rows
#: share their errors a level is as widely spread as the magnitude of a single normal variable.
_FEW, _MANY, _FAR = (8, 5.0), (32, 6.0), 3.0
#: of the logarithm of the grid's factor, from one kernel to the next: the golden ratio spreads any number of them evenly
_STEP = (5**0.5 - 1) / 2
#: scores of a call above which none is emulated, or only few are
_MOST_SCORES, _MANY_SCORES = 1 << 28, 1 << 24


def with_empirical_limits(
    rows: tuple[TensorComparison, ...], tensors: Mapping[str, torch.Tensor], reference: Reference, inputs: Inputs
) -> tuple[TensorComparison, ...]:
    """Return the comparisons, those that failed with the limits that fault-free kernels need on these very tensors."""
    failed = [row for row in rows if not row.passed and not row.wrong_positions]
    scores = score_elements(inputs.workload)
    if not failed or reference.is_sampled or scores > _MOST_SCORES:
        return rows
    kernels, honest = _emulated(failed, reference, inputs), list[dict[str, TensorComparison]]()
    anew: dict[str, TensorComparison] = {}
    for number, deviations in (_FEW, _MANY):
        honest += islice(kernels, number - len(honest))
        anew = {row.name: _judged_anew(row, [one[row.name] for one in honest], deviations) for row in failed}
        if scores > _MANY_SCORES or all(row.passed or row.excess > _FAR for row in anew.values()):
            break
    return tuple(anew.get(row.name, row) for row in rows)


def _emulated(
    failed: Sequence[TensorComparison], reference: Reference, inputs: Inputs
) -> Iterator[dict[str, TensorComparison]]:
    """Yield by name the comparisons of fault-free kernels, of what failed, without end."""
    names, limits = [row.name for row in failed], (failed[0].limits, failed[0].limits)
    for number in itertools.count():
        twin = _emulated_kernel(number, inputs, reference, backward=names != ["out"])
        levels = compare_all("", {name: twin[name] for name in names}, reference, inputs.workload, limits)
        yield {row.name: row for row in levels}


def _judged_anew(row: TensorComparison, honest: list[TensorComparison], deviations: float) -> TensorComparison:
    limits = _raised(row.limits, honest, deviations)
    return replace(row, limits=limits, passed=limits.excess(*row.levels) <= 1)


def _raised(limits: Limits, honest: list[TensorComparison], deviations: float) -> Limits:
    def level(name: str, least: float) -> float:
        found: list[float] = [getattr(one, f"z_{name}") for one in honest]
        if not all(map(math.isfinite, found)):
            return least
        return max(least, fmean(found) + deviations * stdev(found))

    return Limits(*(level(name, getattr(limits, name)) for name in ("element", "row", "head", "slope")))


def _emulated_kernel(number: int, inputs: Inputs, reference: Reference, backward: bool) -> dict[str, torch.Tensor]:
    """Return what a fault-free kernel returns: rounded where the profile says so, or in float32 on values of another scale."""
    is_float32 = inputs.workload.dtype == "float32"
    factor = 2.0 ** ((number + 1) * _STEP % 1)
    rounding = None if is_float32 else Rounder(reference.precision, factor=factor)
    # float64 whose scores are the same, and whose every product and sum is rounded elsewhere
    scales = {"q": factor, "k": 1 / factor, "v": factor, "dout": factor}
    values = {name: getattr(inputs, name).double() * (scale if is_float32 else 1.0) for name, scale in scales.items()}
    scaled = dataclasses.replace(inputs, **values)
    passes = Passes(scaled, rounding, torch.float32 if is_float32 else None)
    out = passes.forward()
    found = {"out": out}
    if backward:
        found |= dict(zip(("dq", "dk", "dv"), passes.backward(out, scaled.dout), strict=False))  # type: ignore[arg-type]
    if is_float32:
        undo = {"out": factor, "dq": factor, "dk": factor**3, "dv": factor}
        found = {name: (t.double() / undo[name]) for name, t in found.items()}
    return found


# -- known defects -----------------------------------------------------------------------------------------------------------


def known_defect_of(call: AttentionCall, comparison: Comparison, machine: Machine) -> str:
    """Say which known defects look like what is wrong in a call, "" where none does or nothing is wrong.

    A model's own call is computed by the backend that has the kernel, as far as that is known. The inputs are the model's, so
    a defect that shows with some inputs only may be it.
    """
    kernel, name = call.subject, call.kernel.replace("SDPA ", "sdpa_")
    if kernel is None and name:
        with suppress(ValueError):  # no backend has this kernel by itself
            kernel = Registry()[name]
    if comparison.passed or kernel is None:
        return ""
    defects = kernel.defects_on(call.workload, machine, bool(call.gradients))
    found = [d for d in defects if d.tensors and d.kernel in call.kernel.lower() and d.explains(comparison, call.workload)]
    return "; ".join(f"{defect.issue}: {defect.summary}" for defect in found)
