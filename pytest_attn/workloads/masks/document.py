"""Documents in one sequence, each of which sees itself only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pytest_attn.workloads.fields import as_tuple, short_lengths, suggests_fields
from pytest_attn.workloads.masks.mask import Choices, Mask, MaskMod, NearMiss, Sequences

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


@suggests_fields
@dataclass(frozen=True)
class Document(Mask):
    """Documents laid one after the other in one sequence: a token sees its own document only.

    Args:
        lengths: tokens of each document; their sum is q_len and kv_len.
        causal: whether a token also sees nothing after itself.

    Raises:
        ValueError: a length is not a whole number >= 1.
    """

    lengths: tuple[int, ...]
    causal: bool = False

    kinds = ("documents",)
    capabilities = ("documents",)
    words = "mask of documents"
    refused_beside_padding = "takes documents or padded keys, not both"
    is_square = True
    is_packable = False
    has_intervals = True
    elsewhere: ClassVar[Mapping[str, str]] = {"document": "Document(lengths)"}

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", as_tuple("Document: lengths", self.lengths))
        if not self.lengths or any(not isinstance(n, int) or n < 1 for n in self.lengths):
            raise ValueError(f"Document: lengths must be whole numbers >= 1, got {self.lengths!r}")

    @property
    def label(self) -> str:
        return f"documents{'-causal' if self.causal else ''}-{short_lengths(self.lengths)}"

    @property
    def is_causal(self) -> bool:
        return self.causal

    @property
    def documents(self) -> tuple[int, ...]:
        return self.lengths

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def bind(self, over: Sequences) -> MaskMod:
        import torch

        ids = torch.repeat_interleave(torch.tensor(self.lengths)).to(over.device)

        def same_document(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            same: torch.Tensor = ids[q] == ids[kv]
            return same & (kv <= q) if self.causal else same

        return same_document

    def interval(self, row: int, q_len: int, kv_len: int) -> tuple[int, int] | None:
        start = 0
        for length in self.lengths:
            if row < start + length:
                return start, row + 1 if self.causal else start + length
            start += length
        return None

    def intervals(self, rows: torch.Tensor, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        lengths = torch.tensor(self.lengths, device=rows.device)
        ends = lengths.cumsum(0)
        own = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        return ends[own] - lengths[own], rows + 1 if self.causal else ends[own]

    def pairs(self, q_len: int, kv_len: int) -> int:
        return sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        lengths = [choices.length(choices.max_rows)]
        while len(lengths) < 4 and sum(lengths) < choices.max_rows and choices.flag():
            lengths.append(choices.length(choices.max_rows - sum(lengths)))
        return cls(tuple(lengths), causal=choices.flag())

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        yield NearMiss("documents-see-each-other", "whose documents see each other", Document((self.tokens,), self.causal))
        if len(self.lengths) == 1:
            return
        first, *others, last = self.lengths
        if last > 1:
            late = Document((first + 1, *others, last - 1), self.causal)
            yield NearMiss("documents-begin-late", "whose documents begin one token late", late)
        if first > 1:
            early = Document((first - 1, *others, last + 1), self.causal)
            yield NearMiss("documents-begin-early", "whose documents begin one token early", early)
        if self.causal:
            yield NearMiss("documents-not-causal", "whose documents are not causal", Document(self.lengths))
