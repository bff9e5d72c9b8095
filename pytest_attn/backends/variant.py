"""A backend that wraps another one and computes the same."""

from __future__ import annotations

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


class Variant(Backend):
    """All that a backend says about itself, under the name NAME+VARIANT; subclasses implement `prepare`."""

    def __init__(self, inner: Backend, variant: str) -> None:
        self.inner, self.kind = inner, variant
        self.name = f"{inner.name}+{variant}"
        self.library, self.precision = inner.library, inner.precision
        self.returns_lse, self.known_defects = inner.returns_lse, inner.known_defects
        self.capabilities, self.needs, self.full_graph = inner.capabilities, inner.needs, inner.full_graph
        self.is_approximate, self.launches = inner.is_approximate, inner.launches

    def version(self) -> str:
        """The inner backend's."""
        return self.inner.version()

    def pads_by_mask(self, workload: Workload) -> bool:
        """As the inner backend does."""
        return self.inner.pads_by_mask(workload)

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where the inner backend does, or has no such variant."""
        if self.kind not in self.inner.variants:
            return f"{self.inner.name} has no variant +{self.kind}"
        return self.inner.unavailable_because(machine)

    def broken_because(self) -> str | None:
        """The inner backend's reason."""
        return self.inner.broken_because()

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """The inner backend's reasons."""
        return self.inner.unsupported_because(workload, machine, backward)

    def refusal_in(self, error: Exception) -> str | None:
        """The inner backend's."""
        return self.inner.refusal_in(error)

    def dequantized(self, inputs: Inputs) -> Inputs:
        """The inner backend's."""
        return self.inner.dequantized(inputs)

    def precision_on(self, kind: str) -> str | Precision:
        """The inner backend's profile."""
        return self.inner.precision_on(kind)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The inner backend's estimate."""
        return self.inner.workspace(workload, backward)
