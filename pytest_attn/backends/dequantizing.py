"""Quantized tensors for kernels that take none: q, k and v are brought to their values first, in the dtype of out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.capabilities import QUANTIZED
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch

#: what a kernel takes that dequantizes first
ALL_QUANTIZED = frozenset(QUANTIZED)


def on_values(kernel: AttentionFn, inputs: Inputs) -> AttentionFn:
    """Return the kernel where nothing is quantized, else one that dequantizes q, k and v before it is called."""
    import torch

    if inputs.descales is None:
        return kernel
    dtype = getattr(torch, inputs.workload.out_dtype)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        values = dataclasses.replace(inputs, q=q, k=k, v=v).dequantized()
        return kernel(*(t.to(dtype) for t in (values.q, values.k, values.v)))

    return call
