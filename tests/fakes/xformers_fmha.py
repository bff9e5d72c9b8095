"""xformers.ops.fmha of xformers 0.0.35 with flash-attn 2 and CUTLASS: signatures, choice of operator and its refusals."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fakes.attention import attention
from fakes.signatures import row

from . import attn_bias

MASKS = attn_bias
HALF = {torch.half, torch.bfloat16}


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False

    @property
    def device(self):
        return self.query.device

    def validate_inputs(self):
        shapes = [tuple(t.shape) for t in (self.query, self.key, self.value)]
        if any(shape[:1] + shape[2:-1] != shapes[0][:1] + shapes[0][2:-1] for shape in shapes):
            raise ValueError(f"Incompatible shapes for attention inputs: {shapes}")
        if isinstance(self.attn_bias, torch.Tensor) and self.query.ndim == 4:
            batch, rows, heads, _ = shapes[0]
            if self.attn_bias.shape != (batch, heads, rows, shapes[1][1]):
                raise ValueError(f"Invalid shape for attention bias: {self.attn_bias.shape}")
        if isinstance(self.attn_bias, MASKS.BlockDiagonalMask) and shapes[0][0] != 1:
            raise ValueError("Expected batch_size=1 when using block-diagonal bias")


class _Op:
    SUPPORTED_DTYPES = HALF
    SUPPORTED_MAX_K = 256
    SUPPORTS_DIFFERENT_VALUE_EMBED = False
    SUPPORTS_BMGHK = True
    VARLEN_LSE_PACKED = True

    @classmethod
    def not_supported_reasons(cls, d):
        reasons = []
        dims = d.query.shape[-1], d.value.shape[-1]
        if not cls.SUPPORTS_DIFFERENT_VALUE_EMBED and dims[0] != dims[1]:
            reasons.append("query.shape[-1] != value.shape[-1]")
        if max(dims) > cls.SUPPORTED_MAX_K:
            reasons.append(f"max(query.shape[-1], value.shape[-1]) > {cls.SUPPORTED_MAX_K}")
        if d.query.dtype not in cls.SUPPORTED_DTYPES:
            reasons.append(f"dtype={d.query.dtype} (supported: {cls.SUPPORTED_DTYPES})")
        if type(d.attn_bias) not in cls.BIASES:
            reasons.append(f"attn_bias type is {type(d.attn_bias)}")
        if not cls.SUPPORTS_BMGHK and d.query.ndim == 5:
            reasons.append("operator does not support BMGHK format")
        if d.query.shape[-1] % 8:
            reasons.append("query.shape[-1] % 8 != 0")
        if isinstance(d.attn_bias, torch.Tensor):
            alignment = 128 // torch.finfo(d.attn_bias.dtype).bits
            strides = d.attn_bias.stride()
            unaligned = [stride for stride in strides[:-1] if stride % alignment]
            reasons += [f"attn_bias.stride(-2) % {alignment} != 0 (attn_bias.stride() = {strides})" for _ in unaligned]
            if d.attn_bias.stride(-1) > 1:
                reasons.append("attn_bias.stride(-1) > 1")
        return _check_topleft(d, reasons) if cls.NAME.startswith("fa2") else reasons


def _check_topleft(d, reasons):
    if isinstance(d.attn_bias, MASKS.BlockDiagonalCausalMask):
        if d.attn_bias.q_seqinfo.seqstart_py != d.attn_bias.k_seqinfo.seqstart_py:
            reasons.append("Only support BlockDiagonalCausalMask if equal numbers of keys and queries")
    elif isinstance(d.attn_bias, MASKS.LowerTriangularMask) and d.query.shape[1] != d.key.shape[1]:
        reasons.append("Only support LowerTriangularMask if equal number ofkeys and queries")
    return reasons


def _operator(name, *biases, **differs):
    return type(name, (_Op,), {"NAME": name, "BIASES": biases, **differs})


IN_BOTH = (
    *(MASKS.LowerTriangularMask, MASKS.LowerTriangularFromBottomRightMask, MASKS.BlockDiagonalMask),
    *(MASKS.BlockDiagonalCausalMask, MASKS.BlockDiagonalCausalFromBottomRightMask, type(None)),
)
LOCAL = (
    MASKS.LowerTriangularFromBottomRightLocalAttentionMask,
    MASKS.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)
OF_FLASH = (*IN_BOTH, *LOCAL, MASKS.LocalAttentionFromBottomRightMask)
OF_CUTLASS = {
    "SUPPORTED_DTYPES": HALF | {torch.float},
    "SUPPORTED_MAX_K": 65536,
    "SUPPORTS_DIFFERENT_VALUE_EMBED": True,
    "VARLEN_LSE_PACKED": False,
}
flash = SimpleNamespace(FwOp=_operator("fa2F@2.8.3", *OF_FLASH), BwOp=_operator("fa2B@2.8.3", *OF_FLASH, SUPPORTS_BMGHK=False))
cutlass = SimpleNamespace(
    FwOp=_operator("cutlassF-pt", torch.Tensor, *IN_BOTH, *LOCAL, **OF_CUTLASS),
    BwOp=_operator("cutlassB-pt", torch.Tensor, *IN_BOTH, **OF_CUTLASS, SUPPORTS_BMGHK=False),
)


def _run_priority_list(name, ops, inp, extra=()):
    reasons = [(op, op.not_supported_reasons(inp)) for op in ops]
    for op, against in reasons:
        if not against:
            return op
    text = f"No operator found for `{name}` with inputs:\n     query       : shape={tuple(inp.query.shape)}"
    for op, against in [*reasons, *extra]:
        text += f"\n`{op.NAME}` is not supported because:\n    " + "\n    ".join(against)
    raise NotImplementedError(text)


def _dispatch_fw(inp, needs_gradient):
    return _run_priority_list("memory_efficient_attention_forward", [flash.FwOp, cutlass.FwOp], inp)


def _dispatch_bw(inp, varlen_lse_packed):
    ops, extra = [flash.BwOp, cutlass.BwOp], []
    if isinstance(inp.attn_bias, MASKS.BlockDiagonalMask) and inp.attn_bias.q_seqinfo.seqstart.shape[0] > 2:
        assert varlen_lse_packed is not None
        told = [f"LSE is in {'packed' if varlen_lse_packed else 'padded'} format"]
        extra = [(op, told) for op in ops if varlen_lse_packed != op.VARLEN_LSE_PACKED]
        ops = [op for op in ops if varlen_lse_packed == op.VARLEN_LSE_PACKED]
    return _run_priority_list("memory_efficient_attention_backward", ops, inp, extra)


@row("xformers", "memory_efficient_attention")
def memory_efficient_attention(query, key, value, attn_bias, p, scale, op, output_dtype):
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    inp.validate_inputs()
    needs_gradient = any(t.requires_grad for t in (query, key, value))
    if op is None:
        forward = _dispatch_fw(inp, needs_gradient)
        if needs_gradient:
            _dispatch_bw(inp, forward.VARLEN_LSE_PACKED)
    else:
        for operator in op[: 1 + needs_gradient]:
            if operator.not_supported_reasons(inp):
                raise ValueError(f"Operator `memory_efficient_attention` does not support inputs: {operator.NAME}")
        forward = op[0]
    _check_build(forward, query)
    shape = (*query.shape[:-1], value.shape[-1])
    if query.ndim == 5:
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    options = {}
    if isinstance(attn_bias, torch.Tensor):
        options["bias"] = attn_bias.flatten(1, -3)
    elif attn_bias is not None:
        options["visible"] = attn_bias.visible(query.shape[1], key.shape[1])
    return attention(query, key, value, scale=scale, **options)[0].reshape(shape)


def _check_build(operator, query):
    pass
