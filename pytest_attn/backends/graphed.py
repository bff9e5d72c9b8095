"""CUDA graphs around another backend: "NAME+graph" captures one call and replays it for every other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import no_collection, quiet
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.backends.variant import Variant
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

_WARM_UPS = 3


class Graphed(Variant):
    """A backend's forward call, captured on other data than it is judged on and replayed over poisoned outputs.

    A capture leaves out work on another stream, on the host, or with values read back. Such work shows: the result is that of
    the captured data, or the NaN that every replay must overwrite.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, "graph")

    def unavailable_because(self, machine: Machine) -> str | None:
        """CUDA only."""
        return super().unavailable_because(machine) or (None if machine.kind == "cuda" else "needs a CUDA device")

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """The forward pass only, and the inner backend's reasons."""
        return ["replays the forward pass only"] if backward else super().unsupported_because(workload, machine)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Capture at the first call; every call copies its data in, poisons the output, replays and copies it out."""
        kernel = self.inner.prepare(inputs, backward)
        captured: list[Capture] = []

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if not captured:
                captured.append(Capture(kernel, (q, k, v)))
            return captured[0].replay((q, k, v))

        return call


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Record what is launched meanwhile. A graph that Python's collector frees in between would spoil that.

    The current stream is then what it was, which torch sees to only where the capture succeeds.
    """
    import torch

    as_before = torch.cuda.stream(torch.cuda.current_stream())
    with quiet(), no_collection(), as_before, torch.cuda.graph(graph, stream=stream):
        yield


class Capture:
    """A graph of one call of a kernel, with tensors of its own for inputs and outputs."""

    #: how often it calls the kernel
    calls = _WARM_UPS + 1

    def __init__(self, kernel: AttentionFn, like: tuple[torch.Tensor, ...]) -> None:
        import torch

        self.inputs = [torch.zeros_like(t) for t in like]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                kernel(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph):
            self.output = kernel(*self.inputs)

    def replay(self, data: tuple[torch.Tensor, ...]) -> Any:
        """Return copies of the outputs for `data`."""
        for mine, given in zip(self.inputs, data, strict=True):
            mine.copy_(given)
        outputs = self.output if isinstance(self.output, tuple | list) else (self.output,)
        for output in outputs:
            output.fill_(math.nan)
        self.graph.replay()
        copies = tuple(output.clone() for output in outputs)
        return copies if isinstance(self.output, tuple | list) else copies[0]
