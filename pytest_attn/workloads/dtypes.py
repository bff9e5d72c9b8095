"""The dtypes of workloads: a table of what a number of each can hold, and arithmetic where torch has none, on fp8 and int8."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class DType(NamedTuple):
    """One dtype of torch."""

    name: str  # torch's
    short: str  # in ids
    size: int  # bytes of an element
    bits: int  # significant ones, the leading one included
    lowest: int  # the exponent of the smallest number above 0
    largest: float  # its largest number, of int8 without -128, as quantizers do
    poison: int | None = None  # bits of a NaN that no arithmetic makes
    is_quantized: bool = False  # its tensors come with descales
    is_whole: bool = False  # it has integers only

    @property
    def spacing(self) -> float:
        """The largest relative error of one rounding to nearest, 2 ** -bits: half of torch's eps."""
        return 2.0**-self.bits

    @property
    def unit(self) -> float:
        """Root-mean-square-like relative rounding error of one rounding: half of the largest."""
        return self.spacing / 2

    @property
    def floor(self) -> float:
        """The rounding error that does not shrink any more below the smallest normal number; 0 where none is so small."""
        return 2.0 ** (self.lowest - 1) if self.lowest > -126 else 0.0

    @property
    def is_low_precision(self) -> bool:
        """True where kernels add up in float32 what they round to it."""
        return self.size <= 2


_ALL = (
    DType("bfloat16", "bf16", 2, bits=8, lowest=-133, largest=3.3895313892515355e38, poison=0x7FE5),
    DType("float16", "fp16", 2, bits=11, lowest=-24, largest=65504.0, poison=0x7E65),
    DType("float32", "fp32", 4, bits=24, lowest=-149, largest=3.4028234663852886e38, poison=0x7FE5A5A5),
    DType("float8_e4m3fn", "fp8", 1, bits=4, lowest=-9, largest=448.0, is_quantized=True),
    DType("int8", "int8", 1, bits=7, lowest=0, largest=127.0, is_quantized=True, is_whole=True),
)
#: by name: of q, k, v and out
DTYPES = {one.name: one for one in _ALL if not one.is_quantized}
#: of quantized tensors, which come with descales
QUANTIZED_DTYPES = {one.name: one for one in _ALL if one.is_quantized}
ALL_DTYPES = {one.name: one for one in _ALL}
#: those that have fractions
FLOATING_DTYPES = {one.name: one for one in _ALL if not one.is_whole}


def dtype_name(dtype: object, field: str = "dtype") -> str:
    """Return the full name of a dtype given as "bf16", "bfloat16" or torch.bfloat16; raise ValueError otherwise."""
    return "float16" if str(dtype) == "half" else known_dtype(field, dtype, FLOATING_DTYPES)


def known_dtype(field: str, dtype: object, known: dict[str, DType]) -> str:
    """Return the full name of one of the known dtypes; raise ValueError, naming the field, for any other."""
    text = str(dtype).removeprefix("torch.")
    for one in known.values():
        if text in (one.name, one.short):
            return one.name
    listed = ", ".join(f"{one.name} ({one.short})" for one in known.values())
    raise ValueError(f"unknown {field} {text!r}; known: {listed}")


def short_dtype(name: str) -> str:
    """Return a dtype's short name: "bf16" for "bfloat16"."""
    return ALL_DTYPES[name].short


def element_bytes(name: str) -> int:
    """Return the bytes of one element of a dtype."""
    return ALL_DTYPES[name].size


# -- on tensors of any dtype: torch has no arithmetic on float8, and int8 has no NaN ------------------------------------------


def is_quantized(tensor: Tensor) -> bool:
    """Return whether elements have a byte: fp8 or int8."""
    return tensor.element_size() == 1


def times(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor times a factor whose products it can hold, in its dtype."""
    return (tensor.float() * factor).to(tensor.dtype) if is_quantized(tensor) else tensor * factor


def movable(tensor: Tensor) -> Tensor:
    """Return the same memory, of fp8 and int8 as bytes: torch 2.6 neither selects nor reorders elements of fp8 on a CPU."""
    return _bytes(tensor) if is_quantized(tensor) else tensor


def mirrored(tensor: Tensor) -> Tensor:
    """Return the tensor with the elements of its last dimension in reverse."""
    return movable(tensor).flip(-1).view(tensor.dtype)


def beside(tensor: Tensor, step: int) -> Tensor:
    """Return other values of the same dtype: one more or less; of quantized tensors those of other elements."""
    return mirrored(tensor) if is_quantized(tensor) else tensor + step


def filled(tensor: Tensor, where: Tensor, value: float) -> Tensor:
    """Return a copy with a value wherever `where`, boolean and broadcastable, is True."""
    import torch

    if not is_quantized(tensor):
        return tensor.masked_fill(where, value)
    return exchanged(tensor, where, torch.full_like(tensor, value))


def exchanged(tensor: Tensor, where: Tensor, other: Tensor) -> Tensor:
    """Return a copy with the elements of another tensor wherever `where`, boolean and broadcastable, is True."""
    if not is_quantized(tensor):
        return other.where(where, tensor)
    return _bytes(other).where(where, _bytes(tensor)).view(tensor.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    import torch

    return tensor.view(torch.uint8)


def poison_of(tensor: Tensor) -> float:
    """Return NaN, or the largest number of a dtype that has no NaN."""
    return math.nan if tensor.is_floating_point() else 127.0


def is_poison(tensor: Tensor) -> Tensor:
    """Return where a tensor still holds `poison_of` it, boolean."""
    return tensor.isnan() if tensor.is_floating_point() else tensor == 127
