"""Starting workers, forked by a server or by themselves; how one is heard, awaited, and ended with its group."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pytest_attn.processes.channel import Channel, Message, wait
from pytest_attn.processes.fork_server import Command, ForkServer, ServerError, started
from pytest_attn.processes.last_words import end_of_output
from pytest_attn.processes.lifetime import CHANNEL_VARIABLE
from pytest_attn.processes.worker import FINISHED

#: seconds between two looks at whether a process has ended whose channel others may hold, too; and that an end may take
_LOOK_SECONDS, _END_SECONDS = 2.0, 5.0

_log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """A worker that has ended: how, what it printed, and what it said over its channel.

    returncode: negative: by which signal; None where it took too long, and was ended. is_finished: whether its pytest said
    that it came to its end, which a process that leaves early with 0 does not.
    """

    returncode: int | None
    output: str
    messages: Sequence[Message] = ()
    is_finished: bool = False


class Process(ABC):
    """A worker in a process group of its own, and this end of its channel."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.channel, theirs = Channel.pair()
        try:
            self.pid = self._start(theirs)
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.channel.send(**command.told)

    @abstractmethod
    def _start(self, end: Channel) -> int:
        """Start it, with this end of its channel; return its number."""

    @abstractmethod
    def returncode(self, seconds: float = 0.0) -> int | None:
        """Return how it has ended, negative: by which signal; None where it does not within so many seconds.

        Raises ServerError where nobody knows.
        """

    def send_signal(self, number: int) -> None:
        """Send a signal to it and to all of its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it at once, with what it has started."""
        self.send_signal(signal.SIGKILL)
        with suppress(ServerError):
            self.returncode(_END_SECONDS)
        self.channel.close()

    def finish(self, seconds: float) -> Ended:
        """Hear it until it ends; end it where that takes longer. Raises ServerError."""
        messages: list[Message] = []
        end, is_closed = time.monotonic() + seconds, False
        try:
            while (returncode := self.returncode()) is None and (left := end - time.monotonic()) > 0:
                if is_closed:  # it is about to end
                    self.returncode(left)
                elif self.channel in self._wait(min(left, _LOOK_SECONDS)):
                    message = self.channel.recv()
                    is_closed = message is None
                    messages += [message] if message else []
            if returncode is None:
                self.send_signal(signal.SIGKILL)
                self.returncode(_END_SECONDS)
            messages += self._left_in_channel()
        except BaseException:
            self.kill()
            raise
        self.channel.close()
        is_finished = messages[-1:] == [FINISHED]
        output = end_of_output(self.command.output)
        return Ended(returncode, output, messages[:-1] if is_finished else messages, is_finished)

    def await_message(self, end: float) -> Message | None:
        """Return what it says next, None where it ends instead. end: by time.monotonic. Raises TimeoutError, ServerError."""
        while self.channel not in self._wait(_LOOK_SECONDS):
            if self.returncode() is not None:
                return next(iter(self._left_in_channel()), None)
            if time.monotonic() > end:
                raise TimeoutError("it takes too long")
        return self.channel.recv()

    def _wait(self, seconds: float) -> list[Any]:
        """Wait until it says something, or may have ended."""
        return wait([self.channel], seconds)

    def _left_in_channel(self) -> list[Message]:
        """Return what it had said before it ended."""
        found: list[Message] = []
        with suppress(TimeoutError):
            while message := self.channel.recv(0):
                found.append(message)
        return found


class ForkedProcess(Process):
    """A worker that a server has forked."""

    def __init__(self, server: ForkServer, command: Command) -> None:
        self._server = server
        super().__init__(command)

    def _start(self, end: Channel) -> int:
        return self._server.fork(self.command, end)

    def returncode(self, seconds: float = 0.0) -> int | None:
        return self._server.returncode(self.pid, seconds)

    def _wait(self, seconds: float) -> list[Any]:
        return wait([self.channel, self._server], seconds)


class StartedProcess(Process):
    """A worker that begins with a new interpreter."""

    def _start(self, end: Channel) -> int:
        command, parent = self.command, os.getpid() if threading.current_thread() is threading.main_thread() else 0
        environment = {**command.environment, CHANNEL_VARIABLE: f"{end.fileno()} {parent}"}
        with command.output.open("wb") as output:
            words = [command.module, *command.arguments]
            self._process = started(words, command.folder, environment, end, output, command.python)
        return self._process.pid

    def returncode(self, seconds: float = 0.0) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Launcher:
    """Starts the workers of a run. Once one cannot be forked, or `stop_forking` is called, all others begin by themselves.

    modules: returns what a server imports ahead. keeps_server: whether workers live on that must not end with their server,
    so that another environment does not start another server.
    """

    #: elsewhere a library that has threads may not live through a fork, and nobody says whether it has
    can_fork = sys.platform == "linux"

    def __init__(self, modules: Callable[[], Sequence[str]], keeps_server: bool = False) -> None:
        self._modules, self._keeps_server = modules, keeps_server
        self.server: ForkServer | None = None

    def start_ahead(self, like: Command) -> None:
        """Have a server import what it needs while this process goes on; it forks commands like this one."""
        if self.can_fork and self.server is None:
            with suppress(ServerError):  # whoever needs it tries again, and says why it cannot serve
                self.server = ForkServer(like, self._modules())

    def start(self, command: Command, is_forked: bool = True) -> Process:
        """Start a worker, forked where that is asked for and can be."""
        return (self.fork(command) if is_forked else None) or StartedProcess(command)

    def fork(self, command: Command) -> Process | None:
        """Return a forked worker, None where none can be had."""
        if not self.can_fork:
            return None
        try:
            return ForkedProcess(self._serving(command), command)
        except ServerError as error:
            self.stop_forking(str(error))
            return None
        except BaseException:
            self.close()
            raise

    def stop_forking(self, reason: str) -> None:
        """Fork nothing any more, and end what was forked."""
        _log.info("no worker is forked any more: %s", reason)
        self.can_fork = False
        self.close()

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def _serving(self, command: Command) -> ForkServer:
        """Return the server, a new one where the last was started in another environment."""
        asked = command.environment, command.folder
        if self.server is not None and not self._keeps_server and (self.server.environment, self.server.folder) != asked:
            self.close()
        if self.server is None:
            self.server = ForkServer(command, self._modules())
        return self.server
