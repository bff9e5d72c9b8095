"""A call of a library's attention function, read back: its arguments in one layout, and which functions are read so.

A backend puts a workload into a library's arguments (guests/libraries/); `FUNCTIONS` of a file of calls/ take those apart
again of a call that a model makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.masks import Mask, ScoreMod

if TYPE_CHECKING:
    import torch

#: module of a library that models call -> the file of calls/ that reads them back
CALLED_BY_MODELS = {
    "torch.nn.functional": "sdpa_calls",
    "torch.nn.attention.flex_attention": "flex_calls",
    "flash_attn": "flash_attention_calls",
    "flash_attn_interface": "flash_attention_calls",
    "flash_attn_3.flash_attn_interface": "flash_attention_calls",
    "flash_attn.cute": "flash_attention_calls",
    "transformer_engine.pytorch": "transformer_engine_calls",
    "xformers.ops": "xformers_calls",
    "sageattention": "sage_calls",
    "natten": "natten_calls",
    "flashinfer": "flashinfer_calls",
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
    import torch

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
    import torch

    hidden = mask <= torch.finfo(mask.dtype).min / 2
    is_whole_row = (hidden.all(-1) & mask.isfinite().all(-1)).any()
    if mask.dtype != torch.float16 and bool(is_whole_row):
        return None, mask
    bias = mask.masked_fill(hidden, 0)
    has_bias = mask.requires_grad or bool(bias.any())
    return (~hidden if bool(hidden.any()) else None), (bias if has_bias else None)
