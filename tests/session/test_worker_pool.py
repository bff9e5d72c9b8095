"""Workers: a forked one is what a wholly fresh one is; what goes wrong with one costs time at most; none is left behind."""

import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.torch_for_servers import TORCH

import pytest_attn
from pytest_attn.backends.raised import EndsTestError
from pytest_attn.processes.fork_server import Command, ForkServer, ServerError, modules_ahead
from pytest_attn.processes.launcher import Ended, ForkedProcess, Launcher, StartedProcess
from pytest_attn.session import worker_pool
from pytest_attn.session.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

#: tells all that a process can see of itself
SELF = """
import glob, json, os, random, select, sys, threading, warnings
import numpy.random
from pytest_attn.processes.worker import Worker

worker = Worker.of_this_process()

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
    worker.channel.send(**told)
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
    folder, numbers = tmp_path / "suite", count()
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")

    def command(source, tests=1, **environment):
        (folder / "test_it.py").write_text(source)
        told = {"tests": ["test"] * tests}
        arguments = ["-q", "-p", "no:cacheprovider", "test_it.py"]
        return Command(arguments, {**os.environ, **environment}, folder, tmp_path / f"output-{next(numbers)}", told)

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
    monkeypatch.setattr(worker_pool, "modules_ahead", lambda: ["pytest", "torch"])
    made = WorkerPool()
    yield made
    made.close()


def forked_by(server):
    return lambda command: ForkedProcess(server, command).finish(60)


def wholly_fresh(command):
    return StartedProcess(command).finish(60)


def said(ended):
    assert ended.returncode == 0, ended.output
    (message,) = ended.messages
    return message


@pytest.mark.slow("starts processes")
def test_a_forked_process_sees_what_a_wholly_fresh_one_sees(ask, serve):
    os.environ["ADDED_LATER"] = "yes"  # not in the server's environment
    try:
        server = serve()
        forked = said(forked_by(server)(ask(SELF, CHANGED="to this")))
        fresh = said(wholly_fresh(ask(SELF, CHANGED="to this")))
    finally:
        del os.environ["ADDED_LATER"]
    assert {name: forked[name] for name in forked.keys() - set(DIFFERENT)} == {
        name: fresh[name] for name in fresh.keys() - set(DIFFERENT)
    }
    assert forked["environment"]["CHANGED"] == "to this"
    assert forked["parent"] == server.pid
    assert forked["group"] == forked["pid"], "a limit of time ends this group only"
    assert tuple(forked["streams"][0]) == (False, "/dev/null")  # a message is JSON, which has lists alone
    opened = [name.partition(":")[0] for name in forked["opened"] if not name.startswith("/")]
    assert opened == [name.partition(":")[0] for name in fresh["opened"] if not name.startswith("/")], "the server's is closed"
    assert opened.count("socket") == 1, "its channel"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("initialized", "CUDA is initialized"),
        ("asked", "CUDA was asked for something while modules were imported"),
        ("device", "/dev/full is open"),
        ("thread", "2 threads run"),
        ("missing", "torch was not imported"),
        ("unwatched", "processes cannot be watched"),
        ("crash", "it has ended"),
    ],
)
def test_a_server_that_is_not_as_good_as_new_forks_nothing(serve, planted, words):
    with pytest.raises(ServerError, match=words):
        serve(["torch"], FAKE_TORCH=planted)


#: in a forked process, this goes wrong; a wholly fresh one, whose parent is these tests' own, does what it should
ONLY_FORKED = """
import os, signal, time
from pytest_attn.processes.worker import Worker
worker = Worker.of_this_process()
def test_it():
    worker.channel.send(pid=os.getpid())
    if os.getppid() != int(os.environ["TESTS"]):
        {fault}
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "fault",
    [
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "os._exit(7)",
        "raise RuntimeError('cannot be forked')",
    ],
    ids=["the server dies", "it crashes", "it leaves", "it raises"],
)
def test_what_goes_wrong_in_a_forked_process_is_done_by_a_wholly_fresh_one(ask, fresh, fault):
    ended = fresh.run(ask(ONLY_FORKED.format(fault=fault), TESTS=str(os.getpid())), 60)
    assert is_gone(said(ended)["pid"]), "what the first has returned is no time"
    assert not fresh.launcher.can_fork, "nor is another one forked"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["the test", "the whole process"])
def test_a_forked_process_that_times_less_than_a_wholly_fresh_one_is_not_believed(ask, fresh, what):
    """As where a library cannot be used in a fork, and its tests are skipped; or where it leaves early with 0."""
    counted = """
import os
from pytest_attn.processes.worker import Worker
worker = Worker.of_this_process()
def test_it():
    is_fresh = os.getppid() == int(os.environ["TESTS"])
    for number in range(2 if is_fresh else 1):
        worker.channel.send(number=number)
    if not is_fresh and os.environ["WHAT"] == "the whole process":
        os._exit(0)
"""
    ended = fresh.run(ask(counted, tests=2, TESTS=str(os.getpid()), WHAT=what), 60)
    assert [one["number"] for one in ended.messages] == [0, 1]


def test_what_a_process_said_before_it_died_is_kept_and_what_it_prints_is_no_message(ask):
    garbage = """
import os, signal, sys
from pytest_attn.processes.worker import Worker
worker = Worker.of_this_process()
def test_it(capfd):
    with capfd.disabled():
        os.write(1, bytes(range(256)) * 1000)
        worker.channel.send(samples=[0.5] * 100_000)
        os.kill(os.getpid(), signal.SIGSEGV)
"""
    ended = wholly_fresh(ask(garbage))
    assert ended.returncode == -signal.SIGSEGV
    assert [len(one["samples"]) for one in ended.messages] == [100_000], "longer than what a socket holds"


#: never ends; tells its own pid and that of a process of its own, which holds the channel as well
HANG = """
import os, subprocess, time
from pytest_attn.processes.worker import Worker
channel = Worker.of_this_process().channel
def test_it():
    other = subprocess.Popen(["sleep", "60"], pass_fds=[channel.fileno()])
    channel.send(pids=[os.getpid(), other.pid])
    time.sleep(60)
"""


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(ask, fresh, is_forked):
    ended = fresh.run(ask(HANG), 3, is_forked)
    assert ended.returncode is None
    (message,) = ended.messages
    wait_until(lambda: all(map(is_gone, message["pids"])))
    assert fresh.launcher.can_fork
    assert (said(fresh.run(ask(SELF), 60, is_forked))["parent"] != os.getpid()) == is_forked


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_forked", [True, False])
def test_ctrl_c_ends_the_process(ask, fresh, monkeypatch, is_forked):
    """The wait for the process is interrupted, in the terminal of which it is not."""
    process = fresh.launcher.start(ask(HANG), is_forked)
    wait, waits = process._wait, count()

    def interrupted(seconds):
        if next(waits):
            raise KeyboardInterrupt
        return wait(30)

    monkeypatch.setattr(process, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.finish(60)
    wait_until(lambda: is_gone(process.pid))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_forked", [True, False])
def test_nothing_outlives_the_process_that_waits_even_if_it_is_killed(ask, is_forked):
    command = ask(HANG)
    script = f"""
from pathlib import Path
from pytest_attn.processes.fork_server import Command
from pytest_attn.processes.launcher import Launcher
command = Command({command.arguments!r}, {dict(command.environment)!r}, Path({str(command.folder)!r}),
                  Path({str(command.output)!r}), {command.told!r})
launcher = Launcher(lambda: ["pytest", "torch"])
process = launcher.start(command, is_forked={is_forked})
own, other = process.channel.recv()["pids"]
print(launcher.server.pid if launcher.server else own, own, other, flush=True)
process.finish(60)
"""
    waiting = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=command.environment)
    server, own, other = map(int, waiting.stdout.readline().split())
    assert not any(map(is_gone, (server, own, other)))
    waiting.kill()
    waiting.wait()
    waiting.stdout.close()
    wait_until(lambda: is_gone(server) and is_gone(own))
    if is_forked:  # the server has ended the group; what begins by itself leaves its own children to themselves
        wait_until(lambda: is_gone(other))
    else:
        os.kill(other, signal.SIGKILL)


def test_a_server_ends_with_the_run(ask, fresh):
    cleanups = []
    config = SimpleNamespace(stash=pytest.Stash(), add_cleanup=cleanups.append)
    pool = WorkerPool.of(config)
    assert WorkerPool.of(config) is pool
    server = said(pool.run(ask(SELF), 60))["parent"]
    assert said(pool.run(ask(SELF), 60))["parent"] == server, "one server for all"
    (close,) = cleanups
    close()
    assert is_gone(server)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("can_fork", [True, False])
def test_nothing_is_forked_where_it_is_not_asked_for_or_not_safe(ask, fresh, monkeypatch, can_fork):
    monkeypatch.setattr(Launcher, "can_fork", can_fork)
    assert said(fresh.run(ask(SELF), 60, is_forked=not can_fork))["parent"] == os.getpid()
    assert fresh.launcher.server is None


def test_a_server_that_starts_ahead_is_the_one_that_serves(ask, fresh):
    fresh.launcher.start_ahead(ask(SELF))
    server = fresh.launcher.server
    fresh.launcher.start_ahead(ask(SELF))
    assert fresh.launcher.server is server
    assert said(fresh.run(ask(SELF), 60))["parent"] == server.pid


#: gets ready as the plugin does, and tells which process it is
PREPARED = """
import os, sys
from pytest_attn.processes.worker import Worker
worker = Worker.of_this_process()
is_gated = "is_gated" in worker.told
{planted}
is_warm = worker.wait_at_gate()

def test_it():
    worker.channel.send(pid=os.getpid(), parent=os.getppid(), is_warm=is_warm)
"""


@pytest.fixture
def prepare(ask, fresh):
    """Return a function that prepares two processes; it returns their commands."""

    def two(planted="", **environment):
        commands = [ask(PREPARED.format(planted=planted), **environment) for _ in range(2)]
        fresh.prepare(commands)
        return commands

    return two


def test_prepared_processes_get_ready_together_and_wait_for_their_turn(prepare, fresh):
    first, second = prepare()
    processes = [one.pid for one in fresh.prepared.values()]
    ended = [fresh.run(second, 60)]
    assert "passed" not in first.output.read_text(), "it did not wait"
    ended.append(fresh.run(first, 60))
    assert [said(one)["pid"] for one in reversed(ended)] == processes
    assert [said(one)["is_warm"] for one in ended] == [False, True], "the second ran first, on a device that idled until then"
    assert fresh.launcher.can_fork


def test_room_is_what_a_process_takes_of_half_the_memory_that_is_left(monkeypatch):
    files = {f"/proc/{os.getpid()}/status": "Name:\tpython\nRssAnon:\t  300 kB\n", "/proc/meminfo": "MemAvailable: 1900 kB\n"}
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    group = {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "1024000\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: (files | group)[str(self)])
    assert worker_pool.how_many_fit(os.getpid()) == 3
    group["/sys/fs/cgroup/memory.max"] = str(1024000 + 700 * 1024)
    assert worker_pool.how_many_fit(os.getpid()) == 1, "a container has less"
    group["/sys/fs/cgroup/memory.max"] = "max"
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    assert worker_pool.how_many_fit(os.getpid()) == 1, "another worker takes as much"
    monkeypatch.undo()
    assert worker_pool.how_many_fit(os.getpid()) > 0
    assert worker_pool.how_many_fit(2**22 - 1) == 0, "it has ended"


def test_what_was_prepared_in_vain_ends_with_its_server(prepare, fresh):
    prepare()
    processes = [one.pid for one in fresh.prepared.values()]
    assert not any(map(is_gone, processes))
    fresh.close()
    wait_until(lambda: all(map(is_gone, processes)))


def test_a_long_first_message_waits_for_no_conftest(ask):
    """It is longer than what a channel holds; whoever sends it has no limit of time yet."""
    command = ask("import pytest\ndef test_it():\n    pass\n")
    (command.folder / "conftest.py").write_text("import time\ntime.sleep(60)\n")
    long = {**command.told, "options": {}, "modes": {str(number): "events" for number in range(100_000)}}
    begun = time.monotonic()
    process = StartedProcess(command._replace(told=long, arguments=["-p", "pytest_attn.processes.worker", *command.arguments]))
    assert time.monotonic() - begun < 30
    process.kill()


def test_a_worker_that_waits_for_nobody_ends(ask):
    process = StartedProcess(ask("", tests=0)._replace(told={"is_gated": True}))
    (ask(PREPARED.format(planted="")).folder / "test_it.py").write_text(PREPARED.format(planted=""))
    process.channel.recv(60)
    process.channel.close()
    assert process.returncode(20) == 1


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


@pytest.mark.parametrize("messages", [[], [{"key": "one", "p50": 1.0}]], ids=["said nothing", "said a time"])
def test_a_process_that_leaves_as_if_it_had_ended_well_confirms_nothing(ask, fresh, monkeypatch, messages):
    monkeypatch.setattr(WorkerPool, "run", lambda *_: Ended(0, "", messages, is_finished=False))
    with pytest.raises(EndsTestError, match="left the interpreter with exit code 0 before its test was over"):
        worker_pool._runs(0, fresh, ask(""), is_forked=False)
