"""Whether what explains one tensor of a case explains all that the kernel returned: a wrong hint is worse than none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.compare import compare_all, residual_over_budget
from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.mistakes import likely_mistakes
from pytest_attn.correctness.patience import Patience
from pytest_attn.correctness.reference import Reference, as_compared, compute_reference, heads_first, score_elements
from pytest_attn.workloads.heads import is_interleaved, key_heads
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import BooleanMask, MaskModMask
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: rows of each tensor on which another attention is tried
_ROWS = 32
#: scores of a workload above which its exact attention takes long
_AGAIN_ELEMENTS = 1 << 26
#: how far the slope of a gradient may be from a factor that explains it
_SLOPE = 0.01
#: |z| up to which a computation with one step changed explains an element, and how much of the deviation it may leave
_EXPLAINED, _LEFT = 8.0, 0.25
#: |cosine| from which two gradients differ by a factor only
_ALIKE = 0.999


@dataclass(frozen=True)
class Returned:
    """What a kernel returned on one distribution: its tensors by name, in native layout, and what they should have been."""

    distribution: str
    reference: Reference
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class WholeCase:
    """All that a kernel returned, and how it compares. limits: of out and lse, and of gradients.

    patience: how long it may be looked for what explains it.
    """

    workload: Workload
    returned: Sequence[Returned]
    rows: Sequence[TensorComparison]
    limits: tuple[Limits, Limits]
    patience: Patience = field(default_factory=Patience, compare=False)

    def z_under(self, profile: Precision, name: str) -> float | None:
        """Return the largest |z| of the tensors of this name under another profile, None unless the whole case passes."""
        if self._is_too_long_to_compute_again or self._fails_on_one_head(profile, name):
            return None
        largest = 0.0
        for one in self.returned:
            inputs, backward = one.reference.inputs, "dq" in one.tensors
            of = one.reference
            reference = compute_reference(
                inputs, profile, backward=backward, workload=self.workload, parameters=of.parameters, extra=of.extra
            )
            for row in compare_all(one.distribution, one.tensors, reference, self.workload, self.limits):
                if not row.passed:
                    return None
                largest = max(largest, row.z_element if row.name == name else 0.0)
        return largest

    def is_mistake(self, text: str) -> bool:
        """Whether out is on every distribution what a likely mistake gives. text: of `likely_mistakes`."""

        def variants(inputs: Inputs) -> Iterator[tuple[Inputs, Workload]]:
            return (one.attention() for one in likely_mistakes(inputs, self.workload) if one.text == text)

        return all(any(self._is_out(one, inputs, w) for inputs, w in variants(one.reference.inputs)) for one in self.returned)

    def of(self, name: str) -> Iterator[tuple[torch.Tensor, Reference]]:
        """Yield what was returned under a name on each distribution, heads-first and where the reference looked, with that."""
        for one in self.returned:
            if name in one.tensors:
                got = as_compared(name, one.tensors[name].detach(), self.workload)
                rows = one.reference.tensors[name].rows
                yield (got if rows is None else got[:, :, rows.to(got.device)]), one.reference

    @property
    def scores_are_exact(self) -> bool:
        """Whether lse was returned, and is right under a profile whose scores are: they are not what is rounded."""
        of_lse = [row for row in self.rows if row.name == "lse"]
        declared = self.returned[0].reference.precision
        return bool(of_lse) and not declared.moves_lse and all(row.passed for row in of_lse)

    def has_scale(self, scale: float) -> bool:
        """Whether out is on every distribution that of another softmax scale."""
        other = self.workload.replace(scale=scale)
        return all(self._is_out(one, one.reference.inputs, other) for one in self.returned)

    def has_slope(self, name: str, factor: float) -> bool:
        """Whether the tensors of this name are on every distribution the exact ones times a factor."""
        rows = [row for row in self.rows if row.name == name]
        return all(abs(row.alpha / factor - 1) < _SLOPE and abs(row.cosine) > _ALIKE for row in rows)

    def _fails_on_one_head(self, profile: Precision, name: str) -> bool:
        """Whether the worst head alone fails under a profile: as much as costs little to find out, where heads are alike."""
        w, row = self.workload, next((row for row in self.rows if row.name == name and not row.passed), None)
        has_tensors = w.bias or w.alibi or w.sinks or w.score_mod or isinstance(w.mask, BooleanMask | MaskModMask)
        is_alone = w.batch * w.kv_heads == 1
        if row is None or is_alone or has_tensors or w.is_packed or w.kv_lens or self.returned[0].reference.is_sampled:
            return False
        one = next(one for one in self.returned if one.distribution == row.distribution)
        batch, head = row.worst[0], row.worst[1] if name in ("dk", "dv") else key_heads(w)[row.worst[1]]
        of_keys = (slice(batch, batch + 1), slice(head, head + 1))
        mine = slice(head, None, w.kv_heads) if is_interleaved(w) else slice(head * w.group, (head + 1) * w.group)
        of_queries = (of_keys[0], mine)
        alone, inputs = w.replace(batch=1, heads=w.group, kv_heads=1), one.reference.inputs
        q, dout = inputs.q[of_queries], inputs.dout[of_queries]
        inputs = dataclasses.replace(inputs, workload=alone, q=q, dout=dout, k=inputs.k[of_keys], v=inputs.v[of_keys])
        reference = compute_reference(inputs, profile, backward=name.startswith("d"))
        got = one.tensors[name][of_keys if name in ("dk", "dv") else of_queries]
        return not all(found.passed for found in compare_all(row.distribution, {name: got}, reference, alone, self.limits))

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


def unexplained(
    got: torch.Tensor,
    value: torch.Tensor,
    variance: torch.Tensor,
    exact: torch.Tensor,
    tau: torch.Tensor,
    bad: torch.Tensor | None,
) -> float | None:
    """Return which part of the wrong rows' deviation `value` leaves unexplained, None where it does not explain all of `got`.

    All (..., rows, dim). tau: budget of the exact tensor, to which the variance of value's own roundings is added.
    bad: (..., rows), None where rows may as well be right.
    """
    if got.shape != value.shape or not bool(value.isfinite().all()):
        return None
    finite = got.isfinite()  # what is not is a fault of its own
    off = (got.double() - value).where(finite, 0.0)
    z = off.abs() / (tau.double().square() + variance).sqrt().clamp(min=1e-100)
    if not bool((z <= _EXPLAINED).all()):
        return None
    return 0.0 if bad is None else _left(got, value, exact, bad)


def explains_most(got: torch.Tensor, value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> bool:
    """Whether `value` may explain the wrong rows, which costs less to find out than whether it does; as `unexplained`."""
    return _left(got, value, exact, bad) is not None


def _left(got: torch.Tensor, value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> float | None:
    """Return the norm of what is left unexplained over that of the deviation, None where it is too much."""
    finite = got.isfinite() & value.isfinite()
    off, deviation = ((got.double() - other).where(finite, 0.0)[bad] for other in (value, exact))
    size = float(deviation.norm())
    left = float(off.norm()) / size if size else math.inf
    return left if left <= _LEFT else None


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
