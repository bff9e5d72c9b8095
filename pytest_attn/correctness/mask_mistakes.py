"""Near misses of masks, and of where sequences end: the masks that a kernel takes for them by mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.workloads.heads import key_heads
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import BooleanMask, Causal, Document, Mask, MaskMod, MaskModMask, Neighborhood, Window
from pytest_attn.workloads.visibility import Band, band_of, bind
from pytest_attn.workloads.workload import Workload, sequence_lengths

if TYPE_CHECKING:
    import torch

#: sizes of tiles that kernels have, the largest first
TILES = (256, 128, 64, 32, 16)


class NearMiss(NamedTuple):
    """A mask that a kernel takes for another: the fault's identity, words that continue "attention ...", and the mask."""

    fault: str
    words: str
    mask: Mask | MaskMod


def mask_mistakes(inputs: Inputs, w: Workload) -> Iterator[NearMiss]:
    """Yield the near misses of a workload's mask."""
    lengths = _Lengths.of(inputs, w)
    if isinstance(w.mask, Causal | Window):
        band = band_of(w.mask)
        yield from _edges(band, isinstance(w.mask, Causal), lengths)
        yield from _positions(band, w, lengths)
        yield from _tiles(band, w, lengths)
    visible = seen_by(inputs, w)
    yield from _ends(visible, lengths)
    if isinstance(w.mask, BooleanMask | MaskModMask):
        yield NearMiss("mask-inverted", "with the mask inverted: True taken for hidden", lambda *index: ~visible(*index))
        if w.group > 1:
            text = "with the mask of the key head, not of the query head"
            yield NearMiss("mask-of-key-head", text, lambda b, h, q, kv: visible(b, h.new_tensor(key_heads(w))[h], q, kv))
    if isinstance(w.mask, Document):
        yield from _documents(w.mask)
    if isinstance(w.mask, Neighborhood):
        yield from _neighborhoods(w.mask)


def seen_by(inputs: Inputs, w: Workload) -> MaskMod:
    """Return the workload's mask, without padding, as a predicate of (b, h, q_idx, kv_idx) that packed sequences share."""
    if w.mask is None:
        return lambda b, h, q, kv: kv >= 0
    if isinstance(w.mask, Causal | Window):
        return _in_band(band_of(w.mask), _Lengths.of(inputs, w))
    return bind(w.mask, w.batch, w.heads, w.q_len, w.kv_len, w.kv_len, inputs.device)


@dataclass(frozen=True)
class _Lengths:
    """How long each batch entry is, (batch,) each, and the same as numbers."""

    q: torch.Tensor
    kv: torch.Tensor
    pairs: list[tuple[int, int]]

    @classmethod
    def of(cls, inputs: Inputs, w: Workload) -> _Lengths:
        import torch

        pairs = sequence_lengths(w)
        q, kv = torch.tensor(pairs, device=inputs.device).unbind(1)
        return cls(q, kv, pairs)


def _in_band(band: Band, lengths: _Lengths, local: int | None = None, offset: int | None = None) -> MaskMod:
    """Return a band as a predicate. local: rows count from the beginning of their tile. offset: of all sequences."""

    def inside(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        before = 0 if band.top_left else lengths.kv[b] - lengths.q[b] if offset is None else offset
        at = (q % local if local else q) + before
        seen = kv >= 0
        if band.right is not None:
            seen = seen & (kv <= at + band.right)
        if band.left is not None:
            seen = seen & (kv >= at - band.left)
        return seen

    return inside


def _edges(band: Band, is_causal: bool, lengths: _Lengths) -> Iterator[NearMiss]:
    """Yield edges that are one key off, or open."""

    def moved(left: int = 0, right: int = 0) -> MaskMod:
        def plus(side: int | None, keys: int) -> int | None:
            return None if side is None else side + keys

        return _in_band(Band(plus(band.left, left), plus(band.right, right), band.top_left), lengths)

    if is_causal:
        yield NearMiss("causal-shows-next-key", "with a causal mask that shows one key too many", moved(right=1))
        yield NearMiss("causal-hides-diagonal", "with a causal mask that hides the diagonal", moved(right=-1))
        return
    if band.left is not None:
        yield NearMiss("window-left-one-too-long", "whose window is one key too long on the left", moved(left=1))
        yield NearMiss("window-left-one-too-short", "whose window is one key too short on the left", moved(left=-1))
        yield NearMiss("window-left-ignored", "whose left window is ignored", _in_band(band._replace(left=None), lengths))
    if band.right is not None:
        yield NearMiss("window-right-one-too-long", "whose window is one key too long on the right", moved(right=1))
        yield NearMiss("window-right-one-too-short", "whose window is one key too short on the right", moved(right=-1))
        yield NearMiss("window-right-ignored", "whose right window is ignored", _in_band(band._replace(right=None), lengths))


def _positions(band: Band, w: Workload, lengths: _Lengths) -> Iterator[NearMiss]:
    """Yield rows that are taken to stand elsewhere."""
    offsets = {kv_len - q_len for q_len, kv_len in lengths.pairs}
    if not band.top_left and len(offsets) > 1:
        text = "that aligns all sequences as the longest one, not each to its own last key"
        yield NearMiss("aligned-as-longest-sequence", text, _in_band(band, lengths, offset=w.kv_len - w.q_len))
    if isinstance(w.mask, Window) and offsets != {0}:
        yield NearMiss(
            "window-other-alignment",
            "whose window is aligned to the first key, not to the last",
            _in_band(band._replace(top_left=True), lengths),
        )


def _tiles(band: Band, w: Workload, lengths: _Lengths) -> Iterator[NearMiss]:
    """Yield tiles that are not masked, or left out, at an edge."""
    inside, seq = _in_band(band, lengths), lengths

    def span(b: torch.Tensor, q: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last key that any row of q's tile sees, if it sees any."""
        first = q // tile * tile
        last = (first + tile - 1).minimum(seq.q[b] - 1)
        before = seq.q[b] * 0 if band.top_left else seq.kv[b] - seq.q[b]
        start = first * 0 if band.left is None else (first + before - band.left).clamp(min=0)
        end = seq.kv[b] - 1
        return start, end if band.right is None else end.minimum(last + before + band.right)

    def tiled(tile: int, seen: Callable[..., torch.Tensor]) -> MaskMod:
        """Return a mask that knows of each key whether it is seen, and its tile's place among those that are visited."""

        def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            start, end = span(b, q, tile)
            return seen((b, h, q, kv), kv // tile - start // tile, kv // tile - end // tile, kv // tile * tile >= start)

        return mask_mod

    for tile in TILES:
        if w.q_len > tile:
            text, local = f"whose mask counts rows within tiles of {tile}", _in_band(band, lengths, local=tile)
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
                tiled(tile, lambda at, first, last, _: (first >= 0) & (last <= 0) & (at[3] < seq.kv[at[0]])),
            )
            text = f"without the last tile of {tile} keys that a row sees"
            yield NearMiss("last-visible-tile-missing", text, tiled(tile, lambda at, first, last, _: inside(*at) & (last < 0)))
            if band.left is not None:
                text = f"without the tile of {tile} keys in which the window begins"
                yield NearMiss(
                    "first-window-tile-missing", text, tiled(tile, lambda at, first, last, is_whole: inside(*at) & is_whole)
                )


def _ends(visible: MaskMod, lengths: _Lengths) -> Iterator[NearMiss]:
    """Yield keys at the beginning or end of sequences that are left out."""

    def without(hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> MaskMod:
        return lambda b, h, q, kv: visible(b, h, q, kv) & ~hidden(b, kv)

    yield NearMiss("last-key-missing", "without the last key", without(lambda b, kv: kv >= lengths.kv[b] - 1))
    yield NearMiss("first-key-missing", "without the first key", without(lambda b, kv: kv == 0))
    tails: set[tuple[int, ...]] = set()
    for tile in TILES:
        tail = tuple(kv_len // tile * tile for _, kv_len in lengths.pairs)
        if tail in tails or all(end in (0, kv_len) for end, (_, kv_len) in zip(tail, lengths.pairs, strict=True)):
            continue
        tails.add(tail)
        where = f"from {tail[0]}" if len(set(tail)) == 1 else f"of {tile}"
        text = f"without the keys of the last part-filled tile ({where})"
        yield NearMiss("tail-tile-missing", text, without(partial(_is_in_last_tile, lengths, tile, 0)))
    for tile in TILES[1:]:
        if any(kv_len > tile and kv_len % tile == 0 for _, kv_len in lengths.pairs):
            yield NearMiss(
                "last-tile-missing",
                f"without the last tile of {tile} keys",
                without(partial(_is_in_last_tile, lengths, tile, 1)),
            )
    if any(q_len < kv_len for q_len, kv_len in lengths.pairs):
        text = "that does not read the keys before the new tokens: only the last q_len keys count"
        yield NearMiss("cached-keys-unread", text, without(lambda b, kv: kv < lengths.kv[b] - lengths.q[b]))


def _is_in_last_tile(lengths: _Lengths, tile: int, full: int, b: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Whether keys lie in the last tile. full: 1 where that may be a full one, 0 where it is none if it is."""
    return kv >= (lengths.kv[b] - full) // tile * tile


def _documents(mask: Document) -> Iterator[NearMiss]:
    whole = Document((sum(mask.lengths),), mask.causal)
    yield NearMiss("documents-see-each-other", "whose documents see each other", whole)
    if len(mask.lengths) > 1:
        first, *others, last = mask.lengths
        yield NearMiss(
            "documents-begin-late",
            "whose documents begin one token late",
            Document((first + 1, *others, last - 1) if last > 1 else mask.lengths, mask.causal),
        )
        yield NearMiss(
            "documents-begin-early",
            "whose documents begin one token early",
            Document((first - 1, *others, last + 1) if first > 1 else mask.lengths, mask.causal),
        )
        if mask.causal:
            yield NearMiss("documents-not-causal", "whose documents are not causal", Document(mask.lengths))


def _neighborhoods(mask: Neighborhood) -> Iterator[NearMiss]:
    for axis in range(len(mask.shape)):
        for more, size in ((1, "larger"), (-1, "smaller")):
            kernel = tuple(number + more * (at == axis) for at, number in enumerate(mask.kernel))
            try:
                other = dataclasses.replace(mask, kernel=kernel)
            except ValueError:  # it does not fit into the layout
                continue
            yield NearMiss(f"neighborhood-one-{size}", f"whose neighborhood is one token {size} along axis {axis}", other)
    if any(mask.causal if isinstance(mask.causal, tuple) else (mask.causal,)):
        yield NearMiss("neighborhood-not-causal", "whose neighborhood is not causal", dataclasses.replace(mask, causal=False))
