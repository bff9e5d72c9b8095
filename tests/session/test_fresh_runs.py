"""New processes, one after the other: how many are started, with which tests in which order, and what they are told."""

import os
from types import SimpleNamespace

import pytest

from pytest_attn.latency.regression import StartError
from pytest_attn.processes.launcher import Ended
from pytest_attn.session import worker_pool
from pytest_attn.session.worker_pool import WorkerPool, are_forked, fresh_runs, is_lacking, undisturbed


@pytest.fixture
def started(monkeypatch):
    """Start nothing; returns what each process would have been given. A process whose number is hot is disturbed."""
    found, prepared = [], []
    found_hot, forked = set(), []

    def command(config, folder, names, own):
        return SimpleNamespace(names=names, modes=own["modes"])

    def runs(number, pool, command, is_forked):
        found.append((number, command.names, command.modes))
        forked.append(is_forked)
        hot = ["hot"] if number in found_hot else []
        return [{"key": name, "process": number, "disturbances": hot} for name in command.names]

    monkeypatch.setattr(WorkerPool, "of", lambda config: WorkerPool())
    monkeypatch.setattr(WorkerPool, "prepare", lambda self, commands: prepared.append(len(commands)))
    monkeypatch.setattr(worker_pool, "worker_command", command)
    monkeypatch.setattr(worker_pool, "_runs", runs)
    return SimpleNamespace(processes=found, prepared=prepared, hot=found_hot, forked=forked)


@pytest.fixture
def starting(monkeypatch, tmp_path):
    commands = []
    plugins = SimpleNamespace(hasplugin=lambda name: False)
    (tmp_path / "names").touch()
    arguments = ["-k", "a", "-n", "4", "@/dev/fd/63", "--", "@names", "test_a.py"]  # the first file is a pipe that was read
    invocation = SimpleNamespace(args=arguments, dir=tmp_path)
    config = SimpleNamespace(
        invocation_params=invocation,
        rootpath=tmp_path,
        inipath=None,
        pluginmanager=plugins,
        stash=pytest.Stash(),
        add_cleanup=lambda close: None,
        getoption={"attn_seed": None}.get,
    )
    process = SimpleNamespace(config=config, commands=commands, answer=Ended(0, ""))

    def run(self, command, seconds, is_forked):
        commands.append(command)
        return process.answer

    monkeypatch.setattr(WorkerPool, "run", run)
    return process


def lacking(wanted, *names):
    return lambda runs: [name for name in names if is_lacking(runs, name, wanted)]


def test_as_many_processes_are_started_as_are_wanted(started):
    shown = []
    runs = fresh_runs(None, ["a", "b"], 3, shown.append, {"a": "events"}, lacking(3, "a", "b"))
    assert [(number, sorted(names), modes) for number, names, modes in started.processes] == [
        (number, ["a", "b"], {"a": "events"}) for number in range(3)
    ]
    assert len(runs) == 6
    assert shown[:3] == [0, 1, 2]


def test_tests_have_other_neighbors_in_each_process_and_are_run_once(started):
    names = list("abcdefgh")
    fresh_runs(None, [*names, "a"], 3)
    orders = [order for _, order, _ in started.processes]
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("forked", [True, False])
def test_processes_are_forked_where_that_is_asked_for(started, forked):
    fresh_runs(None, ["a"], 2, is_forked=forked)
    assert started.forked == [forked, forked]
    assert started.prepared == ([2] if forked else []), "what is forked gets ready beside the others"


@pytest.mark.parametrize(
    ("how", "kinds", "forked"),
    [
        *[("forked", ["cuda"], True), ("forked", ["cpu"], False), ("forked", ["cuda", "cpu"], False)],
        *[("forked", ["xpu"], False), ("started", ["cuda"], False)],
    ],
)
def test_where_that_may_change_a_time_none_is_forked(how, kinds, forked):
    assert are_forked(how, kinds) is forked


def test_a_disturbed_process_is_replaced_by_a_further_one_for_the_tests_that_lack_it(started):
    started.hot.update({1, 2})
    runs = fresh_runs(None, ["a"], 2, lacking=lacking(2, "a"))
    assert [number for number, *_ in started.processes] == [0, 1, 2, 3]
    assert [run["process"] for run in undisturbed(runs, "a", 2)] == [0, 3]


def test_where_further_processes_cannot_make_up_for_it_no_more_are_started(started):
    started.hot.update({0, 1, 3})
    fresh_runs(None, ["a"], 9, lacking=lacking(9, "a"), more=2)
    assert [number for number, *_ in started.processes] == [0, 1, 2, 3]
    started.processes.clear()
    fresh_runs(None, ["a"], 9, lacking=lacking(9, "a"), more=3)
    assert [number for number, *_ in started.processes] == [*range(12)]


def test_after_five_more_processes_nothing_is_tried_again(started):
    started.hot.update(range(1, 20))
    runs = fresh_runs(None, ["a"], 3, lacking=lacking(3, "a"))
    assert [number for number, *_ in started.processes] == list(range(8))
    assert len(undisturbed(runs, "a", 3)) == 1


def test_a_second_time_in_one_process_is_no_second_value():
    runs = [{"key": "a", "process": 0, "p50": p50, "disturbances": []} for p50 in (1, 2)]
    runs += [{"key": "b", "process": 1, "p50": 3, "disturbances": []}]
    assert [run["p50"] for run in undisturbed(runs, "a", 2)] == [1]
    assert not is_lacking(runs, "a", 2), "nothing was disturbed: another process would not help"


@pytest.mark.parametrize(
    ("returncode", "output", "words"),
    [
        (2, "", "a new process could not run it: it said nothing"),
        (3, "line\nE   ImportError: no flash\nlater", "a new process could not run it: E   ImportError: no flash"),
        (4, "usage: pytest\nERROR: file not found", "a new process could not run it: ERROR: file not found"),
        (
            -11,
            "Fatal Python error: Aborted\n\nExtension modules: _",
            "a new process could not run it: Fatal Python error: Aborted",
        ),
        (0, "1 skipped", "a new process could not run it: 1 skipped"),  # and left no times
    ],
)
def test_a_process_that_could_not_run_is_told_in_its_last_words(starting, returncode, output, words):
    starting.answer = Ended(returncode, output, is_finished=returncode == 0)
    with pytest.raises(StartError) as error:
        fresh_runs(starting.config, ["a"], 1)
    assert str(error.value) == words


def test_a_process_is_told_its_tests_its_modes_and_who_waits_for_it(starting, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "this")
    starting.answer = Ended(0, "", [{"key": "a", "disturbances": []}], is_finished=True)
    assert fresh_runs(starting.config, ["a"], 1, modes={"a": "graph"}) == [{"key": "a", "disturbances": [], "process": 0}]
    (command,) = starting.commands
    assert command.told["tests"] == ["a"]
    assert command.told["modes"] == {"a": "graph"}
    assert command.told["number"] == 0
    assert command.told["waiting"] == [os.getpid()]
    assert not [name for name in command.environment if name.startswith(("PYTEST_XDIST", "PYTEST_CURRENT"))]
    root = f"--rootdir={starting.config.rootpath}"
    own = ["-p", "pytest_attn.processes.worker", root]
    assert command.arguments == ["-k", "a", "-n", "4", *own, "--", "@names", "test_a.py"], "all that this one was given"


def test_a_process_whose_attention_control_took_another_time_is_replaced():
    def beside(number, attention):
        return {"key": "a", "process": number, "disturbances": [], "anchors": {"attention": attention}}

    runs = [beside(0, 1.0), beside(1, 1.05), beside(2, 1.64), beside(3, 0.97)]
    assert [run["process"] for run in undisturbed(runs, "a", 4)] == [0, 1, 3]
    assert is_lacking(runs, "a", 4)
    assert not is_lacking(runs, "a", 3)
