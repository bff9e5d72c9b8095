"""State: what a library keeps from one call and uses in the next, where it should not."""

import dataclasses
from typing import Any

from torch import Tensor

from pytest_attn.guests.mutants.kernel import QKV, Kernel, KernelCall, Sequence
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import any_of, is_band, is_dense, is_packed, is_padded
from pytest_attn.guests.mutants.strides import read_with_strides
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Mask, MaskMod

STATE = Defects("state")


def _compiled_for(call: KernelCall) -> tuple[Any, ...]:
    """The key of a cache of compiled kernels that has only what comes to mind first."""
    return call.workload.head_dim, call.workload.v_head_dim, call.q.dtype


def _shapes(call: KernelCall) -> tuple[Any, ...]:
    """The key of a cache of buffers."""
    return tuple(call.q.shape), tuple(call.k.shape), tuple(call.v.shape), call.q.dtype


@STATE(
    Kernel.forward,
    "KernelBench#82, FI#4014",
    condition="calls",
    faults=("result-changes-later", "other-calls-matter", "calls-differ"),
)
def result_kept_by_address(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """A result is returned again where q, k and v lie where they did, whatever their values are now."""
    key = (*(t.data_ptr() for t in (call.q, call.k, call.v)), *_shapes(call))
    if key not in kernel.kept:
        kernel.kept[key] = Kernel.forward(kernel, call)
    out, lse = kernel.kept[key]
    return out.clone(), lse.clone()


@STATE(Kernel.mask_mod, "FI#1028", condition="workloads")
def mask_kept_by_shape(kernel: Kernel, seq: Sequence, mask: Mask) -> MaskMod:
    """A mask written out once is used for every later one of its shape."""
    w = seq.workload
    kept: MaskMod = kernel.kept.setdefault((w.batch, w.heads, w.q_len, w.kv_len), Kernel.mask_mod(kernel, seq, mask))
    return kept


@STATE(Kernel.mask, "FA#2298, FA#2402", applies=is_band, condition="workloads")
def causal_flag_of_first_call(kernel: Kernel, seq: Sequence) -> Mask | None:
    """The key under which a compiled kernel is found lacks the mask."""
    mask = Kernel.mask(kernel, seq)
    if mask is not None and mask.band is None:
        return mask
    first: Mask | None = kernel.kept.setdefault(("mask", *_compiled_for(seq.call)), mask)
    return first


@STATE(Kernel.scale, "FI#4014, FI#1072", condition="workloads")
def scale_of_first_call(kernel: Kernel, call: KernelCall) -> float:
    """The key under which a compiled kernel is found lacks the scale."""
    first: float = kernel.kept.setdefault(("scale", *_compiled_for(call)), Kernel.scale(kernel, call))
    return first


@STATE(Kernel.softcap, "FA#2402", condition="workloads")
def softcap_of_first_call(kernel: Kernel, call: KernelCall) -> float | None:
    """The key under which a compiled kernel is found lacks the softcap."""
    first: float | None = kernel.kept.setdefault(("softcap", *_compiled_for(call)), Kernel.softcap(kernel, call))
    return first


@STATE(Kernel.lengths, "vllm#37442, vllm#37682", applies=any_of(is_padded, is_packed), condition="workloads")
def lengths_of_first_call(kernel: Kernel, call: KernelCall, batch: int) -> Sequence:
    """A captured graph has the lengths in it that it was captured with."""
    first: Sequence = kernel.kept.setdefault((batch, *_shapes(call)), Kernel.lengths(kernel, call, batch))
    return first._replace(call=call)


@STATE(Kernel.pages, "vllm#37442, FI#2002", condition="workloads")
def page_table_of_first_call(kernel: Kernel, seq: Sequence, number: Tensor) -> Tensor:
    """A captured graph has the page table in it that it was captured with."""
    first: Inputs = kernel.kept.setdefault(("table", *_shapes(seq.call)), seq.call.inputs)
    return Kernel.pages(kernel, seq._replace(call=dataclasses.replace(seq.call, inputs=first)), number)


@STATE(Kernel.receive, "FA#2298, FA#2189, PT#146377", applies=is_dense, condition="layouts", faults="strides-misread")
def strides_of_first_call(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The key under which a compiled kernel is found lacks the strides."""
    if k.dim() != 4:  # packed sequences: that kernel is compiled apart
        return q, k, v
    strides = kernel.kept.setdefault(("strides", k.shape), k.stride())
    return q, read_with_strides(k, strides), v


@STATE(Kernel.backward, "PT#141147", applies=is_dense, backward=True, condition="layouts")
def dout_strides_of_first_call(
    kernel: Kernel, call: KernelCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> QKV:
    """The key under which a plan of the backward pass is found lacks dout's strides, as cuDNN's in torch 2.11 does."""
    strides = tuple(t.stride() for t in (call.q, call.k, call.v))
    first = kernel.kept.setdefault(("dout", strides, dout.shape), dout.stride())
    return Kernel.backward(kernel, call, out, lse, read_with_strides(dout, first), dlse)


@STATE(Kernel.gradient_sums, "FI#2002, diffusers#14265", backward=True, condition="calls", faults="calls-differ")
def gradient_sums_not_cleared(kernel: Kernel, call: KernelCall) -> QKV:
    """The workspace in which dk is summed still holds that of the call before."""
    dq, dk, dv = Kernel.gradient_sums(kernel, call)
    return dq, kernel.kept.setdefault(("dk", _shapes(call)), dk), dv


@STATE(Kernel.allocate_results, "KernelBench#82, FA#2063", condition="held", faults="result-changes-later")
def out_buffer_reused(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """Every call of a shape returns the same memory: an earlier result changes."""
    out, lse = Kernel.allocate_results(kernel, call)
    kept: Tensor = kernel.kept.setdefault(("out", out.shape, out.dtype), out)
    return kept.detach(), lse


@STATE.kernel("FA#2063, diffusers#14265", backward=True, condition="held")
class _SavedLseInSharedWorkspace(Kernel):
    """lse is saved for the backward pass in a workspace that the next forward pass writes to."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        self.kept["lse", lse.shape] = lse.clone()
        return out, lse

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        last: Tensor = self.kept["lse", lse.shape]
        return last
