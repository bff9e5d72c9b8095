"""The entry points of flash-attention 2 to 4: of separate tensors, of packed ones, of sequences end to end, and of a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_attn.models.asked import Asked, UnreadableError
from pytest_attn.models.entry_points import EntryPoint, refuse_unread
from pytest_attn.workloads.masks import Causal, Mask, Window

if TYPE_CHECKING:
    import torch

_KNOWN = {"q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"}
_ASKS_MORE = ("return_attn_probs", "return_lse", "return_softmax_lse")
_OF_LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k"}
_OF_CACHE = {"k_cache", "v_cache", "keys", "values", "cache_seqlens", "cache_batch_idx", "block_table", "page_table"}
_TUNING = ("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "rotary_interleaved")
_WITHOUT_EFFECT = frozenset((*_TUNING, "seqlen_k_per_split", "disable_scheduler_metadata", "gather_bwd_token_chunk"))


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, rows, heads, dim) to (batch, heads, rows, dim), and back."""
    return tensor.transpose(1, 2)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose layout is that of q already."""
    return tensor


def first(result: Any) -> torch.Tensor:
    """Return out of what a function returns: alone, or before others."""
    out: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
    return out


def alone(out: torch.Tensor, asks_more: object, back: Callable[[torch.Tensor], Any]) -> Any:
    """Return out in the function's layout. Raises UnreadableError where the model asks for more than it."""
    if asks_more:
        raise UnreadableError("the model asks for more than out, which a replacement does not return")
    return back(out)


def bottom_right(causal: object, window: object) -> Mask | None:
    """Return the mask of flash-attention's two arguments: causal from the bottom right, -1 or None for an open side."""
    left, right = (None if side is None or side < 0 else int(side) for side in (window or (-1, -1)))  # type: ignore[attr-defined]
    if causal:
        return Causal(bottom_right=True) if left is None else Window(left, 0)
    return None if left is None and right is None else Window(left, right)


def _read(given: Mapping[str, Any], is_varlen: bool = False, known: frozenset[str] = frozenset(), **asked: Any) -> Asked:
    """Read the options that all of them have. known: what else is read, and given in `asked`."""
    given = {name: value for name, value in given.items() if (name, value) != ("attention_chunk", 0)}
    refuse_unread(given, {*_KNOWN, *_ASKS_MORE, *known, *(_OF_LENGTHS if is_varlen else ())}, _WITHOUT_EFFECT)
    fold = itself if is_varlen else swapped
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.dim() != 1:
        raise UnreadableError("alibi_slopes per batch entry are not read; one slope per head is")
    asks_more = any(given.get(name) for name in _ASKS_MORE)
    tensors = {name: fold(given[name]) for name in ("q", "k", "v") if name not in asked}
    options: dict[str, Any] = {
        "mask": bottom_right(given.get("causal"), given.get("window_size")),
        "scale": given.get("softmax_scale"),
        "softcap": given.get("softcap") or None,
        "alibi_slopes": slopes,
        "dropout": float(given.get("dropout_p") or 0.0),
        "cu_seqlens": given["cu_seqlens_q"] if is_varlen else None,
        "cu_seqlens_kv": given["cu_seqlens_k"] if is_varlen else None,
        "fold": fold,
        "out_of": first,
        "fold_out": fold,
        "result_of": lambda out: alone(out, asks_more, fold),
    }
    return Asked(**{**options, **tensors, **asked})


def _read_flash4(given: Mapping[str, Any], is_varlen: bool = False) -> Asked:
    """Read flash-attention 4, which returns lse as well, or None in its place."""
    fold = itself if is_varlen else swapped

    def result_of(out: torch.Tensor) -> Any:
        return alone(out, given.get("return_lse"), lambda out: (fold(out), None))

    return _read(given, is_varlen, frozenset(("learnable_sink",)), sinks=given.get("learnable_sink"), result_of=result_of)


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
    import torch

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
        for cache, new in zip((self._given["k_cache"], self._given["v_cache"]), self._new, strict=True):
            if new is None:
                continue
            for b, (start, end) in enumerate(zip(self.before, self.lengths, strict=True)):
                self._write(cache, b, range(start, end), new[b])

    def _write(self, cache: torch.Tensor, b: int, places: range, rows: torch.Tensor) -> None:
        index = self._given.get("cache_batch_idx")
        for place, row in zip(places, rows, strict=True):
            if self._pages is None:
                cache[b if index is None else int(index[b]), place] = row
            else:
                cache[int(self._pages[b, place // cache.shape[1]]), place % cache.shape[1]] = row


def _unpack_cache(given: dict[str, Any]) -> dict[str, Any]:
    keys, values = _Cache(given).complete()
    return {**given, "keys": keys, "values": values}


def _pack_cache(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in ("keys", "values")}


def _read_cache(given: Mapping[str, Any]) -> Asked:
    """Read a call through a cache: its keys are those in the cache and those that it appends, which a replacement writes."""
    cache = _Cache(given)
    lengths = None if len(set(cache.lengths)) == 1 else cache.lengths
    asks_more = given.get("return_softmax_lse")

    def result_of(out: torch.Tensor) -> Any:
        result = alone(out, asks_more, swapped)
        cache.append()
        return result

    keys, values = swapped(given["keys"]), swapped(given["values"])
    return _read(given, known=frozenset(_OF_CACHE), k=keys, v=values, kv_lens=lengths, result_of=result_of)


# -- what there is -------------------------------------------------------------------------------------------------------

_QKV, _KV = ("q", "k", "v"), ("k", "v")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
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
_VARLEN4 = (*("q", "k", "v", "qv"), *_LENGTHS, "min_seqlen_k", *_USED, "gather_kv_indices", "page_table", *_FLASH4)


def _packed(module: str, name: str, parameters: tuple[str, ...], profile: str) -> EntryPoint:
    """Return an entry point that takes qkv, or q and kv, in one tensor."""
    tensor, names = ("qkv", _QKV) if "qkv" in parameters else ("kv", _KV)
    read = partial(_read, is_varlen="varlen" in name)
    return EntryPoint(
        module, name, parameters, read, profile, unpack=partial(_unpack, tensor, names), pack=partial(_pack, tensor, names)
    )


def _cached(module: str, parameters: tuple[str, ...], profile: str) -> EntryPoint:
    tensors, name = ("q", "keys", "values"), "flash_attn_with_kvcache"
    return EntryPoint(module, name, parameters, _read_cache, profile, tensors, unpack=_unpack_cache, pack=_pack_cache)


_VARLEN = partial(_read, is_varlen=True)
FLASH_ATTENTION = (
    EntryPoint("flash_attn", "flash_attn_func", (*_QKV, *_OPTIONS), _read, "flash2"),
    EntryPoint("flash_attn", "flash_attn_varlen_func", (*_QKV, *_LENGTHS, *_OPTIONS, "block_table"), _VARLEN, "flash2"),
    _packed("flash_attn", "flash_attn_qkvpacked_func", ("qkv", *_OPTIONS), "flash2"),
    _packed("flash_attn", "flash_attn_kvpacked_func", ("q", "kv", *_OPTIONS), "flash2"),
    _packed("flash_attn", "flash_attn_varlen_qkvpacked_func", ("qkv", "cu_seqlens", "max_seqlen", *_OPTIONS), "flash2"),
    _packed("flash_attn", "flash_attn_varlen_kvpacked_func", ("q", "kv", *_LENGTHS, *_OPTIONS), "flash2"),
    _cached("flash_attn", (*_CACHE, *_ROTARY, "block_table", *_OPTIONS_OF_CACHE, "softcap"), "flash2"),
    EntryPoint("flash_attn_interface", "flash_attn_func", (*_QKV, *_OPTIONS_3), _read, "flash3"),
    EntryPoint("flash_attn_interface", "flash_attn_varlen_func", (*_QKV, *_LENGTHS, *_USED, *_OPTIONS_3), _VARLEN, "flash3"),
    _packed("flash_attn_interface", "flash_attn_qkvpacked_func", ("qkv", *_PACKED_3), "flash3"),
    _cached("flash_attn_interface", (*_CACHE, "qv", *_ROTARY, "page_table"), "flash3"),
    EntryPoint("flash_attn.cute", "flash_attn_func", (*_QKV, "qv", "gather_kv_indices", *_FLASH4), _read_flash4, "flash4"),
    EntryPoint("flash_attn.cute", "flash_attn_varlen_func", _VARLEN4, partial(_read_flash4, is_varlen=True), "flash4"),
)
