"""From a marked test to its items: one per case, some left out, those of one workload kept together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_attn.session.fixture_names import FIXTURES, OF_MODELS, PARAMETER
from pytest_attn.session.items import (
    CaseParameter,
    ModelParameter,
    case_id,
    fuzz_parameters,
    is_case,
    is_unselected,
    model_parameter,
    parameter_of,
    workload_group,
)
from pytest_attn.session.machines import NoTorchError, require_torch
from pytest_attn.session.marks import AttentionMark, RequiresMark, model_mark
from pytest_attn.session.session import AttentionSession


def parametrize(metafunc: pytest.Metafunc, session: AttentionSession) -> None:
    """Give a test that uses one of the fixtures an item per case. Raises pytest.Collector.CollectError for a bad marker."""
    where = metafunc.definition.nodeid
    if metafunc.definition.get_closest_marker("attention_model") or "attn_model" in metafunc.fixturenames:
        _parametrize_model(metafunc, session, where)
        return
    marker = _only_marker(metafunc, where)
    registrations = session.registrations
    try:
        mark = AttentionMark.from_marker(marker, registrations.catalog, registrations.registry)
        for requirement in metafunc.definition.iter_markers("attention_requires"):
            RequiresMark.from_marker(requirement, registrations.registry)
        if not metafunc.config.option.collectonly:
            require_torch()
            session.machines.device(mark.device)
        cases = session.kernels.cases(mark, takes_backend="attn_backend" in metafunc.fixturenames)
        if mark.ranks:
            cases = [replace(case, ranks=ranks) for case in cases for ranks in mark.ranks]
        elif cases and session.settings.fuzz and "attn" in metafunc.fixturenames:
            cases = [*cases, *fuzz_parameters(cases)]
        ids = [case_id(case) for case in cases]
        _require_unique(cases, ids)
    except (ValueError, NoTorchError) as error:
        raise pytest.Collector.CollectError(f"{where}: {error}") from None
    session.collected.add_test(len(cases))
    metafunc.parametrize(PARAMETER, cases or [None], ids=ids or ["not-selected"], indirect=True)


def _parametrize_model(metafunc: pytest.Metafunc, session: AttentionSession, where: str) -> None:
    """Give a test of a model an item per selected backend, or one. Raises pytest.Collector.CollectError for a bad marker."""
    marker = metafunc.definition.get_closest_marker("attention_model")
    try:
        if marker is None:
            raise ValueError("uses attn_model but has no marker; add @pytest.mark.attention_model")
        argnames = _arguments(metafunc)
        if others := sorted(FIXTURES.intersection(argnames) - OF_MODELS):
            raise ValueError(f"a test with attention_model takes attn_model and attn_backend, not {', '.join(others)}")
        mark = model_mark(marker, session.registrations.registry)
        if not metafunc.config.option.collectonly:
            require_torch()
            session.machines.device(mark.device)
        names = session.kernels.backends(mark) if "attn_backend" in argnames else [None]
    except (ValueError, NoTorchError) as error:
        raise pytest.Collector.CollectError(f"{where}: {error}") from None
    is_left_out = bool(session.settings.mutants or session.settings.tune)  # these ask about workloads
    cases = [] if is_left_out else [model_parameter(name) for name in names]
    session.collected.add_test(len(cases))
    metafunc.parametrize(PARAMETER, cases or [None], ids=[*map(case_id, cases)] or ["not-selected"], indirect=True)


def _arguments(metafunc: pytest.Metafunc) -> tuple[str, ...]:
    """Return what the test itself takes, without what its fixtures take."""
    return tuple(metafunc.definition._fixtureinfo.argnames)


def _only_marker(metafunc: pytest.Metafunc, where: str) -> pytest.Mark:
    """Return the test's attention marker. Raises pytest.Collector.CollectError where it has none, or two."""
    marker = metafunc.definition.get_closest_marker("attention")
    if marker is None:
        used = ", ".join(sorted(FIXTURES.intersection(metafunc.fixturenames)))
        raise pytest.Collector.CollectError(
            f"{where}: uses {used} but has no marker; add for example @pytest.mark.attention('flux-L512')"
        )
    if sum(own.name == "attention" for own in metafunc.definition.own_markers) > 1:
        raise pytest.Collector.CollectError(f"{where}: has two attention markers; put their arguments into one")
    return marker


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


def deselect_unselected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the items that stand for tests without selected cases."""
    unselected = [item for item in items if is_unselected(item)]
    if unselected:
        config.hook.pytest_deselected(items=unselected)
        items[:] = [item for item in items if not is_unselected(item)]


def group_by_workload(items: list[pytest.Item]) -> None:
    """Keep the cases of one workload and test in one xdist worker, which then computes each reference once."""
    for item in items:
        parameter = parameter_of(item)
        if (
            parameter is not None
            and not isinstance(parameter, ModelParameter)
            and item.get_closest_marker("xdist_group") is None
        ):
            item.add_marker(pytest.mark.xdist_group(workload_group(item, parameter)))


def count_selected(items: list[pytest.Item], session: AttentionSession) -> None:
    """Count the cases that are left."""
    session.collected.select(sum(map(is_case, items)))
