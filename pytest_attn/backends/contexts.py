"""What a library's code runs in: without its warnings, without Python's collector, with variables of its own."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def untraced() -> Iterator[None]:
    """Keep torch's compiler trace out of captured logs: hundreds of lines that say nothing of a kernel.

    pytest puts its own handlers on a logger that does not propagate, so it is silenced, unless TORCH_TRACE wants it.
    """
    trace = logging.getLogger("torch.__trace")
    before = trace.disabled
    trace.disabled = before or "TORCH_TRACE" not in os.environ
    try:
        yield
    finally:
        trace.disabled = before


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings of libraries from failing a run under -W error, and torch's compiler trace out of captured logs."""
    with untraced(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed, or captured in a graph."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while; what was there before comes back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
