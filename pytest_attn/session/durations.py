"""How long things took, in this run and in those before; and so, how much of a run is left."""

import statistics
import time
from collections.abc import Mapping, Sequence

import pytest

#: how long something takes before it is worth a word, in seconds
SILENT_SECONDS = 3.0
_CACHE_KEY = "attn/seconds"


class Durations:
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

    def __init__(self, cases: Sequence[str], durations: Durations, workers: int = 1) -> None:
        """Begin. cases: the ids of their items, which so many workers run."""
        self._durations, self._workers = durations, workers
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
                self._durations.note(one, self._taken[one])

    def words(self, now: float) -> str:
        """Say how many cases are done, and how long the others will take."""
        earlier, done = self._durations.earlier, self._taken.keys() - self._left
        known = [self._taken[one] for one in done] or [earlier[one] for one in self._left if one in earlier]
        usual = statistics.mean(known or [0.0])
        left = [max(0.0, earlier.get(one, usual) - (now - self._started.get(one, now))) for one in self._left]
        seconds = max([sum(left) / self._workers, *left])
        return f"{len(done)} of {len(self._taken)} cases" + (f", {clock(seconds)} to go" if seconds >= 1 else "")


def clock(seconds: float) -> str:
    """Write seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
