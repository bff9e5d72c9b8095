"""flash-attn 2, 3 and 4, whose functions are a family: dense, packed (varlen) and paged sequences, and a cache that grows.

All align causal masks and windows to the last key. flash-attn 3 has two generations of its interface. The newer one has run on
an H200; the tests have stand-ins of both. flash-attn 4 (CuTe DSL) compiles a new configuration at its first call.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from pytest_attn.backends.attention_args import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    first_of,
    refuse_unread,
    swap_rows_and_heads,
    unchanged,
)
from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities, refusals_of
from pytest_attn.backends.compilers import keeping_flash4
from pytest_attn.backends.configured import Options
from pytest_attn.backends.defects import FLASH4_DQ, KnownDefect
from pytest_attn.backends.layouts import (
    BOUNDARIES,
    as_packed,
    bottom_right_window,
    ends_of,
    in_bshd,
    mask_of_window,
    not_decoding_because,
    sequence_boundaries,
    without_padding,
)
from pytest_attn.backends.library import Library, refusal_of_trial
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.kv_layout import split_cache
from pytest_attn.workloads.masks import Window
from pytest_attn.workloads.traits import traits_of
from pytest_attn.workloads.workload import Workload

#: what flash2 runs on, and libraries around it
FLASH2 = Library(("flash-attn",), "flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation")
#: what flash4, flex_flash and, where it is installed, te_flash run on
FLASH4 = Library(("flash-attn-4",), "flash_attn.cute", "pip install --pre flash-attn-4", keeping_flash4)


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
            return kernel_of(as_packed(self._varlen(inputs, sequence_boundaries(packed)), packed.workload))
        return in_bshd(self._calling("flash_attn_func", inputs))

    def _varlen(self, inputs: Inputs, ends: Sequence[Any], **options: Any) -> AttentionFn:
        return self._calling("flash_attn_varlen_func", inputs, **dict(zip(BOUNDARIES, ends, strict=True)), **options)

    def _calling(self, name: str, inputs: Inputs, **options: Any) -> AttentionFn:
        """Return one of the library's functions, of q, k and v alone."""
        function = getattr(self.source.load(), name)
        options = {**self.options(inputs), **options}
        return lambda q, k, v: without_lse(function(q, k, v, **options))

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


def without_lse(returned: Any) -> Any:
    """Return out: some builds return (out, lse), others out alone. Never index what may be the tensor itself."""
    return returned[0] if isinstance(returned, tuple) else returned


def refused_by_compiler(error: Exception) -> str | None:
    """Return the words of flash-attn 4's compiler, which finds no layout for some head sizes; None for other errors."""
    words = " ".join(str(error).split())[:160]
    return f"its compiler: {words}" if type(error).__name__ == "MLIRError" else None


@cache
def refused_by_build(head_dim: int, dtype: str, device: str) -> str | None:
    """Ask with one token whether this flash-attn 2 has kernels for a head dimension: builds for a few of them are common."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    one = torch.zeros(1, 1, 1, head_dim, dtype=getattr(torch, dtype), device=device)
    return refusal_of_trial(lambda: FLASH2.load().flash_attn_func(one, one, one))


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
        reason = refused_by_build(workload.head_dim, workload.dtype, machine.device)
        return [reason] if reason else []

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
        reason = refused_by_build(workload.head_dim, workload.dtype, machine.device)
        return not_decoding_because(workload) or ([reason] if reason else [])

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Fill the cache with the prompt, all keys before the first query's own."""
        function, options, w = self.source.load().flash_attn_with_kvcache, self.options(inputs), inputs.workload
        prompt = w.kv_len - w.q_len

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if w.cached:  # it appends the new keys at the end of the prefix
                s = split_cache(inputs, k, v, "bshd")
                new = {"cache_seqlens": s.cache_seqlens, **options}
                return without_lse(function(q, s.k_cache, s.v_cache, s.k_new, s.v_new, **new))
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


_INSTALL = "build it from the folder hopper of Dao-AILab/flash-attention"
_GENERATIONS = (
    Library(("flash-attn-3",), "flash_attn_3.flash_attn_interface", _INSTALL),
    Library(("flash-attn-3",), "flash_attn_interface", _INSTALL),
)
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
        return next((library for library in _GENERATIONS if library.missing_because() is None), _GENERATIONS[-1])

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
        reason = _refused_by_build(_smallest_like(workload), machine.device, backward)
        return [reason] if reason else []


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
def _refused_by_build(trial: Workload, device: str, backward: bool) -> str | None:
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
            return words
        raise
    return None


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
        w, family, dims = workload, _family_of(machine), f"head_dim {workload.head_dim}, v_head_dim {workload.v_head_dim}"
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


def _family_of(machine: Machine) -> int:
    """Return an architecture family: 8 for sm80 to sm89."""
    return machine.capability[0] if machine.capability else 9


def refused_head_dims(w: Workload, machine: Machine, backward: bool) -> list[str]:
    """Say for which head dimensions flash-attn 4 has no kernel there."""
    family, pair, dims = _family_of(machine), (w.head_dim, w.v_head_dim), f"head_dim {w.head_dim}, v_head_dim {w.v_head_dim}"
    differ_on_hopper = backward and family == 9 and w.head_dim != w.v_head_dim
    is_beyond = family in (10, 11) and max(pair) > 128 and pair not in ((192, 128), (256, 256))
    no_kernel = f"has no backward kernel on sm90 for v_head_dim {w.v_head_dim}, not a multiple of 32"
    return refusals_of(
        {
            f"takes up to 128, 192 with 128, or 256 on sm{family}0, not {dims}": is_beyond,
            f"GQA backward needs equal dims, not {dims}": differ_on_hopper and w.group > 1,
            no_kernel: differ_on_hopper and w.v_head_dim % 32,
        }
    )


# -- calls of a model --------------------------------------------------------------------------------------------------------


_KNOWN = {"q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"}
_ASKS_MORE = ("return_attn_probs", "return_lse", "return_softmax_lse")
_OF_LENGTHS = {*BOUNDARIES, "min_seqlen_k"}
_OF_CACHE = {"k_cache", "v_cache", "keys", "values", "cache_seqlens", "cache_batch_idx", "block_table", "page_table"}
_TUNING = ("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "rotary_interleaved")
_WITHOUT_EFFECT = frozenset((*_TUNING, "seqlen_k_per_split", "disable_scheduler_metadata", "gather_bwd_token_chunk"))


def _read(
    given: Mapping[str, Any], is_varlen: bool = False, known: frozenset[str] = frozenset(), **read: Any
) -> AttentionArguments:
    """Read the options that all of them have. known: names of what is read elsewhere, whose values are in `read`."""
    given = {name: value for name, value in given.items() if (name, value) != ("attention_chunk", 0)}
    refuse_unread(given, {*_KNOWN, *_ASKS_MORE, *known, *(_OF_LENGTHS if is_varlen else ())}, _WITHOUT_EFFECT)
    to_native = unchanged if is_varlen else swap_rows_and_heads
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.dim() != 1:
        raise UnreadableError("alibi_slopes per batch entry are not read; one slope per head is")
    tensors = {name: to_native(given[name]) for name in ("q", "k", "v") if name not in read}
    options: dict[str, Any] = {
        "mask": mask_of_window(given.get("causal"), given.get("window_size")),
        "scale": given.get("softmax_scale"),
        "softcap": given.get("softcap") or None,
        "alibi_slopes": slopes,
        "dropout": float(given.get("dropout_p") or 0.0),
        "cu_seqlens": given["cu_seqlens_q"] if is_varlen else None,
        "cu_seqlens_kv": given["cu_seqlens_k"] if is_varlen else None,
        "to_native": to_native,
        "take_out": first_of,
        "out_to_native": to_native,
        "to_result": to_native,
        "asks_more": next((name.removeprefix("return_") for name in _ASKS_MORE if given.get(name)), ""),
    }
    return AttentionArguments(**{**options, **tensors, **read})


def _read_flash4(given: Mapping[str, Any], is_varlen: bool = False) -> AttentionArguments:
    """Read flash-attention 4, which returns lse as well, or None in its place."""
    to_native = unchanged if is_varlen else swap_rows_and_heads

    more = {"sinks": given.get("learnable_sink"), "to_result": lambda out: (to_native(out), None)}
    return _read(given, is_varlen, frozenset(("learnable_sink",)), **more)


# -- packed tensors ------------------------------------------------------------------------------------------------------


def _unpack(packed: str, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with q, k and v, or k and v, as views of the tensor that packs them, (..., 2 or 3, heads, dim)."""
    rest = {name: value for name, value in given.items() if name != packed}
    tensor = given.get(packed)
    if tensor is None or tensor.shape[-3] != len(names):
        raise UnreadableError(f"its argument {packed} is not (..., {len(names)}, heads, dim)")
    rest |= dict(zip(names, tensor.unbind(-3), strict=True))
    if packed == "qkv" and "cu_seqlens" in rest:
        ends, longest = rest.pop("cu_seqlens"), rest.pop("max_seqlen", None)
        rest |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return rest


def _pack(packed: str, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the function takes them."""
    rest = {name: value for name, value in given.items() if name not in names}
    if packed == "qkv" and "cu_seqlens_q" in rest:
        rest |= {"cu_seqlens": rest.pop("cu_seqlens_q"), "max_seqlen": rest.pop("max_seqlen_q")}
        del rest["cu_seqlens_k"], rest["max_seqlen_k"]
    return {packed: torch.stack([given[name] for name in names], -3), **rest}


# -- a cache -------------------------------------------------------------------------------------------------------------


class _Cache:
    """The cache of one call: how many keys each sequence has in it, and what the call appends."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._new = given.get("k"), given.get("v")
        self._pages = given.get("block_table") if given.get("page_table") is None else given.get("page_table")
        count = given.get("cache_seqlens")
        batch = given["q"].shape[0]
        if count is None:
            count = self._rows(given["k_cache"]).shape[1]
        self.before = [int(count)] * batch if isinstance(count, int) else [int(n) for n in count.tolist()]
        appended = 0 if self._new[0] is None else self._new[0].shape[1]
        self.lengths = tuple(n + appended for n in self.before)

    def _rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the keys of each sequence, (batch, rows, heads, dim): from its pages, or from its entry of the cache."""
        if self._pages is not None:
            return cache[self._pages.long()].flatten(1, 2)
        index = self._given.get("cache_batch_idx")
        return cache[: self._given["q"].shape[0]] if index is None else cache[index.long()]

    def complete(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values that the call sees, those included that it appends."""
        caches = self._given["k_cache"], self._given["v_cache"]
        found = [self._rows(cache)[:, : max(self.lengths)].clone() for cache in caches]
        for rows, new in zip(found, self._new, strict=True):
            for b, (start, end) in enumerate(zip(self.before, self.lengths, strict=True)):
                if new is not None:
                    rows[b, start:end] = new[b]
        return found[0], found[1]

    def append(self) -> None:
        """Write the new keys and values where the function would have written them."""
        for whole, new in zip((self._given["k_cache"], self._given["v_cache"]), self._new, strict=True):
            if new is None:
                continue
            for b, (start, end) in enumerate(zip(self.before, self.lengths, strict=True)):
                self._write(whole, b, range(start, end), new[b])

    def _write(self, cache: torch.Tensor, b: int, places: range, rows: torch.Tensor) -> None:
        index = self._given.get("cache_batch_idx")
        for place, row in zip(places, rows, strict=True):
            if self._pages is None:
                cache[b if index is None else int(index[b]), place] = row
            else:
                cache[int(self._pages[b, place // cache.shape[1]]), place % cache.shape[1]] = row


def _read_cache(given: Mapping[str, Any]) -> AttentionArguments:
    """Read a call through a cache: its keys are those in the cache and those that it appends, which a replacement writes."""
    cache = _Cache(given)
    lengths = None if len(set(cache.lengths)) == 1 else cache.lengths

    def to_result(out: torch.Tensor) -> Any:
        cache.append()
        return swap_rows_and_heads(out)

    keys, values = swap_rows_and_heads(given["keys"]), swap_rows_and_heads(given["values"])
    return _read(given, known=frozenset(_OF_CACHE), k=keys, v=values, kv_lens=lengths, to_result=to_result)


# -- what there is -------------------------------------------------------------------------------------------------------

_QKV, _KV = ("q", "k", "v"), ("k", "v")
_USED = ("seqused_q", "seqused_k")
_OPTIONS = (
    *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"),
    "return_attn_probs",
)
_DESCALES = ("q_descale", "k_descale", "v_descale")
_OPTIONS_3 = ("softmax_scale", "causal", "qv", *_DESCALES, "window_size", "attention_chunk", "softcap")
_PACKED_3 = ("softmax_scale", "causal", *_DESCALES, "window_size", "attention_chunk", "softcap")
_CACHE = ("q", "k_cache", "v_cache", "k", "v")
_ROTARY = ("rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad")
_OPTIONS_OF_CACHE = ("softmax_scale", "causal", "window_size")
_FLASH4 = ("softmax_scale", "causal", "window_size", "learnable_sink", "softcap", "num_splits", "pack_gqa", "deterministic")
_VARLEN4 = (*("q", "k", "v", "qv"), *BOUNDARIES, "min_seqlen_k", *_USED, "gather_kv_indices", "page_table", *_FLASH4)


def _packed(module: str, name: str, parameters: tuple[str, ...], profile: str) -> AttentionFunction:
    """Return a function that takes qkv, or q and kv, in one tensor."""
    tensor, names = ("qkv", _QKV) if "qkv" in parameters else ("kv", _KV)
    read = partial(_read, is_varlen="varlen" in name)
    return AttentionFunction(
        module, name, parameters, read, profile, unpack=partial(_unpack, tensor, names), pack=partial(_pack, tensor, names)
    )


def _cached(module: str, parameters: tuple[str, ...], profile: str) -> AttentionFunction:
    tensors, name = ("q", "keys", "values"), "flash_attn_with_kvcache"

    def unpack(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, **dict(zip(tensors[1:], _Cache(given).complete(), strict=True))}

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in tensors[1:]}

    return AttentionFunction(module, name, parameters, _read_cache, profile, tensors, unpack=unpack, pack=pack)


_VARLEN = partial(_read, is_varlen=True)
#: of each generation of flash-attn 3
_FUNCTIONS_3 = [
    one
    for module in (generation.module for generation in _GENERATIONS)
    for one in (
        AttentionFunction(module, "flash_attn_func", (*_QKV, *_OPTIONS_3), _read, "flash3"),
        AttentionFunction(module, "flash_attn_varlen_func", (*_QKV, *BOUNDARIES, *_USED, *_OPTIONS_3), _VARLEN, "flash3"),
        _packed(module, "flash_attn_qkvpacked_func", ("qkv", *_PACKED_3), "flash3"),
        _cached(module, (*_CACHE, "qv", *_ROTARY, "page_table"), "flash3"),
    )
]
FUNCTIONS = (
    AttentionFunction("flash_attn", "flash_attn_func", (*_QKV, *_OPTIONS), _read, "flash2"),
    AttentionFunction(
        "flash_attn", "flash_attn_varlen_func", (*_QKV, *BOUNDARIES, *_OPTIONS, "block_table"), _VARLEN, "flash2"
    ),
    _packed("flash_attn", "flash_attn_qkvpacked_func", ("qkv", *_OPTIONS), "flash2"),
    _packed("flash_attn", "flash_attn_kvpacked_func", ("q", "kv", *_OPTIONS), "flash2"),
    _packed("flash_attn", "flash_attn_varlen_qkvpacked_func", ("qkv", "cu_seqlens", "max_seqlen", *_OPTIONS), "flash2"),
    _packed("flash_attn", "flash_attn_varlen_kvpacked_func", ("q", "kv", *BOUNDARIES, *_OPTIONS), "flash2"),
    _cached("flash_attn", (*_CACHE, *_ROTARY, "block_table", *_OPTIONS_OF_CACHE, "softcap"), "flash2"),
    *_FUNCTIONS_3,
    AttentionFunction(
        "flash_attn.cute", "flash_attn_func", (*_QKV, "qv", "gather_kv_indices", *_FLASH4), _read_flash4, "flash4"
    ),
    AttentionFunction("flash_attn.cute", "flash_attn_varlen_func", _VARLEN4, partial(_read_flash4, is_varlen=True), "flash4"),
)
