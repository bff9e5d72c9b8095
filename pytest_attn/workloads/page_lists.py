"""The page table as lists, one after the other, without padding: FlashInfer's and SGLang's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch


class PageLists(NamedTuple):
    """Where each sequence's pages end in a list of all pages, that list, and the tokens of each last page; int32 each.

    indptr: (batch + 1,). indices: (pages in use,). last_page_len: (batch,), 0 for a sequence without keys.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def page_lists(inputs: Inputs) -> PageLists:
    """Return the page table of paged inputs as lists."""
    import torch

    assert inputs.workload.kv_pages is not None
    assert inputs.kv_lens is not None
    assert inputs.page_table is not None
    size, lengths = inputs.workload.kv_pages.size, inputs.kv_lens
    pages = (lengths + size - 1) // size
    ends = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).to(torch.int32)
    is_used = torch.arange(inputs.page_table.shape[1], device=inputs.device) < pages[:, None]
    return PageLists(ends, inputs.page_table[is_used], lengths - (pages - 1).clamp(min=0) * size)
