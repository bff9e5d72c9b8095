"""torch.nn.attention.varlen: FlashAttention over packed sequences, without padding."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, Kernel, half_precision_only
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.layouts import as_packed, bottom_right_window, sequence_boundaries
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


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
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401
        except Exception as error:
            return f"torch {machine.torch_version} has no torch.nn.attention.varlen ({error})"
        if machine.kind != "cuda":
            return "needs a CUDA device"
        if machine.capability is not None and machine.capability < (8, 0):
            return f"needs sm80, this device is {machine.architecture}"
        return None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what varlen_attn's signature cannot say."""
        w = workload
        reasons = half_precision_only(w)
        if w.head_dim != w.v_head_dim or w.head_dim > 256 or w.head_dim % 8:
            reasons.append("needs v_head_dim equal to head_dim, a multiple of 8, at most 256")
        if w.group > 1 and not _takes("enable_gqa"):
            reasons.append("takes no grouped heads in this torch")
        if w.softcap or w.alibi or w.sinks or w.bias or w.score_mod:
            reasons.append("takes no changes of the score")
        if w.kv_pages or (w.kv_lens and not w.is_packed):
            reasons.append("takes packed sequences, not padded or paged ones")
        if bottom_right_window(w) is None:
            reasons.append("takes causal (bottom-right), sliding-window and document masks only")
        elif bottom_right_window(w) != (-1, -1) and not (_takes("window_size") or _takes("is_causal")):
            reasons.append("takes no mask in this torch")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Work out the sequence boundaries."""
        from torch.nn.attention.varlen import varlen_attn

        w = inputs.workload
        cu_q, cu_k, longest_q, longest_k = sequence_boundaries(inputs)
        options = _options(w)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options)

        return as_packed(call, w)


def _takes(parameter: str) -> bool:
    from torch.nn.attention.varlen import varlen_attn

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
