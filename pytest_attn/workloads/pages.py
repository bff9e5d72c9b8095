"""A paged KV cache: where the tokens of a sequence lie in a pool, and how the pool lies in memory."""

import dataclasses
from dataclasses import dataclass

from pytest_attn.workloads.fields import is_whole, suggests_fields

#: FlashInfer's names: (pages, size, kv_heads, head_dim), (pages, kv_heads, size, head_dim); "HD": (tokens, kv_heads, head_dim)
PAGE_LAYOUTS = ("NHD", "HND", "HD")


@suggests_fields
@dataclass(frozen=True, repr=False)
class Pages:
    """Keys and values lie in a pool of pages, found through a page table.

    Args:
        size: tokens of one page.
        layout: "NHD", (pages, size, kv_heads, head_dim), or "HND", (pages, kv_heads, size, head_dim), or "HD" for pages
            of one token, (tokens, kv_heads, head_dim), as in SGLang.
        fused: k and v are views of one tensor (pages, 2, ...), the keys first, as in FlashInfer and vLLM.
        pool: how many pages there are; by default as many as the page table names, the batch times the pages of kv_len. It
            may be more; the others belong to no sequence.
        sliced: the pool is the middle one of three layers that share each page, (pages, 3, ...), so it is not contiguous.
        shared: how many first pages all sequences share, as prompts with a common prefix do.

    Raises:
        ValueError: a field does not fit.
    """

    size: int
    layout: str = "NHD"
    fused: bool = False
    pool: int | None = None
    sliced: bool = False
    shared: int = 0

    def __post_init__(self) -> None:
        _require("size", self.size, is_whole(self.size, 1), "a number of tokens >= 1")
        _require("layout", self.layout, self.layout in PAGE_LAYOUTS, f"one of {', '.join(PAGE_LAYOUTS)}")
        if self.layout == "HD" and self.size != 1:
            raise ValueError(f'Pages: layout "HD" has no dimension for the tokens of a page and needs size 1, got {self.size}')
        for field in ("fused", "sliced"):
            _require(field, getattr(self, field), isinstance(getattr(self, field), bool), "True or False")
        _require("pool", self.pool, self.pool is None or is_whole(self.pool, 1), "a number of pages >= 1 or None")
        _require("shared", self.shared, is_whole(self.shared, 0), "a number of pages >= 0")

    def __repr__(self) -> str:
        """Show what differs from the default."""
        given = [f for f in dataclasses.fields(self) if f.name == "size" or getattr(self, f.name) != f.default]
        return f"Pages({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def is_plain(self) -> bool:
        """True where k and v are contiguous pools of their own, (pages, size, kv_heads, head_dim)."""
        return self.layout == "NHD" and not self.fused and not self.sliced

    @property
    def label(self) -> str:
        """The part of a workload's id."""
        words = [f"page{self.size}", self.layout.lower() if self.layout != "NHD" else "", "fused" if self.fused else ""]
        words += [f"pool{self.pool}" if self.pool else "", "sliced" if self.sliced else ""]
        words += [f"shared{self.shared}" if self.shared else ""]
        return ".".join(word for word in words if word)


def _require(field: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"Pages: {field} must be {expected}, got {value!r}")
