"""The items of a test with `ranks=`: one per number of ranks, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_attn.backends.declaration import FORM, argument
from pytest_attn.backends.subject import obstacle_of_any
from pytest_attn.guests.ranks.nccl import too_few_gpus_because
from pytest_attn.guests.ranks.over_ranks import RankBackend
from pytest_attn.guests.ranks.sharding import SHARDS, Shard, Sharding
from pytest_attn.session.collection import KernelItems
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.fields import is_whole
from pytest_attn.workloads.parameters import PARAMETERS


@dataclass(frozen=True)
class RankedMark(AttentionMark):
    """The marker of a test over ranks."""

    ranks: tuple[int, ...] = argument(
        None,
        "how many processes call fn, each with its shards; each of several numbers makes an item",
        unset="one process, whole tensors",
    )
    shard: Shard = argument(
        "contiguous",
        "which positions a rank holds: {}, or a function of (length, ranks) that returns those of each rank".format(
            ", ".join(f'"{name}"' for name in SHARDS)
        ),
    )

    @classmethod
    def read_more(cls, values: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
        """Read the numbers of ranks, and refuse what does not go with them."""
        _require_shard(values)
        if (ranks := values.get("ranks")) is None:
            return {"ranks": ()}
        found = tuple(ranks) if isinstance(ranks, list | tuple | set) else (ranks,)
        if not found or not all(is_whole(one, 1) for one in found):
            raise ValueError(f"ranks must be a number of processes, 1 or more, or several such numbers, got {ranks!r}")
        if unfit := [name for name in sorted(FORM) if name in said and name not in ("layout", "returns_lse")]:
            raise ValueError(f"ranks return out, or (out, lse) with returns_lse=True; leave out {', '.join(unfit)}")
        if values.get("parameters") or len(values.get("leaves", "qkv")) < 3:
            *others, last = PARAMETERS
            raise ValueError(f"ranks have gradients of q, k and v; leave out {', '.join(others)} and {last} in backward")
        return {"ranks": tuple(dict.fromkeys(found))}

    @property
    def argument(self) -> str:
        return "ranks" if self.ranks else ""


def _require_shard(values: Mapping[str, Any]) -> None:
    """Raise ValueError where a marker says how ranks share a sequence in unknown words, or where there are no ranks."""
    shard = values.get("shard", "contiguous")
    if not (callable(shard) or (isinstance(shard, str) and shard in SHARDS)):
        raise ValueError(f"shard must be {', '.join(SHARDS)}, or a function of (length, ranks), got {shard!r}")
    if "shard" in values and values.get("ranks") is None:
        raise ValueError("shard says how ranks share a sequence; say over how many with ranks=2, or ranks=(2, 4)")


@dataclass(frozen=True)
class RankedParameter(CaseParameter):
    """A case that ranks compute together."""

    ranks: int = 1

    @property
    def label(self) -> str:
        return f"{super().label}-ranks{self.ranks}"


class RankedItems(KernelItems):
    """The items of such a test."""

    mark = RankedMark

    def cases(self, mark: AttentionMark, names: Collection[str], session: AttentionSession) -> Sequence[CaseParameter]:
        assert isinstance(mark, RankedMark)
        if not mark.ranks:
            return super().cases(mark, names, session)
        cases = session.kernels.cases(mark, takes_backend="attn_backend" in names)
        maker = "pytest_attn.guests.ranks.ranked_case:make_ranked_case"
        return [
            RankedParameter(case.workload, case.backend, maker, case.shown, ranks=ranks)
            for case in cases
            for ranks in mark.ranks
        ]

    def obstacle(self, case: CaseParameter, marker: pytest.Mark, session: AttentionSession) -> str | None:
        if not isinstance(case, RankedParameter):
            return super().obstacle(case, marker, session)
        machine, backward = session.machines.machine(marker.kwargs.get("device")), bool(marker.kwargs.get("backward"))
        backend = session.registrations.registry[case.backend] if case.backend else None
        sharding = Sharding(case.workload, marker.kwargs.get("shard", "contiguous"), case.ranks)
        reason = too_few_gpus_because(case.ranks, machine) or sharding.refused_because()
        if reason or not isinstance(backend, RankBackend):
            return reason or obstacle_of_any(case.workload, machine, backward)
        return backend.obstacle_over(sharding, machine, backward)
