"""Why a tensor may be wrong: where the faults lie, and which other attention the kernel seems to have computed.

The second question is answered by asking the reference: for each likely mistake (another scale, mask, alignment, head
mapping, an option left out) it computes a few of the worst rows as that mistake would give them. If these fit the
kernel's rows within the budget, and those of its other distributions (`confirm.py`), the mistake has a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_attn.backends.precision import RARE, SUGGESTED
from pytest_attn.correctness.compare import residual_over_budget
from pytest_attn.correctness.comparison import Location, Members, Suggestion, TensorComparison
from pytest_attn.correctness.confirm import WholeCase, largest_z
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.mistakes import likely_mistakes
from pytest_attn.correctness.reference import Reference, compute_reference, heads_first
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

_ROWS = 32
_SCALE_STEPS = 6


def explain(
    comparison: TensorComparison, tensor: torch.Tensor, reference: Reference, case: WholeCase
) -> tuple[Location, list[Suggestion]]:
    """Return where `tensor` is wrong and what that suggests, most telling first. case: what a suggestion must explain, too."""
    workload = case.workload
    expected = reference.tensors[comparison.name]
    got = heads_first(tensor.detach(), workload)
    if expected.rows is not None:
        got = got[:, :, expected.rows.to(got.device)]
    bad = _bad_rows(comparison, got, reference)
    location = _location(bad, expected.rows)
    if comparison.wrong_positions:
        mended = got.where(got.isfinite(), expected.value.to(got.dtype))
        others = _bad_rows(replace(comparison, wrong_positions=0), mended, reference) & ~bad
        found = _non_finite(got, bad, reference, comparison.name, location)
        if comparison.exceeding and bool(others.any()):  # a fault of its own, which NaN must not hide
            location = _location(bad | others, expected.rows)
            if comparison.name == "out":
                found += _mistake_or_profile(got, others, reference, case, comparison)
        return location, found
    if _is_empty(_lse_of(bad, reference, comparison.name)):
        return location, [Suggestion("no key", {"tensor": comparison.name})]
    if not bool(got.any()):
        return location, [Suggestion("all zeros", {"tensor": comparison.name})]
    if comparison.name == "lse":
        return location, _lse_base(got, expected.value)
    if comparison.name == "out":
        return location, _mistake_or_profile(got, bad, reference, case, comparison)
    slope = _gradient_slope(comparison, workload, case)
    other_profiles = [name for name in SUGGESTED if name != reference.precision.name]
    return location, slope or _fitting_profiles(comparison.name, other_profiles, reference.precision.name, case)


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


def _location(bad: torch.Tensor, sampled: torch.Tensor | None) -> Location:
    """Return where (batch, heads, rows) is True; sampled: the positions of the rows, None where all are there."""
    batch, heads, rows = bad.shape
    positions = bad.any(0).any(0).nonzero().flatten()
    if sampled is not None:
        positions = sampled.to(positions.device)[positions]
    at_heads = bad.any(-1).any(0).nonzero().flatten().tolist()
    at_batches = bad.any(-1).any(-1).nonzero().flatten().tolist()
    return Location(
        rows=Members(tuple(positions.tolist()), rows),
        heads=Members(tuple(at_heads), heads),
        batches=Members(tuple(at_batches), batch),
        length=rows if sampled is None else int(sampled[-1]) + 1,
    )


# -- what ----------------------------------------------------------------------------------------------------------------


def _non_finite(got: torch.Tensor, bad: torch.Tensor, reference: Reference, name: str, location: Location) -> list[Suggestion]:
    nans, infinities = int(got.isnan().sum()), int(got.isinf().sum())
    found = [Suggestion("not finite", {"tensor": name, "nans": nans, "infinities": infinities, "location": location})]
    lse = _lse_of(bad, reference, name)
    if _is_empty(lse):
        found.append(Suggestion("no key", {"tensor": name}))
    elif len(lse) and (largest := float(lse.max())) < -88:
        found.append(Suggestion("exp overflow", {"largest": largest}))
    return found


def _lse_of(bad: torch.Tensor, reference: Reference, name: str) -> torch.Tensor:
    """Return lse of these rows (batch, heads, rows) of out or dq; nothing of other tensors, whose rows are keys."""
    lse = reference.tensors["lse"].value
    return lse[bad] if name in ("out", "dq") and lse.shape == bad.shape else lse[:0].flatten()


def _is_empty(lse: torch.Tensor) -> bool:
    """Whether these are rows, and none sees a key."""
    return bool(len(lse)) and bool((lse == -math.inf).all())


def _lse_base(got: torch.Tensor, exact: torch.Tensor) -> list[Suggestion]:
    finite = exact.isfinite() & got.isfinite() & (exact.abs() > 0.1)
    if not bool(finite.any()):
        return []
    ratio = float((got[finite].double() / exact[finite]).median())
    for factor, text in (
        (1 / math.log(2), "log2 e: it is in base 2"),
        (math.log(2), "ln 2: it was converted from base 2 twice"),
    ):
        if abs(ratio / factor - 1) < 1e-3:
            return [Suggestion("lse base", {"factor": text})]
    return []


def _gradient_slope(comparison: TensorComparison, w: Workload, case: WholeCase) -> list[Suggestion]:
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
        if factor != 1 and case.has_slope(comparison.name, factor):
            return [Suggestion("gradient factor", {"tensor": comparison.name, "slope": comparison.alpha, "factor": text})]
    return []


def _mistake_or_profile(
    got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: WholeCase, comparison: TensorComparison
) -> list[Suggestion]:
    w = case.workload
    rows, mine = _worst_rows(got, bad, reference, w)
    for text, inputs, variant in likely_mistakes(reference.inputs, w):
        z = largest_z(mine, inputs, variant, rows, reference.precision, comparison.limits)
        if z is not None and case.is_mistake(text):
            return [Suggestion("mistake", {"mistake": text, "z": z})]
    if shift := _shift_of_heads(got, reference, comparison.limits):
        return [Suggestion("shifted heads", {"shift": shift})]
    return _scale_or_profile(mine, rows, reference, case, comparison.limits)


def _scale_or_profile(
    got: torch.Tensor, rows: torch.Tensor | None, reference: Reference, case: WholeCase, limits: Limits
) -> list[Suggestion]:
    """Name the scale that explains the case, or the precision profiles: what fits the rows better."""
    w = case.workload
    profiles = SUGGESTED.items()
    fits = {name: largest_z(got, reference.inputs, w, rows, profile, limits) for name, profile in profiles}
    scale = _fitted_scale(got, rows, reference, w)
    z = largest_z(got, reference.inputs, w.replace(scale=scale), rows, reference.precision, limits) if scale else None
    if scale and z is not None and all(z < fit for fit in fits.values() if fit is not None) and case.has_scale(scale):
        return [Suggestion("scale", {"scale": scale, "expected": w.softmax_scale, "z": z})]
    if fits.get(reference.precision.name) is not None:
        return []
    fitting = [name for name, fit in fits.items() if fit is not None]
    return _fitting_profiles("out", fitting, reference.precision.name, case)


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
        off = (got.double() - at).nan_to_num(0, 0, 0)
        change = float((off * slope).sum()) / steepness if steepness else 0.0
        if not math.isfinite(change):
            return None
        scale *= math.exp(max(-1.0, min(1.0, change)))
        if abs(change) < 1e-5:
            break
    return scale if abs(math.log(scale / w.softmax_scale)) > 1e-3 else None


def _fitting_profiles(name: str, tried: Iterable[str], declared: str, case: WholeCase) -> list[Suggestion]:
    """Name those of the profiles under which the whole case would pass, rare ones where no other does."""
    names = list(tried)
    for some in ([one for one in names if one not in RARE], [one for one in names if one in RARE]):
        if found := {profile: z for profile in some if (z := case.z_under(SUGGESTED[profile], name)) is not None}:
            return [Suggestion("profiles", {"profiles": found, "declared": declared})]
    return []


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


def _shift_of_heads(got: torch.Tensor, reference: Reference, limits: Limits) -> int:
    """Return by how many heads the results are shifted, 0 where that is not what is wrong."""
    out = reference.tensors["out"]
    for shift in range(1, got.shape[1]):
        z = residual_over_budget(got.double() - out.value.roll(shift, 1), out.tau.roll(shift, 1))
        if float(z.abs().max()) <= limits.element:
            return shift
    return 0
