"""Run every invariant of one kernel on one workload, and write down what broke."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.subject import RefusedError, Subject
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.invariants.invariant import Invariant, KernelRaised, NotApplicable, what_was_raised
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
    begin: Callable[[str], None] = lambda name: None,
) -> InvariantReport:
    """Ask `subject` every invariant that applies to the spec's workload, on the first of its input distributions.

    only, skip: names of invariants. thorough: all of them, with more repetitions. deadline: makes a context that surrounds
    each call. begin: is given the name of each before it is asked.

    The plain call comes first: its exceptions pass through, ContractError for a result that cannot be compared included, and
    RefusedError where a backend refuses as late as there. Raises ValueError for an unknown name, and where no name is left.
    """
    __tracebackhide__ = True
    invariants = chosen(only, skip, thorough)
    spec = spec.for_subject(subject)
    probe = Probe(subject, spec, references.inputs_of(spec, spec.inputs[0]), deadline, thorough)
    probe.base  # noqa: B018 - the call that the others are held against, made here, once
    return InvariantReport(spec.workload.id, subject.name, tuple(_findings(invariants, probe, begin)))


def _findings(invariants: Iterable[Invariant], probe: Probe, begin: Callable[[str], None]) -> Iterator[Finding]:
    """Run one after the other, until a kernel has taken CUDA from this process: what was not run is not broken."""
    lost = ""
    for invariant in invariants:
        if lost:
            yield Finding(invariant.name, "not applicable", lost, 0)
            continue
        begin(invariant.name)
        yield _find(invariant, probe)
        if said := lost_because(probe.device):
            lost = f"not run: this process has no CUDA any more since {invariant.name} was ({said})"


def lost_because(device: torch.device) -> str | None:
    """Return what CUDA says where this process cannot use it any more, None where it can."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _find(invariant: Invariant, probe: Probe) -> Finding:
    """Ask one invariant. What the kernel raises breaks it, unless it is a refusal of the backend."""
    before, probe.note = probe.calls, ""

    def finding(outcome: Outcome, evidence: str) -> Finding:
        return Finding(invariant.name, outcome, evidence, probe.calls - before)

    reason = _known_to_end_cuda(invariant, probe) or _dropped(invariant, probe) or invariant.inapplicable_because(probe)
    if reason:
        return finding("not applicable", reason)
    try:
        evidence = invariant.run(probe)
    except (NotApplicable, RefusedError) as reason:
        return finding("not applicable", str(reason))
    except (ContractError, KernelRaised) as error:
        return finding("broken", str(error))
    except Exception as error:
        return finding("broken", what_was_raised(error))
    return finding("broken", evidence) if evidence else finding("passed", probe.note)


#: what holds of a kernel with dropout: the same call under the same seed gives the same result
_WITH_DROPOUT = ("rerun", "layout", "alignment", "poison", "state")


def _dropped(invariant: Invariant, probe: Probe) -> str:
    """Say that an invariant compares calls in which dropout may leave others, "" where it does not."""
    if not probe.workload.dropout or invariant.name in _WITH_DROPOUT:
        return ""
    return "compares calls in which dropout may leave other probabilities"


def _known_to_end_cuda(invariant: Invariant, probe: Probe) -> str:
    """Say which known defect would take CUDA from this process, "" where none would."""
    machine = machine_of(probe.device)
    known = probe.subject.defects_on(probe.workload, machine, probe.backward)
    fatal = (defect for defect in known if defect.ends_cuda and invariant.name in defect.invariants)
    return next((f"{defect.issue}: {defect.summary}" for defect in fatal), "")
