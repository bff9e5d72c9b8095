"""Where tensors lie: taking them from the caller, finding sequences, rows, keys and pages in them, and loading these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.mutants.honest.tiles import QKV, Call, Extent, Sequence, Tile, positions

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Memory:
    """The steps that read and write memory."""

    # -- tensors in and out --------------------------------------------------------------------------------------------

    def receive(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Take q, k and v as the caller laid them out."""
        return q, k, v

    def receive_again(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Take q, k and v once more, in the backward pass."""
        return self.receive(q, k, v)

    def receive_dout(self, dout: Tensor) -> Tensor:
        """Take the gradient of out as autograd laid it out."""
        return dout

    def allocate(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory with whatever it holds."""
        return like.new_empty(shape, dtype=dtype)

    def allocate_results(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return memory for out and lse."""
        import torch

        *rows, _ = call.q.shape
        out = self.allocate((*rows, call.workload.v_head_dim), call.q)
        if call.workload.is_packed:
            rows.reverse()  # (heads, tokens)
        return out, self.allocate(tuple(rows), call.q, torch.float32)

    def heads_first(self, seq: Sequence, tensor: Tensor) -> Tensor:
        """View the batch entry's part of a native tensor as (heads, tokens, ...); packed, these are the tokens of all."""
        if not seq.workload.is_packed:
            return tensor[seq.batch]
        return tensor.transpose(0, 1) if tensor.dim() == 3 else tensor

    def rows_of(self, seq: Sequence, tensor: Tensor, rows: range) -> Tensor:
        """View some query rows of a native tensor, (heads, rows, ...)."""
        return self.heads_first(seq, tensor)[:, seq.q_start + rows.start : seq.q_start + rows.stop]

    def keys_of(self, seq: Sequence, tensor: Tensor, keys: range) -> Tensor:
        """View some keys of a native tensor, (kv_heads, keys, ...), as far as the sequence has them."""
        stop = min(keys.stop, seq.kv_len)
        return self.heads_first(seq, tensor)[:, seq.kv_start + keys.start : seq.kv_start + stop]

    # -- sequences -----------------------------------------------------------------------------------------------------

    def sequences(self, call: Call) -> list[Sequence]:
        """List the batch entries."""
        return [Sequence(call, batch, *self.lengths(call, batch)) for batch in range(call.workload.batch)]

    def lengths(self, call: Call, batch: int) -> Extent:
        """Return how long a batch entry is, and where it begins."""
        w, inputs = call.workload, call.inputs
        kv_len = w.kv_len if inputs.kv_lens is None else int(inputs.kv_lens[batch])
        if inputs.cu_seqlens is None:
            return Extent(0, w.q_len, 0, kv_len)
        q_start, q_stop = inputs.cu_seqlens[batch : batch + 2].tolist()
        if inputs.cu_seqlens_kv is None:
            return Extent(q_start, q_stop - q_start, 0, kv_len)
        kv_start, kv_stop = inputs.cu_seqlens_kv[batch : batch + 2].tolist()
        return Extent(q_start, q_stop - q_start, kv_start, kv_stop - kv_start)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load_q(self, seq: Sequence, rows: range) -> Tensor:
        """Load query rows, (heads, rows, head_dim)."""
        return self.rows_of(seq, seq.call.q, rows).float()

    def load_k(self, tile: Tile) -> Tensor:
        """Load the tile's keys, (heads, keys, head_dim)."""
        return self.load(tile.seq, tile.seq.call.k, tile.keys)

    def load_v(self, tile: Tile) -> Tensor:
        """Load the tile's values, (heads, keys, v_head_dim)."""
        return self.load(tile.seq, tile.seq.call.v, tile.keys)

    def load(self, seq: Sequence, tensor: Tensor, keys: range) -> Tensor:
        """Load keys or values for every query head, zeros past the sequence's end."""
        at = self.addresses(seq, keys)
        if seq.workload.kv_pages is not None:
            found = self.gather_pages(seq, tensor, at)
        else:
            found = self.heads_first(seq, tensor)[:, seq.kv_start + at]
        outside = positions(keys, tensor) >= seq.kv_len
        return found.float().masked_fill_(outside[:, None], 0)[self.kv_head_of(seq)]

    def addresses(self, seq: Sequence, keys: range) -> Tensor:
        """Return the positions to read from, none of them past the sequence's end."""
        return positions(keys, seq.call.k).clamp_(max=seq.kv_len - 1)

    def gather_pages(self, seq: Sequence, pool: Tensor, at: Tensor) -> Tensor:
        """Read positions from a pool (pages, page size, kv_heads, dim) through the page table."""
        _, size, _, _ = pool.shape
        return pool[self.pages(seq, at // size), at % size].transpose(0, 1)

    def pages(self, seq: Sequence, number: Tensor) -> Tensor:
        """Return which pages of the pool hold the sequence's pages of these numbers."""
        table = seq.call.inputs.page_table
        assert table is not None
        return table[seq.batch, number].long()

    def kv_head_of(self, seq: Sequence) -> Tensor:
        """Return the key head of every query head, (heads,)."""
        w, heads = seq.workload, positions(range(seq.workload.heads), seq.call.q)
        return heads % w.kv_heads if w.head_groups == "interleaved" else heads // w.group
