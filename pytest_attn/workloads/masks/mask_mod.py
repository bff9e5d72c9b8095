"""Masks given as FlexAttention's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_attn.workloads.functions import require_parameters
from pytest_attn.workloads.masks.boolean import FunctionMask
from pytest_attn.workloads.masks.mask import Choices, Mask, MaskMod, Sequences

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


@dataclass(frozen=True)
class MaskModMask(FunctionMask):
    """A mask given as a FlexAttention mask_mod: `fn(b, h, q_idx, kv_idx) -> bool tensor`."""

    fn: MaskMod

    kinds: ClassVar[tuple[str, ...]] = ("mask_mod",)

    @property
    def function(self) -> MaskMod:
        """The mask_mod."""
        return self.fn

    def tensor(self, over: Sequences) -> torch.Tensor:
        """Call the function for all positions at once."""
        return self.fn(*over.index())

    def bind(self, over: Sequences) -> MaskMod:
        """Return the function as it is."""
        return self.fn

    @classmethod
    def spellings(cls) -> tuple[str, ...]:
        """As the function itself."""
        return ("a mask_mod(b, h, q_idx, kv_idx)",)

    @classmethod
    def read(cls, written: object) -> Self | None:
        """Read functions; raise ValueError for one of other parameters."""
        if not callable(written):
            return None
        require_parameters("mask", written, ("b", "h", "q_idx", "kv_idx"))
        return cls(written)

    def source(self, write_function: Callable[[Callable[..., Any]], str]) -> str:
        """Return the function's name."""
        return write_function(self.fn)

    def another(self) -> tuple[str, Mask]:
        """Return one that hides some keys."""
        return "a mask function that hides every third key", MaskModMask(_two_of_three)

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        """Take a prefix that all see."""
        return cls(prefix_of_four)


def prefix_of_four(_b: object, _h: object, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A mask_mod: four keys that all see, causal after them."""
    return (kv_idx <= q_idx) | (kv_idx < 4)


def _two_of_three(_b: object, _h: object, _q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return kv_idx % 3 != 1
