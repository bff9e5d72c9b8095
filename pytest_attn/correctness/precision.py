"""How a kernel declares that it rounds: the precision profiles, and the unit roundoffs of each dtype.

An honest attention kernel differs from exact attention only where it rounds. A profile lists those places; the budget
(`reference.py`) turns them into an expected error per element.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Root-mean-square-like relative rounding error of one rounding: half of the largest, 2 ** -p for p significant bits.
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}
#: Below its smallest normal number float16's rounding error stops shrinking: half of the spacing of its subnormals.
FLOOR = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}
#: No result is held to more than this: float32 exponentials below 2 ** -126 may be flushed to zero, whatever the dtype.
TINY = 2.0**-100
#: Relative error of one addition inside tensor cores, which truncate where float32 arithmetic would round.
TENSOR_CORE_UNIT = 2.0**-23
#: Relative error that a weight exp(lse_a - lse_b) has per unit of lse: lse is a float32.
LSE_UNIT = 2.0**-24
#: Absolute error of softcap's derivative 1 - tanh(x)^2, formed in float32.
SLOPE_UNIT = 2.0**-22
#: Standard deviations count this much more where one rounding error moves a whole row (of the row's sum D, of a score):
#: the RMS over the row is then a single normal variable, and the largest of 100,000 such rows exceeds 4.
SHARED = 1.5


@dataclass(frozen=True)
class Precision:
    """Where a kernel rounds, beside its output and its probabilities P.

    rounds_scores: scores are rounded to the dtype before and after the scale, dP and dS likewise in the backward pass.
    rounds_scaled_query: q is multiplied by the scale in the dtype before q . k.
    ds_from_rounded_p: the backward pass multiplies dP - D by P as it was rounded, not by P in float32.
    rounds_scaled_ds: the backward pass rounds scale * dS where others round dS.
    sums_rounded_heads: dk and dv of each query head are rounded before they are summed over the group (GQA).
    sums_query_blocks: dk and dv are summed in the dtype over blocks of query rows, of torch's CPU kernel's sizes.
    exponential_unit: relative error of its exponential, which shows in float32; ex2.approx on NVIDIA GPUs has 2 ulp.
    float32_unit: unit roundoff of float32 products, larger where tensor cores put them together from three tf32 products.
    """

    name: str
    rounds_scores: bool = False
    rounds_scaled_query: bool = False
    ds_from_rounded_p: bool = False
    rounds_scaled_ds: bool = False
    sums_rounded_heads: bool = False
    sums_query_blocks: bool = False
    exponential_unit: float = 2.0**-23
    float32_unit: float = UNIT["float32"]

    def unit(self, dtype: str) -> float:
        """Return the unit roundoff of one rounding in this profile."""
        return self.float32_unit if dtype == "float32" else UNIT[dtype]

    def roundings(self, q_len: int) -> int:
        """Return how many times the gradients of the keys are rounded while they are summed over the query rows."""
        if not self.sums_query_blocks:
            return 1
        block = 256 if q_len >= 768 else 64 if q_len >= 192 else 32
        return -(-q_len // block)


PRECISIONS = {
    # FlashAttention 3 and 4, Triton: float32 scores, P and dS rounded to the dtype for the tensor cores
    "flash": Precision("flash"),
    # FlashAttention 2, torch's copy and its CPU kernel: gradients of grouped heads leave the kernel per query head
    "flash2": Precision("flash2", sums_rounded_heads=True),
    # softmax(q @ k.T * scale) @ v written in the dtype, with keys repeated for grouped heads
    "eager": Precision("eager", rounds_scores=True, sums_rounded_heads=True),
    # kernels that fold the scale into q
    "qscale": Precision("qscale", rounds_scaled_query=True),
    # CUTLASS fmha (SDPA's memory-efficient kernel): keeps P in shared memory in the dtype and forms
    # dS = (dP - D) * P from it, then rounds scale * dS. Source: mem_eff_attention/kernel_backward.h in PyTorch.
    "cutlass": Precision("cutlass", ds_from_rounded_p=True, rounds_scaled_ds=True, float32_unit=2.0**-23),
    # torch's CPU kernel (FlashAttentionKernel.cpp): adds up dk and dv in memory, in the dtype; exp_u20 has 20 bits
    "torch_cpu": Precision("torch_cpu", sums_rounded_heads=True, sums_query_blocks=True, exponential_unit=2.0**-20),
    # cuDNN: rounds scale * dS
    "cudnn": Precision("cudnn", rounds_scaled_ds=True),
    # whichever of its kernels SDPA chooses
    "sdpa": Precision("sdpa", ds_from_rounded_p=True, rounds_scaled_ds=True, sums_rounded_heads=True, float32_unit=2.0**-23),
}


def precision_named(name: str) -> Precision:
    """Return a profile by name; raise ValueError for an unknown one."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
