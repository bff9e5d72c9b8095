"""Work on the streams of a device, and what a graph keeps of it.

What is made on another stream is read after the current one has waited for it: by `side_stream`, or `wait` of machine.py.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_attn.backends.contexts import no_collection, quiet
from pytest_attn.backends.subject import AttentionFn


def leave_memory(device: torch.device) -> None:
    """Give back to other processes what this one holds of a GPU's memory, and does not use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def side_stream(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.Stream]:
    """Work on another CUDA stream for a while: it waits for the current one at the start, which waits for it at the end.

    Yields the stream that was the current one. stream: by default a new one.
    """
    here = torch.cuda.current_stream(device)
    side = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            yield here
    finally:
        here.wait_stream(side)


_WARM_UPS = 3


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Record what is launched meanwhile. A graph that Python's collector frees in between would spoil that.

    The current stream is then what it was, which torch sees to only where the capture succeeds.
    """
    as_before = torch.cuda.stream(torch.cuda.current_stream())
    with quiet(), no_collection(), as_before, torch.cuda.graph(graph, stream=stream):
        yield


class Capture:
    """A graph of one call of a kernel, with tensors of its own for inputs and outputs."""

    #: how often it calls the kernel
    calls = _WARM_UPS + 1

    def __init__(self, kernel: AttentionFn, like: tuple[torch.Tensor, ...]) -> None:
        self.inputs = [torch.zeros_like(t) for t in like]
        with side_stream(like[0].device):
            for _ in range(_WARM_UPS):
                kernel(*self.inputs)
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
