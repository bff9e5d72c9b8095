"""Whose kernels a run tests: those of the user's tests and the selected backends, unless an option says otherwise.

`AttentionSession.kernels` chooses: SelectedKernels, or those of a guest.

Where nobody names workloads, kernels are asked generated ones beside the catalog's (workloads/covering.py). A backend of one's
own that declares what it takes gets a covering set within that, so that it is asked as much as one that takes all. Any other,
and a callable, is asked for what kernels that take little take, and declines the rest. Libraries declare to take much, and get
none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import split
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import Subject
from pytest_attn.session.devices import Machines
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.options import Settings
from pytest_attn.session.progress import Progress
from pytest_attn.session.registrations import Registrations
from pytest_attn.workloads.covering import ENOUGH, FEW, GROUP, Takes, for_any_kernel, named, within
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.correctness.spec import CheckSpec
    from pytest_attn.reports.records import Record
    from pytest_attn.reports.terminal import Line

#: groups that a test without named workloads runs: on a CPU the small ones, on a GPU all but those on request
CPU_GROUPS = ("smoke", "edges", "features")


#: what `attn.check` takes
Target = Callable[..., Any] | Backend | str


class SelectedKernels:
    """The kernels that tests hand over, and the selected backends where a test takes one."""

    #: why nothing is timed, None where it is
    untimed_because: str | None = None
    #: what a run does in place of judging, "" where it judges
    judges_nothing = ""
    #: whether the kernels are those that the tests name, whose failures are kept and whose launches are asserted
    are_tested = True
    #: whether they are configurations of one backend, which have no baselines
    are_configurations = False
    #: the title of what is printed at the end in place of the summary; "" for the summary
    section = ""

    @classmethod
    def summary(cls, records: Sequence[Record], verbose: bool) -> Iterator[Line]:
        """Yield the lines of that section."""
        return iter(())

    @classmethod
    def require(cls, config: pytest.Config, settings: Settings, registrations: Registrations) -> None:
        """Raise pytest.UsageError where what an option names for them cannot be, or not beside the others."""

    def __init__(self, settings: Settings, registrations: Registrations, machines: Machines) -> None:
        self.settings, self.registrations, self.machines = settings, registrations, machines

    def cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return the cases of one marker; where nobody names workloads, a kernel that takes few gets generated ones.

        Raises ValueError for a marker whose layout is not that of its workloads.
        """
        cases = self.plain_cases(mark, takes_backend)
        if mark.workloads or mark.argument or self.settings.workloads or self.settings.asked["cases"]:
            return cases
        kernels = self._kernels(mark, takes_backend)
        return [*cases, *(CaseParameter(w, name) for name in kernels for w in self._more(mark, name))]

    def plain_cases(self, mark: AttentionMark, takes_backend: bool) -> list[CaseParameter]:
        """Return workloads times dtypes, times backends where the test takes one; raise ValueError as `cases` does."""
        workloads = self._workloads(mark)
        if not (mark.workloads or self.settings.workloads):
            workloads = [w for w in workloads if not mark.declared.unfit_for(w)] or workloads
        for workload in workloads:
            if reason := mark.declared.unfit_for(workload):
                raise ValueError(reason)
        kernels = self._kernels(mark, takes_backend)
        return [CaseParameter(workload, name) for workload in workloads for name in kernels]

    def _kernels(self, mark: AttentionMark, takes_backend: bool) -> list[str] | list[None]:
        return self.backends(mark) if takes_backend else [None]

    def _more(self, mark: AttentionMark, name: str | None) -> list[Workload]:
        """Return what a test's callable, or a backend of one's own, is asked beside the catalog."""
        if name is not None and not self.registrations.registry.is_own(name):
            return []
        backend = None if name is None else self.backend_named(name)
        machine = self.machines.machine(mark.device)
        return beside(self._workloads(mark), mark, self._dtypes(mark), backend, machine)

    def backends(self, mark: AttentionMark) -> list[str] | list[None]:
        """Return the backends of a marker that are selected; where nobody selected any, all of them.

        A test whose marker has an argument of a guest takes the backends for it, any other test takes the others. A
        configuration that the marker names is selected with its backend.
        """
        named = mark.backends or ()
        are_chosen = "backends" in self.settings.given  # then markers only narrow
        selected = list(named) if named and not are_chosen else self._selected_backends(mark.device)
        if mark.backends is not None:
            narrowed = [name for name in selected if name in named or split(name)[0] in named]
            selected = list(dict.fromkeys([*narrowed, *(name for name in named if split(name)[0] in selected)]))
        return [name for name in selected if self.registrations.registry.argument_of(name) == mark.argument]

    def backend_named(self, name: str) -> Backend:
        """Return the backend of a case."""
        return self.registrations.registry[name]

    def in_place_of(self, backend: Backend, spec: CheckSpec) -> Subject | None:
        """Return what is tested in place of what a test with a backend of its case hands over; None for that itself."""
        return None

    def skipped_because(self, test: str, name: str) -> str | None:
        """Say why a case need not run any more, None where it must."""
        return None

    def asking(self, evaluator: Any) -> Any:
        """Return what asks in place of the evaluator of a judgment, in a run that judges nothing."""
        return evaluator

    def settle(self, item: pytest.Item, report: pytest.TestReport, progress: Progress) -> None:
        """Turn the report of a case into what it means in this run."""

    # -- what the options leave of what markers name -------------------------------------------------------------------

    def _workloads(self, mark: AttentionMark) -> list[Workload]:
        """Return the workloads of a marker, or of the run where it names none, in each selected dtype."""
        selected, dtypes = self._selected_workloads(), self._dtypes(mark)
        workloads = list(mark.workloads or self._default_workloads(mark, selected))
        if selected is not None:
            workloads = [w for w in workloads if w.name in selected]
        if mark.dtypes or self.settings.dtypes:
            workloads = [w.replace(dtype=dtype) for w in workloads for dtype in dtypes]
        return list(dict.fromkeys(workloads))

    def _dtypes(self, mark: AttentionMark) -> list[str]:
        """Return the dtypes of a marker that the run selects, of the run where it names none."""
        wanted = self.settings.dtypes
        return [d for d in mark.dtypes if not wanted or d in wanted] if mark.dtypes else list(wanted)

    def _default_workloads(self, mark: AttentionMark, selected: Collection[str] | None) -> list[Workload]:
        """Return the workloads of a marker that names none: all of which some are selected, else those of the device."""
        catalog = self.registrations.catalog
        if selected is not None:
            return catalog.select("all")
        is_cpu = self.machines.device(mark.device).type == "cpu"
        return [w for group in CPU_GROUPS for w in catalog.select(group)] if is_cpu else catalog.default

    def _selected_backends(self, device: str | None) -> list[str]:
        """Return the selected backends; asks the machine only where "available" is part of the selection."""
        registry = self.registrations.registry
        tokens = tuple(
            f"-{registry.canonical(token[1:])}" if token.startswith("-") else registry.canonical(token)
            for token in self.settings.backends
        )
        needs_machine = "available" in tokens or all(token.startswith("-") for token in tokens)
        machine = self.machines.machine(device) if needs_machine else None
        available = [name for name in registry.names if machine and registry[name].unavailable_because(machine) is None]
        chosen = _chosen(tuple(t for t in tokens if t != "available"), registry.names, available)
        if "available" in tokens:
            chosen = list(dict.fromkeys([*(n for n in available if f"-{n}" not in tokens), *chosen]))
        return chosen

    def _selected_workloads(self) -> set[str] | None:
        """Return the names that --attn-workloads selects, None where it was not given."""
        tokens, catalog = self.settings.workloads, self.registrations.catalog
        if not tokens:
            return None
        everything = [w.name for w in catalog.select("all") if w.name]
        expanded = tuple(
            ("-" if token.startswith("-") else "") + str(w.name)
            for token in tokens
            for w in catalog.select(token.removeprefix("-"))
        )
        return set(_chosen(expanded, everything, [w.name for w in catalog.default if w.name]))


def _chosen(tokens: tuple[str, ...], everything: list[str], default: list[str]) -> list[str]:
    """Apply a selection to names: plain tokens choose, -NAME leaves out; only exclusions start from `default`."""
    positive = [token for token in tokens if not token.startswith("-")]
    excluded = {token[1:] for token in tokens if token.startswith("-")}
    chosen = list(dict.fromkeys(positive)) if positive else default
    chosen = [name for token in chosen for name in (everything if token == "all" else [token])]
    return [name for name in dict.fromkeys(chosen) if name not in excluded]


# -- generated workloads ------------------------------------------------------------------------------------------------------


def beside(
    asked: Sequence[Workload], mark: AttentionMark, dtypes: Sequence[str], backend: Backend | None, machine: Machine
) -> list[Workload]:
    """Return the generated workloads of a backend, or of the callable of a test, beside those that it is asked anyway.

    dtypes: those of the run or of the marker, one of which each is in; none where each keeps its own.
    """
    if backend is None or not backend.says_what_it_takes:
        return [w for w in _unlike(asked, (_in_one_of(dtypes, w) for w in for_any_kernel())) if _fits(mark, w)]
    takes = _declared(backend, mark, machine)
    most = (2 * FEW if backend.compiles else ENOUGH) - sum(map(takes, asked))
    if most <= 0:
        return []
    found = within(lambda w: takes(_in_one_of(dtypes, w)), most)
    return _unlike(asked, (_in_one_of(dtypes, w) for w in found))


def _declared(backend: Backend, mark: AttentionMark, machine: Machine) -> Takes:
    """Return which workloads a backend declares to take in a test; what raises where it is asked takes none."""

    def takes(w: Workload) -> bool:
        if not _fits(mark, w) or not backend.claims(w, mark.backward):
            return False
        try:
            reasons = (backend.capabilities or Capabilities()).quantized_refusals(w)
            return not (reasons or (backend.refuses_itself and backend.unsupported_because(w, machine, mark.backward)))
        except Exception:
            return False

    return takes


def _fits(mark: AttentionMark, w: Workload) -> bool:
    return not (mark.declared.unfit_for(w) or (mark.backward and w.has_no_gradient_because))


def _in_one_of(dtypes: Sequence[str], w: Workload) -> Workload:
    """Return a workload in one of some dtypes, which its name decides; as it is where there are none."""
    return named(w.replace(dtype=dtypes[zlib.crc32(str(w.name).encode()) % len(dtypes)])) if dtypes else w


def _unlike(asked: Iterable[Workload], others: Iterable[Workload]) -> list[Workload]:
    """Return those that are unlike each of the first, whatever these are named."""
    known = {w.replace(name=GROUP) for w in asked}
    unlike = (w for w in others if w.replace(name=GROUP) not in known)
    return list({w.id: w for w in unlike}.values())
