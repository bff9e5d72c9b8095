"""Decoding with a growing key-value cache: one SDPA call per new token, as a language model generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.dense import boolean_mask
from pytest_attn.backends.layouts import not_decoding_because
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.cached import split_cache
from pytest_attn.workloads.heads import is_interleaved
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Window
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class KvCache(Backend):
    """Appends key and value of one token, attends with one query, q_len times; equals one prefill with a causal mask."""

    name = "kv_cache"
    precision = "sdpa"
    needs = "CPU, CUDA or XPU"
    capabilities = Capabilities(
        masks=frozenset(("bottom-right", "window")),
        features=frozenset(("scale", "grouped heads", "cached")),
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        head_dim_step=1,
        v_head_dim=True,
    )

    def precision_on(self, kind: str) -> str:
        """SDPA's own profile."""
        return "torch_cpu" if kind == "cpu" else self.precision

    def unavailable_because(self, machine: Machine) -> str | None:
        """Wherever SDPA is tested."""
        return "is tested on CPU, CUDA and XPU only" if machine.kind == "mps" else None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse all that does not happen in decoding."""
        w = workload
        reasons = ["decoding has no backward pass"] if backward else []
        reasons += not_decoding_because(w)
        if w.is_packed or w.kv_lens or w.softcap or w.alibi or w.sinks or w.bias or w.score_mod:
            reasons.append("has no packed or padded sequences and no changes of the score")
        if is_interleaved(w):
            reasons.append("does not support interleaved head groups (h % kv_heads)")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Fill the cache with the prompt, all keys before the first query's own."""
        import torch
        import torch.nn.functional as F

        w = inputs.workload
        visible = boolean_mask(inputs) if isinstance(w.mask, Window) else None
        prompt = w.kv_len - w.q_len

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if w.cached:
                split = split_cache(inputs, k, v)
                cache_k, cache_v = split.k_cache, split.v_cache
            else:
                cache_k, cache_v = torch.zeros_like(k), torch.zeros_like(v)
                cache_k[:, :, :prompt], cache_v[:, :, :prompt] = k[:, :, :prompt], v[:, :, :prompt]
            rows = []
            for step in range(w.q_len):
                now = prompt + step
                cache_k[:, :, now], cache_v[:, :, now] = k[:, :, now], v[:, :, now]
                mask = None if visible is None else visible[:, :, step : step + 1, : now + 1]
                rows.append(
                    F.scaled_dot_product_attention(
                        q[:, :, step : step + 1],
                        cache_k[:, :, : now + 1],
                        cache_v[:, :, : now + 1],
                        attn_mask=mask,
                        scale=w.scale,
                        enable_gqa=w.group > 1,
                    )
                )
            return torch.cat(rows, 2)

        return call
