"""What a callable must return before any value is looked at: type, shape, dtype, device."""

from __future__ import annotations

from typing import Any

from pytest_attn.correctness.reference import Reference
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


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
    import torch

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
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.ndim != 4 or len(shape) != 4:
        return ""
    if tuple(tensor.transpose(1, 2).shape) == shape:
        other = "bshd" if layout == "bhsd" else "bhsd"
        return f" (heads and rows are swapped: does it return layout {other!r}? say layout={other!r} in the marker)"
    return ""
