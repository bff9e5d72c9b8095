"""Torch's own attention: each kernel of SDPA, FlashAttention-3 and -4 in its place, varlen_attn, and a growing cache."""

import functools
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_attn.backends.backend import Backend, LibraryBackend, half_precision_only
from pytest_attn.backends.capabilities import ANY_SIZE, Capabilities, refusals_without
from pytest_attn.backends.contexts import within
from pytest_attn.backends.defects import (
    CUDNN_NAN,
    CUDNN_NAN_OF_ONE_TILE,
    CUDNN_STALE_STRIDES,
    CUTLASS_OFFSETS,
    CUTLASS_SHARED_HEAD,
    SDPA_FULLY_MASKED_ROWS,
    SDPA_LARGE_SCORES,
    KnownDefect,
)
from pytest_attn.backends.dense import additive_or_boolean_mask, boolean_mask, is_plain_causal, needs_dense_mask
from pytest_attn.backends.layouts import (
    ALL_QUANTIZED,
    as_packed,
    bottom_right_window,
    not_decoding_because,
    on_values,
    sequence_boundaries,
)
from pytest_attn.backends.library import FLASH3, FLASH4
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, scores_bytes
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import split_cache
from pytest_attn.workloads.workload import Workload, is_interleaved, repeated

#: what SDPA's signature can say, with a mask as a tensor
_MASK_TENSOR = replace(
    ANY_SIZE,
    masks=frozenset(("any",)),
    features=frozenset(
        ("bias", "alibi", "scale", "grouped heads", "padded", "backward", "interleaved heads", "ALiBi per batch entry")
    ),
)

_OF_CUDNN = (CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE, CUDNN_STALE_STRIDES, SDPA_FULLY_MASKED_ROWS, SDPA_LARGE_SCORES)


class Automatic(Backend):
    """SDPA as it chooses by itself: `sdpa`."""

    name = "sdpa"
    precision = "sdpa"
    capabilities = _MASK_TENSOR
    needs = "CPU, CUDA or XPU"
    kernel: str | None = None
    variants: tuple[str, ...] = ("compile", "max_autotune", "graph")
    known_defects: tuple[KnownDefect, ...] = _OF_CUDNN  # which it chooses on an H200

    def unavailable_because(self, machine: Machine) -> str | None:
        """MPS is left to torch's own tests."""
        return "is tested on CPU, CUDA and XPU only" if machine.kind == "mps" else None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        beyond = ("packed", "paged", "packed pages", "cached", "left-padded", "softcap", "sinks", "score_mod")
        reasons = refusals_without(beyond, workload)
        if workload.alibi and workload.dtype != "float32":
            reasons.append(f"would round ALiBi's distances to {workload.dtype} in attn_mask")
        return reasons or self.native_refusals(workload, machine, backward)

    def precision_on(self, kind: str) -> str:
        """On a CPU, `sdpa` and `sdpa_flash` are one kernel."""
        return "torch_cpu" if kind == "cpu" else self.precision

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return workload.batch * workload.heads * workload.q_len * workload.kv_len * 2 if needs_dense_mask(workload) else 0

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Build the mask once; the kernel is selected around each call and restored after it."""
        w = inputs.workload
        causal = is_plain_causal(w)
        mask = None if causal else additive_or_boolean_mask(inputs)
        scale, interleaved = w.scale, is_interleaved(w)
        grouped = w.group > 1 and not interleaved

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if interleaved:
                k, v = repeated(k, w), repeated(v, w)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)

        return call if self.kernel is None else _on_kernel(call, self.kernel)


class Math(Automatic):
    """SDPA's composite implementation, in the workload's dtype with float32 inside."""

    name, kernel, precision = "math", "MATH", "flash"
    known_defects = ()
    capabilities = replace(_MASK_TENSOR, quantized=ALL_QUANTIZED)

    def precision_on(self, kind: str) -> str:
        return self.precision

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        return on_values(super().prepare(inputs, backward), inputs)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return scores_bytes(workload, backward, copies=3)


class Flash(Automatic):
    """SDPA's FlashAttention-2, and on a CPU its tiled kernel."""

    name, kernel, precision = "sdpa_flash", "FLASH_ATTENTION", "flash2"
    known_defects = ()
    launches = ("PyTorch (flash)",)
    needs = "CUDA, sm80 to sm121; a CPU has another kernel, which takes masks and float32"
    capabilities = Capabilities(
        masks=frozenset(("causal", "causal-bottom-right")),
        features=frozenset(("scale", "grouped heads", "backward")),
        square=True,
    )

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """On CUDA torch's own words; on a CPU, the one limit of its kernel."""
        if machine.kind == "cuda":
            return native_refusals("flash", workload, machine, backward)
        if workload.head_dim != workload.v_head_dim:
            return ["needs v_head_dim equal to head_dim"]
        if workload.group > 1 and not _cpu_kernel_takes_groups():
            return [f"does not support grouped-query attention (GQA) on a CPU in torch {machine.torch_version}"]
        return []


class Efficient(Automatic):
    """SDPA's memory-efficient kernel (CUTLASS fmha)."""

    name, kernel, precision = "sdpa_efficient", "EFFICIENT_ATTENTION", "cutlass"
    known_defects = (CUTLASS_SHARED_HEAD, CUTLASS_OFFSETS)
    launches = ("CUTLASS", "fmha")
    needs = "CUDA"
    capabilities = replace(_MASK_TENSOR, features=_MASK_TENSOR.features - {"grouped heads"}, head_dim_step=8)

    def unavailable_because(self, machine: Machine) -> str | None:
        return None if machine.kind == "cuda" else "needs a CUDA device"

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        return native_refusals("efficient", workload, machine, backward)


class Cudnn(Automatic):
    """SDPA's cuDNN kernel."""

    name, kernel, precision, makes_plans = "sdpa_cudnn", "CUDNN_ATTENTION", "cudnn", True
    runs_kernels_of = "sdpa"  # which chooses cuDNN on an H200: of what one of them makes plans the other has them
    launches = ("cuDNN", "flash")
    needs = "CUDA, sm80 to sm121, cuDNN"
    capabilities = replace(_MASK_TENSOR, dtypes=("bfloat16", "float16"), head_dim=128, head_dim_step=8)
    known_defects = _OF_CUDNN

    def unavailable_because(self, machine: Machine) -> str | None:
        if machine.kind != "cuda":
            return "needs a CUDA device"
        built_with_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if built_with_cudnn else "torch was built without cuDNN"

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        return half_precision_only(workload) or native_refusals("cudnn", workload, machine, backward)


def _on_kernel(call: AttentionFn, kernel: str) -> AttentionFn:
    """Allow exactly one of SDPA's kernels during each call. The previous choice comes back.

    The context is torch's own, because torch 2.6 compiles a call within that, and within no other generator.
    """
    backend = getattr(SDPBackend, kernel)

    def on_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return on_kernel


@functools.cache
def _cpu_kernel_takes_groups() -> bool:
    """Ask torch whether its CPU kernel supports grouped-query attention, which that of torch 2.6 does not."""
    q, k = torch.empty(1, 2, 8, 16, device="cpu"), torch.empty(1, 1, 8, 16, device="cpu")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        chosen: int = torch._fused_sdp_choice(q, k, k, enable_gqa=True)
    return chosen == SDPBackend.FLASH_ATTENTION.value


def native_refusals(kernel: str, w: Workload, machine: Machine, backward: bool) -> list[str]:
    """Return the reasons that torch.backends.cuda.can_use_*_attention(debug=True) gives as warnings; empty where it can.

    They look at shapes alone: what is asked about has the memory of one row, as a mask of long contexts fits into no GPU.
    """
    dtype = getattr(torch, w.dtype)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape[-1], dtype=dtype, device=machine.device).expand(shape)

    q, k, v = (
        empty(w.batch, heads, length, dim).requires_grad_(backward)
        for heads, length, dim in (
            (w.heads, w.q_len, w.head_dim),
            (w.kv_heads, w.kv_len, w.head_dim),
            (w.kv_heads, w.kv_len, w.v_head_dim),
        )
    )
    mask = empty(1, 1, w.q_len, w.kv_len, dtype=dtype if w.bias or w.alibi else torch.bool) if needs_dense_mask(w) else None
    params = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, is_plain_causal(w), w.group > 1)
    can_use = getattr(torch.backends.cuda, f"can_use_{kernel}_attention")
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # some reasons would be said once per process
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if can_use(params, True):
                return []
    finally:
        torch.set_warn_always(before)
    said = [" ".join(str(warning.message).split(" (Triggered internally")[0].split()) for warning in caught]
    return said or [f"torch.backends.cuda.can_use_{kernel}_attention says no, without a reason"]


# -- FlashAttention-3 or -4 in the place of torch's own FlashAttention-2 -----------------------------------------------------


class SdpaFa3(LibraryBackend):
    """SDPA under activate_flash_attention_impl("FA3"). Not run on hardware."""

    name = "sdpa_fa3"
    implementation = "FA3"
    source = FLASH3[-1]
    needs = "CUDA, sm90, torch 2.11, flash-attn-3"
    capability_range = ((9, 0), (9, 0))
    capabilities = Capabilities(
        masks=frozenset(("causal",)), features=frozenset(("scale", "grouped heads", "backward")), square=True
    )

    def unavailable_because(self, machine: Machine) -> str | None:
        if machine.torch_release < (2, 11):
            return f"needs torch 2.11, this is {machine.torch_version}"
        return super().unavailable_because(machine)

    def broken_because(self) -> str | None:
        """Import the library, then let torch activate it, and restore what was active."""
        if reason := super().broken_because():
            return reason
        try:
            with _activated(self.implementation):
                return None
        except Exception as error:  # whatever the library or its registration raises
            return f"torch cannot activate {self.implementation}: {type(error).__name__}: {error}"

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Try torch's hook with one token like the workload's: a build may lack a head dimension, a release what is called.

        What a release lacks is found once, and not again for each head dimension, dtype and direction.
        """
        of = workload.head_dim, workload.dtype
        hook_of = self.implementation, machine.device
        failure = _BROKEN_HOOKS.get(hook_of) or _failure_of_one_token(*hook_of, False, *of)
        if failure and re.match(_OF_ANY_SIZE, failure):
            _BROKEN_HOOKS[hook_of] = failure
        if failure is None and backward:
            failure = _failure_of_one_token(*hook_of, True, *of)
        if failure is None:
            return []
        torch_version = machine.torch_version.partition("+")[0]
        hook = f"torch {torch_version}'s {self.implementation} hook"
        return [f"{hook} fails with {self.library} {self.version()}: {failure}"]

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Activate around each call, and around its backward pass where there is one."""
        return within(functools.partial(_activated, self.implementation), Flash().prepare(inputs, backward))


class SdpaFa4(SdpaFa3):
    """SDPA under activate_flash_attention_impl("FA4")."""

    name, runs_kernels_of = "sdpa_fa4", "flash4"
    implementation = "FA4"
    source = FLASH4
    needs = "CUDA, sm90 or sm100, torch 2.11, flash-attn-4"
    capability_range = ((9, 0), (10, 3))

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        if machine.capability and machine.capability >= (10, 0) and 128 < workload.head_dim < 256:
            return [f"takes a head_dim of at most 128, or 256, on {machine.architecture}, not {workload.head_dim}"]
        return super().native_refusals(workload, machine, backward)


@contextmanager
def _activated(implementation: str) -> Iterator[None]:
    """Replace torch's FlashAttention, for the whole process; what was active before comes back."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

    before = current_flash_attention_impl()
    try:
        with warnings.catch_warnings():  # torch warns of every override once, this one is meant
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            activate_flash_attention_impl(implementation)
        yield
    finally:
        if before is not None:
            activate_flash_attention_impl(before)
        elif current_flash_attention_impl() is not None:
            restore_flash_attention_impl()


#: why torch's hook fails for whatever it is given, by implementation and device
_BROKEN_HOOKS: dict[tuple[str, str], str] = {}
#: errors of Python in a hook and a library that do not fit one another, in words that say nothing of a tensor
_OF_ANY_SIZE = r"(TypeError|ValueError|AttributeError|(Import|ModuleNotFound)Error): (?!.*(head|dim|build|support|type|shape))"


@cache
def _failure_of_one_token(implementation: str, device: str, backward: bool, head_dim: int, dtype: str) -> str | None:
    of = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": backward}
    q, k, v = (torch.zeros(1, 1, 1, head_dim, **of) for _ in range(3))
    plain = _on_kernel(F.scaled_dot_product_attention, "FLASH_ATTENTION")
    kernel = within(functools.partial(_activated, implementation), plain)
    try:
        out = kernel(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    except Exception as error:  # a call as plain as this one can only fail in the hook, or as any call on a broken device
        if "CUDA error" in str(error):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


class Varlen(Backend):
    """varlen_attn on "thd" tensors; dense batches and documents are handed over as packed sequences."""

    name = "varlen"
    variants = ("compile", "graph")
    launches = ("PyTorch (flash)",)
    needs = "CUDA, sm80 to sm121, torch >= 2.10"
    capabilities = Capabilities(
        masks=frozenset(("causal-bottom-right", "window", "documents")),
        features=frozenset(("scale", "grouped heads", "packed", "backward")),
    )

    def unavailable_because(self, machine: Machine) -> str | None:
        if machine.kind != "cuda":
            return "needs a CUDA device"
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401
        except Exception as error:
            return f"torch {machine.torch_version} has no torch.nn.attention.varlen ({error})"
        if machine.capability is not None and machine.capability < (8, 0):
            return f"needs sm80, this device is {machine.architecture}"
        return None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what varlen_attn's signature cannot say, and what it cannot say yet in this torch."""
        reasons = self.declared_refusals(workload, backward)
        if workload.group > 1 and not _takes("enable_gqa"):
            reasons.append("does not support grouped-query attention (GQA) in this torch")
        is_masked = bottom_right_window(workload) not in (None, (-1, -1))
        if is_masked and not (_takes("window_size") or _takes("is_causal")):
            reasons.append("takes no mask in this torch")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        from torch.nn.attention.varlen import varlen_attn

        w, ends = inputs.workload, sequence_boundaries(inputs)
        window, options = bottom_right_window(w), dict[str, Any]()
        if w.scale is not None or _takes("scale"):
            options["scale"] = w.softmax_scale
        if w.group > 1:
            options["enable_gqa"] = True
        if window != (-1, -1):
            options |= {"window_size": window} if _takes("window_size") else {"is_causal": True}
        return as_packed(lambda q, k, v: varlen_attn(q, k, v, *ends, **options), w)


def _takes(parameter: str) -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return False
    return parameter in inspect.signature(varlen_attn).parameters


#: tokens that are decoded; more would ask nothing else, and cuDNN makes a plan for each number of keys
_DECODED = 8


class KvCache(Automatic):
    """Appends and attends, all but the last tokens at once, then one at a time; equals one prefill with a causal mask."""

    name = "kv_cache"
    is_slow = True  # a call, and a plan of cuDNN's, for each token that is decoded
    variants, known_defects = (), ()
    capabilities = replace(
        ANY_SIZE, masks=frozenset(("causal-bottom-right", "window")), features=frozenset(("scale", "grouped heads", "cached"))
    )

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        w = workload
        reasons = ["decoding has no backward pass"] if backward else []
        reasons += not_decoding_because(w)
        if w.is_packed or w.kv_lens or w.softcap or w.alibi or w.sinks or w.bias or w.score_mod:
            reasons.append("has no packed or padded sequences and no changes of the score")
        if is_interleaved(w):
            reasons.append("does not support interleaved head groups (h % kv_heads)")
        return reasons

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return scores_bytes(workload, backward, copies=3) if workload.q_len > _DECODED else 0

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Fill the cache with all keys before the first query's own."""
        w, visible = inputs.workload, boolean_mask(inputs)
        assert visible is not None  # it takes causal masks and windows only
        known, decoded_from = w.kv_len - w.q_len, max(w.q_len - _DECODED, 0)
        prompt = [range(decoded_from)] if decoded_from else []
        steps = [*prompt, *(range(row, row + 1) for row in range(decoded_from, w.q_len))]

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if w.cached:
                split = split_cache(inputs, k, v)
                cache_k, cache_v = split.k_cache, split.v_cache
            else:
                cache_k, cache_v = torch.zeros_like(k), torch.zeros_like(v)
                cache_k[:, :, :known], cache_v[:, :, :known] = k[:, :, :known], v[:, :, :known]
            outs = []
            for step in steps:
                rows, seen = slice(step.start, step.stop), known + step.stop
                new = slice(known + step.start, seen)
                cache_k[:, :, new], cache_v[:, :, new] = k[:, :, new], v[:, :, new]
                decodes = len(step) == 1
                mask = None if decodes and w.mask.is_causal else visible[:, :, rows, :seen]
                attend: AttentionFn = functools.partial(
                    F.scaled_dot_product_attention, attn_mask=mask, scale=w.scale, enable_gqa=w.group > 1
                )
                if not decodes:  # with any other kernel, masks would be asked about, as other backends are
                    attend = _on_kernel(attend, "MATH")
                outs.append(attend(q[:, :, rows], cache_k[:, :, :seen], cache_v[:, :, :seen]))
            return torch.cat(outs, 2)

        return call
