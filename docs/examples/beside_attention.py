"""What stands beside attention, held to its float64 result: where each kernel may round. Copy what you need.

Each function takes a kernel and its inputs, and raises AssertionError where the kernel is wrong. dtype: of the result.
"""

import torch
from torch.nn.functional import gelu

from pytest_attn import Quantized, Rounded, assert_rounded

# -- RMSNorm -------------------------------------------------------------------------------------------------------------


def check_rms_norm(kernel, x, weight, eps):
    """Draw rows as small as the root of eps, or nothing shows it."""
    inverse = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = x.double() * inverse
    exact = normed * weight.double()
    roundings = [
        Rounded("float32", of=inverse, times=x.shape[-1], by=x.double() * weight.double()),  # a row shares its sum
        Rounded("float32", of=exact, times=4),
        Rounded(x.dtype, of=normed, by=weight.double()),  # in kernels that round before the weight
        Rounded(x.dtype, of=exact),
    ]
    return assert_rounded(kernel(x, weight), exact, roundings)


# -- RoPE ----------------------------------------------------------------------------------------------------------------


def halves(x):
    """Return both numbers of each pair, where i and i + dim / 2 are one (GPT-NeoX, Llama in transformers)."""
    return x.chunk(2, -1)


def pairs(x):
    """Return both numbers of each pair, where 2i and 2i + 1 are one (GPT-J, Llama as it was published)."""
    return x[..., ::2], x[..., 1::2]


def joined(split, one, other):
    """Put together what `split` took apart."""
    return torch.cat((one, other), -1) if split is halves else torch.stack((one, other), -1).flatten(-2)


def check_rope(kernel, split, x, cos, sin):
    """Tables are float32, (tokens, dim / 2), as the kernel gets them; what their angles lose is not its fault."""
    (one, other), cos, sin = split(x.double()), cos.double(), sin.double()
    exact = joined(split, one * cos - other * sin, other * cos + one * sin)
    roundings = [
        Rounded(x.dtype, of=joined(split, one * cos, other * cos), times=2),  # a table and a product in the dtype
        Rounded(x.dtype, of=joined(split, other * sin, one * sin), times=2),
        Rounded(x.dtype, of=exact),
        Rounded("float32", of=joined(split, one, other).abs() + exact.abs(), times=4),
    ]
    return assert_rounded(kernel(x), exact, roundings)


# -- softmax -------------------------------------------------------------------------------------------------------------


def check_softmax(kernel, x, dtype):
    """Draw some numbers beyond 88, where float32 overflows without the maximum."""
    exact, top = x.double().softmax(-1), x.double().amax(-1, keepdim=True)
    total = (x.double() - top).exp().sum(-1, keepdim=True)
    exponents = (x.double().abs() + top.abs()).nan_to_num(posinf=0.0)  # an error of these is a relative one of the result
    roundings = [
        Rounded("float32", of=exact * (1 + exponents), times=4),
        Rounded("float32", of=total, times=x.shape[-1], by=exact / total),
        Rounded(dtype, of=exact),
    ]
    return assert_rounded(kernel(x), exact, roundings)


# -- GEMM, SwiGLU --------------------------------------------------------------------------------------------------------


def check_gemm(kernel, a, b, dtype):
    """A float32 result of tensor cores, which cut off, counts four times."""
    exact, magnitudes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    roundings = [Rounded("float32", of=magnitudes, times=a.shape[-1]), Rounded(dtype, of=exact)]
    return assert_rounded(kernel(a, b), exact, roundings)


def check_gated(kernel, act, gate, up):
    """SwiGLU and GEGLU: act is torch's silu or gelu."""
    activated, up64 = act(gate.double()), up.double()
    exact = activated * up64
    lost = gate.double() if act is gelu else activated * (1 + gate.double().abs())  # of 1 + erf; of the exponent
    roundings = [
        Rounded("float32", of=lost, by=up64, times=16),
        Rounded(gate.dtype, of=activated, by=up64),  # in kernels that round before the product
        Rounded(gate.dtype, of=exact),
    ]
    return assert_rounded(kernel(gate, up), exact, roundings)


# -- block scales ----------------------------------------------------------------------------------------------------------


def check_dequantize(kernel, codes, zeros, scales, dtype):
    """Zero points and scales are spread over the elements of their blocks."""
    whole = codes.double() - zeros.double()
    exact = whole * scales.double()
    roundings = [
        Rounded("float32", of=exact),
        Rounded(dtype, of=scales.double(), by=whole),  # in kernels that round the scale
        Rounded(dtype, of=exact),
    ]
    return assert_rounded(kernel(), exact, roundings)


def check_quantize(codes, scales, x):
    """Whichever scale a kernel chose, its numbers are within half a step of it; a tie may go either way."""
    step = scales.double()
    return assert_rounded(codes.double() * step, x.double(), [Quantized(step), Rounded("float32", of=x.double(), times=3)])
