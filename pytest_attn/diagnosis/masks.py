"""Near misses of masks, and of where sequences end: the masks that a kernel takes for them by mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Band, MaskMod, NearMiss, Sequences
from pytest_attn.workloads.masks.band import in_band
from pytest_attn.workloads.workload import Workload, sequences_of

#: sizes of tiles that kernels have, the largest first
TILES = (256, 128, 64, 32, 16)


def near_misses(w: Workload, drawn: Inputs) -> Iterator[NearMiss]:
    """Yield the near misses of a workload's mask: of its kind, then with its tiles, then with the ends of sequences."""
    mask, over = w.plain_mask, sequences_of(w, drawn.device)
    if mask is not None:
        yield from mask.near_misses(over)
        if mask.band is not None:
            yield from _tiles(mask.band, w, over)
    yield from _ends(seen_by(drawn, w), over)


def seen_by(inputs: Inputs, w: Workload) -> MaskMod:
    """Return the workload's mask, without padding, as a predicate of (b, h, q_idx, kv_idx) that packed sequences share."""
    if w.plain_mask is None:
        return lambda b, h, q, kv: kv >= 0
    return w.plain_mask.bind(sequences_of(w, inputs.device))


def _tiles(band: Band, w: Workload, over: Sequences) -> Iterator[NearMiss]:
    """Yield tiles that are not masked, or left out, at an edge."""
    inside, q_lens, kv_lens = in_band(band, over), over.q_lens, over.kv_lens
    assert q_lens is not None
    assert kv_lens is not None

    def span(b: torch.Tensor, q: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last key that any row of q's tile sees, if it sees any."""
        first = q // tile * tile
        last = (first + tile - 1).minimum(q_lens[b] - 1)
        before = q_lens[b] * 0 if band.top_left else kv_lens[b] - q_lens[b]
        start = first * 0 if band.left is None else (first + before - band.left).clamp(min=0)
        end = kv_lens[b] - 1
        return start, end if band.right is None else end.minimum(last + before + band.right)

    def tiled(tile: int, seen: Callable[..., torch.Tensor]) -> MaskMod:
        """Return a mask that knows of each key whether it is seen, and its tile's place among those that are visited."""

        def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            start, end = span(b, q, tile)
            return seen((b, h, q, kv), kv // tile - start // tile, kv // tile - end // tile, kv // tile * tile >= start)

        return mask_mod

    for tile in TILES:
        if w.q_len > tile:
            text, local = f"whose mask counts rows within tiles of {tile}", _with_local_rows(inside, tile)
            yield NearMiss("mask-rows-within-tile", text, local)
            yield NearMiss(
                "mask-rows-within-tile",
                text,
                tiled(tile, lambda at, first, last, _, local=local: local(*at) & (first >= 0) & (last <= 0)),
            )
    for tile in TILES[1:]:
        if w.kv_len > tile:
            text = f"that masks the last tile of {tile} keys only, though an edge runs through earlier ones"
            yield NearMiss(
                "mask-on-last-tile-only", text, tiled(tile, lambda at, first, last, _: inside(*at) | (first >= 0) & (last < 0))
            )
            text = f"that masks nothing within the tiles of {tile} keys that it visits"
            yield NearMiss(
                "mask-ignored-within-tiles",
                text,
                tiled(tile, lambda at, first, last, _: (first >= 0) & (last <= 0) & (at[3] < kv_lens[at[0]])),
            )
            text = f"without the last tile of {tile} keys that a row sees"
            yield NearMiss("last-visible-tile-missing", text, tiled(tile, lambda at, first, last, _: inside(*at) & (last < 0)))
            if band.left is not None:
                text = f"without the tile of {tile} keys in which the window begins"
                yield NearMiss(
                    "first-window-tile-missing", text, tiled(tile, lambda at, first, last, is_whole: inside(*at) & is_whole)
                )


def _with_local_rows(seen: MaskMod, tile: int) -> MaskMod:
    return lambda b, h, q, kv: seen(b, h, q % tile, kv)


def _ends(visible: MaskMod, over: Sequences) -> Iterator[NearMiss]:
    """Yield keys at the beginning or end of sequences that are left out."""
    q_lens, kv_lens = over.q_lens, over.kv_lens
    assert q_lens is not None
    assert kv_lens is not None

    def without(hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> MaskMod:
        return lambda b, h, q, kv: visible(b, h, q, kv) & ~hidden(b, kv)

    yield NearMiss("last-key-missing", "without the last key", without(lambda b, kv: kv >= kv_lens[b] - 1))
    yield NearMiss("first-key-missing", "without the first key", without(lambda b, kv: kv == 0))
    tails: set[tuple[int, ...]] = set()
    for tile in TILES:
        tail = tuple(kv_len // tile * tile for _, kv_len in over.lengths)
        if tail in tails or all(end in (0, kv_len) for end, (_, kv_len) in zip(tail, over.lengths, strict=True)):
            continue
        tails.add(tail)
        where = f"from {tail[0]}" if len(set(tail)) == 1 else f"of {tile}"
        text = f"without the keys of the last part-filled tile ({where})"
        yield NearMiss("tail-tile-missing", text, without(partial(_is_in_last_tile, kv_lens, tile, 0)))
    for tile in TILES[1:]:
        if any(kv_len > tile and kv_len % tile == 0 for _, kv_len in over.lengths):
            yield NearMiss(
                "last-tile-missing",
                f"without the last tile of {tile} keys",
                without(partial(_is_in_last_tile, kv_lens, tile, 1)),
            )
    if any(q_len < kv_len for q_len, kv_len in over.lengths):
        text = "that does not read the keys before the new tokens: only the last q_len keys count"
        yield NearMiss("cached-keys-unread", text, without(lambda b, kv: kv < kv_lens[b] - q_lens[b]))


def _is_in_last_tile(kv_lens: torch.Tensor, tile: int, full: int, b: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Whether keys lie in the last tile. full: 1 where that may be a full one, 0 where it is none if it is."""
    return kv >= (kv_lens[b] - full) // tile * tile
