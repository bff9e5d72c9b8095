"""Masks that are a band along the diagonal: causal masks and sliding windows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.fields import is_whole, suggests_fields
from pytest_attn.workloads.masks.mask import Band, Choices, Mask, MaskMod, NearMiss, Sequences, all_keys

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class BandMask(Mask):
    """A mask that its `band` describes."""

    has_intervals = True

    @property
    @abstractmethod
    def band(self) -> Band:
        """The band."""

    def bind(self, over: Sequences) -> MaskMod:
        return in_band(self.band, over)

    def interval(self, row: int, q_len: int, kv_len: int) -> tuple[int, int]:
        left, right, top_left = self.band
        position = row if top_left else row + kv_len - q_len
        start = 0 if left is None else max(0, position - left)
        end = kv_len if right is None else min(kv_len, position + right + 1)
        return min(start, kv_len), max(min(start, kv_len), end)

    def intervals(self, rows: torch.Tensor, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        left, right, top_left = self.band
        nothing, everything = all_keys(rows, kv_len)
        position = rows if top_left else rows + kv_len - q_len
        start = nothing if left is None else (position - left).clamp(0, kv_len)
        end = everything if right is None else (position + right + 1).clamp(max=kv_len)
        return start, end.maximum(start)

    def pairs(self, q_len: int, kv_len: int) -> int:
        left, right, top_left = self.band
        shift = 0 if top_left else kv_len - q_len
        ends = q_len * kv_len if right is None else _clamped_sum(shift + right + 1, q_len, kv_len)
        starts = 0 if left is None else _clamped_sum(shift - left, q_len, kv_len)
        return max(0, ends - starts)

    def with_edges_moved(self, over: Sequences, left: int = 0, right: int = 0) -> MaskMod:
        """Return the mask with its edges further out by so many keys."""

        def moved(side: int | None, keys: int) -> int | None:
            return None if side is None else side + keys

        band = self.band
        return in_band(Band(moved(band.left, left), moved(band.right, right), band.top_left), over)

    def aligned_as_the_longest(self, over: Sequences) -> Iterator[NearMiss]:
        """Yield the mask whose rows stand, in all sequences, where those of the longest do."""
        if not self.band.top_left and len({kv_len - q_len for q_len, kv_len in over.lengths}) > 1:
            words = "that aligns all sequences as the longest one, not each to its own last key"
            longest = Sequences(over.batch, over.heads, over.q_len, over.kv_len, over.device)
            yield NearMiss("aligned-as-longest-sequence", words, in_band(self.band, longest))


def in_band(band: Band, over: Sequences) -> MaskMod:
    """Return a band as a predicate; its sides may be negative."""
    left, right, top_left = band
    q_lens = over.q_len if over.q_lens is None else over.q_lens
    kv_lens = over.kv_len if over.kv_lens is None else over.kv_lens

    def inside(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        queries = q_lens if isinstance(q_lens, int) else q_lens[b]
        keys = kv_lens if isinstance(kv_lens, int) else kv_lens[b]
        position = q if top_left else q + (keys - queries)
        visible = kv >= 0
        if right is not None:
            visible = visible & (kv <= position + right)
        if left is not None:
            visible = visible & (kv >= position - left)
        return visible

    return inside


def _clamped_sum(shift: int, count: int, most: int) -> int:
    """Return the sum of min(max(i + shift, 0), most) over i = 0 ... count - 1."""
    first, last = max(0, -shift), min(count, most - shift)  # between these it grows by one
    growing = max(0, last - first)
    full = count - max(first, last, 0) if first < count else 0
    return growing * (first + shift) + growing * (growing - 1) // 2 + max(0, full) * most


@suggests_fields
@dataclass(frozen=True)
class Causal(BandMask):
    """Query i sees keys up to i (aligned to the first key), or up to i + kv_len - q_len (to the last).

    Args:
        bottom_right: whether the last query stands at the last key.
    """

    bottom_right: bool = False

    kinds = ("causal", "causal-bottom-right")
    strings = kinds
    spellings = ("'causal'", "'causal-bottom-right'")
    capabilities = kinds
    words = "causal mask"

    @property
    def label(self) -> str:
        return "causal-br" if self.bottom_right else "causal"

    @property
    def kind(self) -> str:
        return "causal-bottom-right" if self.bottom_right else "causal"

    @property
    def band(self) -> Band:
        return Band(None, 0, top_left=not self.bottom_right)

    @property
    def is_causal(self) -> bool:
        return True

    def needs(self, is_aligned: bool) -> tuple[frozenset[str], str]:
        """Either alignment will do where both are the same."""
        if is_aligned:
            return super().needs(is_aligned)
        return frozenset((self.kind,)), f"causal mask aligned to the {'last' if self.bottom_right else 'first'} key"

    @classmethod
    def read(cls, written: object) -> Self | None:
        return cls(bottom_right=written != "causal") if isinstance(written, str) and written in cls.strings else None

    @classmethod
    def meant(cls, written: object) -> str:
        return "'causal'" if written is True else ""

    def source(self, write_function: Callable[[Callable[..., Any]], str]) -> str:
        return f'"{self.kind}"'

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        return cls(bottom_right=kind != "causal")

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        if not over.are_square:
            other = Causal(not self.bottom_right)
            yield NearMiss("causal-other-alignment", f"with the other causal alignment ({other.kind})", other)
        words = "with a causal mask that shows one key too many"
        yield NearMiss("causal-shows-next-key", words, self.with_edges_moved(over, right=1))
        words = "with a causal mask that hides the diagonal"
        yield NearMiss("causal-hides-diagonal", words, self.with_edges_moved(over, right=-1))
        yield from self.aligned_as_the_longest(over)


@suggests_fields
@dataclass(frozen=True)
class Window(BandMask):
    """A sliding window: query i stands at key p = i + kv_len - q_len and sees keys p - left .. p + right, ends included.

    The alignment is bottom-right, as in flash-attention, so `Window(None, 0)` equals "causal-bottom-right" and, for q_len
    == kv_len, "causal".

    Args:
        left: how many keys before p are seen; None leaves that side open.
        right: how many keys after p are seen; None leaves that side open.

    Raises:
        ValueError: a side is not a number of keys >= 0.
    """

    left: int | None = None
    right: int | None = None

    kinds = ("window",)
    capabilities = ("window",)
    words = "sliding window"
    elsewhere = dict.fromkeys(("window", "sliding-window", "sliding_window", "local"), "Window(left, right)")

    def __post_init__(self) -> None:
        for side, value in (("left", self.left), ("right", self.right)):
            if value is not None and not is_whole(value, 0):
                raise ValueError(f"Window: {side} must be a number of keys >= 0 or None (open), got {value!r}")

    @property
    def label(self) -> str:
        return f"window{'inf' if self.left is None else self.left}.{'inf' if self.right is None else self.right}"

    @property
    def band(self) -> Band:
        return Band(self.left, self.right, top_left=False)

    @classmethod
    def meant(cls, written: object) -> str:
        """Understand flash-attention's window_size, a pair in which -1 is open."""
        if not isinstance(written, tuple) or len(written) != 2:
            return ""
        left, right = (None if side == -1 else side for side in written)
        return f"Window({left}, {right})"

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        return cls(choices.count_or_none(0, choices.max_rows), choices.count_or_none(0, choices.max_rows))

    def another(self) -> tuple[str, Mask]:
        return "a window of another size", replace(self, left=7 if self.left is None else self.left + 3)

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        for side, keys in (("left", self.left), ("right", self.right)):
            if keys is not None:
                for much, by in (("long", 1), ("short", -1)):
                    words = f"whose window is one key too {much} on the {side}"
                    yield NearMiss(f"window-{side}-one-too-{much}", words, self.with_edges_moved(over, **{side: by}))
                ignored = in_band(Band(**{**self.band._asdict(), side: None}), over)
                yield NearMiss(f"window-{side}-ignored", f"whose {side} window is ignored", ignored)
        yield from self.aligned_as_the_longest(over)
        if not over.are_square:
            words = "whose window is aligned to the first key, not to the last"
            yield NearMiss("window-other-alignment", words, in_band(self.band._replace(top_left=True), over))
