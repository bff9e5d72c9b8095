"""The case of a fuzz item: the fixture `attn` as the test of each draw sees it, and what stands for all draws until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pytest

from pytest_attn.cases.case import AttentionCase, KernelEvaluator, spec_with
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.run import CaseRun
from pytest_attn.session.items import CaseParameter
from pytest_attn.session.kinds import PARAMETER, fixtures
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.backends.backend import Backend
    from pytest_attn.latency.result import Latency


def make_fuzz_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionCase:
    """Make the case that stands for the draws until the test is called; skips the test where nothing can be drawn for it."""
    from pytest_attn.backends.contexts import quiet

    item = request.node
    session = session_of(item.config)
    case = FuzzCase(_run_of(request, parameter, _mark_of(item, session), session))
    if late := _fixtures_made_once(item):
        pytest.skip(f"not fuzzed: fixture {late!r} asks for an attention fixture, and would be made once for all draws")
    if _is_hypothesis_test(item.obj):
        pytest.skip("not fuzzed: the test already draws with Hypothesis")
    if any(w.is_quantized or w.v_in_k for w in [parameter.workload, *case.mark.workloads]):
        pytest.skip("not fuzzed: drawn workloads have neither descales nor values in their keys")
    if case.backend is not None:
        with quiet():
            reason = (
                case.backend.unavailable_because(session.machines.machine(case.mark.device)) or case.backend.broken_because()
            )
        if reason:
            case.skip(reason)
    return case


class FuzzCase(AttentionCase):
    """One drawn workload, or, as the fixture makes it, what stands for all of them."""

    @property
    def mark(self) -> AttentionMark:
        """The test's marker."""
        return self._mark

    def on(self, workload: Workload, session: AttentionSession) -> FuzzCase:
        """Return the same case on another workload."""
        backend = self.backend.name if self.backend else None
        return FuzzCase(_run_of(self._run.request, CaseParameter(workload, backend), self._mark, session))

    def measure(
        self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False, name: str | None = None
    ) -> Latency:
        """Check `fn` and end the draw: its latency is of no interest."""
        __tracebackhide__ = True
        subject = self._run.subject(fn, name, self._spec, backward=bool(backward))
        spec = spec_with(self._spec, self._mark.backward or bool(backward))
        self._run.conclude(KernelEvaluator(self._run, subject, spec))
        raise DrawEndsError

    def skip(self, reason: str) -> NoReturn:
        """Skip the test of a backend that cannot run at all."""
        assert self.backend is not None
        self._run.skip(self.backend, reason)

    def skip_unless_runnable(self) -> None:
        """Refuse a draw that the device or the backend cannot take."""
        self._run.skip_unless_runnable(self.backend)


class DrawEndsError(BaseException):
    """The rest of the test is not for drawn workloads; no `except Exception` of the test can swallow this."""


def _run_of(
    request: pytest.FixtureRequest, parameter: CaseParameter, mark: AttentionMark, session: AttentionSession
) -> CaseRun:
    """Return a run of one process; draws are not divided over ranks."""
    return CaseRun(request, parameter, mark, session, Executor.in_process(parameter.workload))


def _mark_of(item: pytest.Item, session: AttentionSession) -> AttentionMark:
    marker = item.get_closest_marker("attention")
    assert marker is not None
    return AttentionMark.from_marker(marker, session.registrations.catalog, session.registrations.registry)


def _fixtures_made_once(item: pytest.Function) -> str | None:
    """Return the name of a fixture of the user's that asks for one of the plugin's."""
    own = {*fixtures(), PARAMETER}
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if name not in own and any(own.intersection(definition.argnames) for definition in definitions):
            return name
    return None


def _is_hypothesis_test(function: object) -> bool:
    from hypothesis import is_hypothesis_test

    return bool(is_hypothesis_test(function))
