"""The judgment of what stands beside attention: exact but for the roundings that a kernel declares, `assert_rounded`.

The caller has the exact result in float64 and knows where the kernel rounds. The variances of these roundings add up to the
budget of an element; z and its levels are those of attention, with the whole tensor in place of a head.

Where a kernel of an exact form of the user's own rounds, as of ReLU or linear attention, is not known, so the form itself is
asked, by Monte Carlo arithmetic (Parker, Monte Carlo Arithmetic, 1997): `OwnReferences` compute it again and again in float64,
each step off at random by what a kernel may round there. Inputs and operands of products are off by one rounding to the
dtype, sums as in float32; `precision="eager"` rounds each step to the dtype. The scatter of the results, and one rounding of
the result itself, are the budget. Gradients are autograd's of the form, whose steps are off as well; sums over a row in the
backward pass, as of P dP, are off as those that a kernel has of dout and its rounded out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.precision import TINY, UNIT
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.budget import Rounding
from pytest_attn.correctness.comparison import (
    Members,
    TensorComparison,
    describe_rows,
    head_slopes,
    residual_over_budget,
    wrong_rows,
)
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import compare_rows, unraveled
from pytest_attn.correctness.limits import Limits, limits_named
from pytest_attn.correctness.mismatch_text import CLEAR, describe_row
from pytest_attn.correctness.reference import Expected, Reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.reports.lines import labeled
from pytest_attn.workloads.dtypes import FLOATING_DTYPES, dtype_name
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.traits import traits_of
from pytest_attn.workloads.workload import Workload

#: In shorter rows the RMS adds nothing to the largest element.
_SHORT = 4
#: steps from a tie within which a kernel may see one, as its own arithmetic rounds
_NEAR = 0.01
#: Fewer rounded numbers, or values that differ, do not average out over the whole: equal numbers are rounded alike.
_FEW = 16
#: part of the variance from which on one of several roundings decides over that
_SHOWN = 0.1


@dataclass(frozen=True, eq=False)
class Rounded:
    """Rounding to the nearest number of a dtype, at one place of a kernel.

    Args:
        dtype: to which it rounds, "bfloat16", "float16", "float32" or "float8_e4m3fn", or torch's own.
        of: what is rounded there, as a float64 tensor that broadcasts to the exact result's shape: (rows, 1) where all of a
            row share a rounded number.
        times: how many such roundings add up, each of `of` or less. A sum of K terms rounds K times; `of` is then the sum of
            their magnitudes. Whoever cuts off instead of rounding counts four times.
        by: what the rounded number is multiplied by until it is the result.
    """

    dtype: str | torch.dtype
    of: torch.Tensor
    times: float = 1.0
    by: float | torch.Tensor = 1.0

    @property
    def variance(self) -> torch.Tensor:
        """The mean square of its errors, evenly spread up to the largest that rounding to nearest makes."""
        dtype = FLOATING_DTYPES[dtype_name(self.dtype)]
        power_of_2 = (self.of / (2 * torch.frexp(self.of).mantissa)).nan_to_num_(0)  # the next below; 0 of 0
        largest = (power_of_2 * dtype.spacing).clamp_(min=max(dtype.floor, TINY)).where(self.of.isfinite(), math.inf)
        return _of_ties((largest * self.by).square_() * (self.times / 3), self.of, 2 * largest)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Rounding to a multiple of a step, as to an integer times a scale.

    Args:
        step: a number, or a float64 tensor that broadcasts to the exact result's shape. A tie may go either way.
    """

    step: float | torch.Tensor

    @property
    def variance(self) -> torch.Tensor:
        """The mean square of its errors, evenly spread over a step."""
        return torch.as_tensor(self.step, dtype=torch.float64).square() / 12


def assert_rounded(
    out: torch.Tensor, exact: torch.Tensor, roundings: Sequence[Rounded | Quantized | torch.Tensor], *, name: str = "out"
) -> TensorComparison:
    """Hold any result against the exact one: it may differ by the roundings that are declared.

    Args:
        out: what the kernel returned.
        exact: the result in float64, of the numbers that the kernel was given.
        roundings: where the kernel rounds; a float64 tensor is the standard error of a rounding of another kind.
        name: what messages call the result.

    Returns:
        The comparison: z_element, z_row, z_head (of the whole tensor), limits, and the usual figures.

    Raises:
        AssertionError: it is off by more.
        ContractError: `out` is not a tensor of real numbers, or its shape is not that of `exact`.
        TypeError: an argument is of another type.
        ValueError: `exact` or a rounding is not in float64, not finite, of another shape, or there is none.
    """
    __tracebackhide__ = True
    _require_result(out, exact, name)
    variances = _variances(roundings, exact)
    total = sum(variances, torch.zeros_like(exact))
    tau = total.sqrt().masked_fill_(~exact.isfinite(), 1.0)
    rows = (1, 1, -1, exact.shape[-1] if exact.dim() else 1)
    got = out.detach().to(exact.device)
    got = (got.float() if got.element_size() == 1 else got).reshape(rows)
    expected = Expected(exact.detach().reshape(rows), tau.reshape(rows))
    shown = [one for one, variance in zip(roundings, variances, strict=True) if float((variance / total).nanmean()) > _SHOWN]
    limits = _limits(expected.value, [one.of for one in shown if isinstance(one, Rounded)])
    row = compare_rows("out", "", got, expected, Workload(1), limits)
    place = row.worst[-2] * expected.value.shape[-1] + row.worst[-1]
    row = replace(row, name=name, limits=limits, worst=unraveled(place, exact.shape))
    row = replace(row, passed=row.excess <= 1)
    if not row.passed:
        raise AssertionError(_describe(row, got, expected, out, roundings))
    return row


# -- what is handed in -------------------------------------------------------------------------------------------------


def _require_result(out: object, exact: object, name: str) -> None:
    __tracebackhide__ = True
    if not isinstance(exact, torch.Tensor):
        raise TypeError(f"exact is of type {type(exact).__name__}, expected a float64 tensor")
    if exact.dtype != torch.float64:
        raise ValueError(f"exact is {exact.dtype}, expected torch.float64: compute it from inputs.double()")
    if not exact.numel() or bool(exact.isnan().all()):
        raise ValueError(f"exact of shape {tuple(exact.shape)} has no number, so nothing can be judged")
    if not isinstance(out, torch.Tensor) or out.is_complex() or out.dtype == torch.bool:
        kind = out.dtype if isinstance(out, torch.Tensor) else f"of type {type(out).__name__}"
        raise ContractError(f"{name} is {kind}, expected a tensor of real numbers")
    if out.shape != exact.shape:
        raise ContractError(f"{name} has shape {tuple(out.shape)}, expected that of exact, {tuple(exact.shape)}")


def _variances(roundings: Sequence[Rounded | Quantized | torch.Tensor], exact: torch.Tensor) -> list[torch.Tensor]:
    __tracebackhide__ = True
    if not isinstance(roundings, (list, tuple)) or not roundings:
        raise ValueError('roundings is empty or no list: name where the kernel rounds, as [Rounded("bfloat16", of=exact)]')
    return [_variance(rounding, f"roundings[{at}]", exact) for at, rounding in enumerate(roundings)]


def _variance(rounding: Rounded | Quantized | torch.Tensor, name: str, exact: torch.Tensor) -> torch.Tensor:
    __tracebackhide__ = True
    if not isinstance(rounding, (Rounded, Quantized, torch.Tensor)):
        kind = type(rounding).__name__
        raise TypeError(f"{name} is of type {kind}, expected Rounded(dtype, of), Quantized(step) or a standard error")
    of: object = rounding
    if isinstance(rounding, Rounded):
        dtype_name(rounding.dtype, f"dtype of {name}")
        name, of = f"{name}.of", rounding.of
        if not (isinstance(rounding.times, int | float) and 0 < rounding.times < math.inf):
            raise ValueError(f"times of {name[:-3]} is {rounding.times!r}, expected a number above 0, as the terms of a sum")
    elif isinstance(rounding, Quantized):
        name, of = f"{name}.step", rounding.step
        if not isinstance(of, torch.Tensor) and not (isinstance(of, int | float) and of > 0):
            raise ValueError(f"{name} is {of!r}, expected a number above 0 or a float64 tensor")
    is_number = isinstance(rounding, Quantized) and not isinstance(of, torch.Tensor)
    if not is_number and getattr(of, "dtype", None) != torch.float64:
        raise ValueError(f"{name} is {getattr(of, 'dtype', type(of).__name__)}, expected a float64 tensor")
    try:
        found = rounding.square() if isinstance(rounding, torch.Tensor) else rounding.variance
        found = found.detach().to(exact.device).expand_as(exact)
        if isinstance(rounding, Quantized):
            found = _of_ties(found, exact, torch.as_tensor(rounding.step, device=exact.device))
    except RuntimeError as error:
        raise ValueError(f"{name} does not broadcast to exact's shape, {tuple(exact.shape)}: {error}") from None
    if bad := int((exact.isfinite() & ~found.isfinite()).sum()):
        raise ValueError(f"{name} is NaN or infinite at {bad:,} elements where exact is finite")
    return found


def _of_ties(variance: torch.Tensor, of: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return variances that allow half a step where `of` is about a tie, which may go either way, and all may be ties."""
    return variance.where(((of / step).frac().abs() - 0.5).abs() > _NEAR, 3 * variance)


def _limits(exact: torch.Tensor, rounded: list[torch.Tensor]) -> Limits:
    """Return the limits of a result of rows: a level has the limit of that above it where it has too little to average."""
    limits, _ = limits_named("default")
    row = limits.element if exact.shape[-1] < _SHORT else limits.row
    return Limits(limits.element, row, row if min(map(_values, (exact, *rounded))) < _FEW else limits.head)


def _values(rounded: torch.Tensor) -> float:
    """Return how many magnitudes there are but 0, told apart by 8 bits: the reciprocal of Simpson's index."""
    counts = rounded.detach().nan_to_num(0, 0, 0).abs().bfloat16().view(torch.int16).flatten().int().bincount().double()
    counts[0] = 0
    return float(counts.sum().square() / counts.square().sum().clamp(min=1))


# -- what is said ------------------------------------------------------------------------------------------------------


def _describe(
    row: TensorComparison,
    got: torch.Tensor,
    expected: Expected,
    out: torch.Tensor,
    roundings: Sequence[Rounded | Quantized | torch.Tensor],
) -> str:
    """Return the text of a mismatch, in the words of attention's."""
    lines = describe_row(row, row.name, "", _where(wrong_rows(row, got, expected), out.shape[:-1]), whole="the whole")
    z = residual_over_budget(got.double() - expected.value, expected.tau)
    slopes = head_slopes(z, expected)
    off, error = float(slopes.off), float(slopes.error)
    if abs(off) > CLEAR * error:
        size = f"{abs(off):.2%} too {'large' if off > 0 else 'small'}".replace("%", " %")
        lines.append(labeled("factor", f"{row.name} is {size}: slope {1 + off:.4f} ± {error:.4f}"))
    declared = {dtype_name(one.dtype) for one in roundings if isinstance(one, Rounded)}
    if (own := str(out.dtype).removeprefix("torch.")) in FLOATING_DTYPES.keys() - declared - {"float32"}:
        lines.append(labeled("suggests", f"{row.name} is {own}, and no rounding to it is declared"))
    return "\n".join(lines)


def _where(wrong: torch.Tensor, shape: torch.Size) -> str:
    """Return which rows are wrong, along each dimension but the last."""
    wrong, said = wrong.reshape(shape), []
    for dim, size in enumerate(shape):
        found = wrong.movedim(dim, 0).reshape(size, -1).any(-1).nonzero().flatten().tolist()
        said.append(f"dimension {dim}: {describe_rows(Members(tuple(found), size), size)}")
    return "; ".join(said) or "the only row"


# -- an exact form of the user's own ------------------------------------------------------------------------------------


#: computes out of q, k and v, all float64, in the layout of the kernel
OwnForm: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

#: pairs of draws, of which one has the errors of the other with opposite signs
_PAIRS = 24
#: draws for which the mean of a row counts, as those of one element alone can be small by chance
_OF_ROW = 8
#: how far, in budgets, the two of a pair may be from lying on opposite sides: beyond a form jumps, and so would its kernels
_BENT = 6.0
#: how far, as a part of the largest number, float64 sums of another order may be off
_ORDER = 1e-10
#: options of a workload that the form need not be told
_TAKEN = {"plain", "fewer queries", "fewer keys", "grouped heads", "v_head_dim", "causal", "causal-bottom-right"}
#: products by the place of their left matrix among the arguments; its last dimension is summed over
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "addbmm": 1}
#: sums, at most along the longest dimension
_SUMS = {"sum", "mean", "cumsum", "logsumexp", "logcumsumexp", "_softmax", "_log_softmax", "linalg_vector_norm", "var", "std"}
_SUMS |= {"_softmax_backward_data", "_log_softmax_backward_data"}  # of gradients
#: roundings to a dtype of which a step of near numbers, as of scores about a constant, has the errors in common
_ALIKE = 2**0.5
#: what hides several products in one step, or chooses: a kernel that rounds otherwise may choose otherwise
_HIDDEN = (
    "attention",
    "convolution",
    "sort",
    "topk",
    "argm",
    "kthvalue",
    "round",
    "floor",
    "ceil",
    "sign",
)


class OwnReferences(ReferenceCache):
    """Results of an own form in place of those of exact attention. Raises ValueError for a case that a form cannot judge."""

    def __init__(self, form: OwnForm, spec: CheckSpec) -> None:
        super().__init__()
        self.form = form
        w, declared, profile = spec.workload, spec.declared, spec.profile
        more = sorted(traits_of(w) - _TAKEN)
        is_quantized = profile.p_step or profile.p_dtype or profile.v_dtype or profile.qk_error or profile.half_sum_keys
        unfit = {
            f"{w.id} has {', '.join(more)}, of which it is not told; leave these to the code of fn and reference": more,
            "gradients in float32 show how a kernel computes weights again; name a workload in half precision": (
                spec.backward and w.dtype == "float32"
            ),
            "it says what out is, and nothing of lse; leave out returns and returns_lse": spec.results != ("out",),
            f"layout {declared.layout!r} has no batch dimension": not declared.has_batch,
            f"precision {profile.name!r} says what a softmax rounds; leave it out, or say 'eager'": is_quantized,
            "skips= is of a softmax": declared.skips is not None,
            f"it is {type(form).__name__}, expected a function of q, k and v that returns out": not callable(form),
        }
        for why, applies in unfit.items():
            if applies:
                raise ValueError(f"reference=: {why}")

    def reference_of(self, spec: CheckSpec, distribution: str | None = None, subject: Subject | None = None) -> Reference:
        """Return the form's results on one distribution, with their budget."""
        if subject is not None and subject.has_own_inputs:
            raise ValueError("reference=: the kernel quantizes its inputs, and it is not told how; leave out dequantized")
        inputs = self.inputs_of(spec, distribution or spec.inputs[0])
        with quiet():
            results = _OwnResults(self.form, spec, inputs)
            scatters = scatters_of(results, Rounding(spec.profile, spec.workload.out_dtype))
        tensors = {
            name: Expected(spec.in_layout(scatter.exact), spec.in_layout(scatter.variance).sqrt().float())
            for name, scatter in scatters.items()
        }
        profile = replace(spec.profile, rounds_scaled_key=spec.profile.rounds_scores)  # what all are off alike is a factor
        return Reference(inputs, profile, tensors)


def scatters_of(results: _OwnResults, rounding: Rounding) -> dict[str, _Scatter]:
    """Return how far kernels of a form may be off, by the names of results. Raises ValueError where none can be held to it."""
    exact = results()
    scatters = {name: _Scatter(name, t, rounding) for name, t in exact.items()}
    generator = torch.Generator(exact["out"].device).manual_seed(0)
    for _ in range(_PAIRS):
        state = generator.get_state()
        one = results(_Off(rounding, generator, 1.0))
        generator.set_state(state)
        other = results(_Off(rounding, generator, -1.0))
        for name, scatter in scatters.items():
            scatter.add(one[name], other[name])
    again = results()
    if not all(scatter.holds(again[name]) for name, scatter in scatters.items()):
        raise ValueError(
            "reference returned other numbers when it was called again: it draws some, or depends on earlier calls"
        )
    for scatter in scatters.values():
        scatter.require_smooth()
    return scatters


class _Scatter:
    """How far one result of a form is off when its steps are."""

    def __init__(self, name: str, exact: Tensor, rounding: Rounding) -> None:
        self.exact = exact
        self._name, self._rounding = name, rounding
        self._squares, self._bent = torch.zeros_like(exact), torch.zeros_like(exact)
        self._apart: list[Tensor] = []

    def add(self, one: Tensor, other: Tensor) -> None:
        """Add the results of a pair of draws, of which one has the errors of the other with opposite signs."""
        one, other = ((t - self.exact).nan_to_num_(0, 0, 0) for t in (one, other))
        self._squares += ((one - other) / 2).square_()
        self._apart.append((one - other).abs_().float())
        self._bent = self._bent.maximum((one + other).abs_())

    def holds(self, again: Tensor) -> bool:
        """Return whether another exact call returned the same, but for the order in which a GPU's threads add up."""
        largest = self.exact.nan_to_num(0, 0, 0).abs().amax()
        return torch.allclose(again, self.exact, rtol=0.0, atol=_ORDER * float(largest), equal_nan=True)

    @property
    def variance(self) -> Tensor:
        """The variance of what kernels may round, 1 where the result is not finite."""
        squares = self._squares
        variance = (squares + squares.mean(-1, keepdim=True) * (_OF_ROW / _PAIRS)) / (_PAIRS + _OF_ROW)
        return (variance + self._rounding.of_result(self.exact, 1)).where(self.exact.isfinite(), 1.0)

    def require_smooth(self) -> None:
        """Raise ValueError where the two of a pair do not lie on opposite sides."""
        usual = torch.stack(self._apart).median(0).values.double().square_()
        usual = (usual + usual.mean(-1, keepdim=True) + self.variance.where(usual == 0, 0.0)).sqrt_()
        if bool((jumps := self._bent > _BENT * usual).any()):
            at = f"{self._name}[{', '.join(str(int(i)) for i in jumps.nonzero()[0])}]"
            raise ValueError(
                f"reference jumps: its {at} moves by {float(self._bent[jumps][0]):.3g} where rounding moves it by"
                f" {float(usual[jumps][0]):.3g} at most times, so no kernel can be held to it"
            )


class _OwnResults:
    """Out of a form, and its gradients by autograd where these are asked for."""

    def __init__(self, form: OwnForm, spec: CheckSpec, inputs: Inputs) -> None:
        self._form, self._in_layout = form, spec.in_layout
        self._given = tuple(t.double() for t in spec.handed(inputs))
        self._dout = spec.in_layout(inputs.dout).double()
        self._leaves = spec.leaves if spec.backward else ()
        self._deltas: list[Tensor] = []

    def __call__(self, off: _Off | None = None) -> dict[str, Tensor]:
        """Return them by their names. off: the errors that steps have. Raises ValueError for all but float64 tensors."""
        given = [t.clone() if off is None else off.by_input(t) for t in self._given]
        leaves = [t.requires_grad_() for name, t in zip("qkv", given, strict=True) if name in self._leaves]
        with off or _Off(None) as steps, torch.set_grad_enabled(bool(leaves)):
            out = self._form(*given)
            self._require_result(out)
            steps.is_backward, steps.deltas = True, self._deltas
            if off is None:
                steps.deltas.clear()
                parts = self._in_layout(out.detach() * self._dout)
                steps.delta = parts.square().sum(-1).sqrt_() / parts.sum(-1).abs_()
            found = torch.autograd.grad(out, leaves, self._dout, allow_unused=True) if leaves else ()
        gradients = dict(zip(self._leaves, found, strict=True))
        if unreached := [name for name, gradient in gradients.items() if gradient is None]:
            raise ValueError(f"reference has no gradient of {', '.join(unreached)}: autograd does not reach it from out")
        return {"out": out.detach()} | {f"d{name}": gradient for name, gradient in gradients.items()}

    def _require_result(self, out: object) -> None:
        if not isinstance(out, Tensor) or out.dtype != torch.float64:
            kind = str(out.dtype) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"reference returned {kind}, expected out as a float64 tensor: q, k and v are float64")
        if out.shape != self._dout.shape:
            raise ValueError(f"reference returned shape {tuple(out.shape)}, expected that of out, {tuple(self._dout.shape)}")
        if self._leaves and not out.requires_grad:
            raise ValueError("reference has no gradients: autograd does not reach q, k or v from out; leave out backward")


class _Off(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has each step of what is computed within off by a rounding; without one it only looks at them.

    sign: of all errors.
    """

    def __init__(self, rounding: Rounding | None, generator: torch.Generator | None = None, sign: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding, self._generator, self._sign = rounding, generator, sign
        self._inputs: set[int] = set()  # their addresses: they are off already
        self.is_backward = False
        #: what each sum of a row is off for a rounding of out, as exact steps have found with `delta`, the part of it
        self.deltas: list[Tensor] = []
        self.delta: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one step."""
        name, rounding, kwargs = func._opname.rstrip("_"), self._rounding, kwargs or {}
        taken = max((t.itemsize for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_floating_point()), default=0)
        if taken and (func.namespace != "aten" or any(hidden in name for hidden in _HIDDEN)):
            raise ValueError(
                f"reference calls {func.namespace}::{name}, in which rounding cannot be followed; write its steps"
            )
        if func.is_view or not taken:
            return func(*args, **kwargs)
        sums, unit = 0.0, 0.0
        if rounding is not None:
            is_rounded_dp = self.is_backward and rounding.rounds_dp_to_dtype and name in _PRODUCTS
            unit = rounding.unit if rounding.rounds_scores_to_dtype or is_rounded_dp else 0.0
            sums = UNIT["float32"] * _terms(name, args) ** 0.5
            operands = math.hypot(rounding.unit, rounding.operand_unit) if name in _PRODUCTS else 0.0
            if name in _PRODUCTS or name in _SUMS:
                args = tree_map_only(
                    Tensor,
                    lambda t: self._off(t, sums if _address(t) in self._inputs else math.hypot(operands, sums)),
                    args,
                )

        def result(found: Tensor) -> Tensor:
            if found.is_complex() or (found.is_floating_point() and found.itemsize < max(taken, 4)):
                raise ValueError(f"reference computes in {found.dtype} in aten::{name}, expected torch.float64 in each step")
            off = self._off(found, math.hypot(unit, sums), _ALIKE * unit)
            return found.copy_(off) if func._opname.endswith("_") else off

        found = func(*args, **kwargs)
        if self.is_backward and name == "_softmax_backward_data":
            found = found + self._off_by_out((args[0] * args[1]).sum(-1, keepdim=True)) * args[1]
        elif self.is_backward and name == "sum":
            found = found + self._off_by_out(found)
        return tree_map_only(Tensor, result, found)

    def _off_by_out(self, sums: Tensor) -> Tensor | float:
        """Return what sums of P dP are off, one for each row, in kernels that have them of dout and an out that is rounded."""
        if self.delta is not None and sums.numel() == self.delta.numel():
            self.deltas.append((sums * self.delta.reshape(sums.shape)).nan_to_num_(0, 0, 0))
        if self._rounding is None or not self.deltas or sums.numel() != self.deltas[0].numel():
            return 0.0
        self.deltas.append(size := self.deltas.pop(0))
        return self._off(size, self._rounding.unit) - size

    def by_input(self, tensor: Tensor) -> Tensor:
        """Return an input that is off, which stands for what is rounded of its partners, in products that are none here."""
        assert self._rounding is not None
        off = self._off(tensor, math.hypot(self._rounding.unit, self._rounding.operand_unit))
        self._inputs.add(_address(off))
        return off

    def _off(self, tensor: Tensor, unit: float, alike: float = 0.0) -> Tensor:
        """Return a tensor whose numbers are off by a part of themselves at random, with this standard deviation.

        alike: that of what all of them are off alike.
        """
        if not unit or not tensor.is_floating_point():
            return tensor
        assert self._rounding is not None
        assert self._generator is not None
        most, device = 3**0.5, self._generator.device  # not that of what a form makes of its constants
        off = torch.empty_like(tensor, device=device).uniform_(-most * unit, most * unit, generator=self._generator)
        off += torch.empty((), device=device).uniform_(-most * alike, most * alike, generator=self._generator)
        off = off.to(tensor.device)
        size = tensor.abs().clamp_(min=self._rounding.floor / self._rounding.unit).copysign_(tensor)  # float16 has subnormals
        return off.mul_(self._sign).mul_(size).where(tensor != 0, 0.0).nan_to_num_(0, 0, 0).add_(tensor)


def _address(tensor: Tensor) -> int:
    """Return where a tensor and all views of it lie."""
    return tensor.untyped_storage().data_ptr()


def _terms(name: str, args: Any) -> float:
    """Return how many numbers a step adds up for each of its results."""
    shape = next(t for t in tree_leaves(args[_PRODUCTS.get(name, 0) :]) if isinstance(t, Tensor)).shape
    return float(shape[-1] if name in _PRODUCTS else max(shape, default=1) if name in _SUMS else 1)
