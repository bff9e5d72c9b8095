"""Profile of the kernels that really ran, how long each took, and how near that is to what the device can do.

A kernel's symbol, as torch's profiler shows it, is put into words that people use: framework, category, architecture and
operation. A rule names it by a regular expression; the first that is found decides. Kernels that no rule knows are shown as
they are. Sources: traces of an H200, with the versions of docs/results/backends-h200.md, and for NATTEN and FlashAttention-3,
which could not be run there, the names in their sources.
"""

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.gradients import Gradients
from pytest_attn.backends.machine import current
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.work import peak_of
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.kv_layout import copies_of
from pytest_attn.workloads.workload import Direction, Workload

Category: TypeAlias = Literal[
    "attention", "matmul", "softmax", "quantization", "copy", "reduction", "elementwise", "other"
]  # as tables and JSON show them
ATTENTION: Category = "attention"
MATMUL: Category = "matmul"
SOFTMAX: Category = "softmax"
COPY: Category = "copy"
OTHER: Category = "other"


class KernelName(NamedTuple):
    """One kernel in words; architecture is "" where the symbol does not tell."""

    framework: str
    category: Category
    architecture: str
    operation: str


#: pattern, framework, category, operation, in which the pattern's first group fills {0}, and architecture where it is known
_Rule: TypeAlias = tuple[str, str, Category, str] | tuple[str, str, Category, str, str]


def _flash2(prefix: str, framework: str) -> list[_Rule]:
    """FlashAttention 2's kernels, in its own namespace or in that of torch's copy."""
    parts = (
        ("flash_fwd_splitkv_combine_kernel", "flash forward, combine splits"),
        ("flash_fwd_splitkv_kernel", "flash forward, split keys"),
        ("flash_fwd_kernel", "flash forward"),
        ("flash_bwd_dot_do_o_kernel", "flash backward, sum of dO * O"),
        ("flash_bwd_dq_dk_dv_loop", "flash backward"),
        ("flash_bwd_convert_d[qkv]+_kernel", "flash backward, convert dq"),
        ("flash_bwd_clear_dkvaccum", "flash backward, clear"),
    )
    return [(rf"\b{prefix}::{symbol}", framework, ATTENTION, operation, "sm80") for symbol, operation in parts]


#: the innermost functor of a templated kernel, or the operator that it was written for
_ELEMENTWISE = (
    r"elementwise_kernel.*native::(?:\(anonymous namespace\)::|binary_internal::)?(?:CUDAFunctor\w*?_)?"
    r"(?!gpu_kernel)([a-zA-Z]\w*?)(?:Functor<|_kernel_cuda|_kernel_impl\b|_kernel<|<)"
)
_RULES: tuple[_Rule, ...] = (
    # FlashAttention 4 (CuTe DSL): its module and class are part of the symbol
    (r"flash_bwd_preprocess", "FlashAttention-4", ATTENTION, "flash backward, sum of dO * O"),
    (r"flash_bwd_postprocess", "FlashAttention-4", ATTENTION, "flash backward, convert"),
    (r"flash_fwd_combine|FlashAttentionForwardCombine", "FlashAttention-4", ATTENTION, "flash forward, combine splits"),
    (r"flash_fwd_sm|FlashAttentionForwardSm", "FlashAttention-4", ATTENTION, "flash forward"),
    (r"flash_bwd_sm|FlashAttentionBackwardSm", "FlashAttention-4", ATTENTION, "flash backward"),
    # FlashAttention 3 (hopper/)
    (r"flash::FlashAttnFwdCombine", "FlashAttention-3", ATTENTION, "flash forward, combine splits"),
    (r"flash::FlashAttnBwdPreprocess", "FlashAttention-3", ATTENTION, "flash backward, sum of dO * O"),
    (r"flash::FlashAttnBwdPostprocess", "FlashAttention-3", ATTENTION, "flash backward, convert dq"),
    (r"flash::FlashAttnFwd", "FlashAttention-3", ATTENTION, "flash forward"),
    (r"flash::FlashAttnBwd", "FlashAttention-3", ATTENTION, "flash backward"),
    *_flash2("pytorch_flash", "PyTorch (flash)"),
    *_flash2("flash", "FlashAttention-2"),
    # cuDNN's generated graphs, and what they are surrounded by
    (r"cudnn.*_flash_fprop", "cuDNN", ATTENTION, "flash forward"),
    (r"cudnn.*_flash_bprop", "cuDNN", ATTENTION, "flash backward"),
    (r"cudnn::fusion::compute_dot_do_o", "cuDNN", ATTENTION, "flash backward, sum of dO * O"),
    (r"cudnn::fusion::convert_dq", "cuDNN", ATTENTION, "flash backward, convert dq"),
    # NATTEN, then CUTLASS's fmha: SDPA's memory-efficient kernel, in torch and in xFormers
    (r"natten::tokperm", "NATTEN", COPY, "token permute"),
    (r"natten::cuda::reduction|FmhaKernelBwdSumOdO", "NATTEN", ATTENTION, "sum of dO * O"),
    (r"natten.*fna.*[Bb]ackward|FnaBwd", "NATTEN", ATTENTION, "FnaBackward"),
    (r"natten.*fna|fna::", "NATTEN", ATTENTION, "FnaForward"),
    (r"natten.*fmha.*[Bb]ackward|cutlass::fmha.*Bwd", "NATTEN", ATTENTION, "FmhaBackward"),
    (r"natten.*fmha|cutlass::fmha", "NATTEN", ATTENTION, "FmhaForward"),
    (r"fmha_cutlassF", "CUTLASS", ATTENTION, "fmha forward"),
    (r"fmha_cutlassB", "CUTLASS", ATTENTION, "fmha backward"),
    (r"flashinfer::.*MergeStates", "FlashInfer", ATTENTION, "merge partial results"),
    (r"flashinfer::.*CollectiveMainloop", "FlashInfer", ATTENTION, "fa3 prefill", "sm90"),
    (r"flashinfer::.*Decode", "FlashInfer", ATTENTION, "decode", "sm80"),
    (r"flashinfer::.*Prefill", "FlashInfer", ATTENTION, "fa2 prefill", "sm80"),
    (r"transformer_engine::.*softmax.*backward", "Transformer Engine", SOFTMAX, "softmax backward"),
    (r"transformer_engine::.*softmax", "Transformer Engine", SOFTMAX, "softmax forward"),
    # Triton: what torch.compile generates, then kernels that libraries wrote
    (r"triton_tem_.*flex_attention_backward", "Triton (FlexAttention)", ATTENTION, "flex backward"),
    (r"triton_tem_.*flex_attention", "Triton (FlexAttention)", ATTENTION, "flex forward"),
    (r"triton_tem_.*(mm|bmm|addmm)", "Triton (Inductor)", MATMUL, "matmul"),
    (r"triton_(per|red)_.*softmax", "Triton (Inductor)", SOFTMAX, "softmax"),
    (r"triton_(per|red)_", "Triton (Inductor)", "reduction", "fused reduction"),
    (r"triton_(poi|for)_", "Triton (Inductor)", "elementwise", "fused elementwise"),
    (r"quant_per_block_int8|^quant_|quantize", "Triton", "quantization", "quantize to int8"),
    (r"_fwd_kernel_splitK", "Triton (xFormers)", ATTENTION, "split-K forward"),
    (r"_splitK_reduce", "Triton (xFormers)", ATTENTION, "split-K reduce"),
    (r"^_attn_fwd", "Triton", ATTENTION, "attention forward"),
    (r"qk_int8_sv_f(8|16)|qattn|sageattn", "SageAttention", ATTENTION, "attention forward"),
    # the building blocks of attention written out
    (r"nvjet|_xmma_gemm|gemm|cutlass_\d+_(simt|tensorop|wmma)|cublas|::gemv", "cuBLAS", MATMUL, "matmul"),
    (r"(cunn_SoftMax|softmax_warp_|SoftMax).*[Bb]ackward", "PyTorch", SOFTMAX, "softmax backward"),
    (r"cunn_SoftMax|softmax_warp_|SoftMax", "PyTorch", SOFTMAX, "softmax forward"),
    (r"Memcpy", "CUDA", COPY, "copy"),
    (r"Memset", "CUDA", OTHER, "set memory"),
    (r"direct_copy_kernel|(bfloat16|float16|float8\w*)_copy_kernel|CatArray|copy_device", "PyTorch", COPY, "copy, transpose"),
    (r"index_elementwise_kernel|indexSelect|_scatter_gather", "PyTorch", COPY, "gather"),
    (r"reduce_kernel", "PyTorch", "reduction", "reduction"),
    (_ELEMENTWISE, "PyTorch", "elementwise", "{0}"),
    (r"elementwise_kernel|distribution_", "PyTorch", "elementwise", "elementwise"),
    # operators, as a CPU's profile shows them
    (r"aten::.*flash_attention_for_cpu_backward", "PyTorch", ATTENTION, "flash backward", "cpu"),
    (r"aten::.*flash_attention_for_cpu", "PyTorch", ATTENTION, "flash forward", "cpu"),
    (r"aten::_scaled_dot_product_attention_math", "PyTorch", ATTENTION, "math", "cpu"),
    (
        r"^aten::(matmul|_?reshape\w*|\w*view|expand|transpose|t|as_strided|empty\w*|contiguous)$",
        "PyTorch",
        OTHER,
        "{0}",
        "cpu",
    ),
    (r"^aten::(bmm|baddbmm|mm|addmm|_int_mm)", "PyTorch", MATMUL, "matmul", "cpu"),
    (r"^aten::_softmax_backward", "PyTorch", SOFTMAX, "softmax backward", "cpu"),
    (r"^aten::(_softmax|_safe_softmax)", "PyTorch", SOFTMAX, "softmax forward", "cpu"),
    (r"^aten::(copy_|clone|cat|_to_copy|index|gather)", "PyTorch", COPY, "copy, transpose", "cpu"),
    (r"^aten::(sum|mean|amax|any|all|max|min)", "PyTorch", "reduction", "reduction", "cpu"),
    (r"(cpp_)?fused_.*flex_attention|cpp_flex", "C++ (Inductor)", ATTENTION, "flex forward", "cpu"),
    (r"^cpp_fused|Torch-Compiled Region|CompiledFunction", "C++ (Inductor)", OTHER, "compiled region", "cpu"),
    (r"^aten::(\w+)", "PyTorch", "elementwise", "{0}", "cpu"),
)


@functools.cache
def name_of(symbol: str) -> KernelName:
    """Return what is known of a kernel's symbol; one that no rule knows keeps its symbol as its operation."""
    for pattern, framework, category, operation, *known in _RULES:
        if found := re.search(pattern, symbol):
            architecture = architecture_of(symbol) or "".join(known)
            return KernelName(framework, category, architecture, operation.format(*found.groups()))
    return KernelName("", OTHER, architecture_of(symbol), symbol[:60])


def architecture_of(symbol: str) -> str:
    """Return "sm90" where a symbol names an architecture, the newest where it names several; "" where it names none."""
    found = [int(number) for number in re.findall(r"[Ss]m_?(\d{2,3})(?!\d)", symbol)]
    return f"sm{max(found)}" if found else ""


def may_answer(symbol: str) -> bool:
    """Return whether a kernel belongs to the attention itself: copies, elementwise kernels and bookkeeping do not."""
    name = name_of(symbol)
    return name.category not in (COPY, "elementwise") and not (name.category == OTHER and name.framework == "PyTorch")


def answers_to(words: tuple[str, ...], symbol: str) -> bool:
    """Return whether a kernel of the attention itself has every word among its words or in its symbol, whatever the case."""
    known = f"{' '.join(name_of(symbol))} {symbol}".lower()
    return may_answer(symbol) and all(word.lower() in known for word in words)


_REPEATS = 8


@functools.cache
def ceilings_of(device: torch.device, dtype: str) -> tuple[float, float]:
    """Measure (FLOP/s of a large square matrix product in `dtype`, bytes/s of a large copy, read and write together).

    On a CPU the product is in float32 where that is quicker, as it is for kernels too: not every one has units for the dtype.
    """
    on_cuda = device.type == "cuda"
    size, copied = (8192, 1 << 30) if on_cuda else (1024, 1 << 26)
    a = torch.randn(size, size, device=device)
    narrow = a.to(getattr(torch, dtype))
    small, wide = narrow[:128, :128], a[:128, :128]
    if on_cuda or _shortest(lambda: small @ small, device) < _shortest(lambda: wide @ wide, device):
        a = narrow
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _shortest(lambda: a @ a, device)
    copy = _shortest(lambda: target.copy_(source), device)
    return 2 * size**3 / product, 2 * copied / copy


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several calls, in seconds: a ceiling is the best that was seen."""

    def once() -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    once()
    return min(once() for _ in range(_REPEATS))


class Launch(NamedTuple):
    """One kernel (on a CPU: one operator): its words, how often it was called, and its time on the device in seconds."""

    framework: str
    category: str
    architecture: str
    operation: str
    symbol: str
    calls: int
    seconds: float

    @property
    def words(self) -> str:
        """Line of what is known of the kernel."""
        return " ".join(word for word in self[:4] if word)


@dataclass(frozen=True)
class Profile:
    """The launches of one call in one direction, longest first.

    peak_memory: bytes asked for beyond what was there before the call, None on a CPU. roofline: the least seconds that
    the workload's flops and bytes allow on this device, None where its ceilings are not known.
    """

    direction: Direction
    launches: tuple[Launch, ...]
    peak_memory: int | None
    flops: int
    roofline: float | None = None

    @property
    def seconds(self) -> float:
        """Device time of all launches."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def symbols(self) -> list[str]:
        """The kernels' symbols."""
        return [launch.symbol for launch in self.launches]

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        launches = [launch._asdict() for launch in self.launches]
        return {**vars(self), "launches": launches, "seconds": self.seconds}


def profile_call(
    call: Callable[[], object],
    device: torch.device,
    workload: Workload,
    direction: Direction,
    ceilings: tuple[float, float] | None = None,
) -> Profile:
    """Profile one call; the caller has warmed it up. ceilings: (FLOP/s, bytes/s) of the device."""
    peak: list[int | None] = [None]

    def measured() -> None:
        peak[0] = peak_of(call, device)

    launches = launches_of(measured if device.type == "cuda" else call, device)
    flops = workload.flops(direction)
    roofline = max(flops / ceilings[0], workload.bytes(direction) / ceilings[1]) if ceilings else None
    return Profile(direction, tuple(launches), peak[0], flops, roofline)


def launches_of(call: Callable[[], object], device: torch.device) -> list[Launch]:
    """Return what a call launches, longest first, summed up by kernel; on a CPU, the operators that do work themselves."""
    on_cuda = device.type == "cuda"
    with quiet(), profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        call()
        if on_cuda:
            torch.cuda.synchronize(device)
    from torch._C._autograd import DeviceType

    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    found = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        is_bookkeeping = not on_cuda and not event.key.startswith(("aten::", "cpp_", "graph_", "Torch-Compiled"))
        if event.device_type != wanted or microseconds <= 0 or is_bookkeeping:
            continue
        found.append(Launch(*name_of(event.key), event.key, event.count, microseconds * 1e-6))
    return sorted(found, key=lambda launch: -launch.seconds)


_WARM_UPS = 2


def profile_subject(subject: Subject, spec: CheckSpec, with_ceilings: bool = True) -> list[Profile]:
    """Return a profile of the forward pass, as in inference, and with spec.backward one of the backward pass.

    with_ceilings: measure the device's ceilings, once per run, for the share of the roofline.
    """
    spec = spec.for_subject(subject)
    inputs = draw_inputs(spec.workload, spec.inputs[0], spec.seed, spec.device)
    tensors = list(spec.handed(inputs))
    ceilings = ceilings_of(spec.device, spec.workload.out_dtype) if with_ceilings else None
    with quiet(), subject.calling(), current(spec.device):
        forward = _forward_of(subject.prepare_timed(inputs), tensors)
        for _ in range(_WARM_UPS):
            forward()
        profiles = [profile_call(forward, spec.device, spec.workload, "forward", ceilings)]
        if spec.backward:
            kernel, dout = subject.prepare_timed(inputs, backward=True), spec.in_layout(inputs.dout)
            for _ in range(_WARM_UPS):
                _backward_of(kernel, tensors, dout)()
            backward = _backward_of(kernel, tensors, dout)
            profiles.append(profile_call(backward, spec.device, spec.workload, "backward", ceilings))
    return profiles


def _forward_of(kernel: AttentionFn, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return a call without gradients, of tensors of its own: some kernels change theirs."""
    own = copies_of(tensors)

    def forward() -> object:
        with torch.no_grad():
            return kernel(*own)

    return forward


def _backward_of(kernel: AttentionFn, tensors: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], object]:
    """Run the forward pass and return its backward pass, which may run once: compiled ones give their buffers away."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = kernel(*leaves)
    out = out[0] if isinstance(out, tuple | list) else out
    gradients = Gradients()
    return lambda: gradients([out], leaves, [dout])
