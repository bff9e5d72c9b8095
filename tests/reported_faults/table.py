"""Faulty attention kernels, each written from a report of another project, as changes of one step of `kernel.Attention`.

None of them is in `pytest_attn.guests.mutants`. The twin of a fault is the class that it changes: the same kernel without it.
`reaches` says whether a workload has the options that the report is about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_attn import Inputs, Workload
from pytest_attn.workloads.workload import sequence_lengths

from .kernel import Attention, Call, Entry, Part, Tile

Reaches = Callable[[Workload], bool]


class Fault(NamedTuple):
    """One fault.

    report: of which project, and its issue, pull request or file. what: what went wrong there. reaches: whether a workload
    has what it takes. kernel: the faulty kernel. parameters: whose gradients the report is about.
    """

    name: str
    report: str
    what: str
    reaches: Reaches
    kernel: type[Attention]
    parameters: tuple[str, ...] = ()

    @property
    def twin(self) -> type[Attention]:
        return self.kernel.__mro__[1]


FAULTS: list[Fault] = []


def reported(report: str, reaches: Reaches, **more: Any) -> Callable[[type[Attention]], type[Attention]]:
    """Return a decorator that adds a kernel to the table: its docstring says what went wrong, its name is the fault's."""

    def add(kernel: type[Attention]) -> type[Attention]:
        name = re.sub(r"(?<!^)(?=[A-Z])|(?<=[a-z])(?=[0-9])", "-", kernel.__name__).lower()
        FAULTS.append(Fault(name, report, " ".join(kernel.__doc__.split()), reaches, kernel, **more))
        return kernel

    return add


class Splits(Attention):
    """A fault-free kernel that splits the keys in two."""

    key_tile, splits = 32, 2


class ManySplits(Attention):
    """A fault-free kernel of more splits than short sequences have tiles."""

    key_tile, splits = 32, 4


# -- what workloads have -----------------------------------------------------------------------------------------------------
def some(w: Workload, condition: Callable[[int, int], bool]) -> bool:
    """Whether the condition on (queries, keys) holds of a batch entry."""
    return any(condition(n, m) for n, m in sequence_lengths(w))


def anything(w: Workload) -> bool:
    return True


def is_band(w: Workload) -> bool:
    return w.mask is not None and w.mask.band is not None


def has_window(w: Workload) -> bool:
    return is_band(w) and w.mask.band.left is not None


def is_padded(w: Workload) -> bool:
    """Whether dense keys have padding."""
    return w.kv_lens is not None and not w.is_packed and w.kv_pages is None and min(w.kv_lens) < w.kv_len


def decodes(w: Workload) -> bool:
    return some(w, lambda n, m: n == 1)


def is_split(w: Workload) -> bool:
    return some(w, lambda n, m: m > 32)


def has_empty_split(w: Workload) -> bool:
    return some(w, lambda n, m: m > 0 and n > 0 and 3 * math.ceil(math.ceil(m / 32) / 4) >= math.ceil(m / 32))


def has_per_head(w: Workload) -> bool:
    return w.descales == "head" and w.kv_heads > 1


def bias_has(*dims: str) -> Reaches:
    return lambda w: w.bias is not None and all(dim in w.bias for dim in dims)


def bias_lacks(dim: str) -> Reaches:
    return lambda w: w.bias is not None and dim not in w.bias


# -- masks -------------------------------------------------------------------------------------------------------------------
@reported("Dao-AILab/flash-attention#2528", lambda w: is_band(w) and w.group > 1 and some(w, lambda n, m: n > 1))
class RowsDividedByGroup(Attention):
    """The flag of packed heads was set, but nothing was packed: a row's limit of a causal mask was that of row i // group."""

    def place(self, t: Tile) -> Tensor:
        row = t.i // t.w.group
        return row if t.w.mask.band.top_left else row + t.e.m - t.e.n


@reported(
    "EricLBuehler/mistral.rs#2094",
    lambda w: has_window(w) and w.kv_pages is not None and some(w, lambda n, m: m > w.mask.band.left + 1),
)
class WindowDroppedForPages(Attention):
    """The kernel of a paged cache was called without the window."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        left, right = super().window(t)
        return (None if t.w.kv_pages else left), right


@reported("karpathy/nanochat#452", lambda w: has_window(w) and some(w, lambda n, m: n == 1 and m > w.mask.band.left + 1))
class WindowDroppedForOneQuery(Attention):
    """With one query the call was made without a mask, and so without the window."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        left, right = super().window(t)
        return (None if t.e.n == 1 else left), right


@reported("openvinotoolkit/openvino#30714", lambda w: has_window(w) and w.kv_pages is not None and some(w, lambda n, m: n > 1))
class WindowOneRowOffForSeveralQueries(Attention):
    """Over pages, the window of more than one query was off by one row."""

    def place(self, t: Tile) -> Tensor:
        return super().place(t) - int(t.w.kv_pages is not None and t.e.n > 1)


@reported(
    "vllm-project/vllm-xpu-kernels#181",
    lambda w: is_band(w) and w.kv_lens is not None and not w.packs_keys and some(w, lambda n, m: n == 1 and m < w.kv_len),
)
class DecodingSeesBehindTheLength(Attention):
    """With is_causal, one query's keys ended a tile later: cache entries behind the length were seen."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        longer = is_band(call.w) and call.inputs.kv_lens is not None and e.n == 1
        return e._replace(m=min(e.m + 8, call.w.kv_len)) if longer else e


@reported("PaddlePaddle/FastDeploy#3514", lambda w: w.mask is not None and w.mask.band is None)
class TileFullByItsCorners(Attention):
    """A tile was taken for one that needs no mask, as its first and its last pair are visible."""

    def in_other_mask(self, t: Tile) -> Tensor:
        seen = super().in_other_mask(t)
        return seen | (seen[..., :1, :1] & seen[..., -1:, -1:])


@reported(
    "vllm-project/vllm#2231",
    lambda w: has_window(w) and w.kv_pages is not None and some(w, lambda n, m: m % w.kv_pages.size > 0 and m < w.kv_len),
)
class LastPageFullInAWindow(Attention):
    """With a window, all slots of the last page counted as filled."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        if not (call.w.kv_pages and has_window(call.w)) or not e.m:
            return e
        return e._replace(m=min(-(-e.m // call.w.kv_pages.size) * call.w.kv_pages.size, call.w.kv_len))

    def place(self, t: Tile) -> Tensor:
        return t.i + super().entry(t.call, t.e.b).m - t.e.n

    def in_band(self, t: Tile) -> Tensor:
        return super().in_band(t) | (t.j >= super().entry(t.call, t.e.b).m)


@reported(
    "openvinotoolkit/openvino#37377",
    lambda w: (
        has_window(w) and w.kv_pages is not None and some(w, lambda n, m: 0 < n < m - w.mask.band.left - w.kv_pages.size)
    ),
)
class ValuesBeforeTheWindowRead(Attention):
    """Slots outside the retained tokens were multiplied by a weight of 0, and 0 times NaN is NaN."""

    def unseen_cleared(self, t: Tile, v: Tensor) -> Tensor:
        return v


# -- lengths, packed sequences, splits ---------------------------------------------------------------------------------------
@reported("vllm-project/flash-attention#176", lambda w: w.is_packed and w.kv_pages is not None and w.batch > 1)
class ResultsFoldedOntoTheFirstSequence(Splits):
    """The batch stride of out stays 0 in a varlen call: the combine kernel writes every sequence over the first."""

    def store(self, call: Call, e: Entry, rows: range, out: Tensor, lse: Tensor, part: Part) -> None:
        folded = e._replace(row=0) if call.w.is_packed and call.w.kv_pages else e
        super().store(call, folded, rows, out, lse, part)


@reported("ROCm/aiter#3641", has_empty_split)
class EmptySplitWeighsOne(ManySplits):
    """More splits than tiles: an empty split was merged with a weight, as its lse was not -inf."""

    def online(self, call: Call, e: Entry, rows: range, tiles: list[range]) -> Part:
        part = super().online(call, e, rows, tiles)
        return part if tiles else part._replace(lse=torch.zeros_like(part.lse))


@reported("sgl-project/sgl-kernel-xpu#487", lambda w: some(w, lambda n, m: 0 < m <= 32 and n > 0))
class InactiveSplitStoresLse(Splits):
    """Where one split alone has keys, all splits store their lse to the same slot, and -inf overwrites the right one."""

    def attend(self, call: Call, e: Entry, rows: range) -> Part:
        part = super().attend(call, e, rows)
        return part._replace(lse=torch.full_like(part.lse, -math.inf)) if e.m <= self.key_tile else part


@reported("mlc-ai/mlc-llm#1995", lambda w: w.group > 1 and is_split(w))
class MergeOfKeyHeadsOnly(Splits):
    """The kernel that merges partial results was given the wrong number of heads."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        out, lse = (t.clone() for t in super().merged(call, e, rows, parts))
        out[call.w.kv_heads :], lse[call.w.kv_heads :] = (t[call.w.kv_heads :] for t in parts[0])
        return Part(out, lse)


@reported(
    "Dao-AILab/flash-attention#2388", lambda w: w.heads > 1 and is_split(w) and some(w, lambda n, m: n % 64 > 0 and m > 32)
)
class LseOfSplitsWithStridesOfAFullTile(Splits):
    """The strides of the splits' lse were hard-coded."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        heads, n = parts[0].lse.shape
        at = (torch.arange(heads)[:, None] * self.row_tile + torch.arange(n)) % (heads * n)
        return super().merged(call, e, rows, [part._replace(lse=part.lse.flatten()[at]) for part in parts])


@reported("local-inference-lab/vllm#468", is_split)
class LseMergedInPlace(Splits):
    """The merge writes the new lse over the first one, which it reads again for the second weight."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        first, second = parts
        lse = torch.logaddexp(first.lse, second.lse)
        low = lse.masked_fill(lse == -math.inf, 0)
        again = torch.logaddexp(lse, second.lse).masked_fill(lse == -math.inf, 0)
        out = first.out * (first.lse - low).exp()[..., None] + second.out * (second.lse - again).exp()[..., None]
        return Part(out, lse)


@reported("flashinfer-ai/flashinfer#2002", has_empty_split)
class StalePartOfAnEmptySplit(ManySplits):
    """The workspace of partial results was not initialized: a split without keys left there what a call before had."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        tiles = self.split(self.key_tiles(call, e, rows))
        for at, span in enumerate(tiles):
            key = (at, parts[at].out.shape)
            if span:
                self.kept[key] = parts[at]
            elif key in self.kept:
                parts[at] = self.kept[key]
        return super().merged(call, e, rows, parts)


@reported("Dao-AILab/flash-attention#2503", lambda w: w.is_packed and 0 in w.q_lens)
class SequenceWithoutQueriesDividesByZero(Attention):
    """An empty q raised ZeroDivisionError."""

    def row_tiles(self, call: Call, e: Entry) -> list[range]:
        assert e.m // e.n >= 0
        return super().row_tiles(call, e)


@reported("Dao-AILab/flash-attention#1537", lambda w: w.is_packed and w.q_len == 1 and 0 in w.q_lens and w.group > 1)
class SingleQueriesAndAnEmptySequence(Attention):
    """max_seqlen_q of 1 beside an empty sequence: q was viewed as one row for each sequence, which fails."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.w.is_packed and call.w.q_len == 1 and call.w.group > 1:
            call.q.reshape(call.w.batch, call.w.group, call.w.kv_heads, call.w.head_dim)
        return super().forward(call)


@reported("ROCm/rocm-libraries#7221", lambda w: w.is_packed and w.group > 1 and w.batch > 1 and w.head_groups == "contiguous")
class HeadsPackedAcrossSequences(Attention):
    """Packing the heads of a group into rows was not refused for packed sequences, and folded across their boundaries."""

    def folded(self, call: Call, e: Entry) -> tuple[Tensor, Tensor]:
        """Return which head of the group, and which row of all, stands at (head of the group, row): (group, n) each."""
        at = e.row * call.w.group + torch.arange(call.w.group)[:, None] * e.n + torch.arange(e.n)
        return at // len(call.q), at % len(call.q)

    def load_q(self, t: Tile) -> Tensor:
        if not t.w.is_packed or t.w.group == 1:
            return super().load_q(t)
        head, row = self.folded(t.call, t.e)
        q = t.call.q.view(len(t.call.q), t.w.kv_heads, t.w.group, -1).permute(1, 2, 0, 3)[:, head, row]
        return q.flatten(0, 1)[:, t.rows.start : t.rows.stop].float()

    def store(self, call: Call, e: Entry, rows: range, out: Tensor, lse: Tensor, part: Part) -> None:
        if not call.w.is_packed or call.w.group == 1:
            return super().store(call, e, rows, out, lse, part)
        head, row = (t[:, rows.start : rows.stop] for t in self.folded(call, e))
        kv_heads, group = call.w.kv_heads, call.w.group
        found = part.out.view(kv_heads, group, len(rows), -1).permute(1, 2, 0, 3)
        out.view(len(out), kv_heads, group, -1)[row, :, head] = found.to(out.dtype)
        lse.view(kv_heads, group, -1)[:, head, row] = part.lse.view(kv_heads, group, -1)
        return None


@reported("vllm-project/vllm#21996", lambda w: w.is_packed and w.heads > 1)
class LseOfTokensFirst(Attention):
    """An lse that lies with its tokens first was read as if its heads were: garbage."""

    def rows_of_lse(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        if not call.w.is_packed or not tensor.is_contiguous():
            return super().rows_of_lse(call, e, tensor)
        return tensor.view(-1, call.w.heads)[e.row : e.row + e.n].transpose(0, 1)


# -- pages -------------------------------------------------------------------------------------------------------------------
@reported("NVIDIA/cutlass#2221", lambda w: w.kv_pages is not None and w.kv_pages.pool is not None)
class PoolAsLargeAsTheTable(Attention):
    """The cache was taken to have as many pages as the page table names."""

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        return super().page_numbers(call, e, number) % call.inputs.page_table.numel()


@reported(
    "flashinfer-ai/flashinfer#4347",
    lambda w: w.kv_pages is not None and w.kv_pages.size > 128 and some(w, lambda n, m: m > 128),
)
class PagesOfMoreThan128(Attention):
    """Results were wrong with pages of more than 128 tokens."""

    def page_size(self, call: Call) -> int:
        return min(call.w.kv_pages.size, 128)

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        return super().page_numbers(call, e, number.clamp(max=call.inputs.page_table.shape[1] - 1))


@reported(
    "vllm-project/vllm-xpu-kernels#171",
    lambda w: w.kv_pages is not None and w.kv_pages.size < 16 and some(w, lambda n, m: m > w.kv_pages.size),
)
class PagesSmallerThanATile(Attention):
    """page_size / K_tile was 0 where a page is smaller than a tile: all keys of a tile were read behind its first page."""

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        size = self.page_size(call)
        if size >= 16:
            return super().gathered(call, e, pool)
        slots, at = self.slots(call, pool), torch.arange(e.m)
        first = at // 16 * 16
        slot = self.page_numbers(call, e, first // size) * size + first % size + at - first
        slot = slot.clamp(max=len(slots) * size - 1)
        return slots[slot // size, slot % size].transpose(0, 1)


@reported("vllm-project/vllm-xpu-kernels#335", lambda w: w.kv_pages is not None and (w.kv_pages.fused or w.kv_pages.sliced))
class PagesSideBySide(Attention):
    """Pages were found without their stride, which is larger where layers, or k and v, share each page."""

    def slots(self, call: Call, pool: Tensor) -> Tensor:
        if pool.dim() == 4:
            pool = pool.as_strided(pool.shape, torch.empty(pool.shape, device="meta").stride(), pool.storage_offset())
        return super().slots(call, pool)


@reported(
    "LMCache/LMCache#2826",
    lambda w: w.kv_pages is not None and w.kv_pages.layout == "HND" and w.kv_heads > 1 and w.kv_pages.size > 1,
)
class HeadsAndSlotsOfAPageSwapped(Attention):
    """A pool of heads first was read by the shape of one of slots first: heads and page size were swapped."""

    def slots(self, call: Call, pool: Tensor) -> Tensor:
        there = super().slots(call, pool)
        return pool.reshape(there.shape) if call.w.kv_pages.layout == "HND" else there


@reported("golang-design/accel#10", lambda w: w.kv_pages is not None and some(w, lambda n, m: n > 1))
class PagesIgnoredInAPrefill(Attention):
    """With more than one query the page table was accepted, and not read."""

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        if e.n == 1:
            return super().page_numbers(call, e, number)
        return e.b * call.inputs.page_table.shape[1] + number


# -- padding, and a cache beside new keys ------------------------------------------------------------------------------------
@reported("Blaizzy/mlx-vlm#1946", lambda w: w.pad == "left" and min(w.kv_lens) < w.kv_len)
class PaddingOnTheLeftSeen(Attention):
    """The padding on the left was dropped on the way to the attention, which read pad tokens as context."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        return e._replace(key=0, m=call.w.kv_len) if call.w.pad == "left" else e


@reported("huggingface/transformers#46773", lambda w: is_padded(w) and w.batch == 1)
class PaddingIgnoredInABatchOfOne(Attention):
    """The mask of the padding was applied only where the batch has more than one entry."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        return e._replace(key=0, m=call.w.kv_len) if call.w.batch == 1 and is_padded(call.w) else e


@reported("OpenNMT/OpenNMT-py#2532", lambda w: is_padded(w) and w.q_len == 1)
class PaddingIgnoredWhileDecoding(Attention):
    """The mask of the padding was applied in the first step only, not where one token is decoded."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        return e._replace(key=0, m=call.w.kv_len) if call.w.q_len == 1 and is_padded(call.w) else e


def appends_densely(w: Workload) -> bool:
    return w.cached is not None and w.kv_pages is None and not w.is_packed


@reported("microsoft/onnxruntime#21523", lambda w: appends_densely(w) and len(set(w.cached)) > 1)
class PastLengthOfTheFirstSequence(Attention):
    """New keys of all sequences were appended at one past length."""

    def slots_of_new(self, w: Workload, cache: Any) -> Tensor:
        if not appends_densely(w):
            return super().slots_of_new(w, cache)
        capacity = cache.k_cache.shape[2]
        at = (w.cached[0] + torch.arange(w.q_len)).clamp(max=capacity - 1)
        return (torch.arange(w.batch)[:, None] * capacity + at).flatten()


@reported("openvinotoolkit/openvino#37377", lambda w: appends_densely(w) and any(past % 16 for past in w.cached))
class BoundaryTileReadFromTheCache(Attention):
    """Where a tile held the last cached and the first new keys, the new ones were read from the cache, too."""

    def append(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        caches, w = super().append(inputs, k, v), inputs.workload
        if not appends_densely(w):
            return caches
        read = tuple(cache.clone() for cache in caches)
        for b, past in enumerate(w.cached):
            for cache in read:
                cache[b, :, past : min(-(-past // 16) * 16, past + w.q_len)] = 100.0  # what the cache held there before
        return read


@reported("Dao-AILab/flash-attention#638", lambda w: w.cached is not None)
class AppendWritesOneSlotMore(Attention):
    """Appending wrote beyond the new keys, and modified what lay there."""

    def write(self, w: Workload, cache: Any, into: Tensor, new: Tensor, layout: str) -> None:
        super().write(w, cache, into, new, layout)
        slots = self.cache_slots(w, into, layout)
        last = int(cache.slot_mapping[-1])
        beyond = last + 1 if last + 1 < len(slots) * slots.shape[1] else 0
        slots[beyond // slots.shape[1], beyond % slots.shape[1]] = slots[last // slots.shape[1], last % slots.shape[1]]


@reported("harvard-edge/cs249r_book#1953", lambda w: w.cached is not None)
class NewKeysNotAttended(Attention):
    """Attention used what the cache showed before its length was advanced: without the new tokens' own keys."""

    def visible(self, t: Tile) -> Tensor:
        seen = super().visible(t)
        return seen if t.w.cached is None else seen & (t.j < t.w.cached[t.e.b])


# -- heads and their dimension -----------------------------------------------------------------------------------------------
@reported("triton-lang/triton#621", lambda w: w.head_dim > 64)
class First64DimensionsOnly(Attention):
    """With a head dimension of 128, scores were those of the first 64 dimensions."""

    def logits(self, t: Tile) -> Tensor:
        return self.load_q(t)[..., :64] @ self.load_k(t)[..., :64].mT * self.scale(t.call)


@reported("mni-ml/framework#38", lambda w: w.v_head_dim > 32)
class First32ColumnsOnly(Attention):
    """One thread for each dimension, but at most 32: the other columns of out stayed 0."""

    def rounded_out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return out.masked_fill(torch.arange(out.shape[-1]) >= 32, 0).to(dtype)


@reported("vllm-project/vllm#48658", lambda w: w.v_head_dim != w.head_dim and w.scale is None)
class ScaleOfAnotherHeadDim(Attention):
    """The scale was computed from another head dimension than that of q and k."""

    def scale(self, call: Call) -> float:
        return call.w.scale if call.w.scale is not None else call.w.v_head_dim**-0.5


@reported("vllm-project/vllm#40792", lambda w: w.kv_heads > 1 and w.group > 16 and w.head_groups == "contiguous")
class BlocksOfHeadsAcrossKeyHeads(Attention):
    """Query heads were taken in blocks that do not divide the group, and all of a block used the key head of its first."""

    def kv_heads_of(self, call: Call) -> Tensor:
        block = min(16, call.w.group)
        first = torch.arange(call.w.heads) // block * block
        return first // call.w.group if call.w.head_groups == "contiguous" else super().kv_heads_of(call)


@reported("vllm-project/vllm-xpu-kernels#409", lambda w: w.group > 16)
class SixteenHeadsOfAGroupComputed(Attention):
    """The grid had one tile of 16 heads for each key head, whose group may be larger."""

    def rounded_out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return super().rounded_out(out.masked_fill(self.kept["is beyond"], 0), dtype)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        at = torch.arange(call.w.heads)
        of_group = at // call.w.kv_heads if call.w.head_groups == "interleaved" else at % call.w.group
        self.kept["is beyond"] = (of_group >= 16)[:, None, None]
        return super().forward(call)


@reported("Dao-AILab/flash-attention#1937", lambda w: w.score_mod is not None and w.group > 1)
class ScoreModGivenTheKeyHead(Attention):
    """With the heads of a group packed, score_mod was to get the query head, and got that of the keys."""

    def head_of_mod(self, t: Tile) -> Tensor:
        return self.kv_heads_of(t.call)[:, None, None]


# -- softcap, bias, ALiBi ----------------------------------------------------------------------------------------------------
@reported("meta-pytorch/segment-anything-fast#71", lambda w: w.bias is not None)
class BiasNotInBase2(Attention):
    """Scores were multiplied by log2(e) for an exponential of base 2, the bias was not."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        return super().bias(t, bias) * math.log(2)


@reported("huggingface/trl#5691", lambda w: w.softcap is not None)
class SoftcapBeforeScale(Attention):
    """The softcap was applied to scores without their scale, which came after the tanh."""

    def capped(self, t: Tile, x: Tensor) -> Tensor:
        scale = self.scale(t.call)
        return x if t.w.softcap is None else super().capped(t, x / scale) * scale


@reported("unslothai/unsloth-zoo#593", lambda w: w.softcap is not None)
class SoftcapMultipliedByTheScore(Attention):
    """tanh(score / cap) was multiplied by the score, not by the cap."""

    def capped(self, t: Tile, x: Tensor) -> Tensor:
        return x if t.w.softcap is None else x * torch.tanh(x / t.w.softcap)


@reported("HabanaAI/vllm-fork#503", lambda w: bool(w.alibi))
class AlibiInBfloat16(Attention):
    """ALiBi's bias was computed in bfloat16, which loses accuracy in long sequences."""

    def alibi(self, t: Tile, slopes: Tensor) -> Tensor:
        return super().alibi(t, slopes).bfloat16().float()


@reported("ai-bond/flash-attention-v100#34", lambda w: w.alibi == "batch" and w.batch > 1)
class AlibiSlopesWithoutABatch(Attention):
    """Slopes of shape (batch, heads) were indexed wrongly for a batch of more than one."""

    def slopes(self, t: Tile, slopes: Tensor) -> Tensor:
        return slopes if slopes.dim() == 1 else slopes[0]


@reported("city96/ComfyUI_ExtraModels#33", lambda w: bias_has("b")(w) and w.batch > 1)
class BiasOfFirstBatchEntry(Attention):
    """The mask did not take the batch into account: all entries had that of the first."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        return super().bias(t, bias[:1])


@reported("facebookresearch/xformers#808", lambda w: bias_has("q", "k")(w) and w.kv_len % 8 > 0)
class BiasWithRowsOfAMultipleOf8(Attention):
    """The kernel wants rows of the bias a multiple of 8 apart; it was given others."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        b, heads, rows, keys = bias.shape
        if rows == 1 or keys == 1:
            return super().bias(t, bias)
        at = torch.arange(rows)[:, None] * (-(-keys // 8) * 8) + torch.arange(keys)
        return super().bias(t, bias.reshape(b, heads, -1)[..., at % (rows * keys)])


@reported("AminRezaei0x443/memory-efficient-attention#8", lambda w: bias_lacks("q")(w) and some(w, lambda n, m: n > 64))
class BiasOfOneRowReadForTheFirstTile(Attention):
    """Whether the bias is one row for all queries was asked of the wrong dimension: later chunks did not get it."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        found = super().bias(t, bias)
        return torch.zeros_like(found) if bias.shape[2] == 1 and t.rows.start else found


# -- sinks, lse --------------------------------------------------------------------------------------------------------------
@reported(
    "Dao-AILab/flash-attention#2706",
    lambda w: (
        bool(w.sinks)
        and (
            some(w, lambda n, m: m == 0 and n > 0) or (is_band(w) and not w.mask.band.top_left and some(w, lambda n, m: n > m))
        )
    ),
)
class LseOfARowWithItsSinkAlone(Attention):
    """Rows that see their sink and no key had lse NaN."""

    def with_sinks(self, call: Call, e: Entry, rows: range, part: Part) -> Part:
        found = super().with_sinks(call, e, rows, part)
        if call.sinks is None:
            return found
        return found._replace(lse=found.lse.masked_fill(part.lse == -math.inf, math.nan))


@reported(
    "Dao-AILab/flash-attention#2706",
    lambda w: isinstance(w.sinks, str) and w.sinks == "float32" and w.dtype in ("bfloat16", "float16"),
)
class SinksInTheTensorsDtype(Attention):
    """Sinks of a dtype of their own were read in that of q, k and v."""

    def sinks(self, call: Call, e: Entry, rows: range) -> Tensor | None:
        return None if call.sinks is None else call.sinks.to(call.q.dtype).float()[:, None]


@reported(
    "vllm-project/vllm-xpu-kernels#556",
    lambda w: bool(w.sinks) and w.group > 1 and some(w, lambda n, m: n > 1) and w.head_groups == "contiguous",
)
class SinksByPackedRow(Attention):
    """With the heads of a group packed into rows, the row's statistics took the sink of another head."""

    def sinks(self, call: Call, e: Entry, rows: range) -> Tensor | None:
        if call.sinks is None or call.w.group == 1:
            return super().sinks(call, e, rows)
        group = call.w.group
        packed = torch.arange(rows.start, rows.stop) * group + torch.arange(group)[:, None]
        heads = torch.arange(call.w.kv_heads)[:, None, None] * group + packed // max(e.n, 1)
        return call.sinks.float()[heads.flatten(0, 1)]


@reported("vllm-project/vllm#54568", lambda w: bool(w.sinks) and decodes(w))
class SinksDroppedWhileDecoding(Attention):
    """The kernel that decodes did not get the sinks."""

    def sinks(self, call: Call, e: Entry, rows: range) -> Tensor | None:
        return None if e.n == 1 else super().sinks(call, e, rows)


@reported("jax-ml/jax#40128", lambda w: bool(w.sinks) and w.out_dtype != "float32", parameters=("sinks",))
class DsinksRoundedBeforeTheSum(Attention):
    """Every row's share of a sink's gradient was rounded to the tensors' dtype before the sum."""

    def dsinks(self, call: Call, e: Entry, rows: range, lse: Tensor, delta: Tensor) -> Tensor:
        share = -((self.sinks(call, e, rows) - lse).exp() * delta)
        return share.to(call.q.dtype).float().sum(-1)


@reported("Dao-AILab/flash-attention#1973", lambda w: bool(w.sinks), parameters=("sinks",))
class NoGradientOfSinks(Attention):
    """Gradients of sinks were not computed."""

    def dsinks(self, call: Call, e: Entry, rows: range, lse: Tensor, delta: Tensor) -> Tensor:
        return torch.zeros(call.w.heads)


@reported("ROCm/aiter#3334", lambda w: w.softcap is None and w.score_mod is None)
class LseOfCenteredKeys(Attention):
    """The keys' mean was taken off, which out does not show; lse was that of the centered keys."""

    def attend(self, call: Call, e: Entry, rows: range) -> Part:
        part = super().attend(call, e, rows)
        if not e.m or call.w.softcap is not None or call.w.score_mod is not None:
            return part
        t = Tile(call, e, rows, range(e.m))
        shift = self.load_q(t) @ self.load_k(t).mean(1, keepdim=True).mT * self.scale(call)
        return part._replace(lse=part.lse - shift.squeeze(-1))


@reported("flashinfer-ai/flashinfer#4485", decodes)
class LseInBase2WhileDecoding(Attention):
    """lse was of base 2 or of base e by the backend that one interface chose."""

    def attend(self, call: Call, e: Entry, rows: range) -> Part:
        part = super().attend(call, e, rows)
        return part._replace(lse=part.lse / math.log(2)) if e.n == 1 else part


# -- ranges and rounding -----------------------------------------------------------------------------------------------------
@reported("NVIDIA/cudnn-frontend#262", anything)
class MaximumNotBelowZero(Attention):
    """Rows whose scores are all negative were wrong: the maximum began at 0."""

    def lowest_maximum(self, call: Call) -> float:
        return 0.0


@reported("NVIDIA/cudnn-frontend#744", anything)
class MaximumNotBelowMinus200(Attention):
    """Rows whose scores all lie between -200 and -490 were wrong."""

    def lowest_maximum(self, call: Call) -> float:
        return -200.0


@reported("NVIDIA/cudnn-frontend#1072", lambda w: decodes(w) and not w.has_no_gradient_because)
class ReciprocalOfExpLseForOneQuery(Attention):
    """dk and dv of one query were NaN where lse is -122."""

    def probabilities_again(self, t: Tile, x: Tensor, lse: Tensor) -> Tensor:
        if t.e.n != 1:
            return super().probabilities_again(t, x, lse)
        p = super().probabilities_again(t, x, torch.zeros_like(lse))
        return p * (-lse.masked_fill(lse == -math.inf, 0)).exp()[..., None]


@reported("Dao-AILab/flash-attention#2717", lambda w: w.dtype == "float8_e4m3fn")
class ProbabilitiesSaturateInFp8(Attention):
    """P was scaled up before it was rounded to e4m3, which ends at 448."""

    def rounded(self, t: Tile, p: Tensor) -> Tensor:
        if t.w.dtype != "float8_e4m3fn":
            return super().rounded(t, p)
        return (p * 512).clamp(max=448).to(torch.float8_e4m3fn).float() / 512


@reported("ROCm/aiter#5151", lambda w: w.out_dtype == "bfloat16")
class OutTruncated(Attention):
    """float32 was cut to bfloat16, not rounded: each element is a little too small."""

    def rounded_out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == torch.bfloat16:
            out = (out.contiguous().view(torch.int32) & -65536).view(torch.float32)
        return out.to(dtype)


@reported("ikawrakow/ik_llama.cpp#2144", lambda w: w.out_dtype != "float32" and some(w, lambda n, m: m > 2048))
class ValuesSummedInTheDtype(Attention):
    """The running sum of P v was kept in half precision, and so rounded with each tile of keys."""

    def summed(self, t: Tile, acc: Tensor) -> Tensor:
        return acc.to(getattr(torch, t.w.out_dtype)).float()


# -- quantized keys and values -----------------------------------------------------------------------------------------------
@reported("vllm-project/vllm#55557", lambda w: w.is_quantized and not w.v_in_k)
class DescalesSwapped(Attention):
    """k was multiplied by the descale of v, and v by that of k."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return super().descale(t, {"k": "v", "v": "k"}.get(name, name))


@reported("sgl-project/sgl-kernel-xpu#252", has_per_head)
class DescaleOfTheFirstHead(Attention):
    """The descale was read as one number, where each batch entry and key head has one."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        found = super().descale(t, name)
        per_head = t.w.descales == "head" and found is not None
        return getattr(t.call.inputs.descales, name)[0, 0] if per_head else found


@reported("sgl-project/sglang#34765", lambda w: w.is_quantized)
class DescaleOfVOmitted(Attention):
    """The descale of k was restored in the first product, that of v was omitted in the second."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return None if name == "v" else super().descale(t, name)


@reported("vllm-project/vllm#51363", has_per_head)
class DescalesPerHeadDropped(Attention):
    """Descales of each head were dropped."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return None if t.w.descales == "head" else super().descale(t, name)


@reported("vllm-project/vllm#42580", lambda w: w.descales == "head" and w.batch > 1)
class DescalesOfTheFirstSequence(Attention):
    """Descales were loaded without the number of the sequence."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return super().descale(t._replace(e=t.e._replace(b=0)) if t.w.descales == "head" else t, name)


@reported(
    "flashinfer-ai/flashinfer#4044",
    lambda w: w.descales == "token" and w.kv_pages is not None and w.kv_heads > 1 and w.kv_pages.size > 1,
)
class DescalesOfAPageWithHeadsFirst(Attention):
    """Descales of a paged cache were read without their strides."""

    def descales_in_pages(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        pages, size, heads = pool.shape
        return super().descales_in_pages(call, e, pool.reshape(pages, heads, size).transpose(1, 2))


@reported("NVIDIA/cutlass#3615", lambda w: w.descales == "token" and some(w, lambda n, m: m > 64))
class DescalesOfTheFirstSplit(Splits):
    """Each split counted its descales from 0, and so used those of the first split."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        of_keys = t.w.descales == "token" and name != "q"
        first = t.keys.start // 64 * 64 if of_keys else 0
        return super().descale(t._replace(keys=range(t.keys.start - first, t.keys.stop - first)), name)


@reported("flashinfer-ai/flashinfer#3626", lambda w: w.descales == "token" and some(w, lambda n, m: m > 8))
class DescalesSharedEightKeysApart(Attention):
    """A fragment holds two keys, eight apart, and both were multiplied by the descale of the first."""

    def load_k(self, t: Tile) -> Tensor:
        factor, k = self.descale(t, "k"), super().load_k(t)
        if t.w.descales != "token" or factor is None:
            return k
        at = torch.arange(len(t.keys)) % 16 % 8 + torch.arange(len(t.keys)) // 16 * 16
        ratio = factor[:, at] / factor
        return k * ratio[self.kv_heads_of(t.call)]


@reported("lightseekorg/tokenspeed#759", lambda w: w.is_quantized)
class DescalesOfKAndVNotApplied(Attention):
    """The cache holds k / k_scale and v / v_scale; attention ran on these."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return super().descale(t, name) if name == "q" else None


# -- dropout -----------------------------------------------------------------------------------------------------------------
def has_dropout(w: Workload) -> bool:
    return w.dropout > 0


@reported("aws-neuron/nki-samples#81", has_dropout)
class DropoutMissingInDp(Attention):
    """The gradient of the weights was not dropped before dS was formed from it."""

    def dropped_gradient(self, t: Tile, dp: Tensor) -> Tensor:
        return dp


@reported("pytorch/pytorch#190717", has_dropout)
class AnotherDropoutMaskInBackward(Attention):
    """The mask was not saved, and drawn again without the state of the generator."""

    def backward(self, call: Call, *given: Any) -> dict[str, Tensor]:
        self.draw_dropout(call)
        return super().backward(call, *given)


@reported("facebookresearch/xformers#173", has_dropout)
class DropoutSeededByAnAddress(Attention):
    """The address of the seed was taken for the seed: equal seeds gave different masks."""

    def draw_dropout(self, call: Call) -> None:
        w, own = call.w, torch.Generator()
        own.seed()
        if w.dropout:
            call.keep = torch.rand(w.batch, w.heads, w.q_len, w.kv_len, generator=own) >= w.dropout


@reported("Dao-AILab/flash-attention#2088", has_dropout)
class DropoutWithAConstantSeed(Attention):
    """Seed and offset were constants: every call dropped the same."""

    def draw_dropout(self, call: Call) -> None:
        w, own = call.w, torch.Generator().manual_seed(0x1BF58)
        if w.dropout:
            call.keep = torch.rand(w.batch, w.heads, w.q_len, w.kv_len, generator=own) >= w.dropout


@reported("aws-neuron/nki-samples#80", has_dropout)
class DenominatorAfterDropout(Attention):
    """The denominator was summed after the dropout."""

    def scores(self, t: Tile) -> Tensor:
        s = super().scores(t)
        return s if t.call.keep is None else s.masked_fill(~self.kept_weights(t), -math.inf)


@reported("ROCm/rocm-libraries#7221", lambda w: w.dropout > 0 and w.batch > 1 and w.group > 1)
class DropoutMaskSharedByBatchEntries(Attention):
    """The offset of a head's mask counted key heads, not heads: heads of two batch entries had one mask."""

    def draw_dropout(self, call: Call) -> None:
        super().draw_dropout(call)
        if call.keep is not None:
            at = torch.arange(call.w.batch)[:, None] * call.w.kv_heads + torch.arange(call.w.heads)
            call.keep = call.keep.flatten(0, 1)[at]


@reported("facebookresearch/xformers#724", has_dropout)
class DvWithoutTheFactorOfDropout(Attention):
    """The backward pass of dropout was wrong: dv lacked 1 / (1 - p)."""

    def dropped_again(self, t: Tile, p: Tensor) -> Tensor:
        return p if t.call.keep is None else p * self.kept_weights(t)


# -- backward ----------------------------------------------------------------------------------------------------------------
@reported(
    "huggingface/diffusers#14338",
    lambda w: w.kv_heads == w.heads == w.kv_len and not w.has_no_gradient_because and not w.is_packed,
)
class KeysTransposedInBackwardWhereSquare(Attention):
    """k and v were transposed twice in the backward pass, which no shape shows where there are as many heads as keys."""

    def is_square(self, t: Tile) -> bool:
        return t.w.kv_heads == t.w.heads == t.e.m == len(t.keys)

    def load_k_again(self, t: Tile) -> Tensor:
        k = super().load_k_again(t)
        return k.transpose(0, 1) if self.is_square(t) else k

    def load_v_again(self, t: Tile) -> Tensor:
        v = super().load_v_again(t)
        return v.transpose(0, 1) if self.is_square(t) else v


@reported("fla-org/flash-linear-attention#1042", lambda w: w.v_head_dim > 32 and not w.has_no_gradient_because)
class DeltaTakenOffForEachSliceOfValues(Attention):
    """With the value dimension in slices, each subtracted the whole delta."""

    def dscores(self, t: Tile, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return super().dscores(t, p, dp, delta * -(-t.w.v_head_dim // 32))


@reported(
    "Dao-AILab/flash-attention AI/VARLEN_PREPROCESS_TILE_BUG.md",
    lambda w: w.is_packed and not w.has_no_gradient_because and some(w, lambda n, m: n % 64 > 0),
)
class DeltaOfALastRowTileUnwritten(Attention):
    """The kernel that computes delta had another tile than the one that reads it: the last rows of a sequence had none."""

    def delta(self, call: Call, *given: Any) -> Tensor:
        delta = super().delta(call, *given)
        if not call.w.is_packed:
            return delta
        written = torch.full_like(delta, 3.0)  # what was there
        for e in self.entries(call):
            rows = slice(e.row, e.row + e.n // 64 * 64)
            written[:, rows] = delta[:, rows]
        return written


@reported("HKUSTDial/flash-sparse-attention#199", lambda w: bias_lacks("b")(w) and w.batch > 1, parameters=("bias",))
class DbiasOfTheLastBatchEntry(Attention):
    """The gradient of a bias that all batch entries share was not reduced over them."""

    def add_dbias(self, t: Tile, total: Tensor, share: Tensor) -> None:
        if total.shape[0] == 1 and t.rows.start == t.keys.start == 0:
            total.zero_()
        super().add_dbias(t, total, share)


@reported("HKUSTDial/flash-sparse-attention#193", lambda w: bias_lacks("h")(w) and w.heads > 1, parameters=("bias",))
class DbiasOfTheLastHead(Attention):
    """The gradient of a bias that heads share was not accumulated over them."""

    def tile_bias(self, t: Tile) -> Tensor | None:
        bias = super().tile_bias(t)
        return None if bias is None else bias.expand(t.w.heads, *bias.shape[1:])

    def add_dbias(self, t: Tile, total: Tensor, share: Tensor) -> None:
        super().add_dbias(t, total, share[-1:] if total.shape[1] == 1 else share)


@reported("Dao-AILab/flash-attention#1977", lambda w: bool(w.alibi), parameters=("alibi",))
class NoGradientOfSlopes(Attention):
    """ALiBi's slopes are accepted, but get no gradient."""

    def add_dslopes(self, t: Tile, total: Tensor, share: Tensor) -> None:
        pass


@reported("pytorch/pytorch#188302", lambda w: w.bias is not None and w.score_mod is None, parameters=("bias",))
class NullLseWhereTheBiasAloneIsTrained(Attention):
    """lse was saved only if q, k or v need a gradient; the bias alone had one computed without it."""

    def gradients(self, call: Call, out: Tensor, lse: Tensor, *given: Any) -> dict[str, Tensor]:
        needed = given[-1]
        saved = any(needed[name] for name in "qkv")
        return super().gradients(call, out, lse if saved else torch.zeros_like(lse), *given)


# -- memory and state --------------------------------------------------------------------------------------------------------
@reported("Dao-AILab/flash-attention#2665", lambda w: w.head_dim >= 256)
class StridesIgnoredForALargeHeadDim(Attention):
    """The kernel for a head dimension of 256 ignored the strides."""

    def rows_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        if tensor is call.q and call.w.head_dim >= 256:
            plain = torch.empty(tensor.shape, device="meta").stride()
            tensor = tensor.as_strided(tensor.shape, plain, tensor.storage_offset())
        return super().rows_in(call, e, tensor)


@reported("vllm-project/vllm tests/kernels/attention: q *= scale", anything)
class QueryScaledInPlace(Attention):
    """q was multiplied by the scale in the caller's tensor."""

    def __call__(self, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, **leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = super().__call__(inputs, q, k, v, **leaves)
        if inputs.workload.dtype != "float8_e4m3fn":
            q.detach().mul_(inputs.workload.softmax_scale)
        return result


@reported(
    "vllm-project/vllm#43961",
    lambda w: (is_padded(w) and w.pad == "right") or (w.kv_pages is not None and some(w, lambda n, m: m < w.kv_len)),
)
class UnusedSlotsCleared(Attention):
    """NaN in unused slots of the cache was met by clearing them, in the caller's cache."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        for e in self.entries(call):
            for tensor in (call.k.detach(), call.v.detach()):
                if call.w.kv_pages is not None and call.w.cached is None:
                    at = torch.arange(e.m, call.inputs.page_table.shape[1] * self.page_size(call))
                    page = self.page_numbers(call, e, at // self.page_size(call))
                    self.slots(call, tensor)[page, at % self.page_size(call)] = 0
                elif is_padded(call.w) and call.w.pad == "right":
                    tensor[e.b, :, e.m :] = 0
        return super().forward(call)


@reported("triton-lang/triton#2869", is_band)
class WindowOfFirstCall(Attention):
    """The key of compiled kernels missed a parameter: the first call was right, later ones were not."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        key = (t.w.heads, t.w.kv_heads, t.w.head_dim, t.w.dtype)
        return self.kept.setdefault(key, super().window(t))


@reported("flashinfer-ai/flashinfer#4270", anything)
class GroupOfFirstCall(Attention):
    """A second call replayed the graph of the first, in whose key the number of key heads was missing."""

    def kv_heads_of(self, call: Call) -> Tensor:
        kept = self.kept.setdefault((call.w.heads, call.w.head_dim, call.w.dtype), super().kv_heads_of(call))
        return kept.clamp(max=call.w.kv_heads - 1)
