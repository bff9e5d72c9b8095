"""FlashInfer's batch prefill with its fa2 and fa3 templates: ragged keys and a paged KV cache, forward only."""

import shutil
from collections.abc import Hashable
from importlib import import_module
from typing import Any

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import KnownDefect, in_fully_masked_rows, sees_nothing
from pytest_attn.backends.dense import index_tensors
from pytest_attn.backends.layouts import bottom_right_window, sequence_boundaries
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.flash_attention import without_padding
from pytest_attn.workloads.inputs import Inputs, page_lists
from pytest_attn.workloads.masks import Sequences
from pytest_attn.workloads.workload import Workload, sequence_lengths

_FEATURES = frozenset(("softcap", "scale", "grouped heads", "packed", "padded", "paged", "packed pages", "page layouts"))
#: (head_dim, v_head_dim) that both templates are written for
_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
_DIMS = (64, 128, 192, 256)
#: bytes of scratch memory that its documentation recommends, and that its paged fa3 takes for itself
_WORKSPACE, _INDICES = 128 << 20, 64 << 20
_MOST_MASK_ENTRIES = (1 << 31) - 1

_OF_ANY_WORKLOAD = tuple(
    KnownDefect("docs/results/findings.md, seen on an H200 with flashinfer 0.5.3", summary, invariants=(invariant,))
    for summary, invariant in (
        ("elements of a vector are read as neighbors, whatever the last stride", "layout"),
        ("its -infinity is -50,000: rows whose scores all lie below become 0", "magnitude"),
    )
)


class FlashInferFa2(LibraryBackend):
    """The fa2 template: any mask that all heads share, as a custom_mask where causal and window_left cannot say it.

    FlashInfer plans a workload once, in `prepare`, and compiles a kernel per dtype, head_dim and option with nvcc.
    """

    name = "flashinfer_fa2"
    precision: str | Precision | None = "rounded_sum"
    template = "fa2"
    source = Library(("flashinfer-python",), "flashinfer", "pip install flashinfer-python")
    variants = ("graph",)
    launches = ("FlashInfer", "fa2")
    needs = "CUDA, sm80 to sm121, nvcc, ninja"
    capabilities = Capabilities(masks=frozenset(("any",)), features=_FEATURES, head_dims=_DIMS, v_head_dim=True)
    known_defects: tuple[KnownDefect, ...] = _OF_ANY_WORKLOAD

    def broken_because(self) -> str | None:
        """Import it, and ask it for the compiler that it needs at the first call."""
        if (reason := super().broken_because()) or import_module("flashinfer.jit.env").has_flashinfer_jit_cache():
            return reason
        try:
            import_module("flashinfer.jit.cpp_ext").get_cuda_path()  # for nvcc
        except RuntimeError as error:
            return str(error)
        return None if shutil.which("ninja") else "needs ninja on the PATH to compile its kernels"

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse pairs of head dimensions without a kernel, and masks that a custom_mask does not carry."""
        w, reasons = workload, _head_dim_refusals(workload)
        if reasons or not _needs_custom_mask(w):
            return reasons
        if w.kv_lens is not None and not w.packs_keys:
            return [
                "takes padded keys and a paged KV cache with masks up to the last key only (bottom-right causal, or right=0)"
            ]
        entries = sum(rows * keys for rows, keys in sequence_lengths(w))
        if entries > _MOST_MASK_ENTRIES:
            return [f"counts the entries of a custom_mask in 32 bits, too few for {entries:,}"]
        return ["takes one mask for all heads"] if _varies_over_heads(w, machine) else []

    def compiled_for(self, workload: Workload) -> Hashable:
        """Return what a module of FlashInfer is for, which has kernels for ragged keys, a paged KV cache and all masks."""
        window = None if _needs_custom_mask(workload) else bottom_right_window(workload)
        has_window = window is not None and window[0] >= 0
        return workload.dtype, workload.head_dim, workload.v_head_dim, has_window, workload.softcap is not None

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """Its scratch memory, and the custom_mask."""
        mask = workload.batch * workload.q_len * workload.kv_len if _needs_custom_mask(workload) else 0
        return _WORKSPACE + _INDICES + 2 * mask

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Plan the workload; each call only runs the plan."""
        if inputs.workload.kv_pages:
            return self._paged(inputs)
        options = _options(inputs)
        inputs, kernel_of = without_padding(inputs)
        w = inputs.workload
        wrapper = self.source.load().BatchPrefillWithRaggedKVCacheWrapper(_scratch(inputs), "NHD", backend=self.template)
        ends_q, ends_kv, _, _ = sequence_boundaries(inputs)
        wrapper.plan(ends_q, ends_kv, w.heads, w.kv_heads, w.head_dim, head_dim_vo=w.v_head_dim, **options)
        return kernel_of(wrapper.run)

    def _paged(self, inputs: Inputs) -> AttentionFn:
        w, ends_q = inputs.workload, inputs.cu_seqlens
        assert w.kv_pages is not None
        layout = w.kv_pages.layout
        wrapper = self.source.load().BatchPrefillWithPagedKVCacheWrapper(_scratch(inputs), layout, backend=self.template)
        if ends_q is None:
            ends_q = torch.arange(w.batch + 1, device=inputs.device, dtype=torch.int32) * w.q_len
        wrapper.plan(ends_q, *page_lists(inputs), w.heads, w.kv_heads, w.head_dim, w.kv_pages.size, **_options(inputs))

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if w.is_packed:
                return wrapper.run(q, (k, v))
            out = wrapper.run(q.transpose(1, 2).flatten(0, 1), (k, v))
            return out.unflatten(0, (w.batch, w.q_len)).transpose(1, 2)

        return call


class FlashInferFa3(FlashInferFa2):
    """The fa3 template, for Hopper: causal masks and windows up to the last key, no custom_mask."""

    name = "flashinfer_fa3"
    precision = None
    template = "fa3"
    capability_range = ((9, 0), (9, 0))
    launches = ("FlashInfer", "fa3")
    needs = "CUDA, sm90, nvcc, ninja"
    capabilities = Capabilities(
        masks=frozenset(("causal-bottom-right", "window", "documents")), features=_FEATURES, head_dims=_DIMS, v_head_dim=True
    )
    known_defects = (
        *_OF_ANY_WORKLOAD,
        KnownDefect(
            issue="seen on an H200 with flashinfer 0.5.3, no report found",
            summary="rows that see no key are left unwritten",
            applies=lambda workload, machine: sees_nothing(workload),
            tensors=("out",),
            shows=in_fully_masked_rows,
        ),
    )

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse pairs of head dimensions without a kernel, and windows that end elsewhere."""
        reasons = _head_dim_refusals(workload)
        if _needs_custom_mask(workload):
            reasons.append("takes windows up to the last key only (right=0)")
        return reasons


def _options(inputs: Inputs) -> dict[str, Any]:
    """Return the arguments that both plans share. FlashInfer's own default for the dtype is float16, whatever it is given."""
    w = inputs.workload
    options: dict[str, Any] = {
        "sm_scale": w.softmax_scale,
        "logits_soft_cap": w.softcap,
        "q_data_type": inputs.q.dtype,
        "kv_data_type": inputs.k.dtype,
    }
    if _needs_custom_mask(w):
        return options | {"custom_mask": _custom_mask(inputs)}
    window = bottom_right_window(w)
    assert window is not None
    return options | {"causal": window[1] == 0, "window_left": window[0]}


def _needs_custom_mask(w: Workload) -> bool:
    """Return whether causal (aligned to the last key) and window_left cannot say the mask."""
    padded = w.kv_lens is not None and not w.packs_keys
    if w.documents:
        return padded
    if w.band is not None and w.band.top_left and padded:
        return True
    window = bottom_right_window(w)
    return window is None or not (window == (-1, -1) or window[1] == 0)


def _custom_mask(inputs: Inputs) -> torch.Tensor:
    """Return the mask of every sequence, row by row, one after the other, True = visible."""
    w = inputs.workload
    if not w.is_packed:
        mask_mod = inputs.mask_mod()
        assert mask_mod is not None
        b, h, q, kv = index_tensors(w, inputs.device)
        return mask_mod(b, h[:, :1], q, kv).expand(w.batch, 1, w.q_len, w.kv_len).flatten()
    assert w.plain_mask is not None
    parts = []
    for sequence, (rows, keys) in enumerate(sequence_lengths(w)):
        mask_mod = w.plain_mask.bind(Sequences(w.batch, w.heads, rows, keys, inputs.device))
        b, h = torch.tensor([[sequence], [0]], device=inputs.device)
        q, kv = torch.arange(rows, device=inputs.device)[:, None], torch.arange(keys, device=inputs.device)
        parts.append(mask_mod(b, h, q, kv).expand(rows, keys).flatten())
    return torch.cat(parts)


def _scratch(inputs: Inputs) -> torch.Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=inputs.device)


def _head_dim_refusals(w: Workload) -> list[str]:
    pair = (w.head_dim, w.v_head_dim)
    if pair not in _HEAD_DIMS:
        return [f"has no kernel for head_dim {w.head_dim} with v_head_dim {w.v_head_dim}"]
    if w.kv_pages and w.head_dim != w.v_head_dim:
        return ["needs v_head_dim equal to head_dim where keys are paged"]
    if w.kv_pages and (w.kv_pages.fused or w.kv_pages.sliced):
        return ["is given contiguous pools of keys and of values, (pages, size, kv_heads, head_dim) or HND"]
    return []


def _varies_over_heads(w: Workload, machine: Machine) -> bool:
    """Return whether a mask given as a tensor or function differs between heads, head by head to save memory."""
    mask = w.plain_mask
    if mask is None or mask.is_positional:
        return False
    device = torch.device(machine.device)
    b, h, q, kv = index_tensors(w, device)
    mask_mod = mask.bind(Sequences(w.batch, w.heads, w.q_len, w.kv_len, device))
    first = mask_mod(b, h[:, :1], q, kv)
    return not all(torch.equal(first, mask_mod(b, head, q, kv)) for head in torch.split(h[:, 1:], 1, 1))
