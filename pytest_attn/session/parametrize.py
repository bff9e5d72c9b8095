"""From a marked test to its cases: workloads times dtypes, times backends where the test takes one."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_attn.backends.configured import split
from pytest_attn.session.marker import AttentionMark, RequiresMark
from pytest_attn.session.store import FIXTURES, AttentionSession, NoTorchError, require_torch
from pytest_attn.workloads.workload import Workload

PARAMETER = "_attn_parameter"
#: what names of faulty kernels begin with, where a backend's is expected
MUTANT = "mutant:"


class CaseParameter(NamedTuple):
    """What distinguishes the cases of one test: the workload, and the backend's name where the test takes one."""

    workload: Workload
    backend: str | None


def parametrize(metafunc: pytest.Metafunc, session: AttentionSession) -> None:
    """Give a test that uses one of the fixtures an item per case. Raises pytest.Collector.CollectError for a bad marker."""
    where = metafunc.definition.nodeid
    marker = metafunc.definition.get_closest_marker("attention")
    if marker is None:
        used = ", ".join(sorted(FIXTURES.intersection(metafunc.fixturenames)))
        raise pytest.Collector.CollectError(
            f"{where}: uses {used} but has no marker; add for example @pytest.mark.attention('flux-L512')"
        )
    if sum(own.name == "attention" for own in metafunc.definition.own_markers) > 1:
        raise pytest.Collector.CollectError(f"{where}: has two attention markers; put their arguments into one")
    try:
        mark = AttentionMark.from_marker(marker, session.catalog, session.registry)
        for requirement in metafunc.definition.iter_markers("attention_requires"):
            RequiresMark.from_marker(requirement, session.registry)
        if not metafunc.config.option.collectonly:
            require_torch()
            session.device(mark.device)
        cases = list_cases(mark, session, with_backends="attn_backend" in metafunc.fixturenames)
        if cases and session.settings.fuzz and "attn" in metafunc.fixturenames:
            from pytest_attn.session.fuzz import fuzz_parameters

            cases += fuzz_parameters(cases)
        ids = [case_id(case) for case in cases]
        _require_unique(cases, ids)
    except (ValueError, NoTorchError) as error:
        raise pytest.Collector.CollectError(f"{where}: {error}") from None
    session.has_attention_tests = True
    session.cases += len(cases)
    metafunc.parametrize(PARAMETER, cases or [None], ids=ids or ["not-selected"], indirect=True)


def list_cases(mark: AttentionMark, session: AttentionSession, with_backends: bool) -> list[CaseParameter]:
    """Return the cases of one marker under the run's selection: the selection narrows what the marker names."""
    workloads = _selected_workloads(mark, session)
    for workload in workloads:
        if mark.layout == "thd" and not workload.is_packed:
            raise ValueError(f"layout 'thd' needs a packed workload (q_lens), {workload.id} is not one")
    if session.settings.mutants:
        return [CaseParameter(w, name) for w in workloads for name in session.mutation.names_for(w, mark.backward)]
    backends: list[str | None] = [None]
    if with_backends and session.settings.tune:
        from pytest_attn.session.tuning import tuned_names

        cases = [CaseParameter(w, name) for w in workloads for name in tuned_names(session, mark, w)]
        return [case for case in cases if mark.backends is None or split(case.backend or "")[0] in mark.backends]
    if with_backends:
        chosen = mark.backends if mark.backends and "backends" not in session.settings.given else None
        selected = chosen or session.backend_names(mark.device)
        backends = [name for name in selected if mark.backends is None or split(name)[0] in mark.backends]
    return [CaseParameter(workload, backend) for workload in workloads for backend in backends]


def _selected_workloads(mark: AttentionMark, session: AttentionSession) -> list[Workload]:
    selected = session.workload_ids()
    if mark.workloads:
        workloads = [w for w in mark.workloads if selected is None or w.name in selected]
    elif selected is not None:
        workloads = [w for w in session.catalog.select("all") if w.name in selected]
    else:
        workloads = [w for group in session.default_groups(mark.device) for w in session.catalog.select(group)]
    wanted = session.settings.dtypes
    dtypes = [d for d in mark.dtypes if not wanted or d in wanted] if mark.dtypes else list(wanted)
    if mark.dtypes or wanted:
        workloads = [w.replace(dtype=dtype) for w in workloads for dtype in dtypes]
    return list(dict.fromkeys(workloads))


def case_id(case: CaseParameter) -> str:
    """Return the id of a case: workload, then backend."""
    if case.backend is None:
        return case.workload.id
    return f"{case.workload.id}-{case.backend.removeprefix(MUTANT)}"


def id_under(path: str, item: pytest.Item) -> str:
    """Return the item's id under another path; not item.nodeid, to which xdist may have added a group."""
    return "::".join([path, *(node.name for node in item.listchain() if isinstance(node, pytest.Class | pytest.Function))])


def test_of(item: pytest.Item) -> str:
    """Return the test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def _require_unique(cases: list[CaseParameter], ids: list[str]) -> None:
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


def is_unselected(item: pytest.Item) -> bool:
    """Whether the item only stands for a test of which nothing was selected."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and PARAMETER in callspec.params and callspec.params[PARAMETER] is None
