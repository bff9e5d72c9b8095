"""flash-attn 3, both generations of its interface. The newer one has run on an H200; the tests have stand-ins of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import Options
from pytest_attn.backends.flash_attention import FlashAttention
from pytest_attn.backends.known_defect import KnownDefect
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Document, Window
from pytest_attn.workloads.workload import Workload

_INSTALL = "build it from the folder hopper of Dao-AILab/flash-attention"
_GENERATIONS = (
    Library(("flash-attn-3",), "flash_attn_3.flash_attn_interface", _INSTALL),
    Library(("flash-attn-3",), "flash_attn_interface", _INSTALL),
)
#: what a build says where it was made without a feature or a head dimension
_BUILD_WORDS = ("build does not support", "only supports head dimension")


_UNALIGNED = KnownDefect(
    issue="seen on an H200 on 2026-11-22, no report found",
    summary="strides and addresses that are not a multiple of 16 bytes, also in dimensions of size 1, end the CUDA context",
    applies=lambda workload, machine: True,
    tensors=(),
    invariants=("alignment",),
    ends_cuda=True,
)


class Flash3(FlashAttention):
    """flash_attn_func; flash_attn_varlen_func for packed sequences, documents and padding; the kv-cache for pages."""

    name = "flash3"
    variants = ("compile", "max_autotune", "graph")
    full_graph = False  # builds before torch.library.custom_op break
    launches = ("FlashAttention-3",)
    needs = "CUDA, sm90"
    capability_range = ((9, 0), (9, 0))
    capabilities = Capabilities(
        masks=frozenset(("bottom-right", "window", "documents")),
        features=frozenset(("softcap", "scale", "grouped heads", "packed", "padded", "paged", "backward")),
        v_head_dim=True,
        quantized=frozenset(("fp8", "tensor", "head")),
    )
    known_defects = (_UNALIGNED,)
    tunable = frozenset(("num_splits", "pack_gqa"))

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Into how many parts the keys are split, and whether the query heads of a group share a tile; forward only."""
        if backward:
            return ()
        splits: list[Options] = [{"num_splits": number} for number in (1, 2, 4, 8, 16, 32)]
        packings = (True, False) if workload.group > 1 else ()
        return [*splits, *({"pack_gqa": packing} for packing in packings)]

    @property
    def source(self) -> Library:  # type: ignore[override]
        """The generation that is installed; the older one, whose module torch looks for as well, where none is."""
        return next((library for library in _GENERATIONS if library.missing_because() is None), _GENERATIONS[-1])

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Short keys may have values of up to 512 in the forward pass; everything else as declared."""
        declared = self.capabilities
        if workload.head_dim <= 64 and not backward:
            declared = dataclasses.replace(declared, head_dim=512)
        return declared.refusals(workload, backward) or self.native_refusals(workload, machine, backward)

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Add descales, (batch, kv_heads) each, where q, k and v are fp8; the result is bfloat16 then."""
        w, options = inputs.workload, super().options(inputs)
        if inputs.descales is not None:
            for name, descale in inputs.descales._asdict().items():
                options[f"{name}_descale"] = descale.expand(w.batch, w.kv_heads).contiguous()
        return options

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse pairs of head dimensions without a kernel, then what this build was made without, in its own words."""
        if workload.is_quantized and (workload.kv_lens is not None or isinstance(workload.mask, Document)):
            return [
                "takes fp8 in dense tensors only, as far as is known: descales of packed and paged ones are not documented"
            ]
        if not _has_kernels_for(workload.head_dim, workload.v_head_dim):
            return [
                "takes a v_head_dim of 97 to 128 with a head_dim of 129 to 192, or any with a head_dim of at most 64,"
                f" not head_dim {workload.head_dim}, v_head_dim {workload.v_head_dim}"
            ]
        reason = _refused_by_build(_smallest_like(workload), machine.device, backward)
        return [reason] if reason else []


def _has_kernels_for(head_dim: int, v_head_dim: int) -> bool:
    if head_dim == v_head_dim or head_dim <= 64:
        return True
    return 128 < head_dim <= 192 and 96 < v_head_dim <= 128


def _smallest_like(w: Workload) -> Workload:
    """Return eight tokens that need the same kernel as the workload: a build may lack any of its features."""
    lengths: dict[str, Any] = {"q_len": 8}
    if w.kv_pages:
        lengths["kv_pages"] = w.kv_pages
    elif w.is_packed or w.kv_lens is not None or isinstance(w.mask, Document):
        lengths = {"q_lens": (8,)}
    return Workload(
        **lengths,
        heads=w.group,
        kv_heads=1,
        head_dim=w.head_dim,
        v_head_dim=w.v_head_dim,
        dtype=w.dtype,
        mask=Window(1, 1) if isinstance(w.mask, Window) else None,
        softcap=w.softcap,
    )


@cache
def _refused_by_build(trial: Workload, device: str, backward: bool) -> str | None:
    """Ask with a few tokens whether this build has the kernels: builds for a few of them are common."""
    import torch

    inputs = draw_inputs(trial, "flat", device=device)
    kernel = Flash3().prepare(inputs, backward)
    leaves = [t.requires_grad_(backward) for t in (inputs.q, inputs.k, inputs.v)]
    try:
        out = kernel(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, inputs.dout)
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        if any(phrase in words for phrase in _BUILD_WORDS):
            return words
        raise
    return None
