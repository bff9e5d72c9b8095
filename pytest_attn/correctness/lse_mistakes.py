"""Which other log-sum-exp explains an lse that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pytest_attn.backends.precision import SUGGESTED
from pytest_attn.correctness.blocks import Block, Chunk
from pytest_attn.correctness.compare import LSE_TOLERANCE
from pytest_attn.correctness.comparison import Suggestion
from pytest_attn.correctness.confirm import WholeCase
from pytest_attn.correctness.exact import modify, scaled_scores
from pytest_attn.correctness.mistakes import Other, likely_mistakes
from pytest_attn.correctness.out_mistakes import fitting_profiles
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements, segments_of
from pytest_attn.workloads.heads import ungrouped

if TYPE_CHECKING:
    import torch

#: how far a factor or a difference may be from the one that explains it
_NEAR = 1e-4
#: scores above which no other lse is computed
_ELEMENTS = 1 << 22

#: what lse may be instead, of (what is returned, the reference)
Claim: TypeAlias = "Callable[[torch.Tensor, Reference], bool]"


def name_lse(reference: Reference, case: WholeCase) -> list[Suggestion]:
    """Return what explains lse on every distribution; nothing where nothing does."""
    for suggestion, holds in case.patience.each("mistakes of lse", _claims(reference, case)):
        if all(holds(got, expected) for got, expected in case.of("lse")):
            return [suggestion]
    declared = reference.precision.name
    others = [name for name, profile in SUGGESTED.items() if profile.moves_lse and name != declared]
    return fitting_profiles("lse", others, declared, case)


def _claims(reference: Reference, case: WholeCase) -> Iterator[tuple[Suggestion, Claim]]:
    """Yield what lse may be, the cheapest to find out first."""
    w = case.workload
    for factor, words in (
        (1 / math.log(2), "log2 e: it is in base 2 (where that is meant, the marker says lse_base=2)"),
        (math.log(2), "ln 2: it was converted from base 2 twice, or is natural where lse_base=2 is said"),
        (-1.0, "-1"),
    ):
        yield Suggestion("lse base", {"factor": words}), partial(_is_multiple, factor)
    for shift, words in ((math.log(2), "ln 2 too large"), (-math.log(2), "ln 2 too small")):
        yield Suggestion("lse shift", {"shift": words}), partial(_is_shifted, shift)
    for dtype in ("bfloat16", "float16"):
        yield Suggestion("lse rounded", {"dtype": dtype}), partial(_is_rounded, dtype)
    if not reference.is_sampled:
        for one, other, words in ((1, 2, "(batch, rows, heads)"), (0, 1, "(heads, batch, rows)")):
            swapped = Suggestion("lse layout", {"layout": words})
            yield swapped, partial(_is_laid_out, one, other)
    if score_elements(w) > _ELEMENTS:
        return
    for with_sinks in (False, True) if w.sinks else (False,):
        yield (
            Suggestion("lse without maximum", {}),
            partial(_lacks_maximum, with_sinks),
        )
    yield Suggestion("lse is maximum", {}), lambda got, r: _is_near(got, _row_maxima(r))
    for mistake in likely_mistakes(reference.inputs, w):

        def holds(got: torch.Tensor, r: Reference, text: str = mistake.text) -> bool:
            variants = (m for m in likely_mistakes(r.inputs, w) if m.text == text)
            return any(_is_near(got, lse) for m in variants if (lse := _of_mistake(m.attention, r)) is not None)

        yield Suggestion("lse of a mistake", {"mistake": mistake.text}), holds


def _exact(reference: Reference) -> torch.Tensor:
    return reference.tensors["lse"].value


def _is_near(got: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether lse is another one, within what float32 may be off; rows that see no key count where both say so."""
    both = got.isfinite() & other.isfinite()
    off = (got.double() - other).abs() <= _NEAR * (1 + other.abs())
    return (
        got.shape == other.shape and bool(both.any()) and bool(off[both].all()) and bool((got.isinf() >= ~both)[~both].all())
    )


def _is_multiple(factor: float, got: torch.Tensor, reference: Reference) -> bool:
    return _is_near(got, _exact(reference) * factor)


def _is_shifted(shift: float, got: torch.Tensor, reference: Reference) -> bool:
    return _is_near(got, _exact(reference) + shift)


def _lacks_maximum(with_sinks: bool, got: torch.Tensor, reference: Reference) -> bool:
    return _is_near(got, _exact(reference) - _row_maxima(reference, with_sinks))


def _is_rounded(dtype: str, got: torch.Tensor, reference: Reference) -> bool:
    """Whether lse holds numbers of a smaller dtype, those nearest to the exact ones."""
    import torch

    exact, rounded = _exact(reference), got.to(getattr(torch, dtype))
    same = (rounded.to(got.dtype) == got) | ~got.isfinite()
    near = ((got.double() - exact).abs() <= exact.abs() * torch.finfo(rounded.dtype).eps) | ~exact.isfinite()
    return bool(same.all()) and bool(near.all())


def _is_laid_out(one: int, other: int, got: torch.Tensor, reference: Reference) -> bool:
    """Whether lse lies in memory as with two dimensions swapped, which shapes need not show."""
    exact = _exact(reference)
    swapped = exact.transpose(one, other)
    if swapped.shape != exact.shape and got.numel() == exact.numel():
        got = got.reshape(swapped.shape)
    return exact.shape[one] > 1 and exact.shape[other] > 1 and got.shape == swapped.shape and _near_everywhere(got, swapped)


def _near_everywhere(got: torch.Tensor, other: torch.Tensor) -> bool:
    off = (got.double() - other).abs() <= LSE_TOLERANCE * (1 + other.abs())
    return bool((off | (got == other)).all())


def _row_maxima(reference: Reference, with_sinks: bool = False) -> torch.Tensor:
    """Return the largest final score of each row, or sink, heads-first; -inf where a row sees no key."""
    import torch

    exact = reference.tensors["lse"]
    maxima = torch.full_like(exact.value, -math.inf)
    w, device = reference.inputs.workload, exact.value.device
    for segment in segments_of(reference.inputs, w, device):
        batch, heads = segment.k.shape[:2]
        block = Block(segment, slice(0, batch), slice(0, heads))
        rows = torch.arange(segment.lengths[0], device=device)
        if not len(rows) or not segment.lengths[1]:
            continue
        chunk = Chunk(block, rows)
        scores, _ = modify(scaled_scores(chunk), chunk)
        maxima[:, :, segment.q_start : segment.q_start + len(rows)] = scores.amax(-1)
    maxima, sinks = ungrouped(maxima, w), reference.inputs.sinks
    if with_sinks and sinks is not None:
        maxima = maxima.maximum(sinks.to(device).double()[:, None])
    return maxima if exact.rows is None else maxima[:, :, exact.rows]


def _of_mistake(attention: Callable[[], Other], reference: Reference) -> torch.Tensor | None:
    try:
        inputs, w = attention()
        return compute_reference(inputs, reference.precision, workload=w).tensors["lse"].value
    except (RuntimeError, IndexError, ValueError):
        return None
