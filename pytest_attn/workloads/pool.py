"""Keys and values that are drawn side by side, or end to end, written into a pool of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.workloads.generator import Draw
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def pool_of(drawn: torch.Tensor, table: torch.Tensor, w: Workload, draw: Draw, name: str) -> torch.Tensor:
    """Scatter keys, (batch, kv_heads, kv_len, d), into a pool (pages, size, kv_heads, d) that the table reads back.

    Those of packed queries come end to end, (1, kv_heads, sum of kv_lens, d). What a page holds beyond kv_len is 0; other keys
    that no sequence has are noise, drawn as `name`.
    """
    assert w.kv_pages is not None
    dense = _side_by_side(drawn, w, draw, name) if w.is_packed else drawn
    pages = cut_into_pages(dense, table.shape[1], w.kv_pages.size)
    pool = pages.new_empty(pages.shape)
    if w.kv_pages.pool:
        pool = draw.normal(f"{name} of nobody", (w.kv_pages.pool, *pages.shape[1:]))
    pool[table.flatten().long()] = pages
    return pool


def descales_in_pool(dense: torch.Tensor, table: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Scatter descales of keys, (batch, kv_heads, kv_len), into (pages, size, kv_heads); 0 for keys that no sequence has."""
    cut = cut_into_pages(dense.unsqueeze(-1), table.shape[1], pages.size).squeeze(-1)
    pool = cut.new_zeros(pages.pool or len(cut), *cut.shape[1:])
    pool[table.flatten().long()] = cut
    return pool


def cut_into_pages(dense: torch.Tensor, per_sequence: int, size: int) -> torch.Tensor:
    """Cut keys, (batch, kv_heads, kv_len, d), into pages (batch * per_sequence, size, kv_heads, d), with 0 beyond kv_len."""
    batch, heads, length, dim = dense.shape
    padded = dense.new_zeros(batch, heads, per_sequence * size, dim)
    padded[:, :, :length] = dense
    return padded.view(batch, heads, per_sequence, size, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)


def _side_by_side(packed: torch.Tensor, w: Workload, draw: Draw, name: str) -> torch.Tensor:
    """Take sequences apart: (batch, kv_heads, kv_len, d), with noise beyond the length of each."""
    dense = draw.normal(f"{name} beyond", (w.batch, w.kv_heads, w.kv_len, packed.shape[-1]))
    start = 0
    for batch, length in enumerate(w.kv_lens or ()):
        dense[batch, :, :length] = packed[0, :, start : start + length]
        start += length
    return dense
