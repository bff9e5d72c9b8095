"""scaled_dot_product_attention with FlashAttention-3 or -4 in the place of torch's own FlashAttention-2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class SdpaFa3(LibraryBackend):
    """SDPA under activate_flash_attention_impl("FA3"). Not run on hardware."""

    name = "sdpa_fa3"
    implementation = "FA3"
    source = Library(("flash-attn-3",), "flash_attn_interface", "build it from the folder hopper of Dao-AILab/flash-attention")
    needs = "CUDA, sm90, torch 2.11, flash-attn-3"
    capability_range = ((9, 0), (9, 0))
    capabilities = Capabilities(
        masks=frozenset(("top-left",)), features=frozenset(("scale", "grouped heads", "backward")), square=True
    )

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse a torch without the switch as well."""
        if machine.torch_release < (2, 11):
            return f"needs torch 2.11, this is {machine.torch_version}"
        return super().unavailable_because(machine)

    def broken_because(self) -> str | None:
        """Import the library, then let torch activate it, and restore what was active."""
        return super().broken_because() or _not_activated_because(self.implementation)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Try torch's hook with one token like the workload's: a build may lack a head dimension, a release what is called."""
        failure = _failure_of_one_token(self.implementation, machine.device, backward, workload.head_dim, workload.dtype)
        if failure is None:
            return []
        torch_version = machine.torch_version.partition("+")[0]
        hook = f"torch {torch_version}'s {self.implementation} hook"
        return [f"{hook} fails with {self.library} {self.version()}: {failure}"]

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Activate around each call, and around its backward pass where there is one."""
        w = inputs.workload
        causal, scale, grouped = w.mask is not None, w.scale, w.group > 1
        return _activating(self.implementation, _sdpa(causal, scale, grouped), backward)


class SdpaFa4(SdpaFa3):
    """SDPA under activate_flash_attention_impl("FA4")."""

    name = "sdpa_fa4"
    implementation = "FA4"
    source = Library(("flash-attn-4",), "flash_attn.cute.interface", "pip install --pre flash-attn-4")
    needs = "CUDA, sm90 or sm100, torch 2.11, flash-attn-4"
    capability_range = ((9, 0), (10, 3))

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse head dimensions that sm100 has no kernel for, too."""
        if machine.capability and machine.capability >= (10, 0) and 128 < workload.head_dim < 256:
            return [f"takes a head_dim of at most 128, or 256, on {machine.architecture}, not {workload.head_dim}"]
        return super().native_refusals(workload, machine, backward)


@contextmanager
def _activated(implementation: str) -> Iterator[None]:
    """Replace torch's FlashAttention, for the whole process; what was active before comes back."""
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    before = current_flash_attention_impl()
    try:
        with warnings.catch_warnings():  # torch warns of every override once, this one is meant
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            activate_flash_attention_impl(implementation)
        yield
    finally:
        if before is not None:
            activate_flash_attention_impl(before)
        elif current_flash_attention_impl() is not None:
            restore_flash_attention_impl()


def _sdpa(causal: bool, scale: float | None, grouped: bool) -> AttentionFn:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    return call


def _activating(implementation: str, attention: AttentionFn, backward: bool) -> AttentionFn:
    """Activate around the forward pass, and again around the backward pass, which autograd runs after the call returned."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with _activated(implementation):
            return attention(q, k, v)

    if not backward:
        return forward

    def gradients(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> Any:
        import torch

        with _activated(implementation):  # the graph is kept: a measured backward pass is repeated
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return _own_graph(forward, gradients)


def _own_graph(forward: AttentionFn, gradients: Callable[..., Any]) -> AttentionFn:
    """Return `forward` as one autograd node, whose backward pass is `gradients` over a graph of its own."""
    import torch

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                ctx.leaves = [t.detach().requires_grad_() for t in tensors]
                ctx.out = forward(*ctx.leaves)
            return ctx.out.detach()  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> Any:
            return gradients(ctx.out, ctx.leaves, dout)

    return lambda q, k, v: Node.apply(q, k, v)  # type: ignore[no-untyped-call]


def _not_activated_because(implementation: str) -> str | None:
    try:
        with _activated(implementation):
            return None
    except Exception as error:  # whatever the library or its registration raises
        return f"torch cannot activate {implementation}: {type(error).__name__}: {error}"


@cache
def _failure_of_one_token(implementation: str, device: str, backward: bool, head_dim: int, dtype: str) -> str | None:
    import torch

    of = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": backward}
    q, k, v = (torch.zeros(1, 1, 1, head_dim, **of) for _ in range(3))
    kernel = _activating(implementation, _sdpa(causal=False, scale=None, grouped=False), backward)
    try:
        out = kernel(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    except Exception as error:  # a call as plain as this one can only fail in the hook, or as any call on a broken device
        if "CUDA error" in str(error):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None
