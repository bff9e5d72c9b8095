"""The calls of a work in CUDA graphs: what a graph replays is verified, and something else is put between two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_attn.backends.graphed import capturing
from pytest_attn.latency.work import Work

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: launches of a graph that takes up room while the next are captured: the driver puts graphs side by side, and on where they
#: lie depends how soon a launch follows the one before (0.15 us of cuDNN's 8, alike in 4 to 11 graphs in a row)
_SPACING_LAUNCHES = 800


def graphs_of(work: Work, calls: int, number: int) -> list[Callable[[], object]]:
    """Capture graphs of `calls` calls on different sets, each in another place; none where one cannot be captured.

    What is returned replays a graph, as often as it is called.
    """
    import torch

    stream = torch.cuda.Stream(work.device)  # type: ignore[no-untyped-call]
    graphs: list[Callable[[], object]] = []
    spacers = []
    for _ in range(number):
        if graphs:
            spacers.append(_spacer(work.device, stream))
        if (replay := _captured(work, calls, stream)) is None:
            return []
        graphs.append(replay)
    return graphs


def _captured(work: Work, calls: int, stream: torch.cuda.Stream) -> Callable[[], object] | None:
    """Capture calls on the next sets in one CUDA graph; None where that cannot be done, or leaves something out.

    What a graph replays is looked at: its outputs are poisoned and its data changed before a replay. A backward pass runs on
    the stream of its forward pass, which therefore is the captured one.
    """
    import torch

    torch.cuda.synchronize(work.device)
    graph = torch.cuda.CUDAGraph()
    outputs: list[torch.Tensor] = []
    try:
        stream.wait_stream(torch.cuda.current_stream(work.device))
        with torch.cuda.stream(stream):
            work.stage()()
            staged = [work.stage(replayed=True) for _ in range(calls)]
        torch.cuda.current_stream(work.device).wait_stream(stream)
        with capturing(graph, stream):
            outputs.extend(work.result(call()) for call in staged)
        work.refresh()
        for output in outputs:
            output.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize(work.device)
        work.verify("replayed in a graph", *outputs)
    except Exception:  # a library may raise anything in a capture; what it does outside of one was verified already
        torch.cuda.synchronize(work.device)
        return None

    def replay(_kept: tuple[object, ...] = (outputs, staged)) -> None:
        graph.replay()

    return replay


def _spacer(device: torch.device, stream: torch.cuda.Stream) -> object:
    """Return a graph that is never replayed; None where there is no room for it, which is no reason not to time a kernel."""
    import torch

    try:
        graph, flag = torch.cuda.CUDAGraph(), torch.empty(64, device=device)
        with capturing(graph, stream):
            for _ in range(_SPACING_LAUNCHES):
                flag.zero_()
    except Exception:  # whatever a capture raises: see _captured
        torch.cuda.synchronize(device)
        return None
    return graph, flag
