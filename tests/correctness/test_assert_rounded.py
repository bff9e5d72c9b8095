"""`assert_rounded` on what stands beside attention: honest kernels pass, however they round, and planted faults are found."""

import math
import re
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from pytest_attn import ContractError, Quantized, Rounded, assert_rounded

BESIDE = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/beside_attention.py")))
halves, pairs, joined = BESIDE.halves, BESIDE.pairs, BESIDE.joined
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5
BLOCK = 32


class Problem(NamedTuple):
    """draw(dice): inputs of a size that is drawn. judge(kernel, *inputs): hold a kernel of them against the exact result."""

    draw: object
    judge: object
    honest: dict
    faults: dict


class Dice:
    """Random sizes and numbers. `is_plain`: sizes of the upper half, and nothing that hides a fault, as equal values."""

    def __init__(self, seed, is_plain=False):
        self.generator, self.is_plain = torch.Generator().manual_seed(seed), is_plain

    def size(self, most):
        return int(torch.randint(most // 2 if self.is_plain else 1, most + 1, (1,), generator=self.generator))

    def one_of(self, *choices):
        return choices[int(torch.randint(len(choices), (1,), generator=self.generator))]

    def is_special(self, n):
        return not self.is_plain and self.one_of(*range(n)) == 0

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.generator).to(dtype)

    def spread(self, rows, size, least=-3.0, most=1.0):
        """Return rows of very different magnitude; in one draw of eight all values of a row are alike."""
        x = torch.ones(rows, size) if self.is_special(8) else self.normal(rows, size)
        return x * torch.logspace(least, most, rows)[:, None]


# -- RMSNorm -------------------------------------------------------------------------------------------------------------


def draw_norm(dice):
    size, dtype = 8 * dice.size(64), dice.one_of(*DTYPES)
    return dice.spread(dice.size(40), size).to(dtype), (dice.normal(size) + 1).to(dtype)


def norm(x, weight, eps=EPS, plus=0.0, center=False):
    x32 = x.float() - x.float().mean(-1, keepdim=True) if center else x.float()
    normed = x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * (weight.float() + plus)).to(x.dtype)


def norm_rounding_twice(x, weight):
    return norm(x, torch.ones_like(weight)) * weight


def norm_of_a_sum_in_order(x, weight):
    squares = x.float().square().cumsum(-1)[..., -1:] / x.shape[-1]
    return (x.float() / (squares + EPS).sqrt() * weight.float()).to(x.dtype)


NORM = Problem(
    draw_norm,
    partial(BESIDE.check_rms_norm, eps=EPS),
    honest={
        "once": norm,
        "twice": norm_rounding_twice,
        "in order": norm_of_a_sum_in_order,
        "torch": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    },
    faults={
        "eps forgotten": partial(norm, eps=0.0),
        "eps of another model": partial(norm, eps=1e-6),
        "weight + 1": partial(norm, plus=1.0),
        "mean subtracted": partial(norm, center=True),
        "weights of the neighbour": lambda x, weight: norm(x, weight.roll(1)),
    },
)

# -- RoPE ----------------------------------------------------------------------------------------------------------------


def tables(tokens, dim, first=0, base=10_000.0):
    angles = torch.outer(torch.arange(first, first + tokens).double(), base ** (-torch.arange(0, dim, 2).double() / dim))
    return angles.cos().float(), angles.sin().float()


def draw_rope(dice):
    tokens, dim = dice.size(40), 16 * dice.size(8)
    x = dice.normal(2, 2, tokens, dim) * dice.one_of(0.01, 0.1, 1.0, 10.0, 100.0)
    return x.to(dice.one_of(*DTYPES)), tokens, dim, dice.size(10_000)


def rotate(split, x, cos, sin):
    one, other = split(x)
    return joined(split, one * cos - other * sin, other * cos + one * sin)


def judge_rope(split, kernel, x, tokens, dim, first):
    return BESIDE.check_rope(lambda x: kernel(split, x, tokens, dim, first), split, x, *tables(tokens, dim, first))


def rope(split, x, tokens, dim, first, off=0, sign=1.0, base=10_000.0):
    cos, sin = tables(tokens, dim, first + off, base)
    return rotate(split, x.float(), cos, sign * sin).to(x.dtype)


def rope_in_the_dtype(split, x, tokens, dim, first):
    cos, sin = (table.to(x.dtype) for table in tables(tokens, dim, first))
    return rotate(split, x, cos, sin)


def rope_of_complex_numbers(split, x, tokens, dim, first):
    one, other = split(x.float())
    turned = torch.complex(one, other) * torch.complex(*tables(tokens, dim, first))
    return joined(split, turned.real, turned.imag).to(x.dtype)


def rope_paired_otherwise(split, *inputs):
    return rope(halves if split is pairs else pairs, *inputs)


def rope_of_all_but_the_last_pair(split, x, tokens, dim, first):
    cos, sin = tables(tokens, dim, first)
    cos[:, -1], sin[:, -1] = 1.0, 0.0
    return rotate(split, x.float(), cos, sin).to(x.dtype)


def rope_of_swapped_tables(split, x, tokens, dim, first):
    return rotate(split, x.float(), *reversed(tables(tokens, dim, first))).to(x.dtype)


def rope_problem(split):
    return Problem(
        draw_rope,
        partial(judge_rope, split),
        honest={"once": rope, "in the dtype": rope_in_the_dtype, "complex": rope_of_complex_numbers},
        faults={
            "wrong pairing": rope_paired_otherwise,
            "position off by one": partial(rope, off=1),
            "turned back": partial(rope, sign=-1.0),
            "base of another model": partial(rope, base=500_000.0),
            "cos and sin swapped": rope_of_swapped_tables,
            "last pair as it was": rope_of_all_but_the_last_pair,
        },
    )


# -- softmax -------------------------------------------------------------------------------------------------------------


def draw_softmax(dice):
    size = 32 + dice.size(400)
    x = dice.spread(1 + dice.size(40), size, -2.0, 2.3)
    x[0, size // 2 :] = -math.inf
    return x, dice.one_of(*DTYPES)


def softmax(x, dtype, dim=-1, shift=True, exp=torch.exp, keys=None):
    exps = exp(x - x.amax(dim, keepdim=True) if shift else x)
    return (exps / exps[..., :keys].sum(dim, keepdim=True)).to(dtype)


def softmax_summed_in_bfloat16(x, dtype):
    exps, total = (x - x.amax(-1, keepdim=True)).exp(), torch.zeros(x.shape[0], dtype=torch.bfloat16)
    for column in exps.unbind(-1):
        total += column.bfloat16()
    return (exps / total[:, None]).to(dtype)


def softmax_online(x, dtype):
    top, total = torch.full((x.shape[0], 1), -math.inf), torch.zeros(x.shape[0], 1)
    for tile in x.split(16, -1):
        new = top.maximum(tile.amax(-1, keepdim=True))
        total = total * (top - new).exp() + (tile - new).exp().sum(-1, keepdim=True)
        top = new
    return ((x - top).exp() * total.reciprocal()).to(dtype)


def softmax_of_powers_of_2(x, dtype):
    scaled = x * math.log2(math.e)
    exps = torch.exp2(scaled - scaled.amax(-1, keepdim=True))
    return (exps / exps.sum(-1, keepdim=True)).to(dtype)


SOFTMAX = Problem(
    draw_softmax,
    lambda kernel, x, dtype: BESIDE.check_softmax(partial(kernel, dtype=dtype), x, dtype),
    honest={
        "plain": softmax,
        "online": softmax_online,
        "powers of 2": softmax_of_powers_of_2,
        "torch": lambda x, dtype: x.softmax(-1).to(dtype),
    },
    faults={
        "over the wrong dimension": partial(softmax, dim=-2),
        "max missing": partial(softmax, shift=False),
        "powers of 2": partial(softmax, exp=torch.exp2),
        "last tile not in the sum": partial(softmax, keys=-16),
        "hidden keys at -10": lambda x, dtype: softmax(x.nan_to_num(neginf=-10.0), dtype),
        "summed in bfloat16": softmax_summed_in_bfloat16,
    },
)

# -- GEMM ----------------------------------------------------------------------------------------------------------------


def draw_gemm(dice, terms=None):
    terms, dtype = terms or 64 * (1 + dice.size(15)), dice.one_of(*DTYPES[:2])
    a, b = dice.normal(dice.size(24), terms), dice.normal(terms, dice.size(24))
    if dice.is_special(3):
        a, b = a.abs(), b.abs()
    return a.to(dtype), b.to(dtype), dice.one_of(dtype, torch.float32)


def judge_gemm(kernel, a, b, dtype):
    return BESIDE.check_gemm(partial(kernel, dtype=dtype), a, b, dtype)


def gemm(a, b, dtype, tile=64, summed=torch.float32, tiles=slice(None)):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=summed)
    for one, other in list(zip(a.split(tile, 1), b.split(tile, 0), strict=True))[tiles]:
        total = (total + one.float() @ other.float()).to(summed)
    return total.to(dtype)


GEMM_FAULTS = {
    "last tile of K lost": partial(gemm, tiles=slice(-1)),
    "first tile of K lost": partial(gemm, tiles=slice(1, None)),
    "a tile of K twice": lambda a, b, dtype: gemm(torch.cat((a, a[:, :64]), 1), torch.cat((b, b[:64])), dtype),
    "one term lost": lambda a, b, dtype: gemm(a[:, 1:], b[1:], dtype),
    "columns of the neighbour": lambda a, b, dtype: gemm(a.roll(1, 1), b, dtype),
}
GEMM = Problem(
    draw_gemm,
    judge_gemm,
    honest={
        "at once": lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
        "tiles": gemm,
        "term after term": partial(gemm, tile=1),
        "split K": lambda a, b, dtype: (gemm(a[:, ::2], b[::2], torch.float32) + gemm(a[:, 1::2], b[1::2], torch.float32)).to(
            dtype
        ),
        "torch": lambda a, b, dtype: a @ b if a.dtype == dtype else a.float() @ b.float(),
    },
    faults=GEMM_FAULTS,
)
LONG_GEMM = Problem(
    partial(draw_gemm, terms=4096),
    judge_gemm,
    honest={"tiles": gemm},
    faults={**GEMM_FAULTS, "summed in bfloat16": partial(gemm, summed=torch.bfloat16, tile=32)},
)

# -- SwiGLU and GEGLU ------------------------------------------------------------------------------------------------------


def draw_gated(dice):
    rows, size, dtype = dice.size(40), 8 * dice.size(40), dice.one_of(*DTYPES)
    return dice.spread(rows, size, -2.0, 1.5).to(dtype), dice.normal(rows, size, dtype=dtype)


def gated(act, gate, up, other=None):
    return ((other or act)(gate.float()) * up.float()).to(gate.dtype)


def gated_problem(act, other):
    return Problem(
        draw_gated,
        lambda kernel, *inputs: BESIDE.check_gated(partial(kernel, act), act, *inputs),
        honest={"once": gated, "in the dtype": lambda act, gate, up: act(gate) * up},
        faults={
            "gate and up swapped": lambda act, gate, up: gated(act, up, gate),
            f"{other.__name__} for {act.__name__}": partial(gated, other=other),
            "sigmoid alone": partial(gated, other=torch.sigmoid),
            "up of the neighbour": lambda act, gate, up: gated(act, gate, up.roll(1, -1)),
        },
    )


# -- quantize and dequantize with block scales ---------------------------------------------------------------------------


def draw_codes(dice):
    rows, blocks = 1 + dice.size(20), 1 + dice.size(8)
    codes = torch.randint(-127, 128, (rows, blocks * BLOCK), generator=dice.generator).to(torch.int8)
    scales = 10.0 ** (torch.rand(rows, blocks, generator=dice.generator) * 2 - 3)
    zeros = torch.randint(1, 9, (rows, blocks), generator=dice.generator)
    return codes, scales.log2().ceil().exp2() if dice.is_special(2) else scales, zeros, dice.one_of(*DTYPES)


def of_blocks(x, block=BLOCK):
    return x.repeat_interleave(block, -1)


def judge_dequantize(kernel, codes, scales, zeros, dtype):
    spread = of_blocks(zeros), of_blocks(scales)
    return BESIDE.check_dequantize(lambda: kernel(codes, scales, zeros, dtype), codes, *spread, dtype)


def dequantize(codes, scales, zeros, dtype, sign=1):
    return ((codes.float() - sign * of_blocks(zeros)) * of_blocks(scales)).to(dtype)


def dequantize_in_the_dtype(codes, scales, zeros, dtype):
    return (codes.short() - of_blocks(zeros)).to(dtype) * of_blocks(scales).to(dtype)


DEQUANTIZE = Problem(
    draw_codes,
    judge_dequantize,
    honest={"once": dequantize, "in the dtype": dequantize_in_the_dtype},
    faults={
        "scale of the neighbouring block": lambda codes, scales, *rest: dequantize(codes, scales.roll(1, -1), *rest),
        "scale of the row below": lambda codes, scales, *rest: dequantize(codes, scales.roll(1, 0), *rest),
        "zero point forgotten": partial(dequantize, sign=0),
        "zero point added": partial(dequantize, sign=-1),
        "zero point of the neighbouring block": lambda c, s, zeros, dtype: dequantize(c, s, zeros.roll(1, -1), dtype),
    },
)


def draw_numbers(dice):
    x = dice.spread(1 + dice.size(20), (1 + dice.size(8)) * BLOCK, -3.0, 2.0)
    if dice.is_special(2):  # scales are 1, numbers are integers or ties
        x = (x / x.abs().amax() * 253).round() / 2
        x[:, ::BLOCK] = 127.0
    return (x,)


def top_of(x):
    return x.unflatten(-1, (-1, BLOCK)).abs().amax(-1).clamp(min=1e-30)


def judge_quantize(kernel, x):
    codes, scales = kernel(x)
    return BESIDE.check_quantize(codes, of_blocks(scales), x)


def quantize(x, grow=1.0, to=torch.round, scaled=lambda scales: scales):
    scales = scaled(top_of(x) / 127 * grow)
    return to(x / of_blocks(scales)).clamp(-127, 127).to(torch.int8), scales


def half_up(x):
    return (x + 0.5).floor()


def shifted_scales(x):
    codes, scales = quantize(x)
    return codes, scales.roll(1, -1)


QUANTIZE = Problem(
    draw_numbers,
    judge_quantize,
    honest={
        "to even": quantize,
        "ties up": partial(quantize, to=half_up),
        "a scale one step up": partial(quantize, grow=1 + 2.0**-7),
        "scales that are powers of 2": partial(quantize, scaled=lambda scales: scales.log2().ceil().exp2()),
        "by the reciprocal": lambda x: ((x * of_blocks(127 / top_of(x))).round().to(torch.int8), top_of(x) / 127),
    },
    faults={
        "cut off": partial(quantize, to=torch.trunc),
        "always up": partial(quantize, to=torch.ceil),
        "scale of the neighbouring block": shifted_scales,
        "scale half as large": partial(quantize, grow=0.5),
    },
)


def draw_fp8(dice):
    return (dice.normal(dice.size(30), 8 * dice.size(20)).clamp(-3, 3) * 100,)


def judge_fp8(kernel, x):
    return assert_rounded(kernel(x), x.double(), [Rounded("float8_e4m3fn", of=x.double())])


FP8 = Problem(
    draw_fp8,
    judge_fp8,
    honest={"torch": lambda x: x.to(torch.float8_e4m3fn)},
    faults={
        "with two bits of mantissa": lambda x: x.to(torch.float8_e5m2).to(torch.float8_e4m3fn),
        "of the neighbour": lambda x: x.roll(1, -1).to(torch.float8_e4m3fn),
    },
)

PROBLEMS = {
    "rms norm": NORM,
    "rope of halves": rope_problem(halves),
    "rope of pairs": rope_problem(pairs),
    "softmax": SOFTMAX,
    "gemm": GEMM,
    "gemm of 4,096 terms": LONG_GEMM,
    "swiglu": gated_problem(F.silu, F.gelu),
    "geglu": gated_problem(F.gelu, F.silu),
    "dequantize": DEQUANTIZE,
    "quantize": QUANTIZE,
    "fp8": FP8,
}


def judged(problem, kernel, dice):
    """Return the comparison of a kernel, or the text of its failure."""
    try:
        return problem.judge(kernel, *problem.draw(dice))
    except AssertionError as failure:
        return str(failure)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 400), marks=pytest.mark.slow("12,704 cases"))], ids=["3", "400"]
)
def test_honest_kernels_pass(name, seeds):
    problem = PROBLEMS[name]
    for kernel in problem.honest:
        failed = [seed for seed in seeds if isinstance(judged(problem, problem.honest[kernel], Dice(seed)), str)]
        assert failed == [], kernel


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow("2,014 cases"))], ids=["2", "40"]
)
def test_planted_faults_are_found(name, seeds):
    problem = PROBLEMS[name]
    for fault in problem.faults:
        missed = [s for s in seeds if not isinstance(judged(problem, problem.faults[fault], Dice(s, is_plain=True)), str)]
        assert missed == [], fault


EXACT = torch.linspace(1, 3, 16 * 32).double().reshape(2, 8, 32)
ONCE = [Rounded("bfloat16", of=EXACT)]


def test_a_failure_says_where_and_by_how_much():
    out = EXACT.bfloat16()
    out[1, 3, 7] = 9.0
    with pytest.raises(AssertionError) as failure:
        assert_rounded(out, EXACT, ONCE, name="y")
    assert str(failure.value).splitlines()[:4] == [
        "mismatch: y: z 1,462 in one element, limit 8",
        f"  worst      y[1, 3, 7] = 9, exact {float(EXACT[1, 3, 7]):.6g}, budget 0.00451",
        "  largest z  element 1,462 (limit 8), row 258 (4), whole 64.62 (1.5); 1 of 512 elements above 8",
        "  where      dimension 0: only 1 of 2 (the last); dimension 1: only 3 of 8",
    ]


@pytest.mark.parametrize(
    ("out", "roundings", "line"),
    [
        ((EXACT * 1.02).bfloat16(), ONCE, r"  factor     out is 2\.0\d %% too large: slope 1\.02.. ± 0\.0..."),
        ((EXACT * 0.98).float(), ONCE, r"  factor     out is 2\.0\d %% too small: slope 0\.98.. ± 0\.0..."),
        (EXACT.bfloat16(), [Rounded("float32", of=EXACT)], "  suggests   out is bfloat16, and no rounding to it is declared"),
        (EXACT.bfloat16() * math.nan, ONCE, "mismatch: out: 512 elements are NaN or infinite .*"),
        (EXACT.bfloat16().flip(-1), ONCE, "  where      dimension 0: all 2; dimension 1: all 8"),
    ],
)
def test_a_failure_names(out, roundings, line):
    with pytest.raises(AssertionError) as failure:
        assert_rounded(out, EXACT, roundings)
    assert [one for one in str(failure.value).splitlines() if re.fullmatch(line.replace("%%", "%"), one)]


#: what is handed in beside or instead of `EXACT` and `ONCE`, what it raises, and how that is said
REFUSED = [
    ({"exact": EXACT.float()}, ValueError, "exact is torch.float32, expected torch.float64: compute it from inputs.double()"),
    ({"exact": [1.0]}, TypeError, "exact is of type list, expected a float64 tensor"),
    ({"exact": EXACT[:0]}, ValueError, "exact of shape (0, 8, 32) has no number, so nothing can be judged"),
    ({"exact": EXACT * math.nan}, ValueError, "has no number, so nothing can be judged"),
    ({"out": None}, ContractError, "out is of type NoneType, expected a tensor of real numbers"),
    ({"out": EXACT.cfloat()}, ContractError, "out is torch.complex64, expected a tensor of real numbers"),
    ({"out": EXACT[0]}, ContractError, "out has shape (8, 32), expected that of exact, (2, 8, 32)"),
    ({"roundings": []}, ValueError, "roundings is empty or no list: name where the kernel rounds"),
    ({"roundings": ONCE[0]}, ValueError, "roundings is empty or no list: name where the kernel rounds"),
    ({"roundings": ["bf16"]}, TypeError, "roundings[0] is of type str, expected Rounded(dtype, of), Quantized(step)"),
    ({"roundings": [*ONCE, Rounded("int4", of=EXACT)]}, ValueError, "unknown dtype of roundings[1] 'int4'; known: bf"),
    ({"roundings": [*ONCE, Rounded("bf16", of=EXACT.float())]}, ValueError, "roundings[1].of is torch.float32, expected"),
    ({"roundings": [Rounded("bf16", of=1.0)]}, ValueError, "roundings[0].of is float, expected a float64 tensor"),
    (
        {"roundings": [Rounded("bf16", of=EXACT[:, :3])]},
        ValueError,
        "roundings[0].of does not broadcast to exact's shape, (2, 8, 32): ",
    ),
    ({"roundings": [Rounded("bf16", of=EXACT, times=0)]}, ValueError, "times of roundings[0] is 0, expected a number above 0"),
    ({"roundings": [Rounded("bf16", of=EXACT / 0)]}, ValueError, "roundings[0].of is NaN or infinite at 512 elements where"),
    (
        {"roundings": [Rounded("bf16", of=EXACT, times="2")]},
        ValueError,
        "times of roundings[0] is '2', expected a number above 0",
    ),
    ({"roundings": [Quantized("1")]}, ValueError, "roundings[0].step is '1', expected a number above 0 or a float64 tensor"),
    ({"roundings": [Quantized(-0.1)]}, ValueError, "roundings[0].step is -0.1, expected a number above 0"),
    ({"roundings": [EXACT.float()]}, ValueError, "roundings[0] is torch.float32, expected a float64 tensor"),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED)
def test_what_cannot_be_judged_is_refused_in_words(given, error, words):
    with pytest.raises(error, match=re.escape(words)) as refused:
        assert_rounded(**({"out": EXACT, "exact": EXACT, "roundings": ONCE} | given))
    assert type(refused.value) is error


@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1), (1, 40), (3, 1, 2, 5)])
def test_any_shape_is_judged(shape):
    exact = torch.full(shape, 1.003, dtype=torch.float64)
    assert assert_rounded(exact.bfloat16(), exact, [Rounded("bfloat16", of=exact)]).passed
    with pytest.raises(AssertionError, match="mismatch: out: z"):
        assert_rounded(exact.bfloat16() * 1.1, exact, [Rounded("bfloat16", of=exact)])


def test_rows_of_nothing_are_nan_in_both():
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[2] = -math.inf
    assert BESIDE.check_softmax(lambda x: x.softmax(-1), x, x.dtype).passed
    with pytest.raises(AssertionError, match="40 elements are NaN or infinite"):
        BESIDE.check_softmax(lambda x: x.softmax(-1).nan_to_num(), x, x.dtype)


@pytest.mark.parametrize("rounds", [torch.round, half_up, lambda x: -half_up(-x)])
def test_all_may_be_ties(rounds):
    """No other kernel is closer, and all of them are off by half a step; float32 has no number in the middle."""
    for scale in (torch.ones(1, 1), torch.rand(4, 1, generator=torch.Generator().manual_seed(0))):
        x = (torch.arange(-100.0, 100.0).view(4, 50) + 0.5) * scale
        assert BESIDE.check_quantize(rounds(x / scale), scale, x).passed
        with pytest.raises(AssertionError, match="in the whole"):
            BESIDE.check_quantize(rounds(x / scale - x.sign()), scale, x)
        odd = torch.arange(257.0, 511.0, 2) * scale
        roundings = [Rounded("bf16", of=odd / scale.double(), by=scale)]
        assert assert_rounded((odd / scale).bfloat16() * scale, odd.double(), roundings).passed


def test_equal_numbers_are_rounded_alike():
    """All of 4,096 elements are off by nearly half a unit, as they must be: no average makes that small."""
    exact = torch.full((64, 64), 1 + 2.0**-8 * 0.97, dtype=torch.float64)
    row = assert_rounded(exact.bfloat16(), exact, [Rounded("bfloat16", of=exact)])
    assert row.z_head > 1.6
    assert row.limits.head == row.limits.row


def test_a_number_that_all_share_is_rounded_alike():
    by = (1.75 + torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) / 5).bfloat16().double()
    for shared in torch.linspace(1, 1.05, 20).double():
        exact = shared * by
        roundings = [Rounded("bfloat16", of=shared.expand_as(by), by=by), Rounded("bfloat16", of=exact)]
        assert assert_rounded((shared.bfloat16().float() * by.float()).bfloat16(), exact, roundings).limits.head == 4


def test_an_exact_zero_has_no_error_to_speak_of():
    exact = torch.eye(8, dtype=torch.float64)
    assert assert_rounded(exact.bfloat16(), exact, [Rounded("bfloat16", of=exact)]).passed
    with pytest.raises(AssertionError, match="56 of 64 elements above 8"):
        assert_rounded(exact.bfloat16().clamp(min=1e-20), exact, [Rounded("bfloat16", of=exact)])


def test_what_a_dtype_cannot_hold_is_infinite_or_zero():
    exact = torch.tensor([1e5, 1e-9, 0.0, math.inf, 2.0]).double()
    roundings = [Rounded("float16", of=exact.nan_to_num(posinf=0.0))]
    assert assert_rounded(exact.half(), exact, roundings).passed
    with pytest.raises(AssertionError, match="NaN or infinite"):
        assert_rounded(exact.half().clamp(max=65504.0), exact, roundings)


def test_a_standard_error_of_another_kind_is_taken():
    exact = EXACT.clone()
    assert assert_rounded(exact + 0.01, exact, [torch.tensor(0.01).double()]).z_head == pytest.approx(1)
    with pytest.raises(AssertionError, match="whole"):
        assert_rounded(exact + 0.016, exact, [torch.tensor(0.01).double()])
