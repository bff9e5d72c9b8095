"""Communication of ranks: collectives, the share of a sample that is spent in them, and what connects the devices.

The last collective of each rank is in a file, where the judge finds it when the rank does not answer any more.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pytest_attn.backends.machine import wait
from pytest_attn.latency.nvml import AbsentError, Gpu
from pytest_attn.latency.work import Work
from pytest_attn.reports.lines import count, duration

#: functions of torch.distributed that wait for other ranks, and which argument names the other one
_WAITING = {
    **dict.fromkeys(("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"), ""),
    **dict.fromkeys(("all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "barrier", "batch_isend_irecv"), ""),
    **dict.fromkeys(("all_gather_coalesced", "all_reduce_coalesced", "broadcast_object_list", "gather_object"), ""),
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter", "scatter_object_list", "monitored_barrier"), ""),
    **dict.fromkeys(("send", "isend"), "to"),
    **dict.fromkeys(("recv", "irecv"), "from"),
}
_WIDTH = 128
_LATE_SECONDS = 0.002


def watch_collectives(path: Path) -> Collectives:
    """Have every collective of this process leave its number, name and state in a file."""
    from torch.distributed import distributed_c10d  # which not every build of torch has

    record = Collectives(path)
    for name, peer in _WAITING.items():
        if plain := getattr(dist, name, None):
            watched = record.watching(name, peer, plain)
            for module in (dist, distributed_c10d):
                setattr(module, name, watched)
    setattr(distributed_c10d.Work, "wait", record.counting(distributed_c10d.Work.wait))  # noqa: B010
    return record


class Collectives:
    """The file, and how many collectives there were. One that calls another counts once.

    is_late: whether this rank comes late to each, as one on a busy machine does; nothing may depend on that. seconds: spent in
    all of them, and in waiting for those that were begun without waiting.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._number = self._depth = 0
        self.is_late = False
        self.seconds = 0.0

    def counting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose seconds count as those of a collective, unless it is a part of one."""

        @functools.wraps(plain)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return plain(*args, **kwargs)
            begun = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return counted

    def watching(self, name: str, peer: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that says where it is. peer: "to" or "from" where its second argument is another rank."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            if self._depth == 1:
                self._number += 1
                if self.is_late:
                    time.sleep(_LATE_SECONDS)
            said = f"{name} {peer} {args[1]}" if peer and len(args) > 1 else name
            self._write(said, "waits in")
            try:
                return plain(*args, **kwargs)
            finally:
                self._write(said, "has left")
                self._depth -= 1

        return functools.wraps(plain)(self.counting(watched))

    def _write(self, said: str, state: str) -> None:
        if self._depth == 1:
            os.pwrite(self._file, f"{state} {said}, its collective {self._number}".ljust(_WIDTH).encode()[:_WIDTH], 0)


def last_collective(path: Path) -> str:
    """Return what a rank did last with others: "waits in recv from 1, its collective 17"; "" for nothing."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


class RankTimes(NamedTuple):
    """Seconds of one call on one rank; inside: of these in collectives; late: after the common beginning. None: unknown."""

    seconds: float
    inside: float | None = None
    late: float | None = None


class SharedSample(NamedTuple):
    """One sample on all ranks."""

    ranks: tuple[RankTimes, ...]

    @property
    def seconds(self) -> float:
        """Those of the rank that took longest."""
        return max(rank.seconds for rank in self.ranks)


def figures_of(samples: Sequence[SharedSample], profiled: Sequence[dict[str, float] | None]) -> dict[str, Any]:
    """Return the p50 of each rank, of what it did outside collectives, and the share of those; in builtin types.

    profiled: what the profiler saw on each rank, which counts where samples do not tell; None where it saw no kernel.
    """
    ranks = list(zip(*(one.ranks for one in samples), strict=True))
    own, share, by = _outside_collectives(ranks, [one for one in profiled if one and all(profiled)])
    seconds = [median(one.seconds for one in mine) for mine in ranks]
    return {"seconds": seconds, "apart": _apart(samples), "own": own, "communication": share, "communication_by": by}


def _outside_collectives(
    ranks: Sequence[Sequence[RankTimes]], profiled: Sequence[dict[str, float]]
) -> tuple[list[float], list[float], str]:
    """Return each rank's seconds outside collectives, the share inside, and who told; empty where nobody did."""
    if profiled:
        share = [one["inside"] / one["span"] for one in profiled if one["span"]]
        return [one["own"] for one in profiled], share, "NCCL's kernels in the profiler"
    if not ranks or any(mine[0].inside is None for mine in ranks):
        return [], [], ""
    own = [median(one.seconds - (one.inside or 0.0) for one in mine) for mine in ranks]
    share = [median((one.inside or 0.0) / one.seconds for one in mine) for mine in ranks]
    return own, share, "wrapped functions of torch.distributed"


def _apart(samples: Sequence[SharedSample]) -> float | None:
    """Return how late the last rank begins, in the median of the samples where all say so; None without one."""
    late = [[one.late for one in sample.ranks if one.late is not None] for sample in samples]
    last = [max(those) for those, sample in zip(late, samples, strict=True) if len(those) == len(sample.ranks)]
    return median(last) if last else None


#: calls that are profiled, of which the last counts: the profiler's own start takes part of the first
_CALLS = 3
_MICROSECOND = 1e-6


def communication_of(work: Work, device: torch.device) -> dict[str, float] | None:
    """Return seconds of the last of a few calls: its span on the device, NCCL's kernels, and others; None without kernels.

    Every rank makes as many calls. Kernels that run at the same time count once, in each of the two sums.
    """
    spans: list[tuple[float, float, str]] = []
    for _ in range(_CALLS):
        call = work.stage()
        wait(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            wait(device)
        spans = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ]
    return seconds_of(spans)


def seconds_of(spans: Iterable[tuple[float, float, str]]) -> dict[str, float] | None:
    """Return the span, NCCL's share and the others' of kernels: (begin, end, name), in microseconds."""
    found = [one for one in spans if not one[2].startswith(("aten::", "cuda", "nccl:"))]
    if not found:
        return None
    nccl = [one for one in found if "nccl" in one[2].lower()]
    others = [one for one in found if "nccl" not in one[2].lower()]
    whole = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return {"span": whole * _MICROSECOND, "inside": _covered(nccl), "own": _covered(others)}


def _covered(spans: Iterable[tuple[float, float, str]]) -> float:
    """Return the seconds during which at least one of some kernels ran."""
    covered, until = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered * _MICROSECOND


CPU, NVLINK, PCIE, UNKNOWN = "CPU", "NVLink", "PCIe", "links unknown"


def topology_of(kind: str, ranks: int) -> str:
    """Return what connects the first `ranks` devices of a kind: NVLink only where NVML says so of every two of them."""
    if kind != "cuda":
        return CPU
    try:
        gpus = [Gpu(torch.device("cuda", number)) for number in range(ranks)]
    except AbsentError:
        return UNKNOWN
    linked = [one.has_nvlink_to(other) for one, other in combinations(gpus, 2)]
    if None in linked:
        return UNKNOWN
    return NVLINK if all(linked) else PCIE


# -- words -------------------------------------------------------------------------------------------------------------

#: how much longer than the median of the others a rank takes outside collectives that is named
_SLOWER = 1.2


def describe_ranks(ranks: Mapping[str, Any]) -> str:
    """Say which rank is slower than the others, how much of the time collectives take, and how well ranks were aligned.

    ranks: the field of a latency: number, shard, topology; by rank seconds (p50), own (of these, outside collectives) and
        communication (the share of collectives); communication_by: who says so; apart: seconds by which the last rank begins
        after the common moment, the median.
    """
    said = [f"{count(ranks['number'], 'rank')} ({ranks['shard']}, {ranks['topology']})"]
    own, shares = ranks["own"], ranks["communication"]
    if own:
        said.append(f"outside collectives {_who_takes(own)}")
    if shares:
        least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
        said.append(f"in collectives {least if least == most else f'{least} to {most}'} of the time")
    if ranks["apart"] is not None:
        said.append(f"begun within {duration(ranks['apart'])} of one another")
    return "; ".join(said)


def _who_takes(own: Sequence[float]) -> str:
    """Say what ranks take, and which of them takes longer than the others."""
    slow = slow_rank(own)
    if slow is None:
        return f"each took {duration(median(own))}" if len(own) > 1 else f"it took {duration(own[0])}"
    others = [one for rank, one in enumerate(own) if rank != slow]
    whose = "the others" if len(others) > 1 else f"rank {1 - slow}"
    return f"rank {slow} took {duration(own[slow])}, {whose} {duration(median(others))}"


def slow_rank(own: Sequence[float]) -> int | None:
    """Return the rank that takes notably longer than the others; None where none does, or there are no others.

    own: seconds of each rank outside collectives: inside, all of them wait for the slow one.
    """
    if len(own) < 2:
        return None
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [one for rank, one in enumerate(own) if rank != slowest]
    return slowest if own[slowest] > _SLOWER * median(others) else None
