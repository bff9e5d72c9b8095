"""New processes: the same tests, each time in a new pytest, which returns its times over a channel.

Forked ones get ready beside one another, up to their first test, then wait until it is their turn, so that none disturbs
another's time.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import pytest

from pytest_attn.backends.raised import EndsTestError
from pytest_attn.latency.anchors import ATTENTION
from pytest_attn.latency.regression import FreshError, StartError
from pytest_attn.processes.fork_server import Command, ServerError, modules_ahead
from pytest_attn.processes.last_words import last_words
from pytest_attn.processes.launcher import Ended, Launcher, Process
from pytest_attn.processes.worker import own_processes
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.session.devices import count_workers
from pytest_attn.session.options import all_options

#: devices on which processes that time are forked. Not on a CPU: there copies in memory take a fifth longer in forked ones,
#: see docs/results/latency.md
_FORKED_ON = frozenset(("cuda",))
_SECONDS_PER_PROCESS = 1800
#: seconds that processes may take to get ready beside one another
_READY_SECONDS = 300
#: seconds after the end of a process within which the next one finds the device as warm as it left it
_COOLING_SECONDS = 1.0
#: by what factor the attention control of a process may differ from that of most
_OFF = 1.15
#: further processes for what was disturbed in some of the first
MORE_PROCESSES = 5

#: what measurements returned from new processes: their key, p50, anchors and so on, and the number of their process
Runs: TypeAlias = list[dict[str, Any]]

_log = logging.getLogger(__name__)


# -- what new processes do ------------------------------------------------------------------------------------------


def fresh_runs(
    config: pytest.Config,
    names: Sequence[str],
    processes: int,
    progress: Callable[[int], None] = lambda done: None,
    modes: Mapping[str, str] | None = None,
    lacking: Callable[[Runs], Sequence[str]] = lambda found: (),
    more: int = MORE_PROCESSES,
    is_forked: bool = False,
    placed: Callable[[int, Command], Command] = lambda number, command: command,
    pool_of: Callable[[int], WorkerPool | None] = lambda number: None,
) -> Runs:
    """Run the named items in `processes` fresh pytests, one after the other; return what each of their measurements returned.

    modes: for new baselines, the mode of each case by its key, so that all processes time it alike. lacking: which items
    are to be run once more, judging by what was found so far; in up to `more` further processes. is_forked: whether a
    server may fork them. placed: what else becomes of the command of a process; pool_of: what starts it, where that is not the
    run's. Where more processes were disturbed than may be added, no others are started.

    Raises FreshError where a process could not run them, EndsTestError where one left as if it had; a test that fails in
    one is only missing from what it returned.
    """
    found: Runs = []
    own = WorkerPool.of(config)
    pools = {number: pool_of(number) or own for number in range(processes + more)}
    with ProcessFolder() as folder:

        def command_of(number: int, wanted: Sequence[str]) -> Command:
            own = {"number": number, "modes": dict(modes or {})}
            return placed(number, worker_command(config, Path(folder) / str(number), _shuffled(wanted, number), own))

        commands = [command_of(number, names) for number in range(processes)]
        try:
            for pool in dict.fromkeys(pools.values()) if is_forked else ():
                pool.prepare([command for number, command in enumerate(commands) if pools[number] is pool])
            for number, command in enumerate(commands):
                progress(number)
                found += _runs(number, pools[number], command, is_forked)
                if not is_forked and _are_too_many_disturbed(found, more):  # what is forked is ready, and takes little
                    return found
        except BaseException:
            for pool in pools.values():
                pool.close()  # what was prepared is not run any more
            raise
        for number in range(processes, processes + more):
            if not (wanted := lacking(found)):
                break
            progress(number)
            found += _runs(number, pools[number], command_of(number, wanted), is_forked)
    return found


def _are_too_many_disturbed(runs: Runs, more: int) -> bool:
    """Return whether each case was disturbed in more processes than may be added."""
    processes = len({run["process"] for run in runs})
    return bool(runs) and all(processes - len(undisturbed(runs, run["key"], processes)) > more for run in runs)


def prepare_fresh_runs(config: pytest.Config) -> None:
    """Have the server that forks new processes start while this process goes on: some are sure to be wanted."""
    nothing = Path(os.devnull)
    like = Command([], worker_environment(), config.invocation_params.dir, nothing, {})
    WorkerPool.of(config).launcher.start_ahead(like)


def undisturbed(runs: Runs, key: str, processes: int) -> Runs:
    """Return a case's undisturbed runs, at most so many, one of each process: a second run of one process adds no value.

    One beside whose others the attention control took another time was disturbed by what nobody saw.
    """
    mine = {run["process"]: run for run in reversed(runs) if run["key"] == key and not run["disturbances"]}
    beside = {process: run.get("anchors", {}).get(ATTENTION, 1.0) for process, run in mine.items()}
    usual = median(beside.values() or [1.0])
    return [mine[one] for one in sorted(mine) if usual / _OFF < beside[one] < usual * _OFF][:processes]


def is_lacking(runs: Runs, key: str, processes: int) -> bool:
    """Return whether some runs of a case were disturbed, and not all: then further processes may help."""
    timed = len({run["process"] for run in runs if run["key"] == key})
    return 0 < len(undisturbed(runs, key, processes)) < min(processes, timed)


class Isolated(NamedTuple):
    """What a process that may be lost has left: results that it returned, whether it ended well, and its last words.

    has_left: whether it ended with exit code 0 before its test was over, which only the test's own code does.
    """

    results: Sequence[dict[str, Any]]
    is_well: bool
    last_words: str
    has_left: bool = False


def run_isolated(config: pytest.Config, name: str, invariants: Sequence[str], environment: Mapping[str, str]) -> Isolated:
    """Run an item in a process that may be lost, which runs these invariants only. environment: more variables of it."""
    with ProcessFolder() as folder:
        command = worker_command(config, Path(folder) / "0", [name], {"invariants": list(invariants)})
        command = command._replace(environment={**command.environment, **environment})
        done = WorkerPool.of(config).run_once(command, _SECONDS_PER_PROCESS)
    if done.returncode is None:
        return Isolated(done.messages, False, f"it took more than {_SECONDS_PER_PROCESS} s")
    if has_left(done):
        return Isolated(done.messages, False, _LEFT, has_left=True)
    is_well = done.is_finished and done.returncode == pytest.ExitCode.OK
    return Isolated(done.messages, is_well, last_words(done.output))


#: what is said of a process that has
_LEFT = "it left the interpreter with exit code 0 before its test was over"


def has_left(done: Ended) -> bool:
    """Return whether a process ended with exit code 0 although its pytest was not through."""
    return done.returncode == pytest.ExitCode.OK and not done.is_finished


def are_forked(how: str, kinds: Iterable[str]) -> bool:
    """Return whether processes that time on such kinds of devices are forked. how: what attn_fresh says."""
    return how == "forked" and _FORKED_ON.issuperset(kinds)


def _shuffled(names: Sequence[str], number: int) -> list[str]:
    """Return each name once, in the order of a process: the same neighbors each time would be part of what is measured."""
    order = list(dict.fromkeys(names))
    random.Random(number).shuffle(order)
    return order


def _runs(number: int, pool: WorkerPool, command: Command, is_forked: bool) -> Runs:
    """Run a process and return what it returned. Raises FreshError, and EndsTestError where a kernel has ended it."""
    done = pool.run(command, _SECONDS_PER_PROCESS, is_forked)
    if done.returncode is None:
        raise FreshError(f"it took more than {_SECONDS_PER_PROCESS} s")
    if has_left(done):
        raise EndsTestError(f"a new process could not time it: {_LEFT}")
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not done.messages:
        raise StartError(f"a new process could not run it: {last_words(done.output)}")
    return [{**run, "process": number} for run in done.messages]


# -- the same pytest once more -------------------------------------------------------------------------------------------


def worker_command(config: pytest.Config, folder: Path, names: Sequence[str], own: Mapping[str, object]) -> Command:
    """Return the command of a worker that runs the named items as this pytest would. folder: for what it leaves; it is made.

    own: what else its first message says.
    """
    folder.mkdir()
    options = {**_options(folder), "attn_seed": config.getoption("attn_seed")}
    told = {"tests": list(names), "options": options, "waiting": sorted(own_processes()), **own}
    arguments = _arguments(config, folder)
    return Command(arguments, worker_environment(), config.invocation_params.dir, folder / "output", told)


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: this process's, but for what says which test and which worker of xdist this is."""
    named = ("PYTEST_XDIST", "PYTEST_CURRENT_TEST")
    return {name: value for name, value in os.environ.items() if not name.startswith(named)}


def _arguments(config: pytest.Config, folder: Path) -> list[str]:
    """Return the arguments of this pytest, and what must be known before they are parsed."""
    plugins = config.pluginmanager
    folder_of_call = config.invocation_params.dir
    given = [
        one
        for one in map(str, config.invocation_params.args)
        if not one.startswith("@") or (folder_of_call / one[1:]).is_file()  # not /dev/fd/63, which this pytest has read
    ]
    own = ["-p", "pytest_attn.processes.worker", f"--rootdir={config.rootpath}"]
    if config.inipath:
        own.append(f"-c{config.inipath}")  # its long name is of pytest 7.4
    if plugins.hasplugin("cacheprovider"):
        own.append(f"--override-ini=cache_dir={folder / 'cache'}")
    if plugins.hasplugin("_cov"):
        own.append("--no-cov")
    names = given.index("--") if "--" in given else len(given)  # what follows are names
    return [*given[:names], *own, *given[names:]]


def _options(folder: Path) -> dict[str, object]:
    """Return what else overrides the command line of a worker, by the names in `config.option`."""
    own = {one.dest: False if one.is_switch else one.default for one in all_options() if not one.in_child}
    return {**own, "attn_latency": "auto", "basetemp": str(folder / "tmp")}


# -- the processes -------------------------------------------------------------------------------------------------------


class WorkerPool:
    """Starts the new processes of a run; each times when the one before has ended.

    Where a forked one cannot be had, or does not do what was asked for, that one and all later ones are wholly fresh.
    """

    def __init__(self) -> None:
        self.launcher = Launcher(modules_ahead)
        self.prepared: dict[Path, Process] = {}
        self._can_be_prepared = True
        self._last_ended = -math.inf

    @classmethod
    def of(cls, config: pytest.Config) -> WorkerPool:
        """Return that of a run, which ends with it."""
        if _POOL not in config.stash:
            config.stash[_POOL] = made = cls()
            config.add_cleanup(made.close)
        return config.stash[_POOL]

    def prepare(self, commands: Sequence[Command]) -> None:
        """Fork pytests that get ready beside one another, up to their first test, and wait there until they are run.

        What cannot be prepared, or finds no room in memory, is started when it is run.
        """
        if not self._can_be_prepared:
            return
        end = time.monotonic() + _READY_SECONDS
        first, *others = commands
        try:
            if (process := self._fork_gated(first)) is None:
                return
            if self._touches_cuda(process, end):
                _log.info("collecting these tests initializes CUDA: their new processes do not get ready beside one another")
                self._can_be_prepared = False
                self.prepared.pop(first.output).kill()
                return
            started = [self._fork_gated(command) for command in others[: how_many_fit(process.pid)]]
            for one in filter(None, started):
                self._touches_cuda(one, end)
        except (ServerError, TimeoutError) as error:
            _log.info("no new process could be prepared: %s", error)
            self._can_be_prepared = False
            self.close()
        except BaseException:
            self.close()
            raise

    def run(self, command: Command, seconds: float, is_forked: bool = True) -> Ended:
        """Run a pytest and wait for its end. is_forked: where it can be."""
        ended = self._run(command, seconds, is_forked)
        if ended.messages:  # else it has timed nothing
            self._last_ended = time.monotonic()
        return ended

    def run_once(self, command: Command, seconds: float) -> Ended:
        """Run a pytest that may lose CUDA or its life, forked where that can be."""
        process = self.launcher.start(command)
        try:
            return process.finish(seconds)
        except ServerError as error:
            self._stop_forking(str(error))
            return self.launcher.start(command).finish(seconds)

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        self.launcher.close()
        for process in self.prepared.values():
            process.channel.close()
        self.prepared.clear()

    def _run(self, command: Command, seconds: float, is_forked: bool) -> Ended:
        process = self._ready_process(command) if is_forked else None
        if process is not None:
            try:
                ended = process.finish(seconds)
                tests: Any = command.told["tests"]
                is_done = ended.returncode == pytest.ExitCode.OK and len(ended.messages) >= len(tests)
                if ended.returncode is None or is_done:
                    return ended
                reason = f"one ended with {ended.returncode}, and a wholly fresh one is asked"
            except ServerError as error:
                reason = str(error)
            self._stop_forking(reason)
        return self.launcher.start(command, is_forked=False).finish(seconds)

    def _ready_process(self, command: Command) -> Process | None:
        """Return what was prepared, whose turn it is now, or is forked now; None where there is none."""
        process = self.prepared.pop(command.output, None)
        if process is None:
            return self.launcher.fork(command)
        process.channel.send(is_warm=time.monotonic() - self._last_ended < _COOLING_SECONDS)
        return process

    def _fork_gated(self, command: Command) -> Process | None:
        """Return a forked process that waits for its turn before its first test."""
        process = self.launcher.fork(command._replace(told={**command.told, "is_gated": True}))
        if process is not None:
            self.prepared[command.output] = process
        return process

    def _touches_cuda(self, process: Process, end: float) -> bool:
        """Wait until a process is ready, or has ended before that; return whether it has initialized CUDA.

        Raises TimeoutError, and ServerError.
        """
        ready = process.await_message(end)
        return ready is not None and bool(ready["has_touched_cuda"])

    def _stop_forking(self, reason: str) -> None:
        self.launcher.stop_forking(reason)
        self.close()


def how_many_fit(process: int) -> int:
    """Return how many further processes like this one fit into half of the memory that is left. Linux only.

    Workers of xdist leave each other their share.
    """
    workers = count_workers()
    try:
        taken = _kilobytes(Path(f"/proc/{process}/status"), "RssAnon")
        left: float = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
        with suppress(OSError, ValueError):  # no such group, or "max": nothing limits this container
            limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            left = min(left, (limit - used) / 1024)
        return int(left / 2 / workers / max(taken, 1))
    except OSError:  # it has ended
        return 0


_GROUP = Path("/sys/fs/cgroup")


def _kilobytes(path: Path, name: str) -> int:
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next((int(text.split()[0]) for key, _, text in lines if key == name), 0)


_POOL = pytest.StashKey[WorkerPool]()
