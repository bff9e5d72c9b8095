"""New processes of a run: forked by a server that has imported torch, or else started by themselves."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_attn.session.forked import Command, Ended, ForkServer, ServerError, has_ended, modules_ahead
from pytest_attn.session.turns import TURN_VARIABLE, Turn

#: devices on which processes that time are forked. Not on a CPU: there copies in memory take a fifth longer in forked ones,
#: see docs/results/latency-notes.md
_FORKED_ON = frozenset(("cuda",))
#: seconds that processes may take to get ready beside one another, and between two looks at whether they are
_READY_SECONDS, _LOOK_SECONDS = 300, 0.005
#: seconds after the end of a process within which the next one finds the device as warm as it left it
_WARM_SECONDS = 1.0

_log = logging.getLogger(__name__)


def wholly_fresh(command: Command, seconds: float) -> Ended:
    """Start a process of its own and wait for its end. Raises TimeoutError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *command.arguments],
            cwd=command.folder,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return Ended(done.returncode, done.stdout)


def are_forked(how: str, kinds: Iterable[str]) -> bool:
    """Whether processes that time on such kinds of devices are forked. how: what --attn-fresh says."""
    return how == "forked" and _FORKED_ON.issuperset(kinds)


class FreshProcesses:
    """Starts the new processes of a run; each times when the one before has ended.

    Where a forked one cannot be had, or does not do what was asked for, that one and all later ones are wholly fresh.
    """

    #: elsewhere a library that has threads may not live through a fork, and nobody says whether it has
    can_be_served = sys.platform == "linux"

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._prepared: dict[Path, _Prepared] = {}
        self._can_be_prepared = True
        self._last_ended = -math.inf

    @classmethod
    def of(cls, config: pytest.Config) -> FreshProcesses:
        """Return those of a run, which end with it."""
        if _FRESH not in config.stash:
            config.stash[_FRESH] = made = cls()
            config.add_cleanup(made.close)
        return config.stash[_FRESH]

    def start_ahead(self, like: Command) -> None:
        """Have the server import what it needs while this process goes on; it serves commands like this one."""
        if self.can_be_served and self._server is None:
            with suppress(ServerError):  # whoever needs it tries again, and says why it cannot serve
                self._server = ForkServer(like, modules_ahead())

    def prepare(self, commands: Sequence[Command]) -> None:
        """Fork pytests that get ready beside one another, up to their first test, and wait there until they are run.

        What cannot be prepared, or finds no room in memory, is started when it is run.
        """
        if not (self.can_be_served and self._can_be_prepared):
            return
        try:
            end = time.monotonic() + _READY_SECONDS
            first, *others = commands
            self._prepared[first.times] = ready = self._prepare(first)
            ready.wait_until_ready(end)
            if ready.has_touched_cuda:
                _log.info("collecting these tests initializes CUDA: their new processes do not get ready beside one another")
                self._can_be_prepared = False
                self._end(first)
                return
            for command in others[: how_many_fit(ready.process)]:
                self._prepared[command.times] = self._prepare(command)
            for one in self._prepared.values():
                one.wait_until_ready(end)
        except (ServerError, TimeoutError) as error:
            _log.info("no new process could be prepared: %s", error)
            self._can_be_prepared = False
            self.close()
        except BaseException:
            self.close()
            raise

    def run(self, command: Command, seconds: float, is_forked: bool = True) -> Ended:
        """Run a pytest and wait for its end. is_forked: where it can be. Raises TimeoutError."""
        ended = self._run(command, seconds, is_forked)
        if command.times.exists():  # else it has timed nothing
            self._last_ended = time.monotonic()
        return ended

    def try_once(self, command: Command, seconds: float) -> Ended:
        """Run a pytest that may lose CUDA or its life, forked where that can be. Raises TimeoutError."""
        if self.can_be_served:
            try:
                return self._serving(command).run(command, seconds)
            except ServerError as error:
                _log.info("no server of new processes: %s", error)
            except BaseException:
                self.close()
                raise
            self.can_be_served = False
            self.close()
        return wholly_fresh(command, seconds)

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        if self._server is not None:
            self._server.close()
            self._server = None
        while self._prepared:  # only now: it would be their turn
            _, one = self._prepared.popitem()
            one.turn.close()

    def _run(self, command: Command, seconds: float, is_forked: bool) -> Ended:
        if is_forked and self.can_be_served:
            try:
                ended = self._forked(command, seconds)
                if command.is_done(ended.returncode):
                    return ended
                _log.info("a forked process ended with %d: a wholly fresh one is asked", ended.returncode)
            except ServerError as error:
                _log.info("no server of new processes: %s", error)
            except BaseException:  # it took too long, or somebody pressed Ctrl-C: what the server says next is of that process
                self.close()
                raise
            self.can_be_served = False
            self.close()
            command.times.unlink(missing_ok=True)
        return wholly_fresh(command, seconds)

    def _prepare(self, command: Command) -> _Prepared:
        turn = Turn(command.times.with_name("turn"))
        environment = {**command.environment, TURN_VARIABLE: str(turn.path)}
        return _Prepared(self._serving(command).start(command._replace(environment=environment)), turn)

    def _end(self, command: Command) -> None:
        """End what was prepared. Raises TimeoutError, and ServerError."""
        one = self._prepared[command.times]
        self._serving(command).end(one.process)
        del self._prepared[command.times]
        one.turn.close()

    def _forked(self, command: Command, seconds: float) -> Ended:
        """Run what was prepared, or is forked now. Raises TimeoutError, and ServerError."""
        server, prepared = self._serving(command), self._prepared.pop(command.times, None)
        if prepared is None:
            return server.run(command, seconds)
        prepared.turn.give(is_warm=time.monotonic() - self._last_ended < _WARM_SECONDS)
        return server.finish(command, prepared.process, seconds)

    def _serving(self, command: Command) -> ForkServer:
        """Return the server, a new one where the last was started in another environment."""
        if self._server is not None and not self._server.is_like(command):
            self.close()
        if self._server is None:
            self._server = ForkServer(command, modules_ahead())
        return self._server


def how_many_fit(process: int) -> int:
    """Return how many further processes like this one fit into half of the memory that is left. Linux only.

    Workers of xdist leave each other their share.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    try:
        taken = _kilobytes(Path(f"/proc/{process}/status"), "RssAnon")
        left = min(_kilobytes(Path("/proc/meminfo"), "MemAvailable"), _kilobytes_of_group())
        return int(left / 2 / workers / max(taken, 1))
    except OSError:  # it has ended
        return 0


def _kilobytes_of_group(group: Path = Path("/sys/fs/cgroup")) -> float:
    """Return what this container may still take, infinity where nothing limits it."""
    try:
        limit, taken = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return (int(limit) - int(taken)) / 1024
    except (OSError, ValueError):  # no such group, or "max"
        return math.inf


def _kilobytes(path: Path, name: str) -> int:
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next((int(text.split()[0]) for key, _, text in lines if key == name), 0)


class _Prepared(NamedTuple):
    """A pytest that is ready, or has ended because it could not get ready."""

    process: int
    turn: Turn

    def wait_until_ready(self, end: float) -> None:
        """Wait until it is. Raises TimeoutError."""
        while not self.turn.is_awaited and not has_ended(self.process):
            if time.monotonic() > end:
                raise TimeoutError("it takes too long")
            time.sleep(_LOOK_SECONDS)

    @property
    def has_touched_cuda(self) -> bool:
        return self.turn.is_awaited and self.turn.has_touched_cuda


_FRESH = pytest.StashKey[FreshProcesses]()
