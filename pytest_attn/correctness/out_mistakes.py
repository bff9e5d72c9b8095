"""Which other attention explains an out that is wrong: a likely mistake, another place, another scale, another profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.backends.precision import RARE, SUGGESTED
from pytest_attn.correctness.compare import residual_over_budget
from pytest_attn.correctness.comparison import Suggestion
from pytest_attn.correctness.confirm import WholeCase, largest_z
from pytest_attn.correctness.limits import Limits
from pytest_attn.correctness.mistakes import Mistake, likely_mistakes
from pytest_attn.correctness.online_mistakes import name_online
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: wrong rows, and as many right ones, on which a mistake is tried: a few first, and these if it fits them
_FEW, _ROWS = 4, 32
_SCALE_STEPS = 6
#: scores of packed sequences, of which all rows are computed, above which no mistake is tried
_PACKED_ELEMENTS = 1 << 24

#: what is left out where time is over
_MISTAKES, _PROFILES = "likely mistakes", "precision profiles"

#: positions of rows, None for all, and what the kernel returned there
Tried: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor]"


def name_out(got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: WholeCase, limits: Limits) -> list[Suggestion]:
    """Return what explains out, heads-first, whose rows `bad` (batch, heads, rows) are wrong; nothing where nothing does."""
    tried = _worst_rows(got, bad, reference, case.workload, _ROWS)
    return (
        _mistake(got, bad, reference, case, limits)
        or _misplaced(got, reference, case, limits)
        or _scale_or_profile(tried, reference, case, limits)
        or ([] if case.patience.is_over("mistakes in running sums") else name_online(bad, reference, case))
    )


# -- mistakes --------------------------------------------------------------------------------------------------------------


def _mistake(got: torch.Tensor, bad: torch.Tensor, reference: Reference, case: WholeCase, limits: Limits) -> list[Suggestion]:
    """Name the mistake that fits best, of those that explain the whole case."""
    w = case.workload
    if w.is_packed and score_elements(w) > _PACKED_ELEMENTS:
        return []
    few, more = (_worst_rows(got, bad, reference, w, number) for number in (_FEW, _ROWS))
    likely = case.patience.each(_MISTAKES, likely_mistakes(reference.inputs, w))
    fitting = case.patience.each(_MISTAKES, [m for m in likely if _z(m, few, reference, limits) is not None])
    known = [(_z(mistake, more, reference, limits), mistake.text) for mistake in fitting]
    by_z = sorted(((z, text) for z, text in known if z is not None), key=lambda found: found[0])
    for z, text in case.patience.each(_MISTAKES, by_z):
        if case.is_mistake(text):
            return [Suggestion("mistake", {"mistake": text, "z": z})]
    return []


def _z(mistake: Mistake, tried: Tried, reference: Reference, limits: Limits) -> float | None:
    rows, mine = tried
    try:
        inputs, variant = mistake.attention()
    except (RuntimeError, IndexError, ValueError):  # tensors that cannot be read so
        return None
    return largest_z(mine, inputs, variant, rows, reference.precision, limits)


def _worst_rows(got: torch.Tensor, bad: torch.Tensor, reference: Reference, w: Workload, number: int) -> Tried:
    """Choose some wrong and some right rows; packed sequences are small, all their rows are taken."""
    import torch

    if w.is_packed:
        return None, got
    faulty = bad.any(0).any(0)
    order = torch.cat([_spread(faulty.nonzero().flatten(), number), _spread((~faulty).nonzero().flatten(), number)])
    order = order.sort().values
    sampled = reference.tensors["out"].rows
    return (order if sampled is None else sampled[order]), got[:, :, order]


def _spread(positions: torch.Tensor, number: int) -> torch.Tensor:
    """Return at most so many of the positions, evenly spread, the first and the last among them."""
    last = len(positions) - 1
    return positions if last < number else positions[[i * last // (number - 1) for i in range(number)]]


# -- places ----------------------------------------------------------------------------------------------------------------


def _misplaced(got: torch.Tensor, reference: Reference, case: WholeCase, limits: Limits) -> list[Suggestion]:
    """Say that the right rows are in the wrong place, if they are on every distribution."""
    out = reference.tensors["out"]
    for suggestion, move in case.patience.each("other places of rows", _moves(got, out.rows is not None)):

        def fits(got: torch.Tensor, reference: Reference, move: Callable[[torch.Tensor], torch.Tensor] = move) -> bool:
            expected = reference.tensors["out"]
            z = residual_over_budget(got.double() - move(expected.value), move(expected.tau))
            return float(z.abs().max()) <= limits.element

        if fits(got, reference) and all(fits(*one) for one in case.of("out")):
            return [suggestion]
    return []


def _moves(got: torch.Tensor, is_sampled: bool) -> Iterator[tuple[Suggestion, Callable[[torch.Tensor], torch.Tensor]]]:
    batch, heads, rows, _ = got.shape
    for shift in range(1, heads):
        yield Suggestion("shifted heads", {"shift": shift}), partial(_rolled, 1, shift)
    for shift in range(1, min(batch, 8)):
        yield Suggestion("shifted batch", {"shift": shift}), partial(_rolled, 0, shift)
    if not is_sampled and heads == rows > 1:
        yield Suggestion("heads and rows swapped", {"tensor": "out"}), lambda t: t.transpose(1, 2)
    if not is_sampled and batch == heads > 1:
        yield Suggestion("batch and heads swapped", {"tensor": "out"}), lambda t: t.transpose(0, 1)


def _rolled(dim: int, shift: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(shift, dim)


# -- scale and precision -----------------------------------------------------------------------------------------------------


def _scale_or_profile(tried: Tried, reference: Reference, case: WholeCase, limits: Limits) -> list[Suggestion]:
    """Name the scale that explains the case, or the precision profiles: what fits the rows better."""
    w, (rows, got) = case.workload, tried
    profiles = case.patience.each(_PROFILES, SUGGESTED.items())
    fits = {name: largest_z(got, reference.inputs, w, rows, profile, limits) for name, profile in profiles}
    scale = None if case.patience.is_over("another scale") else _fitted_scale(got, rows, reference, w)
    z = largest_z(got, reference.inputs, w.replace(scale=scale), rows, reference.precision, limits) if scale else None
    if scale and z is not None and all(z < fit for fit in fits.values() if fit is not None) and case.has_scale(scale):
        return [Suggestion("scale", {"scale": scale, "expected": w.softmax_scale, "z": z})]
    if fits.get(reference.precision.name) is not None:
        return []
    fitting = [name for name, fit in fits.items() if fit is not None]
    return fitting_profiles("out", fitting, reference.precision.name, case)


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


def fitting_profiles(name: str, profiles: Iterable[str], declared: str, case: WholeCase) -> list[Suggestion]:
    """Name those of the profiles under which the whole case would pass, rare ones where no other does."""
    names = [one for one in profiles if not (SUGGESTED[one].moves_lse and case.scores_are_exact)]
    for some in ([one for one in names if one not in RARE], [one for one in names if one in RARE]):
        tried = case.patience.each(_PROFILES, some)
        if found := {profile: z for profile in tried if (z := case.z_under(SUGGESTED[profile], name)) is not None}:
            return [Suggestion("profiles", {"profiles": found, "declared": declared})]
    return []
