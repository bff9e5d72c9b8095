"""How long threads were ready to run and did not, because others had the cores, as Linux counts it; 0 elsewhere."""

from __future__ import annotations

from glob import iglob


def thread_waited() -> float:
    """Return the seconds that the calling thread has waited for a core."""
    return _waited("/proc/thread-self/schedstat")


def process_waited() -> float:
    """Return the seconds that the threads of this process have waited for a core, all together."""
    return sum(map(_waited, iglob("/proc/self/task/*/schedstat")))


def _waited(counts: str) -> float:
    try:
        with open(counts, encoding="ascii") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
