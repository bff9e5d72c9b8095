"""Faulty kernels that take little, as those of most reports do: what each takes is all that its project's kernel takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_attn import Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.selection import beside
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.traits import traits_of

from .kernel import Attention, Call, Entry, KernelBackend, Part, Tile, cut

Takes = Callable[[Workload], bool]


def only(*traits: str, where: Takes = lambda w: True) -> Takes:
    """Return what takes workloads with some of these traits and no others, where a condition holds."""
    allowed = {"plain", "fewer queries", "fewer keys", *traits}
    return lambda w: traits_of(w) <= allowed and where(w)


def is_decoding(w: Workload) -> bool:
    return w.q_len == 1


class Narrow(NamedTuple):
    """One fault: what its kernel takes, and the kernel.

    report: of which project, "" for a kind of fault. causes: identities of hints that are right.
    backward: whether it is in the gradients.
    """

    takes: Takes
    kernel: type[Attention]
    report: str = ""
    causes: tuple[str, ...] = ()
    backward: bool = False


NARROW: dict[str, Narrow] = {}
CATALOG = [w for group in ("smoke", "edges", "features") for w in builtin_catalog().select(group)]


def taking(
    takes: Takes, report: str = "", *causes: str, backward: bool = False
) -> Callable[[type[Attention]], type[Attention]]:
    """Return a decorator that adds a kernel to the table."""

    def add(kernel: type[Attention]) -> type[Attention]:
        NARROW[kernel.__name__] = Narrow(takes, kernel, report, causes, backward)
        return kernel

    return add


class NarrowBackend(KernelBackend):
    """A kernel that refuses what it does not take, as a user registers one."""

    def __init__(self, name: str, narrow: Narrow) -> None:
        super().__init__(name, narrow.kernel())
        self._takes = narrow.takes

    def unsupported_because(self, workload: Workload, machine: Any, backward: bool = False) -> list[str]:
        return [] if self._takes(workload) else ["takes less"]


def asked(narrow: Narrow, declares: bool) -> list[Workload]:
    """Return the workloads that a kernel takes in a default run, which it declares, or declines the others."""
    taken = [w for w in CATALOG if narrow.takes(w) and not (narrow.backward and w.has_no_gradient_because)]
    backend = NarrowBackend("narrow", narrow) if declares else None
    more = beside(CATALOG, AttentionMark(backward=narrow.backward), (), backend, machine_of(torch.device("cpu")))
    return [*taken, *filter(narrow.takes, more)]


# -- decoding -----------------------------------------------------------------------------------------------------------------


@taking(only("grouped heads", where=is_decoding), "", "keys-beyond-unseen", "tail-tile-missing")
class KeysOfTheFirstPassOnly(Attention):
    """A second pass over keys beyond 1,024 never runs."""

    def key_tiles(self, call: Call, e: Entry, rows: range) -> list[range]:
        return cut(e.m, self.key_tile)[:16]


class _InSplits(Attention):
    def split(self, tiles: list[range]) -> list[list[range]]:
        return [tiles[at : at + 16] for at in range(0, len(tiles), 16)]


@taking(only("grouped heads", where=is_decoding))
class PartialsLaidOutBySplits(_InSplits):
    """Partial results are written by head and split, and read by split and head."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        outs, lses = torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])
        turned = [t.transpose(0, 1).reshape(t.shape) for t in (outs, lses)]
        return super().merged(call, e, rows, [Part(*one) for one in zip(*turned, strict=True)])


@taking(only("grouped heads", where=is_decoding))
class PartialsOfTheFirstEntry(_InSplits):
    """Each batch entry weighs its splits by the first entry's."""

    def merged(self, call: Call, e: Entry, rows: range, parts: list[Part]) -> Part:
        lses = self.kept.setdefault("lses", [p.lse for p in parts]) if e.b else [p.lse for p in parts]
        self.kept["lses"] = lses
        same = len(lses) == len(parts) and lses[0].shape == parts[0].lse.shape
        return super().merged(call, e, rows, [Part(p.out, lse) for p, lse in zip(parts, lses, strict=True)] if same else parts)


class _Given(Attention):
    def given(self, t: Tile, b: int | Tensor, h: Tensor) -> Tensor:
        return t.call.inputs.mask_mod(t.e.n)(torch.as_tensor(b), h, t.i, t.j)


_GIVEN_DECODING = only("boolean", where=lambda w: is_decoding(w) and w.mask is not None)


@taking(_GIVEN_DECODING, "", "mask-of-another-batch-entry")
class GivenMaskOfTwoEntries(_Given):
    """The third batch entry reads the first one's mask."""

    def in_other_mask(self, t: Tile) -> Tensor:
        return self.given(t, t.e.b % 2, t.h)


@taking(_GIVEN_DECODING, "", "mask-of-another-head")
class GivenMaskOf32Heads(_Given):
    """Heads beyond 32 read the mask of the first ones."""

    def in_other_mask(self, t: Tile) -> Tensor:
        return self.given(t, t.e.b, t.h % 32)


@taking(_GIVEN_DECODING, "pytorch/pytorch#184180", "mask-of-another-batch-entry")
class GivenMaskHasAStrideOfHeads(_Given):
    """A mask that is equal over heads is read as if each head had its own."""

    def in_other_mask(self, t: Tile) -> Tensor:
        return self.given(t, (t.e.b * t.w.heads + t.h) % t.w.batch, t.h)


@taking(only("v in k", "v_head_dim", "grouped heads", where=lambda w: is_decoding(w) and w.v_in_k))
class LatentValuesOfTheFirstTile(Attention):
    """Beyond the first tile values are the last columns of the keys, not the first."""

    def load_v(self, t: Tile) -> Tensor:
        wrong = self.load(t, "k", t.call.k)[..., -t.w.v_head_dim :]
        return wrong if t.keys.start else super().load_v(t)


@taking(
    only("padded", "paged", "grouped heads", "quantized", "page layouts", where=lambda w: is_decoding(w) and bool(w.kv_pages))
)
class DescalesOfASlicedPool(Attention):
    """Descales of tokens are looked up as if the pool were contiguous."""

    def descales_in_pages(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        number = 3 if call.w.kv_pages.sliced else 1
        at, size = torch.arange(e.m), self.page_size(call)
        pages = (self.page_numbers(call, e, at // size) * number) % len(pool)
        return pool[pages, at % size].transpose(0, 1)


@taking(
    only("padded", "paged", "grouped heads", where=lambda w: is_decoding(w) and bool(w.kv_pages)),
    "",
    "slots-within-pages-misread",
)
class PageOffsetOf16(Attention):
    """A token's place in its page is found with a size of 16, whatever the page's."""

    def gathered(self, call: Call, e: Entry, pool: Tensor) -> Tensor:
        at, size = torch.arange(e.m), self.page_size(call)
        return self.slots(call, pool)[self.page_numbers(call, e, at // size), at % min(size, 16)].transpose(0, 1)


# -- a bias alone -------------------------------------------------------------------------------------------------------------

_BIAS = only("bias", where=lambda w: w.bias is not None)


@taking(_BIAS, "", "bias-within-tile-constant")
class BiasConstantOverKeys(Attention):
    """A bias without keys is read with the stride of keys: each tile takes the value of its first row."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        found = super().bias(t, bias)
        return found[:, :1] if bias.shape[3] == 1 else found


@taking(_BIAS, "", "bias-of-first-tile-only")
class BiasConstantOverQueries(Attention):
    """A bias without queries is added to the first tile of rows only."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        found = super().bias(t, bias)
        return found * (bias.shape[2] > 1 or t.rows.start == 0)


@taking(_BIAS, "", "bias-of-another-batch-entry")
class BiasConstantOverHeads(Attention):
    """A bias without heads is read with the stride of heads: batch entries take the first one's."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        return super().bias(t, bias[:1] if bias.shape[1] == 1 else bias)


@taking(_BIAS, "", "bias-of-another-batch-entry")
class BiasOfEntriesInPairs(Attention):
    """Batch entries take the biases in the order 0, 2, 1, 3: of two that is the right one."""

    def bias(self, t: Tile, bias: Tensor) -> Tensor:
        order = list(range(0, len(bias), 2)) + list(range(1, len(bias), 2))
        return super().bias(t, bias[order])


# -- sizes, sinks, dropout ----------------------------------------------------------------------------------------------------


@taking(only("causal", where=lambda w: w.head_dim == w.v_head_dim == 512), "", "head-dim-tail-unread")
class FirstHalfOf512(Attention):
    """Products take the first 256 of 512 dimensions."""

    def logits(self, t: Tile) -> Tensor:
        return self.load_q(t)[..., :256] @ self.load_k(t)[..., :256].mT * self.scale(t.call)


@taking(only("causal", where=lambda w: w.head_dim >= 256 and w.kv_heads == w.heads), "", "columns-misplaced")
class RowsAreTakenTwice(Attention):
    """Beyond 256 dimensions the second half of out is the first one again."""

    def rounded_out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        half = out.shape[-1] // 2
        return super().rounded_out(torch.cat([out[..., :half]] * 2, -1) if half >= 256 else out, dtype)


@taking(only("window", "sinks", "causal", where=lambda w: bool(w.sinks)), "", "sinks-ignored")
class SinkOfSkippedTiles(Attention):
    """The sink is taken with the first tile, which few queries far behind it skip."""

    def with_sinks(self, call: Call, e: Entry, rows: range, part: Part) -> Part:
        band = call.w.mask.band if call.w.mask else None
        is_skipped = band is not None and band.left is not None and rows.start + e.m - e.n - band.left >= self.key_tile
        return part if is_skipped and not band.top_left else super().with_sinks(call, e, rows, part)


@taking(only("causal", "dropout", where=lambda w: bool(w.dropout)))
class DropoutThatRowsShare(Attention):
    """One draw drops the same keys in every row."""

    def draw_dropout(self, call: Call) -> None:
        w = call.w
        if w.dropout:
            drawn = torch.rand(w.batch, w.heads, 1, w.kv_len) >= w.dropout
            call.keep = drawn.expand(-1, -1, w.q_len, -1).contiguous()


@taking(only("causal", where=lambda w: w.kv_heads == w.heads), "", "key-heads-wrap", "heads-shifted")
class HeadsBeyond32(Attention):
    """A head's number has five bits."""

    def kv_heads_of(self, call: Call) -> Tensor:
        return super().kv_heads_of(call) % 32


@taking(
    only("causal", where=lambda w: w.q_len == w.kv_len), "", "keys-beyond-unseen", "tail-tile-missing", "last-tile-missing"
)
class OddBatch(Attention):
    """Batch entries are computed two at a time; the last of an odd number is its neighbour's."""

    def entries(self, call: Call) -> list[Entry]:
        found = super().entries(call)
        return [*found[:-1], found[-1]._replace(m=max(1, found[-1].m // 2))] if len(found) % 2 and len(found) > 1 else found


@taking(only("causal", "v_head_dim", where=lambda w: w.v_head_dim < w.head_dim), backward=True)
class KeyGradientsOfValueWidth(Attention):
    """dk has as many columns as v."""

    def add_to_keys(self, t: Tile, total: Tensor, share: Tensor) -> None:
        share = share.clone()
        share[..., t.w.v_head_dim :] = 0
        super().add_to_keys(t, total, share)


@taking(only("packed", "causal", where=lambda w: w.is_packed), "", "keys-begin-early")
class ThirdSequenceStartsEarly(Attention):
    """The second sequence that follows another begins a key too early."""

    def entry(self, call: Call, b: int) -> Entry:
        e = super().entry(call, b)
        return e._replace(key=e.key - 1) if b >= 2 else e
