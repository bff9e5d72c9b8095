"""Profile a callable or a backend on the inputs that it was judged on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.correctness.question import Question, in_layout
from pytest_attn.profiling.ceilings import ceilings_of
from pytest_attn.profiling.profiler import Profile, profile_call
from pytest_attn.workloads.inputs import draw_inputs

if TYPE_CHECKING:
    import torch

_WARM_UPS = 2


def profile_subject(subject: Callable[..., Any] | Backend, question: Question, with_ceilings: bool = True) -> list[Profile]:
    """Return a profile of the forward pass, as in inference, and with question.backward one of the backward pass.

    with_ceilings: measure the device's ceilings, once per run, for the share of the roofline.
    """
    inputs = draw_inputs(question.workload, question.inputs[0], question.seed, question.device)
    tensors = [in_layout(inputs.q, question), *(in_layout(t, question, is_kv=True) for t in (inputs.k, inputs.v))]
    if isinstance(subject, Backend):
        tensors = [inputs.q, inputs.k, inputs.v]
    ceilings = ceilings_of(question.device, question.workload.dtype) if with_ceilings else None
    with quiet(), current(question.device):
        kernel = subject.prepare(inputs) if isinstance(subject, Backend) else subject
        forward = _forward_of(kernel, tensors)
        for _ in range(_WARM_UPS):
            forward()
        profiles = [profile_call(forward, question.device, question.workload, "forward", ceilings)]
        if question.backward:
            kernel = subject.prepare(inputs, backward=True) if isinstance(subject, Backend) else subject
            dout = inputs.dout if isinstance(subject, Backend) else in_layout(inputs.dout, question)
            for _ in range(_WARM_UPS):
                _backward_of(kernel, tensors, dout)()
            backward = _backward_of(kernel, tensors, dout)
            profiles.append(profile_call(backward, question.device, question.workload, "backward", ceilings))
    return profiles


def _forward_of(kernel: Callable[..., Any], tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return a call without gradients, of tensors of its own: some kernels change theirs."""
    import torch

    own = [t.clone() for t in tensors]

    def forward() -> object:
        with torch.no_grad():
            return kernel(*own)

    return forward


def _backward_of(kernel: Callable[..., Any], tensors: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], object]:
    """Run the forward pass and return its backward pass, which may run once: compiled ones give their buffers away."""
    import torch

    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = kernel(*leaves)
    out = out[0] if isinstance(out, tuple | list) else out
    return lambda: torch.autograd.grad(out, leaves, dout)
