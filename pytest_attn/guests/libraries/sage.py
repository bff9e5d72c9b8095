"""SageAttention, whose scores are int8 products: 1.0.6, the version of the registry, and 2.x, which is built from source.

Both have the same import name. What 1.0.6 makes of q, k and v is repeated here, step by step; 2.x quantizes in finer parts
(per warp, per thread) that only its CUDA sources tell, so its steps count as unknown (`Precision.qk_error`).
"""

import dataclasses
from functools import partial

import torch

from pytest_attn.backends.backend import LibraryBackend, half_precision_only
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine, release
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

_SAGE = Library(("sageattention",), "sageattention", "pip install sageattention")
_MASKS = frozenset(("causal", "causal-bottom-right"))
_FEATURES = frozenset(("scale", "grouped heads"))
#: what 2.x has kernels for
_FP8_ARCHITECTURES = ((8, 9), (9, 0), (12, 0), (12, 1))
_ARCHITECTURES = ((8, 0), (8, 6), *_FP8_ARCHITECTURES)

# of 1.0.6: quant_per_block.py
_QUERIES_PER_BLOCK, _KEYS_PER_BLOCK = 128, 64
_LOG2_E = 1.44269504
_TIE = 2.0**-14  # Triton divides by div.full.f32, which is off by up to 2 ulp: twice, and relative to 127


def _is_first() -> bool:
    return release(_SAGE.version())[:1] == (1,)


#: the one that spoils less comes first, so that it alone is named where it alone shows
_DEFECTS = (
    KnownDefect(
        issue="seen on an H200 with sageattention 1.0.6, no report found",
        summary="subtracts the mean of k from the caller's tensor",
        applies=lambda workload, machine: _is_first(),
        changes_input=("k",),
    ),
    KnownDefect(
        issue="read in sageattention 1.0.6's attn_qk_int8_per_block.py, no report found",
        summary="without a causal mask, the last block of 64 keys is filled up with keys of score 0, which count",
        applies=lambda workload, machine: _is_first() and workload.mask is None and workload.kv_len % _KEYS_PER_BLOCK != 0,
        tensors=("out",),
        changes_input=("k",),
    ),
)


class _OfSage(LibraryBackend):
    is_approximate = True
    source = _SAGE
    variants = ("compile",)
    full_graph = False


class Sage(_OfSage):
    """sageattn: 1.0.6 in Triton, and 2.x as it chooses by the device, held to the widest of its budgets, that of fp8."""

    name, precision = "sage", "sage"
    needs = "CUDA, sm80 to sm121"
    capabilities = Capabilities(
        masks=_MASKS, features=_FEATURES, dtypes=("bfloat16", "float16", "float32"), head_dims=(64, 96, 128), square=True
    )
    known_defects = _DEFECTS

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse devices that 2.x has no kernels for; 1.0.6 is compiled for any."""
        reason = super().unavailable_because(machine)
        return reason or (None if _is_first() else _without_kernels(machine, _ARCHITECTURES))

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        return [] if _is_first() else half_precision_only(workload)

    def precision_on(self, kind: str) -> str:
        return self.precision if _is_first() else SageFp8.precision

    def dequantized(self, inputs: Inputs) -> Inputs:
        """Repeat the quantization of 1.0.6; for 2.x see `SageFp8`."""
        if not _is_first():
            return _without_mean(inputs)
        factor = inputs.workload.softmax_scale * _LOG2_E
        q = _in_int8_steps(inputs.q.float() * factor, _QUERIES_PER_BLOCK) / factor
        k = _in_int8_steps(_smoothed(inputs.k).float(), _KEYS_PER_BLOCK)
        return dataclasses.replace(inputs, q=q, k=k, v=inputs.v.half().float())

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Hand over the caller's own tensors, so that a change in place shows."""
        return _calling("sageattn", inputs)


class SageFp16(_OfSage):
    """sageattn_qk_int8_pv_fp16_cuda of 2.x, with float32 sums."""

    name, precision = "sage_fp16", "sage_fp16"
    needs = "sageattention 2, CUDA, sm80 to sm90, sm120, sm121"
    capabilities = Capabilities(masks=_MASKS, features=_FEATURES, head_dim=128, square=True)
    architectures: tuple[tuple[int, int], ...] = _ARCHITECTURES
    sums = "fp32"

    def unavailable_because(self, machine: Machine) -> str | None:
        reason = super().unavailable_because(machine)
        if reason is None and _is_first():
            return f"needs sageattention >= 2.0, {_SAGE.version()} is installed"
        return reason or _without_kernels(machine, self.architectures)

    def dequantized(self, inputs: Inputs) -> Inputs:
        """Take the mean from k, as the library does, and bring v to float16; int8's steps are left to the budget."""
        return dataclasses.replace(_without_mean(inputs), v=inputs.v.half().float())

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        return _calling(self.function(inputs.device), inputs, pv_accum_dtype=self.sums)

    def function(self, device: torch.device) -> str:
        """Return the name of the library's function for a device."""
        return "sageattn_qk_int8_pv_fp16_cuda"


class SageFp8(SageFp16):
    """sageattn_qk_int8_pv_fp8_cuda of 2.x, or _sm90, with float32 sums in two levels."""

    name, precision = "sage_fp8", "sage_fp8"
    needs = "sageattention 2, CUDA, sm89, sm90, sm120, sm121"
    architectures = _FP8_ARCHITECTURES
    sums = "fp32+fp32"

    def dequantized(self, inputs: Inputs) -> Inputs:
        """Take the mean from k; the steps of int8 and fp8 are left to the budget."""
        return _without_mean(inputs)

    def function(self, device: torch.device) -> str:
        """Hopper has a kernel of its own."""
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        return "sageattn_qk_int8_pv_fp8_cuda_sm90" if is_hopper else "sageattn_qk_int8_pv_fp8_cuda"


def _calling(name: str, inputs: Inputs, **options: str) -> AttentionFn:
    w, function = inputs.workload, getattr(_SAGE.load(), name)
    return partial(function, tensor_layout="HND", is_causal=w.mask is not None, sm_scale=w.softmax_scale, **options)


def _without_kernels(machine: Machine, architectures: tuple[tuple[int, int], ...]) -> str | None:
    if machine.capability is None or machine.capability in architectures:
        return None
    listed = ", ".join(f"sm{major}{minor}" for major, minor in architectures)
    return f"has kernels for {listed}, this device is {machine.architecture}"


def _without_mean(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, q=inputs.q.float(), k=_smoothed(inputs.k.float()), v=inputs.v.float())


def _smoothed(k: torch.Tensor) -> torch.Tensor:
    """Subtract the mean over the keys, which moves all scores of a row by the same and so changes no probability."""
    return k - k.mean(2, keepdim=True)


def _in_int8_steps(x: torch.Tensor, rows_per_block: int) -> torch.Tensor:
    """Return int8 values times the scale of their block of rows, both float32, as quant_per_block_int8_kernel makes them.

    Halves go away from zero; where a tie depends on how the device divides, the value stays halfway.
    """
    length = x.shape[2]
    whole = torch.nn.functional.pad(x, (0, 0, 0, -length % rows_per_block))
    blocks = whole.reshape(*x.shape[:2], -1, rows_per_block, x.shape[3])
    scale = blocks.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    exact = blocks / scale
    is_tie = (exact.abs().frac() - 0.5).abs() < _TIE
    steps = torch.where(is_tie, exact, (exact + torch.copysign(torch.full_like(exact, 0.5), exact)).trunc())
    return (steps * scale).flatten(2, 3)[:, :, :length]
