"""The fork server: a process that has imported torch and has done nothing with it, and each worker is a fork of it. Both ends.

`python -m pytest_attn.processes.fork_server FD` serves over the channel FD. It gets what to import; then, for each worker, its
command line, environment and folder, and the worker's end of a channel of its own. It says when a worker has ended.

multiprocessing's own forkserver was tried for this on 2026-11-24 (Python 3.11). Each of its children holds the pipe whose end
would end the server: after `kill -9` of pytest, server, child and resource tracker live on. It has no way to stop it, to start
another one for another environment, or to refuse a fork once a thread runs or a device is open; and it imports the user's
`__main__` again.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from pytest_attn.processes.channel import Channel, Message, wait
from pytest_attn.processes.lifetime import CHANNEL_VARIABLE, die_with

#: seconds between two looks at whether the one who started the server still lives, besides the end of its channel
_LOOK_SECONDS = 5.0
#: seconds that a server may take to import, and to end
_START_SECONDS, _END_SECONDS = 300, 10
#: packages that pytest would rewrite, of what is imported ahead: plugins, which may be named by -p
_MARKED = frozenset(("pytest_attn", "hypothesis", "_hypothesis_globals"))
#: what a process may have open below /dev that has used no accelerator
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/ptmx", "/dev/shm/")
#: what no server imports ahead: the compiler's parts, which start processes, what sets switches for torch's own tests, and
#: what torch makes up as modules; our own tests, and what imports hypothesis, are for pytest, which rewrites their assertions
_LATE = (
    *("torch._inductor", "torch.testing", "torch.distributed", "torch.ops", "torch.classes"),
    *("pytest_attn.suite", "pytest_attn.strategies"),
)


class Command(NamedTuple):
    """A pytest that is to be started, or another module that has a `main`.

    environment: all of it. folder: in which it works. output: the file for what it prints. told: what its channel says first
    (processes/worker.py). python: which interpreter starts it.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    output: Path
    told: Mapping[str, object]
    module: str = "pytest"
    python: str = sys.executable


class ServerError(Exception):
    """The server does not serve, for the reason given."""


# -- as the process sees it that starts it -------------------------------------------------------------------------------


def started(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    end: Channel,
    output: IO[bytes] | None = None,
    python: str = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start a module of Python, in a group of its own: what a terminal sends is for the process that waits. Raises OSError.

    words: the module and its arguments. end: of the channel that it gets.
    """
    return subprocess.Popen(
        [python, "-m", *words],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        pass_fds=[end.fileno()],
        start_new_session=True,
    )


class ForkServer:
    """A server that starts in the environment of a command. Raises ServerError where it cannot start.

    It imports while its starter goes on; whoever asks for its first worker waits for the rest of that.
    """

    def __init__(self, like: Command, modules: Sequence[str]) -> None:
        self.environment, self.folder = like.environment, like.folder
        self._channel, theirs = Channel.pair()
        try:
            self._process = started([__name__, str(theirs.fileno())], like.folder, like.environment, theirs)
        except OSError as error:
            self._channel.close()
            raise ServerError(str(error)) from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._is_ready = False
        self._returncodes: dict[int, int] = {}
        self._channel.send(modules=list(modules))

    def fileno(self) -> int:
        """Return the descriptor on which the end of a worker shows, for `wait`."""
        return self._channel.fileno()

    def wait_until_ready(self) -> None:
        """Wait until it has imported everything. Raises ServerError where it cannot serve, or takes too long."""
        if self._is_ready:
            return
        try:
            self._answer("ready")
        except TimeoutError:
            raise ServerError(f"it took more than {_START_SECONDS} s to start") from None
        self._is_ready = True

    def fork(self, command: Command, end: Channel) -> int:
        """Have a pytest forked, which ends with the server if not before; return its process. Raises ServerError.

        end: of the channel that it gets.
        """
        self.wait_until_ready()
        self._channel.send(
            module=command.module,
            arguments=list(command.arguments),
            environment=dict(command.environment),
            folder=str(command.folder),
            output=str(command.output),
        )
        try:
            self._channel.send_end(end, self.pid)
            return int(self._answer("started"))
        except TimeoutError:
            raise ServerError("it does not fork") from None
        except OSError as error:
            raise ServerError(f"it does not listen: {error}") from error

    def returncode(self, worker: int, seconds: float = 0.0) -> int | None:
        """Return how a worker has ended, None where it does not within so many seconds. Raises ServerError."""
        end = time.monotonic() + seconds
        with suppress(TimeoutError):
            while worker not in self._returncodes:
                self._hear(max(end - time.monotonic(), 0.0))
        return self._returncodes.get(worker)

    def close(self) -> None:
        """End the server, and what it still runs."""
        self._channel.close()
        if not self._is_ready:  # it would notice only when it has imported everything
            self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, wanted: str) -> Any:
        """Return what the server says of what is wanted. Raises TimeoutError, and ServerError."""
        end = time.monotonic() + _START_SECONDS
        while wanted not in (message := self._hear(max(end - time.monotonic(), 0.0))):
            pass
        return message[wanted]

    def _hear(self, seconds: float) -> Message:
        """Return what the server says next. Raises TimeoutError, and ServerError."""
        message = self._channel.recv(seconds) or {"refused": "it has ended"}
        if "refused" in message:
            raise ServerError(message["refused"])
        if "ended" in message:
            self._returncodes[message["ended"]] = message["returncode"]
        return message


def modules_ahead(loaded: Iterable[str] | None = None) -> list[str]:
    """Return what a server imports ahead: pytest, torch, and the parts of torch, triton and this package in use here."""
    names = list(sys.modules if loaded is None else loaded)
    late = ["hypothesis.internal.observability"] if "_hypothesis_pytestplugin" in names else []  # at the end of each pytest
    ours = (name for name in names if name.startswith(("torch.", "triton", "pytest_attn.")) and not name.startswith(_LATE))
    return ["pytest", "torch", *ours, *late]


# -- the server ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve; in each forked child, be a fresh pytest."""
    channel = Channel.of_descriptor(int(sys.argv[1]))
    first = channel.recv()
    if first is None:
        return
    for name in first["modules"]:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported stays: no child need look at it again, which would copy its memory
    if obstacle := _tried():
        channel.send(refused=obstacle)
        return
    request = _Server(channel).serve()
    if request is not None:
        _become(request)


class _Server:
    """Forks a worker for each request, and says how each has ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._parent = channel, os.getppid()
        self._workers: dict[int, int] = {}  # what tells that one has ended, and its process

    def serve(self) -> Message | None:
        """Return the request in a child, None in the server when all is over."""
        self._channel.send(ready=os.getpid())
        while os.getppid() == self._parent:
            ready = wait([self._channel, *self._workers], _LOOK_SECONDS)
            for watched in self._workers.keys() & set(ready):
                os.close(watched)
                worker = self._workers.pop(watched)
                self._channel.send(ended=worker, returncode=os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
            if self._channel in ready:
                request = self._channel.recv()
                if request is None:
                    break
                try:
                    request["channel"] = self._channel.recv_end()
                except (EOFError, OSError):
                    break
                if obstacle := obstacle_to_fork():
                    self._channel.send(refused=obstacle)
                    break
                if self._is_child(request["channel"]):
                    return request
        for worker in self._workers.values():  # with what they have started: nobody waits for them any more
            with suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        return None

    def _is_child(self, channel: int) -> bool:
        """Fork; return whether this is the child, which keeps its own channel only."""
        server, child = os.getpid(), os.fork()
        if child == 0:
            os.setpgid(0, 0)
            die_with(server)
            self._channel.close()
            for watched in self._workers:
                os.close(watched)
            return True
        with suppress(OSError):  # the child has done it, or is gone
            os.setpgid(child, child)
        os.close(channel)
        self._workers[os.pidfd_open(child)] = child
        self._channel.send(started=child)
        return False


def _tried() -> str:
    """Fork once, and say what stands in the way of more; "" for nothing.

    Libraries with threads that are ready for a fork, as OpenBLAS, end them before it; others keep theirs.
    """
    child = os.fork()
    if child == 0:
        torch = sys.modules.get("torch")
        os._exit(1 if torch is not None and torch.cuda._is_in_bad_fork() else 0)
    unwatched = ""
    try:
        os.close(os.pidfd_open(child))
    except (AttributeError, OSError) as error:
        unwatched = f"processes cannot be watched: {error}"
    if os.waitpid(child, 0)[1] != 0:
        return "CUDA was asked for something while modules were imported"
    return unwatched or obstacle_to_fork()


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


def _become(request: Message) -> None:
    """Be the process that `python -m MODULE ARGUMENTS` would start, as far as the outside can tell."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(request["folder"])
    for name in os.environ.keys() - request["environment"].keys():
        del os.environ[name]
    os.environ.update(request["environment"])
    os.environ[CHANNEL_VARIABLE] = f"{request['channel']} {os.getppid()}"
    sys.argv[1:] = request["arguments"]
    sys.orig_argv[:] = [sys.executable, "-m", request["module"], *request["arguments"]]
    for name in [one for one in sys.modules if one.partition(".")[0] in _MARKED]:
        sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"  # or pytest warns that it was imported before its assertions
    if "numpy.random" in sys.modules:  # `random` has seen to itself
        sys.modules["numpy.random"].seed()
    if request["module"] in sys.modules and request["module"] != "pytest":
        sys.modules[request["module"]].main()
    else:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
