"""Whether a known defect of what computed a call explains what is wrong with it."""

from __future__ import annotations

from pytest_attn.backends.machine import Machine
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.models.call import AttentionCall


def known_defect_of(call: AttentionCall, comparison: Comparison, machine: Machine) -> str:
    """Say which known defects look like what is wrong in a call, "" where none does or nothing is wrong.

    A model's own call is computed by the backend that has the kernel, as far as that is known. The inputs are the model's, so
    a defect that shows with some inputs only may be it.
    """
    kernel = call.subject or _backend_of(call.kernel)
    if comparison.passed or kernel is None:
        return ""
    defects = kernel.defects_on(call.workload, machine, bool(call.gradients))
    found = [d for d in defects if d.tensors and d.kernel in call.kernel.lower() and d.explains(comparison, call.workload)]
    return "; ".join(f"{defect.issue}: {defect.summary}" for defect in found)


def _backend_of(kernel: str) -> Subject | None:
    registry, name = Registry(), kernel.replace("SDPA ", "sdpa_")
    try:
        return registry[name] if name else None
    except ValueError:  # no backend has this kernel by itself
        return None
