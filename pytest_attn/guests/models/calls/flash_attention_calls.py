"""Calls of flash-attn that a model makes, read back."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pytest_attn.backends.library import FLASH3
from pytest_attn.guests.libraries.flash_attention import BOUNDARIES, mask_of_window
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    refuse_unread,
    swap_rows_and_heads,
    unchanged,
)

#: what `read_flash` reads
OPTIONS = {"q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"}
_ASKS_MORE = ("return_attn_probs", "return_lse", "return_softmax_lse")
_OF_LENGTHS = {*BOUNDARIES, "min_seqlen_k"}
_OF_CACHE = {"k_cache", "v_cache", "keys", "values", "cache_seqlens", "cache_batch_idx", "block_table", "page_table"}
_TUNING = ("deterministic", "num_splits", "fa_version", "pack_gqa", "sm_margin", "scheduler_metadata", "rotary_interleaved")
_WITHOUT_EFFECT = frozenset((*_TUNING, "seqlen_k_per_split", "disable_scheduler_metadata", "gather_bwd_token_chunk"))


def read_flash(
    given: Mapping[str, Any],
    is_varlen: bool = False,
    known: frozenset[str] = frozenset(),
    names: Sequence[str] = ("q", "k", "v"),
    **read: Any,
) -> AttentionArguments:
    """Read the options that all of them have. known: what is read elsewhere, into `read`. names: those of q, k and v."""
    given = {name: value for name, value in given.items() if (name, value) != ("attention_chunk", 0)}
    refuse_unread(given, {*OPTIONS, *_ASKS_MORE, *known, *(_OF_LENGTHS if is_varlen else ())}, _WITHOUT_EFFECT)
    to_native = unchanged if is_varlen else swap_rows_and_heads
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.dim() != 1:
        raise UnreadableError("alibi_slopes per batch entry are not read; one slope per head is")
    options: dict[str, Any] = {
        "mask": mask_of_window(given.get("causal"), given.get("window_size")),
        "scale": given.get("softmax_scale"),
        "softcap": given.get("softcap") or None,
        "alibi_slopes": slopes,
        "dropout": float(given.get("dropout_p") or 0.0),
        "cu_seqlens": given["cu_seqlens_q"] if is_varlen else None,
        "cu_seqlens_kv": given["cu_seqlens_k"] if is_varlen else None,
        "asks_more": next((name.removeprefix("return_") for name in _ASKS_MORE if given.get(name)), ""),
    }
    return AttentionArguments.in_layout(to_native, given, names, **{**options, **read})


def _read_flash4(given: Mapping[str, Any], is_varlen: bool = False) -> AttentionArguments:
    """Read flash-attention 4, which returns lse as well, or None in its place."""
    to_native = unchanged if is_varlen else swap_rows_and_heads

    more: dict[str, Any] = {"sinks": given.get("learnable_sink"), "to_result": lambda out: (to_native(out), None)}
    return read_flash(given, is_varlen, frozenset(("learnable_sink",)), **more)


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
    rest = {name: value for name, value in given.items() if name not in names}
    if packed == "qkv" and "cu_seqlens_q" in rest:
        rest |= {"cu_seqlens": rest.pop("cu_seqlens_q"), "max_seqlen": rest.pop("max_seqlen_q")}
        del rest["cu_seqlens_k"], rest["max_seqlen_k"]
    return {packed: torch.stack([given[name] for name in names], -3), **rest}


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
        index = self._given.get("cache_batch_idx")
        for whole, new in zip((self._given["k_cache"], self._given["v_cache"]), self._new, strict=True):
            if new is None:
                continue
            for b, (start, end) in enumerate(zip(self.before, self.lengths, strict=True)):
                if self._pages is None:
                    whole[b if index is None else int(index[b]), start:end] = new[b]
                else:
                    at = torch.arange(start, end, device=whole.device)
                    whole[self._pages[b, at // whole.shape[1]].long(), at % whole.shape[1]] = new[b]


def _read_cache(given: Mapping[str, Any]) -> AttentionArguments:
    """Read a call through a cache: its keys are those in the cache and those that it appends, which a replacement writes."""
    cache = _Cache(given)
    lengths = None if len(set(cache.lengths)) == 1 else cache.lengths

    def to_result(out: torch.Tensor) -> Any:
        cache.append()
        return swap_rows_and_heads(out)

    return read_flash(given, known=frozenset(_OF_CACHE), names=("q", "keys", "values"), kv_lens=lengths, to_result=to_result)


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
    read = partial(read_flash, is_varlen="varlen" in name)
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


_VARLEN = partial(read_flash, is_varlen=True)
#: of each generation of flash-attn 3
_FUNCTIONS_3 = [
    one
    for module in (generation.module for generation in FLASH3)
    for one in (
        AttentionFunction(module, "flash_attn_func", (*_QKV, *_OPTIONS_3), read_flash, "flash3"),
        AttentionFunction(module, "flash_attn_varlen_func", (*_QKV, *BOUNDARIES, *_USED, *_OPTIONS_3), _VARLEN, "flash3"),
        _packed(module, "flash_attn_qkvpacked_func", ("qkv", *_PACKED_3), "flash3"),
        _cached(module, (*_CACHE, "qv", *_ROTARY, "page_table"), "flash3"),
    )
]
FUNCTIONS = (
    AttentionFunction("flash_attn", "flash_attn_func", (*_QKV, *_OPTIONS), read_flash, "flash2"),
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
