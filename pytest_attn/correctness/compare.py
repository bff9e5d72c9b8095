"""Hold a kernel's tensors against the reference: residual over budget, at three levels, and the usual figures beside it.

z = (tensor - exact) / tau is dimensionless. An honest kernel's z looks the same for every shape, dtype and value scale,
and each kind of fault shows at its own level: one wrong element (max |z|), one wrong key or row (RMS of z over a row), a
small error everywhere (RMS of z over a head).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.compiled import Compilation
from pytest_attn.correctness.exact import Expected
from pytest_attn.correctness.reference import Reference, heads_first
from pytest_attn.workloads.masks import describe
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: The RMS over a head of fewer rows says no more than that of its rows, and is held to the row's limit.
FEW_ROWS = 16
LSE_TOLERANCE = 1e-5  # of 1 + |lse|: float32 sums of exponentials are that good


@dataclass(frozen=True)
class Limits:
    """The largest |z| of an element, and the largest RMS of z over a row and over a head."""

    element: float
    row: float
    head: float

    def excess(self, element: float, row: float, head: float) -> float:
        """Return how far the worst level is over its limit, as a ratio (at most 1 passes; NaN counts as infinite)."""
        worst = max(element / self.element, row / self.row, head / self.head)
        return math.inf if math.isnan(element) or math.isnan(row) or math.isnan(head) else worst


#: limits by name: (for out, for gradients). The calibration behind them is docs/calibration.md.
LIMITS = {
    "default": (Limits(8, 4, 1.5), Limits(8, 4, 1.5)),
    "strict": (Limits(6, 2, 1), Limits(8, 4, 1.5)),
}


def limits_named(name: str) -> tuple[Limits, Limits]:
    """Return limits (out, gradients) by name; raise ValueError for an unknown one."""
    if name not in LIMITS:
        raise ValueError(f"unknown limits {name!r}; known: {', '.join(LIMITS)}")
    return LIMITS[name]


class ContractError(AssertionError):
    """A callable broke its contract before any value was looked at: type, shape, dtype, device, or changed inputs."""


@dataclass(frozen=True)
class TensorComparison:
    """One tensor of one draw of inputs against the exact one.

    z_element, z_row, z_head: the largest |z| and RMS of z. absmax, mean_abs, mse, relative_l2, cosine: of the residual,
    over elements that are finite in both. alpha: slope of the tensor over the exact one, 1 where it is right.
    worst: index (batch, head, row, dim) of the largest |z|. exceeding: number of elements over the limit.
    wrong_positions: number of elements whose NaN or infinity is not where the exact result has one.
    """

    name: str
    distribution: str
    passed: bool
    z_element: float
    z_row: float
    z_head: float
    absmax: float
    mean_abs: float
    mse: float
    relative_l2: float
    cosine: float
    alpha: float
    elements: int
    exceeding: int
    wrong_positions: int
    worst: tuple[int, ...]
    found: float
    exact: float
    budget: float
    limits: Limits

    @property
    def excess(self) -> float:
        """How far over its limit the worst level is, as a ratio."""
        return math.inf if self.wrong_positions else self.limits.excess(self.z_element, self.z_row, self.z_head)


@dataclass(frozen=True)
class Comparison:
    """The judgement of one callable on one workload: a row per tensor and distribution, and the text of a failure."""

    workload: str
    subject: str
    tensors: tuple[TensorComparison, ...]
    is_sampled: bool = False
    message: str = field(default="", repr=False)
    #: whether the callable quantises its inputs and was held against exact attention on the quantised ones
    is_approximate: bool = False
    #: inputs that the callable changed in place
    changed: tuple[str, ...] = ()
    #: what torch.compile took, where the callable was compiled
    compilation: Compilation | None = None

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its budget and every input as it was."""
        return not self.changed and all(tensor.passed for tensor in self.tensors)

    @property
    def worst(self) -> TensorComparison:
        """The tensor that comes closest to its limits, or exceeds them most."""
        return max(self.tensors, key=lambda tensor: tensor.excess)

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        tensors = [{**asdict(t), "worst": list(t.worst)} for t in self.tensors]
        return {"workload": self.workload, "subject": self.subject, "passed": self.passed, "tensors": tensors}


def check_contract(
    result: object, names: tuple[str, ...], reference: Reference, workload: Workload, layout: str = "bhsd"
) -> list[Any]:
    """Return the tensors of a callable's result, still in its layout; raise ContractError naming what is off.

    `names` is ("out",) or ("out", "lse").
    """
    import torch

    expected_text = "a tensor out" if len(names) == 1 else "a tuple (out, lse)"
    if result is None:
        raise ContractError(f"the callable returned nothing (None); expected {expected_text}")
    if len(names) == 1 and isinstance(result, tuple | list):
        raise ContractError(
            f"the callable returned a {type(result).__name__} of {len(result)}; expected {expected_text}."
            " Say returns_lse=True in the marker if it returns (out, lse), else return its first element"
        )
    if len(names) == 2 and not (isinstance(result, tuple | list) and len(result) == 2):
        raise ContractError(f"the callable returned {describe(result)}; expected {expected_text} (returns_lse=True)")
    tensors = [result] if len(names) == 1 else list(result)  # type: ignore[call-overload]
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(f"{name} is {describe(tensor)}; expected a tensor")
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise ContractError(f"{name} is a {kind} tensor; expected a dense one, say .to_dense()")
        shape = native_shape(name, workload)
        if layout == "bshd" and name != "lse":
            shape = (shape[0], shape[2], shape[1], *shape[3:])
        dtype = torch.float32 if name == "lse" else getattr(torch, workload.dtype)
        if tuple(tensor.shape) != shape:
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)}; expected {shape}{_layout_hint(tensor, shape, layout)}"
            )
        if tensor.dtype != dtype and not (name == "lse" and tensor.dtype == torch.float64):
            raise ContractError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
        if tensor.device != reference.inputs.q.device:
            raise ContractError(f"{name} is on {tensor.device}; expected {reference.inputs.q.device}")
    return tensors


def native_shape(name: str, w: Workload) -> tuple[int, ...]:
    """Return the shape of a tensor in the workload's native layout ("bhsd", or "thd" where packed)."""
    if w.q_lens is not None and w.kv_lens is not None:
        total = sum(w.kv_lens) if name in ("k", "v", "dk", "dv") else sum(w.q_lens)
        heads = w.kv_heads if name in ("k", "v", "dk", "dv") else w.heads
        dim = w.v_head_dim if name in ("out", "v", "dv") else w.head_dim
        return (heads, total) if name == "lse" else (total, heads, dim)
    if name == "lse":
        return (w.batch, w.heads, w.q_len)
    if name in ("dk", "dv", "k", "v"):
        return (w.batch, w.kv_heads, w.kv_len, w.head_dim if name in ("dk", "k") else w.v_head_dim)
    return (w.batch, w.heads, w.q_len, w.v_head_dim if name == "out" else w.head_dim)


def _layout_hint(tensor: torch.Tensor, shape: tuple[int, ...], layout: str) -> str:
    if tensor.dim() != 4 or len(shape) != 4:
        return ""
    if tuple(tensor.transpose(1, 2).shape) == shape:
        other = "bshd" if layout == "bhsd" else "bhsd"
        return f" (heads and rows are swapped: does it return layout {other!r}? say layout={other!r} in the marker)"
    return ""


def compare_tensor(
    name: str, distribution: str, tensor: torch.Tensor, reference: Reference, workload: Workload, limits: Limits
) -> TensorComparison:
    """Compare one native tensor with the reference's tensor of the same name."""
    expected = reference.tensors[name]
    got = heads_first(tensor.detach(), workload)
    unsampled_faults = 0
    if expected.rows is not None:
        if bool(expected.value.isfinite().all()):
            unsampled_faults = int((~got.isfinite()).sum())
        got = got[:, :, expected.rows.to(got.device)]
    if name == "lse":
        return _compare_lse(distribution, got, expected)
    if got.shape[2] < FEW_ROWS:
        limits = replace(limits, head=limits.row)
    residual, wrong = _residual(got, expected)
    z = residual_over_budget(residual, expected.tau)
    squares = z.square()
    z_element, at = _largest(z.abs())
    rows = squares.mean(-1)
    z_row, z_head = float(rows.max()) ** 0.5, float(rows.mean(-1).max()) ** 0.5
    wrong_count = max(int(wrong.sum()), unsampled_faults)
    if wrong_count and bool(wrong.any()):
        at = _index(int(wrong.flatten().int().argmax()), wrong.shape)
    passed = not wrong_count and limits.excess(z_element, z_row, z_head) <= 1
    return TensorComparison(
        name=name,
        distribution=distribution,
        passed=passed,
        z_element=z_element,
        z_row=z_row,
        z_head=z_head,
        elements=got.numel(),
        exceeding=int((z.abs() > limits.element).sum()),
        wrong_positions=wrong_count,
        worst=_true_index(at, expected),
        found=float(got[at]),
        exact=float(expected.value[at]),
        budget=float(expected.tau[at]),
        limits=limits,
        **_familiar_figures(residual, expected.value),
    )


def residual_over_budget(residual: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Return z; where nothing may be off (tau = 0) it is 0 or infinite."""
    import torch

    z = residual / tau
    return torch.where(tau > 0, z, torch.where(residual == 0, 0.0, math.inf))


def _residual(got: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual in float64, zero at non-finite places, and where NaN or infinity is not as expected.

    An exact value beyond the dtype's largest number is expected to be infinite.
    """
    import torch

    value = expected.value.to(got.device)
    as_dtype = value.to(got.dtype)
    wrong = (got.isnan() != as_dtype.isnan()) | (got.isinf() != as_dtype.isinf()) | (got.isinf() & (got != as_dtype))
    both = got.isfinite() & as_dtype.isfinite()
    return torch.where(both, got.double() - value, 0.0), wrong


def _compare_lse(distribution: str, got: torch.Tensor, expected: Expected) -> TensorComparison:
    residual, wrong = _residual(got.double(), expected)
    finite = expected.value.isfinite()
    exact = expected.value.where(finite, expected.value.new_zeros(()))
    allowed = LSE_TOLERANCE * (1 + exact.abs())
    z = residual / allowed
    z_element, at = _largest(z.abs())
    limits = Limits(1, 1, 1)
    return TensorComparison(
        name="lse",
        distribution=distribution,
        passed=not bool(wrong.any()) and z_element <= 1,
        z_element=z_element,
        z_row=z_element,
        z_head=float(z.square().mean(-1).max()) ** 0.5,
        elements=got.numel(),
        exceeding=int((z.abs() > 1).sum()),
        wrong_positions=int(wrong.sum()),
        worst=_true_index(at, expected),
        found=float(got[at]),
        exact=float(expected.value[at]),
        budget=float(allowed[at]),
        limits=limits,
        **_familiar_figures(residual, exact),
    )


def _familiar_figures(residual: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    exact = exact.where(exact.isfinite(), exact.new_zeros(()))
    got = exact + residual
    energy, overlap = float(exact.square().sum()), float((got * exact).sum())
    mse = float(residual.square().mean())
    norms = math.sqrt(energy) * float(got.norm())
    return {
        "absmax": float(residual.abs().max()),
        "mean_abs": float(residual.abs().mean()),
        "mse": mse,
        "relative_l2": math.sqrt(mse * residual.numel() / energy) if energy else 0.0,
        "cosine": overlap / norms if norms else (1.0 if not energy and not float(got.norm()) else 0.0),
        "alpha": overlap / energy if energy else 1.0,
    }


def _largest(magnitude: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    at = _index(int(magnitude.flatten().argmax()), magnitude.shape)
    return float(magnitude[at]), at


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        index.append(here)
    return tuple(reversed(index))


def _true_index(at: tuple[int, ...], expected: Expected) -> tuple[int, ...]:
    if expected.rows is None:
        return at
    return (*at[:2], int(expected.rows[at[2]]), *at[3:])
