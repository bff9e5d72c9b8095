"""Frames between a judge and the process of an isolated callable, over a socket, and tensors in memory that both have.

The process may be anybody's. So the judge unpickles nothing that comes from it, maps nothing that it may shorten, and copies
what it returns before it looks at it.
"""

import ctypes
import io
import os
import pickle
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: hides where a place in memory is
_SECRET = os.urandom(16)
#: bytes of one system call
_PART = 1 << 30
_ALIGNMENT = 64
#: seconds between two looks at whether a process has ended whose socket others may hold, too
_LOOK_SECONDS = 0.5
#: characters of a text in an answer
MOST_TEXT = 20_000
#: bytes of shared memory that are kept for the next call
_KEPT = 1 << 28
_LENGTH = struct.Struct("!Q")


class GarbageError(Exception):
    """Bytes have come that are nothing that was agreed upon."""


class FrameSocket:
    """One end of a connected socket, over which frames of bytes go."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, frame: bytes, seconds: float | None = None) -> None:
        """Send a frame. Raises OSError, TimeoutError among them."""
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(
        self, end: float = float("inf"), longest: int = 1 << 40, has_ended: Callable[[], bool] = lambda: False
    ) -> bytes | None:
        """Return the next frame, None where the other end is closed, or its process has ended.

        end: by time.monotonic. Raises TimeoutError, GarbageError for a frame of more bytes than `longest`.
        """
        header = self._read(_LENGTH.size, end, has_ended)
        if header is None:
            return None
        length = int(_LENGTH.unpack(header)[0])
        if length > longest:
            raise GarbageError(f"a frame of {length:,} bytes")
        return self._read(length, end, has_ended)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, length: int, end: float, has_ended: Callable[[], bool]) -> bytes | None:
        found = bytearray()
        was_over = False
        while len(found) < length:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(min(remaining, _LOOK_SECONDS))
            try:
                part = self._socket.recv(min(length - len(found), 1 << 20))
            except TimeoutError:
                if was_over:
                    return None
                was_over = has_ended()
                continue
            except ConnectionError:
                return None
            if not part:
                return None
            found += part
        return bytes(found)


# -- memory ------------------------------------------------------------------------------------------------------------------


def shared_memory() -> int:
    """Return the descriptor of memory that this process and its children can share."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pytest-attn")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Placed(NamedTuple):
    """A tensor in memory that was sent: in which of the storages, and how."""

    storage: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    needs_grad: bool
    device: str


class Parcel(NamedTuple):
    """Tensors that were sent: the bytes of each storage, one behind the other, and what lies in them.

    places: numbers that tell where storages lie in the sender's memory, and no more.
    """

    storages: tuple[int, ...]
    tensors: tuple[Placed, ...]
    places: tuple[int, ...]


def storage_of(tensor: Tensor) -> Tensor:
    """Return all of the memory that a tensor is a view of, as bytes on its device."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def put(memory: int, tensors: Sequence[Tensor]) -> tuple[Parcel, list[Tensor]]:
    """Write tensors as they lie, what shares memory once; return what was written, and the storages as bytes."""
    storages: dict[tuple[int, str], int] = {}
    whole: list[Tensor] = []
    placed = []
    for tensor in tensors:
        key = tensor.untyped_storage().data_ptr(), str(tensor.device)
        if key not in storages or not key[0]:
            storages[key] = len(whole)
            whole.append(storage_of(tensor.detach()))
        at = storages[key]
        lies = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        placed.append(Placed(at, str(tensor.dtype).removeprefix("torch."), *lies, tensor.requires_grad, str(tensor.device)))
    write(memory, whole)
    places = tuple(hash((_SECRET, one.data_ptr())) for one in whole)
    return Parcel(tuple(one.numel() for one in whole), tuple(placed), places), whole


def taken(memory: int, parcel: Parcel, before: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Read what `put` has written; return the tensors, and the storages as bytes. before: those to lie in, if any."""
    devices = {one.storage: one.device for one in parcel.tensors}
    read = read_bytes(memory, parcel.storages)
    whole = [one.to(devices[number]) for number, one in enumerate(read)]
    if before:
        whole = [now.copy_(new) for now, new in zip(before, whole, strict=True)]
    tensors = []
    for one in parcel.tensors:
        made = torch.empty(0, dtype=getattr(torch, one.dtype), device=one.device)
        made.set_(whole[one.storage].untyped_storage(), one.offset, one.size, one.stride)
        tensors.append(made.requires_grad_(one.needs_grad))
    return tensors, whole


def write(memory: int, storages: Sequence[Tensor]) -> None:
    """Write bytes, one storage behind the other."""
    start = 0
    for one in storages:
        here = one.cpu()
        view = _view(here)
        for first in range(0, len(view), _PART):
            part = view[first : first + _PART]
            done = 0
            while done < len(part):
                done += os.pwrite(memory, part[done:], start + first + done)
        start = _behind(start, len(view))


def read_bytes(memory: int, lengths: Sequence[int]) -> list[Tensor]:
    """Return copies of bytes, one storage behind the other. Raises GarbageError where there are fewer."""
    start, found = 0, []
    for length in lengths:
        made = torch.empty(length, dtype=torch.uint8)
        view = _view(made)
        done = 0
        while done < length:
            count = os.preadv(memory, [view[done : done + _PART]], start + done)
            if not count:
                raise GarbageError(f"{length - done:,} bytes too few")
            done += count
        found.append(made)
        start = _behind(start, length)
    return found


def released(memory: int) -> None:
    """Give back what is more than a call mostly needs."""
    if os.fstat(memory).st_size > _KEPT:
        os.ftruncate(memory, 0)


def _view(made: Tensor) -> memoryview:
    return (
        memoryview((ctypes.c_char * made.numel()).from_address(made.data_ptr() or 1)).cast("B")
        if made.numel()
        else memoryview(b"")
    )


def _behind(start: int, length: int) -> int:
    return -(-(start + length) // _ALIGNMENT) * _ALIGNMENT


# -- orders, from the judge: anything that can be pickled, tensors apart -----------------------------------------------------


def pickled(order: object) -> tuple[bytes, list[Tensor]]:
    """Return an order without its tensors, and these."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if type(obj) is not Tensor:
                return None
            tensors.append(obj)
            return len(tensors) - 1

    text = io.BytesIO()
    Pickler(text, protocol=pickle.HIGHEST_PROTOCOL).dump(order)
    return text.getvalue(), tensors


def unpickled(text: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the order of `pickled`. Raises what importing its functions raises."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Tensor:
            return tensors[int(pid)]

    return Unpickler(io.BytesIO(text)).load()
