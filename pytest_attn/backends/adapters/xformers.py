"""xformers' memory_efficient_attention: with the operator that it chooses, and with CUTLASS's."""

from __future__ import annotations

import math
import re
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import (
    CUTLASS_OFFSETS,
    CUTLASS_SHARED_GROUP,
    CUTLASS_SHARED_HEAD,
    sees_nothing,
)
from pytest_attn.backends.known_defect import KnownDefect
from pytest_attn.backends.layouts import as_packed, in_bshd, without_padding
from pytest_attn.backends.library import Library, refusal_of_build
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.backends.xformers_inputs import (
    empty_inputs,
    mask_of,
    needs_tensor,
    sequences_of,
    tensor_bias,
    unsaid,
    with_grouped_heads,
)
from pytest_attn.workloads.fields import element_bytes
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: What is used of xformers.ops.fmha; where mslk is missing, newer releases leave it an empty module.
_USED = ("memory_efficient_attention", "attn_bias", "cutlass", "Inputs", "_dispatch_fw", "_dispatch_bw")


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
    known_defects: tuple[KnownDefect, ...] = (CUTLASS_SHARED_HEAD, CUTLASS_SHARED_GROUP)
    capabilities = Capabilities(
        masks=frozenset(("top-left", "bottom-right", "window", "documents", "any")),
        features=frozenset(("bias", "alibi", "scale", "grouped heads", "packed", "padded", "backward")),
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        v_head_dim=True,
    )

    def pads_by_mask(self, workload: Workload) -> bool:
        """Where no class of its own says the mask, a tensor does, and hides padding too."""
        return needs_tensor(workload)

    def broken_because(self) -> str | None:
        """Import the library, and ask it whether its compiled part was loaded: without it, it imports but runs nothing."""
        return super().broken_because() or _incomplete_because(self.source)

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
        del fmha
        return None

    def operators_refuse(self, fmha: ModuleType, inputs: Any, backward: bool) -> list[str]:
        """Let xformers choose, and list what each operator says where it finds none; then try the choice on one token."""
        try:
            chosen = fmha._dispatch_fw(inputs, backward)
            if backward:
                fmha._dispatch_bw(inputs, varlen_lse_packed=chosen.VARLEN_LSE_PACKED)
        except NotImplementedError as error:
            return _each_operator(str(error))
        reason = _refused_by_build(chosen, inputs.query.shape[-1], inputs.value.shape[-1], inputs.query.dtype, inputs.device)
        return [f"{chosen.NAME}: {reason}"] if reason else []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """A dense mask, where the workload needs one."""
        shape = workload.batch, workload.heads, workload.q_len, workload.kv_len
        return math.prod(shape) * element_bytes(workload.dtype) if needs_tensor(workload) else 0

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Build the mask once."""
        fmha, w = self.source.load(), inputs.workload
        operators, scale = self.operators(fmha), w.scale
        bias = tensor_bias(inputs) if needs_tensor(w) else mask_of(fmha, w, inputs.device)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = with_grouped_heads(q, k, v)
            out: torch.Tensor = fmha.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale, op=operators)
            return out.flatten(2, -2)

        if needs_tensor(w) or sequences_of(w) is None:
            return in_bshd(call)
        inputs, kernel_of = without_padding(inputs)
        return kernel_of(as_packed(lambda q, k, v: call(q[None], k[None], v[None])[0], inputs.workload))


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
        CUTLASS_SHARED_GROUP,
        CUTLASS_OFFSETS,
    )

    def operators(self, fmha: ModuleType) -> tuple[Any, Any]:
        """CUTLASS's own pair."""
        return fmha.cutlass.FwOp, fmha.cutlass.BwOp

    def operators_refuse(self, fmha: ModuleType, inputs: Any, backward: bool) -> list[str]:
        """Ask both operators."""
        forward, back = self.operators(fmha)
        reasons = forward.not_supported_reasons(inputs)
        if backward:
            reasons = reasons + back.not_supported_reasons(inputs)
        return list(dict.fromkeys(_one_line(reason) for reason in reasons))


def _incomplete_because(source: Library) -> str | None:
    fmha = source.load()
    missing = [name for name in _USED if not hasattr(fmha, name)]
    if missing:
        return f"{source.module} is installed but has no {missing[0]}"
    failure = getattr(sys.modules.get("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    return None if failure is None else _one_line(str(failure))


# -- what the operators say -------------------------------------------------------------------------------------------


def _each_operator(message: str) -> list[str]:
    """Return the operators' reasons, each behind its operator's name, out of the message that lists them."""
    found = re.findall(r"`(\S+)` is not supported because:\n((?:    .+\n?)+)", message)
    reasons = [f"{name}: {'; '.join(line.strip() for line in lines.splitlines())}" for name, lines in found]
    return reasons or [_one_line(message)]


@cache
def _refused_by_build(operator: Any, head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Try an operator with one token: it does not know for which head dimensions flash-attn was built."""
    import torch

    fmha = Xformers.source.load()
    q, v = (torch.zeros(1, 1, 1, dim, dtype=dtype, device=device) for dim in (head_dim, v_head_dim))
    try:
        fmha.memory_efficient_attention(q, q, v, op=(operator, None))
    except RuntimeError as error:
        if (reason := refusal_of_build(error)) is None:
            raise
        return reason
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())
