"""Why a tensor may be wrong: where the faults lie, and which other attention the kernel seems to have computed.

The second question is answered by asking the reference: for each likely mistake (another scale, mask, alignment, head
mapping, an option left out) it computes a few of the worst rows as that mistake would give them. If these fit the
kernel's rows within the budget, and those of its other distributions (`confirm.py`), the mistake has a name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_attn.correctness.compare import residual_over_budget
from pytest_attn.correctness.comparison import Location, Members, Suggestion, TensorComparison
from pytest_attn.correctness.confirm import WholeCase
from pytest_attn.correctness.extra_mistakes import name_extra
from pytest_attn.correctness.gradient_mistakes import name_gradient
from pytest_attn.correctness.lse_mistakes import name_lse
from pytest_attn.correctness.mask_mistakes import TILES
from pytest_attn.correctness.online_mistakes import blind_tile
from pytest_attn.correctness.out_mistakes import name_out
from pytest_attn.correctness.reference import Reference, as_compared
from pytest_attn.correctness.traces import traces_of
from pytest_attn.workloads.heads import repeated

if TYPE_CHECKING:
    import torch

#: |lse| above which its exponential leaves float32
_EXP_REACH = 88


def explain(
    comparison: TensorComparison, tensor: torch.Tensor, reference: Reference, case: WholeCase
) -> tuple[Location, list[Suggestion]]:
    """Return where `tensor` is wrong and what that suggests, most telling first. case: what a suggestion must explain, too."""
    expected = reference.tensors[comparison.name]
    got = as_compared(comparison.name, tensor.detach(), case.workload)
    if expected.rows is not None:
        got = got[:, :, expected.rows.to(got.device)]
    bad = _bad_rows(comparison, got, reference)
    location = _location(bad, expected.rows)
    if comparison.name in ("weights", "max") and (named := name_extra(comparison.name, reference, case)):
        return location, named
    if comparison.wrong_positions:
        mended = got.where(got.isfinite(), expected.value.to(got.dtype))
        others = _bad_rows(replace(comparison, wrong_positions=0), mended, reference) & ~bad
        found = _non_finite(got, bad, reference, comparison.name, location)
        if comparison.exceeding and bool(others.any()):  # a fault of its own, which NaN must not hide
            location = _location(bad | others, expected.rows)
            if comparison.name == "out":
                found += name_out(got, others, reference, case, comparison.limits)
        return location, found
    if _is_empty(_lse_of(bad, reference, comparison.name)):
        return location, _no_key(got, bad, reference, comparison.name)
    if not bool(got.any()):
        return location, [Suggestion("all zeros", {"tensor": comparison.name})]
    return location, _named(got, bad, reference, comparison, case) or traces_of(got, bad, comparison.name, expected.rows)


def _named(
    got: torch.Tensor, bad: torch.Tensor, reference: Reference, comparison: TensorComparison, case: WholeCase
) -> list[Suggestion]:
    """Return the mistake, or the profile, that explains the whole case."""
    if comparison.name == "lse":
        return name_lse(reference, case)
    if comparison.name == "out":
        return name_out(got, bad, reference, case, comparison.limits)
    if comparison.name in ("weights", "max"):
        return []
    return name_gradient(comparison, bad, reference, case)


# -- where ---------------------------------------------------------------------------------------------------------------


def _bad_rows(comparison: TensorComparison, got: torch.Tensor, reference: Reference) -> torch.Tensor:
    """Return (batch, heads, rows): True where a row holds a fault."""
    expected = reference.tensors[comparison.name]
    value = expected.value
    if comparison.wrong_positions:
        rounded = value.to(got.dtype)
        wrong = ~((got.isfinite() & rounded.isfinite()) | (got == rounded))
        return wrong.any(-1) if wrong.dim() == 4 else wrong
    if comparison.name in ("lse", "max"):
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
        return found + _no_key(got, bad, reference, name)
    if len(lse) and float(lse.abs().min()) > _EXP_REACH:
        kind = "exp overflow" if float(lse.max()) < 0 else "exp out of reach"
        found.append(Suggestion(kind, {"lowest": float(lse.min()), "largest": float(lse.max())}))
    elif name in ("out", "lse") and (tile := blind_tile(bad, reference)):
        found.append(Suggestion("blind tile", {"tile": tile}))
    return found


def _no_key(got: torch.Tensor, bad: torch.Tensor, reference: Reference, name: str) -> list[Suggestion]:
    """Say that all wrong rows see no key, and what they hold instead of 0."""
    held = (
        ""
        if name != "out"
        else "NaN"
        if bool(got[bad].isnan().any())
        else "mean"
        if _is_mean_of_v(got, bad, reference)
        else ""
    )
    kind = {"NaN": "NaN without keys", "mean": "mean without keys"}.get(held, "no key")
    return [Suggestion(kind, {"tensor": name, "exact": "-inf" if name in ("lse", "max") else "0"})]


def _is_mean_of_v(got: torch.Tensor, bad: torch.Tensor, reference: Reference) -> bool:
    """Whether the rows hold the mean of v over all keys, as a softmax of equal scores does."""
    import torch

    w = reference.inputs.workload
    if w.is_packed:
        return False
    v = reference.inputs.gathered()[1].double()
    mean = repeated(v.mean(2, keepdim=True), w).expand(got.shape)
    near = 2 * torch.finfo(got.dtype).eps * (mean.abs() + v.square().mean().sqrt() / v.shape[2] ** 0.5)
    counted = (w.kv_len, *(-(-w.kv_len // tile) * tile for tile in TILES))  # with the zeros that fill up the last tile
    return any(bool(((got.double() - mean * (w.kv_len / n)).abs() <= near)[bad].all()) for n in counted)


def _lse_of(bad: torch.Tensor, reference: Reference, name: str) -> torch.Tensor:
    """Return lse of these rows (batch, heads, rows) of out, lse or dq; nothing of other tensors, whose rows are keys."""
    lse = reference.tensors["lse"].value
    return lse[bad] if name in ("out", "lse", "dq") and lse.shape == bad.shape else lse[:0].flatten()


def _is_empty(lse: torch.Tensor) -> bool:
    """Whether these are rows, and none sees a key."""
    return bool(len(lse)) and bool((lse == -math.inf).all())
