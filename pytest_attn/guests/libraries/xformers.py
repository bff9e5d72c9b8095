"""xformers' memory_efficient_attention: with the operator that it chooses, and with CUTLASS's."""

import math
import re
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities, refusals_of
from pytest_attn.backends.defects import CUTLASS_OFFSETS, CUTLASS_SHARED_HEAD, KnownDefect, sees_nothing
from pytest_attn.backends.dense import additive_or_boolean_mask
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.library import Library, refusals_of_trial
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.flash_attention import without_padding
from pytest_attn.workloads.dtypes import element_bytes
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: What is used of xformers.ops.fmha; where mslk is missing, newer releases leave it an empty module.
_USED = ("memory_efficient_attention", "attn_bias", "cutlass", "Inputs", "_dispatch_fw", "_dispatch_bw")
#: GQA, which is expanded so, in the other shapes that are asked about
_CUTLASS_SHARED_GROUP = replace(
    CUTLASS_SHARED_HEAD,
    applies=lambda workload, machine: workload.mask is not None or workload.bias is not None,
    invariants=("shapes",),
)


class Xformers(LibraryBackend):
    """memory_efficient_attention as it chooses by itself: flash-attn's kernels where they will do, else CUTLASS's.

    Masks are said in xformers' own classes, packed sequences, documents and padding as blocks on the diagonal; a bias,
    ALiBi (float32 only) and every other mask as a tensor. GQA goes in as five dimensions, as its documentation
    says, which it takes in the forward pass only.
    """

    name = "xformers"
    source = Library(("xformers",), "xformers.ops.fmha", "pip install xformers")
    precision = "sdpa"
    variants = ("compile", "max_autotune", "graph")
    full_graph = False
    needs = "CUDA; sm80 and up for flash-attn's kernels, up to sm90 for CUTLASS's"
    capability_range = ((5, 0), (12, 1))
    #: it chooses CUTLASS for masks that flash-attn lacks
    known_defects: tuple[KnownDefect, ...] = (CUTLASS_SHARED_HEAD, _CUTLASS_SHARED_GROUP)
    capabilities = Capabilities(
        masks=frozenset(("causal", "causal-bottom-right", "window", "documents", "any")),
        features=frozenset(("bias", "alibi", "scale", "grouped heads", "packed", "padded", "backward")),
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        v_head_dim=True,
    )

    def pads_by_mask(self, workload: Workload) -> bool:
        """Return whether a tensor says the mask, as no class of its own does: it hides padding too."""
        return needs_tensor(workload)

    def broken_because(self) -> str | None:
        """Import the library, and ask it whether its compiled part was loaded: without it, it imports but runs nothing."""
        if reason := super().broken_because():
            return reason
        missing = [name for name in _USED if not hasattr(self.source.load(), name)]
        if missing:
            return f"{self.source.module} is installed but has no {missing[0]}"
        failure = getattr(sys.modules.get("xformers._cpp_lib"), "_cpp_library_load_exception", None)
        return None if failure is None else _one_line(str(failure))

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse what its masks cannot say, then what its operators refuse, in their own words."""
        reasons = unsaid(workload)
        if reasons:
            return reasons
        fmha = self.source.load()
        try:
            inputs = empty_inputs(fmha, workload, machine.device)
        except ValueError as error:  # its masks check their lengths
            return [str(error)]
        return self.operators_refuse(fmha, inputs, backward)

    def operators(self, fmha: ModuleType) -> tuple[Any, Any] | None:
        """Return the operators to ask for, forward and backward; None leaves the choice to xformers."""
        return None

    def operators_refuse(self, fmha: ModuleType, inputs: Any, backward: bool) -> list[str]:
        """Let xformers choose, and list what each operator says where it finds none; then try the choice on one token."""
        try:
            chosen = fmha._dispatch_fw(inputs, backward)
            if backward:
                fmha._dispatch_bw(inputs, varlen_lse_packed=chosen.VARLEN_LSE_PACKED)
        except NotImplementedError as error:  # which lists the reasons of each operator
            found = re.findall(r"`(\S+)` is not supported because:\n((?:    .+\n?)+)", str(error))
            reasons = [f"{name}: {'; '.join(line.strip() for line in lines.splitlines())}" for name, lines in found]
            return reasons or [_one_line(str(error))]
        dims, of = (inputs.query.shape[-1], inputs.value.shape[-1]), (inputs.query.dtype, inputs.device)
        return [f"{chosen.NAME}: {reason}" for reason in _refused_by_build(chosen, dims, *of)]

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        shape = workload.batch, workload.heads, workload.q_len, workload.kv_len
        return math.prod(shape) * element_bytes(workload.dtype) if needs_tensor(workload) else 0

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        fmha, w = self.source.load(), inputs.workload
        operators, scale = self.operators(fmha), w.scale
        bias = tensor_bias(inputs) if needs_tensor(w) else mask_of(fmha, w, inputs.device)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = with_grouped_heads(q, k, v)
            out: torch.Tensor = fmha.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale, op=operators)
            return out.flatten(2, -2)

        if needs_tensor(w) or sequences_of(w) is None:
            return in_bshd(call)
        _, kernel_of = without_padding(inputs)
        return kernel_of(lambda q, k, v: call(q[None], k[None], v[None])[0])


class XformersCutlass(Xformers):
    """memory_efficient_attention with the operators of CUTLASS."""

    name = "xformers_cutlass"
    precision = "cutlass"
    launches = ("CUTLASS", "fmha")
    needs = "CUDA, up to sm90"
    capability_range = ((5, 0), (9, 0))
    known_defects = (
        KnownDefect(
            issue="seen on an H200 with xformers 0.0.35, no report found",
            summary="where some rows see no key, they and the rows beside them are anything, and so are dq, dk and dv",
            applies=lambda workload, machine: sees_nothing(workload),
            tensors=("out", "dq", "dk", "dv"),
        ),
        CUTLASS_SHARED_HEAD,
        _CUTLASS_SHARED_GROUP,
        CUTLASS_OFFSETS,
    )

    def operators(self, fmha: ModuleType) -> tuple[Any, Any]:
        return fmha.cutlass.FwOp, fmha.cutlass.BwOp

    def operators_refuse(self, fmha: ModuleType, inputs: Any, backward: bool) -> list[str]:
        forward, back = self.operators(fmha)
        reasons = forward.not_supported_reasons(inputs)
        if backward:
            reasons = reasons + back.not_supported_reasons(inputs)
        return list(dict.fromkeys(_one_line(reason) for reason in reasons))


# -- what the operators say -------------------------------------------------------------------------------------------


@cache
def _refused_by_build(operator: Any, dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Try an operator with one token: it does not know for which head dimensions flash-attn was built."""
    fmha = Xformers.source.load()
    q, v = (torch.zeros(1, 1, 1, dim, dtype=dtype, device=device) for dim in dims)
    return refusals_of_trial(lambda: fmha.memory_efficient_attention(q, q, v, op=(operator, None)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


# -- how a workload is said: its own classes of masks or a tensor, and GQA in five dimensions --------------------------------

#: Every row of a bias must start at a multiple of 16 bytes: 8 elements are that in each dtype.
_BIAS_STEP = 8


def needs_tensor(w: Workload) -> bool:
    """Return whether no class of masks says it all: a bias, ALiBi, a mask of another kind, or documents within padding."""
    if w.documents:
        return bool(w.bias or w.alibi or w.kv_lens is not None)
    return bool(w.bias or w.alibi or w.band is None)


def sequences_of(w: Workload) -> tuple[list[int], list[int]] | None:
    """Return the lengths of queries and keys where the workload is a row of sequences; None for a plain batch."""
    if w.documents:
        return list(w.documents * w.batch), list(w.documents * w.batch)
    if w.kv_lens is None:
        return None
    return list(w.q_lens or (w.q_len,) * w.batch), list(w.kv_lens)


def unsaid(w: Workload) -> list[str]:
    """List what its masks cannot say of a workload, or say in another sense."""
    is_half_window = w.band is not None and not needs_tensor(w) and not w.band.is_open and w.band.right != 0
    return refusals_of(
        {
            "takes neither ALiBi nor a mask of its own for packed sequences": w.is_packed and needs_tensor(w),
            f"would round ALiBi's distances to {w.dtype} in attn_bias": w.alibi and w.dtype != "float32",
            "has no window to the right of a query for packed or padded sequences": is_half_window and w.kv_lens,
        }
    )


def mask_of(fmha: ModuleType, w: Workload, device: torch.device | str) -> Any:
    """Return the object that says the workload's mask; None where every key is visible."""
    masks, lengths = fmha.attn_bias, sequences_of(w)
    if lengths is not None:
        return _blocks(masks.BlockDiagonalMask.from_seqlens(*lengths, device=torch.device(device)), w)
    band = w.band
    if band is None or band.is_open:
        return None
    if band.is_causal:
        return masks.LowerTriangularMask() if band.top_left else masks.LowerTriangularFromBottomRightMask()
    beyond = w.q_len + w.kv_len  # as far as an open side can reach
    left, right = (beyond if side is None else side for side in (band.left, band.right))
    if right == 0:  # its size counts the query's own key
        return masks.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    return masks.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)


def _blocks(blocks: Any, w: Workload) -> Any:
    """Return what makes each block's own mask of blocks on the diagonal."""
    if w.documents:
        return blocks.make_causal() if w.mask.is_causal else blocks
    band = w.band
    if band is None or band.is_open:
        return blocks
    if band.left is not None:
        return blocks.make_local_attention_from_bottomright(band.left + 1)
    return blocks.make_causal() if band.top_left else blocks.make_causal_from_bottomright()


def tensor_bias(inputs: Inputs) -> torch.Tensor:
    """Return bias, ALiBi and mask as one additive tensor, its rows aligned by slicing a wider one."""
    w, mask = inputs.workload, additive_or_boolean_mask(inputs)
    assert mask is not None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=inputs.q.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    aligned = mask.new_zeros(*mask.shape[:3], w.kv_len + -w.kv_len % _BIAS_STEP)
    aligned[..., : w.kv_len] = mask
    return _per_head(aligned, w)


def _per_head(aligned: torch.Tensor, w: Workload) -> torch.Tensor:
    """Expand an aligned bias to the shape that is asked for, with the heads of GQA in two dimensions."""
    bias = aligned[..., : w.kv_len].expand(w.batch, w.heads, w.q_len, w.kv_len)
    return bias if w.group == 1 else bias.reshape(w.batch, w.kv_heads, w.group, w.q_len, w.kv_len)


def with_grouped_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (batch, rows, heads, dim) as they are, or under GQA as (batch, rows, key heads, group, dim)."""
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    if group == 1:
        return q, k, v
    k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
    return q.reshape(batch, rows, kv_heads, group, dim), k, v


def empty_inputs(fmha: ModuleType, w: Workload, device: str) -> Any:
    """Return xformers' Inputs for a workload, with the shapes and strides that `prepare` hands over, and no values."""
    dtype = getattr(torch, w.dtype)
    lengths = None if needs_tensor(w) else sequences_of(w)
    batch, rows, keys = (w.batch, w.q_len, w.kv_len) if lengths is None else (1, sum(lengths[0]), sum(lengths[1]))

    def empty(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.empty(batch, length, heads, dim, dtype=dtype, device=device)

    q, k = empty(rows, w.heads, w.head_dim), empty(keys, w.kv_heads, w.head_dim)
    q, k, v = with_grouped_heads(q, k, empty(keys, w.kv_heads, w.v_head_dim))
    if needs_tensor(w):
        bias = _per_head(torch.empty(1, 1, 1, w.kv_len + -w.kv_len % _BIAS_STEP, dtype=dtype, device=device), w)
    else:
        bias = mask_of(fmha, w, device)
    return fmha.Inputs(query=q, key=k, value=v, attn_bias=bias, scale=w.scale)
