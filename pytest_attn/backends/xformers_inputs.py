"""How a workload is said to xformers: its own classes of masks or a tensor, and GQA in five dimensions."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.dense import additive_or_boolean_mask
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Causal, Document, Window
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: Every row of a bias must start at a multiple of 16 bytes: 8 elements are that in each dtype.
_BIAS_STEP = 8


def needs_tensor(w: Workload) -> bool:
    """Whether no class of masks says it all: a bias, ALiBi, a mask of another kind, or documents within padding."""
    if isinstance(w.mask, Document):
        return bool(w.bias or w.alibi or w.kv_lens is not None)
    return bool(w.bias or w.alibi or not isinstance(w.mask, Causal | Window | None))


def sequences_of(w: Workload) -> tuple[list[int], list[int]] | None:
    """Return the lengths of queries and keys where the workload is a row of sequences; None for a plain batch."""
    if isinstance(w.mask, Document):
        return list(w.mask.lengths * w.batch), list(w.mask.lengths * w.batch)
    if w.kv_lens is None:
        return None
    return list(w.q_lens or (w.q_len,) * w.batch), list(w.kv_lens)


def unsaid(w: Workload) -> list[str]:
    """List what its masks cannot say of a workload, or say in another sense."""
    reasons = []
    if w.is_packed and needs_tensor(w):
        reasons.append("takes neither ALiBi nor a mask of its own for packed sequences")
    if w.alibi and w.dtype != "float32":
        reasons.append(f"would round ALiBi's distances to {w.dtype} in attn_bias")
    if isinstance(w.mask, Window) and not needs_tensor(w) and w.mask != Window() and w.kv_lens and w.mask.right != 0:
        reasons.append("has no window to the right of a query for packed or padded sequences")
    return reasons


def mask_of(fmha: ModuleType, w: Workload, device: torch.device | str) -> Any:
    """Return the object that says the workload's mask; None where every key is visible."""
    masks, lengths = fmha.attn_bias, sequences_of(w)
    if lengths is not None:
        return _blocks(masks.BlockDiagonalMask.from_seqlens(*lengths, device=_torch_device(device)), w)
    if isinstance(w.mask, Causal) and not w.mask.bottom_right:
        return masks.LowerTriangularMask()
    if isinstance(w.mask, Causal) or w.mask == Window(None, 0):
        return masks.LowerTriangularFromBottomRightMask()
    if w.mask is None or w.mask == Window():
        return None
    beyond = w.q_len + w.kv_len  # as far as an open side can reach
    left, right = (beyond if side is None else side for side in (w.mask.left, w.mask.right))
    if right == 0:  # its size counts the query's own key
        return masks.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    return masks.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)


def _blocks(blocks: Any, w: Workload) -> Any:
    """Return what makes each block's own mask of blocks on the diagonal."""
    mask = w.plain_mask
    if mask is None or mask == Window() or (isinstance(mask, Document) and not mask.causal):
        return blocks
    if isinstance(mask, Document) or mask == Causal():
        return blocks.make_causal()
    if isinstance(mask, Window) and mask.left is not None:
        return blocks.make_local_attention_from_bottomright(mask.left + 1)
    return blocks.make_causal_from_bottomright()


def tensor_bias(inputs: Inputs) -> torch.Tensor:
    """Return bias, ALiBi and mask as one additive tensor, its rows aligned by slicing a wider one."""
    import torch

    w, mask = inputs.workload, additive_or_boolean_mask(inputs)
    assert mask is not None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=inputs.q.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    aligned = mask.new_zeros(*mask.shape[:3], _aligned(w.kv_len))
    aligned[..., : w.kv_len] = mask
    return _per_head(aligned[..., : w.kv_len], w)


def _aligned(length: int) -> int:
    return -(-length // _BIAS_STEP) * _BIAS_STEP


def _per_head(bias: torch.Tensor, w: Workload) -> torch.Tensor:
    """Expand a bias to the shape that is asked for, with the heads of GQA in two dimensions."""
    bias = bias.expand(w.batch, w.heads, w.q_len, w.kv_len)
    return bias if w.group == 1 else bias.reshape(w.batch, w.kv_heads, w.group, w.q_len, w.kv_len)


def with_grouped_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (batch, rows, heads, dim) as they are, or under GQA as (batch, rows, key heads, group, dim)."""
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    if group == 1:
        return q, k, v
    k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
    return q.reshape(batch, rows, kv_heads, group, dim), k, v


def empty_inputs(fmha: ModuleType, w: Workload, device: str) -> Any:
    """Return xformers' Inputs for a workload, with the shapes and strides that `prepare` hands over, and no values."""
    import torch

    dtype = getattr(torch, w.dtype)
    lengths = None if needs_tensor(w) else sequences_of(w)
    batch, rows, keys = (w.batch, w.q_len, w.kv_len) if lengths is None else (1, sum(lengths[0]), sum(lengths[1]))

    def empty(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.empty(batch, length, heads, dim, dtype=dtype, device=device)

    q, k = empty(rows, w.heads, w.head_dim), empty(keys, w.kv_heads, w.head_dim)
    q, k, v = with_grouped_heads(q, k, empty(keys, w.kv_heads, w.v_head_dim))
    if needs_tensor(w):
        bias = _per_head(torch.empty(1, 1, 1, _aligned(w.kv_len), dtype=dtype, device=device)[..., : w.kv_len], w)
    else:
        bias = mask_of(fmha, w, device)
    return fmha.Inputs(query=q, key=k, value=v, attn_bias=bias, scale=w.scale)


def _torch_device(device: torch.device | str) -> torch.device:
    import torch

    return torch.device(device)
