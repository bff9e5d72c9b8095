"""Paged keys and values: where the tokens of a sequence lie in a pool."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_attn.workloads.nearest import suggests_fields


@suggests_fields
@dataclass(frozen=True)
class Pages:
    """Keys and values lie in a pool of pages, found through a page table.

    Args:
        size: tokens of one page.

    Raises:
        ValueError: the size is no number of tokens >= 1.
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"Pages: size must be a number of tokens >= 1, got {self.size!r}")
