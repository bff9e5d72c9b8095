"""Fault-free kernels that go other ways than the plain one: no check may call them wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.guests.mutants.kernel import QKV, Kernel, KernelBackend, KernelCall, Sequence, Softmax, SplitKernel, Tile
from pytest_attn.workloads.workload import grouped

if TYPE_CHECKING:
    from torch import Tensor

_LOG2E = 1 / math.log(2)


class UnroundedP(Kernel):
    """P and dS stay in float32, as in kernels that multiply without tensor cores."""

    def rounded(self, tile: Tile, p: Tensor) -> Tensor:
        """Keep it."""
        return p


class Exp2(Kernel):
    """Exponentials of base 2, with log2(e) folded into their argument, as GPUs compute them."""

    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        """Return 2 to the power of the scaled difference."""
        return (old * _LOG2E - self.shift(new) * _LOG2E).exp2()

    def probabilities(self, tile: Tile, s: Tensor, top: Tensor) -> Tensor:
        """Return 2 to the power of the scaled difference."""
        return (s * _LOG2E - self.shift(top)[..., None] * _LOG2E).exp2()

    def recomputed(self, s: Tensor, lse: Tensor) -> Tensor:
        """Return 2 to the power of the scaled difference."""
        return (s * _LOG2E - self.shift(lse)[..., None] * _LOG2E).exp2()


class TwoPass(Kernel):
    """The denominator first, then the values with P divided already: what is rounded is the final P."""

    def attend(self, seq: Sequence, rows: range) -> tuple[Tensor, Tensor]:
        """Visit all keys twice."""
        tiles = self.key_tiles(seq, rows)
        whole = self.with_sinks(seq, self.softmax(seq, rows, tiles))
        q, acc = self.load_q(seq, rows), self.start(seq, rows).acc
        for tile in (Tile(seq, rows, keys) for keys in tiles):
            s = self.masked(tile, self.modified(tile, self.scaled(tile, self.logits(q, self.load_k(tile)))))
            p = self.probabilities(tile, s, whole.top) / whole.total.masked_fill(whole.total == 0, 1)[..., None]
            acc = self.accumulate(tile, acc, self.rounded(tile, p), self.load_v(tile))
        return acc, self.lse(whole)


class KeysBackwards(Kernel):
    """The last keys first, as flash-attention 3 visits them."""

    def key_tiles(self, seq: Sequence, rows: range) -> list[range]:
        """Turn the order round."""
        return super().key_tiles(seq, rows)[::-1]


class RowsBackwards(Kernel):
    """The last rows first, which changes the order in which dk and dv are summed."""

    def row_tiles(self, seq: Sequence) -> list[range]:
        """Turn the order round."""
        return super().row_tiles(seq)[::-1]


class Atomics(Kernel):
    """Tiles of keys in another order each time, as atomic additions come: right, yet no two runs are alike."""

    def key_tiles_again(self, seq: Sequence, rows: range) -> list[range]:
        """Shuffle the order of the backward pass."""
        import random

        generator: random.Random = self.kept.setdefault("generator", random.Random(0))
        tiles = self.key_tiles(seq, rows)
        return generator.sample(tiles, len(tiles))


class FourSplits(SplitKernel):
    """Split-KV into four, so that parts of short sequences are empty."""

    splits = 4


class HeadsRounded(Kernel):
    """dk and dv of each query head are rounded before they are summed over the group, as in flash-attention 2."""

    def gradient_sums(self, call: KernelCall) -> QKV:
        """Keep dk and dv per query head, beside each other where heads lie."""
        import torch

        dq, *of_keys = super().gradient_sums(call)
        dk, dv = (torch.repeat_interleave(t, call.workload.group, 1) for t in of_keys)
        return dq, dk, dv

    def summed_over_group(self, tile: Tile, x: Tensor) -> Tensor:
        """Sum nothing yet."""
        return x

    def finish_gradient(self, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
        """Round, then sum over the group."""
        rounded = super().finish_gradient(call, total, of)
        if of is call.q:
            return rounded
        first, _, *rest = of.shape
        return grouped(rounded.float(), call.workload).view(first, -1, call.workload.group, *rest).sum(2).to(of.dtype)


class ScaledQuery(Kernel):
    """q times the scale is rounded to the dtype before q . k."""

    def load_q(self, seq: Sequence, rows: range) -> Tensor:
        """Fold the scale into q."""
        return (super().load_q(seq, rows) * super().scale(seq.call)).to(seq.call.q.dtype).float()

    def scale(self, call: KernelCall) -> float:
        """It is in q already."""
        return 1.0

    def dq(self, tile: Tile, ds: Tensor, k: Tensor) -> Tensor:
        """Scale, as q itself was not."""
        return ds @ k * super().scale(tile.seq.call)


class ScaledKey(Kernel):
    """k times the scale is rounded to the dtype before q . k."""

    def load_k(self, tile: Tile) -> Tensor:
        """Fold the scale into k."""
        return (super().load_k(tile) * super().scale(tile.seq.call)).to(tile.dtype).float()

    def scale(self, call: KernelCall) -> float:
        """It is in k already."""
        return 1.0

    def dk(self, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
        """Scale, as k itself was not."""
        return super().dk(tile, ds, q) * super().scale(tile.seq.call)


class RoundedSum(Kernel):
    """Tensor cores sum P as they take it, as in FlashInfer's fa2 template: the denominator and lse are of rounded P."""

    def denominator(self, tile: Tile, total: Tensor, p: Tensor) -> Tensor:
        """Round P first."""
        return super().denominator(tile, total, self.rounded(tile, p))


class RoundedProducts(Kernel):
    """q . k in the dtype, as kernels of one query do without tensor cores: products, and a tree of sums, are rounded."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Halve the terms until one is left."""
        import torch

        def rounded(x: Tensor) -> Tensor:
            return x.to(self._dtype).float()

        terms = rounded(q.unsqueeze(-2) * k.unsqueeze(-3))
        while terms.shape[-1] > 1:
            if terms.shape[-1] % 2:
                terms = torch.nn.functional.pad(terms, (0, 1))
            terms = rounded(terms.unflatten(-1, (2, -1)).sum(-2))
        return terms.squeeze(-1)

    def load_q(self, seq: Sequence, rows: range) -> Tensor:
        """Keep the dtype in mind."""
        self._dtype = seq.call.q.dtype
        return super().load_q(seq, rows)


class ShiftedScores(HeadsRounded):
    """softmax(q @ k.T * scale) @ v in the dtype, as in eager code, with the row's maximum subtracted in it as well."""

    def __init__(self) -> None:
        super().__init__(1024, 1024)

    def scaled(self, tile: Tile, s: Tensor) -> Tensor:
        """Round before the scale and after it."""
        return super().scaled(tile, s.to(tile.dtype).float()).to(tile.dtype).float()

    def masked(self, tile: Tile, s: Tensor) -> Tensor:
        """Subtract what is added again, so that lse is that of the scores."""
        masked = super().masked(tile, s)
        top = self.shift(masked.amax(-1))[..., None]
        return (masked - top).to(tile.dtype).float() + top


class RoundedSinks(Kernel):
    """Sinks are brought to base 2 in their dtype."""

    def sinks(self, seq: Sequence) -> Tensor | None:
        """Round their product with log2 e."""
        sinks = seq.call.inputs.sinks
        return None if sinks is None else (sinks * _LOG2E).float() / _LOG2E


class RoundedRescaling(Kernel):
    """The factors by which sums are rescaled are rounded to the dtype."""

    def step(self, tile: Tile, q: Tensor, state: Softmax) -> Softmax:
        """Keep the dtype in mind."""
        self._dtype = tile.dtype
        return super().step(tile, q, state)

    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        """Round the factor; of a sequence without keys, which has no tile, only its sinks have one."""
        return super().rescale(old, new).to(getattr(self, "_dtype", new.dtype)).float()


class RescaledByTiles(RoundedRescaling):
    """The same in tiles of 16 keys, with more factors."""

    def __init__(self) -> None:
        super().__init__(16, 16)


class Tf32Products(Kernel):
    """float32 operands of products are cut off after 10 bits, as tensor cores take them."""

    #: added to the bits before they are cut
    rounding = 0

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Cut in every product."""
        with _with_operands(self.cut):
            return super().forward(call)

    def backward(self, *given: Any) -> QKV:
        """Cut in every product."""
        with _with_operands(self.cut):
            return super().backward(*given)

    def cut(self, x: Tensor) -> Tensor:
        """Keep 10 bits of each fraction."""
        import torch

        return ((x.float().contiguous().view(torch.int32) + self.rounding) & ~0x1FFF).view(torch.float32)


class RoundedTf32Products(Tf32Products):
    """The same, rounded to nearest."""

    rounding = 0x1000


def _with_operands(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[object]:
    """Change both operands of each matrix product."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Products(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_product = func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
            return func(*map(change, args)) if is_product else func(*args, **(kwargs or {}))

    return Products()


class SinkAsGate(Kernel):
    """Multiplies out by sigmoid(lse - sink) (torchtitan#2211): exp(lse) / (exp(lse) + exp(sink)), the share of the keys."""

    def with_sinks(self, seq: Sequence, state: Softmax) -> Softmax:
        sinks = self.sinks(seq)
        if sinks is None:
            return state
        out, lse = self.finish(state)
        gate = (lse - sinks[:, None]).sigmoid()
        return Softmax(lse.logaddexp(sinks[:, None]), gate * 0 + 1, out * gate[..., None])


class SignOfP(Kernel):
    """dS is P delta where P is negative (HKUSTDial/flash-sparse-attention#109), which an exponential never is."""

    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        delta = delta[..., None]
        return p * (dp - delta).where(p >= 0, delta)


class TunesItself(Kernel):
    """Takes keys in tiles of another size from its second call on, as what a compiler makes for other shapes may."""

    calls = 0

    def forward(self, call: KernelCall) -> Any:
        self.calls += 1
        self.key_tile = 16 if self.calls == 1 else 64
        return super().forward(call)


class FirstTileNotRescaled(Kernel):
    """Does not multiply sums by exp(-inf - top) when the first keys are seen (FA#991): until then they are 0."""

    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        return super().rescale(old, new).masked_fill(old == -float("inf"), 1)


@dataclass(frozen=True)
class Honest:
    """A fault-free kernel with a name, the precision profile that it declares, and whether its lse is that of exact scores."""

    name: str
    make: Callable[[], Kernel]
    precision: str = "flash"
    returns_lse: bool = True

    def backend(self) -> KernelBackend:
        """Return a new backend."""
        return KernelBackend(self.name, self.make(), self.precision, self.returns_lse)


#: the package's own, without a detour
HONEST = Honest("honest", Kernel)
VARIANTS = (
    HONEST,
    Honest("tiles-16-16", lambda: Kernel(16, 16)),
    Honest("tiles-32-128", lambda: Kernel(32, 128)),
    Honest("tiles-128-32", lambda: Kernel(128, 32)),
    Honest("one-tile", lambda: Kernel(1024, 1024)),
    Honest("unrounded-p", UnroundedP),
    Honest("exp2", Exp2),
    Honest("two-pass", TwoPass),
    Honest("keys-backwards", KeysBackwards),
    Honest("rows-backwards", RowsBackwards),
    Honest("atomics", Atomics),
    Honest("split-2", SplitKernel),
    Honest("split-4", FourSplits),
    Honest("heads-rounded", HeadsRounded, "flash2"),
    Honest("scaled-query", ScaledQuery, "qscale", returns_lse=False),
    Honest("scaled-key", ScaledKey, "kscale"),
    Honest("rounded-products", RoundedProducts, "decode"),
    Honest("shifted-scores", ShiftedScores, "eager_shifted"),
    Honest("rounded-sinks", RoundedSinks, "rounded_sinks"),
    Honest("rounded-sum", RoundedSum, "rounded_sum"),
    Honest("rounded-rescaling", RoundedRescaling, "rescale"),
    Honest("rescaled-by-tiles", RescaledByTiles, "rescale"),
    Honest("tf32-products", Tf32Products, "tf32"),
    Honest("rounded-tf32-products", RoundedTf32Products, "tf32"),
)
#: what was taken for a fault, and shows in no result: a check that calls it wrong is wrong
EQUIVALENT = (
    Honest("sink-as-gate", SinkAsGate),
    Honest("sign-of-p", SignOfP),
    Honest("first-tile-not-rescaled", FirstTileNotRescaled),
)
