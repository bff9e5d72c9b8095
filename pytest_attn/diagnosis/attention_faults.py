"""The faults that attention kernels are known for, each said as the other attention to which it amounts; and roundings so."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from pytest_attn.backends.precision import PRECISIONS, Precision
from pytest_attn.correctness.arithmetic import slopes_of
from pytest_attn.diagnosis.faults import FAULTS
from pytest_attn.diagnosis.hypothesis import AttentionFault, Other, of_tensors, of_workload
from pytest_attn.workloads.inputs import Descales, Inputs, dequantized, factors_of
from pytest_attn.workloads.kv_layout import with_keys_moved
from pytest_attn.workloads.masks import Band, BooleanMask, MaskMod, NearMiss, ScoreMod, StoredMask
from pytest_attn.workloads.masks.band import in_band
from pytest_attn.workloads.workload import Workload, key_heads, sequence_lengths, sequences_of


def attention_faults(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield likely faults, of those that amount to the same the plainest first.

    They are for all draws of a workload's inputs. drawn: any of them, for what tensors there are, and where.
    """
    yield from wrong_descales(w, drawn)
    for fault, words, changes in _ignored(w):
        yield AttentionFault(fault, words, of_workload(w, **changes))
    for fault, words, mask in near_misses(w, drawn):
        yield AttentionFault(fault, words, of_workload(w, mask=mask))
    yield from _hidden_scores(w, drawn)
    yield from misread_tensors(w, drawn)
    yield from misread_options(w, drawn)
    yield from misplaced_options(w, drawn)


#: finite numbers that hidden scores are set to
_LOW = (0.0, -1.0, -10.0, -100.0)


def _hidden_scores(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield scores that a mask, or padding, ought to hide and that it leaves finite."""
    is_padded = drawn.kv_lens is not None and not w.kv_pages and min(w.kv_lens or (w.kv_len,)) < w.kv_len
    if w.mask is None and not is_padded:
        return

    def with_hidden(step: Callable[..., torch.Tensor], inputs: Inputs) -> Other:
        visible = _seen_where_padded(w, inputs) if is_padded else seen_by(inputs, w)
        other, padded = _with_padding_seen(w, inputs) if is_padded else (inputs, w)
        changed = modified_by(w, lambda s, *index: step(s, visible(*index)))
        return other, padded.replace(mask=None, score_mod=changed)

    words = "whose mask is added to the scores as 1 and 0, and hides nothing: 0 and -inf are added"
    yield AttentionFault("mask-added", words, partial(with_hidden, lambda s, seen: s + seen))
    for low in _LOW:
        words = f"whose hidden scores are {low:g}, not -inf"
        finite = partial(with_hidden, lambda s, seen, low=low: s.where(seen, low))
        yield AttentionFault("hidden-scores-finite", words, finite)


#: sizes of tiles that kernels have, the largest first
TILES = (256, 128, 64, 32, 16)


def near_misses(w: Workload, drawn: Inputs) -> Iterator[NearMiss]:
    """Yield the near misses of a workload's mask: of its kind, then with its tiles, then with the ends of sequences."""
    return _MaskFaults(w, drawn).near_misses()


def other_places(number: int, few: bool = False) -> Iterator[tuple[str, list[int]]]:
    """Yield which of so many batch entries or heads is taken for each, in words. few: the likeliest alone."""
    own = list(range(number))
    likely = [
        ("the first for all", [0] * number),
        ("the next", own[1:] + own[:1]),
        *((f"number n % {step} for number n", [n % step for n in own]) for step in (2, 8, 16, 32) if step < number),
    ]
    others = [
        ("the one before", own[-1:] + own[:-1]),
        ("those in reverse", own[::-1]),
        ("the even ones, then the odd", own[::2] + own[1::2]),
        ("number 2 n for number n", [2 * n % number for n in own]),
    ]
    tried = [own]
    for words, order in [*likely, *([] if few else others)]:
        if order not in tried:
            tried.append(order)
            yield words, order


class _MaskFaults:
    """The faults of one workload's mask. q_lens, kv_lens: of the sequences that it is laid over, (batch,)."""

    def __init__(self, w: Workload, drawn: Inputs) -> None:
        self.w, self.drawn, self.over, self.visible = w, drawn, sequences_of(w, drawn.device), seen_by(drawn, w)
        assert self.over.q_lens is not None
        assert self.over.kv_lens is not None
        self.q_lens, self.kv_lens = self.over.q_lens, self.over.kv_lens

    def near_misses(self) -> Iterator[NearMiss]:
        """Yield other masks, as `near_misses` says."""
        w, mask = self.w, self.w.plain_mask
        if w.cached is not None:
            cached = torch.tensor(w.cached, device=self.drawn.device)
            words = "without the new keys: only those count that were in the cache"
            yield NearMiss("new-keys-unread", words, self._seen_where(lambda b, h, q, kv: kv < cached[b]))
        has_more_keys = any(q_len < kv_len for q_len, kv_len in self.over.lengths)
        if has_more_keys:
            of_last = self._seen_where(lambda b, h, q, kv: kv >= self.kv_lens[b] - self.q_lens[b])
            words = "that does not read the keys before the new tokens: only the last q_len keys count"
            yield NearMiss("cached-keys-unread", words, of_last)
        if mask is not None:
            yield from mask.near_misses(self.over)
            yield from self._of_others() if mask.band is None else self._tiles(mask.band)
        else:
            yield from self._causal_tiles()
        if has_more_keys:
            of_first = self._seen_where(lambda b, h, q, kv: kv < self.q_lens[b])
            yield NearMiss("keys-beyond-unseen", "without the keys from q_len on: as many keys as queries count", of_first)
        yield from self._ends()
        if mask is not None and w.band is not None:
            yield from self._both_sides(w.band)

    def _seen_where(self, condition: Callable[..., torch.Tensor]) -> MaskMod:
        """Return the mask that hides all but where a condition holds, too."""
        return lambda b, h, q, kv: self.visible(b, h, q, kv) & condition(b, h, q, kv)

    def _of_others(self) -> Iterator[NearMiss]:
        """Yield a given mask of another batch entry or head, and one by whose diagonal the tiles of keys are chosen."""

        def of_other(place: int, order: list[int]) -> MaskMod:
            def moved(*index: torch.Tensor) -> torch.Tensor:
                others = list(index)
                others[place] = torch.tensor(order, device=index[place].device)[index[place]]
                return self.visible(*others)

            return moved

        w = self.w
        for place, number, what, several in ((0, w.batch, "batch-entry", "batch entries"), (1, w.heads, "head", "heads")):
            for words, order in other_places(number):
                yield NearMiss(f"mask-of-another-{what}", f"with masks of other {several}: {words}", of_other(place, order))
        if w.batch > 1 < w.heads:
            words = "with masks of other batch entries: one for all heads is read as if each had its own"
            by_head: MaskMod = lambda b, h, q, kv: self.visible((b * w.heads + h) % w.batch, h, q, kv)  # noqa: E731
            yield NearMiss("mask-of-another-batch-entry", words, by_head)
        yield from self._causal_tiles()
        yield NearMiss("causal-not-asked-for", "whose mask is causal, too", self._before_diagonal(1))

    def _causal_tiles(self) -> Iterator[NearMiss]:
        """Yield tiles of keys that are visited as if the mask were causal, and is not."""
        for tile in TILES:
            if self.w.kv_len > tile:
                words = f"without the tiles of {tile} keys beyond the diagonal, as if the mask were causal"
                yield NearMiss("tiles-beyond-diagonal-missing", words, self._before_diagonal(tile))

    def _before_diagonal(self, tile: int) -> MaskMod:
        """Return the mask without tiles of so many keys that are beyond a tile of as many rows."""
        return self._seen_where(
            lambda b, h, q, kv: kv // tile * tile < (q // tile + 1) * tile + self.kv_lens[b] - self.q_lens[b]
        )

    def _both_sides(self, band: Band) -> Iterator[NearMiss]:
        """Yield other ends of a window, and a causal mask whose lengths are subtracted the wrong way round."""
        over = self.over
        if not band.top_left and not over.are_square:
            words = "with the wrong sign of an alignment: rows stand at i + q_len - kv_len, not i + kv_len - q_len"
            top_left = in_band(band._replace(top_left=True), over)
            flipped: MaskMod = lambda b, h, q, kv: top_left(b, h, q - (self.kv_lens[b] - self.q_lens[b]), kv)  # noqa: E731
            yield NearMiss("alignment-sign-flipped", words, flipped)
        left, right, _ = band
        if left is None or right is None:
            return
        words = "whose window hides nothing on the left, and on the right what is not beyond its length there"
        near, beyond = (in_band(Band(None, end, band.top_left), over) for end in (right, left))
        yield NearMiss("window-edge-on-other-side", words, lambda *index: near(*index) | ~beyond(*index))
        others = {}
        if right:
            others = {
                ("window-both-one-too-short", "is one key too short on both sides"): (left - 1, right - 1),
                ("window-both-one-too-long", "is one key too long on both sides"): (left + 1, right + 1),
                ("window-left-only", "has its left side alone"): (left, 0),
                ("window-right-only", "has its right side alone"): (0, right),
                ("window-halved", "is half as long on each side"): (left // 2, right // 2),
            }
        elif left:
            others = {("window-both-sided", "is as long on the right as on the left"): (left, left)}
        for (fault, words), ends in others.items():
            yield NearMiss(fault, f"whose window {words}", in_band(Band(*ends, band.top_left), over))

    def _tiles(self, band: Band) -> Iterator[NearMiss]:
        """Yield tiles that are not masked, or left out, at an edge."""
        inside = in_band(band, self.over)
        for tile in TILES:
            if self.w.q_len > tile:
                text = f"whose mask counts rows within tiles of {tile}"
                local = _with_rows(inside, lambda q, tile=tile: q % tile)
                visited = self._tiled(
                    band, tile, lambda at, first, last, _, local=local: local(*at) & (first >= 0) & (last <= 0)
                )
                yield NearMiss("mask-rows-within-tile", text, local)
                yield NearMiss("mask-rows-within-tile", text, visited)
        for size, which in itertools.product((2, 4, 8) if self.w.q_len > 1 else (), ("last", "first")):
            text, place = f"whose mask is the same for {size} rows, that of the {which} one", (size - 1) * (which == "last")
            yield NearMiss("mask-shared-by-rows", text, _with_rows(inside, lambda q, n=size, at=place: q // n * n + at))
        for tile in TILES[1:]:
            for fault, text, seen in self._of_tiles(band, inside, tile) if self.w.kv_len > tile else ():
                yield NearMiss(fault, text, self._tiled(band, tile, seen))

    def _of_tiles(self, band: Band, inside: MaskMod, tile: int) -> Iterator[tuple[str, str, Callable[..., torch.Tensor]]]:
        """Yield which keys are seen, as `_tiled` takes it, by what is done to tiles of so many keys."""
        text = f"that masks the last tile of {tile} keys only, though an edge runs through earlier ones"
        yield "mask-on-last-tile-only", text, lambda at, first, last, _: inside(*at) | (first >= 0) & (last < 0)
        text = f"that masks nothing within the tiles of {tile} keys that it visits"
        lens = self.kv_lens
        yield "mask-ignored-within-tiles", text, lambda at, first, last, _: (first >= 0) & (last <= 0) & (at[3] < lens[at[0]])
        text = f"without the last tile of {tile} keys that a row sees"
        yield "last-visible-tile-missing", text, lambda at, first, last, _: inside(*at) & (last < 0)
        if not band.top_left and band.right is not None and not self.over.are_square:
            text = f"without the tiles of {tile} keys beyond a row's own number, as if the mask began at the first key"
            yield "tiles-beyond-diagonal-missing", text, lambda at, *_: inside(*at) & (at[3] // tile <= at[2] // tile)
        text = f"without the tiles of {tile} keys that all rows of a tile see: only those at an edge are visited"
        yield "full-tiles-missing", text, lambda at, *_: inside(*at) & ~self._is_full(inside, at, tile)
        if band.left is not None:
            text = f"without the tile of {tile} keys in which the window begins"
            yield "first-window-tile-missing", text, lambda at, first, last, is_whole: inside(*at) & is_whole
            text = f"whose window is counted in whole tiles of {tile} keys: those in which it begins are left out"
            yield "first-window-tile-missing", text, lambda at, *_: inside(*at) & self._in_whole_tiles(band, at, tile)

    def _tiled(self, band: Band, tile: int, seen: Callable[..., torch.Tensor]) -> MaskMod:
        """Return a mask that knows of each key whether it is seen, and its tile's place among those that are visited."""

        def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            start, end = self._span(band, b, q, tile)
            return seen((b, h, q, kv), kv // tile - start // tile, kv // tile - end // tile, kv // tile * tile >= start)

        return mask_mod

    def _span(self, band: Band, b: torch.Tensor, q: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last key that any row of q's tile sees, if it sees any."""
        first = q // tile * tile
        last = (first + tile - 1).minimum(self.q_lens[b] - 1)
        before = self.q_lens[b] * 0 if band.top_left else self.kv_lens[b] - self.q_lens[b]
        start = first * 0 if band.left is None else (first + before - band.left).clamp(min=0)
        end = self.kv_lens[b] - 1
        return start, end if band.right is None else end.minimum(last + before + band.right)

    def _in_whole_tiles(self, band: Band, at: tuple[torch.Tensor, ...], tile: int) -> torch.Tensor:
        """Return whether a key is in one of as many tiles, up to the row's own, as fit into a window."""
        b, _, q, kv = at
        assert band.left is not None
        place = q if band.top_left else q + self.kv_lens[b] - self.q_lens[b]
        return kv // tile > place // tile - max(1, (band.left + 1) // tile)

    def _is_full(self, inside: MaskMod, at: tuple[torch.Tensor, ...], tile: int) -> torch.Tensor:
        """Return whether all rows of q's tile see all keys of kv's."""
        b, h, q, kv = at
        rows, keys = q // tile * tile, kv // tile * tile
        ends = (rows + tile - 1).minimum(self.q_lens[b] - 1), (keys + tile - 1).minimum(self.kv_lens[b] - 1)
        return inside(b, h, rows, ends[1]) & inside(b, h, ends[0], keys)

    def _ends(self) -> Iterator[NearMiss]:
        """Yield keys at the beginning or end of sequences that are left out."""

        def without_last_tile(tile: int, full: int) -> MaskMod:
            """Hide the last tile. full: 1 where that may be a full one, 0 where it is none if it is."""
            return self._seen_where(lambda b, h, q, kv: kv < (self.kv_lens[b] - full) // tile * tile)

        without_last = self._seen_where(lambda b, h, q, kv: kv < self.kv_lens[b] - 1)
        yield NearMiss("last-key-missing", "without the last key", without_last)
        yield NearMiss("first-key-missing", "without the first key", self._seen_where(lambda b, h, q, kv: kv > 0))
        for end in (1 << bits for bits in (8, 15, 16) if self.w.kv_len > 1 << bits):
            first = self._seen_where(lambda b, h, q, kv, end=end: kv < end)
            yield NearMiss("keys-beyond-unseen", f"without the keys from {end} on", first)
        lengths, tails = [kv_len for _, kv_len in self.over.lengths], set[tuple[int, ...]]()
        for tile in TILES:
            tail = tuple(length // tile * tile for length in lengths)
            if tail in tails or all(end in (0, length) for end, length in zip(tail, lengths, strict=True)):
                continue
            tails.add(tail)
            where = f"from {tail[0]}" if len(set(tail)) == 1 else f"of {tile}"
            text = f"without the keys of the last part-filled tile ({where})"
            yield NearMiss("tail-tile-missing", text, without_last_tile(tile, 0))
        for tile in TILES[1:]:
            if any(length > tile and length % tile == 0 for length in lengths):
                yield NearMiss("last-tile-missing", f"without the last tile of {tile} keys", without_last_tile(tile, 1))


def seen_by(inputs: Inputs, w: Workload) -> MaskMod:
    """Return the workload's mask, without padding, as a predicate of (b, h, q_idx, kv_idx) that packed sequences share."""
    if w.plain_mask is None:
        return lambda b, h, q, kv: kv >= 0
    return w.plain_mask.bind(sequences_of(w, inputs.device))


def _with_rows(mod: MaskMod, taken: Callable[..., torch.Tensor]) -> MaskMod:
    return lambda b, h, q, kv: mod(b, h, taken(q), kv)


_ROPE_BASE = 10000.0


def misread_tensors(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield faults with what is read. drawn: as that of `attention_faults`."""
    if drawn.kv_lens is not None:
        yield from _misread_lengths(w, w.kv_lens or (w.kv_len,))
    yield from _padding(w, drawn)
    yield from _heads(w)
    yield from _batch_entries(w)
    yield from _packed_keys(w)
    yield from _pages(w, drawn)
    yield from _zeros_counted(w)
    yield from _contents(w)
    yield from _wrapped_offsets(w, drawn)
    yield from _rotated(w)


# -- how far a sequence goes -----------------------------------------------------------------------------------------------


def _misread_lengths(w: Workload, lens: Sequence[int]) -> Iterator[AttentionFault]:
    has_padding, lies_in_rows = min(lens) < w.kv_len, not w.is_packed and not w.kv_pages
    if has_padding:
        words = "that ignores kv_lens and sees padding"
        yield AttentionFault("kv-lens-ignored", words, partial(_with_padding_seen, w))
    if has_padding and lies_in_rows:
        words = f"that takes the padding on the {w.pad} to be on the other side"
        yield AttentionFault("padding-on-other-side", words, partial(_with_padding_on_other_side, w))
    if len(set(lens)) > 1:
        of_first = _with(w, "kv_lens", lambda lens: lens[:1].expand_as(lens))
        yield AttentionFault("kv-len-of-first-batch-entry", "with the length of the first batch entry for all", of_first)
        for words, order in other_places(w.batch) if not w.is_packed else ():
            if (others := tuple(lens[n] for n in order)) != lens:
                words = f"with the lengths of other batch entries: {words}"
                yield AttentionFault("kv-len-of-another-batch-entry", words, partial(_with_lengths, w, others))
    or_window = ", or a window one key too early" if _window(w) else ""
    words = f"with kv_lens one too short{or_window}: the newest key is not seen"
    one_less = _with(w, "kv_lens", lambda lens: (lens - 1).clamp(min=0))
    yield AttentionFault("newest-key-missing", words, one_less)
    if has_padding:
        words = "with kv_lens one too long: one key of padding is seen"
        one_more = tuple(min(length + 1, w.kv_len) for length in lens)
        yield AttentionFault("one-key-beyond-length", words, partial(_with_lengths, w, one_more))


def _zeros_counted(w: Workload) -> Iterator[AttentionFault]:
    if w.is_packed or w.band is None:
        return
    ends = tuple(kv_len for _, kv_len in sequence_lengths(w))
    fillings = {ends: "", (w.kv_len,) * len(ends): "in the place of padding"}
    for tile in reversed(TILES):
        filled = tuple(-(-end // tile) * tile for end in ends)
        fillings.setdefault(filled, f"which fill up the last tile of keys (to a multiple of {tile})")
    for tile in TILES:
        splits = -(-w.kv_len // tile)
        filled = tuple(end + splits - -(-end // tile) for end in ends)
        if filled != ends:
            words = f"that counts each split of {tile} keys without any as if its lse were 0"
            yield AttentionFault("empty-splits-counted", words, partial(_filled_with_zeros, w, filled))
    for filled, zeros in fillings.items():
        if filled != ends:
            words = f"that counts the zeros {zeros}: they are not masked"
            yield AttentionFault("tail-zeros-counted", words, partial(_filled_with_zeros, w, filled))
            if w.softcap is not None:
                words = f"that counts the zeros {zeros}: softcap makes -cap of their -inf"
                yield AttentionFault("tail-zeros-counted", words, partial(_filled_with_low_scores, w, filled, -w.softcap))


def _with_lengths(w: Workload, lens: tuple[int, ...], inputs: Inputs) -> Other:
    assert inputs.kv_lens is not None
    return dataclasses.replace(inputs, kv_lens=inputs.kv_lens.new_tensor(lens)), w.replace(kv_lens=lens)


def _with_padding_seen(w: Workload, inputs: Inputs) -> Other:
    """Count the padding as keys, where a kernel is given it."""
    k, v = (with_keys_moved(w, t, 2) for t in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v, kv_lens=None), w.replace(pad="right")


def _with_padding_on_other_side(w: Workload, inputs: Inputs) -> Other:
    """Count as many keys as there are, from the end that has the padding."""
    way = 1 if w.pad == "left" else -1
    k, v = (with_keys_moved(w.replace(pad="left"), t, 2, way) for t in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v), w.replace(pad="right")


def _seen_where_padded(w: Workload, inputs: Inputs) -> MaskMod:
    """Return the mask, with padding, of keys that lie as a kernel is given them."""
    seen, kv_lens = inputs.mask_mod(), inputs.kv_lens
    assert seen is not None
    assert kv_lens is not None
    if w.pad == "right":
        return seen

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        at = kv - (w.kv_len - kv_lens[b])
        return (at >= 0) & seen(b, h, q, at)

    return visible


#: elements of a mask's tensor above which it is not looked through
_MOST_OF_A_MASK = 1 << 26


def _padding(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield padding that is seen, where a mask's tensor or the lowest numbers of a bias hide it."""
    words = "that sees padding: keys which no row of their batch entry may see"
    if w.is_packed or w.kv_pages or w.batch * w.heads * w.q_len * w.kv_len > _MOST_OF_A_MASK:
        return
    if w.plain_mask is not None and not w.has_positional_mask:
        visible = w.plain_mask.tensor(sequences_of(w, drawn.device))
        if visible is not None and (shown := _with_padding(visible.expand(w.batch, w.heads, w.q_len, w.kv_len))) is not None:
            yield AttentionFault("padding-ignored", words, of_workload(w, mask=BooleanMask(StoredMask(shown))))
    if drawn.bias is not None and w.bias:
        hidden = drawn.bias <= torch.finfo(drawn.bias.dtype).min / 2
        shown = _with_padding(~hidden.expand(-1, -1, w.q_len, w.kv_len)) if bool(hidden.any()) else None
        if shown is not None:
            yield AttentionFault("padding-ignored", words, _with(w, "bias", lambda bias: bias.masked_fill(hidden & shown, 0)))


def _with_padding(visible: torch.Tensor) -> torch.Tensor | None:
    """Return which keys (batch, heads, rows, keys) rows see that see any, were it but for how far off they are.

    None where that is what is seen, or where more is hidden than keys that no row of their batch entry sees. Rows of padding
    see no key, or are shown their own one or all, lest they be NaN.
    """
    rows, keys = visible.shape[2:]
    number = visible.sum(-1, keepdim=True)
    counts = (number > 1) & (number < keys)
    is_padding = ~(visible & counts).any(1, keepdim=True).any(2, keepdim=True)
    apart = torch.arange(rows, device=visible.device)[:, None] - torch.arange(keys, device=visible.device)
    told = apart[(counts & ~is_padding).any(1).any(0)]
    if not len(told):
        return None
    near = apart.clamp(told.min(), told.max()) + keys - 1  # what is further off is as the furthest that is known
    seen = torch.zeros(rows + keys - 1, dtype=torch.bool, device=visible.device)
    seen[near[(visible & counts).any(1).any(0)]] = True
    shown = (seen[near] | (apart == 0)) & (number > 0)
    is_all = bool(((visible == shown & ~is_padding) | ~counts).all())
    return shown if is_all and bool((shown != visible).any()) else None


def _filled_with_zeros(w: Workload, filled: tuple[int, ...], inputs: Inputs) -> Other:
    """Lengthen the keys by zeros, up to the end of each batch entry's last tile, and show these."""
    if w.kv_pages is not None:
        inputs, w = _without_pages(w, inputs)
    inside, longest = seen_by(inputs, w), max(w.kv_len, *filled)
    ends = torch.tensor([kv_len for _, kv_len in sequence_lengths(w)], device=inputs.device)
    stops = ends.new_tensor(filled)
    beyond = (ends.new_tensor(range(longest)) >= ends[:, None])[:, None, :, None]
    k, v = (F.pad(t, (0, 0, 0, longest - w.kv_len)).masked_fill(beyond, 0) for t in (inputs.k, inputs.v))
    bias = inputs.bias
    if bias is not None and bias.shape[-1] == w.kv_len:
        bias = F.pad(bias, (0, longest - w.kv_len))

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return inside(b, h, q, kv) & (kv < stops[b])

    longer = dataclasses.replace(inputs, k=k, v=v, bias=bias, kv_lens=None)
    seen: MaskMod = mask_mod
    return longer, w.replace(kv_len=longest, kv_lens=None, mask=seen)


def _without_pages(w: Workload, inputs: Inputs) -> Other:
    if inputs.applied is not None:
        raise ValueError("descales lie in pages, too")
    k, v = inputs.gathered()
    return dataclasses.replace(inputs, k=k, v=v, page_table=None), w.replace(kv_pages=None)


def _filled_with_low_scores(w: Workload, filled: tuple[int, ...], low: float, inputs: Inputs) -> Other:
    longer, variant = _filled_with_zeros(w, filled, inputs)
    ends = torch.tensor([kv_len for _, kv_len in sequence_lengths(w)], device=inputs.device)
    lowered = modified_by(w, lambda s, b, h, q, kv: s.where(kv < ends[b], low))
    return longer, variant.replace(score_mod=lowered)


# -- heads and batch entries -------------------------------------------------------------------------------------------------


def _heads(w: Workload) -> Iterator[AttentionFault]:
    own, keys = tuple(key_heads(w)), w.kv_heads
    tried: set[tuple[int, ...]] = set()
    for fault, head_of, words in (
        ("heads-interleaved", lambda h: h % keys, "query head h uses key head h % kv_heads (interleaved groups)"),
        ("heads-in-neighboring-groups", lambda h: h // w.group, "query head h uses key head h // group (groups of neighbors)"),
        ("group-taken-for-kv-heads", lambda h: min(h // keys, keys - 1), ""),
        ("group-rounded-to-power-of-two", lambda h: h >> (w.group - 1).bit_length(), ""),
        ("groups-ignored", lambda h: min(h, keys - 1), ""),
        ("first-key-head-for-all", lambda h: 0, ""),
        ("key-heads-wrap", lambda h: own[h] % 32, "numbers of key heads wrap round at 32"),
        ("next-key-head", lambda h: (own[h] + 1) % keys, ""),
    ):
        order = tuple(map(head_of, range(w.heads)))
        if order != own and order not in tried:
            tried.add(order)
            yield AttentionFault(fault, f"in which {words or FAULTS[fault]}", partial(_with_key_heads, w, order))


def _with_key_heads(w: Workload, order: tuple[int, ...], inputs: Inputs) -> Other:
    k, v = (in_order(2 if w.kv_pages else 1, order, t) for t in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v), w.replace(kv_heads=w.heads)


#: batch entries of which each two are tried in each other's place
_FEW_ENTRIES = 4


def exchanged_entries(batch: int) -> Iterator[tuple[str, list[int]]]:
    """Yield which two of a few batch entries are in each other's place, in words, and the order that makes."""
    for one, other in itertools.combinations(range(batch), 2) if 2 < batch <= _FEW_ENTRIES else ():
        order = list(range(batch))
        order[one], order[other] = other, one
        yield f"batch entries {one} and {other}", order


def in_order(place: int, order: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a dimension in another order."""
    return tensor.index_select(place, torch.tensor(order, device=tensor.device))


def _batch_entries(w: Workload) -> Iterator[AttentionFault]:
    if w.batch == 1 or w.is_packed or w.kv_pages:
        return
    for entries, order in exchanged_entries(w.batch):
        exchanged = _with(w, "k v", partial(in_order, 0, order))
        yield AttentionFault("batch-entries-exchanged", f"with k and v of {entries} exchanged", exchanged)
    for name, fault in (("k", "keys-of-first-batch-entry"), ("v", "values-of-first-batch-entry")):
        of_first = _with(w, name, lambda t: t[:1].expand_as(t))
        yield AttentionFault(fault, f"with the {fault.replace('-', ' ')} for all", of_first)
    for words, order in other_places(w.batch):
        moved = _with(w, "k v", partial(in_order, 0, order))
        yield AttentionFault("kv-of-another-batch-entry", f"with k and v of other batch entries: {words}", moved)


# -- packed keys, and pages ------------------------------------------------------------------------------------------------


def _packed_keys(w: Workload) -> Iterator[AttentionFault]:
    if w.q_lens is None or w.kv_lens is None or w.batch == 1 or not w.packs_keys:
        return
    total = sum(w.kv_lens)
    if w.mask is None or w.q_lens == w.kv_lens:
        whole = of_workload(w, batch=1, q_lens=(sum(w.q_lens),), kv_lens=(total,), q_len=None, kv_len=None)
        yield AttentionFault("sequences-see-each-other", "whose packed sequences see each other", whole)
    for fault, words, starts, lengths in _other_extents(w, w.q_lens, w.kv_lens):
        yield AttentionFault(fault, words, partial(_with_extents, w, starts, lengths))


def _other_extents(
    w: Workload, q_lens: Sequence[int], kv_lens: Sequence[int]
) -> Iterator[tuple[str, str, Sequence[int], Sequence[int]]]:
    """Yield faults with where the keys of each sequence begin by them, and how many there are."""
    starts, q_starts = ([0, *itertools.accumulate(lengths)][:-1] for lengths in (kv_lens, q_lens))
    if q_lens != kv_lens:
        words = "that finds packed keys by the cumulated lengths of the queries"
        yield "keys-at-offsets-of-queries", words, q_starts, q_lens
    words = "whose packed sequences read from their second key to the first of the next"
    yield "keys-begin-late", words, [start + 1 for start in starts[:-1]] + starts[-1:], kv_lens
    words = "whose packed sequences read from the last key of the one before: cu_seqlens is one too small"
    yield "keys-begin-early", words, [max(start - 1, 0) for start in starts], kv_lens
    if w.group > 1:
        words = "that finds packed keys with the stride of the queries, which have more heads"
        yield "keys-with-stride-of-queries", words, [start * w.group for start in starts], kv_lens
    for tile in reversed(TILES):
        filled = [min(-(-n // tile) * tile, sum(kv_lens) - start) for n, start in zip(kv_lens, starts, strict=True)]
        if filled != list(kv_lens):
            words = f"whose packed sequences see the next one's keys, up to a multiple of {tile}"
            yield "tail-reads-next-sequence", words, starts, filled
    if 0 in q_lens:
        extents = iter(zip(starts, kv_lens, strict=True))
        taken = [next(extents) if q_len else (0, 0) for q_len in q_lens]
        words = "that leaves sequences without queries out of the queries' list but not out of the keys'"
        yield "sequence-without-queries-left-out", words, [start for start, _ in taken], [length for _, length in taken]


def _with_extents(w: Workload, starts: Sequence[int], lengths: Sequence[int], inputs: Inputs) -> Other:
    """Read each packed sequence's keys from another place, and as many as said; what lies past the end wraps round."""
    where = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    index = (torch.cat(where) % len(inputs.k)).to(inputs.k.device)
    return dataclasses.replace(inputs, k=inputs.k[index], v=inputs.v[index]), w.replace(kv_lens=tuple(lengths), kv_len=None)


def _with_whole_pages(w: Workload, inputs: Inputs) -> Other:
    size = w.kv_pages.size if w.kv_pages else 1
    return _with_more_in_pages(w, tuple(-(-n // size) * size for n in w.kv_lens or ()), inputs)


def _with_more_in_pages(w: Workload, lens: tuple[int, ...], inputs: Inputs) -> Other:
    assert inputs.kv_lens is not None
    longer = w.replace(kv_lens=lens, kv_len=None if w.is_packed else max(lens))
    return dataclasses.replace(inputs, kv_lens=inputs.kv_lens.new_tensor(lens), workload=longer), longer


def _ends_on_pages(w: Workload) -> list[bool]:
    return [w.kv_pages is not None and n > 0 and n % w.kv_pages.size == 0 for n in w.kv_lens or ()]


def _with_one_page_more(w: Workload, page: int | None, inputs: Inputs) -> Other:
    """Lengthen sequences whose last page is full by a page: one of that number, or the one that lies behind the last."""
    table, size = inputs.page_table, w.kv_pages.size if w.kv_pages else 1
    assert table is not None
    table = F.pad(table, (0, 1))
    lens = tuple(n + size * ends for n, ends in zip(w.kv_lens or (), _ends_on_pages(w), strict=True))
    for row, n, ends in zip(table, w.kv_lens or (), _ends_on_pages(w), strict=True):
        if ends:
            row[n // size] = (row[n // size - 1] + 1) % len(inputs.k) if page is None else page
    return _with_more_in_pages(w, lens, dataclasses.replace(inputs, page_table=table))


def _pages(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    if w.kv_pages is None or drawn.kv_lens is None:
        return
    size, pages = w.kv_pages.size, len(drawn.k)
    used = -(-drawn.kv_lens[:, None] // size)

    def numbers(table: torch.Tensor) -> torch.Tensor:
        return torch.arange(table.shape[1], device=table.device)

    def by_used_pages(table: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(table), device=table.device)[:, None]
        return table.flatten()[(rows * used + numbers(table)).clamp(max=table.numel() - 1)]

    unread = _with(w, "page_table", lambda t: numbers(t.flatten()[None]).view(t.shape) % pages)
    words = "that does not read the page table: pages lie one after the other, sequence by sequence"
    yield AttentionFault("page-table-unread", words, unread)
    if any(n % size for n in w.kv_lens or ()):
        whole = _with(w, "kv_lens", lambda lens: lens // size * size)
        yield AttentionFault("last-page-skipped", "without the last page where it is not full", whole)
    if w.batch > 1:
        of_first = _with(w, "page_table", lambda t: t[:1].expand_as(t))
        yield AttentionFault("pages-of-first-sequence", "with the pages of the first sequence for all", of_first)
        for whose, shift in (("next", -1), ("previous", 1)) if w.batch > 2 else (("next", -1),):
            of_other = _with(w, "page_table", partial(torch.roll, shifts=shift, dims=0))
            yield AttentionFault("pages-of-another-sequence", f"with the pages of the {whose} sequence", of_other)
    if w.kv_lens and any(n % size for n in w.kv_lens):
        words = f"that sees the padding of pages: keys up to the end of the last page of {size}"
        yield AttentionFault("padding-of-pages-seen", words, partial(_with_whole_pages, w))
    words = "that takes a sequence's pages to follow each other: only the first is looked up"
    yield AttentionFault("pages-taken-in-order", words, _with(w, "page_table", lambda t: (t[:, :1] + numbers(t)) % pages))
    for few in (2, 4, 8):
        words = f"that looks up one page in {few}, and takes the others to follow it"
        followed = _with(w, "page_table", lambda t, few=few: (t[:, numbers(t) // few * few] + numbers(t) % few) % pages)
        yield AttentionFault("some-pages-looked-up", words, followed)
    for whose, page in (("page 0", 0), ("the page after the last one", None)) if any(_ends_on_pages(w)) else ():
        words = f"that sees a page of {size} keys beyond the length where the last page is full: {whose}"
        yield AttentionFault("page-beyond-length", words, partial(_with_one_page_more, w, page))
    words = "that finds a row of the page table by the pages in use, not by its stride"
    yield AttentionFault("page-table-stride-ignored", words, _with(w, "page_table", by_used_pages))
    yield from _slots(w)
    words = "that takes pages to be twice as long as they are"
    yield AttentionFault("page-of-another-size", words, _with(w, "page_table", lambda t: t[:, numbers(t) // 2]))


def _slots(w: Workload) -> Iterator[AttentionFault]:
    """Yield tokens that are read from other slots, or from pages of other numbers."""
    size = w.kv_pages.size if w.kv_pages else 1

    def fault(name: str, words: str, page: Callable[..., torch.Tensor], slot: Callable[..., torch.Tensor]) -> AttentionFault:
        return AttentionFault(name, words, partial(_with_slots, w, page, slot))

    def own_page(at: torch.Tensor, table: torch.Tensor, pages: int) -> torch.Tensor:
        return table[:, (at // size).clamp(max=table.shape[1] - 1)]

    def of_number(changed: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda at, table, pages: changed(own_page(at, table, pages), pages)

    def in_page(at: torch.Tensor) -> torch.Tensor:
        return at % size

    words = "that reads keys from the slot after theirs"
    yield fault("keys-begin-late", words, lambda at, *pages: own_page(at + 1, *pages), lambda at: (at + 1) % size)
    if size > 1:
        words = "that reads all tokens of a page from its first slot"
        yield fault("slots-within-pages-misread", words, own_page, lambda at: at * 0)
    for step in (8, 16, 32, 64, 128):
        if step < min(size, w.kv_len):
            words = f"that finds tokens in their page as if it had {step} slots"
            yield fault("slots-within-pages-misread", words, own_page, lambda at, step=step: at % size % step)
    for bits in (8, 16):
        cut = of_number(lambda number, pages, bits=bits: number % (1 << bits))
        yield fault("page-numbers-misread", f"that keeps {bits} bits of a page's number", cut, in_page)
    for factor in (2, 3, 4, 8):
        words = f"that finds pages by {factor} times their numbers, as if their stride were another"
        multiple = of_number(lambda number, pages, factor=factor: number * factor % pages)
        yield fault("page-numbers-misread", words, multiple, in_page)


def _with_slots(w: Workload, page: Callable[..., torch.Tensor], slot: Callable[..., torch.Tensor], inputs: Inputs) -> Other:
    """Read the tokens of each sequence from other pages and slots, said as pages of one token."""
    table = inputs.page_table
    assert table is not None
    assert w.kv_pages is not None
    if inputs.applied is not None:
        raise ValueError("descales lie in pages, too")
    at = torch.arange(w.kv_len, device=table.device)
    slots = page(at, table.long(), len(inputs.k)) * w.kv_pages.size + slot(at)
    k, v = (t.flatten(0, 1)[:, None] for t in (inputs.k, inputs.v))
    one_each = w.replace(kv_pages=dataclasses.replace(w.kv_pages, size=1, pool=None, shared=0, layout="NHD"))
    return dataclasses.replace(inputs, k=k, v=v, page_table=slots.to(table.dtype)), one_each


# -- q, k and v ------------------------------------------------------------------------------------------------------------


def _contents(w: Workload) -> Iterator[AttentionFault]:
    words = "with uniform probabilities: the scores have no effect"
    yield AttentionFault("scores-without-effect", words, _with(w, "q", lambda q: q * 0))
    if w.head_dim == w.v_head_dim:
        yield AttentionFault("k-for-v", "with k in place of v", of_tensors(w, lambda i: {"v": i.k}))
        yield AttentionFault("v-for-k", "with v in place of k", of_tensors(w, lambda i: {"k": i.v}))
        words = "with k and v in each other's place: are their names exchanged?"
        yield AttentionFault("k-and-v-exchanged", words, of_tensors(w, lambda i: {"k": i.v, "v": i.k}))
    if not (w.is_packed or w.kv_pages) and (w.heads, w.q_len) == (w.kv_heads, w.kv_len):
        words = "with q and k in each other's place: are their names exchanged?"
        yield AttentionFault("q-and-k-exchanged", words, of_tensors(w, lambda i: {"q": i.k, "k": i.q}))
    if w.v_in_k and w.head_dim > w.v_head_dim:
        words = "with the last elements of k for v, not the first"
        yield AttentionFault("v-from-end-of-k", words, of_tensors(w, lambda i: {"v": i.k[..., -w.v_head_dim :]}))
    for whole in dict.fromkeys((*(w.head_dim // step * step for step in (64, 32, 16)), 256, 128, 64)):
        if 0 < whole < w.head_dim:
            words = f"with q . k over the first {whole} of {w.head_dim} elements of a head"
            cut = _with(w, "q", lambda q, whole=whole: F.pad(q[..., :whole], (0, q.shape[-1] - whole)))
            yield AttentionFault("head-dim-tail-unread", words, cut)
    if not w.is_packed:
        yield from _queries_elsewhere(w)
    if not w.is_packed and not w.kv_pages:
        yield from _contents_in_rows(w)


def _queries_elsewhere(w: Workload) -> Iterator[AttentionFault]:
    """Yield queries of batch entries that are found as if each had a multiple of some rows."""
    tried = {w.q_len}
    for step in (4, 8, 16, 32, 64, 128):
        if w.batch > 1 and (padded := -(-w.q_len // step) * step) not in tried:
            tried.add(padded)
            words = f"that finds the queries of a batch entry as if each had {padded} rows"
            yield AttentionFault("queries-misplaced", words, _with(w, "q", partial(_of_padded_rows, padded)))


def _of_padded_rows(padded: int, q: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, dim = q.shape
    at = torch.arange(batch, device=q.device)[:, None] * padded + torch.arange(rows, device=q.device)
    flat = q.transpose(1, 2).reshape(-1, heads, dim)
    return flat[at % len(flat)].transpose(1, 2)


def _contents_in_rows(w: Workload) -> Iterator[AttentionFault]:
    """Yield those of keys that lie in rows, neither packed nor in pages."""
    if w.v_head_dim != w.head_dim:
        words = "that reads rows of v head_dim apart, as those of k"
        yield AttentionFault("v-with-head-dim-of-k", words, _with(w, "v", partial(_far_rows, w)))
    viewed = (("v", "v-viewed-not-transposed"), ("k", "k-viewed-not-transposed"))
    for name, fault in viewed if 1 < w.kv_heads != w.kv_len and not w.v_in_k else ():
        for layout, read in (
            ("(batch, seqlen, heads, dim)", read_rows_first),
            ("(batch, heads, seqlen, dim)", read_heads_first),
        ):
            words = f"whose {name} is viewed as {layout}, where a transpose belongs: heads and rows are mixed up"
            yield AttentionFault(fault, words, _with(w, name, read))
    if w.kv_heads == w.kv_len > 1:
        swapped = _with(w, "k", lambda k: k.transpose(1, 2).contiguous())
        yield AttentionFault("k-heads-and-rows-swapped", "with heads and rows of k swapped", swapped)
    for reach in (1 << bits for bits in (8, 15, 16) if w.kv_len > 1 << bits):
        wrapped = _with(w, "k v", partial(in_order, 2, [n % reach for n in range(w.kv_len)]))
        yield AttentionFault("key-positions-wrap", f"whose key positions wrap round at {reach}", wrapped)


def read_rows_first(t: torch.Tensor) -> torch.Tensor:
    """Read memory (batch, heads, rows, dim) as (batch, rows, heads, dim), heads-first."""
    batch, heads, rows, _ = t.shape
    return t.reshape(batch, rows, heads, -1).transpose(1, 2)


def read_heads_first(t: torch.Tensor) -> torch.Tensor:
    """Read memory (batch, rows, heads, dim) as (batch, heads, rows, dim)."""
    return t.transpose(1, 2).reshape(t.shape)


def _far_rows(w: Workload, v: torch.Tensor) -> torch.Tensor:
    """Read v with the strides that it would have, were its rows head_dim long; what lies past the end wraps round."""
    *rows, dim = v.shape
    at = torch.arange(math.prod(rows), device=v.device).view(*rows, 1) * w.head_dim + torch.arange(dim, device=v.device)
    return v.flatten()[at % v.numel()]


#: the least number of elements at which offsets are taken to wrap round, as a power of two
LEAST_BITS = 15


def _wrapped_offsets(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield tensors, as they lie where they are contiguous, that are read at offsets of too few bits."""
    for names in ("q", "k", "v", "k v", *["bias"] * bool(w.bias)):
        for bits in range(LEAST_BITS, (getattr(drawn, names.split()[0]).numel() - 1).bit_length()):
            words = (
                f"that reads {names.replace(' ', ' and ')} at offsets which wrap round at {1 << bits:,} elements (2^{bits})"
            )
            yield AttentionFault("offset-wraps", words, _with(w, names, partial(_read_wrapped, 1 << bits)))


def _read_wrapped(reach: int, tensor: torch.Tensor) -> torch.Tensor:
    times = -(-tensor.numel() // reach)
    return tensor.flatten()[:reach].repeat(times)[: tensor.numel()].view(tensor.shape)


def _rotated(w: Workload) -> Iterator[AttentionFault]:
    """Yield q and k rotated by their positions: what a model does before attention, and a kernel must not do again."""
    if w.head_dim % 2 or w.is_packed or w.kv_pages:
        return
    shifts = sorted({0, max(w.kv_len - w.q_len, 0)})
    for style, shift, is_rounded in itertools.product(("half-split", "interleaved"), shifts, (False, True)):
        at = f" and q from position {shift}" if shift else ""
        words = f"with RoPE inside: q and k rotated by position ({style} pairs, base 10000{at})"
        turned = of_tensors(w, partial(_with_rope, shift, style, is_rounded))
        yield AttentionFault(f"rope-inside-{style}", words, turned)


def _with_rope(shift: int, style: str, is_rounded: bool, inputs: Inputs) -> dict[str, torch.Tensor]:
    turned = {"q": _rope(inputs.q, shift, style), "k": _rope(inputs.k, 0, style)}
    return {name: t.to(inputs.q.dtype) for name, t in turned.items()} if is_rounded else turned


def _rope(x: torch.Tensor, shift: int, style: str) -> torch.Tensor:
    """Rotate (..., rows, head_dim) by position."""
    *_, rows, dim = x.shape
    frequency = _ROPE_BASE ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = torch.arange(shift, shift + rows, device=x.device)[:, None] * frequency
    x = x.double()
    one, other = x.chunk(2, -1) if style == "half-split" else (x[..., 0::2], x[..., 1::2])
    turned = (one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin())
    return torch.cat(turned, -1) if style == "half-split" else torch.stack(turned, -1).flatten(-2)


# -- descales --------------------------------------------------------------------------------------------------------------


def wrong_descales(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield other descales for q, k and v: forgotten ones, those of another tensor, one for all heads or batch entries."""
    if drawn.applied is None or not w.is_quantized:
        return

    def fault(name: str, words: str, change: Callable[[Descales], Descales]) -> AttentionFault:
        return AttentionFault(name, words, partial(_with_descales, w, change))

    names = [name for name in "qkv" if getattr(drawn.applied, name) is not None]
    some = names if w.v_in_k else [*names, "kv"]
    all_three = ["qkv"] * ("q" in names and not w.v_in_k)
    for name in [*some, *all_three]:
        whose = {"kv": "descales of k and v", "qkv": "descales of q, k and v"}.get(name, f"descale of {name}")
        yield fault(f"descale-ignored-of-{name}", f"without the {whose}", partial(_each, name, lambda d: (d != 0).float()))
    if not w.v_in_k:
        yield fault("descale-of-k-for-v", "with the descale of k for v", lambda d: d._replace(v=d.k))
        yield fault("descale-of-v-for-k", "with the descale of v for k", lambda d: d._replace(k=d.v))
    for name in [*some, *([] if w.kv_pages else all_three)]:
        whose = {"kv": "k's and v's descales", "qkv": "q's, k's and v's descales"}.get(name, f"{name}'s descale")
        for of, words, change in _shared_descales(w, getattr(drawn.applied, name[-1])):
            yield fault(f"descale-of-{of}-for-{name}", f"with {whose} of {words} for all", partial(_each, name, change))


def _shared_descales(w: Workload, own: torch.Tensor) -> Iterator[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]]:
    """Yield which one of several descales is taken for all: of what, in words, and how."""
    is_pool = w.kv_pages is not None and own.dim() == 3
    if own.dim() < 2:
        return
    heads = 2 if is_pool else 1
    if own.shape[heads] > 1:
        yield "first-head", "the first head", partial(_of_head, heads, 0)
    if own.shape[0] > 1 and not is_pool:
        yield "first-batch-entry", "the first batch entry", lambda d: d[:1].expand_as(d)
        if own.shape[heads] > 1:
            yield "one-head", "the first head of the first batch entry", lambda d: d[:1].narrow(heads, 0, 1).expand_as(d)
    for head in range(1, min(own.shape[heads], _MOST_HEADS)):
        yield "one-head", f"head {head}", partial(_of_head, heads, head)
    if own.shape[heads] > 1:
        yield "one-head", "the head that has the largest", lambda d: d.amax(heads, keepdim=True).expand_as(d)
        yield "one-head", "their heads on average", lambda d: d.mean(heads, keepdim=True).expand_as(d)


def _of_head(dim: int, head: int, descale: torch.Tensor) -> torch.Tensor:
    return descale.narrow(dim, head, 1).expand_as(descale)


#: heads of which each is tried
_MOST_HEADS = 8


def _each(names: str, change: Callable[[torch.Tensor], torch.Tensor], descales: Descales) -> Descales:
    return descales._replace(**{name: change(getattr(descales, name)) for name in names})


def _with_descales(w: Workload, change: Callable[[Descales], Descales], inputs: Inputs) -> Other:
    """Multiply q, k and v by other descales than their own."""
    assert inputs.applied is not None
    taken, values = change(inputs.applied), {}
    for name in "qkv":
        if getattr(taken, name) is not getattr(inputs.applied, name):
            own, instead = (factors_of(name, d, w, inputs.page_table) for d in (inputs.applied, taken))
            value: torch.Tensor = getattr(inputs, name)
            values[name] = dequantized(value / own.where(own != 0, 1).to(value.dtype), instead)
    if w.v_in_k and "k" in values:
        values["v"] = values["k"][..., : w.v_head_dim]
    return dataclasses.replace(inputs, **values), w  # type: ignore[arg-type]


def _ignored(w: Workload) -> Iterator[tuple[str, str, dict[str, object]]]:
    scale = w.softmax_scale
    yield "scale-missing", "with scale 1: the softmax scale is missing", {"scale": 1.0}
    yield "scale-applied-twice", "with the softmax scale applied twice", {"scale": scale * scale}
    yield "scale-wrong", "with 1 / scale: scores are divided by the softmax scale", {"scale": 1 / scale}
    yield "log2e-missing", "with scale * ln 2: exp2 without its factor log2 e", {"scale": scale * math.log(2)}
    yield "log2e-not-meant", "with scale * log2 e: exp where exp2 was meant", {"scale": scale / math.log(2)}
    if w.scale is not None:
        words = "with scale 1 / sqrt(head_dim): the option scale is ignored"
        yield "scale-option-ignored", words, {"scale": None}
    named = {"alibi": "ALiBi", "bias": "the bias", "mask": "the mask"}
    for option in ("softcap", "alibi", "sinks", "bias", "score_mod", "mask"):
        if getattr(w, option):
            nothing = False if option in ("alibi", "sinks") else None
            yield f"{option.replace('_', '-')}-ignored", f"without {named.get(option, option)}", {option: nothing}
    if w.mask is None and w.q_len > 1:  # one row would see the first key alone
        yield "causal-not-asked-for", "with a causal mask that nobody asked for", {"mask": "causal"}


# -- their values ----------------------------------------------------------------------------------------------------------


def misread_options(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield other values of dropout's mask, the bias, sinks and ALiBi's slopes. drawn: as that of `attention_faults`."""
    if w.dropout and drawn.keep is not None:
        yield AttentionFault("dropout-ignored", "without dropout", of_tensors(w, lambda i: {"keep": None}))
        words = "whose dropout takes True in the keep mask for dropped"
        yield AttentionFault("keep-mask-inverted", words, _with(w, "keep", lambda keep: ~keep))
        words = "whose dropout does not divide what is left by 1 - dropout"
        yield AttentionFault("dropout-not-rescaled", words, _with(w, "v", lambda v: v.double() * (1 - w.dropout)))
        words = "whose dropout divides twice by 1 - dropout"
        yield AttentionFault("dropout-rescaled-twice", words, _with(w, "v", lambda v: v.double() / (1 - w.dropout)))
    if w.bias:
        yield from _times_a_factor(w, "bias-scaled", "bias", "bias is")
        yield from _misread_bias(w)
    yield from _misread_sinks(w)
    yield from _misread_slopes(w)


def _misread_bias(w: Workload) -> Iterator[AttentionFault]:
    for place, number, what in ((0, w.batch, "batch entries"), (1, w.heads, "heads")):
        for words, order in other_places(number) if "bh"[place] in (w.bias or "") else ():
            fault = f"bias-of-another-{('batch-entry', 'head')[place]}"
            yield AttentionFault(
                fault, f"with the bias of other {what}: {words}", _with(w, "bias", partial(in_order, place, order))
            )
    for tile in TILES:
        for place, length, what in ((2, w.q_len, "rows"), (3, w.kv_len, "keys")):
            if length > tile:
                words = f"whose bias is added to the first {tile} {what} only"
                only = _with(w, "bias", partial(_first_tile_of, place, length, tile))
                yield AttentionFault("bias-of-first-tile-only", words, only)
                words = f"whose bias is that of the first of {tile} {what} for the whole tile"
                constant = _with(w, "bias", partial(_constant_in_tiles, place, tile))
                yield AttentionFault("bias-within-tile-constant", words, constant)


def _first_tile_of(place: int, length: int, tile: int, bias: torch.Tensor) -> torch.Tensor:
    at = torch.arange(length, device=bias.device).view(-1, *[1] * (3 - place))
    return bias.masked_fill(at >= tile, 0)


def _constant_in_tiles(place: int, tile: int, bias: torch.Tensor) -> torch.Tensor:
    at = torch.arange(bias.shape[place], device=bias.device)
    return bias.index_select(place, at // tile * tile)


def _with(w: Workload, names: str, changed: Callable[..., torch.Tensor]) -> Callable[[Inputs], Other]:
    return of_tensors(w, lambda inputs: {name: changed(getattr(inputs, name)) for name in names.split()})


def _times_a_factor(w: Workload, scaled: str, tensor: str, whose: str) -> Iterator[AttentionFault]:
    """Yield an option that gets a factor of scores which it should not, or lacks one. scaled: the first one's identity."""
    option = scaled.removesuffix("-scaled")
    for fault, factor, words in (
        (scaled, w.softmax_scale, "scaled like the scores"),
        (f"log2e-missing-in-{option}", math.log(2), "taken as of base 2: its factor log2 e is missing"),
        (f"log2e-not-meant-in-{option}", 1 / math.log(2), "multiplied by log2 e, though scores are not"),
    ):
        yield AttentionFault(fault, f"whose {whose} {words}", _with(w, tensor, lambda t, factor=factor: t.double() * factor))


def _misread_sinks(w: Workload) -> Iterator[AttentionFault]:
    if not w.sinks:
        return
    yield from _times_a_factor(w, "sinks-scaled", "sinks", "sinks are")
    for times in (2, 3, 4, 8):
        words = f"that counts each sink {times} times, as if once for every split of the keys"
        counted = _with(w, "sinks", lambda sinks, times=times: sinks.double() + math.log(times))
        yield AttentionFault("sink-in-every-split", words, counted)
    for dtype in ("bfloat16", "float16"):
        if dtype != w.sinks_dtype:
            words = f"with sinks rounded to {dtype}"
            yield AttentionFault("sinks-rounded", words, _with(w, "sinks", partial(_rounded, getattr(torch, dtype))))
    yield from _of_another_head(w, "sinks", "the sink", "sink-of-another-head", "sink-of-key-head")


def _rounded(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype)


def _misread_slopes(w: Workload) -> Iterator[AttentionFault]:
    if not w.alibi:
        return
    if w.alibi == "batch":
        words = "with ALiBi's slopes of the first batch entry for all"
        of_first = _with(w, "alibi_slopes", lambda slopes: slopes[:1].expand_as(slopes))
        yield AttentionFault("alibi-slopes-of-first-batch-entry", words, of_first)
    words = "whose ALiBi has the wrong sign"
    yield AttentionFault("alibi-sign-flipped", words, _with(w, "alibi_slopes", lambda slopes: -slopes))
    words = "whose ALiBi slopes are 2 ** (-8 h / heads), not 2 ** (-8 (h + 1) / heads)"
    of_next = _with(w, "alibi_slopes", lambda slopes: slopes * 2 ** (8 / w.heads))
    yield AttentionFault("alibi-slope-of-next-power", words, of_next)
    if w.alibi is True and w.heads & (w.heads - 1):
        words = "with the slopes of ALiBi's paper for a number of heads that is not a power of two"
        yield AttentionFault("alibi-slopes-of-paper", words, _with(w, "alibi_slopes", _slopes_of_paper))
    yield from _times_a_factor(w, "alibi-scaled", "alibi_slopes", "ALiBi is")
    identities = "alibi-slope-of-another-head", "alibi-slope-of-key-head"
    yield from _of_another_head(w, "alibi_slopes", "ALiBi's slope", *identities)


def _slopes_of_paper(slopes: torch.Tensor) -> torch.Tensor:
    """Return those of the next smaller power of two, and every other one of twice as many (Press et al., 2022)."""
    heads = slopes.shape[-1]
    power = 1 << heads.bit_length() - 1
    first = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    more = [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return slopes.new_tensor(first + more)


def _of_another_head(w: Workload, tensor: str, words: str, fault: str, fault_of_key_head: str) -> Iterator[AttentionFault]:
    """Yield what heads take for their own of a tensor (..., heads)."""
    for whose, order in other_places(w.heads):
        yield AttentionFault(fault, f"with {words} of other heads: {whose}", _with(w, tensor, partial(in_order, -1, order)))
    if w.group > 1:
        of_key_head = _with(w, tensor, partial(in_order, -1, [*key_heads(w)]))
        yield AttentionFault(fault_of_key_head, f"with {words} of the key head, not of the query head", of_key_head)


# -- their places ----------------------------------------------------------------------------------------------------------


def misplaced_options(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield another order in which scores are modified, and rows that are counted from elsewhere."""
    yield from _misplaced_softcap(w, drawn)
    if (band := _window(w)) is not None:
        left, right, top_left = band
        over = sequences_of(w, drawn.device)
        for words, shift in (("early", 1), ("late", -1)):
            moved = in_band(Band(left + shift, right - shift, top_left), over)
            yield AttentionFault("window-shifted", f"whose window stands one key too {words}", of_workload(w, mask=moved))
    if w.alibi:
        lengths = [kv_len - q_len for q_len, kv_len in sequence_lengths(w)]
        if any(lengths):
            words = "whose ALiBi counts rows from the first key, not up to the last"
            yield AttentionFault("alibi-from-first-key", words, partial(_with_alibi, w, lambda b, q, kv: (q - kv).abs()))
        words = "whose ALiBi is that of causal attention, which rewards the keys of the future"
        one_sided = partial(_with_alibi, w, lambda b, q, kv: q + b.new_tensor(lengths)[b] - kv)
        yield AttentionFault("alibi-one-sided", words, one_sided)
    if (mod := w.score_mod) is not None:
        for tile in (tile for tile in TILES[1:] if w.q_len > tile):
            words = f"whose score_mod counts rows within tiles of {tile}"
            local = of_workload(w, score_mod=lambda s, b, h, q, kv, tile=tile: mod(s, b, h, q % tile, kv))
            yield AttentionFault("score-mod-rows-within-tile", words, local)


def _window(w: Workload) -> tuple[int, int, bool] | None:
    """Return the mask as a window that ends on both sides, None where it is none."""
    left, right, top_left = w.band or Band(None, None, top_left=False)
    return None if left is None or right is None else (left, right, top_left)


def _misplaced_softcap(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    cap = w.softcap
    if cap is None:
        return
    if not w.alibi and (w.bias is None or w.bias_before_softcap):
        words = "whose softcap cuts scores off at -cap and cap, without tanh"
        cut = modified_by(w, lambda s, *index: s.clamp(-cap, cap))
        yield AttentionFault("softcap-cuts-off", words, of_workload(w, softcap=None, score_mod=cut))
    if not w.alibi and not w.bias:
        words = "with the softcap before the scale: it caps q . k, not scale * q . k"
        scale = w.softmax_scale
        before = modified_by(w, lambda s, *index: scale * cap * (s / scale / cap).tanh())
        yield AttentionFault("softcap-before-scale", words, of_workload(w, softcap=None, score_mod=before))
        words = "whose softcap is multiplied back by the score: s / cap * tanh(s / cap)"
        by_score = modified_by(w, lambda s, *index: s / cap * (s / cap).tanh())
        yield AttentionFault("softcap-not-multiplied-back", words, of_workload(w, softcap=None, score_mod=by_score))
    words = "whose softcap is not multiplied back: tanh(s / cap)"
    yield AttentionFault("softcap-not-multiplied-back", words, partial(_with_softcap_as_factor_1, w))
    if w.bias and w.bias_before_softcap:
        words = "with the softcap before the bias, not after"
        yield AttentionFault("softcap-before-bias", words, of_workload(w, bias_before_softcap=False))
    elif w.bias:
        words = "with the softcap after the bias, not before"
        yield AttentionFault("softcap-after-bias", words, of_workload(w, bias_before_softcap=True))
    if w.mask is not None:
        visible = seen_by(drawn, w)
        words = "with the softcap after the mask: hidden scores are -cap, not -inf"
        after = modified_by(w, lambda s, *index: s.where(visible(*index), -cap))
        yield AttentionFault("softcap-after-mask", words, of_workload(w, mask=None, score_mod=after))


def modified_by(w: Workload, step: ScoreMod) -> ScoreMod:
    """Return what modifies scores by a step, after softcap, bias and ALiBi, and then by the workload's score_mod."""
    mod = w.score_mod

    def both(s: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        s = step(s, *index)
        return s if mod is None else mod(s, *index)

    return both


def _with_softcap_as_factor_1(w: Workload, inputs: Inputs) -> Other:
    cap = w.softcap
    assert cap is not None

    def bias(index: tuple[torch.Tensor, ...]) -> torch.Tensor | float:
        if inputs.bias is None or not w.bias:
            return 0.0
        return inputs.bias.expand(w.batch, w.heads, w.q_len, w.kv_len)[index].double()

    def capped(s: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        if w.bias_before_softcap:
            return ((s + bias(index)) / cap).tanh()
        return (s / cap).tanh() + bias(index)

    return inputs, w.replace(score_mod=modified_by(w, capped), softcap=None, bias=None)


def _with_alibi(w: Workload, distance: Callable[..., torch.Tensor], inputs: Inputs) -> Other:
    slopes = inputs.alibi_slopes
    assert slopes is not None

    def biased(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return s - slopes_of(slopes.to(h.device).double(), b, h) * distance(b, q, kv)

    return inputs, w.replace(score_mod=modified_by(w, biased), alibi=False)


# -- roundings -------------------------------------------------------------------------------------------------------------


def roundings(profile: Precision, w: Workload, smaller: str = "") -> Iterator[Callable[[Inputs], Other]]:
    """Yield attention that rounds to the bit where kernels of a profile do; nothing where only its sums are rounded.

    Kernels differ in the order of their steps, so one of these must fit, and need not do so to the bit. smaller: the dtype to
    which they round, by default the workload's.
    """
    dtype = getattr(torch, smaller or w.out_dtype)
    rounded = partial(_rounded, dtype)
    if profile.rounds_scores:
        once = modified_by(w, lambda s, *index: rounded(s))
        yield of_workload(w, score_mod=once)
        if not (w.softcap or w.bias or w.alibi or w.score_mod):

            def of_products(scores: torch.Tensor) -> torch.Tensor:
                return rounded(scores / w.softmax_scale).double() * w.softmax_scale

            yield of_workload(w, score_mod=lambda s, *index: of_products(s))
            yield of_workload(w, score_mod=lambda s, *index: rounded(of_products(s)))
    for is_rounded, name in ((profile.rounds_scaled_query, "q"), (profile.rounds_scaled_key, "k")):
        for factor in (w.softmax_scale, w.softmax_scale / math.log(2)) if is_rounded else ():
            yield _with(w, name, lambda t, factor=factor: rounded(t.double() * factor).double() / factor)
    if profile.rounds_sinks and w.sinks:
        yield _with(w, "sinks", lambda sinks: (sinks / math.log(2)).double() * math.log(2))
    if profile.operand_unit and w.dtype == "float32":
        for added in (0, 0x1000):
            yield of_tensors(w, partial(_cut, added))


def rounded_scores(w: Workload) -> Iterator[AttentionFault]:
    """Yield attention whose scores are rounded to another dtype than the workload's."""
    for dtype in ("float16", "bfloat16"):
        for attention in roundings(PRECISIONS["eager"], w, dtype) if dtype != w.out_dtype else ():
            yield AttentionFault("scores-rounded", f"whose scores are rounded to {dtype}", attention)


def _cut(added: int, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Keep 10 bits of the fraction; added to the bits before: 0x1000 to round to nearest."""
    bits = {name: getattr(inputs, name).contiguous().view(torch.int32) for name in ("q", "k", "v", "dout")}
    return {name: ((whole + added) & ~0x1FFF).view(torch.float32) for name, whole in bits.items()}
