"""How a worker finds the one that waits for it, and how long it lives: no longer than that one."""

from __future__ import annotations

import os
import sys

#: set in a worker, which takes it out: the descriptor of its channel, and the process that started it
CHANNEL_VARIABLE = "PYTEST_ATTN_CHANNEL"
_DIE_WITH_PARENT, _SIGKILL = 1, 9  # PR_SET_PDEATHSIG of prctl(2)


def inherited_channel() -> int | None:
    """Return the descriptor of this process's channel, and let it end with its starter; None for any other process."""
    if CHANNEL_VARIABLE not in os.environ:
        return None
    descriptor, parent = map(int, os.environ.pop(CHANNEL_VARIABLE).split())
    die_with(parent)
    return descriptor


def die_with(parent: int) -> None:
    """Have this process end at once when the thread that started it does, or now if that is over. Linux only.

    parent: the process of that thread, 0 where the thread may end before.
    """
    if sys.platform != "linux" or not parent:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
