"""Draws of masks."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from pytest_attn.strategies.lengths import Draw, count, lengths_up_to
from pytest_attn.workloads.examples import blocks_by_head, prefix_of_four
from pytest_attn.workloads.masks import BooleanMask, Document, Mask, Neighborhood, Window


def free_mask(draw: Draw, kind: Mask | str | None, max_rows: int) -> object:
    """Return a mask that fits every length."""
    if kind == "window":
        side = st.none() | count(0, max_rows)
        return Window(draw(side), draw(side))
    if kind == "boolean":
        return BooleanMask(blocks_by_head)
    return prefix_of_four if kind == "mask_mod" else kind


def square_mask(draw: Draw, kind: Mask | str | None, max_rows: int) -> Any:
    """Return a mask that fixes q_len and kv_len to one length."""
    if kind == "documents":
        return draw(_documents(max_rows))
    return draw(_neighborhoods(max_rows)) if kind == "neighborhood" else kind


def rows_of(mask: Document | Neighborhood) -> int:
    """Return that length."""
    return sum(mask.lengths) if isinstance(mask, Document) else math.prod(mask.shape)


@st.composite
def _documents(draw: Draw, max_rows: int) -> Document:
    lengths = [draw(lengths_up_to(max_rows))]
    while len(lengths) < 4 and sum(lengths) < max_rows and draw(st.booleans()):
        lengths.append(draw(lengths_up_to(max_rows - sum(lengths))))
    return Document(tuple(lengths), causal=draw(st.booleans()))


@st.composite
def _neighborhoods(draw: Draw, max_rows: int) -> Neighborhood:
    axes = draw(count(1, 3))
    longest = max(1, math.floor(max_rows ** (1 / axes) + 1e-9))
    sizes = [draw(count(1, longest)) for _ in range(axes)]
    kernels = [draw(count(1, size)) for size in sizes]
    dilations = [draw(count(1, size // kernel)) for size, kernel in zip(sizes, kernels, strict=True)]
    strides = [draw(count(1, kernel)) for kernel in kernels]
    causal = [draw(st.booleans()) for _ in sizes]
    return Neighborhood(tuple(sizes), tuple(kernels), tuple(strides), tuple(dilations), tuple(causal))
