"""What a terminal shows while something takes long: behind what pytest has printed, and gone before pytest prints on."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from unicodedata import east_asian_width

import pytest

from pytest_attn.reports.lines import terminal_width
from pytest_attn.session.kinds import is_case

#: how long something takes before it is worth a word, in seconds
SILENT_SECONDS = 3.0
#: how often it is said anew, in seconds
TICK = 1.0
#: for how long a run of --attn-tune says nothing of its progress, in seconds
TUNE_SILENT_SECONDS = 10.0
#: erases a terminal's line from the cursor on; moves the cursor to the line above
_ERASE, _UP = "\x1b[K", "\x1b[A"
_CACHE_KEY = "attn/seconds"


class PassingText:
    """A text behind what pytest has printed, or on the line below where there is no room.

    Nothing is shown where the output goes to a file, in an xdist worker, in a process that another one waits for, and under
    -s, where tests print for themselves.
    """

    def __init__(self, config: pytest.Config, is_child: bool = False) -> None:
        """Open the terminal; a config whose output is not captured yet."""
        self._config = config
        self._lock = Lock()  # texts come from a thread as well
        self._taken_back = ""  # what must be written for the text to be gone
        #: the terminal under a descriptor of our own: pytest's leads into a file while a test runs
        self._terminal = None if is_child else _terminal_of(config)
        if self._terminal is not None:
            config.add_cleanup(self.close)

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees what is shown."""
        return self._terminal is not None

    def show(self, text: str, is_line_done: bool = False) -> None:
        """Show a text in place of the one before. is_line_done: whether pytest will go on with a new line."""
        if not self.is_watched:
            return
        column, width = self._config.get_terminal_writer().width_of_current_line, self._width()
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        if column >= width - 1 and not is_line_done:
            return  # the cursor of a full line cannot be put back: what comes next would stand elsewhere
        if column + _columns(text) + 3 <= width:
            shown, taken_back = f"  {text}\x1b[{_columns(text) + 2}D", _ERASE
        else:
            while _columns(text) > width - 3:
                text = text[:-1]
            home = f"\r{_UP}" + (f"\x1b[{min(column, width - 1)}C" if column else "")
            shown, taken_back = f"\n\r{_ERASE}  {text}{home}", f"\n\r{_ERASE}{home}"
        with self._lock:
            self._write(self._taken_back + shown)
            self._taken_back = taken_back

    def clear(self) -> None:
        """Take the text back: pytest goes on where it stood."""
        with self._lock:
            if self._taken_back:
                self._write(self._taken_back)
            self._taken_back = ""

    def close(self) -> None:
        """Show nothing any more."""
        self.clear()
        with self._lock:
            if self._terminal is not None:
                os.close(self._terminal)
            self._terminal = None

    def _width(self) -> int:
        """Ask the terminal itself: pytest asks a file while a test runs, and gets 80."""
        return terminal_width(1 if self._terminal is None else self._terminal)

    def _write(self, text: str) -> None:
        """Write past pytest's writer, whose count of columns is about what pytest has printed."""
        if self._terminal is not None:
            os.write(self._terminal, text.encode(errors="replace"))


def _terminal_of(config: pytest.Config) -> int | None:
    """Open the terminal that this process may write to; None where there is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    has_logs = config.pluginmanager.hasplugin("logging") and config.getini("log_cli")
    is_shared = config.getoption("capture", "no") != "fd" or has_logs  # tests or their logs write as well
    is_ours = not hasattr(config, "workerinput")
    is_plain = type(config.pluginmanager.get_plugin("terminalreporter")) is pytest.TerminalReporter  # no bars of others
    if not (is_terminal and is_ours and is_plain) or is_shared:
        return None
    try:
        return os.dup(sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # something in its place that only says it is a terminal
        return None


def _columns(text: str) -> int:
    """Count the columns of a terminal that a text takes."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


class Progress:
    """Says what is going on, for how long, and how much longer it will take: once a second, until it is done."""

    def __init__(self, config: pytest.Config, is_child: bool = False) -> None:
        """Open the terminal; a config whose output is not captured yet. is_child: whether another process waits for it."""
        self.line = PassingText(config, is_child)
        self._config = config
        self._doing: list[Callable[[], str]] = []  # the innermost is shown
        self._seconds: dict[tuple[str, str], float] = {}  # what took long in this run
        self._earlier: dict[str, float] | None = None  # and in those before

    @contextmanager
    def during(self, doing: str, on: str) -> Iterator[None]:
        """Say what the block does, from three seconds on, and how long it will still take as it took that long before."""
        if not self.line.is_watched:
            yield
            return
        begun = time.monotonic()
        expected = self._expected(doing, on)

        def describe() -> str:
            elapsed = time.monotonic() - begun
            left = _left(expected - elapsed) if expected is not None else ""
            return f"{doing} on {on}, {clock(elapsed)}{left}" if elapsed >= SILENT_SECONDS else ""

        with self._shown(describe):
            yield
        if (elapsed := time.monotonic() - begun) >= SILENT_SECONDS:
            self._remember(doing, on, elapsed)

    @contextmanager
    def counting(self, doing: str, total: int) -> Iterator[Callable[[int], None]]:
        """Say how many of `total` the block has done; it is given what to call with that number."""
        begun = at = time.monotonic()
        done = 0

        def step(number: int) -> None:
            nonlocal at, done
            at, done = time.monotonic(), number

        def describe() -> str:
            left = _left((at - begun) / done * total - (time.monotonic() - begun)) if done else ""
            return f"{doing} {min(done + 1, total)} of {total}{left}"

        with self._shown(describe):
            yield step

    @contextmanager
    def _shown(self, describe: Callable[[], str]) -> Iterator[None]:
        if not self.line.is_watched:
            yield
            return
        ended = Event()
        self._doing.append(describe)
        thread = Thread(target=self._tick, args=(ended,), daemon=True) if len(self._doing) == 1 else None
        if thread:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread:
                thread.join()
            self._doing.remove(describe)
            self.line.clear()

    def _tick(self, ended: Event) -> None:
        while not ended.wait(TICK):
            if text := self._doing[-1]():
                self.line.show(text)

    def _expected(self, doing: str, on: str) -> float | None:
        """Return how long it took last time, or else what the same on other workloads took in this run; None: not known."""
        if self._earlier is None:
            cache = getattr(self._config, "cache", None)
            earlier = cache.get(_CACHE_KEY, {}) if cache else {}
            is_ours = isinstance(earlier, dict) and all(isinstance(seconds, float) for seconds in earlier.values())
            self._earlier = earlier if is_ours else {}
        exactly = self._seconds.get((doing, on), self._earlier.get(f"{doing} on {on}"))
        alike = [seconds for (what, _), seconds in self._seconds.items() if what == doing]
        return exactly if exactly is not None else statistics.median(alike) if alike else None

    def _remember(self, doing: str, on: str, seconds: float) -> None:
        if not self._seconds:
            self._config.add_cleanup(self._save)
        self._seconds[doing, on] = round(seconds, 1)

    def _save(self) -> None:
        if cache := getattr(self._config, "cache", None):
            mine = {f"{doing} on {on}": seconds for (doing, on), seconds in self._seconds.items()}
            cache.set(_CACHE_KEY, {**(self._earlier or {}), **mine})


def _left(seconds: float) -> str:
    return f", about {clock(seconds)} left" if seconds >= 1 else ""


def clock(seconds: float) -> str:
    """Write seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class TuneProgress:
    """Says on a terminal, between tests, how many cases are done and how long the rest will take.

    Nothing in the first ten seconds. Under xdist pytest's own figures say as much.
    """

    def __init__(self, progress: Progress) -> None:
        self._line = progress.line
        self._begun, self._done, self._total = time.monotonic(), 0, 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the clock."""
        self._begun, self._total = time.monotonic(), sum(map(is_case, session.items))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Make room for pytest's own words."""
        self._line.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        """Make room for a failure's letter."""
        self._line.clear()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Say how far the run is."""
        self._done += 1
        elapsed, total = time.monotonic() - self._begun, self._total
        if elapsed < TUNE_SILENT_SECONDS or not self._done < total:
            return
        left = clock(round(elapsed / self._done * (total - self._done)))
        text = f"tune: {self._done} of {total} cases, about {left} left"
        self._line.show(text, is_line_done=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave nothing behind."""
        self._line.clear()
