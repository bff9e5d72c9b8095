"""Memory that the kernel does not own may hold anything."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.call import refusals, set_among
from pytest_attn.invariants.invariant import Probe, Tensors, invariant, on, prefixed
from pytest_attn.workloads.dtypes import filled, is_poison, poison_of
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Sequences
from pytest_attn.workloads.workload import sequence_lengths

#: Elements of NaN before and after each tensor: a multiple of any alignment that kernels ask for.
_BAND = 4096
_FREED_BLOCKS = 3
#: keys that kernels read at once, from a multiple of them on
_TILE = 128
#: What padding that a mask hides is filled with; its products with q and dout do not overflow float16.
_LARGE = 100.0


@invariant(
    "poison",
    "NaN around every tensor, beyond every length, in pages before every window and in fresh memory changes nothing",
    calls=1,
)
def poison(probe: Probe) -> str:
    """Results depend on nothing but the keys and values that a sequence has."""
    inputs, filled = _poisoned(probe)
    tensors = probe.handed(inputs)
    bands = [_Band(t) for t in (tensors.q, tensors.k, tensors.v, tensors.dout)]
    clean = probe.base
    places = f"with NaN around each tensor and in fresh memory{filled}"
    with _dirty_memory(probe):
        try:
            with on(places), refusals():
                found = probe.call(Tensors(*(band.inside for band in bands)))
        except RefusedError:  # of tensors that begin within a larger one
            places = f"with NaN in fresh memory{filled}"
            found = probe.call(tensors)
    written = {name: band.is_written for name, band in zip(("q", "k", "v", "dout"), bands, strict=True)}
    if outside := set_among(written):
        return f"the kernel wrote outside {outside[0]}, whose neighboring memory is no longer NaN"
    changed = probe.change(found, clean)
    if not changed:  # the plain call's memory may have held NaN as well
        are_nan = set_among({name: result.isnan().any() for name, result in found.items()})
        with_nan = {name: found[name] for name in are_nan}
        misfit = probe.misfit(with_nan) if with_nan else ""
        changed = f"{misfit}, and so it was in the plain call" if misfit else ""
    elif filled:
        changed += _if_multiplied_by_zero(probe)
    return prefixed(places, changed)


def _if_multiplied_by_zero(probe: Probe) -> str:
    """Say what to do where finite numbers in place of NaN change nothing, "" where they do."""
    try:
        with refusals():
            found = probe.call(probe.handed(_poisoned(probe, only_finite=True)[0]))
    except Exception:  # the user gets what was found before
        return ""
    said = f"; with {_LARGE:g} there nothing changes: 0 times NaN is NaN, so leave these keys out, or read their k and v as 0"
    return "" if probe.change(found) else said


def _poisoned(probe: Probe, only_finite: bool = False) -> tuple[Inputs, str]:
    """Fill keys and values that no sequence has; say with what."""
    inputs, places = probe.inputs, ""
    hides_by_mask = probe.subject.pads_by_mask(probe.workload)
    left = _pages_left_behind(inputs) if probe.is_short else None
    multiplies = probe.is_backend and (hides_by_mask or probe.subject.is_contained)  # a library may read larger tiles
    for unowned, is_finite, where in (
        (unowned_keys(inputs), inputs.page_table is None and hides_by_mask, "keys beyond the lengths"),
        (left, multiplies, "pages that lie wholly before every window, which a server gives to others"),
    ):
        if unowned is None or not bool(unowned.any()):
            continue
        value = (_LARGE if is_finite or only_finite else math.nan) if inputs.k.is_floating_point() else poison_of(inputs.k)
        k, v = (filled(t, unowned, value) for t in (inputs.k, inputs.v))
        inputs, places = dataclasses.replace(inputs, k=k, v=v), f"{places}, and {value:g} in {where}"
    return inputs, places


def _pages_left_behind(inputs: Inputs) -> Tensor | None:
    """Return True where pages hold keys that no row sees, each at least a tile before the first that one does; as k lies.

    A kernel reads whole tiles, and 0 * NaN is NaN. None of dense keys, which their callers own.
    """
    w, table, lengths = inputs.workload, inputs.page_table, inputs.kv_lens
    if table is None or lengths is None or w.plain_mask is None:
        return None
    pages, size = inputs.k.shape[:2]
    left = torch.zeros(pages, size, dtype=torch.bool, device=lengths.device)
    kept = torch.zeros_like(left)
    for batch, (rows, length) in enumerate(sequence_lengths(w)):
        seen = _seen_keys(inputs, batch, rows, length)
        number = math.ceil(length / size)
        first = max(0, int(seen[0]) - _TILE + 1) // size if len(seen) else number
        left[table[batch, :first].long()] = True
        kept[table[batch, first:number].long()] = True
    return (left & ~kept)[:, :, None, None]


def _seen_keys(inputs: Inputs, batch: int, rows: int, length: int) -> Tensor:
    """Return the numbers of the keys that any of a sequence's rows sees."""
    b, h, q, kv = Sequences(1, inputs.workload.heads, rows, length, inputs.device).indices()
    mask_mod = inputs.mask_mod(rows)
    assert mask_mod is not None
    return mask_mod(b + batch, h, q, kv).flatten(0, 2).any(0).nonzero()


def unowned_keys(inputs: Inputs) -> Tensor | None:
    """Return True where k and v (in their layout, last dimension 1) hold no sequence's key; None where all do."""
    w, lengths = inputs.workload, inputs.kv_lens
    if lengths is None:
        return None
    if inputs.page_table is None:
        return (torch.arange(w.kv_len, device=lengths.device) >= lengths[:, None])[:, None, :, None]
    assert w.kv_pages is not None
    pages, size = inputs.k.shape[:2]
    unowned = torch.ones(pages, size, dtype=torch.bool, device=lengths.device)
    for batch, length in enumerate(lengths.tolist()):
        at = torch.arange(length, device=lengths.device)
        unowned[inputs.page_table[batch, at // size].long(), at % size] = False
    return unowned[:, :, None, None]


class _Band:
    """A contiguous copy of a tensor, with a band of NaN on both sides, of 127 where the dtype has no NaN."""

    def __init__(self, tensor: Tensor) -> None:
        self.whole = tensor.new_full((tensor.numel() + 2 * _BAND,), poison_of(tensor))
        self.inside = self.whole[_BAND:-_BAND].view(tensor.shape)
        self.inside.copy_(tensor)

    @property
    def is_written(self) -> Tensor:
        """True where anything is no longer as it was, on its device."""
        return ~(is_poison(self.whole[:_BAND]).all() & is_poison(self.whole[-_BAND:]).all())


@contextmanager
def _dirty_memory(probe: Probe) -> Iterator[None]:
    """Leave NaN in memory of the sizes that results have, and let torch.empty fill what it gives with NaN.

    The latter would be a reason to compile again, and on CUDA the allocator gives the freed blocks back anyway.
    `torch.use_deterministic_algorithms` imports the compiler, which costs seconds, and tells it; so we set what that sets.
    """
    for result in probe.base.values():
        freed = [torch.full_like(result, math.nan) for _ in range(_FREED_BLOCKS)]
        del freed
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if probe.device.type != "cpu" or probe.is_compiled or before[0]:
        yield
        return
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        with quiet():  # of operations that have no deterministic way
            yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
