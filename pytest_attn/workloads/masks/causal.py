"""Causal masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_attn.workloads.fields import suggests_fields
from pytest_attn.workloads.masks.band import BandMask
from pytest_attn.workloads.masks.mask import Band, Choices, NearMiss, Needed, Sequences

if TYPE_CHECKING:
    from typing_extensions import Self


@suggests_fields
@dataclass(frozen=True)
class Causal(BandMask):
    """Query i sees keys up to i (top-left), or up to i + kv_len - q_len (bottom-right).

    Args:
        bottom_right: whether the last query stands at the last key.
    """

    bottom_right: bool = False

    kinds: ClassVar[tuple[str, ...]] = ("causal", "causal-bottom-right")
    strings: ClassVar[tuple[str, ...]] = kinds
    capabilities: ClassVar[tuple[str, ...]] = ("top-left", "bottom-right")
    words: ClassVar[str] = "causal mask"

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return "causal-br" if self.bottom_right else "causal"

    @property
    def kind(self) -> str:
        """By its alignment."""
        return "causal-bottom-right" if self.bottom_right else "causal"

    @property
    def band(self) -> Band:
        """All keys before, none after."""
        return Band(None, 0, top_left=not self.bottom_right)

    @property
    def is_causal(self) -> bool:
        """It is."""
        return True

    def needs(self, is_aligned: bool) -> Needed:
        """Either alignment will do where both are the same."""
        if is_aligned:
            return super().needs(is_aligned)
        alignment = "bottom-right" if self.bottom_right else "top-left"
        return Needed(frozenset((alignment,)), f"causal mask aligned {alignment}")

    @classmethod
    def spellings(cls) -> tuple[str, ...]:
        """As strings."""
        return tuple(f"'{string}'" for string in cls.strings)

    @classmethod
    def read(cls, written: object) -> Self | None:
        """Read "causal" and "causal-bottom-right"."""
        return cls(bottom_right=written != "causal") if isinstance(written, str) and written in cls.strings else None

    @classmethod
    def meant(cls, written: object) -> str:
        """Understand is_causal=True."""
        return "'causal'" if written is True else ""

    def source(self, write_function: Callable[[Callable[..., Any]], str]) -> str:
        """Return the string."""
        return f'"{self.kind}"'

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        """Nothing is left to choose."""
        return cls(bottom_right=kind != "causal")

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        """Yield the other alignment, and an edge that is one key off."""
        if not over.are_square:
            other = Causal(not self.bottom_right)
            yield NearMiss("causal-other-alignment", f"with the other causal alignment ({other.kind})", other)
        words = "with a causal mask that shows one key too many"
        yield NearMiss("causal-shows-next-key", words, self.with_edges_moved(over, right=1))
        words = "with a causal mask that hides the diagonal"
        yield NearMiss("causal-hides-diagonal", words, self.with_edges_moved(over, right=-1))
        yield from self.aligned_as_the_longest(over)
