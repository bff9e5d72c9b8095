"""What a terminal shows while something takes long: behind pytest's line or below it, and gone afterwards."""

import fcntl
import os
import re
import struct
import termios
import time
from types import SimpleNamespace

import pytest
from fakes.terminal import as_seen, between_tests, on_a_terminal

import pytest_attn.session.progress as module
from pytest_attn.session.progress import PassingText, Progress

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
import pytest_attn.session.progress as progress
progress.SILENT_SECONDS, progress.TICK = {silent}, 0.05
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a slow kernel; returns a function that runs pytest there, on a terminal."""

    def run(*args, silent=0.1, **environment):
        (tmp_path / "test_it.py").write_text(SLOW)
        (tmp_path / "conftest.py").write_text(HASTY.format(silent=silent))
        return on_a_terminal(tmp_path, *args, **environment)

    return run


def test_a_slow_kernel_is_named_and_nothing_stays(project):
    written = project("-q")
    assert "checking slow on smoke-full, 0:00" in written
    assert re.search(r"checking slow on smoke-half-fp16, 0:00(, about 0:01 left)?", written)
    silent = project("-q", silent=1000)
    assert "checking" not in silent
    assert between_tests(as_seen(written)) == between_tests(as_seen(silent))


def test_the_time_left_is_known_from_the_run_before(project, tmp_path):
    project("-q", "-k", "smoke-full")
    (tmp_path / ".pytest_cache/v/attn/seconds").write_text('{"checking slow on smoke-full": 62.0}')
    assert re.search(r"checking slow on smoke-full, 0:00, about 1:0[12] left", project("-q", "-k", "smoke-full"))
    assert '"checking slow on smoke-full": 62.0' not in (tmp_path / ".pytest_cache/v/attn/seconds").read_text()


@pytest.mark.parametrize(
    ("facts", "is_watched"),
    [
        ({}, True),
        ({"is_terminal": False}, False),
        ({"capture": "no"}, False),
        ({"term": "dumb"}, False),
        ({"workerinput": {}}, False),
        ({"reporter": type("Bars", (pytest.TerminalReporter,), {})}, False),
        ({"is_child": True}, False),
        ({"capture": "tee-sys"}, False),
        ({"log_cli": True}, False),
        ({"log_cli": True, "logging": False}, True),
        ({"has_descriptor": False}, False),
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
    ],
)
def test_it_is_silent_where_others_write_or_nobody_reads(monkeypatch, tmp_path, facts, is_watched):
    monkeypatch.setenv("TERM", facts.get("term", "xterm"))
    worker = {"workerinput": {}} if "workerinput" in facts else {}
    reporter = object.__new__(facts.get("reporter", pytest.TerminalReporter))
    plugins = SimpleNamespace(get_plugin=lambda name: reporter, hasplugin=lambda name: facts.get("logging", True))
    config = SimpleNamespace(
        getoption=lambda name, default: facts.get(name, "fd"),
        getini=facts.get,
        pluginmanager=plugins,
        add_cleanup=lambda clean: None,
        **worker,
    )
    with (tmp_path / "screen").open("w") as screen:
        there = SimpleNamespace(isatty=lambda: facts.get("is_terminal", True), fileno=screen.fileno)
        if not facts.get("has_descriptor", True):
            del there.fileno
        monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=there))
        text = PassingText(config, facts.get("is_child", False))
    assert text.is_watched is is_watched
    text.close()


# -- the text alone ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """What has a config, the `writer` with the column that pytest has come to, and `written()` since it was last called."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr(module, "_terminal_of", lambda config: write)
    writer = SimpleNamespace(fullwidth=40, width_of_current_line=10)
    monkeypatch.setattr(PassingText, "_width", lambda text: writer.fullwidth)
    cleanups = []
    config = SimpleNamespace(get_terminal_writer=lambda: writer, add_cleanup=cleanups.append)

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


@pytest.mark.parametrize(("column", "home"), [(0, "\r\x1b[A"), (30, "\r\x1b[A\x1b[30C")])
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


def test_behind_a_full_line_nothing_is_shown_unless_it_is_done(terminal):
    terminal.writer.width_of_current_line = 40
    text = PassingText(terminal.config)
    text.show("wait")
    assert terminal.written() == ""
    text.show("wait", is_line_done=True)
    assert terminal.written() == "\n\r\x1b[K  wait\r\x1b[A\x1b[39C"


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
    monkeypatch.setattr(module, "_terminal_of", lambda config: follower)
    text = PassingText(SimpleNamespace(add_cleanup=lambda clean: None))
    assert text._width() == 57
    text.close()
    assert text._width() >= 40, "a thread may ask once more"
    monkeypatch.setenv("COLUMNS", "1")
    assert text._width() == 80
    os.close(leader)


def test_what_runs_within_is_named_and_then_what_it_runs_in(terminal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "TICK", 0.01)
    terminal.writer.fullwidth = 200
    progress = Progress(terminal.config)

    def last():
        terminal.written()
        time.sleep(0.1)
        return re.sub(r"\x1b\[\d*[A-Z]", "", terminal.written()).split("  ")[-1]

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
