"""Which workloads reach a step of the kernel, by their fields: predicates that mutants apply by."""

from __future__ import annotations

from pytest_attn.mutants.kernel import TILE
from pytest_attn.mutants.mutant import Applies
from pytest_attn.workloads.traits import traits_of
from pytest_attn.workloads.workload import Workload, sequence_lengths


def all_of(*conditions: Applies) -> Applies:
    """Return whether all conditions hold."""
    return lambda w, backward: all(condition(w, backward) for condition in conditions)


def always(w: Workload, backward: bool) -> bool:
    """Every workload."""
    return True


def any_of(*conditions: Applies) -> Applies:
    """Return whether one of the conditions holds."""
    return lambda w, backward: any(condition(w, backward) for condition in conditions)


def has(trait: str) -> Applies:
    """Return whether the workload has a trait, in the words of `traits_of`."""
    return lambda w, backward: trait in traits_of(w)


def in_backward(w: Workload, backward: bool) -> bool:
    """The backward pass."""
    return backward


# -- lengths ---------------------------------------------------------------------------------------------------------------


def is_packed(w: Workload, backward: bool) -> bool:
    """Several sequences end to end, keys too."""
    return w.packs_keys and len(w.q_lens or ()) > 1


def is_padded(w: Workload, backward: bool) -> bool:
    """Keys that no row may see, dense or in pages."""
    return not w.packs_keys and any(kv_len < w.kv_len for kv_len in w.kv_lens or ())


is_paged = has("paged")


def is_dense(w: Workload, backward: bool) -> bool:
    """Keys as (batch, kv_heads, kv_len, head_dim)."""
    return not w.is_packed and w.kv_pages is None


def has_several_key_tiles(w: Workload, backward: bool) -> bool:
    """More keys than fit a tile."""
    return any(kv_len > TILE for _, kv_len in sequence_lengths(w))


def has_several_row_tiles(w: Workload, backward: bool) -> bool:
    """More rows than fit a tile."""
    return any(q_len > TILE for q_len, _ in sequence_lengths(w))


def has_row_tail(w: Workload, backward: bool) -> bool:
    """A last tile of rows that is not full."""
    return any(q_len % TILE for q_len, _ in sequence_lengths(w))


def has_other_lengths(w: Workload, backward: bool) -> bool:
    """A sequence with more keys than queries, or fewer."""
    return any(q_len != kv_len for q_len, kv_len in sequence_lengths(w))


# -- heads and dtypes ------------------------------------------------------------------------------------------------------


is_grouped = has("grouped heads")


def is_grouped_twice(w: Workload, backward: bool) -> bool:
    """Several key heads, each shared by query heads."""
    return w.group > 1 and w.kv_heads > 1


def has_several_heads(w: Workload, backward: bool) -> bool:
    """More than one query head."""
    return w.heads > 1


def is_half(w: Workload, backward: bool) -> bool:
    """float16 or bfloat16."""
    return w.dtype != "float32"


# -- masks -----------------------------------------------------------------------------------------------------------------


def is_band(w: Workload, backward: bool) -> bool:
    """A causal mask or a window."""
    return w.mask is not None and w.band is not None


def is_custom(w: Workload, backward: bool) -> bool:
    """A mask that only its own predicate knows."""
    return w.band is None and not w.documents


def is_causal(w: Workload, backward: bool) -> bool:
    """A causal mask."""
    return is_band(w, backward) and w.mask.is_causal


def is_window(w: Workload, backward: bool) -> bool:
    """A sliding window."""
    return is_band(w, backward) and not w.mask.is_causal


def is_document(w: Workload, backward: bool) -> bool:
    """Several documents in one sequence."""
    return len(w.documents) > 1


def is_top_left(w: Workload, backward: bool) -> bool:
    """A causal mask aligned to the first key, where that makes a difference."""
    return w.band is not None and w.band.top_left and has_other_lengths(w, backward)


def is_bottom_right(w: Workload, backward: bool) -> bool:
    """A causal mask or window aligned to the last key, where that makes a difference."""
    return is_band(w, backward) and not is_top_left(w, backward) and has_other_lengths(w, backward)
