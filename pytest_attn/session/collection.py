"""From a marked test to its items: one per case, named; some left out."""

import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pkgutil import resolve_name

import pytest

from pytest_attn.backends.backend import Backend, LibraryBackend
from pytest_attn.backends.configured import split
from pytest_attn.backends.subject import obstacle_of_any
from pytest_attn.reports.records import gathered
from pytest_attn.seam import Kind
from pytest_attn.session.devices import NoTorchError, require_torch, untimed_because
from pytest_attn.session.kinds import (
    ATTENTION,
    PARAMETER,
    CaseParameter,
    case_id,
    device_of,
    fixtures,
    is_case,
    kind_of,
    made_items,
    parameter_of,
)
from pytest_attn.session.marks import AttentionMark, MarkerHelp, RequiresMark
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.workloads.catalog import is_generated
from pytest_attn.workloads.workload import Workload

#: the marker that has tests skipped
_REQUIRES = "attention_requires"


class Items:
    """The items of one kind of tests: one per workload of the marker, and per backend where the test takes one."""

    #: what the marker is read into
    mark: type[AttentionMark] = AttentionMark

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def read(self, marker: pytest.Mark, session: AttentionSession) -> AttentionMark:
        """Read a marker. Raises ValueError for a bad one."""
        return self.mark.from_marker(marker, session.registrations.catalog, session.registrations.registry)

    def help(self) -> MarkerHelp | None:
        """Return what is said of the marker; None where its kind says it."""
        return None

    def cases(self, mark: AttentionMark, names: Collection[str], session: AttentionSession) -> Sequence[CaseParameter]:
        """Return the cases of a test, whose fixtures have these names. Raises ValueError for a marker that fits none."""
        return session.kernels.cases(mark, takes_backend="attn_backend" in names)

    def case_id(self, case: CaseParameter) -> str:
        """Return the id of a case."""
        return case_id(case)

    def group(self, item: pytest.Item, case: CaseParameter) -> str | None:
        """Return the name of the items that one worker of xdist runs under --dist loadgroup; None where each may go anywhere.

        Those of a kernel that no test has named, so that the last of them is known; those of a workload where its backends are
        timed on one GPU; those that share what a backend compiles or plans, else its library's import.
        """
        if not session_of(item.config).kernels.are_tested:
            return case.backend
        if item.config.getoption("attn_gpu_per_worker"):
            return case.workload.id
        registry = session_of(item.config).registrations.registry
        if not case.backend or not registry.is_known(case.backend):
            return None
        backend = registry[case.backend]
        if backend.compiles or backend.makes_plans:
            return f"{kernel_of(backend, case.workload)} {backend.runs_kernels_of or case.backend}"
        return case.backend if isinstance(backend, LibraryBackend) else None

    def obstacle(self, case: CaseParameter, marker: pytest.Mark, session: AttentionSession) -> str | None:
        """Say what stands in the way of a case, as far as that is known before it runs; None where nothing does."""
        machine, backward = session.machines.machine(marker.kwargs.get("device")), bool(marker.kwargs.get("backward"))
        backend = session.registrations.registry[case.backend] if case.backend else None
        return (backend.obstacle if backend else obstacle_of_any)(case.workload, machine, backward)


class KernelItems(Items):
    """The items of a kernel's test: also those that guests add."""

    def cases(self, mark: AttentionMark, names: Collection[str], session: AttentionSession) -> Sequence[CaseParameter]:
        cases = super().cases(mark, names, session)
        added = [resolve_name(name)(cases, names) for name in session.settings.asked["cases"].values()]
        return [*cases, *(case for found in added for case in found)]


def mark_groups(items: list[pytest.Item]) -> None:
    """Give cases the groups of xdist that --dist loadgroup keeps in one worker, unless their tests have some of their own.

    What compiles comes first: it takes longest, and no worker is to begin with it when the others end.
    """
    for item in items:
        if (parameter := parameter_of(item)) is None or item.get_closest_marker("xdist_group"):
            continue
        if group := made_items(item).group(item, parameter):
            item.add_marker(pytest.mark.xdist_group(re.sub(r"[\[\]@:]+", "~", group)))  # what ids are read by
    items.sort(key=lambda item: not _compiles(item))


def _compiles(item: pytest.Item) -> bool:
    """Return whether the backend of an item compiles a kernel for it."""
    parameter = parameter_of(item)
    registry = session_of(item.config).registrations.registry
    name = parameter.backend if parameter else None
    return name is not None and registry.is_known(name) and registry[name].compiles


def kernel_of(backend: Backend, workload: Workload) -> Hashable:
    """Return for what a backend compiles a kernel; the workload's id where one of a conftest cannot say."""
    try:
        kernel = backend.compiled_for(workload)
        hash(kernel)
    except Exception:
        return workload.id
    return kernel


def parametrize(metafunc: pytest.Metafunc, session: AttentionSession) -> None:
    """Give a test that uses one of the fixtures an item per case. Raises pytest.Collector.CollectError for a bad marker."""
    kind, where = kind_of(metafunc.definition), metafunc.definition.nodeid
    items: Items = made_items(metafunc.definition)
    try:
        mark = items.read(_only_marker(metafunc, kind), session)
        for requirement in metafunc.definition.iter_markers(_REQUIRES):
            RequiresMark.from_marker(requirement, session.registrations.registry)
        is_listed, has_requirements = metafunc.config.option.collectonly, metafunc.definition.get_closest_marker(_REQUIRES)
        if not is_listed:
            require_torch()
        is_asked = not is_listed or (mark.device and has_requirements)
        if is_asked and absent_because(metafunc.definition, mark.device, session):
            mark = replace(mark, device=None)  # each case is skipped
        cases = items.cases(mark, metafunc.fixturenames, session)
        ids = [items.case_id(case) for case in cases]
        _require_unique(cases, ids)
    except (ValueError, NoTorchError) as error:
        raise pytest.Collector.CollectError(f"{where}: {error}") from None
    session.collected.add_test(len(cases), "attn_backend" in metafunc.fixturenames)
    session.collected.generated += _generated(where, cases)
    metafunc.parametrize(PARAMETER, cases or [None], ids=ids or ["not-selected"], indirect=True)


def _generated(test: str, cases: Sequence[CaseParameter]) -> list[str]:
    """Return a line for each kernel of a test that is asked generated workloads: which these are."""
    found = []
    for backend, all_of_it in gathered((case.backend, case) for case in cases).items():
        names = [case.workload.id for case in all_of_it if is_generated(case.workload.name)]
        if names:
            others = len(all_of_it) - len(names)
            name = backend or "its own kernel"
            found.append(f"{test}, {name}: {others} of the catalog, beside them {len(names)} generated: {', '.join(names)}")
    return found


def absent_because(item: pytest.Item, device: str | None, session: AttentionSession) -> str | None:
    """Say that the device which a test's marker names is not there; None where it is, or where the marker names none.

    Raises ValueError unless the test has attention_requires, which has it skipped.
    """
    try:
        session.machines.device(device)
    except ValueError as error:
        if device is None:
            raise
        if item.get_closest_marker(_REQUIRES) is None:
            raise ValueError(f"{error}; with @pytest.mark.attention_requires(gpus=1) the test is skipped there") from None
        return str(error)
    return None


def _only_marker(metafunc: pytest.Metafunc, kind: Kind) -> pytest.Mark:
    """Return the test's marker. Raises ValueError where it has none, or two, or fixtures of another kind."""
    marker = metafunc.definition.get_closest_marker(kind.marker)
    if marker is None:
        used = sorted(fixtures().intersection(metafunc.fixturenames)) if kind is ATTENTION else [kind.fixture]
        alike = get_close_matches(kind.marker, [own.name for own in metafunc.definition.iter_markers()], n=1, cutoff=0.8)
        found = f"no marker {kind.marker}, only {alike[0]}; say" if alike else "no marker; add"
        example = kind.example or f"@pytest.mark.{kind.marker}"
        raise ValueError(f"uses {', '.join(used)} but has {found} {example}")
    if sum(own.name == kind.marker for own in metafunc.definition.own_markers) > 1:
        raise ValueError(f"has two {kind.marker} markers; put their arguments into one")
    taken = metafunc.definition._fixtureinfo.argnames  # by the test itself, without what its fixtures take
    if others := sorted(fixtures().intersection(taken).difference(kind.takes)):
        raise ValueError(f"a test with {kind.marker} takes {' and '.join(kind.takes)}, not {', '.join(others)}")
    return marker


def _require_unique(cases: Sequence[CaseParameter], ids: Sequence[str]) -> None:
    if len(set(ids)) == len(ids):
        return
    first: dict[str, CaseParameter] = {}
    for case, name in zip(cases, ids, strict=True):
        other = first.setdefault(name, case)
        if other is not case:
            if case.workload.name:
                raise ValueError(
                    f"two different workloads are named {case.workload.id!r}: {other.workload.shape_id} and"
                    f" {case.workload.shape_id}; rename one"
                )
            raise ValueError(f"two different workloads have the id {case.workload.id!r}; give them names, Workload(name=...)")


def deselect_unselected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the items that stand for tests without selected cases."""
    _deselect(config, items, [item for item in items if is_case(item) and parameter_of(item) is None])


def _deselect(config: pytest.Config, items: list[pytest.Item], unwanted: list[pytest.Item]) -> None:
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        left_out = set(unwanted)
        items[:] = [item for item in items if item not in left_out]


# -- backends that this machine lacks: one skipped item of each says so ------------------------------------------------


def keep_one_of_each_missing(config: pytest.Config, session: AttentionSession, items: list[pytest.Item]) -> list[pytest.Item]:
    """Deselect, and return, the items of backends that cannot run here at all, but the first of each backend and reason.

    What is left is skipped with that reason when it runs. Nothing is deselected where no test runs: under --attn-list and
    --collect-only, which count and show every case.
    """
    if session.settings.list_only or config.option.collectonly or not session.kernels.are_tested:
        return []
    told: set[tuple[str, str]] = set()
    surplus: list[pytest.Item] = []
    for item in items:
        reason = missing_because(session, item)
        if reason in told:
            surplus.append(item)
        elif reason:
            told.add(reason)
    _deselect(config, items, surplus)
    return surplus


def missing_because(session: AttentionSession, item: pytest.Item) -> tuple[str, str] | None:
    """Return the backend of an item and why this machine cannot run it at all; None where it can, or nobody can say."""
    parameter = parameter_of(item)
    if parameter is None or parameter.backend is None:
        return None
    try:
        machine = session.machines.machine(device_of(item))
        reason = session.kernels.backend_named(parameter.backend).unavailable_because(machine)
    except Exception:  # of a device that is not there, or of a conftest's backend: told when the item runs
        return None
    return (split(parameter.backend)[0], reason) if reason else None


# -- attention_requires ----------------------------------------------------------------------------


def skip_unless_met(item: pytest.Item, session: AttentionSession) -> None:
    """Have pytest skip an item whose requirements are not met; fail one whose requirements cannot be asked about."""
    try:
        reason = unmet_because(item, session)
    except (ValueError, NoTorchError) as error:
        pytest.fail(str(error), pytrace=False)
    if reason:
        item.add_marker(pytest.mark.skip(reason=reason))


def unmet_because(item: pytest.Item, session: AttentionSession) -> str | None:
    """Say which requirement of an item is not met, or None. Raises ValueError or NoTorchError where that cannot be said."""
    registry = session.registrations.registry
    device = device_of(item)
    marks = [RequiresMark.from_marker(mark, registry) for mark in item.iter_markers(_REQUIRES)]
    if not marks:
        return None
    if absent := absent_because(item, device, session):
        return absent
    settings = session.settings
    is_asked = settings.latency == "require" or session.kernels.untimed_because or session.kernels.are_configurations
    is_run = is_asked or not any(mark.timed for mark in marks)
    if not is_run and (reason := untimed_because(settings.gpu_per_worker, session.machines.device(device))):
        return f"not timed: {reason}"
    machine = session.machines.machine(device)
    return next(filter(None, (mark.unmet_because(machine, registry) for mark in marks)), None)
