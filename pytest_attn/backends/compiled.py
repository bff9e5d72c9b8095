"""torch.compile around another backend: "NAME+compile" and "NAME+max_autotune"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.subject import AttentionFn
from pytest_attn.backends.variant import Variant
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch


@dataclass
class Compilation:
    """What compiling one callable took: seconds of its first call, which are never part of a latency, and graph breaks."""

    seconds: float = 0.0
    graph_breaks: int = 0


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
            compilation.graph_breaks = _graph_breaks() - breaks
            compilation.seconds = time.perf_counter() - start
            return out

    call.compilation = compilation  # type: ignore[attr-defined]
    return call


def compilation_of(kernel: AttentionFn) -> Compilation | None:
    """Return what compiling `kernel` took, None where it was not compiled."""
    return getattr(kernel, "compilation", None)


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


@contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Lift dynamo's limit of eight compilations per function: each workload is a legitimate one."""
    import torch._dynamo.config as config

    known = [name for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    with config.patch(dict.fromkeys(known, 1 << 30)):
        yield
