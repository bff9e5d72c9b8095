"""Backends that compute over several ranks: what each is handed on a rank, and what it refuses of a workload that is split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.configured import Options
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.defects import CUDNN_NAN, KnownDefect, is_half_tile, is_on_affected_cudnn
from pytest_attn.backends.machine import Machine, current
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: into how many equal parts each way to split cuts a sequence, for every rank
PARTS_OF_A_RANK = {"contiguous": 1, "head-tail": 2, "striped": 1}

#: of rings around cuDNN: with 64 rows as well, where scores are large
CUDNN_NAN_OF_A_RANK = replace(
    CUDNN_NAN,
    summary="NaN in dq where a rank has q_len with q_len % 128 == 64, and a row's lse is below -88",
    applies=is_on_affected_cudnn,  # and backends over ranks look at the rows of a rank
)

#: torch's ring hands the backward kernel the lengths of another step; flash and cuDNN do not look at them
BALANCED_RING_OF_CUTLASS = KnownDefect(
    issue="pytorch#163075",
    summary="with load balance, dq and dk of the kernel efficient come from memory that nobody wrote",
    applies=lambda workload, machine: machine.kind == "cuda",  # under load balance
    tensors=("dq", "dk"),
)


@dataclass(frozen=True)
class Place:
    """A rank's place: its number among how many, their process group and mesh of one dimension, its own device."""

    rank: int
    ranks: int
    group: ProcessGroup
    mesh: DeviceMesh
    device: torch.device


class RankBackend(LibraryBackend):
    """A backend whose function is called on every rank with its shards: a test with ranks=... takes it.

    Subclasses say which ways to split a sequence are theirs, and which values their options have. `refused_over` asks what
    only the split tells.
    """

    argument = "ranks"
    #: the ways to split a sequence that it knows, of `SHARDS`
    shards: tuple[str, ...] = ("contiguous",)
    #: whether all ranks must hold as much
    needs_equal_shards: bool = True
    #: the values of each option; none for one that takes any whole number
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @abstractmethod
    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        """Return a callable of the rank's shards of q, k and v, (batch, heads, rows, dim) or packed, that returns out's.

        inputs: the whole tensors of the workload on the rank's device. Called on every rank at the same time.
        """

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        """List what the library refuses of a split that the declarations let through."""
        return []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tunable = frozenset(cls.choices)

    def defects_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[KnownDefect]:
        """List the known defects that have a split workload in their reach."""
        return self.defects_on(sharding.workload, machine, backward)

    def refusals_over(self, sharding: Sharding, machine: Machine, backward: bool = False) -> list[str]:
        """List why it refuses a workload split so; empty where it claims it."""
        reasons = self._unknown_options() or self.capabilities.refusals(sharding.workload, backward)
        return reasons or self._shard_refusals(sharding) or self.refused_over(sharding, machine, backward)

    def obstacle_over(self, sharding: Sharding, machine: Machine, backward: bool = False) -> str | None:
        """Say why a case cannot run over these ranks; None if it is claimed."""
        if reason := self.unavailable_because(machine):
            return reason
        with quiet(), current(machine.device):
            return self.broken_because() or "; ".join(self.refusals_over(sharding, machine, backward)) or None

    def obstacle(self, workload: Workload, machine: Machine, backward: bool) -> str | None:
        return f"{self.name} computes over several ranks; say ranks=2 in the marker of the test"

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        raise ValueError(f"{self.name} computes over several ranks; call it in a test with ranks=...")

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        return ()

    def _unknown_options(self) -> list[str]:
        reasons = []
        for name, value in self.configuration.items():
            known = self.choices[name]
            if known and value not in known:
                reasons.append(f"has no {name}={value}; it takes {', '.join(known)}")
            elif not known and not (isinstance(value, int) and value >= 1):
                reasons.append(f"takes a number of ranks, 1 or more, as {name}, not {value}")
        return reasons

    def _shard_refusals(self, sharding: Sharding) -> list[str]:
        shard, w = sharding.shard, sharding.workload
        if not isinstance(shard, str) or shard not in self.shards:
            found = shard if isinstance(shard, str) else function_label(shard)
            return [f"takes {' and '.join(self.shards)} shards only, not {found}"]
        parts = PARTS_OF_A_RANK[shard] * sharding.ranks
        lengths = {*(w.q_lens or (w.q_len,)), *((w.kv_lens or ()) if w.is_packed else (w.kv_len,))}
        if self.needs_equal_shards and (uneven := sorted(length for length in lengths if length % parts)):
            return [f"needs lengths that are multiples of {parts} over {sharding.ranks} ranks, not {uneven[0]}"]
        return []


def profile_over(profile: Precision, ranks: int) -> Precision:
    """Return the profile of a kernel that each of some ranks runs on its part, or that a ring of them hands on."""
    return replace(profile, name=f"{profile.name} over {ranks} ranks", parts=ranks) if ranks > 1 else profile


def has_half_tile(sharding: Sharding) -> bool:
    """Return whether the rows of a rank, or of one of its chunks, are 64 more than a multiple of 128."""
    parts = PARTS_OF_A_RANK.get(sharding.shard, 1) if isinstance(sharding.shard, str) else 1
    lengths = {sharding.workload.q_len // sharding.ranks, sharding.workload.q_len // (sharding.ranks * parts)}
    return any(map(is_half_tile, lengths))


def heads_refusals(workload: Workload, ranks: int) -> list[str]:
    """Refuse heads that cannot be shared out evenly over ranks, as an all-to-all from rows to heads does."""
    counts = {"heads": workload.heads, "kv_heads": workload.kv_heads}
    return [f"needs {name} that are a multiple of {ranks}, not {number}" for name, number in counts.items() if number % ranks]
