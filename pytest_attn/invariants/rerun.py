"""The same call again gives the same bits, and waits for its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.invariants.call import Tensors
from pytest_attn.invariants.difference import first_difference
from pytest_attn.invariants.invariant import Invariant
from pytest_attn.invariants.probe import Probe
from pytest_attn.invariants.tuned import changes, configurations

if TYPE_CHECKING:
    from torch import Tensor

_RERUNS, _THOROUGH_RERUNS = 2, 20
#: further calls that must agree bit for bit after a kernel has tuned itself
_SETTLED = 5
_SLEEP_CYCLES = 20_000_000  # about 10 ms


class Rerun(Invariant):
    """A kernel is a function of its inputs, once it has tuned itself."""

    name = "rerun"
    summary = "the same call gives the same bits again; gradients, which may be summed in any order, the same within rounding"
    calls = _RERUNS + 1

    def run(self, probe: Probe) -> str:
        """Repeat the call; on CUDA also behind inputs that arrive late, and beside another stream's work."""
        tensors = probe.handed()
        is_cuda = probe.device.type == "cuda"
        repeats = _THOROUGH_RERUNS if probe.thorough else 1 if is_cuda else _RERUNS
        if changed := self._changed_for_good(probe, tensors):
            return f"rerun 1 of {repeats} on the same tensors: {changed}"
        for number in range(2, repeats + 1):
            if changed := self._changed(probe, probe.call(tensors)):
                return f"rerun {number} of {repeats} on the same tensors: {changed}"
        return self._beside_streams(probe, tensors) if is_cuda else ""

    def _changed_for_good(self, probe: Probe, tensors: Tensors) -> str:
        """Call once more; say what changed, but where a kernel has only tuned itself: that is kept as the probe's base."""
        probe.base  # noqa: B018 - called before the configurations are looked at
        before, found = configurations(), probe.call(tensors)
        changed = self._changed(probe, found)
        if not changed or probe.misfit(found) or probe.misfit(probe.base):
            return changed
        which = changes(before)
        if not which or any(first_difference(probe.call(tensors), _exactly(found)) for _ in range(_SETTLED)):
            return changed
        told = f"the first call gave other bits than the {_SETTLED + 1} after it, as kernels do that tune themselves: {which}"
        probe.settle(found, told)
        return ""

    def _beside_streams(self, probe: Probe, tensors: Tensors) -> str:
        if changed := self._changed(probe, _behind_late_inputs(probe, tensors)):
            return f"with inputs that were written late, by work queued before the call: {changed}"
        if changed := self._changed(probe, _beside_other_work(probe, tensors)):
            return f"beside another stream's work: {changed}"
        return ""

    def _changed(self, probe: Probe, found: dict[str, Tensor]) -> str:
        """Compare a rerun: outputs bit for bit, gradients within rounding unless torch promises determinism."""
        return first_difference(found, _exactly(probe.base)) or probe.change(found)


def _exactly(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what has the same bits again: gradients may be summed in any order, unless torch promises determinism."""
    import torch

    if torch.are_deterministic_algorithms_enabled():
        return results
    return {name: t for name, t in results.items() if not name.startswith("d")}


def _behind_late_inputs(probe: Probe, tensors: Tensors) -> dict[str, Tensor]:
    """Call the kernel while its inputs are still zeros: they are written by work that waits in the same, side stream."""
    import torch

    late = tensors.map(torch.zeros_like)
    stream = torch.cuda.Stream(probe.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(probe.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        for name in ("q", "k", "v", "dout"):
            getattr(late, name).copy_(getattr(tensors, name))
        return probe.call(late)


def _beside_other_work(probe: Probe, tensors: Tensors) -> dict[str, Tensor]:
    """Call the kernel while another stream multiplies matrices."""
    import torch

    other = torch.cuda.Stream(probe.device)  # type: ignore[no-untyped-call]
    matrix = torch.ones(2048, 2048, device=probe.device, dtype=tensors.dout.dtype)
    other.wait_stream(torch.cuda.current_stream(probe.device))
    with torch.cuda.stream(other):
        for _ in range(16):
            matrix @ matrix
    return probe.call(tensors)
