"""New processes: the same tests, each time in a new pytest, which hands the times back in a file."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from pytest_attn.latency.judge import FreshError, StartError
from pytest_attn.session.child import ASKED_VARIABLE, MODES_VARIABLE, OWN_VARIABLE, RUNS_VARIABLE, own_processes
from pytest_attn.session.forked import Command
from pytest_attn.session.options import declared_options
from pytest_attn.session.served import FreshProcesses
from pytest_attn.session.settings import Settings

#: options of pytest and its plugins that a new process must not repeat: outputs, other processes, stopping early
_DROPPED_WITH_VALUE = frozenset(
    (
        *("-n", "--numprocesses", "--maxprocesses", "--dist", "--tx", "--junitxml", "--junit-xml"),
        *("--maxfail", "--report-log", "--html", "--durations"),
        *("--benchmark-min-time", "--benchmark-max-time"),
        *("--benchmark-min-rounds", "--benchmark-timer", "--benchmark-calibration-precision", "--benchmark-group-by"),
        *("--benchmark-columns", "--benchmark-sort", "--benchmark-storage", "--benchmark-save", "--benchmark-json"),
        *("--benchmark-name", "--benchmark-netrc", "--benchmark-time-unit", "--benchmark-warmup-iterations"),
    )
)
_DROPPED = frozenset(
    (
        *("-x", "--exitfirst", "--lf", "--last-failed", "--ff"),
        *("--failed-first", "--nf", "--new-first", "--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--pdb", "--trace"),
        *("-s", "--collect-only", "--co", "--cache-clear", "-f", "--looponfail"),
    )
)
#: options whose value is the next word, which may look like a test
_WITH_VALUE = frozenset(
    (
        *("-p", "-k", "-m", "-c", "-o", "-W", "-r", "--rootdir", "--confcutdir", "--ignore", "--ignore-glob", "--deselect"),
        *("--config-file", "--override-ini", "--import-mode", "--pythonwarnings", "--log-level", "--log-file", "--color"),
    )
)
#: our own options, by their spelling
_OWN = {one.flag: one for one in declared_options(Settings)}
_SECONDS_PER_PROCESS = 1800
#: further processes for what was disturbed in some of the first
MORE_PROCESSES = 5

#: what measurements wrote in new processes: their key, p50, anchors and so on, and the number of their process
Runs: TypeAlias = list[dict[str, Any]]


def fresh_runs(
    config: pytest.Config,
    names: Sequence[str],
    processes: int,
    progress: Callable[[int], None] = lambda done: None,
    modes: Mapping[str, str] | None = None,
    lacking: Callable[[Runs], Sequence[str]] = lambda found: (),
    more: int = MORE_PROCESSES,
    is_forked: bool = False,
) -> Runs:
    """Run the named items in `processes` fresh pytests, one after the other; return what each of their measurements wrote.

    modes: for new baselines, the mode of each case by its key, so that all processes time it alike. lacking: which items
    are to be run once more, judging by what was found so far; in up to `more` further processes. is_forked: whether a
    server may fork them.

    Raises FreshError where a process could not run them; a test that fails in one is only missing from what it wrote.
    """
    found: Runs = []
    fresh = FreshProcesses.of(config)
    with tempfile.TemporaryDirectory(prefix="pytest-attn-") as folder:

        def command_of(number: int, wanted: Sequence[str]) -> Command:
            return _command(config, _shuffled(wanted, number), Path(folder) / str(number), modes)

        commands = [command_of(number, names) for number in range(processes)]
        try:
            if is_forked:
                fresh.prepare(commands)
            for number, command in enumerate(commands):
                progress(number)
                found += _runs(number, fresh, command, is_forked)
        except BaseException:
            fresh.close()  # what was prepared is not run any more
            raise
        for number in range(processes, processes + more):
            progress(processes)
            if not (wanted := lacking(found)):
                break
            found += _runs(number, fresh, command_of(number, wanted), is_forked)
    return found


def prepare_fresh_runs(config: pytest.Config) -> None:
    """Have the server that forks new processes start while this process goes on: some are sure to be wanted."""
    nothing = Path(os.devnull)
    FreshProcesses.of(config).start_ahead(
        Command([], _environment(nothing), config.invocation_params.dir, nothing, nothing, 0)
    )


def undisturbed(runs: Runs, key: str, processes: int) -> Runs:
    """Return a case's undisturbed runs, at most so many, one of each process: a second run of one process adds no value."""
    mine = {run["process"]: run for run in reversed(runs) if run["key"] == key and not run["disturbances"]}
    return [mine[process] for process in sorted(mine)][:processes]


def is_lacking(runs: Runs, key: str, processes: int) -> bool:
    """Whether some runs of a case were disturbed, and not all: then further processes may help."""
    are_some_disturbed = any(run["disturbances"] for run in runs if run["key"] == key)
    return are_some_disturbed and 0 < len(undisturbed(runs, key, processes)) < processes


class Apart(NamedTuple):
    """What a process that may be lost has left: lines that it handed over, whether it ended well, and its last words."""

    lines: Runs
    is_well: bool
    last_words: str


def asked_apart(config: pytest.Config, name: str, invariants: Sequence[str]) -> Apart:
    """Run an item in a process that may be lost, which asks these invariants only."""
    with tempfile.TemporaryDirectory(prefix="pytest-attn-") as folder:
        command = _command(config, [name], Path(folder) / "0", None)
        command = command._replace(environment={**command.environment, ASKED_VARIABLE: ",".join(invariants)})
        try:
            done = FreshProcesses.of(config).try_once(command, _SECONDS_PER_PROCESS)
            is_well, last_words = done.returncode == pytest.ExitCode.OK, _last_words(done.output)
        except TimeoutError:
            is_well, last_words = False, f"it took more than {_SECONDS_PER_PROCESS} s"
        lines = command.times.read_text(encoding="utf-8").splitlines() if command.times.exists() else []
        return Apart([json.loads(line) for line in lines], is_well, last_words)


def _shuffled(names: Sequence[str], number: int) -> list[str]:
    """Return each name once, in the order of a process: the same neighbors each time would be part of what is measured."""
    order = list(dict.fromkeys(names))
    random.Random(number).shuffle(order)
    return order


def _command(config: pytest.Config, names: Sequence[str], folder: Path, modes: Mapping[str, str] | None) -> Command:
    """Return the command of a process that times the named items. folder: for what it gets and leaves."""
    folder.mkdir()
    selected, runs = folder / "items", folder / "runs"
    selected.write_text("\n".join(names), encoding="utf-8")
    environment = _environment(runs)
    if modes:
        environment[MODES_VARIABLE] = str(folder / "modes")
        (folder / "modes").write_text(json.dumps(dict(modes)), encoding="utf-8")
    arguments = [*arguments_of(config, folder), f"@{selected}"]
    return Command(arguments, environment, config.invocation_params.dir, runs, folder / "output", len(names))


def _runs(number: int, fresh: FreshProcesses, command: Command, is_forked: bool) -> Runs:
    """Run a process and return what it wrote. Raises FreshError."""
    try:
        done = fresh.run(command, _SECONDS_PER_PROCESS, is_forked)
    except TimeoutError:
        raise FreshError(f"it took more than {_SECONDS_PER_PROCESS} s") from None
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not command.times.exists():
        raise StartError(f"a new process could not run it: {_last_words(done.output)}")
    return [{**json.loads(line), "process": number} for line in command.times.read_text(encoding="utf-8").splitlines()]


def _environment(runs: Path) -> dict[str, str]:
    """Return the environment of a new process. runs: where it writes what it timed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment[RUNS_VARIABLE] = str(runs)
    environment[OWN_VARIABLE] = ",".join(map(str, sorted(own_processes())))
    environment.pop("PYTEST_CURRENT_TEST", None)
    return environment


def arguments_of(config: pytest.Config, folder: Path) -> list[str]:
    """Return the command line of another pytest like this one, which selects nothing yet. folder: for what it leaves."""
    return [*_kept_arguments(config), *_overrides(config, folder)]


def _kept_arguments(config: pytest.Config) -> list[str]:
    """Return the command line without what it selects, without outputs, and without other processes."""
    named = set(config.args) if config.args_source == pytest.Config.ArgsSource.ARGS else set()
    return list(_without_dropped(iter(map(str, config.invocation_params.args)), named))


def _without_dropped(arguments: Iterator[str], named: set[str]) -> Iterator[str]:
    for argument in arguments:
        flag, has_value, _ = argument.partition("=")
        words = [argument]
        if not has_value and _takes_value(flag):
            words += [value for value in [next(arguments, None)] if value is not None]
        is_selection = argument in named or argument.startswith("@")
        if not is_selection and not _is_dropped(argument, flag):
            yield from words


def _takes_value(flag: str) -> bool:
    own = _OWN.get(flag)
    return flag in _DROPPED_WITH_VALUE or flag in _WITH_VALUE or (own is not None and not own.is_switch)


def _is_dropped(argument: str, flag: str) -> bool:
    own = _OWN.get(flag)
    is_ours = own is not None and not own.in_child
    return is_ours or flag in _DROPPED_WITH_VALUE or argument in _DROPPED or argument.startswith(("-n", "--benchmark"))


def _overrides(config: pytest.Config, folder: Path) -> list[str]:
    plugins = config.pluginmanager
    given = [f"--rootdir={config.rootpath}", "--attn-latency=auto", "--attn-fuzz=0"]
    if plugins.hasplugin("terminal"):
        given += ["-q", "--no-header", "--color=no"]
    if config.inipath:
        given.append(f"--config-file={config.inipath}")
    if plugins.hasplugin("cacheprovider"):
        given.append(f"--override-ini=cache_dir={folder / 'cache'}")
    if plugins.hasplugin("xdist"):
        given += ["-n", "0"]
    if plugins.hasplugin("_cov"):
        given.append("--no-cov")
    if plugins.hasplugin("junitxml") and config.getoption("xmlpath", None):
        given.append(f"--junitxml={folder / 'junit.xml'}")
    return given


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E  ", "ERROR"))]
    return (errors or lines or ["it said nothing"])[-1][:300]
