"""The last collective of a rank, written to a file where the judge finds it when the rank does not answer any more."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

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
