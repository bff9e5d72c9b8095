"""A time limit for a callable that may never return."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Seconds between the polite end (an exception in the main thread) and the end of the process.
GRACE = 5.0
EXIT_STATUS = 70


class DeadlineError(BaseException):
    """A callable took longer than --attn-timeout; no `except Exception` of its own can swallow this."""


class Deadline:
    """Stops what takes longer than `seconds`; 0 waits forever.

    Python code is interrupted at once, by an exception. A kernel that spins is stuck outside Python, where
    no exception can reach it. Then the process ends `GRACE` seconds later, with the case's name and every thread's stack.
    These go to the stderr of the time when this object was made, before pytest captures it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._stderr = os.dup(2) if seconds else 2

    def close(self) -> None:
        """Give the descriptor back."""
        if self.seconds:
            os.close(self._stderr)

    @contextmanager
    def around(self, case: str) -> Iterator[None]:
        """Limit the time of the block; raise DeadlineError naming `case`."""
        if not self.seconds:
            yield
            return
        message = f"no result after {self.seconds:g} s (--attn-timeout): {case}"
        hard = threading.Timer(self.seconds + GRACE, self._end_process, args=(message,))
        hard.daemon = True
        hard.start()
        try:
            with _alarm(self.seconds, message):
                yield
        finally:
            hard.cancel()

    def _end_process(self, message: str) -> None:
        text = f"\n{message}\nthe kernel is stuck outside Python: ending the process\n"
        os.write(self._stderr, text.encode())
        faulthandler.dump_traceback(self._stderr)
        os._exit(EXIT_STATUS)


@contextmanager
def _alarm(seconds: float, message: str) -> Iterator[None]:
    """Raise DeadlineError in the main thread after `seconds`, where the system has such an alarm."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise DeadlineError(message)

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
