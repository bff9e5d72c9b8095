"""Why a tensor may be wrong: where the faults lie, and which other attention the kernel seems to have computed.

The second question is answered by asking the reference: for each likely mistake (another scale, mask, alignment, head
mapping, an option left out) it computes a few of the worst rows as that mistake would give them. If these fit the
kernel's rows within the budget, the mistake has a name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.correctness.compare import Limits, TensorComparison, residual_over_budget
from pytest_attn.correctness.mistakes import likely_mistakes
from pytest_attn.correctness.precision import EXACT_PRECISIONS, Precision
from pytest_attn.correctness.reference import Reference, compute_reference, heads_first, score_elements
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

_ROWS = 32
_AGAIN_ELEMENTS = 1 << 26
_TILES = (128, 64, 32, 16)
_SCALE_STEPS = 6


def explain(comparison: TensorComparison, tensor: torch.Tensor, reference: Reference, workload: Workload) -> list[str]:
    """Return lines that say where `tensor` is wrong and what that suggests, most telling first."""
    expected = reference.tensors[comparison.name]
    got = heads_first(tensor.detach(), workload)
    if expected.rows is not None:
        got = got[:, :, expected.rows.to(got.device)]
    bad = _bad_rows(comparison, got, reference)
    lines = [_where(bad, expected.rows)]
    if comparison.wrong_positions:
        lines += _non_finite(got, bad, reference, comparison.name)
        return lines
    if not bool(got.any()):
        return [*lines, f"{comparison.name} is all zeros"]
    if comparison.name == "lse":
        return [*lines, *_lse_base(got, expected.value)]
    if comparison.name == "out":
        return [*lines, *_mistake_or_profile(got, bad, reference, workload, comparison)]
    slope = _gradient_slope(comparison, workload)
    return [*lines, *(slope or _profiles_of_gradient(got, reference, workload, comparison))]


# -- where ---------------------------------------------------------------------------------------------------------------


def _bad_rows(comparison: TensorComparison, got: torch.Tensor, reference: Reference) -> torch.Tensor:
    """Return (batch, heads, rows): True where a row holds a fault."""
    expected = reference.tensors[comparison.name]
    value = expected.value
    if comparison.wrong_positions:
        rounded = value.to(got.dtype)
        wrong = ~((got.isfinite() & rounded.isfinite()) | (got == rounded))
        return wrong.any(-1) if wrong.dim() == 4 else wrong
    if comparison.name == "lse":
        return (got.double() - value).abs() > comparison.budget
    z = residual_over_budget(got.double() - value, expected.tau)
    bad = (z.abs().amax(-1) > comparison.limits.element) | (z.square().mean(-1).sqrt() > comparison.limits.row)
    return bad if bool(bad.any()) else z.square().mean(-1).sqrt() > 1


def _where(bad: torch.Tensor, sampled: torch.Tensor | None) -> str:
    batch, heads, rows = bad.shape
    positions = bad.any(0).any(0).nonzero().flatten()
    if sampled is not None:
        positions = sampled.to(positions.device)[positions]
    at_rows = positions.tolist()
    at_heads = bad.any(-1).any(0).nonzero().flatten().tolist()
    at_batches = bad.any(-1).any(-1).nonzero().flatten().tolist()
    length = rows if sampled is None else int(sampled[-1]) + 1
    parts = [f"rows {_describe_rows(at_rows, length, rows)}", _describe_set("head", at_heads, heads)]
    if batch > 1:
        parts.append(_describe_set("batch entry", at_batches, batch).replace("entrys", "entries"))
    return "; ".join(parts)


def _describe_set(noun: str, members: list[int], size: int) -> str:
    if len(members) == size:
        return f"all {size} {noun}s" if size > 1 else f"the only {noun}"
    shown = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
    return f"{noun}{'s' if len(members) > 1 else ''} {shown} (of {size})"


def _describe_rows(rows: list[int], length: int, looked_at: int) -> str:
    """Describe which rows are wrong: all, one, a tail after the last full tile, every n-th, a range, or their number."""
    of = f"of {length}" if looked_at == length else f"of {looked_at} looked at"
    if len(rows) == looked_at:
        return f"all {looked_at}"
    if len(rows) == 1:
        return f"only {rows[0]} {of}" + (" (the last)" if rows[0] == length - 1 else "")
    contiguous = looked_at == length and rows == list(range(rows[0], rows[-1] + 1))
    for tile in _TILES:
        if contiguous and rows[-1] == length - 1 and rows[0] == length // tile * tile and length % tile:
            return f"{rows[0]} to {rows[-1]} {of}, the tail after the last full tile of {tile}"
        residues = {row % tile for row in rows}
        if len(residues) == 1 and len(rows) >= 2 and not contiguous:
            return f"{len(rows)} {of}, every one at {residues.pop()} modulo {tile}"
    if contiguous:
        return f"{rows[0]} to {rows[-1]} {of}"
    return f"{len(rows)} {of}, first {rows[0]}, last {rows[-1]}"


# -- what ----------------------------------------------------------------------------------------------------------------


def _non_finite(got: torch.Tensor, bad: torch.Tensor, reference: Reference, name: str) -> list[str]:
    nans, infinities = int(got.isnan().sum()), int(got.isinf().sum())
    lines = [f"{name} holds {nans:,} NaN and {infinities:,} infinite elements"]
    lse = reference.tensors["lse"].value
    if name in ("out", "dq") and lse.shape == bad.shape and bool(bad.any()):
        largest = float(lse[bad].max())
        if largest < -88:
            lines.append(f"each of these rows has lse below -88 (at most {largest:.1f}), where exp(-lse) overflows in float32")
        elif largest == -math.inf:
            lines.append("each of these rows sees no key at all: out must be 0 there")
    return lines


def _lse_base(got: torch.Tensor, exact: torch.Tensor) -> list[str]:
    finite = exact.isfinite() & got.isfinite() & (exact.abs() > 0.1)
    if not bool(finite.any()):
        return []
    ratio = float((got[finite].double() / exact[finite]).median())
    for factor, text in (
        (1 / math.log(2), "log2 e: it is in base 2"),
        (math.log(2), "ln 2: it was converted from base 2 twice"),
    ):
        if abs(ratio / factor - 1) < 1e-3:
            return [f"lse is off by a factor of {text}; natural logarithm expected"]
    return []


def _gradient_slope(comparison: TensorComparison, w: Workload) -> list[str]:
    scale = w.softmax_scale
    known = {
        1 / scale: "the factor softmax_scale is missing",
        scale: "the factor softmax_scale was applied twice",
        1 / w.group: f"it looks like the mean over the {w.group} query heads of a group, not their sum",
        -1.0: "its sign is flipped",
        math.log(2): "a factor of ln 2 too much",
        1 / math.log(2): "a factor of ln 2 is missing",
    }
    for factor, text in known.items():
        if factor != 1 and abs(comparison.alpha / factor - 1) < 0.01:
            return [f"{comparison.name} is {comparison.alpha:.4g} times the exact gradient: {text}"]
    return []


def _mistake_or_profile(
    got: torch.Tensor, bad: torch.Tensor, reference: Reference, w: Workload, comparison: TensorComparison
) -> list[str]:
    rows, mine = _worst_rows(got, bad, reference, w)
    lines = []
    for text, inputs, variant in likely_mistakes(reference.inputs, w):
        z = _fit(mine, inputs, variant, rows, reference.precision, comparison.limits)
        if z is not None:
            lines.append(f"it equals attention {text} (z {z:.1f} there)")
            break
    if not lines and (head := _equals_other_head(got, reference, comparison.limits)):
        lines.append(head)
    if not lines:
        lines += _scale_or_profile(mine, rows, reference, w, comparison.limits)
    return lines


def _scale_or_profile(
    got: torch.Tensor, rows: torch.Tensor | None, reference: Reference, w: Workload, limits: Limits
) -> list[str]:
    """Name the scale that explains the rows, or the precision profiles: what fits better."""
    profiles = EXACT_PRECISIONS.items()
    fits = {name: _fit(got, reference.inputs, w, rows, profile, limits) for name, profile in profiles}
    scale = _fitted_scale(got, rows, reference, w)
    z = _fit(got, reference.inputs, w.replace(scale=scale), rows, reference.precision, limits) if scale else None
    if z is not None and all(z < fit for fit in fits.values() if fit is not None):
        return [f"it equals attention with scale {scale:.4g}, not {w.softmax_scale:.4g} (z {z:.1f} there)"]
    return _fitting_profiles(fits, reference)


def _fitted_scale(got: torch.Tensor, rows: torch.Tensor | None, reference: Reference, w: Workload) -> float | None:
    """Return the scale that explains the rows best, by Gauss-Newton in its logarithm; None where it is the workload's own."""

    def out(scale: float) -> torch.Tensor:
        changed = w.replace(scale=scale)
        return compute_reference(reference.inputs, reference.precision, rows=rows, workload=changed).tensors["out"].value

    scale, step = w.softmax_scale, 0.01
    for _ in range(_SCALE_STEPS):
        at = out(scale)
        slope = (out(scale * math.exp(step)) - at) / step
        steepness = float(slope.square().sum())
        change = float(((got.double() - at) * slope).sum()) / steepness if steepness else 0.0
        if not math.isfinite(change):
            return None
        scale *= math.exp(max(-1.0, min(1.0, change)))
        if abs(change) < 1e-5:
            break
    return scale if abs(math.log(scale / w.softmax_scale)) > 1e-3 else None


def _fitting_profiles(fits: dict[str, float | None], reference: Reference) -> list[str]:
    if fits.get(reference.precision.name) is not None:
        return []
    found = [f"{name!r} (z {z:.1f} there)" for name, z in fits.items() if z is not None and name != reference.precision.name]
    words = f"it fits the precision profile {', '.join(found)}, not {reference.precision.name!r}"
    return [f"{words}; say so if it rounds there"] if found else []


def _profiles_of_gradient(got: torch.Tensor, reference: Reference, w: Workload, comparison: TensorComparison) -> list[str]:
    """Judge a gradient under every other profile, where the workload is small enough to be computed again."""
    if reference.is_sampled or score_elements(w) > _AGAIN_ELEMENTS:
        return []
    fits: dict[str, float | None] = {}
    for name, profile in EXACT_PRECISIONS.items():
        other = compute_reference(reference.inputs, profile, backward=True, workload=w).tensors[comparison.name]
        z = residual_over_budget(got.double() - other.value, other.tau)
        squares = z.square().mean(-1)
        levels = (float(z.abs().max()), float(squares.max()) ** 0.5, float(squares.mean(-1).max()) ** 0.5)
        fits[name] = levels[0] if comparison.limits.excess(*levels) <= 1 else None
    return _fitting_profiles(fits, reference)


def _worst_rows(
    got: torch.Tensor, bad: torch.Tensor, reference: Reference, w: Workload
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Choose some wrong and some right rows; packed sequences are small, all their rows are taken."""
    import torch

    if w.is_packed:
        return None, got
    faulty = bad.any(0).any(0)
    order = torch.cat([faulty.nonzero().flatten()[:_ROWS], (~faulty).nonzero().flatten()[:_ROWS]]).sort().values
    sampled = reference.tensors["out"].rows
    return (order if sampled is None else sampled[order]), got[:, :, order]


def _fit(
    got: torch.Tensor,
    inputs: Inputs,
    workload: Workload,
    rows: torch.Tensor | None,
    precision: Precision,
    limits: Limits,
) -> float | None:
    """Return the largest |z| of `got` against another attention if it is within the limits, else None."""
    try:
        other = compute_reference(inputs, precision, rows=rows, workload=workload).tensors["out"]
    except (RuntimeError, IndexError):  # a mask_mod or score_mod that cannot serve the variant
        return None
    z = residual_over_budget(got.double() - other.value, other.tau)
    element, row = float(z.abs().max()), float(z.square().mean(-1).max()) ** 0.5
    return element if element <= limits.element and row <= limits.row else None


def _equals_other_head(got: torch.Tensor, reference: Reference, limits: Limits) -> str | None:
    out = reference.tensors["out"]
    for shift in range(1, got.shape[1]):
        z = residual_over_budget(got.double() - out.value.roll(shift, 1), out.tau.roll(shift, 1))
        if float(z.abs().max()) <= limits.element:
            return f"head h holds what belongs to head h - {shift}: heads are swapped"
    return None
