"""The channel between a pytest and a process that it has started: objects of JSON, over a pair of connected sockets.

multiprocessing.connection frames them and waits for them; nothing is unpickled. Either process has its end from the start:
there is no address at which another process could knock, so no key; and whoever waits learns that a process has ended even if
it ended before it said anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeAlias

Message: TypeAlias = "dict[str, Any]"
#: bytes of a message
_LONGEST = 1 << 26


class Channel:
    """One end. A message holds what JSON does: no tensors, which go through files, and no classes of a test."""

    def __init__(self, end: Connection[Any, Any]) -> None:
        self._connection = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a new channel."""
        mine, theirs = Pipe()
        return cls(mine), cls(theirs)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """Return an end that this process has inherited."""
        return cls(Connection(descriptor))

    def fileno(self) -> int:
        """Return the descriptor, for `wait`."""
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        """Send a message; one that nobody receives any more is lost, as the end of the channel tells soon."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return

    def recv(self, seconds: float | None = None) -> Message | None:
        """Wait for the next message; return None where the other end is closed, or has sent none. Raises TimeoutError."""
        try:
            has_come = self._connection.poll(seconds)
            message = json.loads(self._connection.recv_bytes(_LONGEST)) if has_come else None
        except (EOFError, OSError, ValueError, RecursionError):
            return None
        if not has_come:
            raise TimeoutError(f"nothing was said within {seconds:g} s")
        return message if isinstance(message, dict) else None

    def send_end(self, other: Channel, process: int) -> None:
        """Give the process at the other end an end of another channel. Raises OSError."""
        send_handle(self._connection, other.fileno(), process)

    def recv_end(self) -> int:
        """Return the descriptor of an end that `send_end` gave."""
        return recv_handle(self._connection)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def wait(ends: Iterable[Any], seconds: float) -> list[Any]:
    """Return those of some ends, or of anything else with a descriptor, that have something to say or are closed.

    Empty where none has within so many seconds.
    """
    return connection.wait(list(ends), seconds)
