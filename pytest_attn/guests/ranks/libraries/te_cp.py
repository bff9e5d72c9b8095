"""Transformer Engine over ranks: its DotProductAttention in a context parallel group."""

from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import KnownDefect, is_half_tile
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.transformer_engine import (
    TRANSFORMER_ENGINE,
    call_options,
    goes_in_sequence,
    half_open_window_refused,
    listening,
    module_of,
    selected,
)
from pytest_attn.guests.ranks.over_ranks import CUDNN_NAN_OF_A_RANK, Place, RankBackend, has_half_tile, heads_refusals
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.traits import traits_of

#: its kernels by the words of the option `kernel`: their names in its log, and how they round
_KERNELS = {"fused": ("FusedAttention", "cudnn"), "flash": ("FlashAttention", "flash2")}


class TeCp(RankBackend):
    """DotProductAttention with chunks r and 2n-1-r on each rank, whatever the mask.

    comm: the library's cp_comm_type. kernel: cuDNN's ("fused") or flash-attn's.
    """

    name = "te_cp"
    source = TRANSFORMER_ENGINE
    shards = ("head-tail",)
    needs = "CUDA, sm80 to sm121, ranks"
    choices = MappingProxyType({"comm": ("p2p", "all_gather", "a2a"), "kernel": tuple(_KERNELS)})
    known_defects = (CUDNN_NAN_OF_A_RANK,)
    capabilities = Capabilities(
        masks=frozenset(("causal", "causal-bottom-right", "window")),
        features=frozenset(("scale", "grouped heads", "packed", "backward")),
        square=True,
    )

    @property
    def _comm(self) -> str:
        return str(self.configuration.get("comm", "p2p"))

    @property
    def _kernel(self) -> tuple[str, str]:
        return _KERNELS[str(self.configuration.get("kernel", "fused"))]

    def precision_on(self, kind: str) -> str | Precision:
        return self._kernel[1]

    def defects_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[KnownDefect]:
        """Those of cuDNN's kernel, where what it gets of the split shows them: comm=a2a gives it whole sequences."""
        is_half = is_half_tile(sharding.workload.q_len) if self._comm == "a2a" else has_half_tile(sharding)
        return super().defects_over(sharding, machine, backward) if self._kernel[1] == "cudnn" and is_half else []

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        w = sharding.workload
        reasons = half_open_window_refused(w)
        if "window" in traits_of(w) and self._comm == "p2p":
            reasons.append("has sliding windows with comm=all_gather and comm=a2a only")
        if w.is_packed and self._comm == "all_gather":
            reasons.append("has packed sequences with comm=p2p and comm=a2a only")
        if w.is_packed and w.q_lens != w.kv_lens:
            reasons.append("takes packed keys as long as the queries only")
        return reasons + (heads_refusals(w, sharding.ranks) if self._comm == "a2a" else [])

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        te, w = self.source.load(), sharding.workload
        module, in_sequence = module_of(te, inputs, backward), goes_in_sequence(w)
        options = call_options(inputs, in_sequence)
        if in_sequence:
            options |= {f"cu_seqlens_{name}_padded": options[f"cu_seqlens_{name}"] for name in ("q", "kv")}
        module.set_context_parallel_group(place.group, list(range(place.ranks)), _stream(place.device), self._comm)
        remembered: dict[str, Any] = {}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with selected(te, self._kernel[0], remembered), listening(te, []):
                out: torch.Tensor = module(*(t.contiguous() for t in (q, k, v)), **options)
            return out.view(*out.shape[:-1], w.heads, w.v_head_dim) if out.dim() < q.dim() else out

        return call if in_sequence else in_bshd(call)


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream on which the library communicates, one for all its modules; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
