"""flash-attn 2: dense, packed (varlen) and paged sequences, and decoding with a growing cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import Options
from pytest_attn.backends.flash_attention import FLASH2, FlashAttention, refused_by_build, without_lse
from pytest_attn.backends.layouts import in_bshd, not_decoding_because
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.cached import split_cache
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

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
        masks=frozenset(("bottom-right", "window", "documents")),
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
        """Add ALiBi's slopes."""
        return {**super().options(inputs), "alibi_slopes": inputs.alibi_slopes}


class Flash2KvCache(Flash2):
    """flash_attn_with_kvcache as a language model generates: each call appends one token and attends with one query.

    Where the workload says what is cached, one call appends all new keys to a cache that holds the others.
    """

    name = "flash2_kvcache"
    variants = ()
    capabilities = Capabilities(masks=frozenset(("bottom-right", "window")), features=_SCORE | {"cached"})

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Into how many parts the keys are split; by default the library's heuristic decides."""
        return _SPLITS

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse all that does not happen in decoding."""
        reason = refused_by_build(workload.head_dim, workload.dtype, machine.device)
        return not_decoding_because(workload) or ([reason] if reason else [])

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Fill the cache with the prompt, all keys before the first query's own."""
        import torch

        function, options, w = self.source.load().flash_attn_with_kvcache, self.options(inputs), inputs.workload
        prompt = w.kv_len - w.q_len
        if w.cached:
            return in_bshd(partial(_append, inputs, function, options))

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache_k, cache_v = torch.zeros_like(k), torch.zeros_like(v)
            cache_k[:, :prompt], cache_v[:, :prompt] = k[:, :prompt], v[:, :prompt]
            rows = []
            for step in range(w.q_len):
                now = slice(prompt + step, prompt + step + 1)
                query = q[:, step : step + 1]
                rows.append(function(query, cache_k, cache_v, k[:, now], v[:, now], cache_seqlens=now.start, **options))
            return torch.cat(rows, 1)

        return in_bshd(call)


def _append(inputs: Inputs, function: Any, options: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Have the library append the new keys, at the end of the prefix, and attend; tensors are (batch, rows, heads, dim)."""
    split = split_cache(inputs, k, v, "bshd")
    out = function(q, split.k_cache, split.v_cache, split.k_new, split.v_new, cache_seqlens=split.cache_seqlens, **options)
    return without_lse(out)
