"""Profile a subject on the inputs that it was judged on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.profiling.ceilings import ceilings_of
from pytest_attn.profiling.profiler import Profile, profile_call
from pytest_attn.workloads.arrangement import copies_of
from pytest_attn.workloads.inputs import draw_inputs

if TYPE_CHECKING:
    import torch

_WARM_UPS = 2


def profile_subject(subject: Subject, spec: CheckSpec, with_ceilings: bool = True) -> list[Profile]:
    """Return a profile of the forward pass, as in inference, and with spec.backward one of the backward pass.

    with_ceilings: measure the device's ceilings, once per run, for the share of the roofline.
    """
    spec = spec.for_subject(subject)
    inputs = draw_inputs(spec.workload, spec.inputs[0], spec.seed, spec.device)
    tensors = list(spec.handed(inputs))
    ceilings = ceilings_of(spec.device, spec.workload.out_dtype) if with_ceilings else None
    with quiet(), current(spec.device):
        forward = _forward_of(subject.prepare_timed(inputs), tensors)
        for _ in range(_WARM_UPS):
            forward()
        profiles = [profile_call(forward, spec.device, spec.workload, "forward", ceilings)]
        if spec.backward:
            kernel, dout = subject.prepare_timed(inputs, backward=True), spec.in_layout(inputs.dout)
            for _ in range(_WARM_UPS):
                _backward_of(kernel, tensors, dout)()
            backward = _backward_of(kernel, tensors, dout)
            profiles.append(profile_call(backward, spec.device, spec.workload, "backward", ceilings))
    return profiles


def _forward_of(kernel: AttentionFn, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return a call without gradients, of tensors of its own: some kernels change theirs."""
    import torch

    own = copies_of(tensors)

    def forward() -> object:
        with torch.no_grad():
            return kernel(*own)

    return forward


def _backward_of(kernel: AttentionFn, tensors: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], object]:
    """Run the forward pass and return its backward pass, which may run once: compiled ones give their buffers away."""
    import torch

    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = kernel(*leaves)
    out = out[0] if isinstance(out, tuple | list) else out
    return lambda: torch.autograd.grad(out, leaves, dout)
