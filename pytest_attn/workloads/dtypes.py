"""The dtypes of workloads: one table of what a number of each can hold, from which every unit of rounding follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """One dtype of torch.

    name: torch's; short: in ids. size: bytes of an element. bits: significant bits, the leading one included. lowest: the
    exponent of the smallest number above 0. largest: its largest number, of int8 without -128, as
    quantizers do. poison: bits of a NaN that no arithmetic makes.
    is_quantized: its tensors come with descales. is_whole: it has integers only.
    """

    name: str
    short: str
    size: int
    bits: int
    lowest: int
    largest: float
    poison: int | None = None
    is_quantized: bool = False
    is_whole: bool = False

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
        """Whether kernels add up in float32 what they round to it."""
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


def dtype_name(dtype: object) -> str:
    """Return the full name of a dtype given as "bf16", "bfloat16" or torch.bfloat16; raise ValueError otherwise."""
    return "float16" if str(dtype) == "half" else known_dtype("dtype", dtype, FLOATING_DTYPES)


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
