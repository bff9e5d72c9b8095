"""A time limit for a callable that may never return."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
    def around(self, case: str, beyond: float = 0.0) -> Iterator[Callable[[], None]]:
        """Limit the time of the block; raise DeadlineError naming `case`.

        It may take `beyond` seconds more than a callable may. The function that it gives has the time begin anew.
        """
        if not self.seconds:
            yield lambda: None
            return
        seconds = self.seconds + beyond
        message = f"no result after {seconds:g} s (--attn-timeout): {case}"
        hard = _Watch(seconds + GRACE, lambda: self._end_process(message))
        with hard.watching(), _alarm(seconds, message) as set_alarm:

            def begin_anew() -> None:
                hard.begin_anew()
                set_alarm()

            yield begin_anew

    def _end_process(self, message: str) -> None:
        text = f"\n{message}\nthe kernel is stuck outside Python: ending the process\n"
        os.write(self._stderr, text.encode())
        faulthandler.dump_traceback(self._stderr)
        os._exit(EXIT_STATUS)


class _Watch:
    """A thread that does something unless the time begins anew before it is over."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._seconds, self._late = seconds, late
        self._over = threading.Event()
        self.begin_anew()

    def begin_anew(self) -> None:
        self._end = time.monotonic() + self._seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self) -> None:
        while (left := self._end - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self._late()


@contextmanager
def _alarm(seconds: float, message: str) -> Iterator[Callable[[], None]]:
    """Raise DeadlineError in the main thread after `seconds`, where the system has such an alarm; give what sets it anew."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise DeadlineError(message)

    def set_alarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    previous = signal.signal(signal.SIGALRM, interrupt)
    set_alarm()
    try:
        yield set_alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
