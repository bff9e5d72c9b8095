"""Start the processes of a pool: forked by a server that has imported torch, or by themselves where that cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from pytest_attn.ranks.rank import LATE_IMPORTS
from pytest_attn.ranks.wire import OUTPUT
from pytest_attn.session.forked import Command, ForkServer, ServerError, modules_ahead
from pytest_attn.session.processes import arguments_of

_END_SECONDS = 5.0


class Process(Protocol):
    """A process of a pool."""

    pid: int

    def returncode(self) -> int | None:
        """Return how it ended, once it has or is about to; negative: by which signal. None where nobody knows."""


class Launcher:
    """Starts the ranks of a run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._server: ForkServer | None = None
        self._can_be_forked = sys.platform == "linux"

    def start(self, rank: int, folder: Path, variables: Mapping[str, str]) -> Process:
        """Start a rank. variables: of its environment, beside those of this process."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment.pop("PYTEST_CURRENT_TEST", None)
        own = folder / f"own-{rank}"
        own.mkdir()
        command = Command(
            self._arguments(own), {**environment, **variables}, self._config.invocation_params.dir, own, own / OUTPUT, 0
        )
        command = command._replace(output=folder / OUTPUT.format(rank))
        if self._can_be_forked:
            try:
                self._server = self._server or ForkServer(command, [*modules_ahead(), *LATE_IMPORTS])
                return _Forked(self._server, self._server.start(command))
            except ServerError:
                self._can_be_forked = False
                self.close()
        return _Started(command)

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _arguments(self, folder: Path) -> list[str]:
        config = self._config
        is_selected = config.args_source == pytest.Config.ArgsSource.ARGS
        named = dict.fromkeys(argument.partition("::")[0] for argument in config.args) if is_selected else {}
        plugins = ["-p", "no:faulthandler", "-p", "pytest_attn.ranks.worker"]
        base = f"--basetemp={folder / 'tmp'}"  # or each would empty the others'
        return [*arguments_of(config, folder), *plugins, base, *named]  # named: for their conftests


class _Forked:
    """A process that the server has forked."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._returncode: int | None = None

    def returncode(self) -> int | None:
        if self._returncode is None:
            with suppress(ServerError, TimeoutError):
                self._returncode = self._server.ended(self.pid)
        return self._returncode


class _Started:
    """A process of its own."""

    def __init__(self, command: Command) -> None:
        with command.output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *command.arguments],
                cwd=command.folder,
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def returncode(self) -> int | None:
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return None


def send(process: Process, number: int) -> None:
    """Send a signal to a process and those of its own group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def kill(process: Process) -> None:
    """End a process at once."""
    send(process, signal.SIGKILL)
