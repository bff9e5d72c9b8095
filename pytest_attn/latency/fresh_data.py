"""Data for timed calls, none of which has been there before, and memory for them that stays where it is.

Data are random, so they may begin anywhere in memory that is full of random elements: q, k, v and dout, each at a place of
its own that is drawn before the call, are as good as drawn anew, and cost nothing, or a copy.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pytest_attn.workloads.dtypes import movable
from pytest_attn.workloads.kv_layout import copies_of, spans_of

#: bytes between the places where tensors may begin, and how many places there are, as bits
_STEP, _PLACES = 64, 9
#: elements by which what a kernel is handed moves in its memory from sample to sample
_SHIFTS = 1024
#: how many sets of tensors are drawn together, which begin one after the other, and how many places apart at most
_MOST_DRAWN, _MOST_APART = 64, 8
#: bytes of what memory is copied by
_WORD = 8

#: bytes of memory from which copying it takes longer than many a call, and of how many draws one moves it
_MUCH, _DRAWS = 32 << 20, 4

#: where q, k and v, or dout, begin in the memory that they come from
Places = tuple[int, ...]


class RandomPool:
    """Memory full of the elements of some tensors, in which tensors of their shapes and strides may begin anywhere.

    What shares memory begins at the same place. A kernel is given views of other memory with the same elements, or copies, so
    that it cannot change what its result is compared with.
    """

    def __init__(self, tensors: Sequence[Tensor], chosen: random.Random) -> None:
        self._chosen = chosen
        spans = spans_of(tensors)
        memories = list(spans)
        seed = torch.Generator(tensors[0].device).manual_seed(chosen.getrandbits(32))
        self._steps: list[int] = []
        self._sizes: list[int] = []  # in words, of what lies at a place
        self._own: list[Tensor] = []
        for memory, (start, stop) in spans.items():
            of_memory = next(t for t in tensors if t.untyped_storage().data_ptr() == memory)
            size = of_memory.element_size()
            self._steps.append(_STEP // size)
            self._sizes.append(max(0, -((start - stop) * size // _WORD)))
            places = (1 << _PLACES) + _MOST_DRAWN * _MOST_APART
            length = self._sizes[-1] * _WORD // size + places * self._steps[-1] + _SHIFTS
            self._own.append(_full_of(of_memory, length, seed))
        self._handed: list[Tensor] = []
        self._shift = 0  # of the first memory, in elements: where what is handed begins among its own
        at = [memories.index(t.untyped_storage().data_ptr()) for t in tensors]
        self._lie = [
            (which, t.size(), t.stride(), int(t.storage_offset()) - spans[memories[which]][0])
            for which, t in zip(at, tensors, strict=True)
        ]

    @property
    def memories(self) -> list[int]:
        """Number of the memory that each of the tensors lies in, as the parts of `Places` count them."""
        return [which for which, *_ in self._lie]

    def draw(self, number: int = 1, before: Sequence[Places] = ()) -> list[Places]:
        """Return where the next tensors begin, of so many sets: one after the other, so that one copy fills them all.

        before: where those did that are still there. Beside q, much memory then mostly stays as it is.
        """
        drawn = []
        for which, (own, step) in enumerate(zip(self._own, self._steps, strict=True)):
            first, apart = self._chosen.getrandbits(_PLACES), 1 + self._chosen.randrange(_MOST_APART)
            stays = before and which > 0 and own.nbytes > _MUCH and self._chosen.randrange(_DRAWS) > 0
            drawn.append([was[which] for was in before] if stays else [(first + at * apart) * step for at in range(number)])
        return list(zip(*drawn, strict=True))

    def at(self, places: Places) -> list[Tensor]:
        """Return the tensors that begin there, as they are."""
        return self._views(self._own, places)

    def draw_handed(self) -> Places:
        """Return where the next tensors begin that `handed` gives."""
        ((first, *others),) = self.draw()
        return first + self._shift, *others

    def handed(self, places: Places) -> list[Tensor]:
        """Return the tensors that begin there for a kernel, which may write to them."""
        self._handed = self._handed or [room[: len(room) - _SHIFTS].clone() for room in self._own]
        return self._views(self._handed, (places[0] - self._shift, *places[1:]))

    def move(self) -> None:
        """Have what is handed of the first memory move: what a kernel keeps of that, such as scores, is of no use any more."""
        if self._handed:
            self._shift = self._chosen.randrange(_SHIFTS)
            room = self._handed[0]
            movable(room).copy_(movable(self._own[0][self._shift : self._shift + len(room)]))

    def rooms(self, number: int, apart: int) -> list[Tensor]:
        """Return memory for so many sets: for each that the tensors lie in, (number, words), a row longer than a set.

        apart: bytes, of which a row is a multiple.
        """
        rows = [(1 - -size * _WORD // apart) * apart // _WORD for size in self._sizes]
        return [own.new_empty((number, row), dtype=torch.int64) for own, row in zip(self._own, rows, strict=True)]

    def views_in(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in one row of each of `rooms`; autograd does not see that the rows are written to."""
        rooms = [row.data.view(own.dtype) for row, own in zip(rows, self._own, strict=True)]
        return self._views(rooms, tuple(int(room.storage_offset()) for room in rooms))

    def words(self, which: int, places: Sequence[Places]) -> Tensor:
        """Return what lies in one of the memories at places that were drawn together, (places, words)."""
        own = self._own[which]
        first, second = (where[which] * own.element_size() // _WORD for where in (places[0], places[min(1, len(places) - 1)]))
        return own.view(torch.int64).as_strided((len(places), self._sizes[which]), (second - first, 1), first)

    def _views(self, rooms: list[Tensor], places: Places) -> list[Tensor]:
        return [rooms[which].as_strided(size, stride, start + places[which]) for which, size, stride, start in self._lie]


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
    """Sets of q, k and v, each on other data, which come from a pool.

    tensors: of each set, as the kernel is given them. keeps: whether much memory may stay as it is when data are renewed,
    because no kernel has written to it.
    """

    def __init__(self, pool: RandomPool, number: int, keeps: bool) -> None:
        self._pool, self._keeps = pool, keeps
        self._places: dict[int, Places] = {}
        self.tensors = self._allocated(number)
        self.renew(range(number))

    def places(self, at: int) -> Places:
        """Return where what is in a set now lies in the pool."""
        return self._places[at]

    def renew(self, sets: Sequence[int]) -> None:
        """Put other data into some sets."""
        for first, stop in _runs(sets):
            run = range(first, stop)
            before = [self._places[at] for at in run if self._keeps and at in self._places]
            places = self._pool.draw(len(run), before)
            self._copy(first, before, places)
            self._places.update(zip(run, places, strict=True))

    @abstractmethod
    def move(self) -> None:
        """Have the same data in other memory."""

    @abstractmethod
    def _allocated(self, number: int) -> list[list[Tensor]]:
        """Return the tensors of so many sets."""

    @abstractmethod
    def _copy(self, first: int, before: Sequence[Places], places: Sequence[Places]) -> None:
        """Copy what lies at some places into the sets from `first` on. before: what is there, nothing if that is to go."""


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

    def _copy(self, first: int, before: Sequence[Places], places: Sequence[Places]) -> None:
        for which, room in enumerate(self._rooms):
            stays = before and all(was[which] == now[which] for was, now in zip(before, places, strict=True))
            if not stays:
                words = self._pool.words(which, places)
                room[first : first + len(places), : words.shape[1]].copy_(words)


class PartSets(TensorSets):
    """Sets of a part of what is in the pool. part: returns it, of q, k and v."""

    def __init__(self, pool: RandomPool, number: int, part: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        self._part = part
        super().__init__(pool, number, keeps=False)

    def move(self) -> None:
        self.tensors = [copies_of(tensors, _APART * at) for at, tensors in enumerate(self.tensors)]

    def _allocated(self, number: int) -> list[list[Tensor]]:
        part = self._part(self._pool.at(self._pool.draw()[0]))
        return [copies_of(part, _APART * at) for at in range(number)]

    def _copy(self, first: int, before: Sequence[Places], places: Sequence[Places]) -> None:
        del before
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
