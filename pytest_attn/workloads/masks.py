"""Who may look at whom: the masks of attention, as plain descriptions.

A mask is a frozen description without tensors and lengths; visibility.py gives it both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pytest_attn.workloads.fields import as_tuple, short_lengths
from pytest_attn.workloads.functions import function_label, require_parameters
from pytest_attn.workloads.nearest import did_you_mean, suggests_fields

if TYPE_CHECKING:
    import torch

MaskMod: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"
ScoreMod: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"


@suggests_fields
@dataclass(frozen=True)
class Causal:
    """Query i sees keys up to i (top-left), or up to i + kv_len - q_len (bottom-right).

    Args:
        bottom_right: whether the last query stands at the last key.
    """

    bottom_right: bool = False

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return "causal-br" if self.bottom_right else "causal"


@suggests_fields
@dataclass(frozen=True)
class Window:
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

    def __post_init__(self) -> None:
        for side, value in (("left", self.left), ("right", self.right)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"Window: {side} must be a number of keys >= 0 or None (open), got {value!r}")

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"window{'inf' if self.left is None else self.left}.{'inf' if self.right is None else self.right}"


@suggests_fields
@dataclass(frozen=True)
class Document:
    """Documents laid one after the other in one sequence: a token sees its own document only.

    Args:
        lengths: tokens of each document; their sum is q_len and kv_len.
        causal: whether a token also sees nothing after itself.

    Raises:
        ValueError: a length is not a whole number >= 1.
    """

    lengths: tuple[int, ...]
    causal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", as_tuple("Document: lengths", self.lengths))
        if not self.lengths or any(not isinstance(n, int) or n < 1 for n in self.lengths):
            raise ValueError(f"Document: lengths must be whole numbers >= 1, got {self.lengths!r}")

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"documents{'-causal' if self.causal else ''}-{short_lengths(self.lengths)}"


@suggests_fields
@dataclass(frozen=True)
class Neighborhood:
    """Neighborhood attention over a 1-, 2- or 3-D token layout with NATTEN's meaning of its four parameters.

    A query sees the `kernel` nearest tokens of its dilation group; at a border the window shifts inwards.
    Source: NATTEN 0.21, the mask of its flex backend.

    Args:
        shape: tokens along each axis; their product is q_len and kv_len.
        kernel: size of the neighborhood along each axis.
        stride: queries of a group of so many share the window of their leader: the center, or the last one where causal.
        dilation: distance between neighbors.
        causal: whether an axis is causal.

    Raises:
        ValueError: the kernel does not fit into the shape, or an entry is missing.
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] | int = 1
    dilation: tuple[int, ...] | int = 1
    causal: tuple[bool, ...] | bool = False

    def __post_init__(self) -> None:
        shape = as_tuple("Neighborhood: shape", self.shape)
        object.__setattr__(self, "shape", shape)
        for name in ("kernel", "stride", "dilation", "causal"):
            value = getattr(self, name)
            values = (value,) * len(shape) if isinstance(value, int) else tuple(value)
            if not all(isinstance(v, int) for v in values):
                raise ValueError(f"Neighborhood: {name} must be whole numbers, got {value!r}")
            if len(values) != len(shape):
                raise ValueError(f"Neighborhood: {name} must have {len(shape)} entries as shape {shape}, got {value!r}")
            object.__setattr__(self, name, values)
        for size, kernel, stride, dilation, _ in axes_of(self):
            if kernel < 1 or dilation < 1 or kernel * dilation > size:
                raise ValueError(
                    f"Neighborhood: kernel {kernel} with dilation {dilation} does not fit into {size} tokens"
                    " (kernel * dilation must not exceed the size)"
                )
            if not 1 <= stride <= kernel:
                raise ValueError(f"Neighborhood: stride must be between 1 and the kernel size {kernel}, got {stride}")

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""

        def times(values: object) -> str:
            return "x".join(str(int(v)) for v in values)  # type: ignore[attr-defined]

        axes = axes_of(self)
        parts = [f"na{times(self.shape)}", f"k{times(self.kernel)}"]
        if any(axis.stride != 1 for axis in axes):
            parts.append(f"s{times(self.stride)}")
        if any(axis.dilation != 1 for axis in axes):
            parts.append(f"dil{times(self.dilation)}")
        if any(axis.causal for axis in axes):
            parts.append(f"c{times(self.causal)}")
        return "-".join(parts)


class Axis(NamedTuple):
    """A neighborhood along one axis of the token layout."""

    size: int
    kernel: int
    stride: int
    dilation: int
    causal: bool


def axes_of(mask: Neighborhood) -> list[Axis]:
    """Return the axes of a neighborhood, the outermost first."""
    assert isinstance(mask.stride, tuple)
    assert isinstance(mask.dilation, tuple)
    assert isinstance(mask.causal, tuple)
    return [*map(Axis, mask.shape, mask.kernel, mask.stride, mask.dilation, mask.causal)]


@suggests_fields
@dataclass(frozen=True)
class BooleanMask:
    """A mask given as a tensor, True = visible.

    Args:
        factory: factory(batch, heads, q_len, kv_len, device) returns a boolean tensor that broadcasts to (batch, heads,
            q_len, kv_len), with the same values on every call.

    Raises:
        ValueError: the factory takes other arguments.
    """

    factory: Callable[[int, int, int, int, torch.device], torch.Tensor]

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ValueError(f"BooleanMask: factory must be a function, got {self.factory!r}")
        require_parameters("BooleanMask", self.factory, ("batch", "heads", "q_len", "kv_len", "device"))

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"mask-{function_label(self.factory)}"


@dataclass(frozen=True)
class MaskModMask:
    """A mask given as a FlexAttention mask_mod: `fn(b, h, q_idx, kv_idx) -> bool tensor`."""

    fn: MaskMod

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"mask-{function_label(self.fn)}"


Mask: TypeAlias = "Causal | Window | Document | Neighborhood | BooleanMask | MaskModMask"


#: what others call a mask, and how it is written here
_ELSEWHERE = {
    "window": "Window(left, right)",
    "sliding-window": "Window(left, right)",
    "sliding_window": "Window(left, right)",
    "local": "Window(left, right)",
    "document": "Document(lengths)",
    "neighborhood": "Neighborhood(shape, kernel)",
    "full": "None",
    "none": "None",
}


def as_mask(mask: object) -> Mask | None:
    """Turn what a user writes as `mask=` into a mask; raise ValueError for anything else."""
    if mask is None or isinstance(mask, Causal | Window | Document | Neighborhood | BooleanMask | MaskModMask):
        return mask
    if isinstance(mask, str) and mask in ("causal", "causal-bottom-right"):
        return Causal(bottom_right=mask != "causal")
    if callable(mask):
        require_parameters("mask", mask, ("b", "h", "q_idx", "kv_idx"))
        return MaskModMask(mask)
    raise ValueError(
        f"Workload: mask must be None, 'causal', 'causal-bottom-right', Window, Document, Neighborhood, BooleanMask"
        f" or a mask_mod(b, h, q_idx, kv_idx), got {mask!r}{_suggestion(mask)}"
    )


def _suggestion(mask: object) -> str:
    """Say which mask was meant: a word typed wrongly, one of other libraries, or a class where an object is expected."""
    if isinstance(mask, str):
        words = {"causal": "causal", "causal-bottom-right": "causal-bottom-right", **_ELSEWHERE}
        meant = did_you_mean(mask.lower().replace("_", "-"), words)
        if mask.lower() in _ELSEWHERE:
            return f"; say mask={_ELSEWHERE[mask.lower()]}"
        return f";{meant}" if meant else ""
    if isinstance(mask, tuple) and len(mask) == 2:  # flash-attention's window_size, where -1 is open
        left, right = (None if side == -1 else side for side in mask)
        return f"; did you mean Window({left}, {right})?"
    if isinstance(mask, bool):
        return "; did you mean 'causal'?" if mask else "; did you mean None?"
    return ""
