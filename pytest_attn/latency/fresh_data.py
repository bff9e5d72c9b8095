"""Data for timed calls, none of which has been there before, and memory for them that stays where it is.

Data are random, and so is the sum of two parts of memory that is full of random elements: q, k, v and dout, each the sum of
parts of its own that are drawn before the call, are as good as drawn anew, and cost a copy, or nothing.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pytest_attn.workloads.dtypes import is_quantized, movable
from pytest_attn.workloads.kv_layout import copies_of, spans_of

#: bytes between the places where tensors may begin, and how many places there are, as bits
_STEP, _PLACES = 64, 9
#: how many second parts may begin between two places: a GPU copies what is aligned to 16 bytes faster
_LAGS = 4
#: elements by which what a kernel is handed moves in its memory from sample to sample
_SHIFTS = 1024
#: how many sets of tensors are drawn together, which begin one after the other, and how many places apart at most
_MOST_DRAWN, _MOST_APART = 64, 8
#: bytes of memory from which a tensor is one part and no sum, of which there would be no room for another copy
_MUCH = 1 << 30
#: bytes of what rooms are made of
_WORD = 8


class Place(NamedTuple):
    """Where the first of two parts of a memory begins whose sum a tensor is, and how much further on the other; 0 for none."""

    first: int
    lag: int


#: where q, k and v, or dout, begin in the memory that they come from
Places: TypeAlias = tuple[Place, ...]


class RandomPool:
    """Memory full of the elements of some tensors, of which tensors of their shapes and strides are sums of two parts.

    What shares memory begins at the same places. A kernel is given views of other memory, so that it cannot change what its
    result is compared with.
    """

    def __init__(self, tensors: Sequence[Tensor], chosen: random.Random) -> None:
        self._chosen = chosen
        spans = spans_of(tensors)
        memories = list(spans)
        seed = torch.Generator(tensors[0].device).manual_seed(chosen.getrandbits(32))
        self._steps: list[int] = []
        self._sizes: list[int] = []  # in elements, of what lies at a place
        self._own: list[Tensor] = []
        for memory, (start, stop) in spans.items():
            of_memory = next(t for t in tensors if t.untyped_storage().data_ptr() == memory)
            self._steps.append(_STEP // of_memory.element_size())
            self._sizes.append(max(0, stop - start))
            places = (2 << _PLACES) + _MOST_DRAWN * _MOST_APART + 1
            own = _full_of(of_memory, self._sizes[-1] + places * self._steps[-1] + _SHIFTS, seed)
            self._own.append(own if own.nbytes > _MUCH or is_quantized(own) else own.mul_(0.5**0.5))
        self._handed: list[Tensor] = []
        self._handed_at: list[Place] = []  # of what begins where a memory does
        at = [memories.index(t.untyped_storage().data_ptr()) for t in tensors]
        self._lie = [
            (which, t.size(), t.stride(), int(t.storage_offset()) - spans[memories[which]][0])
            for which, t in zip(at, tensors, strict=True)
        ]

    @property
    def memories(self) -> list[int]:
        """Number of the memory that each of the tensors lies in, as the parts of `Places` count them."""
        return [which for which, *_ in self._lie]

    def draw(self, number: int = 1) -> list[Places]:
        """Return where the next tensors begin, of so many sets: one after the other, so that one sum fills them all."""
        drawn = []
        for which, step in enumerate(self._steps):
            first, apart = self._chosen.getrandbits(_PLACES), 1 + self._chosen.randrange(_MOST_APART)
            lag = self._lag(which, max(1, step // _LAGS))
            drawn.append([Place((first + at * apart) * step, lag) for at in range(number)])
        return list(zip(*drawn, strict=True))

    def at(self, places: Places) -> list[Tensor]:
        """Return the tensors that begin there."""
        rooms = [
            own if not place.lag else own.new_empty(size)
            for place, own, size in zip(places, self._own, self._sizes, strict=True)
        ]
        for which, place in enumerate(places):
            if place.lag:
                self._add(which, place, rooms[which][None])
        return self._views(rooms, [0 if place.lag else place.first for place in places])

    def draw_handed(self) -> Places:
        """Return where the next tensors begin that `handed` gives."""
        if not self._handed:
            rooms = zip(self._own, self._sizes, self._steps, strict=True)
            self._handed = [own.new_empty(size + (step << _PLACES)) for own, size, step in rooms]
            self.move()
        ((drawn),) = self.draw()
        return tuple(Place(one.first + at.first, at.lag) for one, at in zip(drawn, self._handed_at, strict=True))

    def handed(self, places: Places) -> list[Tensor]:
        """Return the tensors that begin there for a kernel, which may write to them."""
        return self._views(self._handed, [one.first - at.first for one, at in zip(places, self._handed_at, strict=True)])

    def move(self) -> None:
        """Have other data in what is handed: what a kernel keeps of these, such as scores or packed keys, is of no use."""
        if self._handed:
            self._handed_at = [Place(self._chosen.randrange(_SHIFTS), self._lag(which, 1)) for which in range(len(self._own))]
            for which, (room, place) in enumerate(zip(self._handed, self._handed_at, strict=True)):
                self._add(which, place, room[None])
            for room in self._handed:
                movable(room).sum()  # so that it lies in caches as a call leaves it there

    def rooms(self, number: int, apart: int) -> list[Tensor]:
        """Return memory for so many sets: for each that the tensors lie in, (number, words), a row longer than a set.

        apart: bytes, of which a row is a multiple.
        """
        sizes = (size * own.element_size() for size, own in zip(self._sizes, self._own, strict=True))
        rows = [(1 - -size // apart) * apart // _WORD for size in sizes]
        return [own.new_empty((number, row), dtype=torch.int64) for own, row in zip(self._own, rows, strict=True)]

    def views_in(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in one row of each of `rooms`; autograd does not see that the rows are written to."""
        rooms = [row.data.view(own.dtype) for row, own in zip(rows, self._own, strict=True)]
        return self._views(rooms, [int(room.storage_offset()) for room in rooms])

    def fill(self, rooms: Sequence[Tensor], places: Sequence[Places]) -> None:
        """Put what begins at places that were drawn together into rows of `rooms`."""
        for which, (room, own) in enumerate(zip(rooms, self._own, strict=True)):
            of_memory = [where[which] for where in places]
            apart = of_memory[min(1, len(places) - 1)].first - of_memory[0].first
            self._add(which, of_memory[0], room.view(own.dtype)[:, : self._sizes[which]], apart)

    def _lag(self, which: int, unit: int) -> int:
        """Draw how much further on the second part begins, in elements: a multiple of `unit`."""
        lag = (1 + self._chosen.randrange((self._steps[which] << _PLACES) // unit)) * unit
        return 0 if self._own[which].nbytes > _MUCH else lag

    def _add(self, which: int, place: Place, rows: Tensor, apart: int = 0) -> None:
        """Write sums of two parts into rows, for each of which both begin `apart` elements further on."""
        own, starts = self._own[which], (place.first, place.first + place.lag)
        one, other = (own.as_strided(rows.shape, (apart, 1), start) for start in starts)
        if not place.lag:
            movable(rows).copy_(movable(one))
        elif not is_quantized(own):
            torch.add(one, other, out=rows)
        elif own.is_floating_point():  # the first, with the sign of both
            torch.bitwise_and(movable(other), 0x80, out=movable(rows)).bitwise_xor_(movable(one))
        else:
            torch.bitwise_right_shift(other, 7, out=rows).bitwise_xor_(one)

    def _views(self, rooms: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        return [rooms[which].as_strided(size, stride, start + starts[which]) for which, size, stride, start in self._lie]


def _full_of(tensor: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return `length` elements of a tensor: all of them in order, and then some at random."""
    elements = movable(tensor.detach()).reshape(-1)
    room = elements.new_zeros(length)
    if len(elements):
        room[: len(elements)] = elements[:length]
        more = max(0, length - len(elements))
        chosen = torch.randint(len(elements), (more,), device=tensor.device, generator=generator)
        room[len(elements) :] = elements[chosen]
    return room.view(tensor.dtype)


#: a set begins at a multiple of so many bytes, and so many more than the one before: where tensors lie moves short kernels
_APART = 256


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
        self._rooms = self._pool.rooms(number, _APART)
        return self._views()

    def _views(self) -> list[list[Tensor]]:
        return [self._pool.views_in([room[at] for room in self._rooms]) for at in range(len(self._rooms[0]))]

    def _copy(self, first: int, places: Sequence[Places]) -> None:
        self._pool.fill([room[first : first + len(places)] for room in self._rooms], places)


class PartSets(TensorSets):
    """Sets of a part of what is in the pool. part: returns it, of q, k and v."""

    def __init__(self, pool: RandomPool, number: int, part: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        self._part = part
        super().__init__(pool, number)

    def move(self) -> None:
        self.tensors = [copies_of(tensors, _APART * at) for at, tensors in enumerate(self.tensors)]

    def _allocated(self, number: int) -> list[list[Tensor]]:
        part = self._part(self._pool.at(self._pool.draw()[0]))
        return [copies_of(part, _APART * at) for at in range(number)]

    def _copy(self, first: int, places: Sequence[Places]) -> None:
        with torch.no_grad():
            for at, where in enumerate(places, first):
                data = self._part(self._pool.at(where))
                torch._foreach_copy_([movable(t) for t in self.tensors[at]], [movable(t) for t in data])


def _runs(sets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield sets that follow each other, as the first and one past the last, no more than are drawn at once."""
    ordered = sorted(set(sets))
    start = 0
    for at in range(1, len(ordered) + 1):
        is_over = at == len(ordered) or ordered[at] != ordered[at - 1] + 1 or at - start == _MOST_DRAWN
        if is_over:
            yield ordered[start], ordered[at - 1] + 1
            start = at
