"""Races and uninitialized memory: results that depend on what memory held, and on who comes first."""

import math
import random

from torch import Tensor

from pytest_attn.diagnosis.faults import EMPTY_ROWS
from pytest_attn.guests.mutants.kernel import TILE, Kernel, KernelCall, Sequence, SplitKernel, Tile
from pytest_attn.guests.mutants.mutant import Defects
from pytest_attn.guests.mutants.reach import has_fully_masked_rows, has_row_tail, is_padded
from pytest_attn.workloads.workload import sequence_lengths

MEMORY = Defects("memory")


def is_late(kernel: Kernel, one_in: int = 8) -> bool:
    """Draw whether something comes too late in a kernel, from one stream of random numbers for the kernel's life."""
    generator: random.Random = kernel.kept.setdefault("generator", random.Random(0))
    return generator.randrange(one_in) == 0


@MEMORY(Kernel.store, "PT#194167, FI#1533", applies=has_row_tail, faults="calls-differ")
def last_row_tile_unwritten(
    kernel: Kernel, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor
) -> None:
    """A last tile of rows that is not full is never written: out and lse there are what memory held."""
    if len(rows) == kernel.row_tile:
        Kernel.store(kernel, seq, rows, out, lse, out_rows, lse_rows)


@MEMORY(Kernel.store, "FI#1533, FA@a3a257c7", applies=has_fully_masked_rows, faults=EMPTY_ROWS)
def empty_rows_unwritten(
    kernel: Kernel, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor
) -> None:
    """Rows that see no key are not written to out."""
    before = kernel.rows_of(seq, out, rows)
    kept = out_rows.where((lse_rows > -math.inf)[..., None], before.float())
    Kernel.store(kernel, seq, rows, out, lse, kept, lse_rows)


@MEMORY.kernel("FI#3838", faults="calls-differ")
class _LseUnwritten(Kernel):
    """lse is never written; the backward pass has one of its own."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(call)
        self.kept["lse"] = lse
        return out, self.allocate(tuple(lse.shape), lse)

    def saved_lse(self, call: KernelCall, lse: Tensor) -> Tensor:
        own: Tensor = self.kept["lse"]
        return own


@MEMORY(Kernel.finish_gradient, "FA#1228, FA#2324, FA#1990", applies=is_padded, backward=True, faults="calls-differ")
def gradient_of_padding_unwritten(kernel: Kernel, call: KernelCall, total: Tensor, of: Tensor) -> Tensor:
    """dk and dv of padded keys are what memory held."""
    gradient = Kernel.finish_gradient(kernel, call, total, of)
    if call.inputs.kv_lens is None or of is call.q:
        return gradient
    memory = kernel.allocate(tuple(gradient.shape), gradient)
    for seq in kernel.sequences(call):
        memory[seq.batch, :, : seq.kv_len] = gradient[seq.batch, :, : seq.kv_len]
    return memory


@MEMORY(SplitKernel.partials, "FA#2229, FI#1559", faults="calls-differ")
def split_merged_before_it_is_written(kernel: SplitKernel, seq: Sequence, rows: range) -> tuple[list[Tensor], list[Tensor]]:
    """The merge reads the last split's place in the workspace before this call's result is there."""
    outs, lses = SplitKernel.partials(kernel, seq, rows)
    place = (seq.batch, rows, seq.workload)
    out, lse = kernel.kept.get(place, (outs[-1] * 0, outs[-1][..., 0] * 0))
    kernel.kept[place] = outs[-1], lses[-1]
    return [*outs[:-1], out], [*lses[:-1], lse]


@MEMORY(Kernel.accumulate, "FA#359, xf#684, xf#709", faults="calls-differ")
def share_of_out_lost(kernel: Kernel, tile: Tile, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """Now and then a tile's P v is overwritten by another's."""
    return acc if is_late(kernel) else Kernel.accumulate(kernel, tile, acc, p, v)


@MEMORY(Kernel.load_v, "FA#2229, FI#1826, FI#1559", faults="calls-differ")
def values_of_previous_tile(kernel: Kernel, tile: Tile) -> Tensor:
    """Now and then a tile is multiplied with the values that the buffer held before: a barrier is missing."""
    loaded = Kernel.load_v(kernel, tile)
    before: Tensor = kernel.kept.get("buffer", loaded)
    kernel.kept["buffer"] = loaded
    return before if is_late(kernel) and before.shape == loaded.shape else loaded


@MEMORY(Kernel.dk, "FA@1c41d2b0, NATTEN#328", backward=True, faults="calls-differ")
def share_of_dk_lost(kernel: Kernel, tile: Tile, ds: Tensor, q: Tensor) -> Tensor:
    """Now and then a tile's share of dk is overwritten by another's."""
    share = Kernel.dk(kernel, tile, ds, q)
    return share * 0 if is_late(kernel) else share


@MEMORY(Kernel.forward, "torchtitan#3235", condition="repeats")
def nan_in_one_of_a_hundred_calls(kernel: Kernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """One call in a hundred has NaN in one row."""
    out, lse = Kernel.forward(kernel, call)
    if is_late(kernel, one_in=100):
        out.view(-1)[: out.shape[-1]] = math.nan
    return out, lse


@MEMORY(Kernel.delta, "FA#2756", backward=True, faults="calls-differ")
def delta_read_before_it_is_written(
    kernel: Kernel, call: KernelCall, out: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """The backward pass does not wait for delta: it reads that of the call before."""
    delta = Kernel.delta(kernel, call, out, dout, dlse)
    stale: Tensor = kernel.kept.get(("delta", delta.shape), delta * 0)
    kernel.kept["delta", delta.shape] = delta
    return stale


@MEMORY.kernel(
    "FA@a3a257c7, FA#2755", applies=lambda w: w.is_packed and any(q_len % TILE for q_len, _ in sequence_lengths(w)[:-1])
)
class _TailRowsWrittenIntoNextSequence(Kernel):
    """A last tile of rows is stored in full, over the first rows of the next packed sequence, which was done before."""

    def sequences(self, call: KernelCall) -> list[Sequence]:
        return super().sequences(call)[::-1]

    def store(self, seq: Sequence, rows: range, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor) -> None:
        super().store(seq, rows, out, lse, out_rows, lse_rows)
        if seq.workload.is_packed:
            self.rows_of(seq, out, range(rows.stop, rows.start + self.row_tile)).zero_()
