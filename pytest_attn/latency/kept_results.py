"""Whether a kernel caches its results: right on any data, but timed calls are given the same data again.

Its calls then take far longer where the data changed than where it did not. So does a call that other work interrupts, which
says nothing of the kernel: calls on the same and on changed data take turns, the time that a CPU worked on them must tell them
apart as well, and where threads had to wait for a core meanwhile, nothing is decided.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from pytest_attn.latency.calls import called
from pytest_attn.latency.waiting import process_waited
from pytest_attn.latency.work import StaleError, Work

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: how much longer a call may take after its data changed: 1.4 times, or 10 us, were seen on a CPU
_RATIO, _SECONDS = 3.0, 20e-6
#: pairs of calls, on the same and on changed data, all of which a kernel must give away
PAIRS = 5
#: share of these calls that may have been waiting for a core
_MOST_WAITING = 0.1


class Look(NamedTuple):
    """Seconds of one call: on the wall, and of work by CPUs, which says nothing of a GPU's: there the wall's again."""

    wall: float
    worked: float

    def is_far_longer_than(self, known: Look) -> bool:
        """Whether both tell this call, on changed data, from one on the data of the call before."""
        return all(mine > _RATIO * other + _SECONDS for mine, other in zip(self, known, strict=True))


def look_for_kept_results(work: Work) -> str:
    """Raise StaleError for a kernel that keeps its results; return why that cannot be told here and now, "" where it can.

    work: its last call was on the data as it stands.
    """
    waited, pairs = process_waited(), []
    for _ in range(PAIRS):
        same = look(work)
        work.refresh()
        changed = look(work)
        if not changed.is_far_longer_than(same):
            return ""
        pairs.append((same.wall, changed.wall))
    return judge_pairs(pairs, process_waited() - waited)


def judge_pairs(pairs: Sequence[tuple[float, float]], waited: float) -> str:
    """Raise StaleError over `PAIRS` pairs of calls, each far longer on changed data; return why that cannot be told.

    pairs: seconds on the same data, and on changed data. waited: seconds for which threads waited for a core meanwhile.
    """
    known, new = (f"{median(seconds) * 1e6:.3g} us" for seconds in zip(*pairs, strict=True))
    found = f"takes {known} on the data of the call before, and {new} on changed data"
    if waited > _MOST_WAITING * sum(map(sum, pairs)):
        return f"whether its results are cached is unknown, because other processes compute: it {found}"
    raise StaleError(f"{found}: its results appear to be cached")


def look(work: Work) -> Look:
    """Call a work once, and look at its result and its time."""
    worked = time.process_time()
    call = called(work)
    worked = time.process_time() - worked
    work.verify("called again after its data changed in place", work.result(call.value))
    return Look(call.done, worked if work.device.type == "cpu" else call.done)
