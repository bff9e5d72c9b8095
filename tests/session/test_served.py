"""Forked new processes: each is what a wholly fresh one is, and what goes wrong with them costs time at most."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.torch_for_servers import TORCH

import pytest_attn
from pytest_attn.session import forked, served
from pytest_attn.session.forked import Command, ForkServer, ServerError, modules_ahead
from pytest_attn.session.served import FreshProcesses, wholly_fresh
from pytest_attn.session.turns import Turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

#: tells all that a process can see of itself
SELF = """
import glob, json, os, random, select, sys, threading, warnings
import numpy.random

def test_self():
    main = sys.modules["__main__"]
    told = dict(
        pid=os.getpid(), parent=os.getppid(), group=os.getpgid(0), argv=sys.argv, orig_argv=sys.orig_argv,
        executable=sys.executable, flags=str(sys.flags), path=sys.path, folder=os.getcwd(), environment=dict(os.environ),
        streams=[(os.isatty(number), os.readlink(f"/proc/self/fd/{number}")) for number in (0, 1, 2)],
        opened=[os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)],
        main=(main.__name__, main.__spec__ and main.__spec__.name, main.__file__),
        buffered=[sys.__stdout__.line_buffering, sys.__stdout__.encoding, sys.__stderr__.line_buffering],
        threads=threading.active_count(), umask=os.umask(0o22), loaded="test_before" in sys.modules,
        random=[random.random(), numpy.random.rand()], was_here=hasattr(json, "was_here"), mask=repr(os.sched_getaffinity(0)),
    )
    json.was_here = True
    with open(os.environ["PYTEST_ATTN_RUNS"], "w") as file:
        json.dump(told, file)
"""
#: what may differ between two wholly new processes, and the parts of it that are asked for below
DIFFERENT = ("pid", "parent", "group", "random", "streams", "opened")


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return a function that makes the command of a pytest on one test file, where torch is a fake one."""
    torch = tmp_path / "torch_for_servers"
    torch.mkdir()
    (torch / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{torch}{os.pathsep}{Path(pytest_attn.__file__).parent.parent}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")

    def command(source, tests=1, **environment):
        (folder / "test_it.py").write_text(source)
        times, output = tmp_path / "times", tmp_path / "output"
        times.unlink(missing_ok=True)
        told = {**os.environ, "PYTEST_ATTN_RUNS": str(times), "PYTEST_ATTN_OWN": str(os.getpid()), **environment}
        return Command(["-q", "-p", "no:cacheprovider", "test_it.py"], told, folder, times, output, tests)

    return command


@pytest.fixture
def serve(ask):
    """Return a function that starts a server; all are ended."""
    started = []

    def start(modules=("pytest", "torch", "numpy.random"), **environment):
        started.append(ForkServer(ask("", **environment), modules))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def fresh(monkeypatch):
    """Return the starter of a run's processes, ended with the test."""
    monkeypatch.setattr(served, "modules_ahead", lambda: ["pytest", "torch"])
    made = FreshProcesses()
    yield made
    made.close()


def what_it_saw(command, run):
    ended = run(command, 60)
    assert ended.returncode == 0, ended.output
    return json.loads(command.times.read_text())


def test_a_forked_process_sees_what_a_wholly_fresh_one_sees(ask, serve):
    os.environ["ADDED_LATER"] = "yes"  # not in the server's environment
    try:
        server = serve()
        forked = what_it_saw(ask(SELF, CHANGED="to this"), server.run)
        fresh = what_it_saw(ask(SELF, CHANGED="to this"), wholly_fresh)
    finally:
        del os.environ["ADDED_LATER"]
    own = forked["environment"].pop("PYTEST_ATTN_OWN")
    assert own.split(",") == [fresh["environment"].pop("PYTEST_ATTN_OWN"), str(server.pid)], "the server is ours"
    assert {name: forked[name] for name in forked.keys() - set(DIFFERENT)} == {
        name: fresh[name] for name in fresh.keys() - set(DIFFERENT)
    }
    assert forked["environment"]["CHANGED"] == "to this"
    assert forked["parent"] == server.pid
    assert forked["group"] == forked["pid"], "a limit of time ends this group only"
    assert forked["streams"][0] == [False, "/dev/null"]
    assert not [name for name in forked["opened"] if "socket" in name], "it holds the line to the server's parent"


def test_two_forked_processes_are_two(ask, serve):
    server = serve()
    first, second = (what_it_saw(ask(SELF), server.run) for _ in range(2))
    assert len({first["pid"], second["pid"], server.pid, os.getpid()}) == 4
    assert not first["was_here"]
    assert not second["was_here"], "what one process changes, another one sees"
    assert first["random"][0] != second["random"][0]
    assert first["random"][1] != second["random"][1]


def test_a_plugin_that_is_named_may_be_imported_ahead(ask, serve):
    server = serve(["pytest", "torch", "pytest_attn.plugin"])
    command = ask("def test_it():\n    pass\n")
    named = ["-p", "pytest_attn.plugin", "-W", "error::pytest.PytestAssertRewriteWarning", *command.arguments]
    ended = server.run(command._replace(arguments=named), 60)
    assert ended.returncode == 0, ended.output


def test_a_forked_process_leaves_no_file_and_says_what_it_printed(ask, serve, tmp_path):
    server = serve()
    command = ask("import sys\ndef test_it(capfd):\n    with capfd.disabled():\n        print('here', file=sys.stderr)\n")
    before = set(tmp_path.rglob("*")) - set(tmp_path.rglob("__pycache__/*"))
    ended = server.run(command, 60)
    assert "here" in ended.output
    assert "1 passed" in ended.output
    after = {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)}
    assert after - before == {command.output}


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("initialized", "CUDA is initialized"),
        ("asked", "CUDA was asked for something while modules were imported"),
        ("device", "/dev/full is open"),
        ("thread", "2 threads run"),
        ("missing", "torch was not imported"),
        ("crash", "it has ended|it was cut off|it does not listen"),
    ],
)
def test_a_server_that_is_not_as_good_as_new_forks_nothing(serve, planted, words):
    with pytest.raises(ServerError, match=words):
        serve(["torch"], FAKE_TORCH=planted)


def test_without_a_server_all_processes_are_wholly_fresh(ask, fresh):
    saw = [what_it_saw(ask(SELF, FAKE_TORCH=planted), fresh.run) for planted in ("initialized", "")]
    assert [one["parent"] for one in saw] == [os.getpid()] * 2
    assert not fresh.can_be_served


def test_a_server_looks_at_itself_before_each_fork(ask, serve):
    server = serve(FAKE_TORCH="later")
    what_it_saw(ask(SELF), server.run)
    os.kill(server.pid, signal.SIGUSR1)
    with pytest.raises(ServerError, match="CUDA is initialized"):
        server.run(ask(SELF), 60)


#: in a forked process, this goes wrong; a wholly fresh one, whose parent is these tests' own, does what it should
ONLY_FORKED = """
import os, signal, time
def test_it():
    with open(os.environ["PYTEST_ATTN_RUNS"], "a") as file:
        print(os.getpid(), file=file)
    if os.getppid() != int(os.environ["TESTS"]):
        {fault}
"""


@pytest.mark.parametrize(
    "fault",
    [
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "os._exit(0 if os.unlink(os.environ['PYTEST_ATTN_RUNS']) else 0)",
        "raise RuntimeError('cannot be forked')",
    ],
    ids=["the server dies", "it crashes", "it leaves nothing", "it raises"],
)
def test_what_goes_wrong_in_a_forked_process_is_done_by_a_wholly_fresh_one(ask, fresh, fault):
    command = ask(ONLY_FORKED.format(fault=fault), TESTS=str(os.getpid()))
    ended = fresh.run(command, 60)
    assert ended.returncode == 0, ended.output
    assert len(command.times.read_text().split()) == 1, "what the first has left is no time"
    assert not fresh.can_be_served, "nor is another one forked"


#: never ends; tells its own pid and that of a process of its own
HANG = """
import os, subprocess, time
def test_it():
    other = subprocess.Popen(["sleep", "60"])
    with open(os.environ["PYTEST_ATTN_RUNS"], "w") as file:
        file.write(f"{os.getpid()} {other.pid}")
    time.sleep(60)
"""


def test_a_forked_process_that_times_less_than_a_wholly_fresh_one_is_not_believed(ask, fresh):
    """As where a library cannot be used in a fork, and its tests are skipped."""
    counted = """
import os
def test_it():
    lines = 2 if os.getppid() == int(os.environ["TESTS"]) else 1
    with open(os.environ["PYTEST_ATTN_RUNS"], "a") as file:
        file.write("time\\n" * lines)
"""
    command = ask(counted, tests=2, TESTS=str(os.getpid()))
    assert fresh.run(command, 60).returncode == 0
    assert command.times.read_text().split() == ["time", "time"]


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(ask, fresh, monkeypatch):
    command = ask(HANG)
    server = fresh._serving(command)
    answer = server._answer

    def waited_long_enough(wanted, end):
        if wanted == "returncode":
            wait_until(lambda: command.times.exists() and len(command.times.read_text().split()) == 2)
            end = time.monotonic()
        return answer(wanted, end)

    monkeypatch.setattr(server, "_answer", waited_long_enough)
    with pytest.raises(TimeoutError):
        fresh.run(command, 60)
    pids = [*map(int, command.times.read_text().split())]
    wait_until(lambda: all(map(is_gone, pids)))
    assert fresh.can_be_served
    assert what_it_saw(ask(SELF), fresh.run)["parent"] != os.getpid(), "a new server"


def test_ctrl_c_ends_the_process_and_its_server(ask, fresh, monkeypatch):
    """The wait for the process is interrupted, in the terminal of which it is not."""
    server = fresh._serving(ask(SELF))
    server.wait_until_ready()
    answers = iter(("started", KeyboardInterrupt))
    answer = server._answer

    def interrupted(wanted, end):
        if next(answers) is KeyboardInterrupt:
            raise KeyboardInterrupt
        interrupted.child = answer(wanted, end)
        return interrupted.child

    monkeypatch.setattr(server, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh.run(ask("import time\ndef test_it():\n    time.sleep(60)\n"), 60)
    wait_until(lambda: is_gone(interrupted.child) and is_gone(server.pid))


def test_nothing_outlives_the_process_that_waits_even_if_it_is_killed(ask):
    command = ask(HANG)
    script = f"""
from pathlib import Path
from pytest_attn.session.forked import Command, ForkServer
command = Command({command.arguments!r}, {dict(command.environment)!r}, Path({str(command.folder)!r}),
                  Path({str(command.times)!r}), Path({str(command.output)!r}), 1)
server = ForkServer(command, ["pytest", "torch"])
server.wait_until_ready()
print(server.pid, flush=True)
server.run(command, 60)
"""
    waiting = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=command.environment)
    server = int(waiting.stdout.readline())
    wait_until(lambda: command.times.exists() and len(command.times.read_text().split()) == 2)
    waiting.kill()
    waiting.wait()
    waiting.stdout.close()
    pids = [server, *map(int, command.times.read_text().split())]
    wait_until(lambda: all(map(is_gone, pids)))


def test_a_server_ends_with_the_run(ask, fresh):
    cleanups = []
    config = SimpleNamespace(stash=pytest.Stash(), add_cleanup=cleanups.append)
    processes = FreshProcesses.of(config)
    assert FreshProcesses.of(config) is processes
    server = what_it_saw(ask(SELF), processes.run)["parent"]
    assert what_it_saw(ask(SELF), processes.run)["parent"] == server, "one server for all"
    (close,) = cleanups
    close()
    assert is_gone(server)


def test_another_environment_is_another_server(ask, fresh):
    first = what_it_saw(ask(SELF), fresh.run)
    second = what_it_saw(ask(SELF, OMP_PROC_BIND="true"), fresh.run)
    third = what_it_saw(ask(SELF, OMP_PROC_BIND="true", PYTEST_ATTN_MODES="elsewhere"), fresh.run)
    assert first["parent"] != second["parent"]
    assert second["parent"] == third["parent"], "what is told to each process makes no difference"
    assert is_gone(first["parent"])


def test_nothing_is_forked_where_it_is_not_asked_for(ask, fresh, monkeypatch):
    monkeypatch.setattr(served, "ForkServer", None)
    assert (
        what_it_saw(ask(SELF), lambda command, seconds: fresh.run(command, seconds, is_forked=False))["parent"] == os.getpid()
    )
    assert fresh.can_be_served


def test_nothing_is_forked_where_that_is_not_safe(ask, monkeypatch):
    monkeypatch.setattr(FreshProcesses, "can_be_served", False)
    monkeypatch.setattr(served, "ForkServer", None)
    assert what_it_saw(ask(SELF), FreshProcesses().run)["parent"] == os.getpid()


def test_a_server_that_takes_too_long_to_start_is_none(ask, monkeypatch):
    monkeypatch.setattr(forked, "_START_SECONDS", 0.01)
    server = ForkServer(ask(""), ["torch"])
    with pytest.raises(ServerError, match=r"it took more than 0\.01 s to start"):
        server.wait_until_ready()
    server.close()
    assert is_gone(server.pid), "one that is not ready is not waited for"


def test_a_server_that_starts_ahead_is_the_one_that_serves(ask, fresh):
    fresh.start_ahead(ask(SELF))
    server = fresh._server
    fresh.start_ahead(ask(SELF))
    assert fresh._server is server
    assert what_it_saw(ask(SELF), fresh.run)["parent"] == server.pid


def test_a_server_that_started_ahead_in_vain_ends_at_once(ask, fresh):
    fresh.start_ahead(ask(SELF))
    server = fresh._server
    fresh.close()
    assert is_gone(server.pid)


#: gets ready as the plugin does, and tells which process it is
PREPARED = """
import os, sys
from pytest_attn.session.turns import wait_for_turn
{planted}
is_warm = wait_for_turn()

def test_it():
    with open(os.environ["PYTEST_ATTN_RUNS"], "w") as file:
        file.write(f"{{os.getpid()}} {{os.getppid()}} {{is_warm}}")
"""


@pytest.fixture
def prepare(ask, fresh, tmp_path):
    """Return a function that prepares two processes; it returns their commands."""

    def two(planted="", **environment):
        commands = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            command = ask(PREPARED.format(planted=planted), **environment, PYTEST_ATTN_RUNS=str(folder / "times"))
            commands.append(command._replace(times=folder / "times", output=folder / "output"))
        fresh.prepare(commands)
        return commands

    return two


def test_prepared_processes_get_ready_together_and_wait_for_their_turn(prepare, fresh):
    first, second = prepare()
    processes = [one.process for one in fresh._prepared.values()]
    assert all(one.turn.is_awaited for one in fresh._prepared.values())
    assert fresh.run(second, 60).returncode == 0
    assert not first.times.exists(), "it did not wait"
    assert fresh.run(first, 60).returncode == 0
    ran = [one.times.read_text().split() for one in (first, second)]
    assert [int(pid) for pid, *_ in ran] == processes
    assert [is_warm for *_, is_warm in ran] == ["True", "False"], "the second ran first, on a device that idled until then"
    assert fresh.can_be_served


def test_where_processes_cannot_be_watched_none_is_prepared(prepare, fresh, monkeypatch):
    def refused(process):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(forked.os, "pidfd_open", refused)
    commands = prepare("import time; time.sleep(0.1)")
    assert not fresh._prepared
    assert [fresh.run(command, 60).returncode for command in commands] == [0, 0]


def test_processes_that_find_no_room_in_memory_are_started_when_they_are_run(prepare, fresh, monkeypatch):
    monkeypatch.setattr(served, "how_many_fit", lambda process: 0)
    commands = prepare()
    assert len(fresh._prepared) == 1
    assert [fresh.run(command, 60).returncode for command in commands] == [0, 0]
    assert fresh.can_be_served


def test_room_is_what_a_process_takes_of_half_the_memory_that_is_left(monkeypatch):
    files = {f"/proc/{os.getpid()}/status": "Name:\tpython\nRssAnon:\t  300 kB\n", "/proc/meminfo": "MemAvailable: 1900 kB\n"}
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    group = {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "1024000\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: (files | group)[str(self)])
    assert served.how_many_fit(os.getpid()) == 3
    group["/sys/fs/cgroup/memory.max"] = str(1024000 + 700 * 1024)
    assert served.how_many_fit(os.getpid()) == 1, "a container has less"
    group["/sys/fs/cgroup/memory.max"] = "max"
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    assert served.how_many_fit(os.getpid()) == 1, "another worker takes as much"
    monkeypatch.undo()
    assert served.how_many_fit(os.getpid()) > 0
    assert served.how_many_fit(2**22 - 1) == 0, "it has ended"


def test_processes_that_initialize_cuda_as_they_get_ready_do_it_one_by_one(prepare, fresh):
    """Each would be seen on the GPU while others are timed."""
    commands = prepare("if os.getppid() != int(os.environ['TESTS']): import torch; torch.planted = 'initialized'", TESTS="0")
    assert not fresh._prepared
    server = fresh._server.pid
    for command in commands:
        assert fresh.run(command, 60).returncode == 0
    assert {int(command.times.read_text().split()[1]) for command in commands} == {server}, "it was needed anew"


def test_what_cannot_get_ready_is_asked_as_a_wholly_fresh_process(prepare, fresh):
    planted = "if os.getppid() != int(os.environ['TESTS']): raise RuntimeError('cannot be forked')"
    first, _ = prepare(planted, TESTS=str(os.getpid()))
    assert fresh.run(first, 60).returncode == 0
    assert int(first.times.read_text().split()[1]) == os.getpid()


def test_what_takes_too_long_to_get_ready_is_not_prepared(prepare, fresh, monkeypatch):
    monkeypatch.setattr(served, "_READY_SECONDS", 0.5)
    planted = "import time\nif 'PYTEST_ATTN_TURN' in os.environ: time.sleep(60)"
    first, _ = prepare(planted)
    assert not fresh._prepared
    assert fresh.run(first, 60).returncode == 0


def test_what_was_prepared_in_vain_ends_with_its_server(prepare, fresh):
    prepare()
    processes = [one.process for one in fresh._prepared.values()]
    assert not any(map(is_gone, processes))
    fresh.close()
    wait_until(lambda: all(map(is_gone, processes)))


def test_the_plugin_waits_for_the_turn_of_its_process(tmp_path):
    (tmp_path / "test_it.py").write_text("from pathlib import Path\ndef test_it():\n    Path('ran').touch()\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    turn = Turn(tmp_path / "turn")
    told = {**os.environ, "PYTEST_ATTN_TURN": str(turn.path), "PYTEST_ATTN_RUNS": str(tmp_path / "times")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    process = subprocess.Popen(command, cwd=tmp_path, env=told, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: turn.is_awaited or process.poll() is not None, 60)
        assert process.poll() is None
        assert not (tmp_path / "ran").exists()
        turn.give(is_warm=False)
        assert process.wait(60) == 0
        assert (tmp_path / "ran").exists()
    finally:
        process.kill()
        process.wait()


def test_what_only_declares_things_is_imported_ahead():
    loaded = ["os", "torch", "torch.nn.attention", "torch._inductor.compile_fx", "torch.testing._internal", "triton.language"]
    loaded += ["pytest_attn.latency.gate", "pytest_attn.suite.test_latency", "pytest_attn.strategies", "test_mine", "xformers"]
    ahead = ["torch.nn.attention", "triton.language", "pytest_attn.latency.gate"]
    assert modules_ahead(loaded) == ["pytest", "torch", *ahead]
    with_hypothesis = modules_ahead([*loaded, "_hypothesis_pytestplugin"])
    assert with_hypothesis[-1].startswith("hypothesis."), "its plugin imports that at the end of every pytest"


def is_gone(pid):
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def wait_until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
