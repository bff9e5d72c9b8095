"""Masks that a layer was handed, and keys that these hide and its attention call shows.

A mask may be forgotten on its way to the call: then the call is right for what it was asked, and the model is wrong. Honest
layers hand masks on in another dtype, sliced to the keys, merged with others, or as a flag. So what counts is which pairs of
a query and a key are visible, and what is in doubt passes: a boolean mask is read both ways, one of two dimensions as padding
and as rows by keys, and where a layer attends to two sequences either mask will do.

A mask under a name that says nothing is known by what it does: a boolean tensor, or one of 0 and -inf, that other layers keep,
or that nothing reads.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.dense import dense
from pytest_attn.guests.models.call_to_workload import AttentionArguments
from pytest_attn.workloads.functions import parameters_of

#: what a bias below hides, whatever the scores are
HIDES = -1e3
#: below this exp is 0 in float32
_UNDERFLOWS = 104.0
#: what a float mask among the arguments of a layer surely hides, which may pass a part of this value on
_LOW = 9 * HIDES
#: tells by its name that an argument is a mask
_NAMES_MASK = re.compile(r"((src|tgt|memory)_)?mask|.*(attention|attn|padding|causal)_mask").fullmatch
#: tells by its name that an argument holds another sequence, to which a layer attends as well
_NAMES_OTHER = re.compile("encoder|cross|memory|context|key_value|decoder").search


@dataclass(frozen=True)
class HandedMasks:
    """Masks among the arguments of a module that runs. masks: by parameter; takes: all parameters for masks.

    has_two: whether it was handed another sequence to attend to. memory: that sequence, (batch, keys, features), if it is one
    of numbers. parameters: all; others: tensors that may be masks, by parameter. unread: the ids of tensors that no operation
    of the module has read so far.
    """

    module: str
    masks: Mapping[str, torch.Tensor]
    takes: tuple[str, ...]
    has_two: bool
    memory: torch.Tensor | None = None
    parameters: tuple[str, ...] = ()
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unread: Set[int] = frozenset()


class MaskUse(NamedTuple):
    """Use that a call makes of a tensor that may be a mask under another name. of: its parameter, and whether it has no rows.

    lost: what the call shows of what each reading of it hides, in words; "" where it keeps one. unread: of each module that
    was handed it, as of `HandedMasks`.
    """

    of: tuple[str, bool]
    lost: str
    tensor: int
    unread: Sequence[Set[int]]

    @property
    def is_read(self) -> bool:
        """True where an operation has read it: of the module that it was handed, or of those that handed it on."""
        return any(self.tensor not in one for one in self.unread)


def handed_to(
    name: str, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], unread: Set[int]
) -> HandedMasks:
    """Return the masks that a module is called with. name: what reports call it; unread: as of `HandedMasks`."""
    parameters = _parameters(type(module).forward)
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    may_hide = {n: t for n, t in tensors.items() if not t.is_nested and 1 <= t.dim() <= 4}
    takes = tuple(filter(_NAMES_MASK, dict.fromkeys((*parameters, *given))))
    masks = {n: t for n, t in may_hide.items() if n in takes}
    second = [t for key, t in tensors.items() if key not in takes and _NAMES_OTHER(key)]
    memory = next(filter(_is_sequence, second), None)
    has_two = bool(second) or any(key.startswith(("decoder_", "tgt")) for key in parameters)
    widths = [t.shape[-1] for t in filter(_is_sequence, tensors.values())]
    # of two sequences each has its own
    others = {} if len(widths) > len({*widths}) else _alone(may_hide, {*parameters}.difference(takes))
    return HandedMasks(name, masks, takes, has_two, memory, parameters, others, unread)


def _is_sequence(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 3


def _alone(tensors: Mapping[str, torch.Tensor], names: Set[str]) -> Mapping[str, torch.Tensor]:
    """Return what may be masks under other names, but of two of one shape, which may be of two sequences."""
    named = {n: t for n, t in tensors.items() if n in names and not t.requires_grad}
    found = {n: t for n, t in named.items() if t.dtype == torch.bool or t.is_floating_point()}
    shapes = Counter(t.shape for t in found.values())
    return {n: t for n, t in found.items() if shapes[t.shape] == 1}


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    found = parameters_of(forward) or {}
    return tuple(one.name for one in found.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))[1:]


def forgotten(given: AttentionArguments, handed: Sequence[HandedMasks]) -> str:
    """Say which mask of those that the layers around a call were handed it does not keep, "" where there is none.

    handed: of the module that makes the call, then of what runs that, outwards.
    """
    if not _is_dense(given) or not any(level.masks for level in handed):
        return ""
    pairs = _Pairs(given)
    for level, masks in _in_force(handed):
        for group in _groups(level, masks):
            readings = [list(_readings(name, mask, pairs.shape)) for name, mask in group.items()]
            name = next(iter(group))
            if all(readings) and (lost := pairs.lost(name, level, group[name], chain.from_iterable(readings))):
                return lost
    return ""


def uses_of(given: AttentionArguments, handed: Sequence[HandedMasks]) -> Iterator[MaskUse]:
    """Yield what a call makes of tensors that may be masks: of the module that makes it, and of those that hand them on."""
    if not _is_dense(given):
        return
    pairs = _Pairs(given)
    for number, level in enumerate(takewhile(lambda level: not level.has_two, handed)):
        inwards = handed[:number]
        for name, mask in level.others.items():
            is_handed_on = all(name in inner.parameters and name not in inner.others for inner in inwards)
            readings = list(_readings(name, mask, pairs.shape)) if is_handed_on and _is_mask(mask, pairs.shape[3]) else []
            if not readings:
                continue
            # nothing is padding all over
            readings = [one for one in readings if not bool(one.flatten(1).all(-1).any())] or readings
            unread = [one.unread for one in handed[number:] if any(mask is other for other in one.others.values())]
            lost = pairs.lost(name, level, mask, readings)
            yield MaskUse((name, readings[0].shape[-2] == 1), lost, id(mask), unread)


def _is_dense(given: AttentionArguments) -> bool:
    """Return whether a call says by masks alone what its rows see, of sequences that are not packed."""
    return given.cu_seqlens is None and given.score_mod is None


def _is_mask(tensor: torch.Tensor, keys: int) -> bool:
    return tensor.dtype == torch.bool or (tensor.shape[-1] == keys and bool(((tensor == 0) | (tensor <= _LOW)).all()))


class _Pairs:
    """The pairs of a row and a key that a call of dense tensors shows. shape: (batch, heads, rows, keys)."""

    def __init__(self, given: AttentionArguments) -> None:
        self._given, self.shape = given, (*given.q.shape[:3], given.k.shape[2])

    @cached_property
    def _shown(self) -> torch.Tensor:
        return shown_by(self._given)

    def lost(self, name: str, level: HandedMasks, mask: torch.Tensor, readings: Iterable[torch.Tensor]) -> str:
        """Say what the call shows of what each reading of a mask hides, "" where it keeps one."""
        found = [self._shown_of(hidden) for hidden in readings]
        if (seen := found[0]) is None or any(one is None for one in found):
            return ""
        batch, _, row, key = seen.nonzero()[0].tolist()
        where = f" of batch entry {batch}" if seen.shape[0] > 1 else ""
        number = int(seen.expand(*self.shape).sum())
        hides = f"{name} {tuple(mask.shape)} of {level.module or 'the model'} hides key {key} from row {row}{where}"
        return f"{hides}, and the call shows it ({number:,} such pairs)"

    def _shown_of(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return which hidden keys the call shows, None where none; rows of padded queries are free."""
        hidden = hidden.to(self._shown.device)
        seen = hidden & self._shown & ~hidden.all(-1, keepdim=True)
        if self.shape[2] == self.shape[3]:
            is_padding = hidden.expand(-1, -1, self.shape[2], -1).all(-2)
            seen = seen & ~is_padding[..., None]
        return seen if bool(seen.any()) else None


def beyond_window(given: AttentionArguments, window: object) -> str:
    """Say where a call shows keys beyond the window that its layer names beside the mask, "" where it does not.

    window: keys that a query sees, with its own. A call that shows a row later keys, but not all as where it is padding, is
    not causal: its windows go to both sides, and count otherwise.
    """
    rows, keys = given.q.shape[-2], given.k.shape[-2]
    if not isinstance(window, int) or window < 1 or rows != keys or not _is_dense(given):
        return ""
    shown = shown_by(given)
    at = torch.arange(rows, device=shown.device)
    ahead = at[:, None] - at
    shows_all = shown.all(-1, keepdim=True)
    is_causal = ~(shown & (ahead < 0) & ~shows_all).flatten(-2).any(-1)[..., None, None]
    beyond = shown & (ahead >= window) & is_causal & ~shows_all
    if not bool(beyond.any()):
        return ""
    *_, row, key = beyond.nonzero()[0].tolist()
    return f"its layer says sliding_window={window}, and the call shows key {key} to row {row}"


def causal_across(given: AttentionArguments, handed: Sequence[HandedMasks]) -> str:
    """Say that a call hides later keys, as in one sequence, from a layer that attends to another; "" where it does not.

    Of another length, as where both are as long they may be two views of the same tokens.
    """
    rows, keys = given.q.shape[-2], given.k.shape[-2]
    is_across = bool(handed) and handed[0].memory is not None and handed[0].memory.shape[1] == keys
    if not is_across or rows == keys or min(rows, keys) < 3 or not _is_dense(given):
        return ""
    shown = shown_by(given)
    causal = torch.ones(rows, keys, dtype=torch.bool, device=shown.device).tril()
    is_causal = bool((shown == causal).all((-2, -1)).any())
    return f"its mask is causal, and its {keys} keys are of another sequence than its {rows} rows" if is_causal else ""


def _in_force(handed: Sequence[HandedMasks]) -> Iterator[tuple[HandedMasks, Mapping[str, torch.Tensor]]]:
    """Yield the masks that hold for a call: the nearest, and padding further out while each module between takes a mask."""
    is_nearest, is_handed_on = True, True
    for number, level in enumerate(handed):
        # what is only called a mask may be one of what is to be predicted, further out
        keys = {n: m for n, m in level.masks.items() if m.dim() == 2 and is_handed_on and (n != "mask" or number < 2)}
        if is_nearest and level.masks:
            yield level, {name: mask for name, mask in level.masks.items() if mask.dim() > 2 or name in keys}
            is_nearest = False
        elif not level.has_two:
            yield level, keys
        is_handed_on &= bool(level.takes)


def _groups(level: HandedMasks, masks: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield masks of which a call need keep one only: those of padding, and others. None where it may need none."""
    for is_padding in (False, True):
        group = {name: mask for name, mask in masks.items() if ("padding" in name) == is_padding}
        takes = [name for name in level.takes if ("padding" in name) == is_padding]
        if group and (not level.has_two or len(group) == len(takes)):
            yield group


def _readings(name: str, mask: torch.Tensor, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Yield what a mask may hide, boolean and broadcastable to (batch, heads, rows, keys); nothing where it hides none."""
    mask = mask.detach()
    if mask.is_floating_point() and bool((mask <= _LOW).any()):
        either = [mask <= _LOW]
    elif bool(((mask == 0) | (mask == 1)).all()) and not bool((mask == mask.flatten()[0]).all()):
        either = [mask == 1, mask == 0] if "padding" in name else [mask == 0, mask == 1]
        if mask.dtype != torch.bool and name.endswith("attention_mask"):
            del either[1]  # numbers under this name are 1 where a token counts
    else:
        return
    for hidden in either:
        yield from _aligned(name, hidden, shape)


def _aligned(name: str, hidden: torch.Tensor, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    batch, heads, _, keys = shape
    if hidden.dim() > 2:
        hidden = hidden[..., :keys]  # of a cache that has room for more
    views = [hidden if hidden.dim() > 1 else hidden[None, None, None]]
    if hidden.dim() == 3:
        folded = [hidden.reshape(batch, heads, -1, keys)] if hidden.shape[::2] == (batch * heads, keys) else []
        views = [hidden[:, None], *folded]
    elif hidden.dim() == 2:
        views = [hidden[:, None, None]] if "padding" in name else [hidden[:, None, None], hidden[None, None]]
    for view in views:
        if view.shape[-1] == keys and all(size in (1, whole) for size, whole in zip(view.shape, shape, strict=True)):
            yield view


def shown_by(given: AttentionArguments) -> torch.Tensor:
    """Return which keys a call of dense tensors shows to which rows, broadcastable to (batch, heads, rows, keys)."""
    device, shape = given.q.device, (*given.q.shape[:3], given.k.shape[2])
    shown = torch.ones(1, 1, *shape[2:], dtype=torch.bool, device=device)
    if given.visible is not None:
        shown = shown & given.visible
    if given.mask is not None:
        shown = shown & dense(given.mask, shape, device)
    if given.kv_lens is not None:
        lengths = torch.tensor(given.kv_lens, device=device)
        shown = shown & (torch.arange(shape[3], device=device) < lengths[:, None, None, None])
    if given.bias is None:
        return shown
    # it hides also where it lies so far below another of its row that no score of the call lifts a weight above 0
    bias = given.bias.detach().float()
    norms = (tensor.detach().float().norm(dim=-1).max() for tensor in (given.q, given.k))
    largest = math.prod(map(float, norms)) * abs(given.q.shape[-1] ** -0.5 if given.scale is None else float(given.scale))
    most = bias.masked_fill(~shown, -math.inf).amax(-1, keepdim=True)
    visible: torch.Tensor = shown & (given.bias.detach() > HIDES) & ~(bias < most - 2 * largest - _UNDERFLOWS)
    return visible
