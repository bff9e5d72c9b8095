"""Kernels of this package as backends, and the plain honest one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.mutants.honest.kernel import Kernel
from pytest_attn.workloads.cached import appended
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

HONEST_NAME = "honest"


class KernelBackend(Backend):
    """A kernel of this package as a backend. It keeps its kernel, and with it what that keeps from call to call."""

    library = "pytest_attn"
    needs = "any device"

    def __init__(self, name: str, kernel: Kernel, precision: str = "flash", returns_lse: bool = True) -> None:
        self.name, self.kernel, self.precision, self.returns_lse = name, kernel, precision, returns_lse

    def version(self) -> str:
        """It has none of its own."""
        return "-"

    def pads_by_mask(self, workload: Workload) -> bool:
        """It reads what the lengths say, and nothing beyond."""
        del workload
        return False

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Close over the inputs."""

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out, lse = self.kernel(inputs, q, *appended(inputs, k, v))
            return (out, lse) if self.returns_lse else out

        return call


def honest_backend() -> KernelBackend:
    """Return a new backend of the kernel without a fault, which every test must let pass."""
    return KernelBackend(HONEST_NAME, Kernel())
