"""What is said while something takes long: behind pytest's line or below it, and gone afterwards; in a log, a line."""

import fcntl
import os
import re
import struct
import termios
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from fakes.terminal import as_seen, between_tests, on_a_terminal

from pytest_attn.session import durations, passing_text
from pytest_attn.session import progress as module
from pytest_attn.session.durations import Durations, Remaining
from pytest_attn.session.passing_text import PassingText
from pytest_attn.session.progress import Progress

SLOW = """
import time
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

def slow(q, k, v):
    print("compiling")
    time.sleep(0.25)
    return sdpa(q, k, v)

@pytest.mark.attention("smoke-full", "smoke-half")
def test_it(attn):
    attn.check(slow)

def test_fails():
    print("a word")
    assert False
"""
HASTY = """
from pytest_attn.session import durations, progress
durations.SILENT_SECONDS = progress.SILENT_SECONDS = {silent}
progress.TICK, progress.RUN_SECONDS = 0.05, 10 * {silent}
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a slow kernel; returns a function that runs pytest there, on a terminal."""

    def run(*args, silent=0.1, **environment):
        (tmp_path / "test_it.py").write_text(SLOW)
        (tmp_path / "conftest.py").write_text(HASTY.format(silent=silent))
        return on_a_terminal(tmp_path, *args, **environment)

    return run


@pytest.mark.slow("times in many processes")
def test_a_slow_kernel_is_named_and_nothing_stays(project):
    written = project("-q")
    assert "checking slow on smoke-full, 0:00" in written
    assert re.search(r"checking slow on smoke-half-fp16, 0:00(, about 0:01 left)?", written)
    silent = project("-q", silent=1000)
    assert "checking" not in silent
    assert between_tests(as_seen(written)) == between_tests(as_seen(silent))


@pytest.mark.slow("times in many processes")
def test_the_time_left_is_known_from_the_run_before(project, tmp_path):
    project("-q", "-k", "smoke-full")
    (tmp_path / ".pytest_cache/v/attn/seconds").write_text('{"checking slow on smoke-full": 62.0}')
    assert re.search(r"checking slow on smoke-full, 0:00, about 1:0[12] left", project("-q", "-k", "smoke-full"))
    assert '"checking slow on smoke-full": 62.0' not in (tmp_path / ".pytest_cache/v/attn/seconds").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("verbosity", ["--verbosity=0", "-v"])
def test_with_xdist_the_controller_says_what_its_workers_do_and_nothing_stays(project, verbosity):
    written = project("-n2", verbosity)
    assert re.search(r"\d of 2 cases(, 0:0\d to go)? \| gw\d checking slow on smoke-(full|half-fp16), 0:0\d", written)
    seen = "\n".join(as_seen(written))
    assert "checking" not in seen
    assert " of 2 cases" not in seen
    assert "2 passed, 1 failed" in seen or "1 failed, 2 passed" in seen
    assert "[100%]" in seen
    whole = re.findall(r"^\[gw\d\] \[[ \d]+%\] (PASSED|FAILED) test_it.py::\S+$", seen, re.MULTILINE)
    assert len(whole) == (3 if verbosity == "-v" else 0)


#: who reads: the one that watches a terminal, the one that reads a log later, nobody
TERMINAL, LOG, NOBODY = (True, True), (False, True), (False, False)


@pytest.mark.parametrize(
    ("facts", "reader"),
    [
        ({}, TERMINAL),
        ({"is_terminal": False}, LOG),
        ({"capture": "no"}, LOG),
        ({"term": "dumb"}, LOG),
        ({"workerinput": {}}, NOBODY),
        ({"reporter": type("Bars", (pytest.TerminalReporter,), {})}, NOBODY),
        ({"is_child": True}, NOBODY),
        ({"capture": "tee-sys"}, LOG),
        ({"log_cli": True}, LOG),
        ({"log_cli": True, "logging": False}, TERMINAL),
        ({"has_descriptor": False}, NOBODY),
        ({"verbosity": -1}, TERMINAL),
        ({"verbosity": -1, "is_terminal": False}, NOBODY),
        ({"verbosity": -2}, NOBODY),
    ],
    ids=[
        "terminal",
        "pipe",
        "-s",
        "dumb",
        "xdist",
        "another reporter",
        "new process",
        "tee-sys",
        "log_cli",
        "no:logging",
        "no descriptor",
        "-q",
        "-q pipe",
        "-qq",
    ],
)
def test_it_is_silent_where_others_write_or_nobody_reads(monkeypatch, tmp_path, facts, reader):
    monkeypatch.setenv("TERM", facts.get("term", "xterm"))
    worker = {"workerinput": {}} if "workerinput" in facts else {}
    reporter = object.__new__(facts.get("reporter", pytest.TerminalReporter))
    plugins = SimpleNamespace(get_plugin=lambda name: reporter, hasplugin=lambda name: facts.get("logging", True))
    config = SimpleNamespace(
        getoption=lambda name, default: facts.get(name, "fd"),
        getini=facts.get,
        pluginmanager=plugins,
        add_cleanup=lambda clean: None,
        get_verbosity=lambda: facts.get("verbosity", 0),
        **worker,
    )
    with (tmp_path / "screen").open("w") as screen:
        there = SimpleNamespace(isatty=lambda: facts.get("is_terminal", True), fileno=screen.fileno)
        if not facts.get("has_descriptor", True):
            del there.fileno
        monkeypatch.setattr(passing_text, "sys", SimpleNamespace(stdout=there, stderr=there))
        text = PassingText(config, facts.get("is_child", False))
    assert (text.is_watched, text.is_read) == reader
    text.close()
    assert not text.is_read


def test_a_log_has_a_line_where_nothing_was_printed_for_long(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(passing_text, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "log"
    monkeypatch.setattr(passing_text, "_terminal_of", lambda config: None)
    monkeypatch.setattr(passing_text, "_log_of", lambda config: os.open(path, os.O_WRONLY | os.O_CREAT))
    printed = []
    writer = SimpleNamespace(write=lambda text, **markup: printed.append(text))
    text = PassingText(SimpleNamespace(add_cleanup=lambda clean: None, get_terminal_writer=lambda: writer))
    text.give_way()
    for seconds, words in ((29, "too early"), (1, "first"), (29, "too early"), (1, "second")):
        now[0] += seconds
        text.log(words)
    writer.write(".", red=True)
    for seconds, words in ((29, "printed meanwhile"), (2, "third")):
        now[0] += seconds
        text.log(words)
    text.close()
    text.log("closed")
    assert path.read_text() == "\nattn: first\n\nattn: second\n\nattn: third\n"
    assert printed == ["."]


# -- the text alone ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """What has a config, the `writer` with the column that pytest has come to, and `written()` since it was last called."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr(passing_text, "_terminal_of", lambda config: write)
    writer = SimpleNamespace(fullwidth=40, width_of_current_line=10, flush=lambda: None)
    monkeypatch.setattr(PassingText, "_width", lambda text: writer.fullwidth)
    cleanups = []
    plugins = SimpleNamespace(register=lambda plugin, name: None, get_plugins=list)
    config = SimpleNamespace(
        get_terminal_writer=lambda: writer, add_cleanup=cleanups.append, pluginmanager=plugins, get_verbosity=lambda: 0
    )

    def written():
        try:
            return os.read(read, 65536).decode()
        except BlockingIOError:
            return ""

    yield SimpleNamespace(config=config, writer=writer, written=written)
    for clean in cleanups:
        clean()
    os.close(read)


def test_it_stands_behind_what_is_written_where_there_is_room(terminal):
    text = PassingText(terminal.config)
    text.show("wait a bit")
    assert terminal.written() == "  wait a bit\x1b[12D"
    text.show("a bit more")
    assert terminal.written() == "\x1b[K  a bit more\x1b[12D"
    text.clear()
    assert terminal.written() == "\x1b[K"
    text.clear()
    assert terminal.written() == ""


@pytest.mark.parametrize(("column", "home"), [(0, "\r\x1b[A"), (30, "\r\x1b[A\x1b[30C"), (70, "\r\x1b[A\x1b[30C")])
def test_it_stands_below_where_there_is_none_and_is_cut_to_the_line(terminal, column, home):
    terminal.writer.width_of_current_line = column
    text = PassingText(terminal.config)
    text.show("x" * 60)
    assert terminal.written() == "\n\r\x1b[K  " + "x" * 37 + home
    text.clear()
    assert terminal.written() == "\n\r\x1b[K" + home


def test_wide_letters_take_two_columns_and_a_newline_is_no_line(terminal):
    PassingText(terminal.config).show("注意\n")
    assert terminal.written() == "  注意?\x1b[7D"


@pytest.mark.parametrize("column", [40, 80])
def test_behind_a_full_line_nothing_is_shown(terminal, column):
    terminal.writer.width_of_current_line = column
    text = PassingText(terminal.config)
    text.show("wait")
    assert terminal.written() == ""


def test_it_is_taken_back_before_pytest_prints(terminal):
    printed = []
    terminal.writer.write = lambda text, **markup: printed.append((text, markup, terminal.written()))
    text = PassingText(terminal.config)
    text.give_way()
    text.show("wait")
    terminal.written()
    terminal.writer.write(".", green=True)
    terminal.writer.write(".")
    assert printed == [(".", {"green": True}, "\x1b[K"), (".", {}, "")]


def test_a_debugger_has_the_terminal_for_itself(terminal):
    text = PassingText(terminal.config)
    text.show("wait")
    text.close()
    terminal.written()
    text.show("wait")
    assert terminal.written() == ""


def test_the_width_is_the_terminals_own(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
    monkeypatch.setattr(passing_text, "_terminal_of", lambda config: follower)
    text = PassingText(SimpleNamespace(add_cleanup=lambda clean: None))
    assert text._width() == 57
    text.close()
    assert text._width() >= 40, "a thread may ask once more"
    monkeypatch.setenv("COLUMNS", "1")
    assert text._width() == 80
    os.close(leader)


@pytest.fixture
def now(monkeypatch, terminal):
    """The seconds of the clock, as a list of one; ticks come at once, on a wide terminal."""
    seconds = [100.0]
    for one in (module, durations, passing_text):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(module, "TICK", 0.01)
    terminal.writer.fullwidth = 200
    terminal.writer.write = lambda text, **markup: None
    return seconds


@pytest.fixture
def last(terminal):
    def shown():
        terminal.written()
        time.sleep(0.1)
        return re.sub(r"\x1b\[\d*[A-Z]", "", terminal.written()).split("  ")[-1]

    return shown


def test_what_runs_within_is_named_and_then_what_it_runs_in(terminal, now, last):
    progress = Progress(terminal.config)

    with progress.during("timing sdpa", "tiny"):
        now[0] += 2
        assert last() == ""
        now[0] += 2
        assert last() == "timing sdpa on tiny, 0:04"
        with progress.counting("again, process", 4) as step:
            step(0)
            assert last() == "again, process 1 of 4"
            now[0] += 30
            step(1)
            assert last() == "again, process 2 of 4, about 1:30 left"
            now[0] += 20
            assert last() == "again, process 2 of 4, about 1:10 left"
        assert last() == "timing sdpa on tiny, 0:54"
    terminal.written()
    with progress.during("timing sdpa", "another"):
        now[0] += 14
        assert last() == "timing sdpa on another, 0:14, about 0:40 left"
        now[0] += 60
        assert last() == "timing sdpa on another, 1:14"
    assert terminal.written().endswith("\x1b[K")


@pytest.mark.parametrize("kept", [5, None, {"checking sdpa on tiny": "long"}, ["checking"]])
def test_a_foreign_memory_is_none(terminal, kept):
    terminal.config.cache = SimpleNamespace(get=lambda key, default: kept, set=lambda key, value: None)
    with Progress(terminal.config).during("checking sdpa", "tiny"):
        pass


def test_what_is_done_once_more_is_counted_apart_and_what_ends_in_time_says_when(terminal, now, last):
    progress = Progress(terminal.config)
    with progress.counting("again, process", 2, 5) as step:
        step(3)
        assert last() == "again, process 2 of up to 5 more, as some were disturbed"
    with progress.during("diagnosing mine", "tiny", 60.0):
        now[0] += 12
        assert last() == "diagnosing mine on tiny, 0:12 of at most 1:00"
    with progress.during("", ""):
        now[0] += 12
        assert last() == ""


def test_of_a_run_the_rest_is_said_once_it_takes_long(terminal, now, last):
    progress = Progress(terminal.config)
    cases = ["a", "b", "c"]
    progress.expect(cases)
    with progress.during("checking", "a"):
        assert last() == ""
        now[0] += 11
        assert last() == "0 of 3 cases | checking on a, 0:11"
    remaining = progress._remaining
    remaining.pytest_runtest_logreport(SimpleNamespace(nodeid="a", duration=20.0))
    remaining.pytest_runtest_logreport(SimpleNamespace(nodeid="another", duration=500.0))
    remaining.pytest_runtest_logfinish("a")
    remaining.pytest_runtest_logstart("b")
    with progress.during("checking", "b"):
        assert last() == "1 of 3 cases, 0:40 to go"
        now[0] += 2
        assert last() == "1 of 3 cases, 0:38 to go"
    terminal.config.get_verbosity = lambda: -1
    with progress.during("checking", "c"):
        assert last() == ""


def kept(**seconds):
    """Return a config whose cache has these, and its `cleanups`."""
    cache = SimpleNamespace(get=lambda key, default: seconds, set=lambda key, value: seconds.update(value))
    cleanups = []
    return SimpleNamespace(cache=cache, cleanups=cleanups, add_cleanup=cleanups.append)


def test_the_rest_is_known_by_the_run_before_and_shared_by_workers(now):
    rest = Remaining(["a", "b", "c", "d"], Durations(kept(a=20.0, b=40.0, c=60.0)), workers=4)
    assert rest.words(now[0]) == "0 of 4 cases, 1:00 to go"  # the longest, of which the workers share none
    rest = Remaining(["a", "b", "c", "d"], Durations(kept(a=20.0, b=40.0, c=60.0)), workers=2)
    assert rest.words(now[0]) == "0 of 4 cases, 1:20 to go"  # d as the others on average
    for one in "abcd":
        rest.pytest_runtest_logfinish(one)
    assert rest.words(now[0]) == "4 of 4 cases"


@pytest.mark.parametrize(("took", "is_kept"), [(5.0, True), (0.5, False)])
def test_what_cases_took_is_kept_of_a_run_that_took_long(now, took, is_kept):
    config = kept(a=20.0)
    rest = Remaining(["a", "b"], Durations(config))
    rest.pytest_runtest_logreport(SimpleNamespace(nodeid="a", duration=took))
    rest.pytest_runtest_logfinish("a")
    rest.pytest_sessionfinish()
    for clean in config.cleanups:
        clean()
    assert config.cache.get("", "") == {"a": took if is_kept else 20.0}


def test_workers_of_xdist_tell_the_controller(terminal, now, last):
    progress = Progress(terminal.config)
    progress.expect(["a", "b"], workers=2)
    others, workers = [], []
    for name in ("gw0", "gw1"):
        node = SimpleNamespace(gateway=SimpleNamespace(id=name), workerinput={}, process_from_remote=others.append)
        progress.listen(node)
        send = SimpleNamespace(sendevent=lambda name, node=node, **given: node.process_from_remote((name, given)))
        plugins = SimpleNamespace(get_plugins=lambda send=send: [send])
        config = SimpleNamespace(workerinput=node.workerinput, pluginmanager=plugins)
        workers.append(Progress(config, is_child=True))
    node.process_from_remote(("testreport", {}))
    node.process_from_remote((module._EVENT, {"said": ("begin",)}))  # of another release, say
    assert others == [("testreport", {})]
    with workers[0].during("compiling flex", "tiny"):
        now[0] += 20
        with workers[1].during("timing flash2", "small"), workers[1].counting("again, process", 3) as step:
            step(1)
            now[0] += 4
            assert last() == "0 of 2 cases | gw0 compiling flex on tiny, 0:24; gw1 again, process 2 of 3"
        assert last() == "0 of 2 cases | gw0 compiling flex on tiny, 0:24"
        progress.forget("gw0")
        assert last() == ""
    assert progress.durations.of("timing flash2 on small") == 4.0


def test_nobody_who_reads_means_no_messages(terminal, monkeypatch):
    monkeypatch.setattr(passing_text, "_terminal_of", lambda config: None)
    monkeypatch.setattr(passing_text, "_log_of", lambda config: None)
    node = SimpleNamespace(workerinput={}, process_from_remote=print)
    Progress(terminal.config).listen(node)
    assert (node.workerinput, node.process_from_remote) == ({}, print)


def test_what_compiles_is_diagnosed_and_asked_is_named(pytester, monkeypatch):
    told = []

    @contextmanager
    def during(self, doing, on, within=0.0):
        told.append((doing, on, within))
        yield

    @contextmanager
    def counting(self, doing, total, more=0):
        yield lambda number: told.append((doing, number, total))

    monkeypatch.setattr(Progress, "during", during)
    monkeypatch.setattr(Progress, "counting", counting)
    pytester.makepyfile("""
        import pytest, torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        @pytest.mark.attention("smoke-full", device="cpu")
        def test_it(attn):
            fn = torch.compile(sdpa, backend="eager")
            attn.check(fn, name="mine")
            attn.check_invariants(sdpa, only=["rerun", "poison"], name="asked")
            attn.check(lambda q, k, v: 1.1 * sdpa(q, k, v), name="wrong")
        """)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-diagnosis-timeout=7").assert_outcomes(failed=1)
    said = [one for one in told if one[0]]
    assert said == [
        ("checking mine", "smoke-full", 0.0),
        ("compiling mine", "smoke-full", 0.0),
        ("trying the invariants of asked", "smoke-full", 0.0),
        ("trying the invariants of asked on smoke-full:", 0, 2),
        ("trying the invariants of asked on smoke-full:", 1, 2),
        ("checking wrong", "smoke-full", 0.0),
        ("diagnosing wrong", "smoke-full", 7.0),
    ]
