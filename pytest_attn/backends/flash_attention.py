"""What the interfaces of flash-attn 2, 3 and 4 share: one function for dense, one for packed, one for paged tensors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.layouts import as_packed, bottom_right_window, ends_of, in_bshd, sequence_boundaries, without_padding
from pytest_attn.backends.library import Library, refusal_of_build
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Document

if TYPE_CHECKING:
    import torch


#: what flash2 runs on, and libraries around it
FLASH2 = Library(("flash-attn",), "flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation")
#: what flash4, flex_flash and, where it is installed, te_flash run on
FLASH4 = Library(("flash-attn-4",), "flash_attn.cute", "pip install --pre flash-attn-4")


class FlashAttention(LibraryBackend):
    """flash_attn_func, flash_attn_varlen_func for packed sequences, documents and padding, and a function for pages.

    All align causal masks and windows to the last key, take (batch, rows, heads, dim), and return out or a tuple that
    begins with it. Subclasses say in which words theirs differs.
    """

    #: the function that reads pages, and what it calls the number of keys in use and the page table
    paged_words: tuple[str, str, str] = ("flash_attn_with_kvcache", "cache_seqlens", "page_table")
    #: what stands for an open side of a window
    open_side: int | None = -1

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Choose the function that takes the workload's layout."""
        w = inputs.workload
        if w.kv_pages and w.is_packed:
            return self._packed_pages(inputs)
        if w.kv_pages:
            return self._paged(inputs)
        if w.is_packed or w.kv_lens is not None or isinstance(w.mask, Document):
            return self._packed(inputs)
        function, options = self.source.load().flash_attn_func, self.options(inputs)
        return in_bshd(lambda q, k, v: without_lse(function(q, k, v, **options)))

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Return the arguments that all three functions take."""
        w = inputs.workload
        window = bottom_right_window(w)
        assert window is not None
        causal = window == (-1, 0)
        left, right = (self.open_side if side < 0 or causal else side for side in window)
        return {
            "softmax_scale": w.softmax_scale,
            "causal": causal,
            "window_size": (left, right),
            "softcap": w.softcap or 0.0,
            **self.configuration,
        }

    def _packed(self, inputs: Inputs) -> AttentionFn:
        function, options = self.source.load().flash_attn_varlen_func, self.options(inputs)
        inputs, kernel_of = without_padding(inputs)
        cu_q, cu_k, longest_q, longest_k = sequence_boundaries(inputs)
        options.update(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return without_lse(function(q, k, v, **options))

        return kernel_of(as_packed(call, inputs.workload))

    def _paged(self, inputs: Inputs) -> AttentionFn:
        name, lengths, table = self.paged_words
        function = getattr(self.source.load(), name)
        options = {**self.options(inputs), lengths: inputs.kv_lens, table: inputs.page_table}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return without_lse(function(q.transpose(1, 2), k, v, **options)).transpose(1, 2)

        return call

    def _packed_pages(self, inputs: Inputs) -> AttentionFn:
        """Hand packed queries and the page table to flash_attn_varlen_func, as flash-attn 2 takes them."""
        function, w = self.source.load().flash_attn_varlen_func, inputs.workload
        options = {**self.options(inputs), "cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": ends_of(inputs.kv_lens)}
        options.update(max_seqlen_q=w.q_len, max_seqlen_k=w.kv_len, block_table=inputs.page_table)
        return lambda q, k, v: without_lse(function(q, k, v, **options))


def without_lse(returned: Any) -> Any:
    """Return out: some builds return (out, lse), others out alone. Never index what may be the tensor itself."""
    return returned[0] if isinstance(returned, tuple) else returned


def refused_by_compiler(error: Exception) -> str | None:
    """Return the words of flash-attn 4's compiler, which finds no layout for some head sizes; None for other errors."""
    words = " ".join(str(error).split())[:160]
    return f"its compiler: {words}" if type(error).__name__ == "MLIRError" else None


@cache
def refused_by_build(head_dim: int, dtype: str, device: str) -> str | None:
    """Ask with one token whether this flash-attn 2 has kernels for a head dimension: builds for a few of them are common."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    one = torch.zeros(1, 1, 1, head_dim, dtype=getattr(torch, dtype), device=device)
    try:
        FLASH2.load().flash_attn_func(one, one, one)
    except RuntimeError as error:
        if (reason := refusal_of_build(error)) is None:
            raise
        return reason
    return None
