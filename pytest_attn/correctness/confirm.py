"""Whether what explains one tensor of a case explains all that the kernel returned: a wrong hint is worse than none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.compare import compare_all, residual_over_budget
from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.mistakes import likely_mistakes
from pytest_attn.correctness.reference import Reference, compute_reference, heads_first, score_elements
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: rows of each tensor on which another attention is tried
_ROWS = 32
#: scores of a workload above which its exact attention takes long
_AGAIN_ELEMENTS = 1 << 26
#: how far the slope of a gradient may be from a factor that explains it
_SLOPE = 0.01


@dataclass(frozen=True)
class Returned:
    """What a kernel returned on one distribution: its tensors by name, in native layout, and what they should have been."""

    distribution: str
    reference: Reference
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class WholeCase:
    """All that a kernel returned, and how it compares. limits: of out and lse, and of gradients."""

    workload: Workload
    returned: Sequence[Returned]
    rows: Sequence[TensorComparison]
    limits: tuple[Limits, Limits]

    def z_under(self, profile: Precision, name: str) -> float | None:
        """Return the largest |z| of the tensors of this name under another profile, None unless the whole case passes."""
        if self._is_too_long_to_compute_again:
            return None
        largest = 0.0
        for one in self.returned:
            inputs, backward = one.reference.inputs, "dq" in one.tensors
            reference = compute_reference(
                inputs, profile, backward=backward, workload=self.workload, parameters=one.reference.parameters
            )
            for row in compare_all(one.distribution, one.tensors, reference, self.workload, self.limits):
                if not row.passed:
                    return None
                largest = max(largest, row.z_element if row.name == name else 0.0)
        return largest

    def is_mistake(self, text: str) -> bool:
        """Whether out is on every distribution what a likely mistake gives. text: of `likely_mistakes`."""

        def variants(inputs: Inputs) -> Iterator[tuple[Inputs, Workload]]:
            return ((other, w) for found, other, w in likely_mistakes(inputs, self.workload) if found == text)

        return all(any(self._is_out(one, inputs, w) for inputs, w in variants(one.reference.inputs)) for one in self.returned)

    def has_scale(self, scale: float) -> bool:
        """Whether out is on every distribution that of another softmax scale."""
        other = self.workload.replace(scale=scale)
        return all(self._is_out(one, one.reference.inputs, other) for one in self.returned)

    def has_slope(self, name: str, factor: float) -> bool:
        """Whether the tensors of this name are on every distribution the exact ones times a factor."""
        return all(abs(row.alpha / factor - 1) < _SLOPE for row in self.rows if row.name == name)

    @property
    def _is_too_long_to_compute_again(self) -> bool:
        """Whether exact attention for all that was returned takes long; sampled rows of out do not."""
        is_sampled = any(one.reference.is_sampled for one in self.returned)
        has_gradients = any("dq" in one.tensors for one in self.returned)
        return score_elements(self.workload) > _AGAIN_ELEMENTS and (has_gradients or not is_sampled)

    def _is_out(self, one: Returned, inputs: Inputs, workload: Workload) -> bool:
        """Whether some rows of out, evenly spread, fit another attention."""
        got, exact = heads_first(one.tensors["out"].detach(), self.workload), one.reference.tensors["out"].rows
        rows = None
        if not self.workload.is_packed:
            spread = _evenly_spread(got.shape[2] if exact is None else len(exact))
            rows = spread.to(got.device) if exact is None else exact[spread.to(exact.device)]
            got = got[:, :, rows.to(got.device)]
        return largest_z(got, inputs, workload, rows, one.reference.precision, self.limits[0]) is not None


def _evenly_spread(length: int) -> torch.Tensor:
    """Return up to _ROWS positions below a length, the first and the last among them."""
    import torch

    return torch.tensor(sorted({i * (length - 1) // (_ROWS - 1) for i in range(_ROWS)}))


def largest_z(
    got: torch.Tensor,
    inputs: Inputs,
    workload: Workload,
    rows: torch.Tensor | None,
    precision: Precision,
    limits: Limits,
) -> float | None:
    """Return the largest |z| of rows of out against another attention if they are within the limits, else None.

    Elements that are not finite are a fault of their own, and left out unless most are.
    """
    try:
        other = compute_reference(inputs, precision, rows=rows, workload=workload).tensors["out"]
    except (RuntimeError, IndexError):  # a mask_mod or score_mod that cannot serve the variant
        return None
    finite = got.isfinite()
    if not bool(finite.any(-1).float().mean() > 0.5):
        return None
    z = residual_over_budget(got.double() - other.value, other.tau).masked_fill(~finite, 0)
    element, row = float(z.abs().max()), float(z.square().mean(-1).max()) ** 0.5
    return element if element <= limits.element and row <= limits.row else None
