"""NVML for a few questions about the whole machine, without torch; latency/nvml.py watches one GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """Hand out the module pynvml, initialized; raises whatever is raised without a package, a driver or a permission."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package pynvml, which has the same module, warns that it is deprecated
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def text_of(said: str | bytes) -> str:
    """Return what NVML says as text; old versions of pynvml return bytes."""
    return said.decode() if isinstance(said, bytes) else str(said)
