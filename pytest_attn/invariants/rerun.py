"""The same call again gives the same bits, and waits for its inputs."""

import dataclasses
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pytest_attn.backends.streams import side_stream
from pytest_attn.invariants.invariant import Probe, Tensors, first_difference, invariant, prefixed
from pytest_attn.workloads.dtypes import mirrored, times
from pytest_attn.workloads.inputs import Inputs


def configurations() -> dict[str, str]:
    """Return the configuration in use of each of Triton's autotuned kernels, by the kernel's name; {} without Triton."""
    return {_name(kernel): str(kernel.best_config) for kernel in _tuning_themselves() if hasattr(kernel, "best_config")}


def forget_configurations() -> None:
    """Let each of these kernels tune itself anew, when it is next called."""
    for kernel in _tuning_themselves():
        kernel.cache.clear()


def _tuning_themselves() -> Iterator[Any]:
    autotuner = sys.modules.get("triton.runtime.autotuner")
    if autotuner is not None:
        base = autotuner.Autotuner
        references = _autotuned(base, sum(map(sys.getrefcount, _with_subclasses(base))))
        yield from filter(None, (reference() for reference in references))


@functools.lru_cache(maxsize=1)
def _autotuned(base: type, references: int) -> list[Callable[[], object]]:
    """Look for autotuned kernels among all objects, which takes a tenth of a second; return weak references.

    references: to their classes, of which each kernel is one, so that nobody looks again until there are more or fewer.
    """
    # by their types: some objects run code of their own when their class is looked up
    kernels = (thing for thing in gc.get_objects() if issubclass(type(thing), base))
    return [weakref.ref(kernel) for kernel in kernels]


def _with_subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = base.__subclasses__()
    yield from (base, *chain.from_iterable(map(_with_subclasses, subclasses)))


def changes(before: dict[str, str]) -> str:
    """Say which configurations are others now, "" where none is known to be."""
    _autotuned.cache_clear()
    now = configurations()
    found = (f"{name}: {before.get(name, 'none')}, now {config}" for name, config in now.items() if before.get(name) != config)
    return "; ".join(found)


def _name(kernel: object) -> str:
    function = getattr(kernel, "base_fn", None) or getattr(kernel, "fn", kernel)
    return str(getattr(function, "__name__", type(function).__name__))


_THOROUGH_RERUNS = 20
#: further calls that must agree bit for bit after a kernel has tuned itself
_SETTLED = 5
_SLEEP_CYCLES = 20_000_000  # about 10 ms
#: of the matrices that another stream multiplies meanwhile
_WIDTH = 2048


@invariant(
    "rerun",
    "the same call gives the same bits again; gradients, which may be summed in any order, the same within rounding",
    calls=3,
)
def rerun(probe: Probe) -> str:
    """A kernel is a function of its inputs, once it has tuned itself.

    Repeat the call; on CUDA also behind inputs that arrive late, and beside another stream's work.
    """
    tensors = probe.handed()
    is_cuda = probe.device.type == "cuda"
    repeats = _THOROUGH_RERUNS if probe.thorough else 1  # A of `state` is one more
    if changed := _changed_for_good(probe, tensors):
        return f"rerun 1 of {repeats} on the same tensors: {changed}"
    for number in range(2, repeats + 1):
        if changed := _changed(probe, probe.call(tensors)):
            return f"rerun {number} of {repeats} on the same tensors: {changed}"
    if not is_cuda:
        return ""
    late = _changed(probe, _behind_late_inputs(probe, tensors))
    if late:
        return f"with inputs that were written late, by work queued before the call: {late}"
    return prefixed("beside another stream's work", _changed(probe, beside_other_work(probe, tensors)))


def _changed_for_good(probe: Probe, tensors: Tensors) -> str:
    """Call once more; say what changed, but where a kernel has only tuned itself: that is kept as the probe's base."""
    probe.base  # noqa: B018 - called before the configurations are looked at
    before, found = configurations(), probe.call(tensors)
    changed = _changed(probe, found)
    if not changed or probe.misfit(found) or probe.misfit(probe.base):
        return changed
    which = changes(before)
    if not which or any(first_difference(probe.call(tensors), _exactly(found)) for _ in range(_SETTLED)):
        return changed
    told = f"the first call gave other bits than the {_SETTLED + 1} after it, as kernels do that tune themselves: {which}"
    probe.base, probe.note = found, told
    return ""


def _changed(probe: Probe, found: dict[str, Tensor]) -> str:
    """Compare a rerun: outputs bit for bit, gradients within rounding unless torch promises determinism."""
    return first_difference(found, _exactly(probe.base)) or probe.change(found)


def _exactly(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what has the same bits again: gradients may be summed in any order, unless torch promises determinism."""
    if torch.are_deterministic_algorithms_enabled():
        return results
    return {name: t for name, t in results.items() if not name.startswith("d")}


def _behind_late_inputs(probe: Probe, tensors: Tensors) -> dict[str, Tensor]:
    """Call the kernel while its inputs are still zeros: they are written by work that waits in the same, side stream."""
    late = tensors.map(torch.zeros_like)
    with side_stream(probe.device):
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        for name in ("q", "k", "v", "dout"):
            getattr(late, name).copy_(getattr(tensors, name))
        return probe.call(late)


def beside_other_work(probe: Probe, tensors: Tensors) -> dict[str, Tensor]:
    """Call the kernel while another stream multiplies matrices."""
    matrix = torch.ones(_WIDTH, _WIDTH, device=probe.device, dtype=tensors.dout.dtype)
    with side_stream(probe.device) as here:
        for _ in range(16):
            matrix @ matrix
        with torch.cuda.stream(here):
            return probe.call(tensors)


@invariant("state", "calls with A, B, A give A's result again; earlier results do not change; changed data is seen", calls=3)
def state(probe: Probe) -> str:
    """A kernel remembers neither values nor shapes, nor memory that it handed out.

    It runs last, so that the first inputs, A, come again after every other shape and option that was asked about.
    """
    base, tensors, other = probe.base, probe.handed(), other_values(probe.inputs)
    held = probe.begin(tensors)
    first = held.outputs
    if changed := first_difference(first, {name: base[name] for name in first}):
        return f"called again after other inputs and shapes: {changed}"
    of_other = probe.run(other)
    if changed := first_difference(held.outputs, first):
        return f"a result that is held while the kernel is called again, on other inputs: {changed}"
    if changed := probe.change(held.finish()):
        which = "the backward pass of a call, run" if probe.backward else "a result that is held, looked at"
        return f"{which} after another call: {changed}"
    with_others = probe.handed(other)
    for name in ("q", "k") if probe.workload.v_in_k else ("q", "v"):
        getattr(tensors, name).detach().copy_(getattr(with_others, name))
    changed = probe.change(probe.call(tensors), of_other, other)
    return prefixed("the same tensors with other values in them, against new tensors with these values", changed)


def other_values(inputs: Inputs) -> Inputs:
    """Return inputs of the same workload with q's elements in another order and v negated, with all of k where it is there."""
    if inputs.workload.v_in_k:
        k = times(inputs.k, -1)
        return dataclasses.replace(inputs, q=mirrored(inputs.q), k=k, v=k[..., : inputs.workload.v_head_dim])
    return dataclasses.replace(inputs, q=mirrored(inputs.q), v=times(inputs.v, -1))
