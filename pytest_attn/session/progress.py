"""What takes long is said while it lasts, with how long it has taken, and how much longer it will.

The workers of xdist tell the controller, which says it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import pytest

from pytest_attn.session.durations import SILENT_SECONDS, Durations, Remaining, clock
from pytest_attn.session.passing_text import PassingText
from pytest_attn.session.pytest_versions import verbosity_of

#: how often it is said anew, in seconds
TICK = 1.0
#: how long a run goes on before a terminal shows how much of it is left, in seconds
RUN_SECONDS = 10.0
#: what a worker of xdist calls its messages of what it does, and what says to it that somebody reads them
_EVENT = "attn_progress"


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
        self.durations = Durations(config)
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
            self._remaining = Remaining(cases, self.durations, workers)
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
        known = None if total or within else self.durations.of(step.key)
        step.expected = known if known is not None or not alike else statistics.median(alike)
        return step

    def _remember(self, step: _Step, now: float) -> None:
        if not (step.total or step.within) and (elapsed := now - step.begun) >= SILENT_SECONDS:
            self.durations.note(step.key, elapsed)
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
        if run is None or verbosity_of(self._config) < 0 or not (said or now - run.begun >= RUN_SECONDS):
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
