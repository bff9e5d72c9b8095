"""Runs of pytest to be killed, starved or crowded, forked from one process that has torch; and what each has left.

A run is what `python -m pytest` would be, up to the end of its interpreter. What it leaves is told by looking: processes by
their folder and environment, locks by locking.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import pkgutil
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

#: pytest's own, which asks for nothing that a test has not; hypothesis is imported at the end of each run
ALWAYS = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
#: what Python's audit hooks are told of changes of files, beside the opening for writing
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")


class Runs:
    """A process that forks runs, and ends with its folder."""

    def __init__(self, python=sys.executable):
        self._process = subprocess.Popen(
            [str(python), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def _ask(self, **what):
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, folder, *options, signals=(), is_ordinary=False, module="pytest", always=ALWAYS, **environment):
        """Start a run in a folder; return its process.

        signals: each a number, and before which change of a file it is sent. is_ordinary: without what only root may do.
        """
        tmp = folder / "tmp"
        tmp.mkdir(exist_ok=True)
        tmp.chmod(0o1777)
        environment = {"TMPDIR": str(tmp), **environment}
        return self._ask(
            folder=str(folder),
            module=module,
            options=[*(always if module == "pytest" else ()), *options],
            environment=environment,
            signals=signals,
            is_ordinary=is_ordinary,
        )

    def status(self, run):
        """Wait for its end; return its status, negative: by which signal."""
        return self._ask(wait=run)

    def close(self):
        """End it."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


@contextlib.contextmanager
def own_folder():
    """Make a folder that another user may enter as well."""
    path = Path(tempfile.mkdtemp(prefix="withstood-"))
    path.chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# -- what a run has left -------------------------------------------------------------------------------------------------


def processes_in(folder):
    """Return the command lines of the processes that work in a folder, or were told of it."""
    found, word = [], os.fsencode(str(folder))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            works_there = os.readlink(process / "cwd").startswith(str(folder))
            if works_there or word in (process / "environ").read_bytes():
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                found += [(process / "cmdline").read_bytes().decode(errors="replace")] if state != "Z" else []
    return found


def left_by_processes(folder, seconds=15.0):
    """Return the processes that are still there after so many seconds."""
    end = time.monotonic() + seconds
    while (found := processes_in(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def left_in(folder):
    """Return the temporary files and folders below a folder, sockets, and locks."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if _is_left(path, folder / "tmp")]


def _is_left(path, tmp):
    # pytest keeps folders, and tempfile tries which folder it may write to
    is_own = path.parent == tmp and not re.fullmatch(r"pytest-of-.*|\w{8}", path.name)
    return is_own or path.is_socket() or path.suffix == ".part" or path.name.startswith(".pytest-attn-")


# -- the process that forks ----------------------------------------------------------------------------------------------


def serve():
    """Fork a run for each request, and be it in the child."""
    import_module("pytest")
    import_module("torch").set_num_threads(1)
    import_module("altair")
    package = import_module("pytest_attn")
    for module in pkgutil.walk_packages(package.__path__, "pytest_attn."):
        if not any(part in module.name for part in (".suite", "strategies", "fuzz", ".libraries.")):
            import_module(module.name)
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])), flush=True)
        elif child := os.fork():
            print(json.dumps(child), flush=True)
        else:
            return _become(**asked)


def _become(folder, module, options, environment, signals, is_ordinary):
    """Be the process of a run, a leader of its group as a shell makes it."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(f"{folder}/tmp/../output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        del os.environ[name]  # it is no worker of the run that tries it
    os.environ.update(environment)
    tempfile.tempdir = None
    if is_ordinary:  # root reads and writes what others may not
        ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, loaded in sys.modules.items():
        if name.partition(".")[0] == "pytest_attn":
            loaded.__doc__ = "PYTEST_DONT_REWRITE"  # or pytest warns that it was imported before its assertions
    sys.argv[1:] = options
    sys.orig_argv[:] = [sys.executable, "-m", module, *options]
    _send_before_changes(folder, signals)
    atexit.register(gc.freeze)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _send_before_changes(folder, signals):
    """Send signals to this process, each before so many changes of files in the folder: a file's opening, naming, removal.

    A run that gets none leaves their number.
    """
    waiting, process, done = {at: number for number, at in signals}, os.getpid(), [0]

    def count(event, arguments):
        is_opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (is_opened or event in CHANGES) or os.getpid() != process or isinstance(arguments[0], int):
            return
        if os.path.abspath(os.fsdecode(arguments[0])).startswith(folder):
            done[0] += 1
            if number := waiting.pop(done[0], None):
                os.kill(process, number)

    sys.addaudithook(count)
    if not signals:
        atexit.register(lambda: Path(folder, "changes").write_text(str(done[0])))


if __name__ == "__main__":
    serve()
