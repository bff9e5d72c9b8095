"""Transformer Engine's DotProductAttention over ranks, after set_context_parallel_group."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.over_ranks import Place, RankBackend, heads_refusals
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.backends.transformer_engine import (
    TRANSFORMER_ENGINE,
    call_options,
    goes_in_sequence,
    half_open_window_refused,
    listening,
    module_of,
    selected,
)
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Window
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch

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
    capabilities = Capabilities(
        masks=frozenset(("top-left", "bottom-right", "window")),
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
        """The kernel's."""
        return self._kernel[1]

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        """Refuse what the library's cp_comm_type does not know."""
        w = sharding.workload
        reasons = half_open_window_refused(w)
        if isinstance(w.mask, Window) and self._comm == "p2p":
            reasons.append("has sliding windows with comm=all_gather and comm=a2a only")
        if w.is_packed and self._comm == "all_gather":
            reasons.append("has packed sequences with comm=p2p and comm=a2a only")
        if w.is_packed and w.q_lens != w.kv_lens:
            reasons.append("takes packed keys as long as the queries only")
        return reasons + (heads_refusals(w, sharding.ranks) if self._comm == "a2a" else [])

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        """Make the module, name the group, and close over the options of the whole workload."""
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
    import torch

    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
