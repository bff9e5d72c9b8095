"""Data for timed calls, none of which has been there before, and memory for them that stays where it is.

Data are random, and so is the sum of two blocks of random elements that are repeated, each with a period of its own: q, k, v
and dout, which begin anywhere in both blocks, are as good as drawn anew. Blocks stay in caches, as what is not copied does.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pytest_attn.workloads.dtypes import is_quantized, movable
from pytest_attn.workloads.kv_layout import spans_of

#: elements of both blocks, which have no common divisor; on a GPU few tensors are longer
_PERIODS, _PERIODS_OF_GPU = (65_521, 65_519), (4_194_301, 4_194_287)
#: bytes between the places where tensors may begin in what is handed out, and how many places there are, as bits
_STEP, _PLACES = 64, 9
#: bytes to which places in both blocks are aligned, as a GPU likes them
_ALIGNED = 16
#: a set begins at a multiple of so many bytes, and so many more than the one before: where tensors lie moves short kernels
APART = 256
#: bytes of what rooms are made of
_WORD = 8
#: how many sets of tensors are filled together at most
_MOST_DRAWN = 64


class Place(NamedTuple):
    """Where the elements of a memory begin in both blocks, and by how much further on in what is handed out, if there."""

    first: int
    second: int
    further: int = 0


#: where q, k and v, or dout, begin
Places: TypeAlias = tuple[Place, ...]


class RandomPool:
    """Random elements like those of some tensors, of which tensors of their shapes and strides are made.

    What shares memory begins at the same place. What a kernel is given is never read again, as it may write there.
    """

    def __init__(self, tensors: Sequence[Tensor], chosen: random.Random) -> None:
        self._chosen = chosen
        spans = spans_of(tensors)
        memories = list(spans)
        seed = torch.Generator(tensors[0].device).manual_seed(chosen.getrandbits(32))
        self._periods = _PERIODS if tensors[0].device.type == "cpu" else _PERIODS_OF_GPU
        self._like: list[Tensor] = []
        self._sizes: list[int] = []  # in elements, of what lies at a place
        self._blocks: list[list[Tensor]] = []
        for memory, (start, stop) in spans.items():
            of_memory = next(t for t in tensors if t.untyped_storage().data_ptr() == memory)
            self._like.append(of_memory.detach())
            self._sizes.append(max(0, stop - start))
            self._blocks.append([_block_of(of_memory, period, seed) for period in self._periods])
            if is_quantized(of_memory):
                self._blocks[-1][1] = _signs(self._blocks[-1][1], of_memory.dtype)
        self._handed: list[Tensor] = []
        self._handed_at: Places = ()
        at = [memories.index(t.untyped_storage().data_ptr()) for t in tensors]
        self._lie = [
            (which, t.size(), t.stride(), int(t.storage_offset()) - spans[memories[which]][0])
            for which, t in zip(at, tensors, strict=True)
        ]

    def draw(self, number: int = 1) -> list[Places]:
        """Return where the next tensors begin, of so many sets: one after the other, as `rooms` lie."""
        drawn = []
        for like, row in zip(self._like, self._rows(), strict=True):
            unit = _ALIGNED // like.element_size()
            first, second = (self._chosen.randrange(period // unit) * unit for period in self._periods)
            drawn.append([self._further(Place(first, second), at * row) for at in range(number)])
        return list(zip(*drawn, strict=True))

    def at(self, places: Places) -> list[Tensor]:
        """Return the tensors that begin there."""
        rooms = [like.new_empty(size) for like, size in zip(self._like, self._sizes, strict=True)]
        self._write(rooms, places)
        return self._views(rooms, [0] * len(rooms))

    def draw_handed(self) -> Places:
        """Return where the next tensors begin that `handed` gives."""
        if not self._handed:
            steps = [_STEP // like.element_size() << _PLACES for like in self._like]
            self._handed = [
                like.new_empty(size + more) for like, size, more in zip(self._like, self._sizes, steps, strict=True)
            ]
            self.move()
        further = [self._chosen.getrandbits(_PLACES) * _STEP // like.element_size() for like in self._like]
        return tuple(self._further(at, by)._replace(further=by) for at, by in zip(self._handed_at, further, strict=True))

    def handed(self, places: Places) -> list[Tensor]:
        """Return the tensors that begin there for a kernel, which may write to them."""
        return self._views(self._handed, [place.further for place in places])

    def move(self) -> None:
        """Have other data in what is handed: what a kernel keeps of these, such as scores or packed keys, is of no use."""
        if self._handed:
            (self._handed_at,) = self.draw()
            self._write(self._handed, self._handed_at)

    def rooms(self, number: int) -> list[Tensor]:
        """Return memory for so many sets: for each that the tensors lie in, (number, words), a row longer than a set."""
        shapes = [(number, row * like.element_size() // _WORD) for row, like in zip(self._rows(), self._like, strict=True)]
        return [like.new_empty(shape, dtype=torch.int64) for like, shape in zip(self._like, shapes, strict=True)]

    def views_in(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in one row of each of `rooms`; autograd does not see that the rows are written to."""
        rooms = [row.data.view(like.dtype) for row, like in zip(rows, self._like, strict=True)]
        return self._views(rooms, [int(room.storage_offset()) for room in rooms])

    def fill(self, rooms: Sequence[Tensor], places: Sequence[Places]) -> None:
        """Put what begins at places that were drawn together into rows of `rooms`."""
        self._write([room.view(like.dtype).flatten() for room, like in zip(rooms, self._like, strict=True)], places[0])

    def _rows(self) -> list[int]:
        """Elements of a row of `rooms`."""
        sizes = [(size * like.element_size(), like.element_size()) for size, like in zip(self._sizes, self._like, strict=True)]
        return [(1 - -size // APART) * APART // element for size, element in sizes]

    def _further(self, place: Place, by: int) -> Place:
        return Place(*((start + by) % period for start, period in zip(place, self._periods, strict=False)))

    def _write(self, rooms: Sequence[Tensor], places: Places) -> None:
        for room, place, (first, second) in zip(rooms, places, self._blocks, strict=True):
            out = movable(room)
            for part, block in _beside(out, first, place.first):
                part.copy_(block)
            for part, block in _beside(out, second, place.second):
                if is_quantized(room):
                    part.bitwise_xor_(block)
                else:
                    part.add_(block)

    def _views(self, rooms: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        return [rooms[which].as_strided(size, stride, start + starts[which]) for which, size, stride, start in self._lie]


def _beside(out: Tensor, block: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of a room, with what is repeated there of a block that holds its period twice."""
    period = len(block) // 2
    whole = len(out) // period * period
    if whole:
        yield out[:whole].view(-1, period), block[start : start + period]
    yield out[whole:], block[start : start + len(out) - whole]


def _block_of(tensor: Tensor, period: int, generator: torch.Generator) -> Tensor:
    """Return random elements of a tensor twice, so that a period of them may begin anywhere; of size for sums of two."""
    elements = movable(tensor.detach()).reshape(-1)
    if not len(elements):
        return elements.new_zeros(2 * period)
    block = elements[torch.randint(len(elements), (period,), device=tensor.device, generator=generator)].repeat(2)
    return block if is_quantized(tensor) else block.mul_(0.5**0.5)


def _signs(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bits by which some elements of a quantized dtype change their signs."""
    return block & 0x80 if dtype.is_floating_point else (block.view(torch.int8) >> 7).view(block.dtype)


class TensorSets(ABC):
    """Sets of q, k and v, each on other data, which come from a pool. tensors: of each set, as the kernel is given them."""

    def __init__(self, pool: RandomPool, number: int) -> None:
        self._pool = pool
        self._places: dict[int, Places] = {}
        self.tensors = self._allocated(number)
        self.renew(range(number))

    def places(self, at: int) -> Places:
        """Return where what is in a set now lies in the pool."""
        return self._places[at]

    def renew(self, sets: Sequence[int]) -> None:
        """Put other data into some sets."""
        for first, stop in _runs(sets):
            places = self._pool.draw(stop - first)
            self._copy(first, places)
            self._places.update(zip(range(first, stop), places, strict=True))

    @abstractmethod
    def move(self) -> None:
        """Have the same data in other memory."""

    @abstractmethod
    def _allocated(self, number: int) -> list[list[Tensor]]:
        """Return the tensors of so many sets."""

    @abstractmethod
    def _copy(self, first: int, places: Sequence[Places]) -> None:
        """Copy what begins at some places into the sets from `first` on."""


class WholeSets(TensorSets):
    """Sets of all that is in the pool: set after set in one piece for each memory, filled by one copy."""

    _rooms: list[Tensor]

    def move(self) -> None:
        self._rooms = [room.clone() for room in self._rooms]
        self.tensors = self._views()

    def _allocated(self, number: int) -> list[list[Tensor]]:
        self._rooms = self._pool.rooms(number)
        return self._views()

    def _views(self) -> list[list[Tensor]]:
        return [self._pool.views_in([room[at] for room in self._rooms]) for at in range(len(self._rooms[0]))]

    def _copy(self, first: int, places: Sequence[Places]) -> None:
        self._pool.fill([room[first : first + len(places)] for room in self._rooms], places)


def _runs(sets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield sets that follow each other, as the first and one past the last, no more than are drawn at once."""
    ordered = sorted(set(sets))
    start = 0
    for at in range(1, len(ordered) + 1):
        is_over = at == len(ordered) or ordered[at] != ordered[at - 1] + 1 or at - start == _MOST_DRAWN
        if is_over:
            yield ordered[start], ordered[at - 1] + 1
            start = at
