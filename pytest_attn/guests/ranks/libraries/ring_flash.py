"""ring-flash-attn: flash-attn 2 in a ring, in a balanced ring (zigzag), and after an all-gather of keys (llama3)."""

from typing import Any

import torch

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.flash_attention import refused_by_build
from pytest_attn.guests.ranks.over_ranks import Place, RankBackend
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

_CAUSAL = frozenset(("causal", "causal-bottom-right"))
_FEATURES = frozenset(("scale", "grouped heads", "backward"))
#: relative L2 of a float16 dq that was rounded to bfloat16: 0.0036 was seen
_BFLOAT16_L2 = 0.006
#: its z of an element: 16.5 was seen, and 5.7 of a row
_BFLOAT16_Z = 24.0
BFLOAT16_DQ = KnownDefect(
    issue="seen in the source of ring-flash-attn 0.1.8 and yunchang 0.6.4, no report found",
    summary="the plain ring rounds dq to bfloat16, whatever the dtype",
    applies=lambda workload, machine: workload.dtype == "float16",
    tensors=("dq",),
    shows=lambda comparison, workload: (
        comparison.relative_l2 < _BFLOAT16_L2 and comparison.z_element < _BFLOAT16_Z and comparison.z_row < _BFLOAT16_Z / 3
    ),
)


class OverFlash2(RankBackend):
    """A library around flash-attn 2, which computes each rank's part."""

    precision = "flash2"
    needs = "CUDA, sm80 to sm121, flash-attn 2, ranks"

    def refusals_over(self, sharding: Sharding, machine: Machine, backward: bool = False) -> list[str]:
        reasons = super().refusals_over(sharding, machine, backward)
        w = sharding.workload
        return reasons or [*refused_by_build(w.head_dim, w.dtype, machine.device)]


class _RingFlash(OverFlash2):
    """A function of (batch, rows, heads, dim), and one of packed sequences, of which each rank holds a part."""

    source = Library(("ring-flash-attn", "ring_flash_attn"), "ring_flash_attn", "pip install ring-flash-attn")
    capabilities = Capabilities(masks=_CAUSAL, features=_FEATURES | {"packed"}, square=True)
    #: its functions of dense tensors and of packed sequences
    functions: tuple[str, str]

    def broken_because(self) -> str | None:
        """Import the library, which imports of transformers what its fifth release has no more."""
        reason = super().broken_because()
        return (
            f"{reason}; pip install 'transformers<5'" if reason and "is_flash_attn_greater_or_equal_2_10" in reason else reason
        )

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        """Refuse packed keys of other lengths than the queries: one cu_seqlens stands for both."""
        w = sharding.workload
        return ["takes one cu_seqlens for queries and keys"] if w.is_packed and w.q_lens != w.kv_lens else []

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        library, w = self.source.load(), sharding.workload
        options = _options(w, place)
        dense, packed = (getattr(library, name) for name in self.functions)
        if not w.is_packed:
            return in_bshd(lambda q, k, v: dense(q, k, v, **options))
        mine = sharding.lengths_of(w.q_lens or (), place.rank)
        boundaries = torch.tensor([0, *mine]).cumsum(0).to(place.device, torch.int32)
        return lambda q, k, v: packed(q, k, v, boundaries, max(mine), **options)


class RingFlash(_RingFlash):
    """ring_flash_attn_func: the sequence is split into contiguous parts."""

    name = "ring_flash"
    functions = ("ring_flash_attn_func", "ring_flash_attn_varlen_func")
    known_defects = (BFLOAT16_DQ,)


class Zigzag(_RingFlash):
    """zigzag_ring_flash_attn_func: rank r has chunks r and 2n-1-r, so that all have as much to do under a causal mask."""

    name = "zigzag"
    shards = ("head-tail",)
    functions = ("zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_varlen_func")

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        causal_only = [] if sharding.workload.mask else ["is meaningless for causal=False, as it says"]
        return causal_only + super().refused_over(sharding, machine, backward)


class Llama3(_RingFlash):
    """llama3_flash_attn_varlen_func: keys are gathered a key head at a time; each batch entry is one sequence."""

    name = "llama3"
    capabilities = Capabilities(masks=_CAUSAL, features=_FEATURES, square=True)

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        library, w = self.source.load(), sharding.workload
        whole = torch.tensor([0, w.q_len], dtype=torch.int32, device=place.device)
        parts = library.llama3_flash_attn_prepare_cu_seqlens(whole, w.mask is not None, place.rank, place.ranks)
        *lengths, keys = parts
        function, options = library.llama3_flash_attn_varlen_func, _options(w, place)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = [function(*entry, *lengths, 1, keys, **options) for entry in zip(q, k, v, strict=True)]
            return torch.stack(rows)

        return in_bshd(call)

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        """Refuse keys of another length than the queries: one cu_seqlens stands for both."""
        w = sharding.workload
        return [] if w.q_len == w.kv_len else ["takes one cu_seqlens for queries and keys"]


def _options(w: Workload, place: Place) -> dict[str, Any]:
    return {"softmax_scale": w.softmax_scale, "causal": w.plain_mask is not None, "group": place.group}
