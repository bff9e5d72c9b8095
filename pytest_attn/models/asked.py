"""What one attention call of a model asks: its tensors in one layout, its options, and how its result is handed back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_attn.models.recognition import StoredMask, recognize
from pytest_attn.workloads.fields import DTYPES
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import BooleanMask, Mask, ScoreMod
from pytest_attn.workloads.visibility import bind
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class UnreadableError(Exception):
    """A call was caught, and asks for something that no workload can say; the text says what."""


class DropoutError(ValueError):
    """A call drops probabilities at random, so no result of it is the right one."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _itself(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Asked:
    """One call, read from its arguments.

    q: (batch, heads, q_len, head_dim), k, v the same with kv_heads and kv_len; packed sequences: (tokens, heads, head_dim).
    visible: boolean, True = visible, broadcastable to (batch, heads, q_len, kv_len). mask: what is known of it without a
    tensor; both may be given, then a key must be visible to both. bias: additive, broadcastable in the same way. sinks:
    (heads,).
    alibi_slopes: (heads,). cu_seqlens, cu_seqlens_kv: boundaries of packed sequences.
    fold: from the layout in which the function takes tensors to that of q. out_of: from what it returns to its tensor out;
    fold_out: from the layout of that to that of q; result_of: from out in the layout of q to what the function returns.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visible: torch.Tensor | None = None
    mask: Mask | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    dropout: float = 0.0
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    kv_lens: tuple[int, ...] | None = None
    fold: Callable[[torch.Tensor], torch.Tensor] = field(default=_same)
    out_of: Callable[[Any], torch.Tensor] = field(default=_itself)
    fold_out: Callable[[torch.Tensor], torch.Tensor] = field(default=_same)
    result_of: Callable[[torch.Tensor], Any] = field(default=_itself)


def inputs_of(asked: Asked) -> Inputs:
    """Return the workload of a call with its tensors; dout is zeros until it arrives. Raises UnreadableError, DropoutError."""
    if asked.dropout > 0:
        raise DropoutError(
            f"attention with dropout {asked.dropout:g} has no right result; set the model's attention dropout to 0, or call"
            " model.eval()"
        )
    q, k, v = asked.q, asked.k, asked.v
    _require_one_kind(q, k, v)
    extras: dict[str, Any] = {}
    fields: dict[str, Any] = _options(asked, extras)
    if asked.cu_seqlens is not None:
        fields |= _packed_lengths(asked, extras)
    else:
        fields |= {"batch": q.shape[0], "q_len": q.shape[2], "kv_len": k.shape[2]} | _mask_of(asked, extras)
    try:
        workload = Workload(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[-1],
            v_head_dim=v.shape[-1],
            dtype=str(q.dtype).removeprefix("torch."),
            **fields,
        )
    except ValueError as error:
        raise UnreadableError(str(error).removeprefix("Workload: ")) from None
    return Inputs(workload, q.device, q, k, v, dout=q.new_zeros(()), **extras)


def _require_one_kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    import torch

    for tensor in (q, k, v):
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.dtype != q.dtype:
            kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
            raise UnreadableError(f"q, k and v are {kinds}; expected all three bfloat16, float16 or float32")
        if tensor.layout != q.layout or tensor.is_nested:
            raise UnreadableError("q, k and v must be dense tensors; nested and sparse ones are not read")
        if torch._C._functorch.is_batchedtensor(tensor):
            raise UnreadableError("q, k or v is batched by torch.func.vmap, which hides the batch; call the model without it")


def _options(asked: Asked, extras: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that change scores; their tensors go into `extras`."""
    default = 1 / math.sqrt(asked.q.shape[-1])
    is_default = asked.scale is None or math.isclose(asked.scale, default, rel_tol=1e-9)
    fields: dict[str, Any] = {
        "scale": None if is_default else float(asked.scale or 0),
        "softcap": asked.softcap or None,
        "score_mod": asked.score_mod,
    }
    if asked.sinks is not None:
        fields["sinks"], extras["sinks"] = True, asked.sinks
    if asked.alibi_slopes is not None:
        fields["alibi"], extras["alibi_slopes"] = True, asked.alibi_slopes.float()
    if asked.bias is not None:
        bias = asked.bias
        fields["bias"] = "".join(name for name, size in zip("bhqk", bias.shape, strict=True) if size > 1) or "k"
        extras["bias"] = bias
    return fields


def _packed_lengths(asked: Asked, extras: dict[str, Any]) -> dict[str, Any]:
    import torch

    boundaries = asked.cu_seqlens, asked.cu_seqlens if asked.cu_seqlens_kv is None else asked.cu_seqlens_kv
    lengths = []
    for name, ends in zip(("cu_seqlens", "cu_seqlens_kv"), boundaries, strict=True):
        assert ends is not None
        extras[name] = ends.to(torch.int32)
        lengths.append(tuple(ends.diff().tolist()))
    return {"q_lens": lengths[0], "kv_lens": lengths[1], "mask": asked.mask}


def _mask_of(asked: Asked, extras: dict[str, Any]) -> dict[str, Any]:
    """Return mask and kv_lens: as the call names them, or as its tensor is recognized."""
    import torch

    q, k = asked.q, asked.k
    kv_lens = asked.kv_lens
    if asked.visible is None:
        mask = asked.mask
    else:
        visible = asked.visible
        if asked.mask is not None:
            shape = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
            visible = visible & dense(asked.mask, shape, q.device)
        mask, seen = recognize(visible, q.shape[2], k.shape[2])
        if seen is not None and kv_lens is not None:
            mask, seen = BooleanMask(StoredMask(visible)), None
        kv_lens = kv_lens if seen is None else seen
        if kv_lens is not None and len(kv_lens) != q.shape[0]:
            kv_lens = kv_lens * q.shape[0]
    if kv_lens is not None:
        extras["kv_lens"] = torch.tensor(kv_lens, dtype=torch.int32, device=q.device)
    return {"mask": mask, "kv_lens": kv_lens}


def dense(mask: Mask, shape: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """Return a mask as a boolean tensor, (1, 1, q_len, kv_len) or with more dimensions where it varies over them."""
    import torch

    batch, heads, q_len, kv_len = shape
    at = [torch.arange(n, device=device).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(shape)]
    return bind(mask, batch, heads, q_len, kv_len, kv_len, device)(*at).expand(-1, -1, q_len, kv_len)


def says_the_same(asked: Asked, visible: torch.Tensor) -> bool:
    """Whether a call hides by an additive mask alone what is not visible; rows that see nothing are not checked."""
    import torch

    if asked.bias is None or asked.visible is not None or asked.mask is not None:
        return False
    shown = asked.bias > torch.finfo(asked.bias.dtype).min / 2
    return bool(((shown == visible) | ~visible.any(-1, keepdim=True)).all())


def with_mask(asked: Asked, visible: torch.Tensor) -> Asked:
    """Return the same call with another mask, which is all that it may see."""
    import torch

    bias = asked.bias
    if bias is not None:
        bias = bias.masked_fill(bias <= torch.finfo(bias.dtype).min / 2, 0)
        bias = bias if bool(bias.any()) else None
    return dataclasses.replace(asked, visible=visible, mask=None, kv_lens=None, bias=bias)
