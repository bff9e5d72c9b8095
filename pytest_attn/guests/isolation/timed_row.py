"""What calls in a row are given, and digests of what they return, as both processes compute them, each by itself."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pytest_attn.backends.machine import wait
from pytest_attn.backends.streams import capturing, side_stream
from pytest_attn.workloads.dtypes import movable
from pytest_attn.workloads.kv_layout import spans_of

#: bytes of a word, by which signs are changed and sums taken and a seed is sent
WORD = 8
#: words after which signs repeat, a prime: rows of q and of k hardly ever have the same; and words at which a tensor may begin
_PERIOD, _ALIGNED = 509, 8
#: how often the time is taken of what a row does beside its calls; the shortest counts
_TRIES = 3


class RowData:
    """The tensors of calls in a row: those of one call, each number under a sign that is drawn, and drawn anew for each call.

    Numbers are distributed as they were. No score, result or gradient can be known before the seed is, nor before the call
    before has a result. What changes: dout, and but in a backward pass alone q, k and v. On a GPU k and v stay: to change all
    keys takes longer than to decode a token. douts: with None for a result that has none.
    """

    def __init__(self, given: Sequence[Tensor], douts: Sequence[Tensor | None], direction: str, seed: int) -> None:
        inputs = [] if direction == "backward" else given if given[0].device.type == "cpu" else given[:1]
        changed = [one for one in (*inputs, *douts) if one is not None and one.is_floating_point()]
        sizes = dict.fromkeys(one.element_size() for one in changed)
        self._rooms = [_Room([one for one in changed if one.element_size() == size]) for size in sizes]
        self._device = given[0].device
        self.draw(seed)
        views = {id(one): view for room in self._rooms for one, view in room.views}
        self._given = [views.get(id(one), one) for one in given]
        self._douts = [views.get(id(one), one) for one in douts]

    def draw(self, seed: int) -> None:
        """Draw the signs, which lie where those before lay."""
        generator = torch.Generator(self._device).manual_seed(seed)
        for room in self._rooms:
            room.draw(generator)

    def after(self, before: Tensor | None) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return what the call is given that follows one with this digest, None for the first, and its douts.

        They stay until the next is asked for.
        """
        factor = 1 if before is None else before.sum().bitwise_or_(1)
        for room in self._rooms:
            room.fill(factor)
        return self._given, self._douts


class _Room:
    """Memory for tensors whose elements have one size. views: each of these, and as it lies here."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        size, device, spans = tensors[0].element_size(), tensors[0].device, spans_of(tensors)
        begin, elements = {}, 0
        for memory, (start, stop) in spans.items():
            begin[memory] = elements - start
            elements += -((start - stop) * size // (_ALIGNED * WORD)) * (_ALIGNED * WORD // size)
        self._numbers = torch.zeros(-(-elements * size // (_PERIOD * WORD)), _PERIOD, dtype=torch.int64, device=device)
        self._filled = torch.empty_like(self._numbers)
        self._drawn = torch.empty(_PERIOD, dtype=torch.int64, device=device)
        self._are_signs = int.from_bytes((b"\0" * (size - 1) + b"\x80") * (WORD // size), "little", signed=True)
        self._signs = torch.empty_like(self._drawn)
        self.views = []
        for one in tensors:
            lies = one.size(), one.stride(), int(one.storage_offset()) + begin[one.untyped_storage().data_ptr()]
            numbers, view = (room.view(-1).view(one.dtype).as_strided(*lies) for room in (self._numbers, self._filled))
            movable(numbers).copy_(movable(one.detach()))
            self.views.append((one, view.requires_grad_(one.requires_grad)))

    def draw(self, generator: torch.Generator) -> None:
        """Draw signs. No word that is drawn is negative."""
        self._drawn.random_(generator=generator).bitwise_left_shift_(1)

    def fill(self, factor: Tensor | int) -> None:
        """Have the numbers here, under signs that depend on a factor."""
        torch.mul(self._drawn, factor, out=self._signs).bitwise_and_(self._are_signs)
        torch.bitwise_xor(self._numbers, self._signs, out=self._filled)


def replayed(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what launches on a GPU all that `run` launches, from a graph, which takes no time of the host's for each.

    Raises what cannot be captured raises.
    """
    stream, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
    with capturing(graph, stream):
        run()
    graph.replay()  # the first one takes longer
    wait(device)
    return graph.replay


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the words of each tensor, which only who has all of its bytes can tell."""
    sums = []
    for one in tensors:
        found = bytes_of(one)
        if (more := -len(found) % WORD) or found.storage_offset() % WORD:
            found = torch.nn.functional.pad(found, (0, more))
        sums.append(found.view(torch.int64).sum())
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, one after the other."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8) if dense.numel() else dense.new_empty(0, dtype=torch.uint8)


def seconds_beside(
    given: Sequence[Tensor],
    douts: Sequence[Tensor | None],
    direction: str,
    results: Sequence[Tensor],
    calls: int,
    is_replayed: bool = False,
) -> float:
    """Return the seconds that a row takes without its calls. results: those of one. is_replayed: from a graph.

    They are what the data take to change, and to be read once they have left the cache, what the digests take, and what it
    takes longer to write all results than one after the other to the same place.
    """
    device = given[0].device
    clock = time.thread_time if device.type == "cpu" else time.perf_counter  # which other work cannot make longer

    def seconds(is_row: bool) -> float:
        rooms = [[torch.zeros_like(one) for one in results] for _ in range(calls if is_row else 1)]
        row = RowData(given, douts, direction, seed=0) if is_row else None
        found = list[Tensor]()

        def run() -> None:
            found.clear()
            for number in range(calls):
                tensors = itertools.chain(*row.after(found[-1] if found else None)) if row else (*given, *douts)
                digest(one for one in tensors if one is not None)
                for room, one in zip(rooms[number if is_row else 0], results, strict=True):
                    room.copy_(one)
                found.append(digest(results if is_row else ()))

        again = replayed(run, device) if is_replayed else run
        wait(device)
        begun = clock()
        if row:
            row.draw(1)
        again()
        torch.cat(found).cpu()
        return clock() - begun

    with side_stream(device) if is_replayed else contextlib.nullcontext():
        return max(0.0, min(seconds(True) for _ in range(_TRIES)) - min(seconds(False) for _ in range(_TRIES)))
