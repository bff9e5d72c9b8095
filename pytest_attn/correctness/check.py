"""The judgement without pytest: `pytest_attn.check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_attn.backends.backend import Backend, RefusedError, obstacle
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.compare import Comparison
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.question import Question, ReferenceCache, subject_name
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import distribution_names
from pytest_attn.workloads.workload import Workload


def check(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool = False,
    inputs: str | tuple[str, ...] | None = None,
    precision: str = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    device: str = "auto",
    seed: int = 0,
    limits: str = "default",
) -> Comparison:
    """Hold a callable against exact attention, without pytest.

    fn: a callable of (q, k, v) that returns out, or (out, lse) with returns_lse=True; or a backend's name.
    workload: a `Workload` or a name of the catalog that stands for one workload.
    backward: compare dq, dk and dv as well. inputs: names of input distributions, by default ("structured", "flat").
    precision: the rounding that the kernel declares ("flash", "flash2", "eager", ...: correctness/precision.py).
    layout: "bhsd" or "bshd", in which fn takes and returns tensors; packed workloads are "thd".
    device: "auto", "cpu", "cuda", "cuda:N", "xpu", "mps".

    Returns a `Comparison`. Raises AssertionError where fn is wrong, with the diagnosis as its text, ValueError for an
    argument that is not one of the known.
    """
    __tracebackhide__ = True
    where = resolve_device(device)
    names = distribution_names(inputs)
    question = Question(named(workload), where, backward, names, precision, layout, returns_lse, seed, limits)
    return check_question(fn, question)[1]


def check_question(
    fn: Callable[..., Any] | Backend | str, question: Question
) -> tuple[Callable[..., Any] | Backend, Comparison]:
    """Judge a callable, or a backend by its name; return it with the comparison. Raises as `check` does."""
    __tracebackhide__ = True
    with taken_by(fn, question) as subject:
        comparison = judge(subject, question, ReferenceCache())
    if not comparison.passed:
        raise AssertionError(comparison.message)
    return subject, comparison


@contextmanager
def taken_by(fn: Callable[..., Any] | Backend | str, question: Question) -> Iterator[Callable[..., Any] | Backend]:
    """Yield a callable or backend as it is, and a backend by its name.

    Raises ValueError for a backend that refuses the question's workload, before the block or as late as in it.
    """
    subject: Callable[..., Any] | Backend = Registry()[fn] if isinstance(fn, str) else fn
    reason: object = None
    if isinstance(subject, Backend):
        reason = obstacle(subject, question.workload, machine_of(question.device), question.backward)
    if reason is None:
        try:
            yield subject
        except RefusedError as error:
            reason = error
    if reason is not None:
        raise ValueError(f"backend {subject_name(subject)!r} cannot take {question.workload.id}: {reason}") from None


def named(workload: Workload | str) -> Workload:
    """Return a workload, by its name in the catalog where it is one. Raises ValueError for a name that stands for several."""
    if not isinstance(workload, str):
        return workload
    found = builtin_catalog().select(workload)
    if len(found) != 1:
        names = ", ".join(w.id for w in found)
        raise ValueError(f"{workload!r} stands for {len(found)} workloads; name one: {names}")
    return found[0]
