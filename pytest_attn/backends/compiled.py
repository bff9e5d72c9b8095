"""torch.compile around another backend: "NAME+compile" and "NAME+max_autotune"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, Kernel
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class Compiled(Backend):
    """A backend's callable under torch.compile(fullgraph=True, dynamic=False)."""

    def __init__(self, inner: Backend, variant: str) -> None:
        self.inner, self.mode = inner, variant
        self.name = f"{inner.name}+{variant}"
        self.library, self.precision = inner.library, inner.precision
        self.returns_lse, self.known_defects = inner.returns_lse, inner.known_defects

    def version(self) -> str:
        """The inner backend's."""
        return self.inner.version()

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where the inner backend does, or has no such variant."""
        if self.mode not in self.inner.variants:
            return f"{self.inner.name} has no variant +{self.mode}"
        return self.inner.unavailable_because(machine)

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """The inner backend's reasons."""
        return self.inner.unsupported_because(workload, machine, backward)

    def precision_on(self, kind: str) -> str:
        """The inner backend's profile."""
        return self.inner.precision_on(kind)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The inner backend's estimate."""
        return self.inner.workspace(workload, backward)

    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Compile the inner callable; compilation happens at its first call."""
        return compile_kernel(self.inner.prepare(inputs, backward), self.mode == "max_autotune")


def compile_kernel(kernel: Kernel, max_autotune: bool = False) -> Kernel:
    """Return `kernel` compiled without graph breaks and without CUDA graphs, whose outputs later calls would overwrite."""
    import torch

    mode = "max-autotune-no-cudagraphs" if max_autotune else None
    compiled = torch.compile(kernel, fullgraph=True, dynamic=False, mode=mode)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with unlimited_recompiles():
            return compiled(q, k, v)

    return call


@contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Lift dynamo's limit of eight compilations per function: each workload is a legitimate one."""
    import torch._dynamo.config as config

    known = [name for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    with config.patch(dict.fromkeys(known, 1 << 30)):
        yield
