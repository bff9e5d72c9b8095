"""Conditions on workloads that reach a step of the kernel, by their fields and by what their masks show of its tiles."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from pytest_attn.guests.mutants.kernel import TILE
from pytest_attn.workloads.masks import interval
from pytest_attn.workloads.traits import traits_of
from pytest_attn.workloads.workload import Workload, sequence_lengths

#: whether a workload reaches a faulty step
Applies: TypeAlias = Callable[[Workload], bool]


def always(w: Workload) -> bool:
    """Any workload."""
    return True


def all_of(*conditions: Applies) -> Applies:
    """Return whether all conditions hold."""
    return lambda w: all(condition(w) for condition in conditions)


def any_of(*conditions: Applies) -> Applies:
    """Return whether one of the conditions holds."""
    return lambda w: any(condition(w) for condition in conditions)


def has(trait: str) -> Applies:
    """Return whether the workload has a trait, in the words of `traits_of`."""
    return lambda w: trait in traits_of(w)


def of_lengths(condition: Callable[[int, int], object]) -> Applies:
    """Return whether a condition holds of the lengths of queries and keys of some sequence."""
    return lambda w: any(condition(*lengths) for lengths in sequence_lengths(w))


# -- lengths ---------------------------------------------------------------------------------------------------------------


def is_packed(w: Workload) -> bool:
    """Several sequences end to end, keys too."""
    return w.packs_keys and len(w.q_lens or ()) > 1


def is_padded(w: Workload) -> bool:
    """Keys that no row may see, dense or in pages."""
    return not w.packs_keys and any(kv_len < w.kv_len for kv_len in w.kv_lens or ())


is_paged = has("paged")


def is_dense(w: Workload) -> bool:
    """Keys as (batch, kv_heads, kv_len, head_dim)."""
    return not w.is_packed and w.kv_pages is None


#: more keys, or rows, than fit a tile; a last tile of rows that is not full; a sequence with more keys than queries, or fewer
has_several_key_tiles = of_lengths(lambda q_len, kv_len: kv_len > TILE)
has_several_row_tiles = of_lengths(lambda q_len, kv_len: q_len > TILE)
has_row_tail = of_lengths(lambda q_len, kv_len: q_len % TILE)
has_other_lengths = of_lengths(lambda q_len, kv_len: q_len != kv_len)


# -- heads and dtypes ------------------------------------------------------------------------------------------------------

is_grouped = has("grouped heads")
has_softcap, has_bias, has_alibi, has_sinks, has_score_mod = map(has, ("softcap", "bias", "alibi", "sinks", "score_mod"))


def is_half(w: Workload) -> bool:
    """float16 or bfloat16."""
    return w.dtype != "float32"


def is_grouped_twice(w: Workload) -> bool:
    """Several key heads, each shared by query heads."""
    return w.group > 1 and w.kv_heads > 1


# -- masks -----------------------------------------------------------------------------------------------------------------


def is_band(w: Workload) -> bool:
    """A causal mask or a window."""
    return w.mask is not None and w.band is not None


def is_custom(w: Workload) -> bool:
    """A mask that only its own predicate knows."""
    return w.band is None and not w.documents


def is_causal(w: Workload) -> bool:
    """A causal mask."""
    return is_band(w) and w.mask.is_causal


def is_window(w: Workload) -> bool:
    """A sliding window."""
    return is_band(w) and not w.mask.is_causal


def is_document(w: Workload) -> bool:
    """Several documents in one sequence."""
    return len(w.documents) > 1


def is_top_left(w: Workload) -> bool:
    """A causal mask aligned to the first key, where that makes a difference."""
    return w.band is not None and w.band.top_left and has_other_lengths(w)


def is_bottom_right(w: Workload) -> bool:
    """A causal mask or window aligned to the last key, where that makes a difference."""
    return is_band(w) and not is_top_left(w) and has_other_lengths(w)


class _RowTile(NamedTuple):
    """A tile of rows of a sequence with kv_len keys: keys that each row sees, and starts of the tiles that it visits."""

    spans: list[range]
    kv_len: int
    visited: range


@lru_cache(maxsize=256)
def _row_tiles(w: Workload) -> list[_RowTile]:
    """List all tiles of rows, where the mask shows each row an interval of keys; none elsewhere."""
    tiles = []
    for q_len, kv_len in sequence_lengths(w):
        seen = [interval(w.plain_mask, row, q_len, kv_len) for row in range(q_len)]
        spans = [range(min(span[0], kv_len), min(span[1], kv_len)) for span in seen if span is not None]
        for start in range(0, len(spans), TILE):
            some = spans[start : start + TILE]
            first, end = min((s.start for s in some if s), default=0), max((s.stop for s in some if s), default=0)
            tiles.append(_RowTile(some, kv_len, range(first // TILE * TILE, end, TILE)))
    return tiles


def of_rows(condition: Callable[[range, _RowTile], bool]) -> Applies:
    """Return whether a condition holds of what some row sees of a causal mask or window, and of its tile."""
    return lambda w: is_band(w) and any(condition(seen, tile) for tile in _row_tiles(w) for seen in tile.spans)


def has_key_tail(w: Workload) -> bool:
    """A last tile of keys that is not full, and is visited."""
    if not is_band(w):
        return any(q_len and kv_len % TILE for q_len, kv_len in sequence_lengths(w))
    return any(tile.visited and tile.visited[-1] + TILE > tile.kv_len for tile in _row_tiles(w))


def has_odd_tiles(w: Workload) -> bool:
    """A tile of rows that visits an odd number of tiles of keys."""
    if not is_band(w):
        return any(-(-kv_len // TILE) % 2 for _, kv_len in sequence_lengths(w))
    return any(len(tile.visited) % 2 for tile in _row_tiles(w))


def hides_keys(w: Workload) -> bool:
    """A mask, or a last tile of keys that is not full."""
    return w.mask is not None or has_key_tail(w)


#: a causal mask or window that ends before the keys do; one that begins after them
has_right_edge = of_rows(lambda seen, tile: seen.stop < tile.kv_len)
has_left_edge = of_rows(lambda seen, tile: 0 < seen.start < tile.kv_len)


def cuts_keys(w: Workload) -> bool:
    """A mask that hides some key from some row."""
    edges = has_left_edge(w) or has_right_edge(w)
    return edges or is_custom(w) or is_document(w)


#: a causal mask or window that cuts another tile of keys than the last that a tile of rows visits
has_edge_before_last_tile = of_rows(
    lambda seen, tile: len(tile.visited) > 1 and (seen.start > tile.visited[0] or seen.stop < tile.visited[-1])
)


def has_unaligned_left_edge(w: Workload) -> bool:
    """A window that begins inside a tile, for the first row of a tile."""
    return is_band(w) and any(tile.visited and tile.spans[0].start % TILE for tile in _row_tiles(w))


def shows_tail(w: Workload) -> bool:
    """A last tile of keys that is not full, and that only the sequence's end cuts."""
    if is_window(w) and not w.mask.right:
        return False
    if is_causal(w):
        return is_top_left(w) and any(q_len > kv_len and kv_len % TILE for q_len, kv_len in sequence_lengths(w))
    return has_key_tail(w)


def has_tile_of_one_key(w: Workload) -> bool:
    """A tile of rows of whose last tile of keys one key is seen."""
    return any(max(s.stop for s in tile.spans) % TILE == 1 for tile in _row_tiles(w) if tile.visited)


def has_fully_masked_rows(w: Workload) -> bool:
    """Rows that see no key, and no sink."""
    return not w.sinks and any(not s for tile in _row_tiles(w) for s in tile.spans)


def has_row_fully_masked_in_first_tile(w: Workload) -> bool:
    """A row that sees nothing of the first tile of keys that its tile of rows visits."""
    if is_custom(w) or is_document(w):
        return True
    return any(not s or s.start >= tile.visited[0] + TILE for tile in _row_tiles(w) if tile.visited for s in tile.spans)


def has_row_fully_masked_in_last_tile(w: Workload) -> bool:
    """A row that sees nothing of the last tile of keys that its tile of rows visits."""
    if is_custom(w) or is_document(w):
        return has_several_key_tiles(w)
    return any(s.stop <= tile.visited[-1] for tile in _row_tiles(w) if tile.visited for s in tile.spans)


def has_fully_masked_row_in_visited_tile(w: Workload) -> bool:
    """A row that sees no key, in a tile with one that does, and no sink."""
    return not w.sinks and any(not s for tile in _row_tiles(w) if tile.visited for s in tile.spans)
