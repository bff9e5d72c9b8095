"""Demands of the runtime around a kernel: CUDA graphs, the current device, and torch.library."""

from typing import Any

import torch

from pytest_attn.backends.streams import Capture
from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.call import refusals
from pytest_attn.invariants.invariant import CUDA, OPERATORS, Need, NotApplicable, Probe, invariant, prefixed
from pytest_attn.invariants.rerun import other_values


@invariant(
    "graph",
    "a CUDA graph of the kernel, replayed on other data over outputs of NaN, gives the result of a call",
    calls=2 + Capture.calls,
    needs=(Need(lambda probe: not probe.backward, "replays the forward pass only"), CUDA),
    thorough=True,
)
def graph(probe: Probe) -> str:
    """A graph keeps what was launched: what a kernel does on the host, or on a stream of its own, is left out.

    A capture that fails may leave a library in a state of its own, so only the thorough set asks.
    """
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
    return prefixed("replayed in a CUDA graph on other values than it was captured on", changed)


@invariant(
    "device",
    "tensors on a GPU that is not the current one give the same result",
    calls=1,
    needs=(Need(lambda probe: _second_to(probe.device) is not None, "needs a second CUDA device"),),
    thorough=True,
)
def device(probe: Probe) -> str:
    """A kernel that is launched on the current device, whatever its tensors' device, reads memory of another one.

    It may end the CUDA context of the process, so only the thorough set asks.
    """
    second = _second_to(probe.device)
    assert second is not None
    there = probe.on_device(second)
    try:
        with refusals():
            found = there.call(there.handed())
    except RefusedError as error:  # a callable may close over tensors of the first device
        raise NotApplicable(f"refused in its own words: {error}") from error
    changed = probe.change({name: tensor.to(probe.device) for name, tensor in found.items()})
    return prefixed(f"tensors on {second}, while {probe.device} is the current device", changed)


def _second_to(device: torch.device) -> torch.device | None:
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    return torch.device("cuda", ((device.index or 0) + 1) % count) if count > 1 else None


@invariant(
    "opcheck",
    "torch.library.opcheck passes, if the callable is a registered operator",
    calls=4,
    needs=(Need(lambda probe: isinstance(probe.subject.user_function, OPERATORS), "the kernel is not a registered operator"),),
)
def opcheck(probe: Probe) -> str:
    """A registered operator has a right schema, fake tensors, and autograd that tracing can follow."""
    tensors = probe.handed()
    asked = probe.spec.leaves if probe.backward else ()
    given = tuple(getattr(tensors, name).requires_grad_(name in asked) for name in "qkv")
    operator: Any = probe.subject.user_function
    probe.count.calls += opcheck.calls
    with probe.calling():
        said = torch.library.opcheck(operator, given, raise_exception=False)
    failed = {name: words for name, words in said.items() if words != "SUCCESS"}
    return "; ".join(f"{name}: {str(words).splitlines()[0]}" for name, words in failed.items())
