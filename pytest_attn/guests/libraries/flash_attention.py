"""flash-attn 2, 3 and 4, whose functions are a family: dense, packed (varlen) and paged sequences, and a cache that grows.

All align causal masks and windows to the last key. flash-attn 3 has two generations of its interface. The newer one has run on
an H200; the tests have stand-ins of both. flash-attn 4 (CuTe DSL) compiles a new configuration at its first call.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities, refusals_of
from pytest_attn.backends.configured import Options
from pytest_attn.backends.defects import FLASH4_DQ, KnownDefect
from pytest_attn.backends.flex import family_of, refused_head_dims
from pytest_attn.backends.layouts import (
    as_packed,
    bottom_right_window,
    first_of,
    in_bshd,
    is_key,
    not_decoding_because,
    sequence_boundaries,
)
from pytest_attn.backends.library import FLASH3, FLASH4, Library, refusals_of_trial
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.kv_layout import split_cache
from pytest_attn.workloads.masks import Causal, Mask, Window
from pytest_attn.workloads.traits import traits_of
from pytest_attn.workloads.workload import Workload

#: what flash2 runs on, and libraries around it
FLASH2 = Library(("flash-attn",), "flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation")

#: the names that flash-attention has for what `sequence_boundaries` returns
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class FlashAttention(LibraryBackend):
    """flash_attn_func, flash_attn_varlen_func for packed sequences, documents and padding, and a function for pages.

    All align causal masks and windows to the last key, take (batch, rows, heads, dim), and return out or a tuple that
    begins with it. Subclasses say in which words theirs differs.
    """

    #: the function that reads pages, and what it calls the number of keys in use and the page table
    paged_words: tuple[str, str, str] = ("flash_attn_with_kvcache", "cache_seqlens", "page_table")
    #: what stands for an open side of a window
    open_side: int | None = -1

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        w = inputs.workload
        if w.kv_pages and w.is_packed:  # as flash-attn 2 takes them
            ends = (inputs.cu_seqlens, ends_of(inputs.kv_lens), w.q_len, w.kv_len)
            return self._varlen(inputs, ends, block_table=inputs.page_table)
        if w.kv_pages:
            name, lengths, table = self.paged_words
            kernel = self._calling(name, inputs, **{lengths: inputs.kv_lens, table: inputs.page_table})
            return lambda q, k, v: kernel(q.transpose(1, 2), k, v).transpose(1, 2)
        if w.is_packed or w.kv_lens is not None or w.documents:
            packed, kernel_of = without_padding(inputs)
            return kernel_of(self._varlen(inputs, sequence_boundaries(packed)))
        return in_bshd(self._calling("flash_attn_func", inputs))

    def _varlen(self, inputs: Inputs, ends: Sequence[Any], **options: Any) -> AttentionFn:
        return self._calling("flash_attn_varlen_func", inputs, **dict(zip(BOUNDARIES, ends, strict=True)), **options)

    def _calling(self, name: str, inputs: Inputs, **options: Any) -> AttentionFn:
        """Return one of the library's functions, of q, k and v alone."""
        function = getattr(self.source.load(), name)
        options = {**self.options(inputs), **options}
        return lambda q, k, v: first_of(function(q, k, v, **options))

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Return the arguments that all three functions take."""
        return {**options_of(inputs.workload, self.open_side), **self.configuration}


def options_of(w: Workload, open_side: int | None = -1) -> dict[str, Any]:
    """Return the arguments that say a workload to a function of the library. open_side: of a window without end."""
    window = bottom_right_window(w)
    assert window is not None
    causal = window == (-1, 0)
    left, right = (open_side if side < 0 or causal else side for side in window)
    return {"softmax_scale": w.softmax_scale, "causal": causal, "window_size": (left, right), "softcap": w.softcap or 0.0}


def mask_of_window(causal: object, window: Sequence[int | None] | None) -> Mask | None:
    """Return the mask of flash-attention's two arguments: causal from the bottom right, -1 or None for an open side.

    What `bottom_right_window` makes of a mask, it reads back.
    """
    left, right = (None if side is None or side < 0 else int(side) for side in ((-1, -1) if window is None else window))
    if causal:
        return Causal(bottom_right=True) if left is None else Window(left, 0)
    return None if left is None and right is None else Window(left, right)


def without_padding(inputs: Inputs) -> tuple[Inputs, Callable[[AttentionFn], AttentionFn]]:
    """Turn padded keys into packed sequences: return the packed inputs, and what wraps a kernel of those for these tensors.

    Inputs that are not padded come back as they are. Query rows stay as many as they were.
    """
    w = inputs.workload
    if w.kv_lens is None or w.is_packed:
        return inputs, lambda kernel: as_packed(kernel, w)
    packed = w.replace(q_lens=(w.q_len,) * w.batch, kv_lens=w.kv_lens, q_len=None, kv_len=None, batch=None)
    cu_kv = ends_of(inputs.kv_lens)
    cu_q = torch.arange(w.batch + 1, device=inputs.device, dtype=torch.int32) * w.q_len
    there = is_key(inputs)
    assert there is not None
    used = there.flatten().nonzero().squeeze(1)  # found here, as finding them reads values back, which no graph can

    packed_inputs = dataclasses.replace(inputs, workload=packed, cu_seqlens=cu_q, cu_seqlens_kv=cu_kv)
    return packed_inputs, lambda kernel: as_packed(kernel, w, used)


def ends_of(lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the boundaries of sequences of these lengths, (batch + 1,) int32."""
    assert lengths is not None
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def refused_by_compiler(error: Exception) -> str | None:
    """Return the words of flash-attn 4's compiler, which finds no layout for some head sizes; None for other errors."""
    words = " ".join(str(error).split())[:160]
    return f"its compiler: {words}" if type(error).__name__ == "MLIRError" else None


@cache
def refused_by_build(head_dim: int, dtype: str, device: str) -> tuple[str, ...]:
    """Ask with one token whether this flash-attn 2 has kernels for a head dimension: builds for a few of them are common."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return ()
    one = torch.zeros(1, 1, 1, head_dim, dtype=getattr(torch, dtype), device=device)
    return refusals_of_trial(lambda: FLASH2.load().flash_attn_func(one, one, one))


# -- flash-attn 2 ------------------------------------------------------------------------------------------------------------

_SCORE = frozenset(("softcap", "alibi", "scale", "grouped heads"))
_PAGE_STEP = 256
#: 0, the default, lets the library's heuristic decide
_SPLITS: tuple[Options, ...] = tuple({"num_splits": number} for number in (1, 2, 4, 8, 16, 32))


class Flash2(FlashAttention):
    """flash_attn_func; flash_attn_varlen_func for packed sequences, documents and padding; the kv-cache for pages."""

    name = "flash2"
    source = FLASH2
    precision = "flash2"
    paged_words = ("flash_attn_with_kvcache", "cache_seqlens", "block_table")
    variants: tuple[str, ...] = ("compile", "max_autotune", "graph")
    launches = ("FlashAttention-2",)
    needs = "CUDA, sm80 to sm121"
    capabilities = Capabilities(
        masks=frozenset(("causal-bottom-right", "window", "documents")),
        features=_SCORE | {"packed", "padded", "paged", "packed pages", "backward"},
    )
    tunable = frozenset(("num_splits",))

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Into how many parts the keys of a page table are split; by default the library's heuristic decides."""
        return _SPLITS if workload.kv_pages and not workload.is_packed else ()

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse what this build was made without, in its own words, and pages of another size."""
        if self.configuration and (not workload.kv_pages or workload.is_packed):
            return ["splits the keys of a page table only, for queries of one length"]
        if workload.kv_pages and workload.kv_pages.size % _PAGE_STEP:
            return [f"takes pages of a multiple of {_PAGE_STEP} tokens, not {workload.kv_pages.size}"]
        return [*refused_by_build(workload.head_dim, workload.dtype, machine.device)]

    def options(self, inputs: Inputs) -> dict[str, Any]:
        return {**super().options(inputs), "alibi_slopes": inputs.alibi_slopes}


class Flash2KvCache(Flash2):
    """flash_attn_with_kvcache as a language model generates: each call appends one token and attends with one query.

    Where the workload says what is cached, one call appends all new keys to a cache that holds the others.
    """

    name = "flash2_kvcache"
    variants = ()
    capabilities = Capabilities(masks=frozenset(("causal-bottom-right", "window")), features=_SCORE | {"cached"})

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Into how many parts the keys are split; by default the library's heuristic decides."""
        return _SPLITS

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        return not_decoding_because(workload) or [*refused_by_build(workload.head_dim, workload.dtype, machine.device)]

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Fill the cache with the prompt, all keys before the first query's own."""
        function, options, w = self.source.load().flash_attn_with_kvcache, self.options(inputs), inputs.workload
        prompt = w.kv_len - w.q_len

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if w.cached:  # it appends the new keys at the end of the prefix
                s = split_cache(inputs, k, v, "bshd")
                new = {"cache_seqlens": s.cache_seqlens, **options}
                return first_of(function(q, s.k_cache, s.v_cache, s.k_new, s.v_new, **new))
            cache_k, cache_v = torch.zeros_like(k), torch.zeros_like(v)
            cache_k[:, :prompt], cache_v[:, :prompt] = k[:, :prompt], v[:, :prompt]
            rows = []
            for step in range(w.q_len):
                now = slice(prompt + step, prompt + step + 1)
                query = q[:, step : step + 1]
                rows.append(function(query, cache_k, cache_v, k[:, now], v[:, now], cache_seqlens=now.start, **options))
            return torch.cat(rows, 1)

        return in_bshd(call)


# -- flash-attn 3 ------------------------------------------------------------------------------------------------------------

#: what a build says where it was made without a feature or a head dimension
_BUILD_WORDS = ("build does not support", "only supports head dimension")

_UNALIGNED = KnownDefect(
    issue="seen on an H200 on 2026-11-22, no report found",
    summary="strides and addresses that are not a multiple of 16 bytes, also in dimensions of size 1, end the CUDA context",
    invariants=("alignment",),
    ends_cuda=True,
)


class Flash3(FlashAttention):
    """flash_attn_func; flash_attn_varlen_func for packed sequences, documents and padding; the kv-cache for pages."""

    name = "flash3"
    variants = ("compile", "max_autotune", "graph")
    full_graph = False  # builds before torch.library.custom_op break
    launches = ("FlashAttention-3",)
    needs = "CUDA, sm90"
    capability_range = ((9, 0), (9, 0))
    capabilities = Capabilities(
        masks=frozenset(("causal-bottom-right", "window", "documents")),
        features=frozenset(("softcap", "scale", "grouped heads", "packed", "padded", "paged", "backward")),
        v_head_dim=True,
        quantized=frozenset(("fp8", "tensor", "head")),
    )
    known_defects = (_UNALIGNED,)
    tunable = frozenset(("num_splits", "pack_gqa"))

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Into how many parts the keys are split, and whether the query heads of a group share a tile; forward only."""
        if backward:
            return ()
        packings = (True, False) if workload.group > 1 else ()
        return [*_SPLITS, *({"pack_gqa": packing} for packing in packings)]

    @property
    def source(self) -> Library:  # type: ignore[override]
        """The generation that is installed; the older one, whose module torch looks for as well, where none is."""
        return next((library for library in FLASH3 if library.missing_because() is None), FLASH3[-1])

    def declared_refusals(self, workload: Workload, backward: bool = False) -> list[str]:
        """Short keys may have values of up to 512 in the forward pass."""
        declared = self.capabilities
        if workload.head_dim <= 64 and not backward:
            declared = dataclasses.replace(declared, head_dim=512)
        return declared.refusals(workload, backward)

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Add descales, (batch, kv_heads) each, where q, k and v are fp8; the result is bfloat16 then."""
        w, options = inputs.workload, super().options(inputs)
        if inputs.descales is not None:
            for name, descale in inputs.descales._asdict().items():
                options[f"{name}_descale"] = descale.expand(w.batch, w.kv_heads).contiguous()
        return options

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse pairs of head dimensions without a kernel, then what this build was made without, in its own words."""
        if workload.is_quantized and (workload.kv_lens is not None or workload.documents):
            return [
                "takes fp8 in dense tensors only, as far as is known: descales of packed and paged ones are not documented"
            ]
        dim, v_dim = workload.head_dim, workload.v_head_dim
        if not (dim == v_dim or dim <= 64 or (128 < dim <= 192 and 96 < v_dim <= 128)):
            return [
                "takes a v_head_dim of 97 to 128 with a head_dim of 129 to 192, or any with a head_dim of at most 64,"
                f" not head_dim {dim}, v_head_dim {v_dim}"
            ]
        return [*_refused_by_build(_smallest_like(workload), machine.device, backward)]


def _smallest_like(w: Workload) -> Workload:
    """Return eight tokens that need the same kernel as the workload: a build may lack any of its features."""
    lengths: dict[str, Any] = {"q_len": 8}
    if w.kv_pages:
        lengths["kv_pages"] = w.kv_pages
    elif w.is_packed or w.kv_lens is not None or w.documents:
        lengths = {"q_lens": (8,)}
    return Workload(
        **lengths,
        heads=w.group,
        kv_heads=1,
        head_dim=w.head_dim,
        v_head_dim=w.v_head_dim,
        dtype=w.dtype,
        mask=Window(1, 1) if "window" in traits_of(w) else None,
        softcap=w.softcap,
    )


@cache
def _refused_by_build(trial: Workload, device: str, backward: bool) -> tuple[str, ...]:
    """Ask with a few tokens whether this build has the kernels: builds for a few of them are common."""
    inputs = draw_inputs(trial, "flat", device=device)
    kernel = Flash3().prepare(inputs, backward)
    leaves = [t.requires_grad_(backward) for t in (inputs.q, inputs.k, inputs.v)]
    try:
        out = kernel(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, inputs.dout)
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        if any(phrase in words for phrase in _BUILD_WORDS):
            return (words,)
        raise
    return ()


# -- flash-attn 4 ------------------------------------------------------------------------------------------------------------


class Flash4(FlashAttention):
    """flash_attn_func; flash_attn_varlen_func for packed sequences, documents, padding and pages.

    Its score_mod and mask_mod are CuTe functions, not torch's: see flex_flash for those.
    """

    name = "flash4"
    source = FLASH4
    paged_words = ("flash_attn_varlen_func", "seqused_k", "page_table")
    open_side = None
    variants = ("graph",)
    full_graph = False
    launches = ("FlashAttention-4",)
    needs = "CUDA, sm80 to sm121; backward and pages from sm90 on"
    capabilities = Capabilities(
        masks=frozenset(("causal-bottom-right", "window", "documents")),
        features=frozenset(("softcap", "sinks", "scale", "grouped heads", "packed", "padded", "paged", "backward")),
        v_head_dim=True,
    )
    known_defects = (FLASH4_DQ,)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """State what its asserts would say for this architecture."""
        w, family, dims = workload, family_of(machine), f"head_dim {workload.head_dim}, v_head_dim {workload.v_head_dim}"
        is_ampere_kernel, has_softcap = family in (8, 12), w.softcap is not None
        is_irregular, is_largest = bool(w.head_dim % 16 or w.v_head_dim % 16), family in (10, 11) and w.head_dim == 256
        reasons = {
            f"has no sinks on sm{family}0": is_ampere_kernel and w.sinks,
            f"does not support a paged KV cache on sm{family}0": is_ampere_kernel and w.kv_pages is not None,
            f"needs multiples of 16 with pages, not {dims}": family == 9 and w.kv_pages is not None and is_irregular,
            "has no backward pass on sm80": backward and family == 8,
            "has no softcap backward for 256": backward and is_largest and has_softcap,
            "has no backward with sinks for 256": backward and is_largest and w.sinks,
            "has no backward with softcap on sm120": backward and family == 12 and has_softcap,
        }
        return refusals_of(reasons) + refused_head_dims(workload, machine, backward)

    def refusal_in(self, error: Exception) -> str | None:
        """Return the words of its compiler, which finds no layout for some head sizes."""
        return refused_by_compiler(error)

    def options(self, inputs: Inputs) -> dict[str, Any]:
        return {**super().options(inputs), "learnable_sink": inputs.sinks}
