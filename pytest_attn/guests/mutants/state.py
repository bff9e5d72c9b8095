"""State: what a library keeps from one call and uses in the next, where it should not."""

import dataclasses
from typing import Any

from torch import Tensor

from pytest_attn.guests.mutants.kernel import QKV, Extent, Kernel, KernelCall, Sequence
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import any_of, is_band, is_custom, is_dense, is_packed, is_padded, is_paged
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
    "KernelBench#82",
    "FI#4014",
    condition="calls",
    faults=("result-changes-later", "other-calls-matter", "calls-differ"),
)
class _ResultKeptByAddress(Kernel):
    """A result is returned again where q, k and v lie where they did, whatever their values are now."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        key = (*(t.data_ptr() for t in (call.q, call.k, call.v)), *_shapes(call))
        if key not in self.kept:
            self.kept[key] = super().forward(call)
        out, lse = self.kept[key]
        return out.clone(), lse.clone()


@STATE("FI#1028", applies=is_custom, condition="workloads")
class _MaskKeptByShape(Kernel):
    """A mask written out once is used for every later one of its shape."""

    def mask_mod(self, seq: Sequence, mask: Mask) -> MaskMod:
        w = seq.workload
        kept: MaskMod = self.kept.setdefault((w.batch, w.heads, w.q_len, w.kv_len), super().mask_mod(seq, mask))
        return kept


@STATE("FA#2298", "FA#2402", applies=is_band, condition="workloads")
class _CausalFlagOfFirstCall(Kernel):
    """The key under which a compiled kernel is found lacks the mask."""

    def mask(self, seq: Sequence) -> Mask | None:
        mask = super().mask(seq)
        if mask is not None and mask.band is None:
            return mask
        first: Mask | None = self.kept.setdefault(("mask", *_compiled_for(seq.call)), mask)
        return first


@STATE("FI#4014", "FI#1072", condition="workloads")
class _ScaleOfFirstCall(Kernel):
    """The key under which a compiled kernel is found lacks the scale."""

    def scale(self, call: KernelCall) -> float:
        first: float = self.kept.setdefault(("scale", *_compiled_for(call)), super().scale(call))
        return first


@STATE("FA#2402", applies=lambda w: w.softcap is not None, condition="workloads")
class _SoftcapOfFirstCall(Kernel):
    """The key under which a compiled kernel is found lacks the softcap."""

    def softcap(self, call: KernelCall) -> float | None:
        first: float | None = self.kept.setdefault(("softcap", *_compiled_for(call)), super().softcap(call))
        return first


@STATE("vllm#37442", "vllm#37682", applies=any_of(is_padded, is_packed), condition="workloads")
class _LengthsOfFirstCall(Kernel):
    """A captured graph has the lengths in it that it was captured with."""

    def lengths(self, call: KernelCall, batch: int) -> Extent:
        first: Extent = self.kept.setdefault((batch, *_shapes(call)), super().lengths(call, batch))
        return first


@STATE("vllm#37442", "FI#2002", applies=is_paged, condition="workloads")
class _PageTableOfFirstCall(Kernel):
    """A captured graph has the page table in it that it was captured with."""

    def pages(self, seq: Sequence, number: Tensor) -> Tensor:
        first: Inputs = self.kept.setdefault(("table", *_shapes(seq.call)), seq.call.inputs)
        return super().pages(dataclasses.replace(seq, call=dataclasses.replace(seq.call, inputs=first)), number)


@STATE("FA#2298", "FA#2189", "PT#146377", applies=is_dense, condition="layouts", faults=("strides-misread",))
class _StridesOfFirstCall(Kernel):
    """The key under which a compiled kernel is found lacks the strides."""

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        if k.dim() != 4:  # packed sequences: that kernel is compiled apart
            return q, k, v
        strides = self.kept.setdefault(("strides", k.shape), k.stride())
        return q, read_with_strides(k, strides), v


@STATE("PT#141147", applies=is_dense, backward=True, condition="layouts")
class _DoutStridesOfFirstCall(Kernel):
    """The key under which a plan of the backward pass is found lacks dout's strides, as cuDNN's in torch 2.11 does."""

    def backward(
        self, call: KernelCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        strides = tuple(t.stride() for t in (call.q, call.k, call.v))
        first = self.kept.setdefault(("dout", strides, dout.shape), dout.stride())
        return super().backward(call, out, lse, read_with_strides(dout, first), dlse)


@STATE("FI#2002", "diffusers#14265", backward=True, condition="calls", faults=("calls-differ",))
class _GradientSumsNotCleared(Kernel):
    """The workspace in which dk is summed still holds that of the call before."""

    def gradient_sums(self, call: KernelCall) -> QKV:
        dq, dk, dv = super().gradient_sums(call)
        return dq, self.kept.setdefault(("dk", _shapes(call)), dk), dv


@STATE("KernelBench#82", "FA#2063", condition="held", faults=("result-changes-later",))
class _OutBufferReused(Kernel):
    """Every call of a shape returns the same memory: an earlier result changes."""

    def allocate_results(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().allocate_results(call)
        kept: Tensor = self.kept.setdefault(("out", out.shape, out.dtype), out)
        return kept.detach(), lse


@STATE("FA#2063", "diffusers#14265", backward=True, condition="held")
class _SavedLseInSharedWorkspace(Kernel):
    """lse is saved for the backward pass in a workspace that the next forward pass writes to."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        self.kept["lse", lse.shape] = lse.clone()
        return out, lse

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        last: Tensor = self.kept["lse", lse.shape]
        return last
