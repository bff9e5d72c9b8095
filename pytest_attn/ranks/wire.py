"""What the judge and its ranks say to one another: lines of JSON over a socket; tensors go through files."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_attn.ranks.team import Tensors

if TYPE_CHECKING:
    import torch

Message: TypeAlias = "dict[str, Any]"

#: set for each rank: the socket of the judge
SOCKET_VARIABLE = "PYTEST_ATTN_RANK_SOCKET"
#: what a rank leaves in the folder of its pool
STACK, COLLECTIVE, OUTPUT = "stack-{}", "collective-{}", "output-{}"
#: there, where ranks begin a sample together
STARTS = "starts"


class Line:
    """One end of the line between the judge and a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for select."""
        return self._socket.fileno()

    def say(self, **message: object) -> None:
        """Send a message; one that nobody listens to any more is lost, as the end of the line tells soon."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def hear(self) -> Message | None:
        """Wait for the next message; None where the other end is closed."""
        while b"\n" not in self._read:
            try:
                more = self._socket.recv(1 << 16)
            except OSError:
                more = b""
            if not more:
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        message: Message = json.loads(line)
        return message

    @property
    def has_more(self) -> bool:
        """Whether a whole message was read already."""
        return b"\n" in self._read

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors as they lie in memory, from whatever device."""
    import torch

    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Read tensors that `write_tensors` wrote, onto the CPU."""
    import torch

    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found
