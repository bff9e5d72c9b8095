"""Ask one kernel every invariant on one workload, and write down what broke."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from pytest_attn.backends.subject import RefusedError, Subject
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.references import ReferenceCache
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.invariants.invariant import Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe
from pytest_attn.invariants.registry import chosen
from pytest_attn.invariants.report import Finding, InvariantReport, Outcome

Names = Iterable[str] | str | None


def judge_invariants(
    subject: Subject,
    spec: CheckSpec,
    references: ReferenceCache,
    only: Names = None,
    skip: Names = None,
    thorough: bool = False,
    deadline: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> InvariantReport:
    """Ask `subject` every invariant that applies to the spec's workload, on the first of its input distributions.

    only, skip: names of invariants. thorough: all of them, with more repetitions. deadline: makes a context that surrounds
    each call.

    The plain call comes first: its exceptions pass through, ContractError for a result that cannot be compared included, and
    RefusedError where a backend refuses as late as there. Raises ValueError for an unknown name, and where no name is left.
    """
    __tracebackhide__ = True
    invariants = chosen(only, skip, thorough)
    spec = spec.for_subject(subject)
    probe = Probe(subject, spec, references.inputs_of(spec, spec.inputs[0]), deadline, thorough)
    probe.base  # noqa: B018 - the call that the others are held against, made here, once
    findings = tuple(_find(invariant, probe) for invariant in invariants)
    return InvariantReport(spec.workload.id, subject.name, findings)


def _find(invariant: Invariant, probe: Probe) -> Finding:
    """Ask one invariant. What the kernel raises breaks it, unless it is a refusal of the backend."""
    before = probe.calls

    def finding(outcome: Outcome, evidence: str) -> Finding:
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
