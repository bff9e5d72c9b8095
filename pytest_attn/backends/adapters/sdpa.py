"""torch.nn.functional.scaled_dot_product_attention with each of its kernels, one at a time."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, half_precision_only
from pytest_attn.backends.capabilities import MASKS, NO_CACHE, NO_LEFT_PADDING, Capabilities
from pytest_attn.backends.defects import (
    CUDNN_NAN,
    CUDNN_NAN_OF_ONE_TILE,
    CUDNN_STALE_STRIDES,
    CUTLASS_OFFSETS,
    CUTLASS_SHARED_HEAD,
    SDPA_FULLY_MASKED_ROWS,
    SDPA_LARGE_SCORES,
)
from pytest_attn.backends.dense import additive_or_boolean_mask, is_plain_causal, needs_dense_mask
from pytest_attn.backends.dequantizing import ALL_QUANTIZED, on_values
from pytest_attn.backends.known_defect import KnownDefect
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.sizes import scores_bytes
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.heads import is_interleaved, repeated
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


#: what SDPA's signature can say, with a mask as a tensor
_MASK_TENSOR = Capabilities(
    masks=frozenset(MASKS),
    features=frozenset(
        ("bias", "alibi", "scale", "grouped heads", "padded", "backward", "interleaved heads", "ALiBi per batch entry")
    ),
    dtypes=("bfloat16", "float16", "float32"),
    head_dim=None,
    head_dim_step=1,
    v_head_dim=True,
)


_OF_CUDNN = (CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE, CUDNN_STALE_STRIDES, SDPA_FULLY_MASKED_ROWS, SDPA_LARGE_SCORES)


class Automatic(Backend):
    """SDPA as it chooses by itself: `sdpa`."""

    name = "sdpa"
    precision = "sdpa"
    capabilities = _MASK_TENSOR
    needs = "CPU, CUDA or XPU"
    kernel: str | None = None
    variants = ("compile", "max_autotune", "graph")
    known_defects: tuple[KnownDefect, ...] = _OF_CUDNN  # which it chooses on an H200

    def unavailable_because(self, machine: Machine) -> str | None:
        """MPS is left to torch's own tests."""
        return "is tested on CPU, CUDA and XPU only" if machine.kind == "mps" else None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what SDPA's signature cannot say, then ask torch's own checks."""
        reasons = _not_expressible(workload)
        return reasons or self.refusals(workload, machine, backward)

    def precision_on(self, kind: str) -> str:
        """On a CPU, `sdpa` and `sdpa_flash` are one kernel."""
        return "torch_cpu" if kind == "cpu" else self.precision

    def refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Reasons of the selected kernel."""
        del workload, machine, backward
        return []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """A dense mask, where the workload needs one."""
        return workload.batch * workload.heads * workload.q_len * workload.kv_len * 2 if needs_dense_mask(workload) else 0

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Build the mask once; the kernel is selected around each call and restored after it."""
        import torch.nn.functional as F

        w = inputs.workload
        causal = is_plain_causal(w)
        mask = None if causal else additive_or_boolean_mask(inputs)
        scale, interleaved = w.scale, is_interleaved(w)
        grouped = w.group > 1 and not interleaved

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if interleaved:
                k, v = repeated(k, w), repeated(v, w)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)

        return call if self.kernel is None else _on_kernel(call, self.kernel)


class Math(Automatic):
    """SDPA's composite implementation, in the workload's dtype with float32 inside."""

    name, kernel, precision = "math", "MATH", "flash"
    known_defects = ()
    capabilities = replace(_MASK_TENSOR, quantized=ALL_QUANTIZED)

    def precision_on(self, kind: str) -> str:
        """The same arithmetic everywhere."""
        return self.precision

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Dequantize first, where there is something to dequantize."""
        return on_values(super().prepare(inputs, backward), inputs)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The scores, three times in float32."""
        return scores_bytes(workload, backward, copies=3)


class Flash(Automatic):
    """SDPA's FlashAttention-2, and on a CPU its tiled kernel."""

    name, kernel, precision = "sdpa_flash", "FLASH_ATTENTION", "flash2"
    known_defects = ()
    launches = ("PyTorch (flash)",)
    needs = "CUDA, sm80 to sm121; a CPU has another kernel, which takes masks and float32"
    capabilities = Capabilities(
        masks=frozenset(("top-left", "bottom-right")),
        features=frozenset(("scale", "grouped heads", "backward")),
        square=True,
    )

    def refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """On CUDA torch's own words; on a CPU, the one limit of its kernel."""
        if machine.kind == "cuda":
            return native_refusals("flash", workload, machine, backward)
        if workload.head_dim != workload.v_head_dim:
            return ["needs v_head_dim equal to head_dim"]
        if workload.group > 1 and not _cpu_kernel_takes_groups():
            return [f"does not support grouped-query attention (GQA) on a CPU in torch {machine.torch_version}"]
        return []


class Efficient(Automatic):
    """SDPA's memory-efficient kernel (CUTLASS fmha)."""

    name, kernel, precision = "sdpa_efficient", "EFFICIENT_ATTENTION", "cutlass"
    known_defects = (CUTLASS_SHARED_HEAD, CUTLASS_OFFSETS)
    launches = ("CUTLASS", "fmha")
    needs = "CUDA"
    capabilities = replace(_MASK_TENSOR, features=_MASK_TENSOR.features - {"grouped heads"}, head_dim_step=8)

    def unavailable_because(self, machine: Machine) -> str | None:
        """CUDA only."""
        return None if machine.kind == "cuda" else "needs a CUDA device"

    def refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """In torch's own words."""
        return native_refusals("efficient", workload, machine, backward)


class Cudnn(Automatic):
    """SDPA's cuDNN kernel."""

    name, kernel, precision = "sdpa_cudnn", "CUDNN_ATTENTION", "cudnn"
    launches = ("cuDNN", "flash")
    needs = "CUDA, sm80 to sm121, cuDNN"
    capabilities = replace(_MASK_TENSOR, dtypes=("bfloat16", "float16"), head_dim=128, head_dim_step=8)
    known_defects = _OF_CUDNN

    def unavailable_because(self, machine: Machine) -> str | None:
        """CUDA with cuDNN only."""
        if machine.kind != "cuda":
            return "needs a CUDA device"
        import torch

        built_with_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if built_with_cudnn else "torch was built without cuDNN"

    def refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """In torch's own words."""
        return half_precision_only(workload) or native_refusals("cudnn", workload, machine, backward)


def _not_expressible(w: Workload) -> list[str]:
    reasons = []
    if w.is_packed:
        reasons.append("does not support packed sequences")
    if w.kv_pages:
        reasons.append("does not support a paged KV cache")
    if w.cached is not None:
        reasons.append(NO_CACHE)
    if w.pad == "left":
        reasons.append(NO_LEFT_PADDING)
    if w.softcap is not None:
        reasons.append("has no softcap")
    if w.sinks:
        reasons.append("has no sinks")
    if w.score_mod is not None:
        reasons.append("has no score_mod")
    if w.alibi and w.dtype != "float32":
        reasons.append(f"would round ALiBi's distances to {w.dtype} in attn_mask")
    return reasons


def _on_kernel(call: AttentionFn, kernel: str) -> AttentionFn:
    """Allow exactly one of SDPA's kernels during each call. The previous choice comes back.

    The context is torch's own, because torch 2.6 compiles a call within that, and within no other generator.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, kernel)

    def on_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return on_kernel


@functools.cache
def _cpu_kernel_takes_groups() -> bool:
    """Ask torch whether its CPU kernel supports grouped-query attention, which that of torch 2.6 does not."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k = torch.empty(1, 2, 8, 16, device="cpu"), torch.empty(1, 1, 8, 16, device="cpu")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        chosen: int = torch._fused_sdp_choice(q, k, k, enable_gqa=True)
    return chosen == SDPBackend.FLASH_ATTENTION.value


def native_refusals(kernel: str, w: Workload, machine: Machine, backward: bool) -> list[str]:
    """Return the reasons that torch.backends.cuda.can_use_*_attention(debug=True) gives as warnings; empty where it can."""
    import torch

    def empty(heads: int, length: int, dim: int) -> torch.Tensor:
        dtype = getattr(torch, w.dtype)
        return torch.empty(w.batch, heads, length, dim, dtype=dtype, device=machine.device, requires_grad=backward)

    q, k, v = (
        empty(w.heads, w.q_len, w.head_dim),
        empty(w.kv_heads, w.kv_len, w.head_dim),
        empty(w.kv_heads, w.kv_len, w.v_head_dim),
    )
    mask = None
    if needs_dense_mask(w):
        dtype = getattr(torch, w.dtype) if w.bias or w.alibi else torch.bool
        mask = torch.empty(1, 1, w.q_len, w.kv_len, dtype=dtype, device=machine.device)
    params = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, is_plain_causal(w), w.group > 1)
    can_use = getattr(torch.backends.cuda, f"can_use_{kernel}_attention")
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # some reasons would be said once per process
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if can_use(params, True):
                return []
    finally:
        torch.set_warn_always(before)
    said = [" ".join(str(warning.message).split(" (Triggered internally")[0].split()) for warning in caught]
    return said or [f"torch.backends.cuda.can_use_{kernel}_attention says no, without a reason"]
