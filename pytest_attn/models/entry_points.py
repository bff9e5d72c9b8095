"""The functions of torch that compute attention, and how the arguments of each are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.models.asked import Asked, UnreadableError
from pytest_attn.models.recognition import split_additive
from pytest_attn.workloads.masks import Causal, Mask, MaskModMask, ScoreMod

if TYPE_CHECKING:
    import torch

#: scores of a mask_mod above which it is kept as a function and not looked at as a tensor
_DENSE = 1 << 28


@dataclass(frozen=True)
class EntryPoint:
    """A function that computes attention: module and attribute where it is found, its parameters, and its reader.

    parameters: their names, in order. tensors: the names of q, k and v. read: from the arguments by name to what they ask.
    profile: the backend that rounds as it does. name: what reports call it. unpack: adds q, k and v to its arguments by name,
    where it takes them otherwise; pack: undoes that. ran: the backend whose kernel the last call took, where it chooses.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Asked]
    profile: str = "sdpa"
    tensors: tuple[str, str, str] = ("q", "k", "v")
    name: str = ""
    unpack: Callable[[dict[str, Any]], dict[str, Any]] = dict
    pack: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ran: Callable[[], str] = str

    @property
    def shown(self) -> str:
        """What reports call it."""
        return self.name or f"{self.module}.{self.attribute}"

    @property
    def place(self) -> tuple[str, str]:
        """Where it is found."""
        return self.module, self.attribute

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, with q, k and v. Raises UnreadableError for more than it has parameters."""
        if len(args) > len(self.parameters):
            raise UnreadableError(f"{len(args)} positional arguments; expected at most {len(self.parameters)}")
        return self.unpack({**dict(zip(self.parameters, args, strict=False)), **kwargs})


def refuse_unread(given: Mapping[str, Any], read: set[str], without_effect: frozenset[str] = frozenset()) -> None:
    """Raise UnreadableError for an argument that is neither read nor without effect on the result, unless it is None."""
    for name, value in given.items():
        if name not in read and name not in without_effect and value is not None and value is not False:
            raise UnreadableError(f"its argument {name}={_short(value)} is not read")


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"a tensor of shape {tuple(shape)}" if shape is not None else f"{value!r:.40}"


# -- F.scaled_dot_product_attention --------------------------------------------------------------------------------------


def read_sdpa(given: Mapping[str, Any]) -> Asked:
    """Read scaled_dot_product_attention, of which autocast casts an additive mask, too."""
    mask = given.get("attn_mask")
    return _read_sdpa(given if mask is None else {**given, "attn_mask": autocast(mask)})


def _read_sdpa(given: Mapping[str, Any]) -> Asked:
    """Read its arguments: tensors of 2 or more dimensions, of which the leading ones broadcast."""
    q, k, v = given["query"], given["key"], given["value"]
    known = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    refuse_unread(given, known)
    lead = q.shape[:-2]
    q4, k4, v4 = (_four(t) for t in (q, k, v))
    visible, bias, mask = None, None, None
    if given.get("attn_mask") is not None:
        visible, bias = sdpa_mask(given["attn_mask"], lead, q4, k4)
    if given.get("is_causal"):
        mask = Causal()
    return Asked(
        q4,
        k4,
        v4,
        visible=visible,
        bias=bias,
        mask=mask,
        scale=given.get("scale"),
        dropout=float(given.get("dropout_p") or 0.0),
        fold=_four,
        fold_out=_four,
        result_of=lambda out: out.reshape(*lead, *out.shape[-2:]),
    )


def sdpa_kernel_of(given: Mapping[str, Any]) -> str:
    """Return which of its kernels torch chooses for these arguments, as it does within the call: "SDPA flash"."""
    import torch
    from torch.nn.attention import SDPBackend

    options = {name: given[name] for name in ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa") if name in given}
    try:
        tensors = [given[name] for name in ("query", "key", "value")]
        chosen = SDPBackend(torch._fused_sdp_choice(*tensors, **options))
    except Exception:  # of devices and releases that do not say
        return "SDPA"
    return f"SDPA {chosen.name.lower().removesuffix('_attention')}"


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype to which autocast casts those of attention, itself where that casts nothing."""
    import torch

    kind = tensor.device.type
    casts = tensor.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """View (..., rows, dim) as (batch, heads, rows, dim): what is before the heads becomes the batch."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    return tensor[(None,) * (4 - tensor.dim())]


def sdpa_mask(
    mask: torch.Tensor, lead: tuple[int, ...], q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what an attn_mask hides and adds, each (batch or 1, heads or 1, q_len, kv_len) or None."""
    import torch

    mask = mask.detach()
    if mask.dim() > 4:
        mask = mask.expand(*lead, *mask.shape[-2:]).flatten(0, -4)
    mask = _four(mask)
    mask = mask.expand(-1, -1, q.shape[2] if mask.shape[2] == 1 else -1, k.shape[2] if mask.shape[3] == 1 else -1)
    return (mask, None) if mask.dtype == torch.bool else split_additive(mask)


def broadcast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expand the leading dimensions of SDPA's tensors, as it broadcasts them; heads only where they are not grouped."""
    import torch

    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v)]
    grouped = 1 < heads[1] < heads[0]
    leads = [t.shape[:-3] if grouped else t.shape[:-2] for t in (q, k, v)]
    if leads[0] == leads[1] == leads[2]:
        return q, k, v
    shapes: Any = torch.broadcast_shapes
    lead = shapes(*leads)
    kept = 3 if grouped else 2
    q, k, v = (t.expand(*lead, *t.shape[-kept:]) for t in (q, k, v))
    return q, k, v


# -- flex_attention ------------------------------------------------------------------------------------------------------


def read_flex(given: Mapping[str, Any]) -> Asked:
    """Read flex_attention: its block mask as a mask, its score_mod as it is."""
    known = {"query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "return_aux"}
    refuse_unread(given, known, frozenset(("kernel_options",)))
    q, k, v = given["query"], given["key"], given["value"]
    if k.shape[0] == 1 < q.shape[0]:
        raise UnreadableError("keys of one batch entry for all; expand them to the batch of the queries")
    visible, mask = block_mask(given.get("block_mask"), q, k)
    returns_more = bool(given.get("return_lse") or given.get("return_aux"))
    return Asked(
        q,
        k,
        v,
        visible=visible,
        mask=mask,
        scale=given.get("scale"),
        score_mod=_score_mod(given.get("score_mod")),
        out_of=(lambda result: result[0]) if returns_more else (lambda result: result),
        result_of=_no_lse if returns_more else (lambda out: out),
    )


def _no_lse(out: torch.Tensor) -> Any:
    raise UnreadableError("the model asks for lse as well, which a replacement does not return")


def _score_mod(score_mod: ScoreMod | None) -> ScoreMod | None:
    return None if score_mod is None or getattr(score_mod, "__name__", "") == "_identity" else score_mod


def block_mask(found: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor | None, Mask | None]:
    """Return a block mask as a boolean tensor, or as its mask_mod where that would be too large."""
    if found is None:
        return None, None
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    if found.mask_mod is noop_mask:
        return None, None
    batch, heads = (None if size == 1 else size for size in found.shape[:2])
    if (batch or 1) * (heads or 1) * q.shape[2] * k.shape[2] > _DENSE:
        return None, MaskModMask(found.mask_mod)
    return create_mask(found.mask_mod, batch, heads, q.shape[2], k.shape[2], device=str(q.device)), None


SDPA = EntryPoint(
    "torch.nn.functional",
    "scaled_dot_product_attention",
    ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    read_sdpa,
    tensors=("query", "key", "value"),
    name="F.scaled_dot_product_attention",
)
FLEX = EntryPoint(
    "torch.nn.attention.flex_attention",
    "flex_attention",
    ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options"),
    read_flex,
    profile="flex",
    tensors=("query", "key", "value"),
    name="flex_attention",
)


# -- functions that a user names -----------------------------------------------------------------------------------------

_CAUSAL, _SCALE = ("is_causal", "causal"), ("scale", "softmax_scale", "scaling", "sm_scale")
_MASK, _DROPOUT = ("attn_mask", "mask", "attention_mask"), ("dropout_p", "dropout")
_SOFTCAP = "softcap"


def read_named(given: Mapping[str, Any], tensors: tuple[str, str, str], defaults: Mapping[str, Any]) -> Asked:
    """Read a user's function: q, k, v (batch, heads, rows, dim), and options under the names that are usual for them.

    defaults: what options are that are not given. Those under other names are not checked.
    """
    options = {name: defaults[name] for name in (*_MASK, *_CAUSAL, *_SCALE, *_DROPOUT, _SOFTCAP) if name in defaults}
    options |= given
    q, k, v = (options.pop(name) for name in tensors)
    for name, tensor in zip(tensors, (q, k, v), strict=True):
        if getattr(tensor, "ndim", 0) != 4:
            raise UnreadableError(f"its argument {name} is {_short(tensor)}; expected (batch, heads, rows, dim)")

    def option(names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := options.pop(name, None)) is not None), None)

    attn_mask, causal, scale, dropout = (option(names) for names in (_MASK, _CAUSAL, _SCALE, _DROPOUT))
    softcap = option((_SOFTCAP,))
    refuse_unread(options, set())
    given_to_sdpa = {"query": q, "key": k, "value": v, "attn_mask": attn_mask, "is_causal": causal, "scale": scale}
    if hasattr(dropout, "p"):  # a module
        dropout = dropout.p if dropout.training else 0.0
    asked = _read_sdpa({**given_to_sdpa, "dropout_p": dropout})
    return dataclasses.replace(asked, softcap=softcap)
