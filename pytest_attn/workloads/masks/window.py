"""Sliding windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from pytest_attn.workloads.fields import suggests_fields
from pytest_attn.workloads.masks.band import BandMask, in_band
from pytest_attn.workloads.masks.mask import Band, Choices, Mask, NearMiss, Sequences

if TYPE_CHECKING:
    from typing_extensions import Self


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

    kinds: ClassVar[tuple[str, ...]] = ("window",)
    capabilities: ClassVar[tuple[str, ...]] = ("window",)
    words: ClassVar[str] = "sliding window"
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("window", "sliding-window", "sliding_window", "local"), "Window(left, right)"
    )

    def __post_init__(self) -> None:
        for side, value in (("left", self.left), ("right", self.right)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"Window: {side} must be a number of keys >= 0 or None (open), got {value!r}")

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"window{'inf' if self.left is None else self.left}.{'inf' if self.right is None else self.right}"

    @property
    def band(self) -> Band:
        """Its sides, aligned to the last key."""
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
        """Choose both sides."""
        return cls(choices.count_or_none(0, choices.max_rows), choices.count_or_none(0, choices.max_rows))

    def another(self) -> tuple[str, Mask]:
        """Return a larger one, or one with a left end."""
        return "a window of another size", replace(self, left=7 if self.left is None else self.left + 3)

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        """Yield edges that are one key off, or open, and rows that are taken to stand elsewhere."""
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
