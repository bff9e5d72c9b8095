"""pytest's hooks and fixtures for attention kernels: declare, read, hand over, print."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.session.case import AttentionCase
    from pytest_attn.session.outputs import JsonLines
    from pytest_attn.session.parametrize import CaseParameter
    from pytest_attn.session.store import AttentionSession
    from pytest_attn.session.tensors import ReferenceTensors
    from pytest_attn.workloads.workload import Workload


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    from pytest_attn.session.settings import add_options

    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks for conftests."""
    from pytest_attn import hooks

    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    """Read the settings once, refuse unknown names, and start to collect records."""
    from pytest_attn.session.store import MARKERS, SESSION, AttentionSession

    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    session = AttentionSession(config)
    if session.settings.gpu_per_worker:
        from pytest_attn.session.sharing import take_own_gpu

        take_own_gpu(config)
    if session.settings.fuzz:
        from pytest_attn.session.fuzz import require_hypothesis

        require_hypothesis()
    if session.settings.report:
        from pytest_attn.session.outputs import require_report_libraries

        require_report_libraries()
    session.check_names()
    config.stash[SESSION] = session
    lines = None
    if session.settings.json:
        from pytest_attn.session.outputs import json_lines

        lines = json_lines(session, config)
    config.pluginmanager.register(Recorder(session, lines), "attn-recorder")


class Recorder:
    """Keeps the records of finished cases: in the one process, or in the controller of many."""

    def __init__(self, session: AttentionSession, lines: JsonLines | None) -> None:
        self._session, self._lines = session, lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the records off the report, where it carries any, and write them where they are asked for."""
        records = getattr(report, "attn", ())
        self._session.records.extend(records)
        if records and self._lines is not None:
            self._lines.write(records)
        if found := getattr(report, "attn_mutant", None):
            self._session.mutants.append(found)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Finish the file of --attn-json."""
        if self._lines is not None:
            self._lines.close()
            if self._lines.problem:
                terminalreporter.write_line(self._lines.problem, red=True)
            else:
                terminalreporter.write_line(f"--attn-json: written to {self._lines.path}")


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Leave the terminal to the debugger."""
    if _session(config).has_attention_tests:
        _session(config).progress.line.close()


def pytest_report_header(config: pytest.Config) -> str:
    """Say with which options this run can be repeated."""
    return f"attn: {_session(config).settings.as_options()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that uses one of the fixtures an item per case."""
    from pytest_attn.session.store import FIXTURES

    if not FIXTURES.isdisjoint(metafunc.fixturenames):
        from pytest_attn.session.parametrize import parametrize

        parametrize(metafunc, _session(metafunc.config))


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Use the short ids of workloads and backends wherever tests parametrize with them."""
    if type(val).__module__.startswith("pytest_attn."):
        name: str | None = getattr(val, "id", getattr(val, "name", None))
        return name
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of which the selection left nothing; under xdist's --dist loadgroup, group cases by workload."""
    session = _session(config)
    if session.has_attention_tests:
        from pytest_attn.session.lifecycle import deselect_unselected, group_by_workload, open_terminal

        open_terminal(session, config)
        deselect_unselected(config, items)
        if config.getoption("loadgroup", False):
            group_by_workload(items)
    if config.getoption("benchmark_only", False) or config.getoption("benchmark_skip", False):
        from pytest_attn.session.bridge import mark_measured

        mark_measured(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Switch xdist off for --attn-list: the process that collects is the one that prints."""
    if config.getoption("attn_list") and config.pluginmanager.hasplugin("xdist"):
        config.option.dist, config.option.tx, config.option.numprocesses = "no", [], None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run nothing under --attn-list."""
    return True if _session(session.config).settings.list_only else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the cases, which share the rate of false alarms, and for --attn-list what would run."""
    attention = _session(session.config)
    if attention.has_attention_tests:
        from pytest_attn.session.lifecycle import count_cases

        attention.selected = count_cases(session.items)
    if attention.settings.list_only and attention.has_attention_tests:
        from pytest_attn.session.lifecycle import count_runnable

        count_runnable(attention, session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Say in pytest-benchmark's files which GPU and software times belong to."""
    from pytest_attn.session.bridge import machine_info as add_facts

    add_facts(config, machine_info)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the baselines that were asked for; count a listing without tests as a success."""
    attention = _session(session.config)
    if attention.pending and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        from pytest_attn.session.recording import record_baselines

        if not record_baselines(attention, session.config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if _session(session.config).settings.list_only and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose attention_requires does not hold."""
    if item.get_closest_marker("attention_requires"):
        from pytest_attn.session.lifecycle import skip_unless_met

        skip_unless_met(item, _session(item.config))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run an item of --attn-fuzz on every workload that is drawn."""
    __tracebackhide__ = True
    draws = _session(pyfuncitem.config).settings.fuzz
    if not draws:
        return None
    from pytest_attn.session.fuzz import run_fuzz

    return run_fuzz(pyfuncitem, draws)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the records of a case on its report, on which they reach the controller under xdist."""
    report = yield
    if _session(item.config).has_attention_tests:
        from pytest_attn.session.lifecycle import attach_records

        attach_records(item, call, report)
        if _session(item.config).settings.mutants:
            from pytest_attn.session.lifecycle import settle_mutant

            settle_mutant(item, report)
    return report


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark ends the summary where --benchmark-compare-fail fails
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the summary of the cases, or the listing; nothing where there is none."""
    session = _session(config)
    if session.settings.list_only:
        from pytest_attn.session.lifecycle import print_listing

        print_listing(session, terminalreporter)
    elif session.records and not config.getoption("no_summary", False):
        from pytest_attn.session.lifecycle import print_summary

        print_summary(session, terminalreporter, config.get_verbosity())
    if session.settings.rank and not session.settings.list_only:
        from pytest_attn.session.ranking import report_ranking

        report_ranking(session, config, terminalreporter)
    if session.settings.summary or (session.records and os.environ.get("GITHUB_ACTIONS") == "true"):
        from pytest_attn.session.outputs import write_summaries

        write_summaries(session, terminalreporter)
    if session.settings.support and session.records:
        from pytest_attn.session.outputs import write_support

        write_support(session, session.settings.support, terminalreporter)
    if session.settings.report and not session.settings.list_only:
        from pytest_attn.session.outputs import write_report

        write_report(session, session.settings.report, terminalreporter)


def _session(config: pytest.Config) -> AttentionSession:
    from pytest_attn.session.store import SESSION

    return config.stash[SESSION]


# -- fixtures: `pytest --fixtures` prints what stands here ---------------------------------------------------------------


@pytest.fixture
def _attn_parameter(request: pytest.FixtureRequest) -> CaseParameter:
    """What the attention marker gave this item; for the other fixtures."""
    if not hasattr(request, "param"):
        pytest.fail(f"{request.node.nodeid}: the attention fixtures must be arguments of the test, not asked for later", False)
    parameter: CaseParameter = request.param
    return parameter


@pytest.fixture
def attn(request: pytest.FixtureRequest, _attn_parameter: CaseParameter) -> AttentionCase:
    """One attention case: a workload of the marker, with its tensors and judgements.

    Example::

        @pytest.mark.attention("flux-L512", backward=True)
        def test_my_kernel(attn):
            attn.check(lambda q, k, v: my_attention(q, k, v, scale=attn.workload.softmax_scale))

    attn.workload, .backend, .device, .q, .k, .v, .mask, .bias, .sinks, .alibi_slopes, .cu_seqlens, .kv_lens, .page_table
    and .reference describe the case. attn.check(fn) holds fn against exact attention and raises AssertionError with a
    diagnosis where it is wrong; fn may be a callable of (q, k, v), attn_backend, or a backend's name.
    attn.check_invariants(fn) asks what needs no tolerance. attn.measure(fn) checks fn, times it, and raises AssertionError
    where its p50 is slower than the baseline of this machine.
    """
    from pytest_attn.session.lifecycle import make_case

    return make_case(request, _attn_parameter)


@pytest.fixture
def attn_backend(attn: AttentionCase) -> Backend:
    """One of the backends selected by --attn-backends: the test becomes one item per backend.

    Example::

        @pytest.mark.attention("flux")
        def test_every_backend_is_right(attn, attn_backend):
            attn.check(attn_backend)
    """
    assert attn.backend is not None
    return attn.backend


@pytest.fixture
def attn_workload(_attn_parameter: CaseParameter) -> Workload:
    """The workload of the case (attn.workload)."""
    return _attn_parameter.workload


@pytest.fixture
def attn_device(attn: AttentionCase) -> torch.device:
    """The torch device of the case, chosen by the marker or --attn-device."""
    return attn.device


@pytest.fixture
def qkv(attn: AttentionCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors (q, k, v) of the marker's first input distribution, in the marker's layout."""
    return attn.q, attn.k, attn.v


@pytest.fixture
def attn_reference(attn: AttentionCase) -> ReferenceTensors:
    """Exact results for `qkv` in float64: (out, lse, dq, dk, dv); the gradients are None unless backward=True."""
    return attn.reference


@pytest.fixture
def attn_benchmark(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function of samples in seconds, measured elsewhere: hands them to pytest-benchmark, where it is there and enabled.

    Example::

        def test_mine(attn_benchmark):
            attn_benchmark([0.00041, 0.00040, 0.00042], clock="my profiler")
    """
    from pytest_attn.session.bridge import attn_benchmark_recorder

    return attn_benchmark_recorder(request)


@pytest.fixture
def assert_attention_close(attn: AttentionCase) -> Callable[[torch.Tensor], None]:
    """A function of out, computed from `qkv`: raises AssertionError with a diagnosis unless it is within its budget.

    Example::

        @pytest.mark.attention("smoke-full")
        def test_output(qkv, assert_attention_close):
            assert_attention_close(my_attention(*qkv))
    """
    return attn.assert_close
