"""The calls of a work in CUDA graphs, whose replays are verified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_attn.backends.graphed import capturing
from pytest_attn.latency.device_graph import DeviceGraph, DeviceGraphError
from pytest_attn.latency.work import Work

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: bytes of padding that are kept alive after each captured call, so that the next call's workspace has another address (if it
#: has up to 1 MiB, from the allocator's small blocks): graphs of calls with one workspace differ by 1 %
_PADDING_BYTES = 512
#: seconds after which no more graphs are captured, if there are a few: a host that is slow to launch is slow to capture, too
_SECONDS, _FEWEST = 0.12, 3


def graphs_of(work: Work, calls: int, number: int, on_device: bool) -> list[Callable[[], object]]:
    """Capture up to `number` graphs of `calls` calls on different sets; none where one cannot be captured.

    What is returned replays a graph, as often as it is called. on_device: in the device's memory; raises DeviceGraphError if
    the calls can be captured, but not so.
    """
    import torch

    stream = torch.cuda.Stream(work.device)  # type: ignore[no-untyped-call]
    graphs: list[Callable[[], object]] = []
    begun = time.perf_counter()
    while len(graphs) < _FEWEST or (len(graphs) < number and time.perf_counter() - begun < _SECONDS):
        if (replay := _captured(work, calls, stream, on_device)) is None:
            return []
        graphs.append(replay)
    return graphs


def _captured(work: Work, calls: int, stream: torch.cuda.Stream, on_device: bool) -> Callable[[], object] | None:
    """Capture calls on the next sets in one CUDA graph; None where that cannot be done, or leaves something out.

    What a graph replays is looked at: its outputs are poisoned and its data changed before a replay. A backward pass runs on
    the stream of its forward pass, which therefore is the captured one.
    """
    import torch

    torch.cuda.synchronize(work.device)
    graph = _kept_graph() if on_device else torch.cuda.CUDAGraph()
    outputs: list[torch.Tensor] = []
    padding: list[torch.Tensor] = []  # until the capture is over
    try:
        stream.wait_stream(torch.cuda.current_stream(work.device))
        with torch.cuda.stream(stream):
            work.stage()()
            staged = [work.stage(replayed=True) for _ in range(calls)]
        torch.cuda.current_stream(work.device).wait_stream(stream)
        with capturing(graph, stream):
            for call in staged:
                outputs.append(work.result(call()))
                padding.append(torch.empty(_PADDING_BYTES, dtype=torch.uint8, device=work.device))
        executable = DeviceGraph(graph, work.device) if on_device else graph
        work.refresh()
        for output in outputs:
            output.fill_(math.nan)
        executable.replay()
        torch.cuda.synchronize(work.device)
        work.verify("replayed in a graph", *outputs)
    except DeviceGraphError:
        raise
    except Exception:  # a library may raise anything in a capture; what it does outside of one was verified already
        torch.cuda.synchronize(work.device)
        return None

    def replay(_kept: tuple[object, ...] = (outputs, staged)) -> None:
        executable.replay()

    return replay


def _kept_graph() -> torch.cuda.CUDAGraph:
    import torch

    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError as error:
        raise DeviceGraphError(f"torch {torch.__version__} keeps no graph that it captured; 2.8 does") from error
