"""A line every 30 seconds while something takes long, beside pytest's own progress: which case, which phase, how long."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread

import pytest

from pytest_attn.workloads.functions import printable

#: seconds after which something is worth a line, and another one: some hosts end a job that is silent
TICK = 30.0
#: and seconds of waiting for another process
SOON = 5.0


@dataclass(eq=False)
class _Phase:
    """One thing that this process does: `within` so many seconds at most, 0 where nothing ends it; `done` of `total`."""

    doing: str
    on: str = ""
    within: float = 0.0
    total: int = 0
    more: int = 0
    done: int = 0
    begun: float = 0.0

    def words(self, now: float) -> str:
        """Return what is done, and for how long."""
        words = f"{self.doing} on {self.on}" if self.on else self.doing
        if self.total and self.done >= self.total and self.more:
            words += f" {self.done - self.total + 1} of up to {self.more} more, as some were disturbed"
        elif self.total:
            words += f" {min(self.done + 1, self.total)} of {self.total}"
        return f"{words}, {_clock(now - self.begun)}" + (f" of at most {_clock(self.within)}" if self.within else "")


class Progress:
    """Writes the lines to the stderr of the time when it was made; none under -q, nor where another process waits for this."""

    def __init__(self, config: pytest.Config, is_child: bool = False) -> None:
        """Take stderr while it is not captured."""
        self._worker = getattr(config, "workerinput", {}).get("workerid", "")
        self._phases: list[_Phase] = []  # the innermost last
        self._lock = Lock()
        self._stderr: int | None = None
        if not is_child and getattr(config.option, "verbose", 0) >= 0:
            with suppress(OSError):  # a process without stderr
                self._stderr = os.dup(2)
                config.add_cleanup(self.close)

    @contextmanager
    def counting(self, doing: str, total: int, more: int = 0) -> Iterator[Callable[[int], None]]:
        """Give the block what takes how many of `total` it has done; `more` may follow, where some of these were disturbed."""
        with self.during(doing, "") as phase:
            phase.total, phase.more = total, more
            yield lambda number: setattr(phase, "done", number)

    def close(self) -> None:
        """Write nothing any more, as where a debugger has the terminal."""
        with self._lock:
            if self._stderr is not None:
                os.close(self._stderr)
            self._stderr = None

    @contextmanager
    def during(self, doing: str, on: str, within: float = 0.0, is_waiting: bool = False) -> Iterator[_Phase]:
        """Say what the block does. doing: "" for what is not worth a word. on: the workload, "" for none. within: seconds.

        is_waiting: for another process, which is said sooner.
        """
        phase = _Phase(doing, on, within, begun=time.monotonic())
        if not doing or self._stderr is None:
            yield phase
            return
        ended, is_outermost = Event(), not self._phases
        self._phases.append(phase)
        if is_outermost:  # no thread lives longer: who forks is warned of any
            Thread(target=self._tick, args=(ended,), daemon=True).start()
        if is_waiting:
            Thread(target=self._say_soon, args=(ended,), daemon=True).start()
        try:
            yield phase
        finally:
            self._phases.remove(phase)
            ended.set()

    def _tick(self, ended: Event) -> None:
        while not ended.wait(TICK):
            self._say()

    def _say_soon(self, ended: Event) -> None:
        if not ended.wait(SOON):
            self._say()

    def _say(self) -> None:
        text = self.words(time.monotonic())
        with self._lock, suppress(OSError):
            if text and self._stderr is not None:
                os.write(self._stderr, f"\nattn: {printable(text, 0)}\n".encode(errors="replace"))

    def words(self, now: float) -> str:
        """Return the case and its phases, the outermost first; "" where there are none."""
        if not (said := ", ".join(phase.words(now) for phase in list(self._phases))):
            return ""
        case = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        return " ".join(filter(None, (self._worker, f"{case}:" if case else "", said)))


def _clock(seconds: float) -> str:
    """Write seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
