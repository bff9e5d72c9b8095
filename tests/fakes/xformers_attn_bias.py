"""xformers.ops.fmha.attn_bias of xformers 0.0.35: the classes, what they check, and which keys they leave visible."""

from dataclasses import dataclass

import torch


def _band(rows, keys, left, right, bottom_right):
    at = torch.arange(rows)[:, None] + (keys - rows if bottom_right else 0)
    j = torch.arange(keys)[None]
    visible = j <= at + right if right is not None else torch.ones(rows, keys, dtype=torch.bool)
    return visible if left is None else visible & (j >= at - left)


class AttentionBias:
    left, right, bottom_right = None, None, True

    def visible(self, rows, keys):
        return _band(rows, keys, self.left, self.right, self.bottom_right)


class LowerTriangularMask(AttentionBias):
    right, bottom_right = 0, False


class LowerTriangularFromBottomRightMask(AttentionBias):
    right = 0


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int

    def __post_init__(self):
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")
        self.left = self._window_size - 1


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int

    def __post_init__(self):
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError("Invalid window value passed to `LocalAttentionFromBottomRightMask`")
        self.left, self.right = self.window_left, self.window_right


@dataclass
class _SeqLenInfo:
    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list

    def intervals(self):
        yield from zip(self.seqstart_py, self.seqstart_py[1:], strict=False)

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        assert not isinstance(seqlens, torch.Tensor)
        assert isinstance(device, torch.device)
        starts = [0]
        for length in seqlens:
            starts.append(starts[-1] + length)
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(seqlens), min(seqlens), starts)


@dataclass
class BlockDiagonalMask(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert kv_seqlen is None or len(q_seqlen) == len(kv_seqlen)
        q = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        return cls(q, q if kv_seqlen is None or q_seqlen == kv_seqlen else _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    def visible(self, rows, keys):
        assert (rows, keys) == (self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1])
        mask = torch.zeros(rows, keys, dtype=torch.bool)
        for (q, q_end), (k, k_end) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            mask[q:q_end, k:k_end] = _band(q_end - q, k_end - k, self.left, self.right, self.bottom_right)
        return mask

    def make_causal(self):
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo)

    def make_causal_from_bottomright(self):
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo)

    def make_local_attention_from_bottomright(self, window_size):
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    right, bottom_right = 0, False


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    right = 0

    def __post_init__(self):
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for i, ((q, q_end), (k, k_end)) in enumerate(pairs):
            if k_end - k < q_end - q:
                raise ValueError(
                    f"Block #{i} has num_keys={k_end - k} and num_queries={q_end - q}. Expected `num_keys >= num_queries`"
                )


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.left = self._window_size - 1
