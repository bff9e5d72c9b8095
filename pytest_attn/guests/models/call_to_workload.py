"""A call of a library's attention function, read back: its arguments in one layout, and the workload that they ask for.

A backend puts a workload into a library's arguments (guests/libraries/); `FUNCTIONS` of a file of calls/ take those apart
again of a call that a model makes. Which mask a tensor is: causal, a window, documents, padding, or none of these; then it is
kept as the tensor that it is.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

from pytest_attn.backends.dense import dense
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import BooleanMask, Causal, Document, Mask, ScoreMod, StoredMask, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

#: module of a library that models call -> the file of calls/ that reads them back
CALLED_BY_MODELS = {
    "torch.nn.functional": "torch_calls",
    "torch.nn.attention.flex_attention": "torch_calls",
    "flash_attn": "flash_attention_calls",
    "flash_attn_interface": "flash_attention_calls",
    "flash_attn_3.flash_attn_interface": "flash_attention_calls",
    "flash_attn.cute": "flash_attention_calls",
    "transformer_engine.pytorch": "transformer_engine_calls",
    "xformers.ops": "library_calls",
    "sageattention": "library_calls",
    "natten": "library_calls",
    "flashinfer": "library_calls",
}


class UnreadableError(Exception):
    """A call was intercepted, and asks for something that no workload can say; the text says what."""


def unchanged(value: Any) -> Any:
    """Return a tensor, or a result, that is in the layout of q already."""
    return value


def swap_rows_and_heads(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, rows, heads, dim) to (batch, heads, rows, dim), and back."""
    return tensor.transpose(1, 2)


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of one call in one layout, and the way back of its result.

    q: (batch, heads, q_len, head_dim), k, v the same with kv_heads and kv_len; packed sequences: (tokens, heads, head_dim).
    visible: boolean, True = visible, broadcastable to (batch, heads, q_len, kv_len). mask: what is known of it without a
    tensor; both may be given, then a key must be visible to both. bias: additive, broadcastable in the same way. sinks,
    alibi_slopes: (heads,). cu_seqlens, cu_seqlens_kv: boundaries of packed sequences. page_table: (batch, pages) of packed
    queries whose k and v are pools (pages, page size, kv_heads, head_dim), with kv_lens.
    to_native: from the layout in which the function takes tensors to that of q. out_to_native: from the layout of its tensor
    out to that of q; to_result: from out in the layout of q to what the function returns. asks_more: what else the call asks
    for, as weights or lse, which `to_result` leaves out. unread: an argument that nothing is known of, and that the function
    itself takes no notice of.
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
    page_table: torch.Tensor | None = None
    to_native: Callable[[torch.Tensor], torch.Tensor] = field(default=unchanged)
    out_to_native: Callable[[torch.Tensor], torch.Tensor] = field(default=unchanged)
    to_result: Callable[[torch.Tensor], Any] = field(default=unchanged)
    asks_more: str = ""
    unread: str = ""

    @classmethod
    def in_layout(
        cls,
        to_native: Callable[[torch.Tensor], torch.Tensor],
        given: Mapping[str, Any],
        names: Sequence[str] = ("q", "k", "v"),
        **others: Any,
    ) -> AttentionArguments:
        """Return those of a call whose tensors, named `names`, and out lie in one layout. others: the fields that differ."""
        q, k, v = (to_native(given[name]) for name in names)
        return cls(q, k, v, **{"to_native": to_native, "out_to_native": to_native, "to_result": to_native, **others})

    def refuse_more(self) -> None:
        """Raise UnreadableError where out, and what is known of the call, is not all that it asks."""
        if self.unread:
            raise UnreadableError(f"its argument {self.unread} is not read")
        if self.asks_more:
            raise UnreadableError(f"the model asks for {self.asks_more} as well, which a replacement does not return")


@dataclass(frozen=True)
class AttentionFunction:
    """A function that computes attention: module and attribute where it is found, its parameters, and its reader.

    parameters: their names, in order. tensors: the names of q, k and v. read: from the arguments by name to what they ask.
    profile: the backend that rounds as it does. name: what reports call it. unpack: adds q, k and v to its arguments by name,
    where it takes them otherwise; pack: undoes that. kernel_of: the kernel that it chooses for some arguments, "" where it has
    one. ran: the backend whose kernel the last call took, where only that tells. defaults: of a user's parameters.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], AttentionArguments]
    profile: str = "sdpa"
    tensors: tuple[str, str, str] = ("q", "k", "v")
    name: str = ""
    unpack: Callable[[dict[str, Any]], dict[str, Any]] = dict
    pack: Callable[[dict[str, Any]], dict[str, Any]] = dict
    kernel_of: Callable[[Mapping[str, Any]], str] = lambda given: ""
    ran: Callable[[], str] = str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Its name in reports."""
        return self.name or f"{self.module}.{self.attribute}"

    @property
    def place(self) -> tuple[str, str]:
        """Its module and attribute."""
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
            raise UnreadableError(f"its argument {name}={shortened(value)} is not read")


def shortened(value: object) -> str:
    """Return how a message shows the value of an argument."""
    shape = getattr(value, "shape", None)
    return f"a tensor of shape {tuple(shape)}" if shape is not None else f"{value!r:.40}"


def imported_functions() -> list[AttentionFunction]:
    """Return the attention functions that a model may call by now: those of torch, and of libraries that are imported."""
    files = dict.fromkeys(file for module, file in CALLED_BY_MODELS.items() if module in sys.modules)
    functions = [one for file in files for one in import_module(f"pytest_attn.guests.models.calls.{file}").FUNCTIONS]
    return [function for function in functions if function.module in sys.modules]


def visible_and_bias(
    mask: torch.Tensor, lead: tuple[int, ...], q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what an attn_mask hides and adds, each (batch or 1, heads or 1, q_len, kv_len) or None."""
    mask = mask.detach()
    if mask.dim() > 4:
        mask = mask.expand(*lead, *mask.shape[-2:])
    mask = four_dimensional(mask)
    mask = mask.expand(-1, -1, q.shape[2] if mask.shape[2] == 1 else -1, k.shape[2] if mask.shape[3] == 1 else -1)
    return (mask, None) if mask.dtype == torch.bool else split_additive(mask)


def four_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    """View (..., rows, dim) as (batch, heads, rows, dim): what is before the heads becomes the batch."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    return tensor[(None,) * (4 - tensor.dim())]


def split_additive(mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return an additive mask as (visible, bias): what it hides, and what it adds elsewhere; None where it does neither.

    A number near the dtype's lowest hides, unless it hides a whole row: there all keys count alike, which only the sum says.
    Beside float16's, scores count still, as much as a kernel rounds them: such rows see no key.
    """
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    is_whole_row = (hidden.all(-1) & mask.isfinite().all(-1)).any()
    if mask.dtype != torch.float16 and bool(is_whole_row):
        return None, mask
    bias = mask.masked_fill(hidden, 0)
    has_bias = mask.requires_grad or bool(bias.any())
    return (~hidden if bool(hidden.any()) else None), (bias if has_bias else None)


# -- which mask a tensor is --------------------------------------------------------------------------------------------------

#: more documents than this are taken for a pattern
_MOST_DOCUMENTS = 4096


def asks_the_same(one: Workload, other: Workload) -> bool:
    """Return whether two workloads are equal: with functions that do the same, and masks whose tensors are equal.

    Each layer of a model may make its own function, or its own tensor, and mean the same.
    """
    if dataclasses.replace(one, mask=None, score_mod=None) != dataclasses.replace(other, mask=None, score_mod=None):
        return False
    if not _does_the_same(one.score_mod, other.score_mod):
        return False
    here, there = one.mask, other.mask
    if here is None or there is None or here.function is None or here.kind != there.kind:
        return bool(here == there)
    if isinstance(here.function, StoredMask) and isinstance(there.function, StoredMask):
        a, b = here.function.visible, there.function.visible
        return a.device == b.device and a.shape == b.shape and bool((a == b).all())
    return _does_the_same(here.function, there.function)


def _does_the_same(one: Any, other: Any) -> bool:
    """Return whether two functions are one, or made twice by the same lines around the same objects, or equal values."""
    if one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other):
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)) or vars(one) or vars(other):
        return False
    if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
        return False
    return all(
        len(here) == len(there) and all(_does_the_same(a, b) for a, b in zip(here, there, strict=True))
        for here, there in zip(_holds(one), _holds(other), strict=True)
    )


def _holds(function: FunctionType) -> tuple[tuple[Any, ...], ...]:
    cells = function.__closure__ or ()
    try:
        closed = tuple(cell.cell_contents for cell in cells)
    except ValueError:  # a cell that is not filled yet
        closed = tuple(cells)
    keywords = sorted((function.__kwdefaults__ or {}).items())
    return closed, function.__defaults__ or (), tuple(value for pair in keywords for value in pair)


def recognize(visible: torch.Tensor, q_len: int, kv_len: int) -> tuple[Mask | None, tuple[int, ...] | None]:
    """Return the mask of a boolean tensor (batch or 1, heads or 1, q_len or 1, kv_len), and kv_lens where it pads.

    (None, None) where every key is visible. Each answer has been compared with the whole tensor.
    """
    visible = visible.expand(-1, -1, q_len, kv_len)
    if bool(visible.all()):
        return None, None
    first = visible[0, 0]
    if bool((visible == first).all()):  # it depends on positions only
        mask: Mask | None = next((one for one in (Causal(), Causal(bottom_right=True)) if _is(first, one)), None)
        if mask is None and bool(first.any(-1).all()):
            mask = _window(first, q_len, kv_len) or (_documents(first) if q_len == kv_len else None)
        if mask is not None:
            return mask, None
    return _padded(visible, q_len, kv_len) or (BooleanMask(StoredMask(visible.clone())), None)


def _window(visible: torch.Tensor, q_len: int, kv_len: int) -> Window | None:
    first = visible.int().argmax(-1)
    last = kv_len - 1 - visible.flip(-1).int().argmax(-1)
    position = torch.arange(q_len, device=visible.device) + kv_len - q_len
    to_the_left, to_the_right = int((position - first).max()), int((last - position).max())
    if to_the_left < 0 or to_the_right < 0:
        return None
    # a side that ends at the border in every row may be open or not: open says it without a number
    left = None if bool((first == 0).all()) else to_the_left
    right = None if bool((last == kv_len - 1).all()) else to_the_right
    found = Window(left, right)
    return found if _is(visible, found) else None


def _documents(visible: torch.Tensor) -> Document | None:
    starts: Any = visible.int().argmax(-1)
    lengths = starts.unique_consecutive(return_counts=True)[1].tolist()
    if len(lengths) > _MOST_DOCUMENTS:
        return None
    for causal in (True, False):
        found = Document(tuple(lengths), causal=causal)
        if _is(visible, found):
            return found
    return None


def _padded(visible: torch.Tensor, q_len: int, kv_len: int) -> tuple[Mask | None, tuple[int, ...]] | None:
    """Return the mask and the lengths of keys that are padded at the end, None where that is not what it is."""
    if not bool((visible == visible[:, :1]).all()):
        return None
    seen = visible[:, 0].any(1)  # (batch or 1, kv_len)
    lengths = kv_len - seen.flip(-1).int().argmax(-1)
    lengths = torch.where(seen.any(-1), lengths, 0)
    inside = torch.arange(kv_len, device=visible.device) < lengths[:, None]
    found = tuple(lengths.tolist())
    if not max(found):
        return None
    for mask in (None, Causal()):
        whole = inside[:, None, None, :] if mask is None else inside[:, None, None, :] & _dense(mask, q_len, kv_len, visible)
        if bool((visible == whole).all()):
            return mask, found
    return None


def _is(visible: torch.Tensor, mask: Mask) -> bool:
    q_len, kv_len = visible.shape
    return bool((visible == _dense(mask, q_len, kv_len, visible)).all())


def _dense(mask: Mask, q_len: int, kv_len: int, like: torch.Tensor) -> torch.Tensor:
    return dense(mask, (1, 1, q_len, kv_len), like.device)[0, 0]


class DropoutError(ValueError):
    """A call uses dropout, so its result cannot be compared."""


def to_inputs(given: AttentionArguments) -> Inputs:
    """Return the workload of a call with its tensors; dout is zeros until it arrives. Raises UnreadableError, DropoutError."""
    if given.dropout > 0:
        raise DropoutError(
            f"attention with dropout {given.dropout:g} has no right result; set the model's attention dropout to 0, or call"
            " model.eval()"
        )
    q, k, v = given.q, given.k, given.v
    _require_one_kind(q, k, v)
    if k.shape[-3] != v.shape[-3] and given.cu_seqlens is None:
        raise UnreadableError(f"k has {k.shape[-3]} heads, and v {v.shape[-3]}; expected as many")
    extras: dict[str, Any] = {}
    fields: dict[str, Any] = _options(given, extras)
    if given.cu_seqlens is not None:
        fields |= _packed(given, given.cu_seqlens, extras)
    else:
        fields |= {"batch": q.shape[0], "q_len": q.shape[2], "kv_len": k.shape[2]} | _mask_of(given, extras)
    try:
        workload = Workload(
            heads=q.shape[1],
            kv_heads=k.shape[1 if given.cu_seqlens is None else -2],
            head_dim=q.shape[-1],
            v_head_dim=v.shape[-1],
            dtype=str(q.dtype).removeprefix("torch."),
            **fields,
        )
    except ValueError as error:
        raise UnreadableError(str(error).removeprefix("Workload: ")) from None
    return Inputs(workload, q.device, q, k, v, dout=q.new_zeros(()), **extras)


def _require_one_kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for tensor in (q, k, v):
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.dtype != q.dtype:
            kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
            raise UnreadableError(f"q, k and v are {kinds}; expected all three bfloat16, float16 or float32")
        if tensor.layout != q.layout or tensor.is_nested:
            raise UnreadableError("q, k and v must be dense tensors; nested and sparse ones are not read")


def _options(given: AttentionArguments, extras: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that change scores; their tensors go into `extras`."""
    default = 1 / math.sqrt(given.q.shape[-1])
    is_default = given.scale is None or math.isclose(given.scale, default, rel_tol=1e-9)
    fields: dict[str, Any] = {
        "scale": None if is_default else float(given.scale or 0),
        "softcap": given.softcap or None,
        "score_mod": given.score_mod,
    }
    if given.sinks is not None:
        fields["sinks"], extras["sinks"] = True, given.sinks
    if given.alibi_slopes is not None:
        fields["alibi"], extras["alibi_slopes"] = True, given.alibi_slopes.float()
    if given.bias is not None:
        bias = given.bias
        fields["bias"] = "".join(name for name, size in zip("bhqk", bias.shape, strict=True) if size > 1) or "k"
        extras["bias"] = bias
    return fields


def _packed(given: AttentionArguments, ends: torch.Tensor, extras: dict[str, Any]) -> dict[str, Any]:
    """Return the mask and the lengths of packed queries, and of their keys, which are packed, too, or lie in pages."""
    extras["cu_seqlens"] = ends.to(torch.int32)
    fields: dict[str, Any] = {"mask": given.mask, "q_lens": tuple(ends.diff().tolist())}
    if given.page_table is None:
        keys = ends if given.cu_seqlens_kv is None else given.cu_seqlens_kv
        extras["cu_seqlens_kv"] = keys.to(torch.int32)
        return {**fields, "kv_lens": tuple(keys.diff().tolist())}
    extras["page_table"] = given.page_table
    extras["kv_lens"] = torch.tensor(given.kv_lens, dtype=torch.int32, device=ends.device)
    return {**fields, "kv_lens": given.kv_lens, "kv_pages": Pages(given.k.shape[1])}


def _mask_of(given: AttentionArguments, extras: dict[str, Any]) -> dict[str, Any]:
    """Return mask and kv_lens: as the call names them, or as its tensor is recognized."""
    q, k = given.q, given.k
    kv_lens, mask, visible = given.kv_lens, given.mask, given.visible
    if visible is not None:
        if given.mask is not None:
            shape = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
            visible = visible & dense(given.mask, shape, q.device)
        mask, seen = recognize(visible, q.shape[2], k.shape[2])
        if seen is not None and kv_lens is not None:
            mask, seen = BooleanMask(StoredMask(visible)), None
        kv_lens = kv_lens if seen is None else seen
        if kv_lens is not None and len(kv_lens) != q.shape[0]:
            kv_lens = kv_lens * q.shape[0]
    if kv_lens is not None:
        extras["kv_lens"] = torch.tensor(kv_lens, dtype=torch.int32, device=q.device)
    return {"mask": mask, "kv_lens": kv_lens}


def with_mask(given: AttentionArguments, visible: torch.Tensor) -> AttentionArguments:
    """Return the same call with another mask, which is all that it may see."""
    bias = given.bias
    if bias is not None:
        bias = bias.masked_fill(bias <= torch.finfo(bias.dtype).min / 2, 0)
        bias = bias if bool(bias.any()) else None
    return dataclasses.replace(given, visible=visible, mask=None, kv_lens=None, bias=bias)
