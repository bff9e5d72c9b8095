"""Rounding as a kernel declares it: the precision profiles, and the unit roundoffs of each dtype.

An honest attention kernel differs from exact attention only where it rounds. A profile lists those places; the budget
(`budget.py`, `exact_gradients.py`) turns them into an expected error per element.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from pytest_attn.backends.machine import release
from pytest_attn.workloads.dtypes import FLOATING_DTYPES, QUANTIZED_DTYPES
from pytest_attn.workloads.fields import did_you_mean, is_whole, suggests_fields

#: Root-mean-square-like relative rounding error of one rounding.
UNIT = {name: one.unit for name, one in FLOATING_DTYPES.items()}
#: Below its smallest normal number the rounding error of a small dtype stops shrinking: half of its subnormals' spacing.
FLOOR = {name: one.floor for name, one in FLOATING_DTYPES.items()}
#: The largest number of a small dtype, to which kernels scale what they round to it.
LARGEST = {name: one.largest for name, one in QUANTIZED_DTYPES.items()}
#: Step of int8 that reaches from 0 to a row's largest, as a part of it.
INT8_STEP = 1 / 127
#: No result is held to more than this: float32 exponentials below 2 ** -126 may be flushed to zero, whatever the dtype.
TINY = 2.0**-100
#: Relative error of one addition inside tensor cores, which truncate where float32 arithmetic would round.
TENSOR_CORE_UNIT = 2.0**-23
#: Relative error that a weight exp(lse_a - lse_b) has per unit of lse: lse is a float32.
LSE_UNIT = 2.0**-24
#: Relative error of an operand that tensor cores take as tf32: most cut float32 off after 10 bits, which loses 2 ** -11 on
#: average, and always toward zero.
TF32_UNIT = 2.0**-11
#: Absolute error of softcap's derivative 1 - tanh(x)^2, formed in float32.
SLOPE_UNIT = 2.0**-22
#: Error of rounding to int8, as a part of the largest value: evenly spread over a step.
INT8_ERROR = INT8_STEP / math.sqrt(12)
#: Error of int8 values known but for ties, which a division that is not exact sends either way (they count as halfway): half
#: a step for one in 32 values. Of normal bfloat16 numbers 1 in 1,000 is half the largest, a tie, but up to a tenth of them are
#: where the largest is 127 / 32.
TIES_ERROR = INT8_STEP / 2 / math.sqrt(32)
#: Standard deviations count this much more where one rounding error moves a whole row (of the row's sum D, of a score):
#: the RMS over the row is then a single normal variable, and the largest of 100,000 such rows exceeds 4.
SHARED = 1.5

#: which maximum of a row the weights of a tile of keys are compared with: the last one, or that of the tiles before
MAXIMA = ("last", "running", "running-backwards")


@suggests_fields
@dataclass(frozen=True)
class Threshold:
    """What a kernel leaves out by design, as skip-softmax does: tiles of keys whose weights are small in all rows of a tile.

    Args:
        weight: a tile is left out where each weight, as a part of its row's largest, is below this, > 0 and < 1.
        tile: how many rows of one query head decide together, and on how many keys: (rows, keys).
        maximum: the row's largest is that of all keys ("last"), or of the tiles visited before, from the first key on
            ("running") or from the last ("running-backwards").

    Raises:
        ValueError: a value is none of these.
    """

    weight: float
    tile: tuple[int, int] = (1, 1)
    maximum: str = "last"

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float) or not 0 < self.weight < 1:
            raise ValueError(f"Threshold: weight must be a part of a row's largest, > 0 and < 1, got {self.weight!r}")
        if isinstance(self.tile, list):  # as JSON has it
            object.__setattr__(self, "tile", tuple(self.tile))
        if not isinstance(self.tile, tuple) or len(self.tile) != 2 or not all(is_whole(size, 1) for size in self.tile):
            raise ValueError(f"Threshold: tile must be (rows, keys), two whole numbers > 0, got {self.tile!r}")
        if self.maximum not in MAXIMA:
            raise ValueError(f"Threshold: maximum must be one of {', '.join(MAXIMA)}, got {self.maximum!r}")


@suggests_fields
@dataclass(frozen=True)
class Precision:
    """Roundings of a kernel beside that of its output and its probabilities P.

    Those from p_dtype on are for kernels that quantize q, k and v, and are held to exact attention on the quantized values.

    Args:
        name: what reports call the profile.
        rounds_scores: scores are rounded to the dtype after each step: the product, the scale, bias, soft-cap, ALiBi and
            score_mod; dP and dS are in the backward pass.
        rounds_scaled_query: q is multiplied by the scale in the dtype before q . k.
        rounds_scaled_key: k is, in the same way.
        rounds_products: q . k is formed in the dtype: each product is rounded, and each sum of two in a tree of sums.
        rounds_shifted_scores: the row's maximum is subtracted from its scores in the dtype.
        rounds_sinks: sinks times log2 e are rounded to the dtype.
        rounds_share_of_keys: sinks come last, in the dtype: out times sigmoid(lse - sink), what they leave of a row.
        rounds_rescaling: the factors by which an online softmax rescales its sums, as the maximum grows, are rounded to
            the dtype.
        rounds_dp: the backward pass rounds dP to the dtype, as autograd does behind P.to(dtype) @ v.
        ds_from_rounded_p: the backward pass multiplies dP - D by P as it was rounded, not by P in float32.
        sums_rounded_p: the denominator, and with it lse, is the sum of P as it was rounded.
        rounds_scaled_ds: the backward pass rounds scale * dS where others round dS.
        sums_rounded_heads: dk and dv of each query head are rounded before they are summed over the group (GQA).
        sums_query_blocks: dk and dv are summed in the dtype over blocks of query rows and the heads of a group, dq over
            blocks of 512 keys, as in torch's CPU kernel.
        parts: results are sums of so many parts, each rounded to the dtype before it is added, as several processes do.
        exponential_unit: relative error of its exponential, which shows in float32; ex2.approx on NVIDIA GPUs has 2 ulp.
        float32_unit: unit roundoff of float32 products, larger where tensor cores put them together from three tf32
            products.
        operand_unit: relative error of each operand of a float32 product, where tensor cores multiply in tf32.
        p_dtype: what P, as a part of its row's largest, is rounded to where that is not the workload's dtype.
        p_step: P is rounded to multiples of this part of its row's largest.
        v_dtype: what V, scaled so that each column just fits, is rounded to once more.
        qk_error: standard deviation of what is left unknown of every element of q and k, as a part of its head's largest.
        half_sum_keys: P v is summed in float16 over this many keys at a time.
        skips: which tiles of keys it leaves out.
    """

    name: str
    rounds_scores: bool = False
    rounds_scaled_query: bool = False
    rounds_scaled_key: bool = False
    rounds_products: bool = False
    rounds_shifted_scores: bool = False
    rounds_sinks: bool = False
    rounds_share_of_keys: bool = False
    rounds_rescaling: bool = False
    rounds_dp: bool = False
    ds_from_rounded_p: bool = False
    sums_rounded_p: bool = False
    rounds_scaled_ds: bool = False
    sums_rounded_heads: bool = False
    sums_query_blocks: bool = False
    parts: int = 1
    exponential_unit: float = 2.0**-23
    float32_unit: float = UNIT["float32"]
    operand_unit: float = 0.0
    p_dtype: str | None = None
    p_step: float = 0.0
    v_dtype: str | None = None
    qk_error: float = 0.0
    half_sum_keys: int = 0
    skips: Threshold | None = None

    def skipping(self, skips: Threshold) -> Precision:
        """Return the profile of a kernel that leaves out these tiles as well."""
        return dataclasses.replace(self, name=f"{self.name}, skips below {skips.weight:g}", skips=skips)

    def with_autograd(self) -> Precision:
        """Return the profile of a kernel whose P is cast where autograd sees it."""
        return dataclasses.replace(self, name=f"{self.name}, autograd", rounds_dp=True, sums_rounded_heads=True)

    @cached_property
    def is_quantized(self) -> bool:
        """True where P has fewer bits than the workload's dtype: a profile for approximate kernels."""
        return bool(self.p_step or self.p_dtype)

    @cached_property
    def has_noisy_scores(self) -> bool:
        """True where scores are rounded to the dtype, in one way or another."""
        of_operands = self.rounds_scaled_query or self.rounds_scaled_key or self.rounds_products
        return self.rounds_scores or self.rounds_shifted_scores or of_operands

    @property
    def moves_lse(self) -> bool:
        """True where lse is off by what the profile declares."""
        of_rows = self.rounds_sinks or self.rounds_share_of_keys or self.rounds_rescaling or self.sums_rounded_p
        return self.has_noisy_scores or self.operand_unit > 0 or of_rows

    @cached_property
    def scales_heads(self) -> bool:
        """True where a rounding of keys is shared by all rows of a head, so that it may be a factor; of sinks it is, too."""
        return self.is_quantized or self.half_sum_keys > 0 or self.qk_error > 0 or self.rounds_scaled_key

    def words(self, dtype: str) -> str:
        """Say what a kernel of this profile does, behind "if it", for a profile that a failure may suggest."""
        said = {
            f"rounds scores to {dtype}": self.rounds_scores,
            f"multiplies q by the scale in {dtype}": self.rounds_scaled_query,
            f"multiplies k by the scale in {dtype}": self.rounds_scaled_key,
            f"brings sinks to base 2 in {dtype}": self.rounds_sinks,
            "multiplies in tf32": bool(self.operand_unit),
            f"sums P as rounded to {dtype}": self.sums_rounded_p,
            f"rounds dP to {dtype}, as autograd does behind P.to(dtype) @ v": self.rounds_dp,
            f"sums gradients in {dtype}": self.sums_query_blocks,
            f"rounds dk and dv of each query head to {dtype} before it sums them": self.sums_rounded_heads,
            f"rounds scale * dS to {dtype}": self.rounds_scaled_ds,
        }
        return next((words for words, holds in said.items() if holds), f"rounds as {self.name!r} says")

    @property
    def is_coarse(self) -> bool:
        """True where P has so few steps that roundings of many keys may go the same way."""
        return bool(self.p_step) or self.p_dtype == "float8_e4m3fn"

    def of_inputs_in(self, dtype: str) -> Precision:
        """Return the profile for q, k and v of a dtype: tensor cores that read fp8 take P in fp8, too.

        Only what holds of a kernel that declares nothing says that P is rounded to the dtype of the inputs; other profiles
        round it to that of out.
        """
        is_fp8 = self.name in (DEFAULT, DEFAULT_ON_CPU) and dtype == "float8_e4m3fn"
        return dataclasses.replace(self, p_dtype=dtype) if is_fp8 else self

    def unit(self, dtype: str) -> float:
        """Return the unit roundoff of one rounding in this profile."""
        return self.float32_unit if dtype == "float32" else UNIT[dtype]

    def roundings(self, q_len: int, group: int) -> int:
        """Return how often gradients of keys are rounded while they are summed over query rows, of a group's heads in turn."""
        if not self.sums_query_blocks:
            return 1
        block = 256 if q_len >= 768 else 64 if q_len >= 192 else 32
        return -(-q_len // block) * group


PRECISIONS = {
    # FlashAttention 3 and 4, Triton: float32 scores, P and dS rounded to the dtype for the tensor cores
    "flash": Precision("flash"),
    # FlashAttention 2, torch's copy and its CPU kernel: under GQA the gradients leave the kernel per query head
    "flash2": Precision("flash2", sums_rounded_heads=True),
    # softmax(q @ k.T * scale) @ v written in the dtype, with keys repeated for GQA
    "eager": Precision("eager", rounds_scores=True, ds_from_rounded_p=True, sums_rounded_heads=True),
    # softmax in float32, then P.to(dtype) @ v: autograd's dP has the dtype of P
    "autograd": Precision("autograd", rounds_dp=True, sums_rounded_heads=True),
    # kernels that fold the scale into q
    "qscale": Precision("qscale", rounds_scaled_query=True),
    # ... or into k
    "kscale": Precision("kscale", rounds_scaled_key=True),
    # eager, with the maximum subtracted in the dtype
    "eager_shifted": Precision(
        "eager_shifted", rounds_scores=True, rounds_shifted_scores=True, ds_from_rounded_p=True, sums_rounded_heads=True
    ),
    # decoding of one token without tensor cores: q * k and their sum in the dtype
    "decode": Precision("decode", rounds_products=True),
    # sinks brought to base 2 in their dtype
    "rounded_sinks": Precision("rounded_sinks", rounds_sinks=True),
    # FlashInfer's fa2: tensor cores sum P as they take it. Source: compute_sfm_v in attention/prefill.cuh
    "rounded_sum": Precision("rounded_sum", sums_rounded_p=True),
    # eager attention without sinks, times sigmoid(lse - sink)
    "late_sinks": Precision(
        "late_sinks", rounds_scores=True, rounds_share_of_keys=True, ds_from_rounded_p=True, sums_rounded_heads=True
    ),
    # the online softmax's factors in the dtype
    "rescale": Precision("rescale", rounds_rescaling=True),
    # CUTLASS fmha (SDPA's memory-efficient kernel): keeps P in shared memory in the dtype and forms
    # dS = (dP - D) * P from it, then rounds scale * dS. Source: mem_eff_attention/kernel_backward.h in PyTorch.
    "cutlass": Precision("cutlass", ds_from_rounded_p=True, rounds_scaled_ds=True, float32_unit=2.0**-23),
    # torch's CPU kernel (FlashAttentionKernel.cpp): adds up dq, dk and dv in memory, in the dtype; exp_u20 has 20 bits
    "torch_cpu": Precision("torch_cpu", sums_query_blocks=True, exponential_unit=2.0**-20),
    # cuDNN: rounds scale * dS
    "cudnn": Precision("cudnn", rounds_scaled_ds=True),
    # whichever of its kernels SDPA chooses
    "sdpa": Precision("sdpa", ds_from_rounded_p=True, rounds_scaled_ds=True, sums_rounded_heads=True, float32_unit=2.0**-23),
    # float32 kernels whose products are those of tf32 tensor cores: Triton's tl.dot by default, torch with allow_tf32
    "tf32": Precision("tf32", operand_unit=TF32_UNIT),
    # P in int8 or fp8, for inputs that are quantized values already (as they are after dequantization): only what a kernel
    # does to P is excused, not what it does to q, k and v
    "int8": Precision("int8", p_step=INT8_STEP),
    "fp8": Precision("fp8", p_dtype="float8_e4m3fn"),
    # SageAttention 1.0.6, its quantization known but for ties: float16 P, and float16 sums over 64 keys.
    # Source: attn_qk_int8_per_block.py (p.to(tl.float16), out_dtype=tl.float16, BLOCK_N = 64).
    "sage": Precision("sage", p_dtype="float16", half_sum_keys=64, qk_error=TIES_ERROR),
    # SageAttention 2: int8 steps of q and k unknown but for their size; float16 P, float32 sums
    "sage_fp16": Precision("sage_fp16", p_dtype="float16", qk_error=INT8_ERROR),
    # ... and P and V in fp8
    "sage_fp8": Precision("sage_fp8", p_dtype="float8_e4m3fn", v_dtype="float8_e4m3fn", qk_error=INT8_ERROR),
}

#: what holds of a kernel that declares nothing; on a CPU torch's own kernel, which most of them call
DEFAULT, DEFAULT_ON_CPU = "flash", "torch_cpu"

#: what a failure may suggest: profiles of kernels that do not quantize, and none that would excuse sums in the dtype, a fault,
#: or whose roundings hang on the order of sums, so that no other arithmetic repeats them
SUGGESTED = {
    name: p
    for name, p in PRECISIONS.items()
    if not (p.is_quantized or p.rounds_rescaling or p.rounds_products or p.rounds_shifted_scores or p.rounds_share_of_keys)
}

#: of these, what few kernels do
RARE = ("kscale", "rounded_sinks")


def default_on(kind: str) -> str:
    """Return the profile of a kernel that declares none, on a type of device ("cpu", "cuda", ...)."""
    return DEFAULT_ON_CPU if kind == "cpu" else DEFAULT


def precision_named(precision: str | Precision) -> Precision:
    """Return a profile by its name, or a profile of one's own as it is.

    Raises ValueError for an unknown name, for one's own profile under the name of another, and for what is neither.
    """
    if isinstance(precision, Precision):
        if not precision.name:
            raise ValueError("precision: a profile of your own needs a name, which failures call it by; got ''")
        if PRECISIONS.get(precision.name, precision) != precision:
            raise ValueError(f"precision: {precision.name!r} is the name of another profile; give yours one of its own")
        return precision
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(
            f"unknown precision {precision!r};{did_you_mean(str(precision), PRECISIONS)} known: {', '.join(PRECISIONS)},"
            " or a pytest_attn.Precision of your own"
        )
    return PRECISIONS[precision]


#: torch that forms the scores in float32; before it they are a matrix product in the dtype, and so are dP.
#: Source: _math_attention_inner in torch/_higher_order_ops/flex_attention.py of 2.6.0, 2.9.1, 2.10.0, 2.11.0 and 2.15.0.
_FLOAT32_SCORES = (2, 10)


def uncompiled_flex_precision(torch_version: str) -> Precision:
    """Return the profile of flex_attention without torch.compile in a release of torch."""
    newest = PRECISIONS["sdpa"]
    if release(torch_version) >= _FLOAT32_SCORES:
        return newest
    return dataclasses.replace(newest, name="flex_uncompiled", rounds_scores=True)
