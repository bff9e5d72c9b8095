"""torch.nn.functional.scaled_dot_product_attention with each of its kernels, one at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, Kernel, KnownDefect, half_precision_only, scores_bytes
from pytest_attn.backends.dense import additive_or_boolean_mask, is_plain_causal, needs_dense_mask
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import interval
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def _half_tile_without_causal(workload: Workload, machine: Machine) -> bool:
    affected = machine.capability == (9, 0) and machine.torch_release >= (2, 11) and workload.dtype != "float32"
    return affected and workload.q_len > 128 and workload.q_len % 128 == 64 and not is_plain_causal(workload)


#: Reported with an explicit attn_mask; on an H200 with torch 2.11 it shows without any mask as well.
_CUDNN_NAN = KnownDefect(
    issue="pytorch#196678",
    summary="NaN in dq where q_len % 128 == 64 and a row's lse is below -88",
    applies=_half_tile_without_causal,
    tensors=("dq",),
    only_nan=True,
    inputs="outlier",
)


def _rows_without_a_key(workload: Workload, machine: Machine) -> bool:
    blind = interval(workload.plain_mask, 0, workload.q_len, workload.kv_len)
    on_cudnn = machine.capability == (9, 0) and machine.torch_release >= (2, 9) and workload.dtype != "float32"
    return on_cudnn and not workload.is_packed and blind is not None and blind[0] == blind[1]


_CUDNN_BLIND_ROWS = KnownDefect(
    issue="seen on an H200 with torch 2.11, no report found",
    summary="rows that see no key are not zero",
    applies=_rows_without_a_key,
    tensors=("out", "dq", "dk", "dv"),
)


class Automatic(Backend):
    """SDPA as it chooses by itself: `sdpa`."""

    name = "sdpa"
    precision = "sdpa"
    kernel: str | None = None
    variants = ("compile", "max_autotune")
    known_defects: tuple[KnownDefect, ...] = (_CUDNN_NAN, _CUDNN_BLIND_ROWS)  # on an H200 it chooses cuDNN

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

    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Build the mask once; the kernel is selected around each call and restored after it."""
        import torch.nn.functional as F

        w = inputs.workload
        causal = is_plain_causal(w)
        mask = None if causal else additive_or_boolean_mask(inputs)
        scale, grouped, kernel = w.scale, w.group > 1, self.kernel

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            with selected(kernel):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
                )

        return call


class Math(Automatic):
    """SDPA's composite implementation, in the workload's dtype with float32 inside."""

    name, kernel, precision = "math", "MATH", "flash"
    known_defects = ()

    def precision_on(self, kind: str) -> str:
        """The same arithmetic everywhere."""
        return self.precision

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The scores, three times in float32."""
        return scores_bytes(workload, backward, copies=3)


class Flash(Automatic):
    """SDPA's FlashAttention-2, and on a CPU its tiled kernel."""

    name, kernel, precision = "sdpa_flash", "FLASH_ATTENTION", "flash2"
    known_defects = ()

    def refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """On CUDA torch's own words; on a CPU, the one limit of its kernel."""
        if machine.kind == "cuda":
            return native_refusals("flash", workload, machine, backward)
        if workload.head_dim != workload.v_head_dim:
            return ["needs v_head_dim equal to head_dim"]
        return []


class Efficient(Automatic):
    """SDPA's memory-efficient kernel (CUTLASS fmha)."""

    name, kernel, precision = "sdpa_efficient", "EFFICIENT_ATTENTION", "cutlass"
    known_defects = ()

    def unavailable_because(self, machine: Machine) -> str | None:
        """CUDA only."""
        return None if machine.kind == "cuda" else "needs a CUDA device"

    def refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """In torch's own words."""
        return native_refusals("efficient", workload, machine, backward)


class Cudnn(Automatic):
    """SDPA's cuDNN kernel."""

    name, kernel, precision = "sdpa_cudnn", "CUDNN_ATTENTION", "cudnn"
    known_defects = (_CUDNN_NAN, _CUDNN_BLIND_ROWS)

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
        reasons.append("takes no packed sequences")
    if w.kv_pages:
        reasons.append("reads no page table")
    if w.softcap is not None:
        reasons.append("has no softcap")
    if w.sinks:
        reasons.append("has no sinks")
    if w.score_mod is not None:
        reasons.append("has no score_mod")
    if w.alibi and w.dtype != "float32":
        reasons.append(f"would round ALiBi's distances to {w.dtype} in attn_mask")
    return reasons


@contextmanager
def selected(kernel: str | None) -> Iterator[None]:
    """Allow exactly one of SDPA's kernels; None leaves the choice to SDPA. The previous choice comes back."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if kernel is None:
        yield
        return
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        yield


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_use(params, True):
            return []
    said = [" ".join(str(warning.message).split(" (Triggered internally")[0].split()) for warning in caught]
    return said or [f"torch.backends.cuda.can_use_{kernel}_attention says no, without a reason"]
