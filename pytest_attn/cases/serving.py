"""What a test of a serving kernel may look at: pools and their page lists, padding on the left, a cached prefix."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pytest_attn.correctness.spec import CheckSpec
    from pytest_attn.workloads.inputs import Inputs, PageLists
    from pytest_attn.workloads.kv_cache import SplitCache
    from pytest_attn.workloads.workload import Workload


class ServingTensors:
    """The part of a case that only workloads with pages, padding or a cached prefix have."""

    _workload: Workload

    if TYPE_CHECKING:

        @property
        def _spec(self) -> CheckSpec: ...

        @cached_property
        def _inputs(self) -> Inputs: ...

    @property
    def kv_indptr(self) -> torch.Tensor | None:
        """Where each batch entry's pages begin and end in `kv_indices`, (batch + 1,), int32; as FlashInfer takes them."""
        return None if self._page_lists is None else self._page_lists.indptr

    @property
    def kv_indices(self) -> torch.Tensor | None:
        """The pages in use, batch entry after batch entry, int32; token slots where a page has one token."""
        return None if self._page_lists is None else self._page_lists.indices

    @property
    def kv_last_page_len(self) -> torch.Tensor | None:
        """How many tokens each batch entry has in its last page, (batch,), int32; 0 where it has no keys."""
        return None if self._page_lists is None else self._page_lists.last_page_len

    @property
    def kv_starts(self) -> torch.Tensor | None:
        """At which row of k each batch entry's keys begin, (batch,), int32, where they are padded on the left."""
        lengths = self._inputs.kv_lens
        return self._workload.kv_len - lengths if lengths is not None and self._workload.pad == "left" else None

    def fused(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the pool of which k and v, as the callable is given them, are views: (pages, 2, ...), without a copy."""
        from pytest_attn.workloads.kv_layout import fused_pool

        return fused_pool(k, v)

    def split_cache(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None, appends: bool = True) -> SplitCache:
        """Split keys and values into a cache that holds the prefix of a workload with `cached`, and the new ones.

        Called by the callable that is checked, with the k and v that it is given; without them, those of the case. Each call
        makes a new cache. What the kernel writes into it is checked after the call: the new keys and values bit for bit at
        their slots, and nothing else. appends: False for a kernel that writes nothing. Raises ValueError without `cached`.
        """
        from pytest_attn.workloads.kv_cache import split_cache

        own = self._keys_and_values
        k, v = own[0] if k is None else k, own[1] if v is None else v
        return split_cache(self._inputs, k, v, self._spec.layout, appends)

    @cached_property
    def _page_lists(self) -> PageLists | None:
        from pytest_attn.workloads.inputs import page_lists

        return page_lists(self._inputs) if self._workload.kv_pages else None

    @cached_property
    def _keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        _, k, v = spec.handed(self._inputs)
        return spec.declared.given(k, spec.workload, is_kv=True), spec.declared.given(v, spec.workload, is_kv=True)

    def _padded_so(self, mask: torch.Tensor) -> torch.Tensor:
        """Move the keys of a mask, (batch, heads, q_len, kv_len), to where they are handed over."""
        from pytest_attn.workloads.kv_layout import with_keys_moved

        return with_keys_moved(self._workload, mask, 3)
