"""Growth: what a kernel holds more of after each round of the same calls."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pytest_attn.backends.machine import wait

#: rounds after which is looked: each time as many again, as a list has spare places, and until what is bounded is full
LOOKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
#: bytes, microseconds, or calls of functions, that are the least growth of a round; and that since the last look, as a part of
#: that before, which is 2 where each call adds as much, a little less for a list, and less where a bound was reached
_LEAST, _FASTER = 8, 1.25
#: rounds from which on time is compared: the least of many rounds is hardly disturbed, and what warms up is warm
TIMED_FROM = 16
#: what few calls show as well, as no bound is so large
_TIME = "microseconds of the host in a round"
_LARGE = ("bytes of tensors", "bytes allocated", "bytes reserved")
#: folders whose own objects are none of a kernel's; of Python's standard library, but not of what is installed within
_NOT_ITS_OWN = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
#: Python keeps names that were looked up
_CACHES_OF_PYTHON = [getattr(sys, name) for name in ("_clear_type_cache", "_clear_internal_caches") if hasattr(sys, name)]


class Growth:
    """What there is at each look, of what has grown since each look before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._series: dict[str, list[int]] = {}
        self._looks = 0
        self._calls = 0
        self._microseconds: list[int] = []  # of each round since the last look
        self._made_before: list[weakref.ref[Tensor]] = []

    def begin(self) -> None:
        """Begin to look: tensors that are there now may grow in place, too."""
        self._made_before = [weakref.ref(one) for one in _tensors_of(gc.get_objects())]
        self._microseconds.clear()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Take the time that the calling thread computes in the round within."""
        began = time.thread_time_ns()
        yield
        self._microseconds.append((time.thread_time_ns() - began) // 1000)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the functions of Python that are called in the round within."""
        self._calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            self._calls += event == "call"

        is_free = sys.getprofile() is None
        if is_free:
            sys.setprofile(count)
        try:
            yield
        finally:
            if is_free:
                sys.setprofile(None)

    def look(self) -> None:
        """Take how much there is now. What was there in all looks before and did not grow is forgotten."""
        wait(self._device)
        for clear in _CACHES_OF_PYTHON:
            clear()
        gc.collect()
        now = self._now()
        if self._looks == 1:  # what was not there yet
            self._series = {name: [0] for name in now} | self._series
        if not self._looks:
            self._series = {name: [value] for name, value in now.items()}
        else:
            least = _LEAST * (LOOKS[self._looks] - LOOKS[self._looks - 1])
            kept = {name: [*was, now.get(name, 0)] for name, was in self._series.items()}
            self._series = {name: of for name, of in kept.items() if of[-1] - of[-2] >= least and _goes_on(of)}
        if LOOKS[self._looks] == TIMED_FROM:
            self._series[_TIME] = [min(self._microseconds)]
        self._microseconds.clear()
        self._looks += 1

    @property
    def grown(self) -> bool:
        """True where something has grown from each look to the next."""
        return bool(self._grown())

    def _grown(self) -> dict[str, list[int]]:
        return {name: series for name, series in self._series.items() if len(series) > 1}

    def keep_large(self) -> None:
        """Forget what many calls alone could show."""
        self._series = {name: of for name, of in self._series.items() if name in _LARGE}

    def words(self, calls: int) -> list[str]:
        """Say what has grown, most first. calls: of a round."""
        last = LOOKS[self._looks - 1]
        ranked = sorted(self._grown().items(), key=lambda one: one[1][0] - one[1][-1])
        firsts = [LOOKS[self._looks - len(of)] for _, of in ranked]
        return [
            f"{name}, {of[0]:,} after round {first} and {of[-1]:,} after round {last},"
            f" {(of[-1] - of[0]) / calls / (last - first):,.4g} a call"
            for (name, of), first in zip(ranked, firsts, strict=True)
        ]

    def _now(self) -> dict[str, int]:
        tensors = [*_tensors_of(one() for one in self._made_before), *_tensors_of(gc.get_objects())]
        found = {
            _LARGE[0]: sum(dict(filter(None, map(_storage_of, tensors))).values()),
            "functions called in a round": self._calls,
        }
        if LOOKS[self._looks] > TIMED_FROM:
            found[_TIME] = min(self._microseconds)
        if self._device.type == "cuda":
            found[_LARGE[1]] = torch.cuda.memory_allocated(self._device)
            found[_LARGE[2]] = torch.cuda.memory_reserved(self._device)
        traced = tracemalloc.take_snapshot().statistics("lineno") if tracemalloc.is_tracing() else ()  # a kernel may end it
        for one in traced:
            place = one.traceback[0]
            if _is_of_others(place.filename):
                line = f"objects made at {os.path.relpath(place.filename)}:{place.lineno}"
                found |= {f"bytes of {line}": one.size, line: one.count}  # bytes leap where a long list first moves
        return found


def _is_of_others(filename: str) -> bool:
    is_standard = filename.startswith(_STANDARD) and "-packages" not in filename
    return not (is_standard or filename.startswith(_NOT_ITS_OWN))


def _goes_on(series: list[int]) -> bool:
    """Return whether growth is not about to end, as of what has a bound."""
    return len(series) < 3 or series[-1] - series[-2] >= _FASTER * (series[-2] - series[-3])


@contextmanager
def tracing() -> Iterator[Callable[[], None]]:
    """Yield what begins to trace objects of Python; the collector then looks at new ones alone.

    From then on pytest keeps neither what is logged, printed nor warned, which grows with each call.
    """
    with ExitStack() as stack:

        def begin() -> None:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable()
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            if not tracemalloc.is_tracing():
                tracemalloc.start()
                stack.callback(tracemalloc.stop)

        yield begin


def _tensors_of(objects: Iterable[object]) -> list[Tensor]:
    return [cast(Tensor, one) for one in objects if issubclass(type(one), Tensor)]  # as a proxy's class may raise


def _storage_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return where the memory of a tensor begins, and its bytes; None where it has none, as a compiler's."""
    with suppress(NotImplementedError, RuntimeError):
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    return None
