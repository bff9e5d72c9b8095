"""yunchang (USP, as in xDiT): Ulysses' all-to-all from rows to heads, and its union with a ring."""

from functools import cache, partial
from types import MappingProxyType
from typing import Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.flash_attention import options_of
from pytest_attn.guests.ranks.libraries.ring_flash import BFLOAT16_DQ, OverFlash2
from pytest_attn.guests.ranks.over_ranks import Place, heads_refusals
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import Inputs

_FEATURES = frozenset(("scale", "softcap", "grouped heads", "backward"))


class _Yunchang(OverFlash2):
    source = Library(("yunchang",), "yunchang", "pip install yunchang")

    def broken_because(self) -> str | None:
        """Import the library, which does without flash-attn until it is called."""
        return super().broken_because() or (
            None if self.source.load().globals.HAS_FLASH_ATTN else "yunchang finds no flash-attn 2; pip install flash-attn"
        )


class Ulysses(_Yunchang):
    """UlyssesAttention: each rank computes some heads of all rows."""

    name = "ulysses"
    capabilities = Capabilities(masks=frozenset(("causal-bottom-right", "window")), features=_FEATURES)

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        return heads_refusals(sharding.workload, sharding.ranks)

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        library = self.source.load()
        module = library.UlyssesAttention(place.group, attn_type=library.kernels.AttnType.FA)
        return in_bshd(partial(module, **options_of(sharding.workload)))


class Usp(_Yunchang):
    """LongContextAttention: Ulysses within `ulysses` neighboring ranks, by default half of them, a ring between these groups.

    Head-tail shards go with its zigzag ring, contiguous ones with its plain one.
    """

    name = "usp"
    shards = ("contiguous", "head-tail")
    choices = MappingProxyType({"ulysses": ()})
    capabilities = Capabilities(masks=frozenset(("causal", "causal-bottom-right")), features=_FEATURES, square=True)
    known_defects = (BFLOAT16_DQ,)

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        ulysses = self._ulysses(sharding.ranks)
        if sharding.ranks % ulysses:
            return [f"cannot split {sharding.ranks} ranks into groups of {ulysses}"]
        reasons = heads_refusals(sharding.workload, ulysses)
        if ulysses == sharding.ranks and backward and machine.kind == "cpu":
            reasons.append("sends gradients to itself in a ring of one rank, which gloo cannot")
        if sharding.shard == "head-tail" and not sharding.workload.mask:
            reasons.append("its zigzag ring is meaningless for causal=False, as it says")
        if sharding.shard == "head-tail" and ulysses > 1:
            reasons.append(f"orders rows otherwise than head-tail where ulysses is {ulysses}")
        return reasons

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        library, ulysses = self.source.load(), self._ulysses(place.ranks)
        groups = library.globals.PROCESS_GROUP  # which the module reads as it is made
        groups.ULYSSES_PG, groups.RING_PG = _groups_of(ulysses, place.ranks // ulysses, place.rank)
        ring = "zigzag" if sharding.shard == "head-tail" else "basic"
        module = library.LongContextAttention(ring_impl_type=ring, attn_type=library.kernels.AttnType.FA)
        return in_bshd(partial(module, **options_of(sharding.workload)))

    def _ulysses(self, ranks: int) -> int:
        return int(self.configuration.get("ulysses", max(1, ranks // 2)))


@cache
def _groups_of(ulysses: int, ring: int, rank: int) -> tuple[Any, Any]:
    """Have the library make its groups once: a process can make only so many."""
    library = Usp.source.load()
    library.set_seq_parallel_pg(ulysses, ring, rank, ulysses * ring)
    made = library.globals.PROCESS_GROUP
    return made.ULYSSES_PG, made.RING_PG
