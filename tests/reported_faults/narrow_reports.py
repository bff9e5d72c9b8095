"""Faults after public reports, each of a kernel that takes what the reporting project's takes and nothing else.

None of the reports is behind a mutant or a fault of `table`. `taking` says what a kernel takes, the report, and by which
identities a diagnosis may name the fault, or which invariants, none where it has no name. Several are right where a workload
cannot tell them apart: one query behind no window sees what it sees without a mask, a mean of two splits, one empty, is
half of the result, and of the order of pages only the last one shows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pytest_attn import Workload

from .kernel import Attention, Call, Entry, Part, Tile, cut
from .narrow import NARROW, is_decoding, only, taking
from .table import DescalesOfKAndVNotApplied, NoGradientOfSinks, PagesSideBySide, Splits

__all__ = ["NARROW"]

_GROUPED = "grouped heads"
_DENSE = only("causal", where=lambda w: w.group == 1)
_DENSE_GROUPED = only("causal", _GROUPED)
_DECODING = only(_GROUPED, where=is_decoding)
_PAGED_DECODING = only("padded", "paged", _GROUPED, where=lambda w: is_decoding(w) and bool(w.kv_pages))
_PAGED = only("padded", "paged", "causal-bottom-right", _GROUPED, where=lambda w: bool(w.kv_pages))
_PACKED_PAGES = only(
    "packed", "paged", "packed pages", "causal-bottom-right", _GROUPED, where=lambda w: w.is_packed and bool(w.kv_pages)
)
_MLA_DECODING = only("v in k", "v_head_dim", _GROUPED, "paged", "scale", where=lambda w: is_decoding(w) and w.v_in_k)
_TOKENS = only(
    "quantized", "padded", "paged", "page layouts", _GROUPED, where=lambda w: is_decoding(w) and w.descales == "token"
)


def _has_mask(w: Workload) -> bool:
    return w.mask is not None


# -- masks --------------------------------------------------------------------------------------------------------------------


@taking(
    only("window", "causal-bottom-right", _GROUPED, where=_has_mask),
    "huggingface/transformers#41228",
    "window-edge-on-other-side",
)
class FutureBeyondAWindowSeen(Attention):
    """A window's lower edge was cut off with the wrong sign: nothing was hidden on the left, and later keys were shown."""

    def in_band(self, t: Tile) -> Tensor:
        left, right = self.window(t)
        seen = t.j <= self.place(t) + (right or 0)
        return seen if left is None else seen | (t.j > self.place(t) + left)


@taking(only("window", "causal-bottom-right", _GROUPED, where=_has_mask), "ml-explore/mlx-lm#390", "window-left-one-too-long")
class WindowOfOneMore(Attention):
    """The mask of a window had one value too many."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        left, right = super().window(t)
        return None if left is None else left + 1, right


@taking(
    only("window", "causal", "softcap", _GROUPED, where=_has_mask),
    "keras-team/keras-hub#2186",
    "window-left-ignored",
    "mask-ignored",
)
class WindowNeverHandedOver(Attention):
    """The mask of the window was made behind the branch that takes flash attention."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        return None, super().window(t)[1]


@taking(
    only("causal-bottom-right", "causal", _GROUPED, where=lambda w: _has_mask(w) and w.head_dim in (64, 128)),
    "NVIDIA/cutlass#2336",
    "causal-other-alignment",
)
class CausalFromTheFirstKey(Attention):
    """A causal mask was right for equal lengths only."""

    def place(self, t: Tile) -> Tensor:
        return t.i


@taking(
    only("packed", "causal-bottom-right", _GROUPED, where=lambda w: w.packs_keys and _has_mask(w)),
    "ROCm/rocm-libraries#10999",
    "aligned-as-longest-sequence",
    "causal-other-alignment",
)
class DiagonalOfTheLongestSequence(Attention):
    """The offset of the diagonal was that of the longest lengths, for all packed sequences."""

    def place(self, t: Tile) -> Tensor:
        return t.i + t.w.kv_len - t.w.q_len


@taking(only("mask_mod", "causal", _GROUPED, where=_has_mask), "vllm-project/vllm#30974", "tiles-beyond-diagonal-missing")
class TilesChosenCausally(Attention):
    """The tiles were those of a causal mask, where a prefix is seen in both directions."""

    def key_tiles(self, call: Call, e: Entry, rows: range) -> list[range]:
        return cut(min(e.m, rows.stop + e.m - e.n), self.key_tile)


@taking(only("causal-bottom-right", _GROUPED, where=is_decoding), "meta-pytorch/gpt-fast#233", "causal-other-alignment")
class MaskOfTheFirstRow(CausalFromTheFirstKey):
    """While decoding the mask was that of row 0."""


class _NoMask(Attention):
    def visible(self, t: Tile) -> Tensor:
        return t.j >= 0


@taking(
    only("boolean", "mask_mod", _GROUPED, where=lambda w: is_decoding(w) and _has_mask(w)),
    "pytorch/pytorch#163314",
    "mask-ignored",
)
class SlicedMaskHidesNothing(_NoMask):
    """A sliced mask had lost its function."""


@taking(only("boolean", where=_has_mask), "pytorch/pytorch#122753", "mask-ignored")
class GivenMaskNotHandedOver(_NoMask):
    """The mask was not handed to the kernel."""


@taking(_DENSE, "jax-ml/jax#19237", "mask-ignored")
class CausalWithoutEffect(_NoMask):
    """The flag of a causal mask had no effect."""


@taking(
    only("boolean", _GROUPED, where=lambda w: is_decoding(w) and _has_mask(w)),
    "invergent-ai/surogate#110",
    "mask-of-another-batch-entry",
)
class BatchOffsetOfAMaskTwice(Attention):
    """The offset of a batch entry was added twice to the row of the mask."""

    def in_other_mask(self, t: Tile) -> Tensor:
        return t.call.inputs.mask_mod(t.e.n)(torch.tensor(2 * t.e.b % t.w.batch), t.h, t.i, t.j)


# -- lengths and tiles --------------------------------------------------------------------------------------------------------


class _ZerosCounted(Attention):
    """Keys of zeros fill up the last tile, and count."""

    def score_of_zeros(self, call: Call) -> float:
        return 0.0

    def with_sinks(self, call: Call, e: Entry, rows: range, part: Part) -> Part:
        zeros = -e.m % self.key_tile
        if not zeros:
            return part
        lse = torch.logaddexp(part.lse, torch.tensor(self.score_of_zeros(call) + math.log(zeros)))
        return Part(part.out * (part.lse - lse).exp()[..., None], lse)


@taking(only(_GROUPED), "ROCm/rocMLIR#1258", "tail-zeros-counted")
class PaddedKeysAreZeros(_ZerosCounted):
    """Keys were padded to full tiles with zeros, not with scores of -inf."""


@taking(only("bias"), "pytorch/xla#8671", "tail-zeros-counted")
class KeysPaddedToTheBlock(_ZerosCounted):
    """Lengths that are no multiple of the block of keys were not padded with a mask."""


@taking(only("softcap", _GROUPED), "ggml-org/llama.cpp#29034", "tail-zeros-counted")
class SoftcapAfterPadding(_ZerosCounted):
    """The soft-cap made a finite score of the -inf of padded keys."""

    def score_of_zeros(self, call: Call) -> float:
        return -call.w.softcap if call.w.softcap else -math.inf


@taking(only(_GROUPED), "alibaba/MNN#4898", "keys-beyond-unseen")
class KeysCutToQueries(Attention):
    """Without a cache there were as many keys as queries."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        return e._replace(m=min(e.n, e.m))


@taking(_DENSE_GROUPED, "ROCm/rocMLIR#2371", "blind-split")
class PartWithoutKeysIsNan(Splits):
    """A part of the keys that is all hidden divided 0 by 0."""

    def finished(self, top: Tensor, total: Tensor, acc: Tensor) -> Part:
        return Part(acc / total[..., None], top + total.log())


@taking(
    only("padded", "causal", where=lambda w: w.kv_lens is not None),
    "microsoft/onnxruntime-genai#1639",
    "kv-len-of-another-batch-entry",
)
class PaddingMaskFilledInOneRun(Attention):
    """The valid tokens of all entries were written to the mask in one run, without its stride."""

    def entry(self, call: Call, b: int) -> Entry:
        e, total = super().entry(call, b), int(call.inputs.kv_lens.sum())
        return e._replace(m=min(max(total - b * call.w.kv_len, 0), call.w.kv_len))


@taking(
    only("padded", "causal", where=lambda w: w.kv_lens is not None and w.q_len == w.kv_len),
    "jy-yuan/KIVI#46",
    "kv-lens-ignored",
    "padding-ignored",
)
class PaddingNotHandedOver(Attention):
    """No mask of the padding was handed to the kernel of the prefill."""

    def entry(self, call: Call, b: int) -> Entry:
        return super().entry(call, b)._replace(key=0, m=call.w.kv_len)


@taking(only("causal-bottom-right", "cached", "padded", _GROUPED, where=_has_mask), "kekzl/imp#117", "cached-keys-unread")
class ChunkSeesItselfOnly(Attention):
    """A later chunk of the prompt did not read the keys before it."""

    def visible(self, t: Tile) -> Tensor:
        return super().visible(t) & (t.j >= t.e.m - t.e.n)


@taking(
    only("cached", "causal-bottom-right", _GROUPED, where=lambda w: w.cached is not None),
    "microsoft/onnxruntime#29719",
    "new-keys-misplaced",
)
class OneNewKeyCopied(Attention):
    """Of several new keys the first one alone was written to the cache."""

    def write(self, w: Workload, cache: Any, into: Tensor, new: Tensor, layout: str) -> None:
        slots, at = self.cache_slots(w, into, layout), self.slots_of_new(w, cache)[:: w.q_len]
        slots[at // slots.shape[1], at % slots.shape[1]] = new[:, :, 0]


# -- splits and online softmax ------------------------------------------------------------------------------------------------


@taking(_DECODING, "vllm-project/flash-attention#87", "lse-layout")
class LseOfSplitsInAnotherOrder(Splits):
    """With split keys lse lay by entry and head already, and was transposed once more."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        return out, lse.reshape(call.w.heads, call.w.batch, -1).transpose(0, 1).contiguous() if call.w.group > 1 else lse


@taking(only(_GROUPED, where=lambda w: 1 < w.q_len < 64), "flagos-ai/FlagGems#5235")
class RowsOfACombineWithAnotherStride(Splits):
    """The combine stepped from row to row by the stride of rows, from a pointer that had moved by the row already."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        heads, rows = call.w.heads, call.w.q_len
        at = torch.arange(rows)[:, None] * (2 * heads - 1) + torch.arange(heads)
        fits = at < rows * heads
        by_rows = out.transpose(1, 2).flatten(1, 2)
        wrong = torch.zeros_like(by_rows)
        wrong[:, at[fits]] = by_rows.unflatten(1, (rows, heads))[:, fits]
        return wrong.unflatten(1, (rows, heads)).transpose(1, 2).contiguous(), lse


@taking(_PAGED_DECODING, "flashinfer-ai/flashinfer#50", "splits-averaged", "out-scaled")
class LseOfSplitsNotStored(Splits):
    """The lse of a split was not stored where the caller wants none, and the merge reads it."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        return super().merged(call, e, rows, [part._replace(lse=torch.zeros_like(part.lse)) for part in parts])


@taking(_PAGED_DECODING, "Tencent/hpc-ops#6", "splits-merged-by-another-head")
class LseOfSplitsWithoutKeyHeads(Splits):
    """The stride of key heads was left out where lse of the splits is read."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        at = torch.arange(call.w.heads) % call.w.group
        return super().merged(call, e, rows, [part._replace(lse=part.lse[at]) for part in parts])


@taking(only("causal-bottom-right", "v_head_dim", _GROUPED, where=lambda w: w.q_len < w.kv_len), "local-inference-lab/vllm#17")
class SecondPartWithStridesOfTheFirst(Splits):
    """Both parts of a merge were read with the strides of the first, whose rows are as wide as those of k."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        first, second = parts
        heads, n, dim = second.out.shape
        at = torch.arange(n)[:, None, None] * heads * call.w.head_dim + torch.arange(heads)[:, None] * call.w.head_dim
        flat = second.out.transpose(0, 1).flatten()
        read = flat[(at + torch.arange(dim)) % flat.numel()].transpose(0, 1)
        return super().merged(call, e, rows, [first, second._replace(out=read)])


@taking(only("causal-bottom-right", _GROUPED, where=lambda w: w.q_len <= w.kv_len), "vllm-project/vllm#40924")
class LseOfHeadsAcrossBlocks(Splits):
    """Where a head's columns lie in two blocks of threads, the second has no lse of it."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        whole = super().merged(call, e, rows, parts)
        dim = call.w.v_head_dim
        thread = torch.arange(call.w.heads * dim).view(-1, dim) // 8
        is_second = (thread // 128 > thread[:, :1] // 128)[:, None]
        return whole._replace(out=whole.out.where(~is_second, (parts[0].out + parts[1].out) / 2))


@taking(_PACKED_PAGES, "flashinfer-ai/flashinfer#4054", "empty-rows-nan")
class MergeOfTwoEmptyParts(Splits):
    """Two parts without keys were merged to NaN."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        is_empty = torch.stack([part.lse == -math.inf for part in parts]).all(0)
        found = super().merged(call, e, rows, parts)
        return Part(found.out.masked_fill(is_empty[..., None], math.nan), found.lse.masked_fill(is_empty, math.nan))


@taking(only("causal", where=lambda w: w.q_len == w.kv_len), "meta-pytorch/attention-gym#205", "splits-merged-as-natural")
class BaseTwoMergedAsNatural(Splits):
    """Parts were merged by their lse of base 2 as if it were natural."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        return super().merged(call, e, rows, [part._replace(lse=part.lse / math.log(2)) for part in parts])


@taking(_DECODING, "paiml/aprender#2753", "sum-not-rescaled", "denominator-not-rescaled")
class FactorOfANewMaximumIsOne(Attention):
    """The old maximum was the new one, as both were one register: nothing was rescaled."""

    def exp(self, x: Tensor) -> Tensor:
        return super().exp(x) if x.dim() == 3 else torch.ones_like(x)


@taking(
    only("causal", _GROUPED, where=lambda w: _has_mask(w) and w.head_dim == 128),
    "carlushuang/gcnasm#21",
    "p-below-maximum-of-tile",
)
class MaximumOfTheTile(Attention):
    """P of a tile was shifted by the tile's maximum, not by the larger one before."""

    def scores(self, t: Tile) -> Tensor:
        s = super().scores(t)
        top = s.amax(-1, keepdim=True)
        self.kept["top"] = top if t.keys.start == 0 else self.kept["top"].maximum(top)
        return s + (self.kept["top"] - top).nan_to_num(0, 0, 0)


@taking(only("causal", _GROUPED, where=lambda w: w.q_len == w.kv_len), "tile-ai/TileOPs#239", "magnitude")
class MaximumResetForEachTile(Attention):
    """Sums were rescaled by the difference of two tiles' maxima, which may be large."""

    def key_tiles(self, call: Call, e: Entry, rows: range) -> list[range]:
        return cut(e.m if call.w.mask is None else min(e.m, rows.stop), self.key_tile)

    def online(self, call: Call, e: Entry, rows: range, tiles: list[range]) -> Part:
        top = torch.full((call.w.heads, len(rows)), -math.inf)
        total, acc = torch.zeros_like(top), torch.zeros(*top.shape, call.w.v_head_dim)
        for t in (Tile(call, e, rows, keys) for keys in tiles):
            s = self.scores(t)
            new = s.amax(-1)
            p, factor = (s - new[..., None]).exp(), (top - new).exp()
            total, acc, top = total * factor + p.sum(-1), acc * factor[..., None] + self.rounded(t, p) @ self.load_v(t), new
        return self.finished(top, total, acc)


# -- pages --------------------------------------------------------------------------------------------------------------------


@taking(_MLA_DECODING, "flashinfer-ai/flashinfer#810", "slots-within-pages-misread")
class PagesOfOneTokenOnly(Attention):
    """The kernel of MLA was right for pages of one token."""

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        at = torch.arange(e.m)
        return self.slots(call, pool)[self.page_numbers(call, e, at // self.page_size(call)), at * 0].transpose(0, 1)


@taking(_PAGED_DECODING, "ROCm/aiter#3062", "page-numbers-misread")
class PageNumbersOf16Bits(Attention):
    """A page's number was cut to 16 bits."""

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        return super().page_numbers(call, e, number) & 0xFFFF


@taking(_PAGED_DECODING, "hw-native-sys/simpler#72", "padding-of-pages-seen")
class LastPageTakenForFull(Attention):
    """The slots of the last page behind the length were not hidden."""

    def entry(self, call: Call, b: int) -> Entry:
        e, size = super().entry(call, b), call.w.kv_pages.size
        return e._replace(m=-(-e.m // size) * size)


@taking(_PAGED, "openvinotoolkit/openvino#28681", "poison")
class TailOfValuesMustBeZero(Attention):
    """Values behind the length were multiplied by a weight of 0, which NaN in the cache survives."""

    def entry(self, call: Call, b: int) -> Entry:
        e, size = super().entry(call, b), call.w.kv_pages.size
        self.kept[b] = e.m
        return e._replace(m=-(-e.m // size) * size)

    def visible(self, t: Tile) -> Tensor:
        real = t._replace(e=t.e._replace(m=self.kept[t.e.b]))
        return super().visible(real) & (t.j < real.e.m)

    def unseen_cleared(self, t: Tile, v: Tensor) -> Tensor:
        return v


@taking(
    only("padded", "paged", "window", "causal-bottom-right", _GROUPED, where=lambda w: bool(w.kv_pages) and _has_mask(w)),
    "vllm-project/vllm#30887",
    "poison",
)
class ValuesBeforeTheWindowMustBeFinite(Attention):
    """Scores of keys before the window were hidden, their values not, nor were those of pages that others had been given."""

    def unseen_cleared(self, t: Tile, v: Tensor) -> Tensor:
        return v


@taking(_PACKED_PAGES, "vllm-project/vllm#29887")
class GatheredWithoutHeads(Attention):
    """Pages were gathered into a tensor whose heads all lay at the first one's place."""

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        found = super().gathered(call, e, pool)
        return torch.cat([found[-1:], torch.zeros_like(found[1:])])


@taking(_PACKED_PAGES, "GeeeekExplorer/nano-vllm#213", "kv-lens-ignored", "padding-of-pages-seen")
class ChunkSeesTheWholeSequence(PaddingNotHandedOver):
    """A chunk's keys were as many as the whole sequence has, of which later ones are not written."""


@taking(_PAGED, "sgl-project/sglang#8675", "keys-begin-late", "first-key-missing")
class KeysOneSlotLater(Attention):
    """Keys were fetched from the slots that follow theirs."""

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        at, size = (torch.arange(e.m) + 1), self.page_size(call)
        number = (at // size).clamp(max=call.inputs.page_table.shape[1] - 1)
        return self.slots(call, pool)[self.page_numbers(call, e, number), at % size].transpose(0, 1)


@taking(_MLA_DECODING, "NVIDIA/TensorRT-LLM#16219", "page-numbers-misread", "page-table-unread")
class PageStrideFourTimesTooLarge(Attention):
    """The stride of pages was that of another cache."""

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        return super().page_numbers(call, e, number) * 4 % len(call.k)


@taking(
    only(
        "cached", "paged", "padded", "causal-bottom-right", _GROUPED, where=lambda w: w.cached is not None and bool(w.kv_pages)
    ),
    "quic/efficient-transformers#1209",
    "new-keys-misplaced",
)
class NewKeysInPagesOfTheFirstRequest(Attention):
    """New keys were written by the first row of the page table."""

    def slots_of_new(self, w: Workload, cache: Any) -> Tensor:
        at = super().slots_of_new(w, cache)
        return at[: w.q_len].repeat(w.batch)


@taking(
    only("padded", "paged", "causal-bottom-right", _GROUPED, where=lambda w: bool(w.kv_pages) and 1 < w.q_len <= 16),
    "flashinfer-ai/flashinfer#4059",
    "queries-misplaced",
)
class RowsOfRequestsPadded(Attention):
    """The rows of a request were found as if each had a multiple of eight."""

    def rows_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        batch, _, n, _ = tensor.shape
        at = (e.b * -(-n // 8) * 8 + torch.arange(n)) % (batch * n)
        return tensor.transpose(1, 2).flatten(0, 1)[at].transpose(0, 1)

    def store(self, call: Call, e: Entry, rows: range, out: Tensor, lse: Tensor, part: Part) -> None:
        lse[e.b, :, rows.start : rows.stop] = part.lse
        out[e.b, :, rows.start : rows.stop] = self.rounded_out(part.out, out.dtype)


@taking(
    only(
        "boolean",
        "mask_mod",
        "packed",
        "paged",
        "packed pages",
        _GROUPED,
        where=lambda w: w.is_packed and bool(w.kv_pages) and _has_mask(w),
    ),
    "NVIDIA/TensorRT-LLM#13006",
)
class MaskRowsBySequence(Attention):
    """The rows of a packed mask were found by the sequence's own number of queries, not by the longest."""

    def in_other_mask(self, t: Tile) -> Tensor:
        row = t.e.b * t.e.n + t.i
        b, i = row // t.w.q_len, row % t.w.q_len
        return t.call.inputs.mask_mod(t.e.n)(b, t.h, i, t.j)


# -- heads, batch, layout -----------------------------------------------------------------------------------------------------


@taking(_DECODING, "ml-explore/mlx#4431", "kv-of-another-batch-entry")
class TwoPassesWithoutABatch(Attention):
    """Two passes over many keys of grouped heads did not add the batch entry's offset."""

    def keys_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        has_two = call.w.group > 1 and call.w.kv_len >= 1024
        return super().keys_in(call, e._replace(b=0) if has_two else e, tensor)


@taking(only("boolean", _GROUPED), "ggml-org/llama.cpp#6646", "kv-of-another-batch-entry")
class FourthDimensionUnused(Attention):
    """The kernel did not use the fourth dimension of k and v."""

    def keys_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        return super().keys_in(call, e._replace(b=0), tensor)


@taking(_DENSE, "BobMcDear/attorch#14", "strides-misread")
class HeadsByDividedStrides(Attention):
    """A head's rows were found by the quotient of two strides, which is 0 for a transposed view."""

    def rows_in(self, call: Call, e: Entry, tensor: Tensor) -> Tensor:
        found = super().rows_in(call, e, tensor)
        return found[:1].expand_as(found) if tensor is call.q and tensor.stride(1) < tensor.stride(2) else found


@taking(
    only("causal", where=lambda w: w.group == 1 and w.head_dim in (16, 32, 64, 128)), "BobMcDear/attorch#14", "scale-wrong"
)
class ScaleOfOneHalf(Attention):
    """The scale was 0.5 for every head dimension."""

    def scale(self, call: Call) -> float:
        return 0.5


@taking(
    only("causal", "v_head_dim", where=lambda w: w.v_head_dim < w.head_dim), "AI-Hypercomputer/maxtext#1370", "scale-wrong"
)
class DividedByTheScale(Attention):
    """Scores were divided by what they are to be multiplied by."""

    def scale(self, call: Call) -> float:
        return call.w.head_dim**0.5


@taking(_MLA_DECODING, "ollama/ollama#13893", "scale-option-ignored")
class ScaleOfTheLatentDimension(Attention):
    """The scale was that of absorbed keys, not that with which the model was trained."""

    def scale(self, call: Call) -> float:
        return call.w.head_dim**-0.5


@taking(only(_GROUPED, where=lambda w: w.kv_heads == 1), "huggingface/pytorch-image-models#2388", "out-viewed-not-transposed")
class HeadsMergedWithoutATranspose(Attention):
    """The heads of out were merged without a transpose."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        batch, heads, rows, dim = out.shape
        return out.reshape(batch, rows, heads, dim).transpose(1, 2).contiguous(), lse


@taking(_DENSE_GROUPED, "mlc-ai/mlc-llm#1889", "head-dim-tail-unread")
class HeadDimOfAMultipleOf32(Attention):
    """The products took a head dimension for a multiple of 32."""

    def logits(self, t: Tile) -> Tensor:
        dims = t.w.head_dim // 32 * 32 or t.w.head_dim
        return self.load_q(t)[..., :dims] @ self.load_k(t)[..., :dims].mT * self.scale(t.call)


@taking(only("causal", where=lambda w: w.head_dim in (64, 128)), "Dao-AILab/flash-attention#2553", "columns-misplaced")
class OutStoredInAnotherLayoutOfRegisters(Attention):
    """The instruction that stores out has another layout of registers than the product: its elements were permuted."""

    def rounded_out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return out.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3).to(dtype)


# -- options ------------------------------------------------------------------------------------------------------------------


@taking(only("sinks", "quantized", _GROUPED, where=is_decoding), "kekzl/imp#1345", "sinks-ignored")
class SinksWithoutQuantizedKeys(Attention):
    """Sinks did not reach the kernels of a quantized cache."""

    def sinks(self, call: Call, e: Entry, rows: range) -> Tensor | None:
        return None if call.w.is_quantized else super().sinks(call, e, rows)


class _NoSoftcap(Attention):
    def capped(self, t: Tile, x: Tensor) -> Tensor:
        return x


@taking(
    only("softcap", "sinks", "causal-bottom-right", "packed", "paged", "packed pages", "window", _GROUPED),
    "sgl-project/sgl-kernel-xpu#491",
    "softcap-ignored",
)
class SoftcapStoredAndNotApplied(_NoSoftcap):
    """The soft-cap was taken and not applied."""


@taking(
    only("softcap", "padded", "paged", _GROUPED, where=lambda w: is_decoding(w) and bool(w.kv_pages)),
    "vllm-project/vllm-metal#665",
    "softcap-ignored",
)
class SoftcapOfZeroHandedOver(_NoSoftcap):
    """The kernel of pages was called with a soft-cap of 0."""


@taking(
    only(
        "softcap",
        "padded",
        "paged",
        "window",
        "causal-bottom-right",
        _GROUPED,
        where=lambda w: is_decoding(w) and bool(w.kv_pages),
    ),
    "flashinfer-ai/flashinfer#350",
    "softcap-after-mask",
)
class SoftcapOfHiddenScores(Attention):
    """The soft-cap came after the mask, and made finite scores of -inf."""

    def scores(self, t: Tile) -> Tensor:
        return self.capped(t, self.logits(t).masked_fill(~self.visible(t), -math.inf))

    def unseen_cleared(self, t: Tile, v: Tensor) -> Tensor:
        return v


@taking(only("bias"), "microsoft/onnxruntime#24017", "bias-of-another-batch-entry")
class BiasOfOneHeadByAllHeads(Attention):
    """The offset of a bias that heads share counted heads."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        if bias.shape[0] == 1 or bias.shape[1] > 1:
            return super().bias(t, bias)
        return super().bias(t, bias[torch.arange(len(bias)) * t.w.heads % len(bias)])


@taking(only("bias", "causal-bottom-right", where=lambda w: w.bias is not None), "NVIDIA/TensorRT-LLM#13919", "bias-ignored")
class BiasDroppedBesideACache(Attention):
    """With a cache the bias of positions was not applied."""

    def tile_bias(self, t: Tile) -> Tensor | None:
        return None if t.e.n < t.e.m else super().tile_bias(t)


@taking(
    only("alibi", "causal", "causal-bottom-right", "padded", where=lambda w: bool(w.alibi)),
    "keras-team/keras-hub#2977",
    "alibi-ignored",
)
class AlibiOfOneQueryIsZero(Attention):
    """While decoding the bias of ALiBi was made for one key, and is 0."""

    def distance(self, t: Tile) -> Tensor:
        return super().distance(t) * (t.e.n > 1)


@taking(
    only("quantized", "packed", "causal", "causal-bottom-right", _GROUPED, where=lambda w: w.packs_keys and w.is_quantized),
    "flashinfer-ai/flashinfer#4979",
    "descale-ignored-of-v",
    "descale-ignored-of-kv",
)
class DescalesOfRaggedKeysIgnored(DescalesOfKAndVNotApplied):
    """The scales of a cache of fp8 were ignored for ragged sequences."""


@taking(_TOKENS, "vllm-project/vllm#51091", "descale-ignored-of-v", "descale-ignored-of-kv")
class DescalesReset(DescalesOfKAndVNotApplied):
    """The scales of tokens were set to 1 after the prompt had been written."""


@taking(_TOKENS, "lablup/mlxcel#717")
class DescalesOfOneOrMore(Attention):
    """No scale of a token was below 1: its keys were rounded to integers."""

    def load(self, t: Tile, name: str, tensor: Tensor) -> Tensor:
        return super().load(t, name, tensor).round()


@taking(_TOKENS, "ovg-project/kvcached#424", "strides-misread")
class PagesWithoutTheirScales(PagesSideBySide):
    """Pages were found by a size without the scales that lie in them."""


# -- precision ----------------------------------------------------------------------------------------------------------------


@taking(
    only(where=lambda w: w.dtype == "float16"), "philipturner/metal-flash-attention#8", "precision-eager", "scores-rounded"
)
class ProductsInHalfBeforeTheScale(Attention):
    """Products of q and k were summed in half precision, and scaled after that."""

    def logits(self, t: Tile) -> Tensor:
        return (self.load_q(t) @ self.load_k(t).mT).half().float() * self.scale(t.call)


@taking(
    only("boolean", _GROUPED, where=lambda w: w.dtype == "float16"),
    "ikawrakow/ik_llama.cpp#1196",
    "sums-in-few-bits",
)
class OutSummedInHalf(Attention):
    """The sum of P v was kept in half precision."""

    key_tile = 32

    def summed(self, t: Tile, acc: Tensor) -> Tensor:
        return acc.half().float()


# -- backward -----------------------------------------------------------------------------------------------------------------


@taking(
    only("interleaved heads", _GROUPED, "packed", "causal", where=lambda w: w.packs_keys),
    "XunhaoLai/native-sparse-attention-triton#27",
    backward=True,
)
class InterleavedHeadsSplitByTheirGroup(Attention):
    """Where heads are interleaved, dk and dv were added to the key head h % group, as far as there is one."""

    def add_to_keys(self, t: Tile, total: Tensor, share: Tensor) -> None:
        if t.w.head_groups != "interleaved":
            return super().add_to_keys(t, total, share)
        at = torch.arange(t.w.heads) % t.w.group
        there = at < t.w.kv_heads
        grouped = torch.zeros(t.w.kv_heads, *share.shape[1:]).index_add_(0, at[there], share[there])
        self.keys_in(t.call, t.e, total)[:, t.keys.start : t.keys.stop] += grouped
        return None


@taking(only("v_head_dim", _GROUPED, "packed", "causal"), "XunhaoLai/native-sparse-attention-triton#27", backward=True)
class DpOfAsManyColumnsAsQ(Attention):
    """dO v took as many columns as q has."""

    def load_v_again(self, t: Tile) -> Tensor:
        return super().load_v_again(t).masked_fill(torch.arange(t.w.v_head_dim) >= t.w.head_dim, 0)


@taking(_DENSE, "flagos-ai/FlagGems#898", backward=True)
class DvOverTheNextHead(Attention):
    """The rows of dv that fill up the last tile were written over the first rows of the next head."""

    def backward(self, call: Call, *given: Any) -> dict[str, Tensor]:
        sums = super().backward(call, *given)
        sums["v"][:, 1:, : -call.w.kv_len % 64] = 0
        return sums


@taking(
    only("score_mod", "mask_mod", "causal", "window", where=lambda w: w.score_mod is not None),
    "pytorch/pytorch#153799",
    backward=True,
)
class GradientOfScoreModBehindTheLength(Attention):
    """With a mask and a score_mod, the gradient was NaN in a last tile that is not full."""

    def dscores(self, t: Tile, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        is_tail = t.w.mask is not None and len(t.keys) < self.key_tile
        return super().dscores(t, p, dp, delta) * (math.nan if is_tail else 1)


@taking(
    only("packed", "causal-bottom-right", _GROUPED, where=lambda w: w.packs_keys),
    "Dao-AILab/flash-attention#443",
    "empty-rows",
    backward=True,
)
class DqOfRowsWithoutKeys(Attention):
    """dq was NaN in rows that see no key."""

    def add_dq(self, t: Tile, total: Tensor, share: Tensor) -> None:
        sees_none = self.place(t) < 0 if t.w.mask is not None else t.i < 0
        super().add_dq(t, total, share.masked_fill(sees_none, math.nan))


@taking(_DENSE, "jax-ml/jax#25647", backward=True)
class RowsOfCausalKeysBeginLate(Attention):
    """With other tiles than those of the default, the first tile of rows that sees a key was left out of dk and dv."""

    key_tile = 48

    def add_to_keys(self, t: Tile, total: Tensor, share: Tensor) -> None:
        if t.w.mask is None or t.rows.start >= -(-t.keys.start // self.row_tile) * self.row_tile:
            super().add_to_keys(t, total, share)


@taking(only("packed", "causal", _GROUPED, where=lambda w: w.packs_keys), "Dao-AILab/flash-attention#2333", backward=True)
class DqWithTilesOfAnotherSize(Attention):
    """The sum of dq was laid out for tiles of 128 rows, and read for tiles of 64."""

    def backward(self, call: Call, *given: Any) -> dict[str, Tensor]:
        sums = super().backward(call, *given)
        for e in self.entries(call):
            first, second = ((e.row + e.b * tile) // tile * tile for tile in (128, 64))
            rows, off = self.rows_in(call, e, sums["q"]), abs(first - second)
            rows.copy_(torch.cat([rows[:, off:], torch.zeros_like(rows[:, :off])], 1))
        return sums


@taking(only("window", "causal", _GROUPED, where=_has_mask), "meta-pytorch/MSLK#263", "recomputed-mask-ignored", backward=True)
class BackwardWithoutAMask(Attention):
    """The backward pass had neither the causal mask nor the window."""

    def probabilities_again(self, t: Tile, x: Tensor, lse: Tensor) -> Tensor:
        return (self.modified(t, x, self.tile_bias(t), self.tile_slopes(t)) - lse[..., None]).exp()


@taking(
    only("sinks", "causal", "window", _GROUPED, where=lambda w: bool(w.sinks)),
    "ISEEKYAN/Megatron-LM#205",
    "all-zeros",
    backward=True,
)
class GradientOfSinksLost(NoGradientOfSinks):
    """The gradient of sinks was computed and not returned."""


# -- after reports that the others left out -----------------------------------------------------------------------------------

_SQUARE = only("causal", _GROUPED, where=lambda w: w.q_len == w.kv_len)
_WINDOWED_PAGES = only(
    "window",
    "causal-bottom-right",
    "padded",
    "paged",
    _GROUPED,
    where=lambda w: is_decoding(w) and _has_mask(w) and bool(w.kv_pages),
)
_PACKED = only(
    "packed", "empty sequences", "causal", "causal-bottom-right", _GROUPED, where=lambda w: w.is_packed and w.packs_keys
)
_PADDED = only("padded", "causal", _GROUPED, where=lambda w: w.kv_lens is not None and w.q_len == w.kv_len)


@taking(_SQUARE, "triton-lang/triton#4174", "recomputed-tiles-beyond-diagonal-missing", backward=True)
class CausalBackwardAlways(Attention):
    """Whatever the mask, the loops of the backward pass ended and began at the diagonal."""

    def key_tiles_again(self, call: Call, e: Entry, rows: range) -> list[range]:
        return [tile for tile in super().key_tiles_again(call, e, rows) if tile.start < rows.stop]


@taking(only(where=lambda w: w.head_dim == w.v_head_dim), "66RING/tiny-flash-attention#12", "head-dim-tail-unread")
class HeadDimIn16s(Attention):
    """Products took as many elements of a head as make a multiple of 16."""

    def logits(self, t: Tile) -> Tensor:
        whole = max(t.w.head_dim // 16 * 16, 8)
        return self.load_q(t)[..., :whole] @ self.load_k(t)[..., :whole].mT * self.scale(t.call)


@taking(only("window", "causal", _GROUPED, where=_has_mask), "ModelTC/LightLLM#1311", "window-both-sided")
class WindowToTheRightAsWell(Attention):
    """A window of (w - 1, w - 1) was handed over, not of (w - 1, 0)."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        left, right = super().window(t)
        return left, right if left is None or right else left


@taking(_WINDOWED_PAGES, "lightseekorg/tokenspeed#578", "window-left-one-too-short")
class WindowOfOneLess(Attention):
    """While decoding as many keys were left as are before a row, without its own."""

    def window(self, t: Tile) -> tuple[int | None, int | None]:
        left, right = super().window(t)
        return None if left is None else max(left - 1, 0), right


@taking(_WINDOWED_PAGES, "vllm-project/vllm-gaudi#1395", "first-window-tile-missing")
class WindowInWholePages(Attention):
    """A window had as many pages as fit into it, so the one in which it begins was left out."""

    def in_band(self, t: Tile) -> Tensor:
        size, left = t.w.kv_pages.size, t.w.mask.band.left
        is_near = t.j >= 0 if left is None else t.j // size > (t.e.m - 1) // size - max(1, (left + 1) // size)
        return super().in_band(t) & is_near


@taking(_DENSE_GROUPED, "torch-spyre/torch-spyre#4331", "strides-misread")
class ViewsOfWholeTiles(Attention):
    """Views were read as if contiguous where their length needed no padding."""

    def __call__(self, inputs: Any, q: Tensor, k: Tensor, v: Tensor, **leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = (t if t.shape[2] % 64 else t.transpose(1, 2).reshape(t.shape) if _is_view(t) else t for t in (q, k, v))
        return super().__call__(inputs, *read, **leaves)


def _is_view(t: Tensor) -> bool:
    return t.dim() == 4 and not t.is_contiguous() and t.transpose(1, 2).is_contiguous()


@taking(
    only(_GROUPED, where=lambda w: w.q_len <= 8), "pytorch/pytorch#174861", "heads-interleaved", "group-taken-for-kv-heads"
)
class KeyHeadsOfTwoPasses(Attention):
    """Where keys took two passes, their heads were counted as those of queries."""

    def kv_heads_of(self, call: Call) -> Tensor:
        return torch.arange(call.w.heads) % call.w.kv_heads if call.w.kv_len >= 1024 else super().kv_heads_of(call)


@taking(
    only("window", "causal", "causal-bottom-right", "sinks", _GROUPED, where=lambda w: bool(w.sinks)),
    "ROCm/rocm-libraries#12227",
    "sink-in-every-split",
)
class SinkOfAnEmptySplitToo(Splits):
    """A first split without keys was the sink alone, and the next one added it, too."""

    def with_sinks(self, call: Call, e: Entry, rows: range, part: Part) -> Part:
        first = self.split(self.key_tiles(call, e, rows))[0]
        seen = [self.visible(Tile(call, e, rows, keys)).expand(call.w.heads, len(rows), -1).any(-1) for keys in first]
        once = super().with_sinks(call, e, rows, part)
        twice, is_empty = super().with_sinks(call, e, rows, once), ~torch.stack(seen).any(0)
        return Part(twice.out.where(is_empty[..., None], once.out), twice.lse.where(is_empty, once.lse))


@taking(
    only("sinks", "causal", "window", _GROUPED, where=lambda w: bool(w.sinks) and w.q_len == w.kv_len),
    "NVIDIA/cudnn-frontend#421",
    "sink-missing-in-lse",
    backward=True,
)
class LseOfKeysAlone(Attention):
    """The backward pass took lse without the sink."""

    def probabilities_again(self, t: Tile, x: Tensor, lse: Tensor) -> Tensor:
        share = (t.call.sinks.float()[:, None] - lse).exp()
        return super().probabilities_again(t, x, lse + (1 - share).clamp(min=1e-30).log())


@taking(
    only("sinks", "padded", "paged", _GROUPED, where=lambda w: bool(w.sinks) and is_decoding(w) and w.group > 1),
    "sgl-project/sgl-kernel-xpu#254",
    "sink-of-another-head",
)
class SinksByLanes(Attention):
    """The heads of a group lay in rows, and their sinks were taken by lanes."""

    def sinks(self, call: Call, e: Entry, rows: range) -> Tensor | None:
        return super().sinks(call, e, rows).view(call.w.group, call.w.kv_heads).T.reshape(-1, 1)


@taking(_PAGED_DECODING, "pegainfer-project/pegainfer#291", "page-beyond-length")
class PageForTheNextToken(Attention):
    """Where the last page was full, the table had that of the next token already, and the length was counted by it."""

    def entry(self, call: Call, b: int) -> Entry:
        e, size = super().entry(call, b), self.page_size(call)
        return e._replace(m=e.m + size * (e.m > 0 == e.m % size))

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        used = -(-int(call.inputs.kv_lens[e.b]) // self.page_size(call))
        return super().page_numbers(call, e, number.clamp(max=used - 1)).where(number < used, 0)


@taking(_PAGED_DECODING, "hw-native-sys/pypto#470", "some-pages-looked-up", "pages-taken-in-order")
class PagesInPairs(Attention):
    """Two pages were loaded at once, from the first one's place."""

    def page_numbers(self, call: Call, e: Entry, number: Tensor) -> Tensor:
        return (super().page_numbers(call, e, number // 2 * 2) + number % 2) % len(call.k)


@taking(
    only("padded", "paged", _GROUPED, where=lambda w: bool(w.kv_pages) and w.kv_pages.size == 256),
    "ai-bond/flash-attention-v100#41",
    "some-pages-looked-up",
    "pages-taken-in-order",
)
class TilesOf160Straddle(Attention):
    """A tile of 160 keys was read from the page of its first one."""

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        at, size, slots = torch.arange(e.m), self.page_size(call), self.slots(call, pool).flatten(0, 1)
        first = at // 160 * 160
        return slots[(self.page_numbers(call, e, first // size) * size + first % size + at % 160) % len(slots)].transpose(0, 1)


@taking(only("alibi", "causal", where=lambda w: w.alibi is True), "meta-pytorch/attention-gym#86", "alibi-sign-flipped")
class FartherIsMore(Attention):
    """ALiBi grew with the distance."""

    def alibi(self, t: Tile, slopes: Tensor) -> Tensor:
        return -super().alibi(t, slopes)


@taking(only("softcap", "causal", _GROUPED, where=lambda w: bool(w.softcap)), "kekzl/imp#688", "softcap-ignored")
class SoftcapOfDecodingOnly(Attention):
    """Where scores of a prefill were kept in float32, nothing capped them."""

    def capped(self, t: Tile, x: Tensor) -> Tensor:
        return x if t.w.q_len > 1 else super().capped(t, x)


@taking(_PACKED, "Dao-AILab/flash-attention#2421", "not-finite", backward=True)
class GradientsWithoutQueriesUnwritten(Attention):
    """dk and dv of a sequence without queries were never written."""

    def backward(self, call: Call, *rest: Any) -> dict[str, Tensor]:
        sums = super().backward(call, *rest)
        for e in (one for one in self.entries(call) if not one.n):
            for name in "kv":
                self.keys_in(call, e, sums[name]).fill_(math.nan)
        return sums


@taking(_PACKED, "Dao-AILab/flash-attention#2568", "empty-rows-nan", "not-finite")
class RowsOfNoKeysAreNan(Attention):
    """Rows of a sequence without keys were divided by 0."""

    def attend(self, call: Call, e: Entry, rows: range) -> Part:
        return super().attend(call, e, rows) if e.m else Part(*(torch.full(s, math.nan) for s in _sizes(call, rows)))


def _sizes(call: Call, rows: range) -> tuple[tuple[int, ...], ...]:
    return (call.w.heads, len(rows), call.w.v_head_dim), (call.w.heads, len(rows))


@taking(only("bias", where=lambda w: w.bias is not None), "HKUSTDial/flash-sparse-attention#194", backward=True)
class LastRowOfDbias(Attention):
    """Of a bias without rows, each tile overwrote the gradient of the one before."""

    def add_dbias(self, t: Tile, total: Tensor, share: Tensor) -> None:
        if total.shape[2] == 1:
            there = total[t.e.b if len(total) > 1 else 0]
            (there[:, :, t.keys.start : t.keys.stop] if total.shape[3] > 1 else there).zero_()
        super().add_dbias(t, total, share)


@taking(
    only("causal-bottom-right", "v_head_dim", _GROUPED, where=lambda w: 1 < w.q_len < w.kv_len),
    "sgl-project/sglang#40903",
    "splits-merged-as-natural",
)
class MergeOfLseInBase2(BaseTwoMergedAsNatural):
    """A prefix and the rest were merged by lse in base 2 as if it were natural."""


@taking(_DENSE_GROUPED, "pytorch/executorch#22426", "causal-other-alignment")
class CausalFromTheLastKey(Attention):
    """A causal mask ended at the last key, where torch's begins at the first."""

    def place(self, t: Tile) -> Tensor:
        return t.i + t.e.m - t.e.n


@taking(_SQUARE, "kyegomez/OpenMythos#2", "causal-not-asked-for")
class NoMaskIsCausal(Attention):
    """Without a mask, more than one row was causal."""

    def visible(self, t: Tile) -> Tensor:
        return super().visible(t) & (t.j <= t.i)


@taking(
    only("v in k", "v_head_dim", "causal", _GROUPED, where=lambda w: w.group > 1),
    "flagos-ai/FlagGems#3759",
    "first-key-head-for-all",
    "heads-in-neighboring-groups",
    "group-taken-for-kv-heads",
)
class GroupsDividedTwice(Attention):
    """The number of a block of heads was divided by the group, of which there was one in each."""

    def kv_heads_of(self, call: Call) -> Tensor:
        return super().kv_heads_of(call) // call.w.group


@taking(only("packed", "causal", _GROUPED, where=lambda w: w.packs_keys), "facebookresearch/xformers#1185", "mask-ignored")
class MovedMaskIsNotCausal(_NoMask):
    """A mask that was moved to a device was no longer causal."""


@taking(_SQUARE, "NVIDIA/cudnn-frontend#304", "recomputed-lse-layout", backward=True)
class StatsByRows(Attention):
    """The backward pass read lse, which lay by rows, as if it lay by heads."""

    def backward(self, call: Call, out: Tensor, lse: Tensor, *rest: Any) -> dict[str, Tensor]:
        return super().backward(call, out, lse.transpose(1, 2).reshape(lse.shape), *rest)


@taking(only("causal", where=lambda w: w.head_dim == w.v_head_dim), "turboderp-org/exllamav3#316", "calls-differ")
class ColumnsNobodyWrote(Attention):
    """Where head_dim is no power of two, columns of memory that nobody wrote entered the products."""

    def logits(self, t: Tile) -> Tensor:
        found = super().logits(t)
        return found if t.w.head_dim.bit_count() == 1 else found + 0.1 * torch.randn(found.shape)


@taking(_SQUARE, "tile-ai/tilelang#547", "adds-to-earlier-calls", backward=True)
class DqIsNeverCleared(Attention):
    """dq was added to in memory that kept the sums of earlier calls."""

    def backward(self, call: Call, *rest: Any) -> dict[str, Tensor]:
        sums = super().backward(call, *rest)
        sums["q"] = self.kept[sums["q"].shape] = self.kept.get(sums["q"].shape, 0) + sums["q"]
        return sums


@taking(
    only("v in k", "v_head_dim", _GROUPED, where=lambda w: is_decoding(w) and w.v_in_k and w.heads % 16 == 0),
    "vllm-project/vllm#46952",
    "heads-shifted",
)
class ThirtyTwoHeadsAreFolded(Attention):
    """Kernels for 16, 64 and 128 heads were right; 32 were folded to 16."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        return out[:, torch.arange(call.w.heads) % 16] if call.w.heads == 32 else out, lse


@taking(
    only("padded", "causal", _GROUPED, where=lambda w: w.kv_lens is not None and w.pad == "right"),
    "Dao-AILab/flash-attention#2167",
    "recomputed-kv-lens-ignored",
    "kv-lens-ignored",
    backward=True,
)
class PaddingInTheBackwardPass(Attention):
    """The backward pass took the lengths of memory, not those that are used."""

    def backward(self, call: Call, *rest: Any) -> dict[str, Tensor]:
        self.kept["is_back"] = True
        sums = super().backward(call, *rest)
        self.kept["is_back"] = False
        return sums

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        return e._replace(m=call.w.kv_len) if self.kept.get("is_back") else e


@taking(_PADDED, "unslothai/unsloth-zoo#963", "mask-ignored")
class PaddingReplacesCausality(_NoMask):
    """A mask of the padding took the place of the causal one."""


@taking(
    only("quantized", "padded", "paged", _GROUPED, where=lambda w: w.kv_dtype == "float8_e4m3fn" and w.descales == "tensor"),
    "sgl-project/sglang#26852",
    "descale-of-k-for-v",
)
class DescaleOfKForV(Attention):
    """Where there was no descale of v, that of k was taken."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return super().descale(t, "k" if name == "v" else name)


# -- after reports of 2025 and 2026, read later -------------------------------------------------------------------------------

_SPLIT_ROWS = only("causal-bottom-right", "window", _GROUPED, where=lambda w: 1 < w.q_len <= w.kv_len and _has_mask(w))
_SCALED_CACHE = only(
    "quantized", "padded", "paged", _GROUPED, where=lambda w: is_decoding(w) and bool(w.kv_pages) and w.descales == "tensor"
)


@taking(
    only(
        "packed",
        "paged",
        "packed pages",
        "window",
        "causal-bottom-right",
        _GROUPED,
        where=lambda w: w.is_packed and _has_mask(w),
    ),
    "vllm-project/tpu-inference#1954",
    "calls-differ",
)
class SumsBeginAtTheFirstKey(Attention):
    """Sums were cleared at the first tile of all, which a window may begin behind."""

    def key_tiles(self, call: Call, e: Entry, rows: range) -> list[range]:
        left, _ = self.window(Tile(call, e, rows, rows))
        first = 0 if left is None else max(0, rows.start + e.m - e.n - left)
        return [tile for tile in cut(e.m, self.key_tile) if tile.stop > first]

    def online(self, call: Call, e: Entry, rows: range, tiles: list[range]) -> Part:
        found, before = super().online(call, e, rows, tiles), self.kept.get("sums")
        if tiles and tiles[0].start and before is not None and before.lse.shape == found.lse.shape:
            found = self.merged(call, e, rows, [before, found])
        self.kept["sums"] = found
        return found


@taking(_WINDOWED_PAGES, "tenstorrent/tt-metal#30362", "window-left-one-too-short", "first-window-tile-missing")
class WindowFromTheSixteenthColumn(Attention):
    """Where a window begins at the last of a tile's first 16 keys, all of these were hidden."""

    def in_band(self, t: Tile) -> Tensor:
        left, first = self.window(t)[0], self.place(t)
        first = first - left if left is not None else first * 0
        return super().in_band(t) & ((t.j > first) | (first % 32 != 15))


@taking(
    only("causal-bottom-right", where=lambda w: w.group == 1 and w.q_len <= w.kv_len and _has_mask(w)),
    "tile-ai/tilelang#864",
    "tiles-beyond-diagonal-missing",
)
class TilesWithoutThePast(Attention):
    """The loop over keys ended at a row's own number, not behind those in the cache."""

    def key_tiles(self, call: Call, e: Entry, rows: range) -> list[range]:
        return cut(min(e.m, rows.start + self.row_tile), self.key_tile)


@taking(_PACKED, "Dao-AILab/flash-attention#2337", backward=True)
class DeltaAtOffsetsOfLargerTiles(Attention):
    """D of packed sequences was stored at offsets in tiles of 64, and read at those in tiles of 128."""

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        right = super().delta(call, out, dout, dlse)
        stored, read = torch.zeros(len(right), right.shape[1] + 128 * (call.w.batch + 1)), torch.zeros_like(right)
        for e in self.entries(call):
            at = (e.row + e.b * 64) // 64 * 64
            stored[:, at : at + e.n] = right[:, e.row : e.row + e.n]
        for e in self.entries(call):
            at = (e.row + e.b * 128) // 128 * 128
            read[:, e.row : e.row + e.n] = stored[:, at : at + e.n]
        return read


@taking(
    only("softcap", "causal", _GROUPED, where=lambda w: bool(w.softcap)),
    "Dao-AILab/flash-attention#2396",
    "softcap-not-multiplied-back",
)
class ScoresTimesTheirTanh(Attention):
    """The soft-cap was x tanh(x) of x = score / cap."""

    def capped(self, t: Tile, x: Tensor) -> Tensor:
        return x / t.w.softcap * torch.tanh(x / t.w.softcap)


@taking(
    only("softcap", "packed", "causal", _GROUPED, where=lambda w: bool(w.softcap) and w.is_packed),
    "Dao-AILab/flash-attention#2544",
    "recomputed-softcap-ignored",
    backward=True,
)
class SoftcapOfTheForwardPassOnly(Attention):
    """The backward pass of packed sequences had no soft-cap."""

    def backward(self, call: Call, *rest: Any) -> dict[str, Tensor]:
        self.kept["is_back"] = True
        sums = super().backward(call, *rest)
        self.kept["is_back"] = False
        return sums

    def capped(self, t: Tile, x: Tensor) -> Tensor:
        return x if self.kept.get("is_back") else super().capped(t, x)


@taking(only("boolean", where=lambda w: w.group == 1), "huggingface/diffusers#12605", "mask-ignored")
class MaskOfAnotherBackend(_NoMask):
    """A dispatcher left out the arguments that a backend has not, the mask among them."""


@taking(
    only("padded", "left-padded", where=lambda w: w.kv_lens is not None),
    "huggingface/diffusers#14139",
    "padding-on-other-side",
)
class KeysPackedByTheirNumber(Attention):
    """As many keys as are valid were taken from the first on, whatever the side of the padding."""

    def entry(self, call: Call, b: int) -> Entry:
        return super().entry(call, b)._replace(key=0)


@taking(
    only("padded", "window", "causal", where=lambda w: w.kv_lens is not None and w.q_len == w.kv_len),
    "NVIDIA/Megatron-LM#7039",
    "kv-lens-ignored",
    "padding-ignored",
)
class WindowReplacesPadding(Attention):
    """The mask of a window took the place of the one that was given."""

    def entry(self, call: Call, b: int) -> Entry:
        e, left = super().entry(call, b), call.w.mask and call.w.mask.band.left
        return e if left is None else e._replace(key=0, m=call.w.kv_len)


@taking(_PACKED_PAGES, "vllm-project/vllm#52796", "splits-merged-as-natural")
class PrefixOfABaseTwoBackend(Splits):
    """Cached and new keys were merged by lse in base 2, which another library returns, as if it were natural."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        return super().merged(call, e, rows, [part._replace(lse=part.lse / math.log(2)) for part in parts])


@taking(_SCALED_CACHE, "sgl-project/sglang#18882", "descale-ignored-of-kv", "descale-ignored-of-v")
class ScalesOfTheCacheAreOne(Attention):
    """The scales of k and v were not handed to the cache, and were 1."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return super().descale(t, name) if name == "q" else None


@taking(_SCALED_CACHE, "sgl-project/sglang#28144", "descale-ignored-of-q")
class ScaleOfQueriesIsOne(Attention):
    """q was cast to fp8, and its scale left out."""

    def descale(self, t: Tile, name: str) -> Tensor | None:
        return None if name == "q" else super().descale(t, name)


@taking(
    only("sinks", "window", "causal-bottom-right", "padded", "paged", _GROUPED, where=lambda w: bool(w.sinks) and w.q_len > 1),
    "NVIDIA/TensorRT-LLM#19220",
    "not-finite",
    "empty-rows-nan",
)
class SinkOfATileWithoutKeys(Attention):
    """A sink was added with a tile of which a row saw no key: exp of the sink less a lowest maximum is infinite."""

    def with_sinks(self, call: Call, e: Entry, rows: range, part: Part) -> Part:
        seen = [self.visible(Tile(call, e, rows, keys)).expand(call.w.heads, len(rows), -1).any(-1) for keys in cut(e.m, 32)]
        first = next((one for one in seen if one.any()), torch.ones(call.w.heads, len(rows)).bool())
        found = super().with_sinks(call, e, rows, part)
        return found._replace(out=found.out.masked_fill(~first[..., None], math.nan))


@taking(_PAGED, "flashinfer-ai/flashinfer#4452", "empty-rows")
class LseOfRowsWithoutKeysIsFinite(Attention):
    """Rows without keys had the lowest score that the kernel knows as lse."""

    def finished(self, top: Tensor, total: Tensor, acc: Tensor) -> Part:
        found = super().finished(top, total, acc)
        return found._replace(lse=found.lse.clamp(min=-49_993.977))


@taking(
    only("softcap", "bias", where=lambda w: bool(w.softcap) and w.bias is not None and not w.bias_before_softcap),
    "microsoft/onnxruntime#28379",
    "softcap-after-bias",
)
class BiasBeforeTheSoftcap(Attention):
    """A bias was added before the soft-cap."""

    def modified(self, t: Tile, x: Tensor, bias: Tensor | None, slopes: Tensor | None) -> Tensor:
        return self.capped(t, x if bias is None else x + bias)


@taking(
    only("causal-bottom-right", where=lambda w: w.q_len < w.kv_len and _has_mask(w)),
    "microsoft/onnxruntime#29020",
    "causal-other-alignment",
)
class CausalFromTheUpperLeft(Attention):
    """One device aligned a causal mask to the first key, another to the last."""

    def place(self, t: Tile) -> Tensor:
        return t.i


@taking(only("causal", where=_has_mask), "pytorch/pytorch#195910", "mask-shared-by-rows")
class FourRowsShareAMask(Attention):
    """A causal mask was applied once for four rows, as the last of them needs it."""

    def place(self, t: Tile) -> Tensor:
        return t.i // 4 * 4 + 3


@taking(only("causal", where=lambda w: w.group == 1 and w.head_dim >= 64), "pytorch/pytorch#181133", "strides-misread")
class PermutedTensorsAreReadInOrder(Attention):
    """Tensors of (batch, rows, heads, dim) that were permuted were read as if they were contiguous."""

    def __call__(self, inputs: Any, q: Tensor, k: Tensor, v: Tensor, **leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = (t.transpose(1, 2).reshape(t.shape) if _is_view(t) else t for t in (q, k, v))
        return super().__call__(inputs, *read, **leaves)


@taking(
    only("v_head_dim", "causal", where=lambda w: w.group == 1 and w.v_head_dim < w.head_dim),
    "pytorch/pytorch#176767",
)
class OutWithTheStrideOfQueries(Attention):
    """Rows of out were written as far from each other as those of q, and read as v's are wide."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        width = call.w.head_dim
        wide = torch.zeros(*out.shape[:-1], width, dtype=out.dtype)
        wide[..., : out.shape[-1]] = out
        return wide.flatten()[: out.numel()].view(out.shape), lse


@taking(_PACKED, "tile-ai/tilelang#2461", "not-finite", backward=True)
class StatisticsBehindTheLastRowUnwritten(Attention):
    """lse of the rows that fill up the last tile was never written, and reached dk as NaN times 0."""

    def backward(self, call: Call, *rest: Any) -> dict[str, Tensor]:
        sums = super().backward(call, *rest)
        for e in self.entries(call):
            if e.n % 64:
                self.keys_in(call, e, sums["k"])[:, -1:] = math.nan
        return sums


@taking(_PAGED_DECODING, "flashinfer-ai/flashinfer#5029")
class SumsOfPartsAreNotCleared(Splits):
    """Who merges the parts of several rows cleared its sum before the first one only."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        found = super().merged(call, e, rows, parts)
        before = self.kept.get("sum") if e.b else None
        self.kept["sum"] = found.out if before is None else found.out + before
        return found._replace(out=self.kept["sum"])


@taking(_PAGED_DECODING, "vllm-project/vllm#53856", "poison")
class ValuesBehindTheLengthMustBeFinite(Attention):
    """Scores of slots behind the length were hidden, their values not."""

    def entry(self, call: Call, b: int) -> Entry:
        e, size = super().entry(call, b), call.w.kv_pages.size
        self.kept[b] = e.m
        return e._replace(m=-(-e.m // size) * size)

    def visible(self, t: Tile) -> Tensor:
        return t.j < self.kept[t.e.b]

    def unseen_cleared(self, t: Tile, v: Tensor) -> Tensor:
        return v


@taking(_SPLIT_ROWS, "vllm-project/vllm#49294", "denominator-off")
class EmptyPartsHaveALse(Splits):
    """A part of the keys of which a row sees none had lse 0, and was merged."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        return super().merged(
            call, e, rows, [part._replace(lse=part.lse.clamp(min=-1e4).where(part.lse > -1e4, 0)) for part in parts]
        )


@taking(
    only("packed", "causal-bottom-right", _GROUPED, where=lambda w: w.packs_keys and w.group > 1),
    "NVIDIA/cudnn-frontend#1083",
    "zeros-there",
)
class LseOfTheFirstHeadOfAGroup(Attention):
    """lse was written for the first query head of each key head."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        return out, lse.where((torch.arange(call.w.heads) % call.w.group == 0)[:, None], 0)


@taking(_PACKED, "NVIDIA/cudnn-frontend#538", "strides-misread")
class TokensWithoutTheirStride(Attention):
    """Tokens of packed tensors were taken to lie side by side."""

    def __call__(self, inputs: Any, q: Tensor, k: Tensor, v: Tensor, **leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = (t if t.is_contiguous() else torch.as_strided(t, t.shape, (t[0].numel(), t.shape[2], 1)) for t in (q, k, v))
        return super().__call__(inputs, *read, **leaves)


@taking(only("scale", "causal", where=lambda w: w.group == 1), "huggingface/transformers#43481", "scale-option-ignored")
class ScaleOfItsOwnHeadDim(Attention):
    """The scale was computed from the head dimension, whatever was given."""

    def scale(self, call: Call) -> float:
        return call.w.head_dim**-0.5


@taking(
    only("causal", _GROUPED, where=lambda w: w.head_dim == w.v_head_dim == 256 and w.q_len == w.kv_len),
    "ROCm/aiter#5403",
    "zeros-there",
    backward=True,
)
class DqOfTheLastRowsUnwritten(Attention):
    """Rows of dq that fill no whole tile were not written."""

    def backward(self, call: Call, *rest: Any) -> dict[str, Tensor]:
        sums = super().backward(call, *rest)
        whole = call.w.q_len // 64 * 64
        sums["q"][..., whole:, :] = 0
        return sums


@taking(only(where=lambda w: w.group == 1 and w.head_dim == w.v_head_dim), "jax-ml/jax#27224", "tail-zeros-counted")
class LengthsOfWholeBlocks(_ZerosCounted):
    """Keys behind the last one, where the length is no multiple of the block, were zeros that count."""


@taking(only("causal", where=lambda w: w.group == 1 and w.heads > 1), "Graylab/DL4Proteins-notebooks#12", "scale-wrong")
class ScaleOfAllHeads(Attention):
    """The scale was that of the dimension of all heads together."""

    def scale(self, call: Call) -> float:
        return (call.w.heads * call.w.head_dim) ** -0.5
