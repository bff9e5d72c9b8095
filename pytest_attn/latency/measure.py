"""Time a callable without pytest: check it, then measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import current, resolve_device
from pytest_attn.correctness.check import check_question, named
from pytest_attn.correctness.question import Question, in_layout, subject_name
from pytest_attn.latency.protocol import Latency, stopwatch_of, threads
from pytest_attn.latency.work import LatencyDirection, work_of
from pytest_attn.workloads.inputs import distribution_names
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours


def direction_of(backward: bool | Literal["both"]) -> LatencyDirection:
    """Return what `backward` asks for. Raises ValueError for anything but False, True and "both"."""
    if backward is False:
        return "forward"
    if backward is True:
        return "backward"
    if backward == "both":
        return "forward+backward"
    raise ValueError(f'measure: backward must be False, True or "both", got {backward!r}')


def measure(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool | Literal["both"] = False,
    inputs: str | tuple[str, ...] | None = None,
    precision: str = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    device: str = "auto",
    seed: int = 0,
    cold: bool = True,
    cpu_threads: int | None = None,
) -> Latency:
    """Check a callable as `pytest_attn.check` does, then time it, without pytest and without a baseline.

    backward: False times the forward pass, True the backward pass alone, "both" one after the other. cold: flush a GPU's L2
    cache before each sample. cpu_threads: of torch, on a CPU, while it is timed. The other arguments are those of `check`.

    Returns a `Latency`, in seconds. Raises AssertionError where fn is wrong, StaleError where its results are not those of its
    data when it is called again, ValueError for an argument that is not one of the known.
    """
    __tracebackhide__ = True
    direction = direction_of(backward)
    where = resolve_device(device)
    names = distribution_names(inputs)
    question = Question(named(workload), where, bool(backward), names, precision, layout, returns_lse, seed)
    subject, _ = check_question(fn, question)

    def to_layout(tensor: torch.Tensor, is_kv: bool = False) -> torch.Tensor:
        return in_layout(tensor, question, is_kv)

    with current(where), threads(cpu_threads if where.type == "cpu" else None):
        work = work_of(subject, question.workload, where, direction, seed, to_layout)
        return stopwatch_of(where, cold).measure(work, question.workload.id, subject_name(subject))
