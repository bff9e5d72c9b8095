"""A CUDA graph of the kernel, replayed on other data."""

from __future__ import annotations

from pytest_attn.backends.graphed import Capture
from pytest_attn.invariants.invariant import Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe
from pytest_attn.invariants.state import other_values


class Graph(Invariant):
    """A graph keeps what was launched: what a kernel does on the host, or on a stream of its own, is left out.

    A capture that fails may leave a library in a state of its own, so only the thorough set asks.
    """

    name = "graph"
    summary = "a CUDA graph of the kernel, replayed on other data over outputs of NaN, gives what a call gives"
    calls = 2 + Capture.calls
    thorough = True

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Needs CUDA, and a forward pass alone."""
        if probe.backward:
            return "replays the forward pass only"
        return None if probe.device.type == "cuda" else "needs a CUDA device"

    def run(self, probe: Probe) -> str:
        """Capture the kernel on zeros, then replay it on other values."""
        import torch

        other, like = other_values(probe.inputs), probe.handed()
        expected = probe.run(other)
        probe.count.calls += Capture.calls
        try:
            with probe.calling(), torch.no_grad():
                capture = Capture(probe.kernel, (like.q, like.k, like.v))
        except Exception as error:  # whatever a library raises where it may not wait for the device, or allocate
            if probe.device.type == "cuda":
                torch.cuda.synchronize(probe.device)  # raises where the kernel lost the context
            raise NotApplicable(f"cannot be captured: {str(error).partition(chr(10))[0] or type(error).__name__}") from error
        replayed = probe.with_kernel(lambda q, k, v: capture.replay((q, k, v))).run(other)
        changed = probe.change(replayed, expected, other)
        return f"replayed in a CUDA graph on other values than it was captured on: {changed}" if changed else ""
