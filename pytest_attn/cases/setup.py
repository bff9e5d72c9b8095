"""The fixture `attn`: the case of an item, made where backend and device can take it, else a skip with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_attn.cases.case import AttentionCase
from pytest_attn.session.items import CaseParameter, FuzzParameter, ModelParameter, RankedParameter, test_of
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import session_of


def make_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> Any:
    """Make the case of a test item, of a model's one too; skips the test where it cannot run, or need not any more."""
    item: pytest.Item = request.node
    session = session_of(item.config)
    if isinstance(parameter, ModelParameter):
        from pytest_attn.cases.model import make_model_case

        return make_model_case(request, parameter, session)
    if isinstance(parameter, FuzzParameter):
        from pytest_attn.cases.fuzz.case import make_fuzz_case

        return make_fuzz_case(request, parameter)
    marker = item.get_closest_marker("attention")
    assert marker is not None
    mark = AttentionMark.from_marker(marker, session.registrations.catalog, session.registrations.registry)
    if isinstance(parameter, RankedParameter) and session.kernels.are_tested:
        from pytest_attn.cases.ranked import make_ranked_case

        return make_ranked_case(request, parameter, mark, session)
    if session.cuda.lost_because and session.machines.device(mark.device).type == "cuda":
        pytest.skip(session.cuda.lost_because)
    if parameter.backend and (reason := session.kernels.skipped_because(test_of(item), parameter.backend)):
        pytest.skip(reason)
    case = AttentionCase(request, parameter, mark, session)
    case._run.skip_unless_runnable(case._run.backend)
    return case
