"""Likely mistakes with where the keys of packed and paged sequences are taken to be."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_attn.correctness.mask_mistakes import TILES
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    pass

#: a text that continues "attention ...", and what makes the inputs and the workload to which the mistake amounts
Read: TypeAlias = "tuple[str, Callable[[], tuple[Inputs, Workload]]]"


def changed(inputs: Inputs, w: Workload, **changes: Any) -> Callable[[], tuple[Inputs, Workload]]:
    """Make inputs with other tensors, for the same workload."""
    return lambda: (dataclasses.replace(inputs, **changes), w)


def packed_mistakes(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield other places at which the keys of packed sequences are taken to be."""
    if w.q_lens is None or w.kv_lens is None or w.batch == 1 or not w.packs_keys:
        return
    starts = [0, *itertools.accumulate(w.kv_lens)][:-1]
    q_starts = [0, *itertools.accumulate(w.q_lens)][:-1]
    total = sum(w.kv_lens)

    def at(starts: list[int], lengths: tuple[int, ...] | list[int]) -> Callable[[], tuple[Inputs, Workload]]:
        return lambda: _with_extents(inputs, w, starts, lengths)

    def one_sequence() -> tuple[Inputs, Workload]:
        return inputs, w.replace(batch=1, q_lens=(sum(w.q_lens or ()),), kv_lens=(total,), q_len=None, kv_len=None)

    if w.mask is None or w.q_lens == w.kv_lens:
        yield "whose packed sequences see each other", one_sequence
    if w.q_lens != w.kv_lens:
        yield "that finds packed keys by the cumulated lengths of the queries", at(q_starts, w.q_lens)
    late = [start + 1 for start in starts[:-1]] + starts[-1:]
    yield "whose packed sequences read from their second key to the first of the next", at(late, w.kv_lens)
    if w.group > 1:
        yield (
            "that finds packed keys with the stride of the queries, which have more heads",
            at([s * w.group for s in starts], w.kv_lens),
        )
    for tile in reversed(TILES):
        filled = [min(-(-n // tile) * tile, total - start) for n, start in zip(w.kv_lens, starts, strict=True)]
        if filled != list(w.kv_lens):
            yield f"whose packed sequences see the next one's keys, up to a multiple of {tile}", at(starts, filled)
    if 0 in w.q_lens:
        extents = iter(zip(starts, w.kv_lens, strict=True))
        taken = [next(extents) if q_len else (0, 0) for q_len in w.q_lens]
        text = "that leaves sequences without queries out of the queries' list but not out of the keys'"
        yield text, at([start for start, _ in taken], [length for _, length in taken])


def _with_extents(
    inputs: Inputs, w: Workload, starts: list[int], lengths: tuple[int, ...] | list[int]
) -> tuple[Inputs, Workload]:
    """Read each packed sequence's keys from another place, and as many as said; what lies past the end wraps round."""
    import torch

    where = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    index = (torch.cat(where) % len(inputs.k)).to(inputs.k.device)
    return dataclasses.replace(inputs, k=inputs.k[index], v=inputs.v[index]), w.replace(kv_lens=tuple(lengths), kv_len=None)


def page_mistakes(inputs: Inputs, w: Workload) -> Iterator[Read]:
    """Yield other pages, or fewer."""
    import torch

    table, lens = inputs.page_table, inputs.kv_lens
    if table is None or lens is None or w.kv_pages is None:
        return
    size, number = w.kv_pages.size, torch.arange(table.shape[1], device=table.device)
    if any(n % size for n in w.kv_lens or ()):
        yield "without the last page where it is not full", changed(inputs, w, kv_lens=lens // size * size)
    if w.batch > 1:
        yield "with the pages of the first sequence for all", changed(inputs, w, page_table=table[:1].expand_as(table))
    in_order = (table[:, :1] + number) % len(inputs.k)
    yield (
        "that takes a sequence's pages to follow each other: only the first is looked up",
        changed(inputs, w, page_table=in_order),
    )
    rows = torch.arange(len(table), device=table.device)[:, None]
    used = -(-lens[:, None] // size)
    without_stride = table.flatten()[(rows * used + number).clamp(max=table.numel() - 1)]
    yield (
        "that finds a row of the page table by the pages in use, not by its stride",
        changed(inputs, w, page_table=without_stride),
    )
    text = "that takes pages to be twice as long as they are"
    yield text, changed(inputs, w, page_table=table[:, number // 2])
