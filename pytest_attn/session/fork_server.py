"""The server of new processes: it has imported torch and has done nothing with it, and each new process is a fork of it.

`python -m pytest_attn.session.fork_server FD`; session/forked.py starts it and talks to it over the socket FD, in lines of
JSON. It gets what to import; then, for each new process, its command line, environment and folder. Several may run
beside one another; it waits for one when asked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

#: seconds between two looks at whether the one who started the server still lives, besides the end of its socket
_LOOK_SECONDS = 5.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
#: packages that pytest would rewrite, of what is imported ahead: plugins, which may be named by -p
_MARKED = frozenset(("pytest_attn", "hypothesis", "_hypothesis_globals"))
#: what a process may have open below /dev that has used no accelerator
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/ptmx", "/dev/shm/")

Request: TypeAlias = dict[str, Any]


class _Channel:
    """The line to the process that started this one."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._parent = os.getppid()

    def request(self) -> Request | None:
        """Wait for a request; None where nobody is there any more to make one."""
        while not select.select([self._socket], [], [], _LOOK_SECONDS)[0]:
            if os.getppid() != self._parent:
                return None
        line = self._lines.readline()
        return json.loads(line) if line else None

    def say(self, **answer: object) -> None:
        self._socket.sendall(json.dumps(answer).encode() + b"\n")

    def is_left_before_the_end_of(self, process: int) -> bool:
        """Wait for a child's end; whether the one who waits for it is gone before that."""
        watched = os.pidfd_open(process)
        either: list[Any] = [self._socket, watched]
        try:
            while True:
                ready = select.select(either, [], [], _LOOK_SECONDS)[0]
                if watched in ready:
                    return False
                if ready or os.getppid() != self._parent:  # no answer meanwhile: the other end is closed
                    return True
        finally:
            os.close(watched)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def main() -> None:
    """Serve; in each forked child, be a fresh pytest."""
    channel = _Channel(int(sys.argv[1]))
    first = channel.request()
    if first is None:
        return
    import_ahead(first["modules"])
    try:
        request = _serve(channel)
    except ConnectionError:  # nobody listens any more; a child that still runs ends with this process
        return
    channel.close()
    if request is not None:
        _become(request)


def import_ahead(modules: Sequence[str]) -> None:
    """Import what new processes will, as far as that can be imported."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported stays: no child need look at it again, which would copy its memory


def _serve(channel: _Channel) -> Request | None:
    """Fork a child for each request; return the request in the child, None in the server when all is over."""
    if obstacle := _tried():
        channel.say(refused=obstacle)
        return None
    server = os.getpid()
    channel.say(ready=server)
    while (request := channel.request()) is not None:
        if "awaited" in request:
            channel.say(returncode=_returncode(request["awaited"], channel))
            continue
        if obstacle := obstacle_to_fork():
            channel.say(refused=obstacle)
            return None
        child = os.fork()
        if child == 0:
            return {**request, "server": server}
        with suppress(OSError):  # the child has done it, or is gone
            os.setpgid(child, child)
        channel.say(started=child)
    return None


def _returncode(child: int, channel: _Channel) -> int:
    """Wait for the end of a child, which comes at once where nobody waits for it any more."""
    if channel.is_left_before_the_end_of(child):
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _tried() -> str:
    """Fork once, and say what stands in the way of more; "" for nothing.

    Libraries with threads that are ready for a fork, as OpenBLAS, end them before it; others keep theirs.
    """
    child = os.fork()
    if child == 0:
        torch = sys.modules.get("torch")
        os._exit(1 if torch is not None and torch.cuda._is_in_bad_fork() else 0)
    if os.waitpid(child, 0)[1] != 0:
        return "CUDA was asked for something while modules were imported"
    return obstacle_to_fork()


def obstacle_to_fork() -> str:
    """Say why a forked child would not be what a new process is, "" where it would."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch was not imported"
    if torch.cuda.is_initialized():
        return "CUDA is initialized"
    if opened := _open_devices():
        return f"{opened[0]} is open"
    threads = len(os.listdir("/proc/self/task"))
    return f"{threads} threads run" if threads > 1 else ""


def _open_devices() -> list[str]:
    """Return the files below /dev that this process has opened, but for harmless ones: an accelerator was touched."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith("/dev/") and not name.startswith(_HARMLESS)]


def _become(request: Request) -> None:
    """Be the process that `python -m pytest ARGUMENTS` would start, as far as the outside can tell."""
    os.setpgid(0, 0)
    import ctypes

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != request["server"]:
        os._exit(1)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(request["folder"])
    for name in os.environ.keys() - request["environment"].keys():
        del os.environ[name]
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    sys.orig_argv[:] = [sys.executable, "-m", "pytest", *request["arguments"]]
    for name in [one for one in sys.modules if one.partition(".")[0] in _MARKED]:
        sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"  # or pytest warns that it was imported before its assertions
    if "numpy.random" in sys.modules:  # `random` has seen to itself
        sys.modules["numpy.random"].seed()
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
