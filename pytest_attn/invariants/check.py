"""Ask one kernel every invariant on one workload, and write down what broke."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytest_attn.backends.backend import Backend, RefusedError
from pytest_attn.backends.machine import resolve_device
from pytest_attn.correctness.check import named, taken_by
from pytest_attn.correctness.compare import ContractError
from pytest_attn.correctness.question import Question, subject_name
from pytest_attn.invariants.invariant import Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe
from pytest_attn.invariants.registry import chosen
from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.workloads.masks import function_label
from pytest_attn.workloads.workload import Workload

Names = Iterable[str] | str | None


def judge_invariants(
    subject: Callable[..., Any] | Backend,
    question: Question,
    only: Names = None,
    skip: Names = None,
    thorough: bool = False,
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
    reproduce: str = "",
) -> InvariantReport:
    """Ask `subject` every invariant that applies to the question's workload, on the first of its input distributions.

    only, skip: names of invariants. thorough: all of them, with more repetitions. `guard` makes a context that surrounds
    each call; `reproduce` is the command that a failure's message ends with.

    The plain call comes first: its exceptions pass through, ContractError for a result that cannot be compared included, and
    RefusedError where a backend refuses as late as there. Raises ValueError for an unknown name, and where no name is left.
    """
    __tracebackhide__ = True
    invariants = chosen(only, skip, thorough)
    if not isinstance(subject, Backend) and not callable(subject):
        raise TypeError(f"check_invariants needs a callable of (q, k, v) or a backend, got {function_label(subject)}")
    question = question.put_to(subject)
    inputs = question.draw(question.inputs[0])
    probe = Probe(subject, question, inputs, guard, thorough)
    probe.base  # noqa: B018 - the call that the others are held against, made here, once
    findings = tuple(_find(invariant, probe) for invariant in invariants)
    name, workload = subject_name(subject), question.workload.id
    return InvariantReport(workload, name, findings, _message(findings, name, workload, reproduce))


def _find(invariant: Invariant, probe: Probe) -> Finding:
    """Ask one invariant. What the kernel raises breaks it, unless it is a refusal of the backend."""
    before = probe.calls

    def finding(outcome: Any, evidence: str) -> Finding:
        return Finding(invariant.name, outcome, evidence, probe.calls - before)

    if reason := invariant.inapplicable_because(probe):
        return finding("not applicable", reason)
    try:
        evidence = invariant.run(probe)
    except (NotApplicable, RefusedError) as reason:
        return finding("not applicable", str(reason))
    except ContractError as error:
        return finding("broken", str(error))
    except Exception as error:
        return finding("broken", f"the kernel raised {type(error).__name__}: {error}")
    return finding("broken" if evidence else "passed", evidence)


def _message(findings: tuple[Finding, ...], subject: str, workload: str, reproduce: str) -> str:
    """Write the failure: a line per broken invariant; "" where none is."""
    broken = [finding for finding in findings if finding.outcome == "broken"]
    if not broken:
        return ""
    plural = "invariants" if len(broken) > 1 else "invariant"
    lines = [f"{len(broken)} {plural} broken by {subject} ({workload})"]
    lines += [f"  {finding.invariant:<12} {finding.evidence}" for finding in broken]
    return "\n".join([*lines, f"  {'reproduce':<12} {reproduce}"] if reproduce else lines)


def check_invariants(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    only: Names = None,
    skip: Names = None,
    thorough: bool = False,
    backward: bool = False,
    precision: str = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    device: str = "auto",
    seed: int = 0,
) -> InvariantReport:
    """Ask a callable, or a backend by its name, every invariant that applies, without pytest.

    only, skip: names of invariants; thorough: all of them, with more repetitions. The other arguments are those of
    `pytest_attn.check`.

    Returns an `InvariantReport`. Raises AssertionError where an invariant is broken, with the evidence as its text, and
    ValueError for an argument that is not one of the known.
    """
    __tracebackhide__ = True
    where = resolve_device(device)
    question = Question(
        named(workload), where, backward, precision=precision, layout=layout, returns_lse=returns_lse, seed=seed
    )
    with taken_by(fn, question) as subject:
        report = judge_invariants(subject, question, only, skip, thorough)
    if not report.passed:
        raise AssertionError(report.message)
    return report
