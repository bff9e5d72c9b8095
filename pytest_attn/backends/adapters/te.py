"""Transformer Engine's DotProductAttention, with each of its three kernels: cuDNN's, flash-attn's and its own unfused one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE, FLASH4_DQ
from pytest_attn.backends.flash_attention import FLASH4, refused_by_compiler
from pytest_attn.backends.known_defect import KnownDefect
from pytest_attn.backends.layouts import as_packed, bottom_right_window, in_bshd, without_padding
from pytest_attn.backends.library import refusal_of_build
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.sizes import scores_bytes
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.backends.transformer_engine import (
    KERNELS,
    TRANSFORMER_ENGINE,
    call_options,
    fully_masked_rows_refused,
    goes_in_sequence,
    half_open_window_refused,
    listening,
    module_of,
    module_options,
    needs_tensor,
    selected,
    unfilled_inputs,
)
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Causal
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

_MASKS = frozenset(("top-left", "bottom-right", "window", "documents"))
_FEATURES = frozenset(("scale", "grouped heads", "packed", "padded", "backward"))


class TransformerEngine(LibraryBackend):
    """DotProductAttention with one of its kernels allowed, in "bshd", or "thd" for packed sequences, documents and padding.

    The module is trained where there is a backward pass, else evaluated. Around each call the switches of its selection,
    what it remembers of the last one and its log are put aside and come back.
    """

    source = TRANSFORMER_ENGINE
    variants = ("graph",)
    #: which of `KERNELS`
    kernel: str

    def refusal_in(self, error: Exception) -> str | None:
        """It reads the layout of packed tensors off their addresses, and refuses some."""
        words = "The provided qkv memory layout is not supported"
        return words if words in str(error) else None

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse what its arguments cannot say, then ask its own selection, in its own words."""
        reasons = self.unsaid(workload, machine)
        if reasons:
            return reasons
        te = self.source.load()
        known = inspect.signature(te.DotProductAttention).parameters
        missing = [option for option in module_options(workload) if option not in known]
        if missing:
            return [f"this release has no {missing[0]}"]
        return self._not_selected_because(te, unfilled_inputs(workload, machine.device), backward)

    def unsaid(self, w: Workload, machine: Machine) -> list[str]:
        """List what its arguments cannot say of a workload, or say in another sense."""
        del machine
        reasons = half_open_window_refused(w)
        if w.is_packed and needs_tensor(w):
            reasons.append("takes no mask of its own for packed sequences")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Make the module and its arguments once."""
        return self._kernel(inputs, backward, [])

    def _kernel(self, inputs: Inputs, backward: bool, said: list[str]) -> AttentionFn:
        """Return the callable; what the module logs while it is called goes to `said`."""
        te, w = self.source.load(), inputs.workload
        in_sequence = goes_in_sequence(w)
        kernel_of: Callable[[AttentionFn], AttentionFn] = in_bshd
        if in_sequence:
            inputs, kernel_of = without_padding(inputs)
        module, options = module_of(te, inputs, backward), call_options(inputs, in_sequence)
        remembered: dict[str, Any] = {}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with selected(te, self.kernel, remembered), listening(te, said):
                out: torch.Tensor = module(*self.as_taken(q, k, v), **options)
            return out.view(*out.shape[:-1], w.heads, w.v_head_dim)

        return kernel_of(as_packed(call, inputs.workload) if in_sequence else call)

    def as_taken(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v in memory as the kernel reads them."""
        return tensors

    def _not_selected_because(self, te: ModuleType, inputs: Inputs, backward: bool) -> list[str]:
        """Let the module ask its selection about these tensors, and stop before it computes."""
        said: list[str] = []
        available: list[bool] = []
        select = te.utils.get_attention_backend

        def ask_only(params: Any) -> tuple[Any, ...]:
            *selected, offered = select(params)
            available.extend(map(bool, offered))
            return (*(False for _ in selected), offered)

        kernel = self._kernel(inputs, backward, said)
        te.utils.get_attention_backend = ask_only
        try:
            kernel(inputs.q, inputs.k, inputs.v)
        except ValueError:  # no kernel is available: raised for the answer of `ask_only`
            if not available:
                raise
        finally:
            te.utils.get_attention_backend = select
        if available[list(KERNELS).index(self.kernel)]:
            return []
        about = [" ".join(line.split()) for line in said if line.startswith("Disabling")]
        reasons = [line for line in about if self.kernel in line or "all backends" in line]
        return list(dict.fromkeys(reasons)) or [f"has no {self.kernel} here, and does not say why"]


class TeFused(TransformerEngine):
    """cuDNN's kernels."""

    name, kernel, precision = "te_fused", "FusedAttention", "cudnn"
    launches = ("cuDNN", "flash")
    needs = "CUDA, sm80 to sm121"
    capabilities = Capabilities(masks=_MASKS, features=_FEATURES | {"bias", "sinks"}, v_head_dim=True)
    known_defects = (CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE)

    def as_taken(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copied where they are not contiguous: it takes strides from the format's name, not from the tensor."""
        return tuple(t.contiguous() for t in tensors)


def _goes_to_flash4(workload: Workload) -> bool:
    """Whether flash-attn 4 is there, which is preferred where it takes the workload."""
    return FLASH4.missing_because() is None and workload.softcap is None and not workload.alibi


def _causal_through_flash4(workload: Workload, machine: Machine) -> bool:
    return _goes_to_flash4(workload) and bottom_right_window(workload) == (-1, 0)


def _dq_through_flash4(workload: Workload, machine: Machine) -> bool:
    return _goes_to_flash4(workload) and FLASH4_DQ.applies(workload, machine)


class TeFlash(TransformerEngine):
    """flash-attn's kernels, of the version that Transformer Engine prefers among those installed."""

    name, kernel, precision = "te_flash", "FlashAttention", "flash2"
    launches = ("FlashAttention",)
    needs = "CUDA, sm80 to sm121, flash-attn"
    capabilities = Capabilities(masks=_MASKS - {"top-left"}, features=_FEATURES | {"softcap", "alibi"}, v_head_dim=True)
    known_defects = (
        KnownDefect(
            issue="seen on an H200 with transformer-engine 2.20.2 and flash-attn 4.0.0b36, no report found",
            summary="a causal mask goes to flash-attn 4 as a window (-1, 0), where -1 does not mean an open side: out is zero",
            applies=_causal_through_flash4,
            tensors=("out", "dq", "dk", "dv"),
            shows=lambda comparison, workload: comparison.found == 0,
        ),
        replace(FLASH4_DQ, applies=_dq_through_flash4),
    )

    def refusal_in(self, error: Exception) -> str | None:
        """Also what flash-attn 4's compiler refuses."""
        return refused_by_compiler(error) or super().refusal_in(error)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Ask the selection, then flash-attn's build, which the selection does not know."""
        reasons = super().native_refusals(workload, machine, backward)
        if reasons:
            return reasons
        w = workload
        token = Workload(
            1, head_dim=w.head_dim, v_head_dim=w.v_head_dim, dtype=w.dtype, alibi=w.alibi, softcap=w.softcap
        )  # what decides on flash-attn's version
        reason = _refused_by_build(token, machine.device)
        return [reason] if reason else []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """ALiBi's distances, which it writes out twice and does not use."""
        return scores_bytes(workload, False) // workload.batch if workload.alibi else 0


def _masked(workload: Workload, machine: Machine) -> bool:
    return workload.mask is not None or workload.kv_lens is not None


class TeUnfused(TransformerEngine):
    """Two matrix products with a softmax between, in the workload's dtype."""

    name, kernel, precision = "te_unfused", "UnfusedDotProductAttention", "eager"
    launches = ("softmax",)  # its own, or torch's for few rows
    needs = "CUDA, sm80 to sm121"
    capabilities = Capabilities(
        masks=_MASKS | {"any"},
        features=_FEATURES | {"softcap", "bias", "alibi", "sinks"},
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        head_dim_step=1,
        v_head_dim=True,
    )
    known_defects = (
        KnownDefect(
            issue="transformer_engine/pytorch/utils.py, attention_mask_func",
            summary="masked scores become -10000, which exceeds scores further below",
            applies=_masked,
            tensors=("out", "dq", "dk", "dv"),
            inputs="large",
        ),
    )

    def unsaid(self, w: Workload, machine: Machine) -> list[str]:
        """Refuse also what it rounds more often than an eager implementation, other distances, and queries without a key."""
        reasons = super().unsaid(w, machine)
        if w.dtype != "float32" and w.alibi:
            reasons.append(f"would round the scores with ALiBi to {w.dtype}")
        if w.dtype != "float32" and w.bias is not None:
            reasons.append(f"would round the scores with a bias to {w.dtype}")
        if w.dtype != "float32" and w.softcap is not None:
            reasons.append(f"would round each step of softcap to {w.dtype}")
        if w.alibi and (goes_in_sequence(w) or w.kv_lens is not None):
            reasons.append("takes no ALiBi for packed or padded sequences")
        if w.alibi and w.mask == Causal() and w.q_len != w.kv_len:
            reasons.append("aligns ALiBi top-left with such a mask")
        return reasons or fully_masked_rows_refused(w, machine.device)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The scores, four times."""
        return scores_bytes(workload, backward, copies=4)


@cache
def _refused_by_build(token: Workload, device: str) -> str | None:
    """Try one token: flash-attn is often built for a few head dimensions, of which Transformer Engine knows nothing."""
    inputs = draw_inputs(token, device=device)
    try:
        TeFlash().prepare(inputs)(inputs.q, inputs.k, inputs.v)
    except RuntimeError as error:
        if (reason := refusal_of_build(error)) is None:
            raise
        return reason
    return None
