"""What layers that are built alike ask alike: a scale, a window, the order in which heads share keys; and who does not.

A call that asks for something else than it should is right for what it asks. But layers that are built alike ask alike, or
differ on purpose: from layer to layer, or half of them. One that differs from all others in what nobody means is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from pytest_attn.models.capture import AttentionCall
from pytest_attn.models.comparison import CallComparison, Traits
from pytest_attn.models.handed_masks import HIDES
from pytest_attn.models.interception import build_of
from pytest_attn.workloads.workload import Workload


def traits_of(call: AttentionCall) -> Traits:
    """Return what is read from the tensors of a call."""
    if call.workload.is_packed:
        return Traits()
    return Traits(_reach(call), _shares(call.k), _shares(call.v))


def _reach(call: AttentionCall) -> int | None:
    rows, keys = call.workload.q_len, call.workload.kv_len
    shown = call.mask
    if call.bias is not None:
        shown = (call.bias > HIDES) if shown is None else shown.to(call.bias.device) & (call.bias > HIDES)
    if shown is None or rows != keys:
        return None
    shown = shown.expand(-1, -1, rows, keys)
    counts = shown.any(-1) & ~shown.all(-1)  # rows of padding may show nothing, or all
    at = torch.arange(rows, device=shown.device)
    seen = shown.to(torch.uint8)
    first, last = seen.argmax(-1), keys - 1 - seen.flip(-1).argmax(-1)
    if bool(((last > at) & counts).any()):
        return None
    reach = torch.where(counts, at - first, -1).amax(-1)
    whole = torch.where(counts, at, -1).amax(-1) - torch.where(counts, first, keys).amin(-1)
    longest = int(reach.max())
    return longest if 0 <= longest < int(whole.max()) else None


def _shares(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return of each head the first with the same content, as `Traits` has it."""
    heads = tensor.unbind(1)
    some = tensor[:, :, [0, -1]].transpose(0, 1).flatten(1).contiguous().cpu().view(torch.uint8)  # tells most apart
    firsts: dict[bytes, list[int]] = {}
    found = []
    for at, part in enumerate(some):
        alike = firsts.setdefault(bytes(part.tolist()), [])
        found.append(next((one for one in alike if torch.equal(heads[one], heads[at])), at))
        alike += [at] if found[-1] == at else []
    return tuple(found) if 1 < len({*found}) < len(heads) else ()


def with_strangers(calls: Sequence[CallComparison], callers: Mapping[str, torch.nn.Module]) -> Iterator[CallComparison]:
    """Yield the calls, where one asks for something else than modules built alike with what is wrong about it."""
    alike: dict[object, list[CallComparison]] = {}
    for call in calls:
        if call.module in callers:
            alike.setdefault((build_of(callers[call.module]), call.workload.head_dim), []).append(call)
    strange = {order: words for group in alike.values() for order, words in _strange(group, callers[group[0].module])}
    for call in calls:
        yield replace(call, misled=call.misled or _mixed(call.traits) or strange.get(call.order, ""))


def _strange(group: list[CallComparison], module: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the orders of calls that ask for something else than the others of modules built alike, and what that is."""

    def said(at: int, what: str, sibling: int) -> tuple[int, str]:
        return group[at].order, f"{what} in {group[sibling].label}, which is the same kind of module"

    for at, (scale, sibling) in odd_scales([call.workload for call in group], module).items():
        own = group[at].workload.softmax_scale
        yield said(at, f"its scale is {own:.6g}, and {scale:.6g}", sibling)
    windows = [None if call.traits.reach is None else call.traits.reach + 1 for call in group]
    found = [window for window in {*windows} if window is not None]
    if len(found) == 2 and abs(found[0] - found[1]) == 1:
        for at, sibling in _others(windows):
            yield said(at, f"its window is {windows[at]} keys, and {windows[sibling]}", sibling)
    orders = [call.traits.keys for call in group]
    if len({*orders}) == 2 and len({len({*order}) for order in orders}) == 1:
        for at, sibling in _others(orders):
            yield said(at, f"its heads share keys as {_listed(orders[at])}, and as {_listed(orders[sibling])}", sibling)


def _listed(heads: tuple[int, ...]) -> str:
    return "-".join(map(str, heads))


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


#: how near to a sibling's a scale is that is taken for a mistake where only two layers say what is right
_ALIKE = (0.6, 1.6)


def odd_scales(workloads: Sequence[Workload], module: torch.nn.Module | None) -> dict[int, tuple[float, int]]:
    """Return which calls of modules built like this one have a scale of their own by mistake: the right one, and who has it.

    What is right: 1 / sqrt(head_dim), what the module's configuration says, or what at least two siblings and twice as many as
    have another agree on. Where siblings have three scales, or as many have one as the other, that is meant. So is a large
    difference, but where siblings agree on 1 / sqrt(head_dim), and in models of transformers, which have no such layers unless
    their configuration says so.
    """
    own = [w.softmax_scale for w in workloads]
    scales = Counter(own)
    usual, times = scales.most_common(1)[0]
    if len(scales) != 2 or 2 < len(own) == 2 * times:
        return {}
    default = workloads[0].replace(scale=None).softmax_scale
    agree = times > 1 and 2 * (len(own) - times) <= times
    right = [default, *_configured_scales(module), *([usual] if agree else [])]
    is_stock = _is_of_transformers(module)
    right = [scale for scale in right if any(_is_alike(scale, one) for one in scales)] or [1.0] * (is_stock and 1.0 in scales)
    # 1 says that q is scaled or normalized already
    counts_all = (agree and _is_alike(usual, default) and 1.0 not in scales) or is_stock
    found = {}
    for at, scale in enumerate(own):
        near = [one for one in right if counts_all or _ALIKE[0] < scale / one < _ALIKE[1]]
        if near and not any(_is_alike(scale, one) for one in right):
            found[at] = near[0], next(number for number, one in enumerate(own) if _is_alike(one, near[0]))
    return found


def _is_of_transformers(module: torch.nn.Module | None) -> bool:
    if getattr(getattr(module, "config", None), "scale_attn_by_inverse_layer_idx", False):
        return False
    return type(module).__module__.startswith("transformers.")


def _is_alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)


def _configured_scales(module: torch.nn.Module | None) -> list[float]:
    config = getattr(module, "config", None)
    scalar, multiplier = (getattr(config, name, None) for name in ("query_pre_attn_scalar", "attention_multiplier"))
    scales = [float(scalar) ** -0.5 if isinstance(scalar, int | float) and scalar > 0 else None, multiplier]
    return [float(scale) for scale in scales if isinstance(scale, int | float) and scale > 0]
