"""One call of a kernel on the inputs of a check: what it returns, what it changes, and what it refuses as late as here.

Tensors lie in memory as models, and awkward callers, hand them over. What a kernel writes into a cache is looked at, and so
are the switches of torch that it may turn and has to turn back, and earlier results that it may overwrite.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from random import SystemRandom

import torch
from torch import Tensor

from pytest_attn.backends.gradients import gradients_of, nodes_behind
from pytest_attn.backends.machine import wait
from pytest_attn.backends.raised import message_of
from pytest_attn.backends.subject import AttentionFn, RefusedError, Subject
from pytest_attn.correctness.contract import ContractError, EmptyRows, check_contract, plain
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.workloads.dtypes import beside, movable
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import WatchedCache, watching_caches
from pytest_attn.workloads.parameters import PARAMETERS

# -- what was written into a cache -------------------------------------------------------------------------------------


def fault_of_caches(watched: Sequence[WatchedCache]) -> str | None:
    """Say what is wrong with the cache that was handed out last, None where it is right."""
    if not watched:
        return (
            "the callable got the cached prefix and the new keys together, and did not split them:"
            " call cache = attn.split_cache(k, v) in it (without pytest pytest_attn.split_cache(inputs, k, v)), and pass its"
            " tensors to the kernel"
        )
    last = watched[-1]
    for name, before, after, now in zip(("k", "v"), last.before, last.after, last.now(), strict=True):
        if fault := _fault_of(name, last, before, after, now):
            return fault
    return None


def _fault_of(name: str, cache: WatchedCache, before: Tensor, after: Tensor, now: Tensor) -> str | None:
    is_wrong = ~_same_rows(now, after)
    if not bool(is_wrong.any()):
        return None
    new = cache.slots.slot[cache.slots.is_new]
    others = is_wrong.clone()
    others[new] = False
    if bool(others.any()):
        return _fault_elsewhere(name, cache, others, now, after[new])
    if not cache.appends:
        return f"the callable wrote new keys into {name}_cache, though the test said attn.split_cache(..., appends=False)"
    unwritten = int(_same_rows(now[new], before[new]).sum())
    if unwritten == len(new):
        return (
            f"the callable wrote none of the {len(new)} new keys into {name}_cache; for a kernel that leaves that to others,"
            " say attn.split_cache(k, v, appends=False)"
        )
    first = int(is_wrong[new].nonzero()[0])
    held = "what it held before" if bool(_same_rows(now[new], before[new])[first]) else "something else"
    if found := _same_rows(after[new], now[new][first]).nonzero().flatten().tolist():
        held = f"that of the new key {_key(cache, int(new[found[0]]))}"
    wrong = int(is_wrong[new].sum())
    return (
        f"slot {int(new[first])} of {name}_cache, where the new key {_key(cache, int(new[first]))} belongs, holds {held};"
        f" {wrong} of {len(new)} new keys are not as they were given"
    )


def _fault_elsewhere(name: str, cache: WatchedCache, others: Tensor, now: Tensor, new: Tensor) -> str:
    """Say of the first slot that was to stay as it is what it holds."""
    slot, count = int(others.nonzero()[0]), int(others.sum())
    held = "it holds none of the new keys now"
    if found := _same_rows(new, now[slot]).nonzero().flatten().tolist():
        held = f"it holds the new key {_key(cache, int(cache.slots.slot[cache.slots.is_new][found[0]]))}"
    return (
        f"the callable wrote to slot {slot} of {name}_cache, which is not one of the new keys' ({_key(cache, slot)}): {held};"
        f" {count} such {'slot has' if count == 1 else 'slots have'} changed"
    )


def _key(cache: WatchedCache, slot: int) -> str:
    """Name the key that a slot belongs to."""
    at = (cache.slots.slot == slot).nonzero().flatten().tolist()
    if not at:
        return "of no sequence"
    return f"{int(cache.slots.position[at[0]])} of batch entry {int(cache.slots.batch[at[0]])}"


def _same_rows(one: Tensor, other: Tensor) -> Tensor:
    """Return which rows of (rows, kv_heads, dim) are equal, NaN where NaN is."""
    return ((one == other) | (one.isnan() & other.isnan())).flatten(1).all(1)


# -- how tensors lie in memory -----------------------------------------------------------------------------------------


#: What a kernel raises that does not take some strides; some libraries assert.
_REFUSALS = (ValueError, NotImplementedError, RefusedError, TypeError, RuntimeError, AssertionError)


#: what a device says of a kernel that has run, and after which nothing runs any more
_ENDS_CONTEXT = (
    *("illegal memory access", "illegal address", "illegal instruction", "misaligned address", "device-side assert"),
    *("launch failure", "hardware stack error", "invalid program counter", "invalid device context"),
)


def is_cuda_error(error: Exception) -> bool:
    """Return whether an exception says, in CUDA's, HIP's or Triton's words, that a kernel ended the process's context."""
    said = message_of(error)
    return any(name in said for name in ("CUDA", "HIP")) and any(words in said for words in _ENDS_CONTEXT)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what a kernel raises that does not take some strides into RefusedError.

    A broken contract stays one, and the end of a device's context does not count as a refusal: the kernel has run.
    """
    try:
        yield
    except ContractError:
        raise
    except _REFUSALS as error:
        if is_cuda_error(error):
            raise
        raise RefusedError(message_of(error) or type(error).__name__) from error


def swapped(tensor: Tensor) -> Tensor:
    """Heads and rows lie in memory the other way round, as between "bhsd" and "bshd"."""
    other_way = tensor.transpose(-3, -2).clone(memory_format=torch.contiguous_format)  # a copy where one of both is 1, too
    return other_way.transpose(-3, -2)


def fused(tensor: Tensor) -> Tensor:
    """The middle slice of a tensor three times as wide, as q, k and v are of one projection."""
    return torch.cat([beside(tensor, 1), tensor, beside(tensor, -1)], -1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


@dataclass(frozen=True)
class StridePattern:
    """Strides of q, k, v and dout: views, as models hand them over, or contiguous."""

    views: frozenset[str]

    def of(self, name: str, tensor: Tensor, layout: str) -> Tensor:
        """Return a copy of the tensor that lies so."""
        if name not in self.views:
            return tensor.clone()
        return swapped(tensor) if layout == "bhsd" else fused(tensor)

    def describe(self, layout: str) -> str:
        """Say how q, k and v lie."""
        how = "transposed views of (batch, row, head, dim) tensors" if layout == "bhsd" else "slices of wider tensors"
        return f"q, k and v are {how}" if "k" in self.views else f"q and v are {how}, k is contiguous"


CONTIGUOUS = StridePattern(frozenset())
#: q, k and v are one projection's, seen by heads
PROJECTED = StridePattern(frozenset(("q", "k", "v", "dout")))
#: k has been written anew, as rotary embeddings and caches do
REWRITTEN_KEYS = StridePattern(frozenset(("q", "v", "dout")))


# -- results kept ------------------------------------------------------------------------------------------------------


#: bytes of a result from which its fingerprint is kept, and elements that are looked at together
_LARGE, _PART = 1 << 28, 1 << 24
#: SplitMix64's odd constant, as int64: consecutive multiples of it share no pattern
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


class KeptResult:
    """A result as it was. is_large: only its fingerprint is kept."""

    def __init__(self, tensor: Tensor, large: int | None = None) -> None:
        is_large = tensor.nbytes >= (_LARGE if large is None else large)
        self._print = fingerprint(tensor) if is_large else None
        self._copy = None if is_large else tensor.clone()
        self.is_large: bool = is_large

    def differs(self, tensor: Tensor) -> Tensor:
        """Return a flag, on the tensor's device: whether elements are others, as NaN always is; for a fingerprint, bits."""
        if self._copy is None:
            return torch.tensor(fingerprint(tensor) != self._print, device=tensor.device)
        return (tensor != self._copy).any()


#: elements of a result of which a glimpse is taken at least, and bytes of which it has one: a page of memory
_SPOTS, _PAGE = 64, 4096


@lru_cache
def _spots(size: int, nbytes: int, device: torch.device) -> Tensor:
    """Return where to look at results of so many elements, which no kernel knows."""
    chance = torch.Generator().manual_seed(SystemRandom().getrandbits(63))
    spots = max(_SPOTS, -(-nbytes // _PAGE)) if size else 0
    return (
        (torch.rand(spots, dtype=torch.float64, generator=chance).add_(torch.arange(spots)) * (size / max(1, spots)))
        .long()
        .to(device)
    )


def glimpse(result: Tensor) -> Tensor:
    """Return the bytes of some elements of a result, as they are now."""
    seen = movable(result.detach()).take(_spots(result.numel(), result.nbytes, result.device))
    return seen.view(torch.uint8)


#: results of one shape that are held, and their bytes at most
_HELD, _HELD_BYTES = 16, 1 << 26


class HeldResults:
    """Results of the last calls, by shape: memory that is still held is handed out once more only by a callable's doing."""

    def __init__(self) -> None:
        self._held: dict[object, deque[tuple[Tensor, Tensor]]] = defaultdict(lambda: deque(maxlen=_HELD))

    def add(self, out: Tensor) -> None:
        """Hold a result. Raises ContractError where it lies in the memory of an earlier one, and has changed that."""
        held = self._held[out.shape, out.dtype]
        for calls, (earlier, seen) in enumerate(reversed(held), 1):
            if earlier.data_ptr() == out.data_ptr() and out.numel() and not torch.equal(glimpse(earlier), seen):
                ring = "in its one buffer" if calls == 1 else f"in a ring of {calls} buffers"
                raise ContractError(
                    f"an earlier result has changed since it was returned: the callable writes each out {ring}, over that of"
                    f" {calls} call{'s' * (calls > 1)} ago; return memory that no later call writes to"
                )
        if out.nbytes * _HELD <= _HELD_BYTES:
            held.append((out.detach(), glimpse(out)))


def set_among(flags: Mapping[str, Tensor]) -> list[str]:
    """Return the names of those flags, of one boolean each, that are set: a device is waited for once, not for each."""
    found = torch.stack(list(flags.values())).tolist() if flags else []
    return [name for name, is_set in zip(flags, found, strict=True) if is_set]


def fingerprint(tensor: Tensor) -> int:
    """Return a sum of all elements' bits, each times an odd number of its own, modulo 2^64."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = start = 0
    for part in _parts(tensor.detach()):
        bits = part.reshape(-1).view(integer).long()
        weights = torch.arange(start + 1, start + 1 + len(bits), device=bits.device).mul_(_STEP)
        weights.bitwise_xor_(weights >> 29).bitwise_or_(1)
        total += int(bits.add_(1).mul_(weights).sum())
        start += len(bits)
    return total % (1 << 64)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield parts of a tensor that are small enough to be copied, in an order that its shape alone gives."""
    if tensor.numel() <= _PART or tensor.dim() == 0:
        yield tensor
        return
    axis = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for part in tensor.tensor_split(2, axis):
        yield from _parts(part)


# -- the call ----------------------------------------------------------------------------------------------------------


@contextmanager
def seeded(spec: CheckSpec) -> Iterator[None]:
    """Have torch's generators start anew for a kernel with dropout, and leave them as they were."""
    devices = [spec.device] if spec.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(spec.seed)
        yield


def call_kernel(
    kernel: AttentionFn,
    spec: CheckSpec,
    reference: Reference,
    pattern: StridePattern,
    optional: Collection[str] = (),
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Call the kernel on copies of the inputs, in its layout. optional: parameters on which out need not depend.

    Returns out, lse and gradients by name, in native layout, and by how much it changed each input that it changed.
    Raises ContractError for a result that cannot be compared.
    """
    __tracebackhide__ = True
    pristine = reference.called_with
    kept = spec.untouched(pristine)
    given, names = _handed(spec, pristine, kept, pattern), spec.results
    wanted = {name: t.requires_grad_() for name, t in given.items() if spec.backward and name in spec.leaves}
    empty_rows = EmptyRows(pristine, spec.declared.empty_rows)
    has_cache = spec.workload.cached is not None
    seed = seeded(spec) if spec.workload.dropout else nullcontext()
    gradients = nullcontext() if spec.backward else torch.no_grad()
    watching = watching_caches() if has_cache else nullcontext(())
    with seed, gradients, watching as caches, KeptSwitches(spec.device.type):
        result = kernel(*given.values())
    wait(spec.device)
    if others := {*map(type, given.values())} - {Tensor}:
        words = f"the callable made its input a {others.pop().__name__}, whose own code would run wherever it is read"
        raise ContractError(words)
    if has_cache and (fault := fault_of_caches(caches)):
        raise ContractError(fault, fault="new-keys-misplaced" if caches else "")
    handed_out = check_contract(result, names, reference, spec.workload, spec.layout)
    tensors = dict(zip(names, handed_out, strict=True))
    if spec.backward:
        dout = spec.in_layout(empty_rows.blanked(pristine.dout))
        wanted |= _found(spec, tensors["out"])
        drawn = {name for name, tensor in spec.parameters.items() if not tensor.requires_grad}
        with KeptSwitches(spec.device.type):
            tensors.update(_gradients(tensors["out"], wanted, pattern.of("dout", dout, spec.layout), drawn, optional))
        wait(spec.device)
    changes = changes_of(given, dict(zip("qkv", kept, strict=True)))
    laid_out = ("out", "dq", "dk", "dv")
    native = {name: spec.in_layout(t) if name in laid_out else t for name, t in tensors.items()}
    return empty_rows.forget(native), changes


def _handed(spec: CheckSpec, pristine: Inputs, kept: Sequence[Tensor], pattern: StridePattern) -> dict[str, Tensor]:
    """Return q, k and v as the kernel is given them. kept: copies of them."""
    if spec.workload.kv_pages is None:
        named = {name: pattern.of(name, tensor, spec.layout) for name, tensor in zip("qkv", kept, strict=True)}
    else:
        named = dict(zip("qkv", spec.handed(pristine), strict=True))
    if spec.workload.v_in_k:
        named["v"] = named["k"][..., : spec.workload.v_head_dim]
    return named


def _gradients(
    out: torch.Tensor, leaves: dict[str, torch.Tensor], dout: torch.Tensor, drawn: Set[str], optional: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield gradients. drawn: the leaves of which only the values were known."""
    follows = out.requires_grad and bool(leaves)
    if not follows and not leaves.keys().isdisjoint("qkv"):
        raise ContractError(
            "out carries no gradient; backward=True needs a callable that autograd can follow (no detach, no no_grad)"
        )
    grads = gradients_of([out], list(leaves.values()), [dout]) if follows else [None] * len(leaves)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None and name in optional:
            continue
        if grad is None:
            raise ContractError(
                f"d{name} is missing: out does not depend on {name}, as autograd sees it{_advice(name, name not in drawn)}"
            )
        grad = plain(f"d{name}", grad)
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
            raise ContractError(
                f"d{name} is a {grad.dtype} tensor of shape {tuple(grad.shape)}; expected {leaf.dtype} {tuple(leaf.shape)}"
            )
        yield f"d{name}", grad.to(out.device)  # what a kernel closes over may be a copy of a tensor elsewhere


def _found(spec: CheckSpec, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the leaves of parameters: where only the values are known, the tensor with these on which out depends."""
    found = {name: t if t.requires_grad else t.detach().requires_grad_() for name, t in spec.parameters.items()}
    sought = {name: t for name, t in spec.parameters.items() if not t.requires_grad}
    nodes = nodes_behind(out) if sought else ()
    for leaf in (one for node in nodes if isinstance(one := getattr(node, "variable", None), torch.Tensor)):
        for name, drawn in sought.items():
            alike = leaf.shape == drawn.shape and leaf.dtype == drawn.dtype
            if alike and torch.equal(leaf.detach().to(drawn.device), drawn):
                found[name] = leaf
    return found


def _advice(name: str, own: bool) -> str:
    """Say what a kernel has to close over for the gradient of a parameter. own: it is a leaf of the test's."""
    if name in "qkv":
        return ""
    tensor = PARAMETERS[name].tensor
    return f"; the callable must use {'attn.' + tensor if own else f'draw_inputs(...).{tensor}.requires_grad_()'} itself"


@contextmanager
def late_refusals_of(subject: Subject) -> Iterator[None]:
    """Turn what a backend knows as a refusal that only its compiler found out into RefusedError."""
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        if reason := subject.refusal_in(error):
            raise RefusedError(reason) from error
        raise


def changes_of(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return by how much at most each tensor is not what it was before; nothing of those that are."""
    changes, flags = {}, {}
    for name, tensor in now.items():
        flags[name] = (tensor.detach() != before[name].to(tensor.device)).any()  # or NaN in both
    for name in set_among(flags):
        is_now, was = now[name].detach().double(), before[name].to(now[name].device).double()
        differs = (is_now != was) & ~(is_now.isnan() & was.isnan())
        if differs.any():
            changes[name] = float((is_now - was)[differs].abs().max())
    return changes


def fault_of_change(changes: dict[str, float]) -> str:
    """Say which input a callable changed first, and by how much."""
    name, largest = next(iter(changes.items()))
    return f"the callable changed its input {name} in place (by up to {largest:.3g})"
