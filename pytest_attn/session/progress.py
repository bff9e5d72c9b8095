"""What is said while something takes long: on a terminal behind what pytest has printed, and gone before pytest prints on.

In a log, a line where nothing was printed for long. The workers of xdist tell the controller, which says it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, RLock, Thread
from typing import Any
from unicodedata import east_asian_width

import pytest

from pytest_attn.reports.lines import terminal_width

#: how long something takes before it is worth a word, in seconds
SILENT_SECONDS = 3.0
#: how often it is said anew, in seconds
TICK = 1.0
#: how long a run goes on before a terminal shows how much of it is left, in seconds
RUN_SECONDS = 10.0
#: how long a log stays silent, in seconds: some hosts end a job that prints nothing for minutes
LOG_SECONDS = 30.0
#: erases a terminal's line from the cursor on; moves the cursor to the line above
_ERASE, _UP = "\x1b[K", "\x1b[A"
_CACHE_KEY = "attn/seconds"
#: what a worker of xdist calls its messages of what it does, and what says to it that somebody reads them
_EVENT = "attn_progress"


class PassingText:
    """A text behind what pytest has printed, or on the line below where there is no room.

    Nothing is shown where the output goes to a file, in an xdist worker, in a process that another one waits for, and under
    -s, where tests print for themselves; a log may have lines then.
    """

    def __init__(self, config: pytest.Config, is_child: bool = False) -> None:
        """Open the terminal; a config whose output is not captured yet."""
        self._config = config
        self.lock = RLock()  # texts come from a thread as well
        self._taken_back = ""  # what must be written for the text to be gone
        #: the terminal under a descriptor of our own: pytest's leads into a file while a test runs
        self._terminal = None if is_child else _terminal_of(config)
        self._log = None if is_child or self.is_watched else _log_of(config)
        self.printed_at = time.monotonic()
        if self.is_read:
            config.add_cleanup(self.close)

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees what is shown."""
        return self._terminal is not None

    @property
    def is_read(self) -> bool:
        """Whether somebody sees what is shown, or reads it later in a log."""
        return self.is_watched or self._log is not None

    def give_way(self) -> None:
        """Take the text back from now on before pytest prints, whatever has it print."""
        writer = self._config.get_terminal_writer()
        write = writer.write

        def written(*text: Any, **markup: Any) -> None:
            with self.lock:
                self.clear()
                write(*text, **markup)
                if self.is_watched:
                    writer.flush()  # what is shown stands behind it
                self.printed_at = time.monotonic()

        writer.write = written  # type: ignore[method-assign]

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        if not self.is_watched:
            return
        column, width = max(0, self._config.get_terminal_writer().width_of_current_line), self._width()
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        if column and column % width == 0:
            return  # the cursor behind a full line cannot be put back: what comes next would stand elsewhere
        column %= width  # of a line that goes on below
        if column + _columns(text) + 3 <= width:
            shown, taken_back = f"  {text}\x1b[{_columns(text) + 2}D", _ERASE
        else:
            while _columns(text) > width - 3:
                text = text[:-1]
            home = f"\r{_UP}" + (f"\x1b[{column}C" if column else "")
            shown, taken_back = f"\n\r{_ERASE}  {text}{home}", f"\n\r{_ERASE}{home}"
        with self.lock:
            self._write(self._taken_back + shown)
            self._taken_back = taken_back

    def log(self, text: str) -> None:
        """Write a line to the log, where nothing was printed for long."""
        now = time.monotonic()
        if self._log is not None and now - self.printed_at >= LOG_SECONDS:
            self.printed_at = now
            with suppress(OSError):
                os.write(self._log, f"\nattn: {text}\n".encode(errors="replace"))

    def clear(self) -> None:
        """Take the text back: pytest goes on where it stood."""
        with self.lock:
            if self._taken_back:
                self._write(self._taken_back)
            self._taken_back = ""

    def close(self) -> None:
        """Show nothing any more."""
        with self.lock:
            self.clear()
            for one in (self._terminal, self._log):
                if one is not None:
                    os.close(one)
            self._terminal = self._log = None

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
    if not is_terminal or is_shared or not _is_printer(config, least=-1):
        return None
    return _descriptor(sys.stdout)


def _log_of(config: pytest.Config) -> int | None:
    """Open the log that this process may write lines to; None where there is none, or where -q asks for less."""
    return _descriptor(sys.stderr) if _is_printer(config, least=0) else None


def _is_printer(config: pytest.Config, least: int) -> bool:
    """Whether it is pytest's own reporter that prints, in this process, and no bars of others; at least so much."""
    is_plain = type(config.pluginmanager.get_plugin("terminalreporter")) is pytest.TerminalReporter
    return is_plain and not hasattr(config, "workerinput") and config.get_verbosity() >= least


def _descriptor(stream: Any) -> int | None:
    try:
        return os.dup(stream.fileno())
    except (AttributeError, OSError, ValueError):  # something in its place that only says it is a terminal
        return None


def _columns(text: str) -> int:
    """Count the columns of a terminal that a text takes."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


# -- how long things take ----------------------------------------------------------------------------------------------------


class Seconds:
    """How long things took in this run and in those before, in pytest's cache where that is on."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._noted: dict[str, float] = {}
        self._earlier: dict[str, float] | None = None

    @property
    def earlier(self) -> Mapping[str, float]:
        """Those of the runs before."""
        if self._earlier is None:
            cache = getattr(self._config, "cache", None)
            earlier = cache.get(_CACHE_KEY, {}) if cache else {}
            is_ours = isinstance(earlier, dict) and all(isinstance(seconds, float) for seconds in earlier.values())
            self._earlier = earlier if is_ours else {}
        return self._earlier

    def note(self, what: str, seconds: float) -> None:
        """Keep how long it took, for the next run."""
        if not self._noted:
            self._config.add_cleanup(self._save)
        self._noted[what] = round(seconds, 2)

    def of(self, what: str) -> float | None:
        """Return how long it took in this run, or else in those before; None where nobody knows."""
        return self._noted.get(what, self.earlier.get(what))

    def _save(self) -> None:
        if cache := getattr(self._config, "cache", None):
            cache.set(_CACHE_KEY, {**self.earlier, **self._noted})


class Remaining:
    """A plugin of pytest that knows how much of a run is left: by the seconds of the run before, else by counts."""

    def __init__(self, cases: Sequence[str], seconds: Seconds, workers: int = 1) -> None:
        """Begin. cases: the ids of their items, which so many workers run."""
        self._seconds, self._workers = seconds, workers
        self._left, self._taken = set(cases), dict.fromkeys(cases, 0.0)
        self._started: dict[str, float] = {}
        self.begun = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Start the clock of a case."""
        self._started[nodeid] = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what a part of a case took."""
        if report.nodeid in self._taken:
            self._taken[report.nodeid] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count a case as done."""
        self._started.pop(nodeid, None)
        self._left.discard(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Keep what each case took, where that is worth it."""
        if sum(self._taken.values()) >= SILENT_SECONDS:
            for one in self._taken.keys() - self._left:
                self._seconds.note(one, self._taken[one])

    def words(self, now: float) -> str:
        """Say how many cases are done, and how long the others will take."""
        earlier, done = self._seconds.earlier, self._taken.keys() - self._left
        known = [self._taken[one] for one in done] or [earlier[one] for one in self._left if one in earlier]
        usual = statistics.mean(known or [0.0])
        left = [max(0.0, earlier.get(one, usual) - (now - self._started.get(one, now))) for one in self._left]
        seconds = max([sum(left) / self._workers, *left])
        return f"{len(done)} of {len(self._taken)} cases" + (f", {clock(seconds)} to go" if seconds >= 1 else "")


# -- what is done ------------------------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """One thing that a process does.

    expected: the seconds that it took before, None where nobody knows. within: those that it takes at most, 0 where nothing
    ends it. total, more: how many of it are done, and how many may follow where some of these were disturbed.
    """

    doing: str
    on: str
    within: float
    total: int
    more: int
    begun: float
    expected: float | None = None
    done: int = 0

    def __post_init__(self) -> None:
        self.counted_at = self.begun

    def count(self, done: int, now: float) -> None:
        """Take down how many are done."""
        self.done, self.counted_at = done, now

    @property
    def key(self) -> str:
        """What its seconds are kept under."""
        return f"{self.doing} on {self.on}" if self.on else self.doing

    def words(self, now: float) -> str:
        """Say what is done, for how long, and how long it will still take."""
        elapsed = now - self.begun
        if self.total and self.done >= self.total and self.more:
            return f"{self.doing} {self.done - self.total + 1} of up to {self.more} more, as some were disturbed"
        if self.total:
            left = (self.counted_at - self.begun) / self.done * self.total - elapsed if self.done else 0.0
            return f"{self.doing} {min(self.done + 1, self.total)} of {self.total}{_left(left)}"
        if self.within:
            return f"{self.key}, {clock(elapsed)} of at most {clock(self.within)}"
        return f"{self.key}, {clock(elapsed)}{_left((self.expected or 0.0) - elapsed)}"


class Progress:
    """Says what is going on, for how long, and how much longer it will take: once a second, until it is done."""

    def __init__(self, config: pytest.Config, is_child: bool = False) -> None:
        """Open the terminal; a config whose output is not captured yet. is_child: whether another process waits for it."""
        self.line = PassingText(config, is_child)
        self.seconds = Seconds(config)
        self._config = config
        self._send = _to_controller(config)
        self._doing: dict[str, list[_Step]] = {}  # by worker of xdist, "" for this process; the innermost is shown
        self._alike: dict[str, list[float]] = {}  # what the same took in this run on whatever workload
        self._remaining: Remaining | None = None
        self._ended = Event()

    @property
    def _is_told(self) -> bool:
        return self.line.is_read or self._send is not None

    @contextmanager
    def during(self, doing: str, on: str, within: float = 0.0) -> Iterator[None]:
        """Say what the block does, from three seconds on, and how long it will still take as it took that long before.

        doing: "" for what is not worth a word. on: the workload, "" where there is none. within: the seconds that it takes at
        most, 0 where nothing ends it.
        """
        with self._step(doing, on, within):
            yield

    @contextmanager
    def counting(self, doing: str, total: int, more: int = 0) -> Iterator[Callable[[int], None]]:
        """Say how many of `total` the block has done; it is given what to call with that number.

        more: how many may follow, where some of these were disturbed.
        """
        with self._step(doing, "", 0.0, total, more):
            yield lambda number: self._tell("count", number)

    @contextmanager
    def _step(self, doing: str, *more: Any) -> Iterator[None]:
        if not (doing and self._is_told):
            yield
            return
        self._tell("begin", doing, *more)
        try:
            yield
        finally:
            self._tell("end")

    # -- the run ---------------------------------------------------------------------------------------------------------

    def expect(self, cases: Sequence[str], workers: int = 1) -> None:
        """Say from now on how much of these cases is left, the ids of their items. workers: how many run them."""
        if self._remaining is None and cases and not hasattr(self._config, "workerinput"):
            self._remaining = Remaining(cases, self.seconds, workers)
            self._config.pluginmanager.register(self._remaining, "attn-remaining")
            if self.line.is_read:
                self.line.give_way()

    def listen(self, node: Any) -> None:
        """Have a worker of xdist say what it does; node: of the controller."""
        take = getattr(node, "process_from_remote", None)
        if take is None or not self.line.is_read:
            return
        node.workerinput[_EVENT] = True

        def took(message: Any) -> None:
            if isinstance(message, tuple) and message[0] == _EVENT:
                with suppress(Exception):  # else xdist's own thread would end
                    self._note(node.gateway.id, *message[1]["said"])
            else:
                take(message)

        node.process_from_remote = took

    def forget(self, worker: str) -> None:
        """Say nothing any more of a worker of xdist that has ended."""
        with self.line.lock:
            self._doing.pop(worker, None)
            self._end_if_idle()

    def _tell(self, *said: Any) -> None:
        if self._send is not None:
            self._send(_EVENT, said=said)
        else:
            self._note("", *said)

    def _note(self, who: str, event: str, *facts: Any) -> None:
        """Take down what a process has begun, counted or ended."""
        now = time.monotonic()
        with self.line.lock:
            if not self.line.is_read:
                return
            steps = self._doing.setdefault(who, [])
            if event == "begin":
                steps.append(self._begun(*facts, now=now))
                if self._remaining and now - self._remaining.begun >= RUN_SECONDS:
                    self._say()  # as many short ones would never be seen
            elif steps and event == "count":
                steps[-1].count(facts[0], now)
            elif steps:
                self._remember(steps.pop(), now)
                self.line.clear()
            if not steps:
                del self._doing[who]
            self._end_if_idle()

    def _begun(self, doing: str, on: str, within: float, total: int = 0, more: int = 0, *, now: float) -> _Step:
        if not any(self._doing.values()):
            self._ended = Event()
            Thread(target=self._tick, args=(self._ended,), daemon=True).start()
        step = _Step(doing, on, within, total, more, now)
        alike = self._alike.get(doing)
        known = None if total or within else self.seconds.of(step.key)
        step.expected = known if known is not None or not alike else statistics.median(alike)
        return step

    def _remember(self, step: _Step, now: float) -> None:
        if not (step.total or step.within) and (elapsed := now - step.begun) >= SILENT_SECONDS:
            self.seconds.note(step.key, elapsed)
            self._alike.setdefault(step.doing, []).append(elapsed)

    def _end_if_idle(self) -> None:
        if not self._doing:
            self._ended.set()
            self.line.clear()

    def _tick(self, ended: Event) -> None:
        while not ended.wait(TICK):
            with self.line.lock:
                if not ended.is_set():
                    self._say()

    def _say(self) -> None:
        if text := self._words():
            self.line.show(text)
            self.line.log(text)

    def _words(self) -> str:
        """Say how much is left, and what takes long, the longest first; "" where neither is worth a word yet."""
        now = time.monotonic()
        steps = [(some[0].begun, who, some[-1]) for who, some in self._doing.items()]
        long = [(who, step) for begun, who, step in sorted(steps, key=_first) if step.total or now - begun >= SILENT_SECONDS]
        said = "; ".join(f"{who} {step.words(now)}".lstrip() for who, step in long)
        run = self._remaining
        if run is None or self._config.get_verbosity() < 0 or not (said or now - run.begun >= RUN_SECONDS):
            return said
        return " | ".join(filter(None, (run.words(now), said)))


def _first(some: tuple[float, str, _Step]) -> float:
    return some[0]


def _to_controller(config: pytest.Config) -> Callable[..., None] | None:
    """Return what a worker of xdist says it with; None in any other process, and where nobody reads it."""
    if not getattr(config, "workerinput", {}).get(_EVENT):
        return None
    return next((one.sendevent for one in config.pluginmanager.get_plugins() if hasattr(one, "sendevent")), None)


def _left(seconds: float) -> str:
    return f", about {clock(seconds)} left" if seconds >= 1 else ""


def clock(seconds: float) -> str:
    """Write seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
