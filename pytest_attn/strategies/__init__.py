"""Hypothesis strategies: legal workloads, small enough that exact attention takes milliseconds on a CPU.

Example::

    from hypothesis import given, settings
    from pytest_attn import check
    from pytest_attn.strategies import workloads

    @settings(deadline=None)
    @given(workloads(masks=(None, "causal"), layouts=("plain",), features=("grouped heads", "fewer queries")))
    def test_mine(workload):
        check(lambda q, k, v: my_attention(q, k, v, causal=workload.mask is not None), workload)

`pytest --attn-fuzz 100` draws for every marked test without a line of this. Needs `pip install "pytest-attn[fuzz]"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError('pytest_attn.strategies needs Hypothesis: pip install "pytest-attn[fuzz]"') from error

from pytest_attn.strategies.draws import drawn
from pytest_attn.strategies.lengths import MAX_BATCH
from pytest_attn.strategies.scope import (
    FEATURES,
    FIXED,
    HEAD_DIMS,
    LAYOUT_KINDS,
    MASK_KINDS,
    PAGE_SIZES,
    PAGED,
    USUAL_LAYOUTS,
    Scope,
    is_possible,
    legal_places,
    refuse_unknown,
    require_counts,
)
from pytest_attn.workloads.fields import DTYPES, dtype_name
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

__all__ = ["FEATURES", "HEAD_DIMS", "LAYOUT_KINDS", "MASK_KINDS", "MAX_BATCH", "PAGE_SIZES", "workloads"]


def workloads(
    *,
    masks: Sequence[object] = MASK_KINDS,
    layouts: Sequence[str] = USUAL_LAYOUTS,
    features: Sequence[str] = FEATURES,
    dtypes: Sequence[object] = tuple(DTYPES),
    head_dims: Sequence[int | tuple[int, int]] = HEAD_DIMS,
    page_sizes: Sequence[int | Pages] = PAGE_SIZES,
    max_rows: int = 160,
    max_heads: int = 4,
    backward: bool = False,
    **fixed: Any,
) -> st.SearchStrategy[Workload]:
    """Draw legal workloads, which shrink to Workload(1, head_dim=16): one row, one head, no mask, no option.

    Each argument says what may be drawn, the simplest value first, which is what a failure shrinks to:
    masks: kinds out of MASK_KINDS, or masks as `Workload` takes them, which are then drawn as they are.
    layouts: out of LAYOUT_KINDS; all but "packed pages" where none is said. features: out of FEATURES.
    max_rows: the longest q_len and kv_len.
    head_dims: of keys and values alike, or a pair (head_dim, v_head_dim).
    page_sizes: numbers of tokens, or `Pages`. backward: leave out what has no gradient: a paged KV cache.
    fixed: a value that every draw has, for q_len, pad, softcap, scale, bias, alibi, sinks, score_mod, head_groups or
    bias_before_softcap, e.g. softcap=20.0.

    cached=True draws a cached prefix. Raises ValueError for what is unknown, or where nothing legal is left.
    """
    refuse_unknown("layouts", layouts, LAYOUT_KINDS)
    refuse_unknown("features", features, FEATURES)
    refuse_unknown("fixed values", fixed, FIXED)
    dims = tuple(dim if isinstance(dim, tuple) else (dim, dim) for dim in head_dims)
    require_counts("head_dims", [dim for pair in dims for dim in pair])
    require_counts("page_sizes", [pages.size if isinstance(pages, Pages) else pages for pages in page_sizes])
    require_counts("max_rows and max_heads", (max_rows, max_heads))
    scope = Scope(
        places=legal_places(layouts, masks, backward, fixed),
        features=tuple(feature for feature in features if is_possible(feature, fixed, dims, max_heads)),
        dtypes=tuple(dtype_name(dtype) for dtype in dtypes),
        head_dims=dims,
        page_sizes=tuple(page_sizes),
        max_rows=max_rows,
        max_heads=max_heads,
        fixed=tuple(fixed.items()),
    )
    if not (scope.places and scope.dtypes and (scope.page_sizes or not set(PAGED) & set(layouts))):
        raise ValueError("workloads(): nothing legal is left to draw; allow more masks, layouts, dtypes or page sizes")
    return drawn(scope)
