"""torch.nn.attention.varlen: FlashAttention over packed sequences, without padding."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.layouts import as_packed, bottom_right_window, sequence_boundaries
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


class Varlen(Backend):
    """varlen_attn on "thd" tensors; dense batches and documents are handed over as packed sequences."""

    name = "varlen"
    variants = ("compile", "graph")
    launches = ("PyTorch (flash)",)
    needs = "CUDA, sm80 to sm121, torch >= 2.10"
    capabilities = Capabilities(
        masks=frozenset(("bottom-right", "window", "documents")),
        features=frozenset(("scale", "grouped heads", "packed", "backward")),
    )

    def unavailable_because(self, machine: Machine) -> str | None:
        """CUDA from sm80 on, and a torch that has the function."""
        if machine.kind != "cuda":
            return "needs a CUDA device"
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401
        except Exception as error:
            return f"torch {machine.torch_version} has no torch.nn.attention.varlen ({error})"
        if machine.capability is not None and machine.capability < (8, 0):
            return f"needs sm80, this device is {machine.architecture}"
        return None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what varlen_attn's signature cannot say, and what it cannot say yet in this torch."""
        reasons = self.capabilities.refusals(workload, backward)
        if workload.group > 1 and not _takes("enable_gqa"):
            reasons.append("does not support grouped-query attention (GQA) in this torch")
        is_masked = bottom_right_window(workload) not in (None, (-1, -1))
        if is_masked and not (_takes("window_size") or _takes("is_causal")):
            reasons.append("takes no mask in this torch")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Work out the sequence boundaries."""
        from torch.nn.attention.varlen import varlen_attn

        w = inputs.workload
        cu_q, cu_k, longest_q, longest_k = sequence_boundaries(inputs)
        options = _options(w)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options)

        return as_packed(call, w)


def _takes(parameter: str) -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return False
    return parameter in inspect.signature(varlen_attn).parameters


def _options(w: Workload) -> dict[str, Any]:
    options: dict[str, Any] = {}
    window = bottom_right_window(w)
    if w.scale is not None or _takes("scale"):
        options["scale"] = w.softmax_scale
    if w.group > 1:
        options["enable_gqa"] = True
    if window != (-1, -1):
        options.update({"window_size": window} if _takes("window_size") else {"is_causal": True})
    return options
