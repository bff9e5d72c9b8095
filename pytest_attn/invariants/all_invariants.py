"""Run every invariant of one kernel on one workload, and write down what broke."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pkgutil import resolve_name

import torch

from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.subject import RefusedError, Subject
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.invariants.algebra import algebra, magnitude
from pytest_attn.invariants.gradient_identities import alone, gradients, lse_gradient
from pytest_attn.invariants.invariant import (
    Elsewhere,
    Invariant,
    KernelRaised,
    NotApplicable,
    OwnDefectError,
    Probe,
    what_was_raised,
)
from pytest_attn.invariants.leak import leak
from pytest_attn.invariants.memory_layout import alignment, layout, offsets
from pytest_attn.invariants.poison import poison
from pytest_attn.invariants.report import Finding, InvariantReport, Outcome
from pytest_attn.invariants.rerun import rerun, state
from pytest_attn.invariants.runtime import device, graph, opcheck
from pytest_attn.invariants.variations import batch, equivalence, options, shapes
from pytest_attn.seam import added
from pytest_attn.workloads.fields import did_you_mean

__tracebackhide__ = True  # what it raises is the test's own mistake

#: names of invariants
Names = Iterable[str] | str | None

INVARIANTS: tuple[Invariant, ...] = (
    rerun,
    poison,
    layout,
    leak,
    gradients,
    lse_gradient,
    alone,
    algebra,
    magnitude,
    options,
    equivalence,
    batch,
    shapes,
    offsets,
    opcheck,
    state,
    graph,
    device,
    # new ones stand above: the last may end the CUDA context, and with it all that follows
    alignment,
)


def chosen(only: Names, skip: Names, thorough: bool, more: Collection[str] = ()) -> tuple[Invariant, ...]:
    """Return invariants by name: those named by `only`, else the default ones, and with `thorough` all; less `skip`.

    more: those of guests that are default ones, too.

    Raises ValueError for a name that is not one of the known, and where none is left: nothing asked is nothing held.
    """
    own, of_guests = {one.name: one for one in INVARIANTS}, added("invariants")
    *first, last = own
    default = [one.name for one in INVARIANTS if thorough or not one.thorough]
    names = chosen_names(only, skip, (*first, *of_guests, last), (*default, *more))
    return tuple(own[name] if name in own else resolve_name(of_guests[name])(name) for name in names)


def chosen_names(only: Names, skip: Names, known: Collection[str], default: Collection[str]) -> list[str]:
    """Return those of the known names that `only` has, else the default ones, less `skip`; raises as `chosen` does."""
    wanted, unwanted = ([names] if isinstance(names, str) else list(names or ()) for names in (only, skip))
    for name in (*wanted, *unwanted):
        if name not in known:
            raise ValueError(f"unknown invariant {name!r};{did_you_mean(name, known)} known: {', '.join(known)}")
    left = [name for name in known if name in (wanted or default) and name not in unwanted]
    if not left:
        named = ", ".join(wanted) or "the default ones"
        raise ValueError(f"no invariant is left to run: skip has all of {named}; name fewer there, or others in only")
    return left


def judge_invariants(
    subject: Subject,
    spec: CheckSpec,
    references: ReferenceCache,
    only: Names = None,
    skip: Names = None,
    thorough: bool = False,
    deadline: Callable[[], AbstractContextManager[object]] = nullcontext,
    begin: Callable[[str], None] = lambda name: None,
    elsewhere: Elsewhere | None = None,
) -> InvariantReport:
    """Ask `subject` every invariant that applies to the spec's workload, on the first of its input distributions.

    only, skip: names of invariants. thorough: all of them, with more repetitions. deadline: makes a context that surrounds
    each call. begin: is given the name of each before it is asked. elsewhere: repeats the test in a new process.

    The plain call comes first: its exceptions pass through, ContractError for a result that cannot be compared included, and
    RefusedError where a backend refuses as late as there. Raises ValueError for an unknown name, and where no name is left.
    """
    invariants = chosen(only, skip, thorough)
    spec = spec.for_subject(subject)
    inputs = references.inputs_of(spec, spec.inputs[0])
    probe = Probe(subject, spec, inputs, deadline, thorough)
    probe.elsewhere, probe.shared = elsewhere, partial(references.reference_of, spec, subject=subject)
    with probe.calling():
        probe.kernel = references.prepared(subject, spec, spec.inputs[0], inputs)
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
            lost = f"not run: CUDA has failed in this process since {invariant.name} was ({said})"


def lost_because(device: torch.device) -> str | None:
    """Return what CUDA says where this process cannot use it any more, None where it can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


#: what holds of a kernel with dropout: the same call under the same seed gives the same result
_WITH_DROPOUT = ("rerun", "layout", "alignment", "poison", "state")


def _find(invariant: Invariant, probe: Probe) -> Finding:
    """Ask one invariant. What the kernel raises breaks it, unless it is a refusal of the backend."""
    before, probe.note = probe.count.calls, ""

    def finding(outcome: Outcome, evidence: str) -> Finding:
        return Finding(invariant.name, outcome, evidence, probe.count.calls - before)

    if reason := _left_out_because(invariant, probe):
        return finding("not applicable", reason)
    try:
        evidence = invariant.run(probe)
    except OwnDefectError:
        raise
    except (NotApplicable, RefusedError) as reason:
        return finding("not applicable", str(reason))
    except (ContractError, KernelRaised) as error:
        return finding("broken", str(error))
    except Exception as error:
        return finding("broken", what_was_raised(error))
    if not evidence:
        return finding("passed", probe.note)
    return finding("broken", evidence if invariant.name in _OF_CALLS else f"{evidence}{_if_calls_differ(probe)}")


def _left_out_because(invariant: Invariant, probe: Probe) -> str | None:
    """Say why an invariant is not asked, such as a known defect that takes CUDA from this process; None where it is asked."""
    for defect in probe.subject.defects_on(probe.workload, machine_of(probe.device), probe.backward):
        if defect.ends_cuda and invariant.name in defect.invariants:
            return f"{defect.issue}: {defect.summary}"
    if probe.workload.dropout and invariant.name not in _WITH_DROPOUT:
        return "compares calls in which dropout may leave other probabilities"
    return invariant.inapplicable_because(probe)


#: what says itself that equal calls differ
_OF_CALLS = ("rerun", "state")


def _if_calls_differ(probe: Probe) -> str:
    """Say of what was found that it may have another reason: five plain calls more, of which one is not like the first."""
    try:
        differing = next(filter(None, (probe.change(probe.run(probe.inputs)) for _ in range(5))), "")
    except Exception:  # the user gets what was found before
        return ""
    return differing and f"; but equal calls differ as well, which rerun is about: {differing}"
