"""Profile a callable or a backend on the inputs that it was judged on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.library import quiet
from pytest_attn.correctness.check import Question, in_layout
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
    import torch

    inputs = draw_inputs(question.workload, question.inputs[0], question.seed, question.device)
    if isinstance(subject, Backend):
        with quiet():
            kernel: Callable[..., Any] = subject.prepare(inputs, question.backward)
        tensors = [inputs.q, inputs.k, inputs.v]
        dout = inputs.dout
    else:
        kernel = subject
        tensors = [in_layout(inputs.q, question), *(in_layout(t, question, is_kv=True) for t in (inputs.k, inputs.v))]
        dout = in_layout(inputs.dout, question)
    ceilings = ceilings_of(question.device, question.workload.dtype) if with_ceilings else None

    def forward() -> object:
        with torch.no_grad():
            return kernel(*tensors)

    with quiet():
        for _ in range(_WARM_UPS):
            forward()
        profiles = [profile_call(forward, question.device, question.workload, "forward", ceilings)]
        if question.backward:
            for _ in range(_WARM_UPS):
                _backward_of(kernel, tensors, dout)()
            backward = _backward_of(kernel, tensors, dout)
            profiles.append(profile_call(backward, question.device, question.workload, "backward", ceilings))
    return profiles


def _backward_of(kernel: Callable[..., Any], tensors: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], object]:
    """Run the forward pass and return its backward pass, which may run once: compiled ones give their buffers away."""
    import torch

    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = kernel(*leaves)
    out = out[0] if isinstance(out, tuple | list) else out
    return lambda: torch.autograd.grad(out, leaves, dout)
