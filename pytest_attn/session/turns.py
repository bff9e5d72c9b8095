"""Prepared processes: each gets ready beside the others, then waits for its turn, so that none disturbs another's time.

The turn is a file: locked by the one who gives it, and beside it a second one, which a process leaves as it begins to wait.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_attn.files import write_atomically

#: set in a prepared process: the file whose lock it waits for
TURN_VARIABLE = "PYTEST_ATTN_TURN"
_READY, _TOUCHED = "ready", "CUDA is initialized"
_WARM = "the device is warm"


class Turn:
    """What a prepared process waits for, as the process sees it that gives it."""

    def __init__(self, path: Path) -> None:
        import fcntl

        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def is_awaited(self) -> bool:
        """Whether the process is ready."""
        return _sign(self.path).exists()

    @property
    def has_touched_cuda(self) -> bool:
        """Whether the process that is ready has initialized CUDA already: then others are not alone on the GPU."""
        return _sign(self.path).read_text() == _TOUCHED

    def give(self, is_warm: bool) -> None:
        """Let the process go on. is_warm: whether the device was at work until now."""
        import fcntl

        self._file.write(_WARM if is_warm else "")
        self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # not only closed: a process forked meanwhile may hold the file as well
        self.close()

    def close(self) -> None:
        """Forget about a process that has ended."""
        self._file.close()


def wait_for_turn() -> bool:
    """Wait for this process's turn, if it was prepared; return whether the device is known to have worked until then."""
    path = os.environ.get(TURN_VARIABLE)
    if path is None:
        return False
    import fcntl

    torch = sys.modules.get("torch")
    has_touched = torch is not None and torch.cuda.is_initialized()
    write_atomically(_sign(Path(path)), _TOUCHED if has_touched else _READY)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return file.read() == _WARM


def _sign(path: Path) -> Path:
    return path.with_name(f"{path.name}.awaited")
