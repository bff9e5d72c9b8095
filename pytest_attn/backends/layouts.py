"""From the native layout, (batch, heads, rows, dim), to those of the libraries, and back."""

import dataclasses
from typing import Any

import torch

from pytest_attn.backends.capabilities import QUANTIZED, refusals_of
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


def in_bshd(kernel: AttentionFn) -> AttentionFn:
    """Wrap a kernel that takes and returns (batch, rows, heads, dim); only strides change, nothing is copied."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2)

    return call


def as_packed(kernel: AttentionFn, w: Workload, used: torch.Tensor | None = None) -> AttentionFn:
    """Wrap a kernel of packed sequences, (tokens, heads, dim): a dense batch is handed over as sequences of equal length.

    used: the keys that are handed over, of all sequences one after the other; None for all.
    """
    if w.is_packed:
        return kernel

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        rows, keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = kernel(rows, keys, values) if used is None else kernel(rows, keys[used], values[used])
        return out.unflatten(0, (w.batch, w.q_len)).transpose(1, 2)

    return call


def first_of(returned: Any) -> Any:
    """Return out of what a function returns: alone, or before others as lse. What may be the tensor itself is not indexed."""
    return returned[0] if isinstance(returned, tuple | list) else returned


def sequence_boundaries(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return cu_seqlens of queries and keys, int32, and the longest of each: of packed sequences, documents or a batch."""
    w = inputs.workload
    if inputs.cu_seqlens is not None and inputs.cu_seqlens_kv is not None:
        return inputs.cu_seqlens, inputs.cu_seqlens_kv, w.q_len, w.kv_len
    if w.documents:
        lengths = torch.tensor([0, *(w.documents * w.batch)]).cumsum(0).to(inputs.device, torch.int32)
        return lengths, lengths, max(w.documents), max(w.documents)
    steps = torch.arange(w.batch + 1, device=inputs.device, dtype=torch.int32)
    return steps * w.q_len, steps * w.kv_len, w.q_len, w.kv_len


def bottom_right_window(w: Workload) -> tuple[int, int] | None:
    """Return (left, right), -1 for open, aligned to the last key as in flash-attention; None for a mask of another kind.

    A causal mask is (-1, 0). A document mask's own boundaries are not part of it, only whether it is causal.
    """
    if w.documents:
        return (-1, 0) if w.mask.is_causal else (-1, -1)
    square = w.q_lens == w.kv_lens if w.is_packed else w.q_len == w.kv_len
    if w.band is None or (w.band.top_left and not square):
        return None
    left, right, _ = w.band
    return (-1 if left is None else left, -1 if right is None else right)


def is_key(inputs: Inputs) -> torch.Tensor | None:
    """Return which keys there are, (batch, kv_len), None where there is no padding."""
    if inputs.kv_lens is None:
        return None
    return torch.arange(inputs.workload.kv_len, device=inputs.device) < inputs.kv_lens[:, None]


#: Decoding token by token is slow by nature: longer workloads are left to prefill.
MOST_DECODING_STEPS = 512


def not_decoding_because(w: Workload) -> list[str]:
    """List why a workload cannot be decoded token by token with a growing cache; empty where it can."""
    band = w.band
    is_aligned = band is not None and band.right == 0 and (not band.top_left or w.q_len == w.kv_len)
    unaligned = "decodes causally: needs a causal mask or window aligned to the last key, and q_len <= kv_len"
    too_long = f"decodes token by token: at most {MOST_DECODING_STEPS}, not {w.q_len}"
    return refusals_of({unaligned: not is_aligned or w.q_len > w.kv_len, too_long: w.q_len > MOST_DECODING_STEPS})


#: what a kernel takes that dequantizes first
ALL_QUANTIZED = frozenset(QUANTIZED)


def on_values(kernel: AttentionFn, inputs: Inputs) -> AttentionFn:
    """Return the kernel where nothing is quantized, else one that dequantizes q, k and v before it is called."""
    if inputs.descales is None:
        return kernel
    dtype = getattr(torch, inputs.workload.out_dtype)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        values = dataclasses.replace(inputs, q=q, k=k, v=v).dequantized()
        return kernel(*(t.to(dtype) for t in (values.q, values.k, values.v)))

    return call
