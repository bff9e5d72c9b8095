"""The server of forked processes (session/fork_server.py) as the process sees it that starts it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_attn.session.child import ASKED_VARIABLE, MODES_VARIABLE, OWN_VARIABLE, RUNS_VARIABLE
from pytest_attn.session.turns import TURN_VARIABLE

#: what each new process gets for itself
_OF_ONE_PROCESS = (ASKED_VARIABLE, MODES_VARIABLE, OWN_VARIABLE, RUNS_VARIABLE, TURN_VARIABLE)
#: what no server imports ahead
_LATE = ("torch._inductor", "torch.testing", "torch.distributed", "torch.ops", "torch.classes")
_OWN_LATE = ("pytest_attn.suite", "pytest_attn.strategies", "pytest_attn.cases.fuzz")
_START_SECONDS, _END_SECONDS = 300, 10


class Command(NamedTuple):
    """A pytest that is to be started.

    environment: all of it. times: the file that it leaves, with a line at least for each of so many tests; output: for what
    it prints.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    times: Path
    output: Path
    tests: int

    def is_done(self, returncode: int) -> bool:
        """Whether a process that ended so did all that was asked for."""
        if returncode != pytest.ExitCode.OK or not self.times.exists():
            return False
        return len(self.times.read_text(encoding="utf-8").splitlines()) >= self.tests


class Ended(NamedTuple):
    """A pytest that has ended, and what it wrote."""

    returncode: int
    output: str


class ServerError(Exception):
    """The server of new processes does not serve, for the reason given."""


class ForkServer:
    """The server as the process sees it that started it (session/fork_server.py). Raises ServerError where it cannot start.

    It imports while its starter goes on; whoever asks for its first process waits for the rest of that.
    """

    def __init__(self, like: Command, modules: Sequence[str]) -> None:
        self._like = _shared(like)
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.fork_server", str(theirs.fileno())],
                cwd=like.folder,
                env=self._like[0],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what a terminal sends is for the process that waits
            )
        except OSError as error:
            self._socket.close()
            raise ServerError(str(error)) from error
        finally:
            theirs.close()
        self._answers = self._socket.makefile("r", encoding="utf-8")
        self.pid = self._process.pid
        self._is_ready = False
        try:
            self._say(modules=list(modules))
        except ServerError:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until it has imported everything. Raises ServerError where it cannot serve, or takes too long."""
        if self._is_ready:
            return
        try:
            self._answer("ready", time.monotonic() + _START_SECONDS)
        except TimeoutError:
            raise ServerError(f"it took more than {_START_SECONDS} s to start") from None
        self._is_ready = True

    def is_like(self, command: Command) -> bool:
        """Whether a process by itself would be started in the same environment and folder as the server was."""
        return self._like == _shared(command)

    def run(self, command: Command, seconds: float) -> Ended:
        """Have a pytest forked and wait for its end. Raises TimeoutError, and ServerError."""
        return self.finish(command, self.start(command), seconds)

    def start(self, command: Command) -> int:
        """Have a pytest forked, which ends with the server if not before; return its process. Raises ServerError."""
        self.wait_until_ready()
        own = f"{command.environment.get(OWN_VARIABLE, '')},{self.pid}".lstrip(",")
        self._say(
            arguments=list(command.arguments),
            environment={**command.environment, OWN_VARIABLE: own},
            folder=str(command.folder),
            output=str(command.output),
        )
        try:
            return int(self._answer("started", time.monotonic() + _START_SECONDS))
        except TimeoutError:
            raise ServerError("it does not fork") from None

    def finish(self, command: Command, child: int, seconds: float) -> Ended:
        """Wait for the end of a pytest that was started, or end it if it takes too long. Raises TimeoutError, ServerError."""
        try:
            returncode = self.ended(child, seconds)
        except BaseException:
            _kill(child)
            raise
        return Ended(returncode, command.output.read_text(encoding="utf-8", errors="replace"))

    def ended(self, child: int, seconds: float = _END_SECONDS) -> int:
        """Wait for the end of what `start` has started; return how it ended. Raises TimeoutError, and ServerError."""
        self._say(awaited=child)
        return int(self._answer("returncode", time.monotonic() + seconds))

    def end(self, child: int) -> None:
        """End what `start` has started. Raises ServerError."""
        _kill(child)
        self.ended(child)

    def _say(self, **request: object) -> None:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ServerError(f"it does not listen: {error}") from error

    def _answer(self, wanted: str, end: float) -> Any:
        """Return what the server says of what is wanted, before the end. Raises TimeoutError, and ServerError."""
        self._socket.settimeout(max(end - time.monotonic(), 0.001))
        try:
            line = self._answers.readline()
        except TimeoutError:
            raise
        except OSError as error:
            raise ServerError(f"it was cut off: {error}") from error
        answer = json.loads(line) if line.endswith("\n") else {}
        if wanted not in answer:
            raise ServerError(answer.get("refused", "it has ended"))
        return answer[wanted]

    def close(self) -> None:
        """End the server, and what it still runs."""
        self._answers.close()
        self._socket.close()
        if not self._is_ready:  # it would notice only when it has imported everything
            self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def has_ended(process: int) -> bool:
    """Whether a process has ended, waited for or not. Raises ServerError where this system does not let it be watched."""
    try:
        watched = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError) as error:
        raise ServerError(f"processes cannot be watched: {error}") from error
    try:
        return bool(select.select([watched], [], [], 0)[0])
    finally:
        os.close(watched)


def modules_ahead(loaded: Iterable[str] | None = None) -> list[str]:
    """Return what a server imports ahead: pytest, torch, and the parts of torch, triton and this package in use here."""
    names = list(sys.modules if loaded is None else loaded)
    late = ["hypothesis.internal.observability"] if "_hypothesis_pytestplugin" in names else []  # at the end of each pytest
    return ["pytest", "torch", *(name for name in names if _is_ahead(name)), *late]


def _is_ahead(name: str) -> bool:
    """Whether importing a module only declares things.

    Not so the compiler's parts, which start processes, what sets switches for torch's own tests, and what torch makes up as
    modules. Our own tests, and what imports hypothesis, must be imported by pytest, which rewrites their assertions.
    """
    return name.startswith(("torch.", "triton", "pytest_attn.")) and not name.startswith((*_LATE, *_OWN_LATE))


def _shared(command: Command) -> tuple[dict[str, str], Path]:
    environment = {name: value for name, value in command.environment.items() if name not in _OF_ONE_PROCESS}
    return environment, command.folder
