"""Pools of ranks, which stay for the next case: the judge hands one a test, and each of its calls; one that failed ends.

A rank is a worker (processes/), which does not end with a test; it begins samples together with the others without a message
(`StartBarrier`): the channel takes tens of microseconds, as long as a short call.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from pytest_attn.backends.raised import RemoteRaisedError
from pytest_attn.correctness.contract import ContractError
from pytest_attn.guests.ranks.rank_group import (
    OUTPUT,
    RankGroup,
    RankPostMortem,
    RanksLostError,
    Tensors,
    describe_ended,
    describe_hang,
    describe_wrong,
    read_tensors,
    write_tensors,
)
from pytest_attn.guests.ranks.rank_server import LATE_IMPORTS
from pytest_attn.latency.work import WrongResultError
from pytest_attn.processes.channel import Message, wait
from pytest_attn.processes.fork_server import ServerError, modules_ahead
from pytest_attn.processes.launcher import Launcher, Process
from pytest_attn.processes.worker import FINISHED
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.session.worker_pool import worker_command

#: how long ranks may take to start, and to end by themselves
_START_SECONDS, _END_SECONDS = 300.0, 5.0
#: how long the others have once a rank has raised: what all of them raise comes at about the same time
_GRACE_SECONDS = 1.0
#: how long an aborted rank takes to write its stacks
_STACK_SECONDS = 3.0
#: seconds between two looks at whether a rank has ended whose channel others may hold, too
_LOOK_SECONDS = 1.0
#: by how much the group's own timeout is longer: the pool's tells more
_LATER_SECONDS = 60.0


class Pool(RankGroup):
    """So many ranks on one kind of device. seconds: how long a call may take, 0 for as long as it will.

    is_usable: whether the next case may use it. Raises RanksLostError where the ranks do not start.
    """

    def __init__(self, config: pytest.Config, launcher: Launcher, ranks: int, kind: str, seconds: float) -> None:
        self.ranks, self.kind, self._seconds = ranks, kind, seconds
        self.is_usable = True
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._temporary = ProcessFolder("ranks-", base)
        self.folder = Path(self._temporary.name)
        self._processes: list[Process] = []
        self._ended: dict[int, Message] = {}
        self._is_ready = self._is_running = self._is_doubtful = False
        self.is_warm = False  # whether anything was timed on its GPUs
        self._files = count()
        try:
            self._start(config, launcher)
        except BaseException:
            self.discard()
            raise

    # -- a case ----------------------------------------------------------------------------------------------------------

    def run(self, name: str) -> None:
        """Have all ranks run a test, named as on a command line."""
        self._ended = {}
        self._is_running = True
        self._send(do="run", name=name)

    def await_callable(self) -> None:
        """Wait until all ranks have come to their next judgment. Raises RanksLostError where one has ended its test."""
        self._answers("checking")

    def leave(self, verdict: object) -> None:
        """Have the ranks go on with their test after a judgment, whose verdict is handed to them."""
        path = self.folder / f"result-judged-{next(self._files)}"
        path.write_bytes(pickle.dumps(verdict))
        self._send(do="next", verdict=str(path))

    def finish(self) -> str:
        """End the case on all ranks; return what went wrong in a rank's test after its last judgment, "" for nothing."""
        if not self._is_running or not self.is_usable:
            return ""
        self._is_running = False
        self._send(do="over")
        self._answers("ended")
        for path in self.folder.glob("result-*"):
            path.unlink()
        if self._is_doubtful:  # what a callable that raised has begun may still be under way
            self.discard()
        wrong = [rank for rank, ended in sorted(self._ended.items()) if ended["ended"] == "failed"]
        return f"rank {wrong[0]} of {self.ranks}: its test failed:\n{self._ended[wrong[0]]['text']}" if wrong else ""

    def forward(self, number: int, tensors: Tensors, backward: bool) -> list[Tensors]:
        return self._call("forward", number, tensors, backward=backward)

    def backward(self, number: int, dout: torch.Tensor) -> list[Tensors]:
        return self._call("backward", number, {"dout": dout})

    def step(self, what: str, **given: object) -> list[Any]:
        self._send(do="step", what=what, given=given)
        answers = self._results()
        return [answers[rank]["result"] for rank in range(self.ranks)]

    def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
        if self.is_usable and not self._is_running:
            self._send(do="end")
            end = time.monotonic() + _END_SECONDS
            for process in self._processes:
                process.finish(max(end - time.monotonic(), 0.0))
        self.discard()

    def discard(self) -> None:
        """Kill the ranks; the next case needs another pool."""
        self.is_usable = False
        for process in self._processes:
            process.send_signal(signal.SIGKILL)  # all of them, before any is awaited
        for process in self._processes:
            process.kill()
        self._processes = []
        self._temporary.cleanup()

    # -- details -----------------------------------------------------------------------------------------------------------

    def _start(self, config: pytest.Config, launcher: Launcher) -> None:
        timeout = self._seconds + _LATER_SECONDS if self._seconds else 1e6
        message = {"folder": str(self.folder), "kind": self.kind, "timeout": timeout}
        port = _free_port()
        for rank in range(self.ranks):
            command = worker_command(config, self.folder / f"own-{rank}", [], message)
            command = command._replace(
                arguments=["-p", "no:faulthandler", "-p", "pytest_attn.guests.ranks.rank_server", *command.arguments],
                environment={**command.environment, **_as_torchrun(rank, self.ranks, port)},
                output=self.folder / OUTPUT.format(rank),
            )
            self._processes.append(launcher.start(command))
        self._answers("ready", _START_SECONDS)
        self._is_ready = True

    def _send(self, **message: object) -> None:
        for process in self._processes:
            process.channel.send(**message)

    def _call(self, do: str, number: int, tensors: Tensors, **more: object) -> list[Tensors]:
        path = self.folder / f"tensors-{next(self._files)}"
        write_tensors(path, tensors)
        try:
            late = number % self.ranks if number > 1 else None  # after the first call, one rank after the other
            self._send(do=do, number=number, tensors=str(path), late=late, **more)
            answers = self._results()
        finally:
            path.unlink(missing_ok=True)
        results: list[Tensors] = []
        for rank in range(self.ranks):
            found = Path(answers[rank]["result"])
            results.append(read_tensors(found))
            found.unlink()
        return results

    def _results(self) -> dict[int, Message]:
        """Return the results of all ranks; raise what the first says instead, or NotImplementedError where all decline."""
        answers = self._answers("result")
        declined = [answers[rank].get("declined") for rank in range(self.ranks)]
        if declined[0] and all(declined):
            raise NotImplementedError(declined[0]) from RemoteRaisedError(describe_wrong(0, self.ranks, answers[0]))
        for kind, error in (("contract", ContractError), ("stale", WrongResultError), ("raised", RemoteRaisedError)):
            for rank in (rank for rank in range(self.ranks) if kind in answers[rank]):
                self._is_doubtful = True
                raise error(describe_wrong(rank, self.ranks, answers[rank]))
        return answers

    def _answers(self, wanted: str, seconds: float = 0.0) -> dict[int, Message]:
        """Wait for an answer of every rank. Raises RanksLostError where one ends, or they take too long."""
        answers = {rank: self._ended[rank] for rank in self._ended if wanted == "ended"}
        limit = seconds or self._seconds
        end = time.monotonic() + limit if limit else float("inf")
        try:
            while waited := [rank for rank in range(self.ranks) if rank not in answers]:
                ready = self._ready(waited, end)
                if not ready:
                    self._give_up(answers, waited, limit)
                answers |= {rank: answer for rank in ready if (answer := self._answer(rank, wanted))}
                if wanted == "result" and any("result" not in answer for answer in answers.values()):
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        except BaseException:
            self.discard()
            raise
        return answers

    def _answer(self, rank: int, wanted: str) -> Message | None:
        """Return a rank's answer, None where it had come to one more judgment. Raises RanksLostError where it has ended."""
        answer = None
        with suppress(TimeoutError):
            answer = self._processes[rank].channel.recv(0)
        if answer is None or answer == FINISHED:
            self._give_up_on(rank)
        if "ended" in answer:
            self._ended[rank] = answer
            if wanted != "ended":
                how = f":\n{answer['text']}" if answer["text"] else " without it"
                raise RanksLostError(
                    f"rank {rank} of {self.ranks}: its test {answer['ended']} before the judgment was made{how}"
                )
        elif wanted == "ended":
            return None
        return answer

    def _ready(self, waited: Sequence[int], end: float) -> list[int]:
        """Return ranks that have said something, or have ended; none where it is too late."""
        channels = {self._processes[rank].channel: rank for rank in waited}
        while not (ready := wait(channels, min(max(end - time.monotonic(), 0.0), _LOOK_SECONDS))):
            if ended := [rank for rank in waited if _returncode(self._processes[rank]) is not None]:
                return ended  # and others hold its channel open
            if time.monotonic() >= end:
                return []
        return [channels[one] for one in ready]

    # -- what went wrong -----------------------------------------------------------------------------------------------------

    def _give_up(self, answers: dict[int, Message], waited: list[int], seconds: float) -> NoReturn:
        """Raise RanksLostError: ranks wait for one another, or for one that has raised."""
        # all are stopped before one ends, whose closed connections would let others go on; SIGABRT makes each write its stack
        for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
            for rank in waited:
                self._processes[rank].send_signal(number)
        end = time.monotonic() + _STACK_SECONDS
        for rank in waited:
            _returncode(self._processes[rank], max(end - time.monotonic(), 0.0))
        seen = {rank: self._seen(rank) for rank in waited}
        raised = {rank: answer for rank, answer in answers.items() if "result" not in answer and "checking" not in answer}
        raise RanksLostError(describe_hang(self.ranks, seconds, seen, raised, answers))

    def _give_up_on(self, rank: int) -> NoReturn:
        returncode = _returncode(self._processes[rank], _END_SECONDS)
        seen = self._seen(rank)._replace(returncode=returncode)
        others = {other: self._seen(other).collective for other in range(self.ranks) if other != rank}
        when = "while the case ran" if self._is_ready else "before it was ready"
        raise RanksLostError(describe_ended(rank, seen, when, others))

    def _seen(self, rank: int) -> RankPostMortem:
        return RankPostMortem.of(self.folder, rank)


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process of one host."""
    made: dict[str, object] = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
    made |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks)
    made |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given = {name: str(value) for name, value in made.items()} | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if Path("/sys/class/net/lo").exists():
        given["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not be known to itself
    return given


def _free_port() -> int:
    """Return a port for a callable that opens one there; the ranks themselves meet in a file, which their user alone reads."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _returncode(process: Process, seconds: float = 0.0) -> int | None:
    """Return how a rank has ended, None where it does not within so many seconds, or its server has ended."""
    try:
        return process.returncode(seconds)
    except ServerError:
        return None


class PoolRegistry:
    """The pools of a run: one for each number of ranks and kind of device, which end with the run.

    Starts pools when they are first needed, and again where a case has spoilt one.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._launcher = Launcher(lambda: [*modules_ahead(), *LATE_IMPORTS], keeps_server=True)
        self._pools: dict[tuple[int, str], Pool] = {}
        self.started = 0

    @classmethod
    def of(cls, config: pytest.Config) -> PoolRegistry:
        """Return that of a run, which ends with it."""
        if _POOLS not in config.stash:
            config.stash[_POOLS] = made = cls(config)
            config.add_cleanup(made.close)
        return config.stash[_POOLS]

    def pool(self, ranks: int, kind: str, seconds: float) -> Pool:
        """Return the pool of so many ranks. Raises RanksLostError where it does not start."""
        found = self._pools.get((ranks, kind))
        if found is None or not found.is_usable:
            found = self._pools[ranks, kind] = Pool(self._config, self._launcher, ranks, kind, seconds)
            self.started += 1
        return found

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        self._launcher.close()


_POOLS = pytest.StashKey[PoolRegistry]()
