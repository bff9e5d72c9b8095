"""Likeness of layers that are built alike: a scale, a window, how heads share keys, what learns; and who differs.

A call that asks for something else than it should is right for what it asks. But layers that are built alike ask alike, or
differ on purpose: from layer to layer, or half of them. One that differs from all others in what nobody means is wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import isroutine
from itertools import chain
from typing import Any, TypeAlias

import torch

from pytest_attn.guests.models.capture import AttentionCall, digest_of
from pytest_attn.guests.models.handed_masks import HIDES, MaskUse
from pytest_attn.guests.models.interception import PROJECTS_KEYS, Tracker, build_of, is_setting
from pytest_attn.guests.models.model_comparison import CallComparison, Traits
from pytest_attn.reports.records import gathered
from pytest_attn.workloads.dtypes import dtype_name


def traits_of(call: AttentionCall) -> Traits:
    """Return what is read from the tensors of a call."""
    gradients = frozenset(call.gradients) if call.is_awaited else None
    if call.workload.is_packed:
        return Traits(gradients=gradients)
    w, shown = call.workload, _shown(call)
    seen = "" if shown is None or bool(shown.all()) else digest_of(_alike_dropped(shown))
    shares = _shares(call.k, w.heads), _shares(call.v, w.heads)
    has_bias = call.bias is not None and bool(((call.bias > HIDES) & (call.bias != 0)).any())
    shape = w.q_len, w.kv_len
    reach = None if shown is None or w.q_len != w.kv_len else _reach(shown)
    return Traits(reach, *shares, gradients, _held(call), (shape, seen), has_bias, call.memory, last_of(call), call.masks)


def _shown(call: AttentionCall) -> torch.Tensor | None:
    """Return what a call of dense tensors shows, (batch or 1, heads or 1, rows, keys), None for all."""
    w, shown = call.workload, call.mask
    if call.bias is not None:
        visible = call.bias > HIDES
        shown = visible if shown is None else visible & shown.to(visible.device)
    return None if shown is None else shown.expand(-1, -1, w.q_len, w.kv_len)


def _alike_dropped(shown: torch.Tensor) -> torch.Tensor:
    """Return a mask without batch entries and heads that are all alike."""
    for dim in (0, 1):
        first = shown.narrow(dim, 0, 1)
        shown = first if bool((shown == first).all()) else shown
    return shown


def _held(call: AttentionCall) -> str:
    dtype = call.workload.dtype
    if dtype != "float32":
        return dtype
    for narrow in (torch.bfloat16, torch.float16):
        if any(bool(t.any()) and torch.equal(t, t.to(narrow).float()) for t in (call.q, call.k, call.v)):
            return dtype_name(narrow)
    return dtype


def _counting(shown: torch.Tensor) -> torch.Tensor:
    return shown.any(-1) & ~shown.all(-1)


def _reach(shown: torch.Tensor) -> tuple[int, int] | None:
    keys, counts = shown.shape[-1], _counting(shown)
    at = torch.arange(keys, device=shown.device)
    seen = shown.to(torch.uint8)
    first, last = seen.argmax(-1), keys - 1 - seen.flip(-1).argmax(-1)
    scattered = (shown.sum(-1) != last - first + 1) & counts  # rows of padding may see themselves and a part of a window
    if 4 * int(scattered.sum()) > int(counts.sum()):
        return None  # keys that are chosen one by one
    back, ahead = (int(torch.where(counts, reach, -1).max()) for reach in (at - first, last - at))
    whole = torch.where(counts, at, -1).amax(-1) - torch.where(counts, first, keys).amin(-1)
    return (back, ahead) if 0 <= back < int(whole.max()) and ahead in (0, back) else None


#: rows that tell what a diagonal is, at least
_FEW_ROWS = 4


def last_of(call: AttentionCall) -> int | None:
    """Return by how many keys most rows see beyond their own, as `Traits.last`."""
    w = call.workload
    if w.is_packed or w.q_len != w.kv_len or (shown := _shown(call)) is None:
        return None
    last = w.kv_len - 1 - shown.to(torch.uint8).flip(-1).argmax(-1)
    beyond = (last - torch.arange(w.kv_len, device=shown.device))[_counting(shown)].cpu()
    if len(beyond) < _FEW_ROWS:
        return None
    usual = int(beyond.mode().values)
    return usual if abs(usual) <= 1 and 2 * int((beyond == usual).sum()) > len(beyond) else None


def _shares(tensor: torch.Tensor, of: int) -> tuple[int, ...] | None:
    """Return of each head the first with the same content, as `Traits` has it. of: heads of q.

    A head that holds the same for every key, as one without weights does, counts as one of its own.
    """
    heads = tensor.unbind(1)
    group, rest = divmod(of, len(heads))  # which the function repeats, each for heads that follow each other
    if rest:
        return None
    some = tensor[:, :, [0, -1]].transpose(0, 1).flatten(1).contiguous().cpu().view(torch.uint8)  # tells most apart
    firsts: dict[bytes, list[int]] = {}
    found = []
    for at, part in enumerate(some):
        alike = firsts.setdefault(bytes(part.tolist()), [])
        is_constant = torch.equal(heads[at], heads[at][:, :1].expand_as(heads[at]))
        found.append(next((one for one in alike if not is_constant and torch.equal(heads[one], heads[at])), at))
        alike += [at] if found[-1] == at else []
    return tuple(group * one for one in found for _ in range(group))


def with_strangers(calls: Sequence[CallComparison], tracker: Tracker) -> Iterator[CallComparison]:
    """Yield the calls, where one asks for something else than modules built alike with what is wrong about it.

    tracker: of the step, whose gradients the parameters still have.
    """
    places = _grouped(calls, tracker, lambda call, module: _position(call.module, module))
    strange = {**_lost_masks(calls), **_oddities(places, OF_POSITION), **_oddities(built_alike(calls, tracker), OF_BUILD)}
    callers = tracker.callers.items()
    used = {(*_position(at, one), name) for at, one in callers for name, part in one.named_children() if _learns(part)}
    for call in calls:
        module = tracker.callers.get(call.module)
        own = _mixed(call.traits) or _loses_sinks(call, module) or _leaves_out_norm(call, module, used)
        yield replace(call, misled=call.misled or own or strange.get(call.order, ""))


def _grouped(
    calls: Iterable[CallComparison], tracker: Tracker, key: Callable[[CallComparison, torch.nn.Module], object]
) -> Iterable[Siblings]:
    found: dict[object, Siblings] = {}
    for call in calls:
        if module := tracker.callers.get(call.module):
            found.setdefault(key(call, module), Siblings(tracker)).append(call)
    return found.values()


def built_alike(calls: Iterable[CallComparison], tracker: Tracker) -> Iterable[Siblings]:
    """Return the calls in groups of modules that are built alike."""
    return _grouped(calls, tracker, lambda call, module: (build_of(module), call.workload.head_dim))


def odd_one(calls: Sequence[CallComparison], tracker: Tracker) -> str:
    """Say which call has another scale or causal mask than modules built alike, "" for none."""
    odd = _oddities(built_alike(calls, tracker), (_other_scales, _other_diagonals))
    return next((f"{call.label}: {odd[call.order]}" for call in calls if call.order in odd), "")


def _oddities(groups: Iterable[Siblings], finders: Iterable[Callable[[Siblings], Iterator[Oddity]]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for group in groups:
        for at, what, sibling in chain.from_iterable(find(group) for find in finders):
            found.setdefault(group[at].order, f"{what} in {group[sibling].label}, which is the same kind of module")
    return found


def _lost_masks(calls: Iterable[CallComparison]) -> dict[int, str]:
    """Return by the order of calls which mask they do not keep, of tensors whose names do not say that they are masks."""
    uses = gathered((use.of, (call, use)) for call in calls for use in call.traits.masks)
    found: dict[int, str] = {}
    for (_, is_of_keys), some in uses.items():
        keeping = {call.module for call, use in some if not use.lost}
        losing = [(call, use) for call, use in some if call.module not in keeping]
        if _is_meant(is_of_keys, len(keeping), losing):
            found |= {call.order: f"a mask was forgotten: {use.lost}" for call, use in losing}
    return found


def _is_meant(is_of_keys: bool, keeping: int, losing: Sequence[tuple[CallComparison, MaskUse]]) -> bool:
    """Return whether a tensor is a mask that all layers are meant to keep. keeping: how many modules do.

    One of keys is where no module that loses it reads it, or where one alone loses it and two keep it; one of pairs, which
    only some layers may be meant to keep, where nothing reads it.
    """
    is_lone = is_of_keys and keeping > 1 and len({call.module for call, _ in losing}) == 1
    return is_lone or (not any(use.is_read for _, use in losing) and (is_of_keys or not keeping))


def _position(name: str, module: torch.nn.Module) -> tuple[type, str]:
    """Return where a module stands, the same in every layer."""
    return type(module), re.sub(r"\b\d+\b", "*", name)


class Siblings(list[CallComparison]):
    """Calls of modules that are built alike, or stand at the same position of their layers."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The module that made each call."""
        return [self.tracker.callers[call.module] for call in self]


#: a call that asks for something else than its siblings: its index in the group, what it does, and the index of a sibling
Oddity: TypeAlias = "tuple[int, str, int]"


# -- of modules built alike --------------------------------------------------------------------------------------------------


def _other_gradients(group: Siblings) -> Iterator[Oddity]:
    gives = [_gives_gradients(call, group.tracker) for call in group]
    for name in dict.fromkeys(name for one in gives for name in one):
        for at, sibling in _lone([one.get(name) for one in gives], is_odd=lambda given: not given):
            yield at, f"its {name} gets no gradient, and {name} gets one", sibling


def _other_roundings(group: Siblings) -> Iterator[Oddity]:
    held, modules = [call.traits.held for call in group], group.modules
    for at, sibling in _lone(held, is_odd=lambda dtype: dtype != "float32"):
        if _forms(modules[at], "dtype") == _forms(modules[sibling], "dtype"):
            yield at, f"its q, k or v was rounded to {held[at]}, and none was", sibling


def _other_masks(group: Siblings) -> Iterator[Oddity]:
    """Yield calls with a mask of their own among those of one shape whose modules were told the same."""
    given = [group.tracker.call_settings[call.module] for call in group]
    settings = list(zip(map(_settings_of, group.modules), given, strict=True))
    kinds = [
        call.traits.seen and (settings.index(own), call.traits.seen[0]) for own, call in zip(settings, group, strict=True)
    ]
    for kind in dict.fromkeys(filter(None, kinds)):
        seen = [
            call.traits.seen[1] if call.traits.seen and one == kind else None for one, call in zip(kinds, group, strict=True)
        ]
        for at, sibling in _lone(seen, is_odd=lambda _: True, others=4):
            what = "its mask shows other keys than those that are shown"
            if not seen[at]:
                what = "it hides no key, and keys are hidden"
            elif not seen[sibling]:
                what = "its mask hides keys, and no key is hidden"
            yield at, what, sibling


def _other_windows(group: Siblings) -> Iterator[Oddity]:
    """Yield calls whose window is one key larger or smaller, where there are two windows."""
    windows = [call.traits.reach for call in group]
    found = [window for window in {*windows} if window is not None]
    if len(found) != 2:
        return
    (back, ahead), (other_back, other_ahead) = found
    if abs(back - other_back) == 1 and bool(ahead) == bool(other_ahead):
        for at, sibling in _others(windows):
            own_keys, keys = (sum(windows[one] or ()) + 1 for one in (at, sibling))
            yield at, f"its window is {own_keys} keys, and {keys}", sibling


def _other_diagonals(group: Siblings) -> Iterator[Oddity]:
    """Yield calls whose causal mask is one key off; but a layer that sees no token's own key may say so.

    None where as many are off, or one module makes calls of several kinds, which means that.
    """
    settings, last = list(map(_settings_of, group.modules)), [call.traits.last for call in group]
    odd = [at for at, keys in enumerate(last) if keys]
    kinds = {(call.module, call.traits.last) for call in group if call.traits.last is not None}
    is_few = len(odd) == 1 or 2 * len(odd) <= last.count(0)
    if 0 not in last or not is_few or len(kinds) > len({module for module, _ in kinds}):
        return
    sibling = last.index(0)
    for at in odd:
        if last[at] == 1 or settings[at] == settings[sibling]:
            yield at, f"its causal mask shows one key too {'many' if last[at] == 1 else 'few'}, and the right ones", sibling


def _other_heads(group: Siblings) -> Iterator[Oddity]:
    """Yield calls whose heads share keys in another order, or whose heads share fewer keys than all others'."""
    orders, modules = [call.traits.keys for call in group], group.modules
    if len({*orders} - {None}) != 2:
        return
    many = [None if order is None else len({*order}) for order in orders]
    most = max(filter(None, many))
    odd = _lone(many, is_odd=lambda number: number < most) if len({*many} - {None}) > 1 else _others(orders)
    for at, sibling in odd:
        if _forms(modules[at], "shape") == _forms(modules[sibling], "shape"):
            yield at, f"its heads share keys as {_listed(orders[at])}, and as {_listed(orders[sibling])}", sibling


def _other_scales(group: Siblings) -> Iterator[Oddity]:
    """Yield calls whose scale differs from their siblings' by mistake.

    What is right: 1 / sqrt(head_dim), what the module's configuration says, or what at least two siblings and twice as many as
    have another agree on. Where siblings have three scales, or as many have one as the other, that is meant. So is a large
    difference, but where siblings agree on 1 / sqrt(head_dim), and in models of transformers, which have no such layers unless
    their configuration says so.
    """
    own = [call.workload.softmax_scale for call in group]
    scales = Counter(own)
    if len(scales) != 2 or 2 < len(own) == 2 * max(scales.values()):
        return
    right, counts_all = _right_scales(group[0].workload.replace(scale=None).softmax_scale, scales, group.modules[0])
    for at, scale in enumerate(own):
        near = [one for one in right if counts_all or _ALIKE[0] < scale / one < _ALIKE[1]]
        if near and not _is_among(scale, right):
            sibling = next(n for n, one in enumerate(own) if _is_alike(one, near[0]))
            yield at, f"its scale is {scale:.6g}, and {near[0]:.6g}", sibling


#: how near to a sibling's a scale is that is taken for a mistake where only two layers say what is right
_ALIKE = (0.6, 1.6)


def _right_scales(default: float, scales: Counter[float], module: torch.nn.Module) -> tuple[list[float], bool]:
    """Return the scales that are right, and whether any other one is a mistake, however large the difference."""
    usual, times = scales.most_common(1)[0]
    agreed = usual if times > 1 and 2 * (scales.total() - times) <= times else None
    config = getattr(module, "config", None)
    by_layer = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    is_of_transformers = type(module).__module__.startswith("transformers.") and not by_layer
    scalar, multiplier = (getattr(config, name, None) for name in ("query_pre_attn_scalar", "attention_multiplier"))
    configured = [float(scalar) ** -0.5 if isinstance(scalar, int | float) and scalar > 0 else None, multiplier, agreed]
    known = [default, *(float(one) for one in configured if isinstance(one, int | float) and one > 0)]
    right = [scale for scale in known if _is_among(scale, scales)]
    right = right or [1.0] * (is_of_transformers and 1.0 in scales)  # q is scaled or normalized already
    is_default_agreed = agreed is not None and _is_alike(agreed, default) and 1.0 not in scales
    return right, is_default_agreed or is_of_transformers


def _is_alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)


def _is_among(scale: float, others: Iterable[float]) -> bool:
    return any(_is_alike(scale, one) for one in others)


OF_BUILD = (_other_gradients, _other_roundings, _other_diagonals, _other_masks, _other_windows, _other_heads, _other_scales)


# -- of modules at the same position of their layers, whatever parameters they have ------------------------------------------


def _without_bias(group: Siblings) -> Iterator[Oddity]:
    settings, biases = [_settings_of(module) for module in group.modules], [call.traits.has_bias for call in group]
    for at, _ in _lone(biases, is_odd=lambda has_bias: not has_bias):
        alike = (n for n, (has, own) in enumerate(zip(biases, settings, strict=True)) if has and own == settings[at])
        if (sibling := next(alike, None)) is not None:
            yield at, "nothing is added to its scores, and a bias is", sibling


def _without_memory(group: Siblings) -> Iterator[Oddity]:
    for at, sibling in _lone([call.traits.memory or None for call in group], is_odd=bool):
        yield at, "it does not attend to the sequence that is attended to", sibling


OF_POSITION = (_without_bias, _without_memory)


def _settings_of(module: torch.nn.Module) -> dict[str, object]:
    """Return the settings of a module, but for which layer it is, and of what computes attention for it."""
    computing = {name: value for name, value in vars(module).items() if callable(value) and name != "forward"}
    callables = {name: value if isroutine(value) else (type(value), _plain(value)) for name, value in computing.items()}
    kinds, at = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[at] if isinstance(kinds, list | tuple) and isinstance(at, int) and at < len(kinds) else None
    return {**_plain(module), **callables, "layer_types": kind}


def _plain(owner: object) -> dict[str, object]:
    is_place = re.compile("idx|index|layer|^_").search
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if is_setting(value) and not is_place(name)}


def _forms(module: torch.nn.Module, form: str) -> list[object]:
    return [getattr(parameter, form) for parameter in module.parameters()]


def _lone(values: Sequence[Any], is_odd: Callable[[Any], bool], others: int = 2) -> Iterator[tuple[int, int]]:
    """Yield which value is odd where at least so many others are all alike, and one of these; None counts for nothing.

    The first one and the last may differ on purpose.
    """
    known = [at for at, value in enumerate(values) if value is not None]
    counts = Counter(values[at] for at in known).most_common()
    if len(counts) == 2 and counts[0][1] >= others and counts[1][1] == 1 and is_odd(counts[1][0]):
        at = values.index(counts[1][0])
        if at not in (known[0], known[-1]):
            yield at, values.index(counts[0][0])


def _gives_gradients(call: CallComparison, tracker: Tracker) -> dict[str, bool]:
    """Return which of q, k and v, and of the parameters behind a call, have a gradient, by name.

    Where a module made several calls, the loss may depend on some only.
    """
    before, arrived = tracker.before.get(call.module, []), call.traits.gradients
    is_told = arrived or (arrived is not None and len(before) == 1)
    of_call = {name: f"d{name}" in arrived for name in "qkv"} if arrived is not None and is_told else {}
    return {**of_call, **(_learning(call, tracker.callers[call.module], before[0]) if len(before) == 1 else {})}


def _learning(call: CallComparison, module: torch.nn.Module, parts: Sequence[torch.nn.Module]) -> dict[str, bool]:
    """Return which parameters of a module, itself and of these parts, have a gradient; none where the loss needs no call.

    Parts with a number are left out: of experts only those have a gradient that are chosen.
    """
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    has_gradient = {name: parameter.grad is not None for name, parameter in named.items()}
    if not call.has_gradients and not any(has_gradient.values()):
        return {}
    behind = {id(one) for part in parts for one in part.parameters()} | {id(one) for one in module.parameters(recurse=False)}
    is_numbered = re.compile(r"(^|.*\.)\d+(\.|$)").match
    return {name: has for name, has in has_gradient.items() if id(named[name]) in behind and not is_numbered(name)}


def _loses_sinks(call: CallComparison, module: torch.nn.Module | None) -> str:
    """Say that the sinks of a module get no gradient from its own call, which has them; "" where they do."""
    own = getattr(module, "sinks", None)
    is_asked = call.workload.sinks and call.has_gradients and not call.is_replaced
    lost = is_asked and isinstance(own, torch.nn.Parameter) and own.requires_grad and own.grad is None
    return "its sinks get no gradient, and q, k or v get one" if lost else ""


_NORM = re.compile(r"(q|k|query|key)_?(layer_?)?norm|norm_?(q|k|query|key)").fullmatch


def _learns(part: torch.nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in part.parameters())


def _leaves_out_norm(call: CallComparison, module: torch.nn.Module | None, used: set[tuple[type, str, str]]) -> str:
    """Say which norm of q or k no module at this place of layers uses, though what projects keys learns; "" for none.

    Some layers may have keys of others, or of a cache. used: parts that learn, by class, place and name.
    """
    if module is None or not call.has_gradients:
        return ""
    parts = dict(module.named_children())
    projects = [part for name, part in parts.items() if PROJECTS_KEYS(name) or "qkv" in name.lower()]
    for name, part in parts.items() if any(map(_learns, projects)) else ():
        learns = any(parameter.requires_grad for parameter in part.parameters())
        if _NORM(name.lower()) and learns and (*_position(call.module, module), name) not in used:
            return f"its module has {name}, and does not use it: its weights get no gradient, and q, k or v get one"
    return ""


def _listed(heads: tuple[int, ...] | None) -> str:
    return "-".join(map(str, heads or ()))


def _mixed(traits: Traits) -> str:
    """Say how heads share values in another order than keys, "" where they do not."""
    keys, values = traits.keys, traits.values
    is_other = keys and values and keys != values and len({*keys}) == len({*values})
    return f"its heads share keys as {_listed(keys)}, and values as {_listed(values)}" if is_other else ""


def _others(values: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield which have another value than most of the same kind, or than the first of two, and one of the others."""
    counts = Counter(value for value in values if value is not None)
    usual, times = counts.most_common(1)[0]
    if counts.total() > 2 and 2 * (counts.total() - times) > times:
        return
    yield from ((at, values.index(usual)) for at, value in enumerate(values) if value not in (None, usual))
