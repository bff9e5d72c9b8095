"""CUDA graphs whose launches lie in the device's memory.

A graph that the device itself could launch is uploaded there, wherever it is then launched from. What torch instantiates is
not, and how soon a short call follows the one before differs a little from process to process, as if the device read each
launch from the host's memory. docs/results/latency-h200.md has the figures.

torch makes the graph and keeps what it works on; the driver's own interface, which torch does not offer, instantiates it.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
_DEVICE_LAUNCH = 4
#: CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2


class DeviceGraphError(Exception):
    """The driver does not instantiate a graph so, torch does not keep one, or there is no driver."""


class DeviceGraph:
    """A captured graph, instantiated in the device's memory.

    graph: made with `keep_graph=True` (torch 2.8), whose tensors live as long as this. Raises DeviceGraphError for what only
    the host can launch: a graph with work of the host in it, say.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._executable = ctypes.c_void_p()
        self._graph, self._device, self._driver = graph, device, _driver()
        captured = ctypes.c_void_p(graph.raw_cuda_graph())
        self._ask("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), captured, ctypes.c_ulonglong(_DEVICE_LAUNCH))
        self._ask("cuGraphUpload", self._executable, self._stream())

    def replay(self) -> None:
        """Launch it on the stream that is then current. Unlike torch's, it draws no new random numbers."""
        self._ask("cuGraphLaunch", self._executable, self._stream())

    def __del__(self) -> None:
        if not self._executable or sys.is_finalizing():
            return
        mode = ctypes.c_int(_RELAXED)  # the collector may come by while something else is captured on this thread
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._driver.cuGraphExecDestroy(self._executable)
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _stream(self) -> ctypes.c_void_p:
        import torch

        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _ask(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises DeviceGraphError where there is none, or its answer is not CUDA_SUCCESS."""
        function = getattr(self._driver, name, None)
        if function is None:
            raise DeviceGraphError(f"{name}: this driver has no such function")
        if answer := function(*arguments):
            raise DeviceGraphError(f"{name}: CUDA error {answer}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise DeviceGraphError(f"no driver: {error}") from error
