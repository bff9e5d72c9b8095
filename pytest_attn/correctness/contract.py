"""What a callable must return before any value is looked at: type, shape, dtype, device, all of it written.

Query rows that see no key have out 0 and lse -inf, unless a test says that its kernel leaves them to the caller.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pytest_attn.correctness.reference import Reference
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod, Sequences
from pytest_attn.workloads.workload import Workload, sequence_lengths

# -- poison ------------------------------------------------------------------------------------------------------------


#: bits of quiet NaNs, by dtype
_BITS = {name: one.poison for name, one in DTYPES.items() if one.poison is not None}


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor full of NaN, of the largest number of an integer dtype, or of True."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    bits = _BITS.get(_name(dtype))
    if bits is not None:
        tensor.view(_whole(tensor)).fill_(bits)
    elif dtype.is_floating_point or dtype.is_complex:
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
    return tensor


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor of a workload's dtype still holds what `poisoned` put there."""
    poison: torch.Tensor = tensor.view(_whole(tensor)) == _BITS[_name(tensor.dtype)]
    return poison


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(tensor: torch.Tensor) -> torch.dtype:
    """Return the integer dtype of as many bytes per element."""
    return torch.int16 if tensor.element_size() == 2 else torch.int32


# -- rows that see no key ----------------------------------------------------------------------------------------------


#: (query, key) pairs that are looked at together
_PAIRS = 1 << 26
_EXACT = {"out": 0.0, "lse": -math.inf, "dq": 0.0, "weights": 0.0, "max": -math.inf}


class EmptyRows:
    """The rows of some inputs that see no key and belong to the caller: neither what they hold nor their dout counts.

    empty_rows: "zero", where all rows count; "finite", where such a row holds finite numbers; "any".
    """

    def __init__(self, inputs: Inputs, empty_rows: str) -> None:
        self._accepted = empty_rows
        self._rows = None if empty_rows == "zero" or inputs.workload.sinks else rows_without_keys(inputs)
        if self._rows is not None and not bool(self._rows.any()):
            self._rows = None

    @property
    def are_there(self) -> bool:
        """Whether there are such rows."""
        return self._rows is not None

    def blanked(self, tensor: Tensor) -> Tensor:
        """Return out, dq or dout, in native layout, with 0 in these rows: no loss depends on them, so their dout is 0."""
        return tensor if self._rows is None else tensor.masked_fill(self._of(tensor), 0)

    def forget(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the exact values in these rows of out, lse and dq, in native layout, where the kernel may leave others there.

        It is done in place: results are watched for later changes.
        """
        if self._rows is not None:
            for name in _EXACT.keys() & results.keys():
                results[name] = self._forgotten(name, results[name])
        return results

    def _forgotten(self, name: str, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        accepted = self._of(own)
        if self._accepted == "finite":
            accepted = accepted & (~own.isnan() if name in ("lse", "max") else own.isfinite())
        if 0 in own.stride():  # elements that share memory cannot be written one by one
            return own.masked_fill(accepted, _EXACT[name])
        return own.masked_fill_(accepted, _EXACT[name])

    def _of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor: (batch, heads, rows, 1), packed (rows, heads, 1), of lse without the last."""
        assert self._rows is not None
        is_lse = tensor.dim() == self._rows.dim()
        if self._rows.dim() == 2:  # packed
            return self._rows if is_lse else self._rows.transpose(0, 1).unsqueeze(-1)
        return self._rows if is_lse else self._rows.unsqueeze(-1)


def rows_without_keys(inputs: Inputs) -> Tensor:
    """Return True where a row sees no key: (batch, heads, q_len), packed (heads, all rows)."""
    w, device = inputs.workload, inputs.device
    if not w.is_packed:
        return _rows_without_keys(inputs.mask_mod(), (w.batch, w.heads, w.q_len, w.kv_len), device)
    parts = []
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        mask_mod = w.plain_mask.bind(Sequences(1, w.heads, q_len, kv_len, device)) if w.plain_mask else None
        parts.append(_rows_without_keys(mask_mod, (1, w.heads, q_len, kv_len), device, batch)[0])
    return torch.cat(parts, -1)


def _rows_without_keys(
    mask_mod: MaskMod | None, sizes: tuple[int, int, int, int], device: torch.device, first_batch: int = 0
) -> Tensor:
    """Return True where a row of (batch, heads, q_len) sees none of kv_len keys. first_batch: the first entry's."""
    batch, heads, q_len, kv_len = sizes
    empty = torch.full(sizes[:3], kv_len == 0, device=device)
    if mask_mod is None or kv_len == 0:
        return empty
    b, h, rows, keys = (torch.arange(size, device=device) for size in sizes)
    step = max(1, _PAIRS // (batch * heads * kv_len))
    for start in range(0, q_len, step):
        some = rows[None, None, start : start + step, None]
        seen = mask_mod(b[:, None, None, None] + first_batch, h[None, :, None, None], some, keys[None, None, None])
        empty[:, :, start : start + step] = ~seen.any(-1)
    return empty


# -- the contract ------------------------------------------------------------------------------------------------------


class ContractError(AssertionError):
    """A callable broke its contract before any value was looked at: type, shape, dtype, device, or changed inputs.

    where: the kernel, the workload and the inputs, "" where nobody said yet. fault: its identity, "" where it has none.
    """

    def __init__(self, words: str, where: str = "", fault: str = "") -> None:
        super().__init__(words)
        self.where, self.fault = where, fault


def check_contract(
    result: object, names: tuple[str, ...], reference: Reference, workload: Workload, layout: str = "bhsd"
) -> list[Any]:
    """Return the tensors of a callable's result, still in its layout; raise ContractError naming what is off.

    `names` begins with "out", "lse".
    """
    tensors = _results_named(result, names)
    for name, tensor in zip(names, tensors, strict=True):
        shape = native_shape(name, workload)
        if layout == "bshd" and name == "out":
            shape = (shape[0], shape[2], shape[1], *shape[3:])
        check_tensor(name, tensor, shape, reference.inputs, _layout_hint(tensor, shape, layout))
    return tensors


def _results_named(result: object, names: tuple[str, ...]) -> list[Any]:
    """Return what a callable returned under each name; raise ContractError for another number of results."""
    expected_text = "a tensor out" if len(names) == 1 else f"a tuple ({', '.join(names)})"
    if result is None:
        raise ContractError(f"the callable returned nothing (None); expected {expected_text}")
    if len(names) == 1 and isinstance(result, tuple | list):
        raise ContractError(
            f"the callable returned a {type(result).__name__} of {len(result)}; expected {expected_text}."
            " Say returns_lse=True in the marker if it returns (out, lse), else return its first element"
        )
    if len(names) > 1 and not (isinstance(result, tuple | list) and len(result) == len(names)):
        several = isinstance(result, tuple | list)
        kind = f"a {type(result).__name__} of {len(result)}" if several else describe(result)  # type: ignore[arg-type]
        raise ContractError(f"the callable returned {kind}; expected {expected_text} (returns_lse=True)")
    return [result] if len(names) == 1 else list(result)  # type: ignore[call-overload]


def check_tensor(name: str, tensor: Any, shape: tuple[int, ...], inputs: Inputs, hint: str = "") -> None:
    """Raise ContractError unless a result is a dense tensor of this shape, and of the dtype and device that it should have.

    hint: what is said behind another shape.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = f"a {type(tensor).__module__}.{type(tensor).__name__}" if hasattr(tensor, "shape") else describe(tensor)
        raise ContractError(f"{name} is {kind}; expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ContractError(f"{name} is a {kind} tensor; expected a dense one, say .to_dense()")
    if tuple(tensor.shape) != shape:
        raise ContractError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}{hint}")
    own, wide = getattr(torch, inputs.workload.out_dtype), (torch.float32, torch.float64)
    dtypes = {"out": (own,), "weights": (own, *wide), "keep": (torch.bool,)}.get(name, wide)
    if tensor.dtype not in dtypes:
        raise ContractError(f"{name} has dtype {tensor.dtype}; expected {dtypes[0]}")
    if tensor.device != inputs.q.device:
        raise ContractError(f"{name} is on {tensor.device}; expected {inputs.q.device}")


def native_shape(name: str, w: Workload) -> tuple[int, ...]:
    """Return the shape of a tensor in the workload's native layout ("bhsd", or "thd" where packed)."""
    if w.q_lens is not None and w.kv_lens is not None:
        total = sum(w.kv_lens) if name in ("k", "v", "dk", "dv") else sum(w.q_lens)
        heads = w.kv_heads if name in ("k", "v", "dk", "dv") else w.heads
        dim = w.v_head_dim if name in ("out", "v", "dv") else w.head_dim
        return (heads, total) if name in ("lse", "max") else (total, heads, dim)
    if name in ("lse", "max"):
        return (w.batch, w.heads, w.q_len)
    if name in ("weights", "keep"):
        return (w.batch, w.heads, w.q_len, w.kv_len)
    if name in ("dk", "dv", "k", "v"):
        return (w.batch, w.kv_heads, w.kv_len, w.head_dim if name in ("dk", "k") else w.v_head_dim)
    return (w.batch, w.heads, w.q_len, w.v_head_dim if name == "out" else w.head_dim)


def _layout_hint(tensor: Any, shape: tuple[int, ...], layout: str) -> str:
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.ndim != 4 or len(shape) != 4:
        return ""
    if tuple(tensor.transpose(1, 2).shape) == shape:
        other = "bshd" if layout == "bhsd" else "bhsd"
        return f" (heads and rows are swapped: does it return layout {other!r}? say layout={other!r} in the marker)"
    return ""
