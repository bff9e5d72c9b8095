from typing import get_args

import pytest
import torch

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.profiler import Category, answers_to, architecture_of, name_of, profile_call, profile_subject
from pytest_attn.reports.lines import duration
from pytest_attn.reports.terminal import profile_tables

CPU = torch.device("cpu")
W = Workload(64, heads=2, name="here")
FA4 = "kernel_cutlass_kernel_flash_attncute"
FA4_CLASS = "_object_at__tensor0000o11101213_tensor0000o11101213"
FA2 = "_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, cutlass::bfloat16_t>, false>(flash::Flash_fwd_params)"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash"

#: as an H200 with torch 2.11 showed them, shortened; FlashAttention-3's and NATTEN's from their sources
SYMBOLS = {
    f"void flash::flash_fwd{FA2}": ("FlashAttention-2", "attention", "sm80", "flash forward"),
    f"void flash::flash_fwd_splitkv{FA2}": ("FlashAttention-2", "attention", "sm80", "flash forward, split keys"),
    "void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128> >(flash::Flash_bwd_params, int)": (
        *("FlashAttention-2", "attention", "sm80", "flash backward, convert dq"),
    ),
    f"void pytorch_flash::flash_fwd_splitkv_combine{FA2}": (
        *("PyTorch (flash)", "attention", "sm80", "flash forward, combine splits"),
    ),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128> >": (
        *("PyTorch (flash)", "attention", "sm80", "flash backward"),
    ),
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop> > >": (
        *("FlashAttention-3", "attention", "sm90", "flash forward"),
    ),
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90> > >": (
        *("FlashAttention-3", "attention", "sm90", "flash backward"),
    ),
    f"{FA4}flash_fwd_sm90FlashAttentionForwardSm90{FA4_CLASS}": ("FlashAttention-4", "attention", "sm90", "flash forward"),
    f"{FA4}flash_bwd_sm90FlashAttentionBackwardSm90{FA4_CLASS}": ("FlashAttention-4", "attention", "sm90", "flash backward"),
    f"{FA4}flash_bwd_postprocessFlashAttentionBackwardPostprocess{FA4_CLASS}": (
        *("FlashAttention-4", "attention", "", "flash backward, convert"),
    ),
    f"{CUDNN}_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0": ("cuDNN", "attention", "sm90", "flash forward"),
    f"{CUDNN}_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0": ("cuDNN", "attention", "sm90", "flash backward"),
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)": (
        *("cuDNN", "attention", "", "flash backward, convert dq"),
    ),
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)": (
        *("CUTLASS", "attention", "sm80", "fmha forward"),
    ),
    "fmha_cutlassB_bf16_aligned_128x128_k128_seqaligned_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": (
        *("CUTLASS", "attention", "sm80", "fmha backward"),
    ),
    "triton_tem_fused__to_copy_flex_attention_ones_slice_sort_sum_transpose_zeros_2": (
        *("Triton (FlexAttention)", "attention", "", "flex forward"),
    ),
    "triton_tem_fused_flex_attention_backward_1": ("Triton (FlexAttention)", "attention", "", "flex backward"),
    "triton_per_fused_flex_attention_backward_0": ("Triton (Inductor)", "reduction", "", "fused reduction"),
    "triton_poi_fused_zeros_1": ("Triton (Inductor)", "elementwise", "", "fused elementwise"),
    "_attn_fwd": ("Triton", "attention", "", "attention forward"),
    "quant_per_block_int8_kernel": ("Triton", "quantization", "", "quantize to int8"),
    "void natten::cuda::fna::FusedNeighborhoodAttentionBackwardKernel<float>": ("NATTEN", "attention", "", "FnaBackward"),
    "cutlass::device_kernel<cutlass::fna::collective::FnaMainloopTmaWarpSpecializedSm90>": (
        *("NATTEN", "attention", "sm90", "FnaForward"),
    ),
    "natten::tokperm::kernel": ("NATTEN", "copy", "", "token permute"),
    "void flashinfer::SinglePrefillWithKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)0, 128u> >": (
        *("FlashInfer", "attention", "sm80", "fa2 prefill"),
    ),
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<Params::AdditionalParams> >": (
        *("FlashInfer", "attention", "sm90", "fa3 prefill"),
    ),
    "void transformer_engine::scaled_masked_softmax_warp_backward<__nv_bfloat16, __nv_bfloat16, float, 9>": (
        *("Transformer Engine", "softmax", "", "softmax backward"),
    ),
    "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT": ("cuBLAS", "matmul", "sm90", "matmul"),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x128x8_stage3_warpsize1x4x1_ffma__5x_cublas": (
        *("cuBLAS", "matmul", "sm80", "matmul"),
    ),
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>": (
        *("PyTorch", "softmax", "", "softmax forward"),
    ),
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(": (
        *("PyTorch", "copy", "", "copy, transpose"),
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >": (
        *("PyTorch", "elementwise", "", "Fill"),
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float,"
    " at::native::binary_internal::MulFunctor<float> >": ("PyTorch", "elementwise", "", "Mul"),
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<int> >": (
        *("PyTorch", "elementwise", "", "add"),
    ),
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::(anonymous namespace)::"
    "where_kernel_impl(at::TensorIterator&)::{lambda()#1}": ("PyTorch", "elementwise", "", "where"),
    "Memcpy DtoD (Device -> Device)": ("CUDA", "copy", "", "copy"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("PyTorch", "attention", "cpu", "flash forward"),
    "aten::exp": ("PyTorch", "elementwise", "cpu", "exp"),
    "my_very_own_kernel_sm_100a": ("", "other", "sm100", "my_very_own_kernel_sm_100a"),
}


@pytest.mark.parametrize(("symbol", "words"), SYMBOLS.items(), ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_a_symbol_is_put_into_words(symbol, words):
    assert name_of(symbol) == words
    assert words[1] in get_args(Category)


def test_an_architecture_is_no_part_of_a_longer_number():
    assert architecture_of("sm80_kernel_sm90") == "sm90"
    assert architecture_of("asm9000_kernel") == ""


def test_only_kernels_of_the_attention_answer():
    fa4, copy = next(s for s in SYMBOLS if s.startswith(FA4)), "Memcpy DtoD (Device -> Device)"
    assert answers_to(("sm90", "Flash"), fa4)
    assert not answers_to(("sm90", "cudnn"), fa4)
    assert not answers_to(("copy",), copy)
    assert not answers_to(("reshape",), "aten::reshape")


@pytest.mark.parametrize(("name", "operation"), [("sdpa_flash", "flash"), ("eager", "softmax")])
def test_a_cpu_shows_the_operators_that_worked(name, operation):
    forward, backward = profile_subject(Registry()[name], CheckSpec(W, CPU, backward=True))
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert any(operation in launch.operation for launch in forward.launches)
    assert forward.flops == W.flops()
    assert backward.flops == W.flops("backward")
    assert forward.seconds == sum(launch.seconds for launch in forward.launches) > 0
    assert forward.peak_memory is None
    assert list(forward.launches) == sorted(forward.launches, key=lambda launch: -launch.seconds)
    assert forward.roofline is not None
    assert 0 < forward.roofline < forward.seconds


def test_the_calls_of_one_operator_are_counted():
    a = torch.ones(8, 8)
    profile = profile_call(lambda: [a.exp() for _ in range(5)], CPU, W, "forward")
    assert next(launch for launch in profile.launches if launch.operation == "exp").calls == 5
    assert profile.roofline is None


def record(subject, seconds, **profile):
    launch = {"framework": "F", "category": "attention", "architecture": "sm90", "operation": "forward", "calls": 1}
    launches = [{**launch, "symbol": "s", "seconds": seconds * 0.75}, {**launch, "symbol": "t", "seconds": seconds * 0.15}]
    launches.append({**launch, "category": "copy", "operation": "copy", "symbol": "c", "seconds": seconds * 0.1})
    known = {"direction": "forward", "flops": 2e9, "roofline": 5e-4, "peak_memory": 3 << 20, "seconds": seconds}
    return {"workload": "w", "subject": subject, "profiles": [{**known, "launches": launches, **profile}]}


def test_the_table_sums_up_and_compares_with_the_first_backend():
    text = [line for line, _ in profile_tables([record("one", 2e-3), record("two", 1e-3, roofline=None)])]
    assert text[0] == "one on w, forward"
    assert text[2].split() == ["F", "attention", "sm90", "forward", "2", "1.8", "ms", "90.0%"]
    assert text[4] == ("  total 2 ms, 10% of it copies and transposes, peak memory 3.0 MiB, 1.00 TFLOP/s, 25% of the roofline")
    assert text[10] == (
        "  total 1 ms, 10% of it copies and transposes, 2.00x as fast as one, peak memory 3.0 MiB, 2.00 TFLOP/s"
    )


def test_a_forward_pass_that_two_tests_profiled_is_shown_once():
    assert sum("one on w" in line for line, _ in profile_tables([record("one", 1e-3), record("one", 1e-3)])) == 1


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.00123456, "1.235 ms"), (7e-6, "7 us"), (5e-8, "0.05 us")])
def test_a_time_is_written_in_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text
    assert (duration(4e-4), duration(4e-4, milliseconds_from=1e-3)) == ("0.4 ms", "400 us")
