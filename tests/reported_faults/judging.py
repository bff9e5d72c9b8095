"""How a kernel of this folder is handed to `check` and `check_invariants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import pytest_attn
from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.suite.test_correctness import INPUTS
from pytest_attn.workloads.parameters import PARAMETERS, parameters_of

from .kernel import Attention, KernelBackend
from .table import Fault

CPU = torch.device("cpu")
#: what the kernels call the leaves of parameters
LEAVES = {"bias": "bias", "sinks": "sinks", "alibi": "slopes"}
#: what is said of a fault
CHECK, INVARIANTS, MISSED, UNREACHED = "check", "invariants", "NOT FOUND", "no workload"


class Case(NamedTuple):
    """One workload in one direction, with gradients of parameters beside those of q, k and v."""

    workload: Workload
    backward: bool
    parameters: tuple[str, ...] = ()


def cases_of(fault: Fault, workloads: list[Workload]) -> Iterator[Case]:
    """Return what a fault is asked on: where it reaches, forward and backward, or with the gradient that it is about."""
    for w in workloads:
        if not fault.reaches(w):
            continue
        if not fault.parameters:
            yield Case(w, False)
        if not w.has_no_gradient_because and len(parameters_of(w, fault.parameters)) == len(fault.parameters):
            yield Case(w, True, fault.parameters)


def check(kernel: Attention, case: Case) -> None:
    """Hold a kernel against exact attention; raises what `pytest_attn.check` raises."""
    w, backward, parameters = case
    if parameters_of(w, parameters):
        spec, attention = with_parameters(kernel, case)
        comparison = judge(spec.subject(Registry(), attention), spec, ReferenceCache())
        assert comparison.passed, f"wrong: {comparison.mismatch.row.name}"
    elif w.dropout:
        pytest_attn.check(callable_of(kernel, w), w, backward=backward, device="cpu", inputs=INPUTS, returns=("out", "keep"))
    else:
        pytest_attn.check(KernelBackend(type(kernel).__name__, kernel), w, backward=backward, device="cpu", inputs=INPUTS)


def check_invariants(kernel: Attention, case: Case) -> None:
    """Ask a kernel every invariant, over pages as a callable, too, of which more is asked; raises as `pytest_attn` does."""
    w, backward = case.workload, case.backward
    if parameters_of(w, case.parameters):
        spec, attention = with_parameters(kernel, case)
        report = judge_invariants(spec.subject(Registry(), attention), spec, ReferenceCache())
        assert report.passed, f"broken: {report.broken[0].invariant}"
    elif w.dropout:
        pytest_attn.check_invariants(callable_of(kernel, w), w, backward=backward, device="cpu", returns=("out", "keep"))
    else:
        pytest_attn.check_invariants(KernelBackend(type(kernel).__name__, kernel), w, backward=backward, device="cpu")
        if w.kv_pages is not None:
            pytest_attn.check_invariants(callable_of(kernel, w), w, device="cpu", returns=("out", "lse"))


def callable_of(kernel: Attention, w: Workload) -> Callable[..., Any]:
    """Return the kernel as a callable of (out, lse), or of (out, what dropout has left)."""
    inputs = draw_inputs(w)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return kernel(inputs, q, k, v)[:: 2 if w.dropout else 1][:2]

    return attention


def with_parameters(kernel: Attention, case: Case) -> tuple[CheckSpec, Callable[..., Any]]:
    """Return the kernel closing over parameters, and the spec that the marker `attention` makes of their gradients."""
    w, inputs = case.workload, draw_inputs(case.workload)
    leaves = {
        name: getattr(inputs, PARAMETERS[name].tensor).clone().requires_grad_() for name in parameters_of(w, case.parameters)
    }

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return kernel(inputs, q, k, v, **{LEAVES[name]: leaf for name, leaf in leaves.items()})[:: 2 if w.dropout else 1][:2]

    returns = ("out", "keep" if w.dropout else "lse")
    return CheckSpec(w, CPU, True, INPUTS, Declaration(returns=returns), parameters=leaves), attention


class Found(NamedTuple):
    """What became of one fault: which judge found it on which workload, after how many cases."""

    name: str
    report: str
    by: str
    where: str
    cases: int


def find(fault: Fault, cases: list[Case]) -> Found:
    if not cases:
        return Found(fault.name, fault.report, UNREACHED, "", 0)
    ran = 0
    for by, ask in ((CHECK, check), (INVARIANTS, check_invariants)):
        kernel = fault.kernel()
        for case in cases:
            ran += 1
            if said := fails(ask, kernel, case):
                return Found(fault.name, fault.report, by, f"{where(case)}: {said}", ran)
    return Found(fault.name, fault.report, MISSED, "", ran)


def fails(ask: Callable[[Attention, Case], None], kernel: Attention, case: Case) -> str:
    """Return the first words of what a judge says, "" where it lets the kernel pass."""
    try:
        ask(kernel, case)
    except ValueError:  # a mistake in a call from here is nothing that a fault was found by
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__} {' | '.join(lines[:3])}"[:200]
    return ""


def where(case: Case) -> str:
    return f"{case.workload.id} {'backward' if case.backward else 'forward'}"
