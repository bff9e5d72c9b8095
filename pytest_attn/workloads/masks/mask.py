"""A mask: a plain description of who may look at whom, without tensors and without lengths.

Each kind of mask is a class in a file of its own that knows all about itself: what it shows, which lengths it takes, what a
library must be able to say, how it is written down and read again, how it is drawn, and what kernels take for it by mistake.
`__init__.py` has the kinds that there are.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

MaskMod: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"
ScoreMod: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"


class Sequences(NamedTuple):
    """A batch of sequences that a mask is laid over, and the heads that look at them.

    Args:
        batch: how many there are.
        heads: query heads.
        q_len: queries of the longest.
        kv_len: keys of the longest.
        device: where the mask's tensors lie.
        q_lens: queries of each, (batch,); None where all are as long.
        kv_lens: keys of each, (batch,); None where all are as long.
        lengths: (q_len, kv_len) of each as numbers, for `near_misses`.
        key_heads: the key head of each query head, for `near_misses`.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    device: torch.device
    q_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    key_heads: tuple[int, ...] = ()

    @property
    def are_square(self) -> bool:
        """True where each has as many queries as keys."""
        return all(q_len == kv_len for q_len, kv_len in self.lengths)

    def indices(self) -> tuple[torch.Tensor, ...]:
        """Return b, h, q_idx and kv_idx, each along its own of four dimensions."""
        import torch

        sizes = (self.batch, self.heads, self.q_len, self.kv_len)
        return tuple(
            torch.arange(size, device=self.device).view([-1 if axis == dim else 1 for axis in range(4)])
            for dim, size in enumerate(sizes)
        )


class Band(NamedTuple):
    """Numbers of keys before and after its own that a query sees, None for all, and from which end keys are counted."""

    left: int | None
    right: int | None
    top_left: bool

    @property
    def is_open(self) -> bool:
        """True where it hides nothing."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """True where it hides what comes after a query, and nothing else."""
        return self.left is None and self.right == 0


class NearMiss(NamedTuple):
    """A mask that a kernel takes for another by mistake.

    fault: what the mistake is called wherever it is met, in lower case with hyphens.
    words: a text that continues "attention ..."; within one mask no two near misses have the same.
    mask: the mask to which the mistake amounts.
    """

    fault: str
    words: str
    mask: Mask | MaskMod


class Choices(Protocol):
    """The maker of a drawn mask's choices; the simplest come first, which is what a failure shrinks to."""

    @property
    def max_rows(self) -> int:
        """The longest q_len and kv_len."""

    def flag(self) -> bool:
        """Choose False or True."""

    def count(self, least: int, most: int) -> int:
        """Choose a number, both ends included."""

    def count_or_none(self, least: int, most: int) -> int | None:
        """Choose None or a number."""

    def length(self, most: int) -> int:
        """Choose a length from 1, often one at which a kernel's tile ends."""


class Mask(ABC):
    """A kind of mask. Subclasses are frozen dataclasses of plain values, and their instances hashable.

    Only what has no default must be said; a kind may leave the rest as it is.
    """

    #: what strategies and reports call it; a kind may come in several, and `kind` says in which
    kinds: ClassVar[tuple[str, ...]]
    #: words that it adds to `Capabilities.masks`, and what a refusal calls it
    capabilities: ClassVar[tuple[str, ...]]
    words: ClassVar[str]
    #: why a library that takes no arbitrary mask does not take it beside padded keys; empty where it may
    refused_beside_padding: ClassVar[str] = ""
    #: whether it fixes q_len and kv_len to one length, that of its `tokens`
    is_square: ClassVar[bool] = False
    #: whether it can be laid over packed sequences
    is_packable: ClassVar[bool] = True
    #: whether it depends on positions alone, not on the batch entry and the head
    is_positional: ClassVar[bool] = True
    #: whether what each row sees is an interval of keys
    has_intervals: ClassVar[bool] = False
    #: how messages say what `Workload(mask=...)` takes, the name of the class by default
    spellings: ClassVar[tuple[str, ...]] = ()
    #: strings for `Workload(mask=...)`, and what others call it with what it is called here
    strings: ClassVar[tuple[str, ...]] = ()
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @property
    @abstractmethod
    def label(self) -> str:
        """The mask's part of a workload's id."""

    @property
    def kind(self) -> str:
        """The one of `kinds` that it is."""
        return self.kinds[0]

    # -- what it shows -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def bind(self, over: Sequences) -> MaskMod:
        """Return the predicate `(b, h, q_idx, kv_idx) -> bool tensor` over sequences, in FlexAttention's signature.

        It is elementwise in its four index tensors, so that it serves the reference (by broadcasting), FlexAttention (by
        vmap) and dense masks alike. It hides no padding.
        """

    @property
    def band(self) -> Band | None:
        """The mask as a band along the diagonal; None where it is none."""
        return None

    @property
    def is_causal(self) -> bool:
        """True where it is what libraries say with a flag of causality, alone or beside documents."""
        return False

    @property
    def documents(self) -> tuple[int, ...]:
        """The lengths of the documents in each sequence that see themselves only; empty where there are none."""
        return ()

    @property
    def function(self) -> Callable[..., torch.Tensor] | None:
        """The function of the user's that shows it, if there is one."""
        return None

    @property
    def tokens(self) -> int:
        """The q_len and kv_len that it fixes, where it `is_square`."""
        raise NotImplementedError

    def interval(self, row: int, q_len: int, kv_len: int) -> tuple[int, int] | None:
        """Return the first and one past the last key that query `row` sees, or None where these do not describe the mask."""
        return None

    def intervals(self, rows: torch.Tensor, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `interval` says of each of these rows (n,), int64; all keys where it says nothing."""
        return all_keys(rows, kv_len)

    def pairs(self, q_len: int, kv_len: int) -> int:
        """Count the visible (query, key) pairs of one head; what is not known counts as full."""
        return q_len * kv_len

    # -- which workloads it takes, and what a library must be able to say --------------------------------------------------

    def require_lengths(self, q_len: int, kv_len: int) -> None:
        """Raise ValueError for lengths that it does not fit."""
        if self.is_square and not self.tokens == q_len == kv_len:
            text = f"Workload: {type(self).__name__} has {self.tokens} tokens, but q_len is {q_len} and kv_len {kv_len}"
            raise ValueError(text)

    def needs(self, is_aligned: bool) -> tuple[frozenset[str], str]:
        """Return which words of `Capabilities.masks` say it, any one of them, and what a refusal calls it.

        is_aligned: whether both ends of all sequences are at the same place.
        """
        return frozenset(self.capabilities), self.words

    # -- how it is written and read ----------------------------------------------------------------------------------------

    @classmethod
    def read(cls, written: object) -> Self | None:
        """Return the mask that a user wrote as `mask=` otherwise than as an object of this class; None for another kind's."""
        return None

    @classmethod
    def meant(cls, written: object) -> str:
        """Return what to write in place of something other than a mask; empty where it is not this kind that was meant."""
        return ""

    def source(self, write_function: Callable[[Callable[..., Any]], str]) -> str:
        """Return Python that makes the mask. write_function: returns the expression of a function of the user's."""
        return repr(self)

    def tensor(self, over: Sequences) -> torch.Tensor | None:
        """Return what to save beside `to_dict`, as its function may not be found again; None where nothing is.

        It is boolean and broadcasts to (batch, heads, q_len, kv_len).
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return its fields as builtin types."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, fields: dict[str, Any], tensor: torch.Tensor | None = None) -> Mask:
        """Return the mask of `to_dict`. tensor: what its function showed, in place of one that cannot be imported."""
        return cls(**fields)

    @classmethod
    @abstractmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        """Return a mask of one of `kinds`, for a test of made-up workloads."""

    # -- what is taken for it ----------------------------------------------------------------------------------------------

    def another(self) -> tuple[str, Mask] | None:
        """Return another mask of this kind for the same lengths, with words for it: one that shows something else."""
        return None

    def near_misses(self, over: Sequences) -> Iterable[NearMiss]:
        """Yield what kernels take for this mask over these sequences by mistake, the plainest first."""
        return ()


def all_keys(rows: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the interval of all keys for each row."""
    import torch

    return torch.zeros_like(rows), torch.full_like(rows, kv_len)


def interval(mask: Mask | None, row: int, q_len: int, kv_len: int) -> tuple[int, int] | None:
    """Return `mask.interval`; all keys where there is no mask."""
    return (0, kv_len) if mask is None else mask.interval(row, q_len, kv_len)


def intervals(mask: Mask | None, rows: torch.Tensor, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `mask.intervals`; all keys where there is no mask."""
    return all_keys(rows, kv_len) if mask is None else mask.intervals(rows, q_len, kv_len)


def visible_pairs(mask: Mask | None, q_len: int, kv_len: int) -> int:
    """Return `mask.pairs`; all pairs where there is no mask."""
    return q_len * kv_len if mask is None else mask.pairs(q_len, kv_len)
