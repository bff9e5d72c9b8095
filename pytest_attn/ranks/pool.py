"""A pool of ranks that stays for the next case: the judge hands it a test, and each of its calls; a pool that failed ends."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_attn.correctness.contract import ContractError
from pytest_attn.latency.work import StaleError
from pytest_attn.ranks.launching import Launcher, Process, kill, send
from pytest_attn.ranks.lost import Seen, describe_ended, describe_hang, describe_wrong
from pytest_attn.ranks.team import RankRaisedError, RanksLostError, Team, Tensors
from pytest_attn.ranks.wire import SOCKET_VARIABLE, Line, Message, read_tensors, write_tensors
from pytest_attn.session.child import OWN_VARIABLE, own_processes

if TYPE_CHECKING:
    import torch

#: how long ranks may take to start, and to end by themselves
_START_SECONDS, _END_SECONDS = 300.0, 5.0
#: how long the others have once a rank has raised: what all of them raise comes at about the same time
_GRACE_SECONDS = 1.0
#: how long an aborted rank takes to write its stacks
_STACK_SECONDS = 3.0
#: by how much the group's own timeout is longer: the pool's tells more
_LATER_SECONDS = 60.0


class Pool(Team):
    """So many ranks on one kind of device. seconds: how long a call may take, 0 for as long as it will.

    share: how they share a GPU, "no" where each has its own.
    is_usable: whether the next case may use it. Raises RanksLostError where the ranks do not start.
    """

    def __init__(self, launcher: Launcher, ranks: int, kind: str, seconds: float, share: str = "no") -> None:
        self.ranks, self.kind, self._seconds, self._share = ranks, kind, seconds, share
        self.is_usable = True
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="pytest-attn-ranks-", dir=base))
        self._processes: list[Process] = []
        self._lines: dict[int, Line] = {}
        self._ended: dict[int, Message] = {}
        self._is_running = self._is_doubtful = False
        self.is_warm = False  # whether anything was timed on its GPUs
        self._files = 0
        try:
            self._start(launcher)
        except BaseException:
            self.discard()
            raise

    # -- a case ----------------------------------------------------------------------------------------------------------

    def run(self, name: str) -> None:
        """Have all ranks run a test, named as on a command line."""
        self._ended = {}
        self._is_running = True
        self._say(do="run", name=name)

    def await_callable(self) -> None:
        """Wait until all ranks have come to their next judgment. Raises RanksLostError where one has ended its test."""
        self._answers("checking")

    def leave(self, verdict: object) -> None:
        """Have the ranks go on with their test after a judgment, whose verdict is handed to them."""
        path = self._new_file()
        path.write_bytes(pickle.dumps(verdict))
        self._say(do="next", verdict=str(path))

    def finish(self) -> str:
        """End the case on all ranks; return what went wrong in a rank's test after its last judgment, "" for nothing."""
        if not self._is_running or not self.is_usable:
            return ""
        self._is_running = False
        self._say(do="over")
        self._answers("ended")
        for path in self.folder.glob("result-*"):
            path.unlink()
        if self._is_doubtful:  # what a callable that raised has begun may still be under way
            self.discard()
        wrong = [rank for rank, ended in sorted(self._ended.items()) if ended["ended"] == "failed"]
        return f"rank {wrong[0]} of {self.ranks}: its test failed:\n{self._ended[wrong[0]]['text']}" if wrong else ""

    def forward(self, number: int, tensors: Tensors, backward: bool) -> list[Tensors]:
        """Call the callable of all ranks."""
        return self._call("forward", number, tensors, backward=backward)

    def backward(self, number: int, dout: torch.Tensor) -> list[Tensors]:
        """Have all ranks compute the gradients of a call."""
        return self._call("backward", number, {"dout": dout})

    def step(self, what: str, **given: object) -> list[Any]:
        """Have all ranks make a step of a measurement (ranks/timing.py); return their answers, by rank."""
        self._say(do="step", what=what, given=given)
        answers = self._results()
        return [answers[rank]["result"] for rank in range(self.ranks)]

    # -- its end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
        if self.is_usable and not self._is_running:
            self._say(do="end")
            end = time.monotonic() + _END_SECONDS
            for line in self._lines.values():
                while select.select([line], [], [], max(end - time.monotonic(), 0))[0] and line.hear() is not None:
                    pass
        self.discard()

    def discard(self) -> None:
        """Kill the ranks; the next case needs another pool."""
        self.is_usable = False
        for line in self._lines.values():
            line.close()
        self._lines = {}
        for process in self._processes:
            kill(process)
        for process in self._processes:
            process.returncode()
        self._processes = []
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- details -----------------------------------------------------------------------------------------------------------

    def _start(self, launcher: Launcher) -> None:
        """Start all ranks, and wait until each has met the others."""
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._store = store  # the ranks meet in it, as those of torchrun do in its agent's
        address = self.folder / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(self.ranks)
            for rank in range(self.ranks):
                variables = {**_as_torchrun(rank, self.ranks, store.port), SOCKET_VARIABLE: str(address)}
                self._processes.append(launcher.start(rank, self.folder, variables))
            end = time.monotonic() + _START_SECONDS
            while len(self._lines) < self.ranks:
                self._accept(listener, end)
        timeout = self._seconds + _LATER_SECONDS if self._seconds else 1e6
        self._say(folder=str(self.folder), kind=self.kind, timeout=timeout, share=self._share)
        self._answers("ready", _START_SECONDS)

    def _accept(self, listener: socket.socket, end: float) -> None:
        """Take the line of one more rank. Raises RanksLostError where a rank ends before, or none comes in time."""
        while not select.select([listener], [], [], 0.2)[0]:
            for rank in set(range(self.ranks)) - self._lines.keys():
                if not _is_alive(self._processes[rank].pid) or time.monotonic() > end:
                    raise RanksLostError(describe_ended(rank, self._seen(rank), "before it was ready"))
        connection, _ = listener.accept()
        line = Line(connection)
        first = line.hear() or {}
        if "rank" in first:
            self._lines[int(first["rank"])] = line

    def _say(self, **message: object) -> None:
        for line in self._lines.values():
            line.say(**message)

    def _call(self, do: str, number: int, tensors: Tensors, **more: object) -> list[Tensors]:
        path = self._new_file()
        write_tensors(path, tensors)
        try:
            late = number % self.ranks if number > 1 else None  # after the first call, one rank after the other
            self._say(do=do, number=number, tensors=str(path), late=late, **more)
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
        """Return the results of all ranks; raise what the first of them says instead."""
        answers = self._answers("result")
        for kind, error in (("contract", ContractError), ("stale", StaleError), ("raised", RankRaisedError)):
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
                for rank in ready:
                    answer = self._lines[rank].hear()
                    if answer is None:
                        self._give_up_on(rank)
                    if "ended" in answer:
                        self._ended[rank] = answer
                        if wanted != "ended":
                            self._give_up_test(rank, answer)
                    elif wanted == "ended":
                        continue  # it had come to one more judgment
                    answers[rank] = answer
                    if wanted == "result" and "result" not in answer:
                        end = min(end, time.monotonic() + _GRACE_SECONDS)
        except BaseException:
            self.discard()
            raise
        return answers

    def _ready(self, waited: list[int], end: float) -> list[int]:
        """Return ranks that have said something, none where it is too late."""
        told = [rank for rank in waited if self._lines[rank].has_more]
        if told:
            return told
        left = None if end == float("inf") else max(end - time.monotonic(), 0)
        lines = {self._lines[rank]: rank for rank in waited}
        return [lines[line] for line in select.select(list(lines), [], [], left)[0]]

    # -- what went wrong -----------------------------------------------------------------------------------------------------

    def _give_up(self, answers: dict[int, Message], waited: list[int], seconds: float) -> NoReturn:
        """Raise RanksLostError: ranks wait for one another, or for one that has raised."""
        for rank in waited:
            send(self._processes[rank], signal.SIGABRT)  # has faulthandler write the stacks
        end = time.monotonic() + _STACK_SECONDS
        for rank in waited:
            while _is_alive(self._processes[rank].pid) and time.monotonic() < end:
                time.sleep(0.01)
        seen = {rank: self._seen(rank) for rank in waited}
        raised = {rank: answer for rank, answer in answers.items() if "result" not in answer and "checking" not in answer}
        raise RanksLostError(describe_hang(self.ranks, seconds, seen, raised, answers))

    def _give_up_on(self, rank: int) -> NoReturn:
        """Raise RanksLostError: a rank has ended."""
        kill(self._processes[rank])
        seen = self._seen(rank)._replace(returncode=self._processes[rank].returncode())
        others = {other: self._seen(other).collective for other in range(self.ranks) if other != rank}
        raise RanksLostError(describe_ended(rank, seen, others=others))

    def _give_up_test(self, rank: int, ended: Message) -> NoReturn:
        """Raise RanksLostError: a rank is through with its test, while the judge waits for its callable."""
        told = f":\n{ended['text']}" if ended["text"] else " without it"
        raise RanksLostError(f"rank {rank} of {self.ranks}: its test {ended['ended']} before the judgment was made{told}")

    def _seen(self, rank: int) -> Seen:
        return Seen.of(self.folder, rank)

    def _new_file(self) -> Path:
        self._files += 1
        return self.folder / f"tensors-{self._files}"


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process of one host."""
    made = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank, "WORLD_SIZE": ranks}
    made |= {"LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
    given = {name: str(value) for name, value in made.items()}
    given |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    given[OWN_VARIABLE] = ",".join(map(str, sorted(own_processes())))
    if Path("/sys/class/net/lo").exists():
        given["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not be known to itself
    return given


def _is_alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended and was not awaited yet does not."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
        os.kill(pid, 0)
        return not Path("/proc").exists()
    return False
