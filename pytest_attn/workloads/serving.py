"""Fields of a workload as serving has them: pages, a cached prefix, padding on the left."""

from __future__ import annotations

import math
from typing import Any

from pytest_attn.workloads.fields import as_tuple
from pytest_attn.workloads.pages import Pages

#: on which side of the keys of a padded batch entry its padding is
SIDES = ("right", "left")
#: fields whose change leaves no meaning to `cached`
LENGTHS = frozenset(("q_len", "kv_len", "batch", "q_lens", "kv_lens"))


def settle_cached(w: Any) -> None:
    """Turn the `cached` of a Workload, which imports this file, into one number per batch entry, and let kv_lens follow.

    New tokens are those of the queries: a batch entry has cached[b] + q_len keys. Raises ValueError where it has not.
    """
    prefixes = [w.cached] if isinstance(w.cached, int) and not isinstance(w.cached, bool) else w.cached
    prefixes = as_tuple("Workload: cached", prefixes)
    if not prefixes or min(prefixes) < 0 or max(prefixes) == 0:
        raise ValueError(f"Workload: cached must be numbers of keys >= 0, not all zero, got {w.cached!r}")
    counts = [len(lengths) for lengths in (w.q_lens, w.kv_lens) if lengths is not None]
    batch = (counts or [w.batch or len(prefixes)])[0]
    prefixes = prefixes * batch if len(prefixes) == 1 else prefixes
    if len(prefixes) != batch:
        raise ValueError(f"Workload: cached must be one number, or one per batch entry ({batch}), got {w.cached!r}")
    object.__setattr__(w, "cached", prefixes)
    if w.q_lens is None and w.q_len is None:
        return
    needed = tuple(prefix + new for prefix, new in zip(prefixes, w.q_lens or (w.q_len,) * batch, strict=True))
    found = w.kv_lens if w.kv_lens is not None else None if w.kv_len is None else (w.kv_len,) * batch
    if found is not None and found != needed:
        raise ValueError(
            f"Workload: cached={w.cached} with as many new keys as queries makes kv_lens {needed}, got {found};"
            " leave out kv_len and kv_lens"
        )
    if w.q_lens is not None or w.kv_pages is not None or len(set(needed)) > 1:
        object.__setattr__(w, "kv_lens", needed)
    elif w.kv_len is None:
        object.__setattr__(w, "kv_len", needed[0])
    if w.batch is None:
        object.__setattr__(w, "batch", batch)


def settle_pages(w: Any) -> None:
    """Turn the kv_pages of a Workload into `Pages`. Raises ValueError for others, and where they do not fit the workload."""
    if isinstance(w.kv_pages, int) and not isinstance(w.kv_pages, bool):
        object.__setattr__(w, "kv_pages", Pages(w.kv_pages))
    pages = w.kv_pages
    if pages is None:
        return
    if not isinstance(pages, Pages):
        raise ValueError(f"Workload: kv_pages must be Pages(size) or a number of tokens, got {pages!r}")
    if pages.fused and w.head_dim != w.v_head_dim:
        raise ValueError(
            f"Workload: Pages(fused=True) needs v_head_dim equal to head_dim, got {w.v_head_dim} and {w.head_dim}"
        )
    if pages.fused and w.v_in_k:
        raise ValueError("Workload: Pages(fused=True) holds k and v side by side; v_in_k has v inside k")
    if pages.pool is not None and pages.pool < (in_use := pages_in_use(w)):
        raise ValueError(f"Workload: Pages(pool={pages.pool}) holds fewer pages than the {in_use} of the page table")


def no_gradient_because(w: Any) -> str | None:
    """Say which keys of a Workload a forward pass alone has; None where they may have gradients."""
    if w.kv_pages is not None:
        return "a paged KV cache has no gradient"
    if w.cached is not None:
        return "cached keys have no gradient"
    return "keys padded on the left have no gradient" if w.pad == "left" else None


def pages_per_sequence(w: Any) -> int:
    """Return how many pages a row of the page table names: those of the longest sequence."""
    pages: int = math.ceil(w.kv_len / w.kv_pages.size)
    return pages


def pages_in_use(w: Any) -> int:
    """Return how many pages the page table names."""
    pages: int = w.batch * pages_per_sequence(w)
    return pages


def check_padding(w: Any) -> None:
    """Raise ValueError where a Workload's `pad` is not a side, or there is nothing dense to pad."""
    if w.pad not in SIDES:
        raise ValueError(f"Workload: pad must be one of {', '.join(SIDES)}, got {w.pad!r}")
    if w.pad == "left" and (w.kv_lens is None or w.q_lens is not None or w.kv_pages is not None or w.cached is not None):
        raise ValueError('Workload: pad="left" needs kv_lens, without q_lens, kv_pages and cached')
    if w.pad == "left" and "k" in (w.bias or ""):
        raise ValueError('Workload: pad="left" cannot be combined with a bias that varies over keys')
    if w.descales is not None and (w.pad == "left" or w.cached is not None):
        field = "cached" if w.cached is not None else 'pad="left"'
        raise ValueError(f"Workload: {field} cannot be combined with quantized k and v (dtype, kv_dtype)")
