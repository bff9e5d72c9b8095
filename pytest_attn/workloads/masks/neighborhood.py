"""Neighborhood attention, with NATTEN's meaning of its parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pytest_attn.workloads.fields import as_tuple, suggests_fields
from pytest_attn.workloads.masks.mask import Choices, Mask, MaskMod, NearMiss, Sequences

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class Axis(NamedTuple):
    """A neighborhood along one axis of the token layout."""

    size: int
    kernel: int
    stride: int
    dilation: int
    causal: bool


@suggests_fields
@dataclass(frozen=True)
class Neighborhood(Mask):
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

    kinds = ("neighborhood",)
    capabilities = ("neighborhood",)
    words = "neighborhood mask"
    is_square = True
    is_packable = False
    elsewhere: ClassVar[Mapping[str, str]] = {"neighborhood": "Neighborhood(shape, kernel)"}

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
        for size, kernel, stride, dilation, _ in self.axes:
            if kernel < 1 or dilation < 1 or kernel * dilation > size:
                raise ValueError(
                    f"Neighborhood: kernel {kernel} with dilation {dilation} does not fit into {size} tokens"
                    " (kernel * dilation must not exceed the size)"
                )
            if not 1 <= stride <= kernel:
                raise ValueError(f"Neighborhood: stride must be between 1 and the kernel size {kernel}, got {stride}")

    @property
    def axes(self) -> list[Axis]:
        """The axes, the outermost first."""
        assert isinstance(self.stride, tuple)
        assert isinstance(self.dilation, tuple)
        assert isinstance(self.causal, tuple)
        return [*map(Axis, self.shape, self.kernel, self.stride, self.dilation, self.causal)]

    @property
    def label(self) -> str:
        def times(values: object) -> str:
            return "x".join(str(int(v)) for v in values)  # type: ignore[attr-defined]

        axes = self.axes
        parts = [f"na{times(self.shape)}", f"k{times(self.kernel)}"]
        if any(axis.stride != 1 for axis in axes):
            parts.append(f"s{times(self.stride)}")
        if any(axis.dilation != 1 for axis in axes):
            parts.append(f"dil{times(self.dilation)}")
        if any(axis.causal for axis in axes):
            parts.append(f"c{times(self.causal)}")
        return "-".join(parts)

    @property
    def tokens(self) -> int:
        return math.prod(self.shape)

    def bind(self, over: Sequences) -> MaskMod:
        import torch

        axes = self.axes[::-1]  # the innermost first, as positions count

        def near(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            visible = kv >= 0
            for size, kernel, stride, dilation, causal in axes:
                q_at, kv_at = q % size, kv % size
                q, kv = q // size, kv // size
                group = q_at % dilation
                q_pos, kv_pos = q_at // dilation, kv_at // dilation
                last = (size - 1 - group) // dilation  # last position of this dilation group
                if causal:
                    leader = torch.minimum(q_pos // stride * stride + stride - 1, last)
                    here = (kv_pos <= q_pos) & (leader - kv_pos < kernel)
                else:
                    leader = torch.minimum(q_pos // stride * stride + stride // 2, last)
                    start = torch.minimum(torch.clamp(leader - kernel // 2, min=0), last + 1 - kernel)
                    here = (kv_pos >= start) & (kv_pos < start + kernel)
                visible = visible & here & (kv_at % dilation == group)
            return visible

        return near

    def pairs(self, q_len: int, kv_len: int) -> int:
        total = 1
        for size, kernel, stride, dilation, causal in self.axes:
            if not causal:
                total *= size * kernel
                continue
            pairs = 0
            for at in range(size):
                position, last = at // dilation, (size - 1 - at % dilation) // dilation
                leader = min(position // stride * stride + stride - 1, last)
                pairs += position - max(0, leader - kernel + 1) + 1
            total *= pairs
        return total

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        axes = choices.count(1, 3)
        longest = max(1, math.floor(choices.max_rows ** (1 / axes) + 1e-9))
        sizes = [choices.count(1, longest) for _ in range(axes)]
        kernels = [choices.count(1, size) for size in sizes]
        dilations = [choices.count(1, size // kernel) for size, kernel in zip(sizes, kernels, strict=True)]
        strides = [choices.count(1, kernel) for kernel in kernels]
        causal = [choices.flag() for _ in sizes]
        return cls(tuple(sizes), tuple(kernels), tuple(strides), tuple(dilations), tuple(causal))

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        for axis in range(len(self.shape)):
            for more, much in ((1, "larger"), (-1, "smaller")):
                kernel = tuple(size + more * (at == axis) for at, size in enumerate(self.kernel))
                words = f"whose neighborhood is one token {much} along axis {axis}"
                try:
                    yield NearMiss(f"neighborhood-one-{much}", words, dataclasses.replace(self, kernel=kernel))
                except ValueError:  # it does not fit into the layout
                    continue
        if any(axis.causal for axis in self.axes):
            not_causal = dataclasses.replace(self, causal=False)
            yield NearMiss("neighborhood-not-causal", "whose neighborhood is not causal", not_causal)
