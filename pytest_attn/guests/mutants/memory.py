"""Races and uninitialized memory: results that depend on what memory held, and on who comes first."""

import math
import random

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS
from pytest_attn.guests.mutants.kernel import TILE, Kernel, KernelCall, Sequence, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import has_fully_masked_rows, has_row_tail, is_padded
from pytest_attn.workloads.workload import Workload, sequence_lengths

MEMORY = Defects("memory")


class _Racing(Kernel):
    """A kernel in which, in one case of `rarity`, something comes too late."""

    rarity = 8

    def is_late(self) -> bool:
        """Draw whether it does, from one stream of random numbers for the kernel's life."""
        generator: random.Random = self.kept.setdefault("generator", random.Random(0))
        return generator.randrange(self.rarity) == 0


@MEMORY("PT#194167", "FI#1533", applies=has_row_tail, faults=("calls-differ",))
class _LastRowTileUnwritten(Kernel):
    """A last tile of rows that is not full is never written: out and lse there are what memory held."""

    def store(self, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor) -> None:
        if len(rows) == self.row_tile:
            super().store(seq, rows, out, lse, out_rows, lse_rows)


@MEMORY("FI#1533", "FA@a3a257c7", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
class _EmptyRowsUnwritten(Kernel):
    """Rows that see no key are not written to out."""

    def store(self, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor) -> None:
        before = self.rows_of(seq, out, rows)
        kept = out_rows.where((lse_rows > -math.inf)[..., None], before.float())
        super().store(seq, rows, out, lse, kept, lse_rows)


@MEMORY("FI#3838", faults=("calls-differ",))
class _LseUnwritten(Kernel):
    """lse is never written; the backward pass has one of its own."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        self.kept["lse"] = lse
        return out, self.allocate(tuple(lse.shape), lse)

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        own: Tensor = self.kept["lse"]
        return own


@MEMORY("FA#1228", "FA#2324", "FA#1990", applies=is_padded, backward=True, faults=("calls-differ",))
class _GradientOfPaddingUnwritten(Kernel):
    """dk and dv of padded keys are what memory held."""

    def finish_gradient(self, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
        gradient = super().finish_gradient(call, total, of)
        if call.inputs.kv_lens is None or of is call.q:
            return gradient
        memory = self.allocate(tuple(gradient.shape), gradient)
        for seq in self.sequences(call):
            memory[seq.batch, :, : seq.kv_len] = gradient[seq.batch, :, : seq.kv_len]
        return memory


@MEMORY("FA#2229", "FI#1559", faults=("calls-differ",))
class _SplitMergedBeforeItIsWritten(SplitKernel):
    """The merge reads the last split's place in the workspace before this call's result is there."""

    def partials(self, seq: Sequence, rows: range) -> tuple[list[Tensor], list[Tensor]]:
        outs, lses = super().partials(seq, rows)
        place = (seq.batch, rows, seq.workload)
        out, lse = self.kept.get(place, (outs[-1] * 0, outs[-1][..., 0] * 0))
        self.kept[place] = outs[-1], lses[-1]
        return [*outs[:-1], out], [*lses[:-1], lse]


@MEMORY("FA#359", "xf#684", "xf#709", faults=("calls-differ",))
class _ShareOfOutLost(_Racing):
    """Now and then a tile's P v is overwritten by another's."""

    def accumulate(self, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return acc if self.is_late() else super().accumulate(tile, acc, p, v)


@MEMORY("FA#2229", "FI#1826", "FI#1559", faults=("calls-differ",))
class _ValuesOfPreviousTile(_Racing):
    """Now and then a tile is multiplied with the values that the buffer held before: a barrier is missing."""

    def load_v(self, tile: Tile) -> Tensor:
        loaded = super().load_v(tile)
        before: Tensor = self.kept.get("buffer", loaded)
        self.kept["buffer"] = loaded
        return before if self.is_late() and before.shape == loaded.shape else loaded


@MEMORY("FA@1c41d2b0", "NATTEN#328", backward=True, faults=("calls-differ",))
class _ShareOfDkLost(_Racing):
    """Now and then a tile's share of dk is overwritten by another's."""

    def dk(self, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
        share = super().dk(tile, ds, q)
        return share * 0 if self.is_late() else share


@MEMORY("torchtitan#3235", condition="repeats")
class _NanInOneOfAHundredCalls(_Racing):
    """One call in a hundred has NaN in one row."""

    rarity = 100

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        if self.is_late():
            out.view(-1)[: out.shape[-1]] = math.nan
        return out, lse


@MEMORY("FA#2756", backward=True, faults=("calls-differ",))
class _DeltaReadBeforeItIsWritten(Kernel):
    """The backward pass does not wait for delta: it reads that of the call before."""

    def delta(self, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        delta = super().delta(call, out, dout, dlse)
        stale: Tensor = self.kept.get(("delta", delta.shape), delta * 0)
        self.kept["delta", delta.shape] = delta
        return stale


def _has_tail_before_another(w: Workload) -> bool:
    """Return whether a packed sequence whose last tile of rows is not full is followed by another."""
    return w.is_packed and any(q_len % TILE for q_len, _ in sequence_lengths(w)[:-1])


@MEMORY("FA@a3a257c7", "FA#2755", applies=_has_tail_before_another)
class _TailRowsWrittenIntoNextSequence(Kernel):
    """A last tile of rows is stored in full, over the first rows of the next packed sequence, which was done before."""

    def sequences(self, call: KernelCall) -> list[Sequence]:
        return super().sequences(call)[::-1]

    def store(self, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor) -> None:
        super().store(seq, rows, out, lse, out_rows, lse_rows)
        if seq.workload.is_packed:
            self.rows_of(seq, out, range(rows.stop, rows.start + self.row_tile)).zero_()
