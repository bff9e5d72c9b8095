"""Quantized q, k and v: the descales that they come with, and the values that they stand for.

The values of a tensor are its elements times its descale. Descales are small numbers whose products with every element are
exact in bfloat16: so a kernel that dequantizes first rounds no more than one that multiplies scores and sums by descales.
They do not depend on the distribution of the inputs, because a callable closes over them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.workloads.dtypes import QUANTIZED_DTYPES
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: descales of e4m3, which has 4 significant bits, have 4 more, so that the 8 of bfloat16 hold the product
_EIGHTHS, _EXPONENTS = (9, 13, 11, 15, 10), (0, -2, 1, -1)
#: descales of int8 are powers of two: 2 ** -5, 2 ** -3, 2 ** -4
_INT8_EXPONENTS = (-5, -3, -4)
#: where q, k and v begin in the sequences above, so that no two of them have equal descales
_FIRST = {"q": 0, "k": 6, "v": 13}


class Descales(NamedTuple):
    """What q, k and v are multiplied by to give their values: float32 tensors, None for a tensor in its own values.

    Per tensor (); per head (batch, kv_heads), that of q too; per token (batch, heads, q_len) and (batch, kv_heads, kv_len).
    If the workload has kv_pages, those of k and v per token lie in pools (pages, page size, kv_heads).
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor

    def to(self, device: torch.device) -> Descales:
        """Return them on another device."""
        return Descales(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]

    def clone(self) -> Descales:
        """Return copies."""
        return Descales(*(None if t is None else t.clone() for t in self))  # type: ignore[arg-type]


def dtype_of(name: str, w: Workload) -> str:
    """Return the dtype of q, k or v."""
    return w.dtype if name == "q" else w.kv_dtype or w.dtype


def dense_descales(w: Workload, device: torch.device) -> Descales:
    """Return the descales of a workload, those per token as of dense keys."""
    per_head = (w.batch, w.kv_heads)
    of_q, of_keys = {
        "tensor": ((), ()),
        "head": (per_head, per_head),
        "token": ((w.batch, w.heads, w.q_len), (*per_head, w.kv_len)),
    }[w.descales or "tensor"]
    q = _values("q", w, of_q, device) if dtype_of("q", w) in QUANTIZED_DTYPES else None
    k, v = (_values(name, w, of_keys, device) for name in "kv")
    return Descales(q, k, k if w.v_in_k else v)


def _values(name: str, w: Workload, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return descales of which neighbors differ by more than rounding hides."""
    import torch

    number = torch.arange(math.prod(shape), dtype=torch.int64) + _FIRST[name]
    if dtype_of(name, w) == "int8":
        values = torch.tensor(_INT8_EXPONENTS)[number % len(_INT8_EXPONENTS)].float().exp2()
    else:
        values = torch.tensor(_EIGHTHS)[number % len(_EIGHTHS)] / 8
        values = values * torch.tensor(_EXPONENTS)[number % len(_EXPONENTS)].float().exp2()
    return values.view(shape).to(device)


def quantized(tensor: torch.Tensor, factors: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the elements whose products with `factors` are nearest to the tensor, as far as the dtype reaches."""
    import torch

    to = QUANTIZED_DTYPES[dtype]
    scaled = (tensor.float() / factors.where(factors != 0, 1)).clamp(-to.largest, to.largest)
    return (scaled.round() if to.is_whole else scaled).to(getattr(torch, dtype))


def dequantized(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the values that elements stand for, exactly: in float64, in float32 on a device without it."""
    import torch

    exact = torch.float32 if tensor.device.type == "mps" else torch.float64
    return tensor.to(exact) * factors.to(exact)


def factors_of(name: str, descales: Descales, w: Workload, page_table: torch.Tensor | None) -> torch.Tensor:
    """Return what q, k or v is multiplied by, broadcastable to it in its native layout."""
    factors: torch.Tensor | None = getattr(descales, name)
    assert factors is not None
    if factors.dim() == 0:
        return factors
    if factors.dim() == 3:  # per token, with the dimensions of the tensor itself
        return factors.unsqueeze(-1)
    if name == "q":
        factors = factors.repeat_interleave(w.group, 1)
    if page_table is not None and name != "q":
        return _of_pages(factors, page_table, w.kv_pages.pool if w.kv_pages else None)
    lengths = w.q_lens if name == "q" else w.kv_lens
    if w.is_packed and lengths is not None:
        return factors.repeat_interleave(factors.new_tensor(lengths).long(), 0).unsqueeze(-1)
    return factors[:, :, None, None]


def _of_pages(factors: torch.Tensor, page_table: torch.Tensor, pool: int | None) -> torch.Tensor:
    """Give each page the factors of the batch entry that reads it: (pages, 1, kv_heads, 1), 0 for a page that none reads."""
    of_pages = factors.new_zeros(pool or page_table.numel(), factors.shape[1])
    of_pages[page_table.flatten().long()] = factors.repeat_interleave(page_table.shape[1], 0)
    return of_pages[:, None, :, None]
