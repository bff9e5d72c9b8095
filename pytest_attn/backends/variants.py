"""Backends that wrap another one and compute the same: compiled, or replayed from a CUDA graph."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import unlimited_recompiles
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, Compilation
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


#: what a variant says, and is asked, as its inner backend
_OF_THE_INNER = (
    *("library", "precision", "returns_lse", "known_defects", "capabilities", "needs", "full_graph", "is_approximate"),
    *("launches", "version", "pads_by_mask", "broken_because", "refusal_in", "dequantized", "precision_on", "workspace"),
    *("compiles", "makes_plans", "declared_refusals"),
)


class Variant(Backend):
    """All that a backend says about itself, under the name NAME+VARIANT; subclasses implement `prepare`."""

    def __init__(self, inner: Backend, variant: str) -> None:
        self.inner, self.kind = inner, variant
        self.name = f"{inner.name}+{variant}"
        for said in _OF_THE_INNER:
            setattr(self, said, getattr(inner, said))

    @property
    def is_contained(self) -> bool:
        return self.inner.is_contained

    def unavailable_because(self, machine: Machine) -> str | None:
        if self.kind not in self.inner.variants:
            return f"{self.inner.name} has no variant +{self.kind}"
        return self.inner.unavailable_because(machine)

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        return self.inner.unsupported_because(workload, machine, backward)


# -- +compile, +max_autotune -------------------------------------------------------------------------------------------------


class Compiled(Variant):
    """A backend's callable under torch.compile(dynamic=False), in one graph where the library allows it."""

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Compile the inner callable; compilation happens at its first call."""
        kernel = self.inner.prepare(inputs, backward)
        return compile_kernel(kernel, self.kind == "max_autotune", self.full_graph)


def compile_kernel(kernel: AttentionFn, max_autotune: bool = False, full_graph: bool = True) -> AttentionFn:
    """Return `kernel` compiled without CUDA graphs, whose outputs later calls would overwrite.

    The result carries `compilation`, a `Compilation` that its first call fills in.
    """
    import torch

    mode = "max-autotune-no-cudagraphs" if max_autotune else None
    compiled = torch.compile(kernel, fullgraph=full_graph, dynamic=False, mode=mode)
    compilation = Compilation()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with unlimited_recompiles():
            if compilation.seconds:
                return compiled(q, k, v)
            start, breaks = time.perf_counter(), _graph_breaks()
            out = compiled(q, k, v)
            compilation.graph_breaks += _graph_breaks() - breaks
            compilation.seconds = time.perf_counter() - start
            return out

    call.compilation = compilation  # type: ignore[attr-defined]
    return call


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


class Graphed(Variant):
    """A backend's forward call, captured on other data than it is judged on and replayed over poisoned outputs.

    A capture leaves out work on another stream, on the host, or with values read back. Such work shows: the result is that of
    the captured data, or the NaN that every replay must overwrite.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, "graph")

    def unavailable_because(self, machine: Machine) -> str | None:
        return super().unavailable_because(machine) or (None if machine.kind == "cuda" else "needs a CUDA device")

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        return ["replays the forward pass only"] if backward else super().unsupported_because(workload, machine)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Capture at the first call; every call copies its data in, poisons the output, replays and copies it out."""
        from pytest_attn.backends.streams import Capture

        kernel = self.inner.prepare(inputs, backward)
        captured: list[Capture] = []

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if not captured:
                captured.append(Capture(kernel, (q, k, v)))
            return captured[0].replay((q, k, v))

        return call
