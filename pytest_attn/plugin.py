"""pytest's hooks for attention kernels: declare, read, hand over, print; and the fixtures that tests take."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Generator, Iterable
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn import hooks
from pytest_attn.processes.lifetime import keep_status
from pytest_attn.seam import Kind
from pytest_attn.session.benchmark_traces import BenchmarkTraces, is_asked_for
from pytest_attn.session.kinds import (
    KINDS,
    PARAMETER,
    CaseParameter,
    has_test_of_attention,
    is_case,
    is_marked,
    kind_of,
    parameter_of,
    register_kinds_of_guests,
    selected_cases,
)
from pytest_attn.session.options import add_options, require_known
from pytest_attn.session.pytest_versions import items_of
from pytest_attn.session.registrations import tell_conftests
from pytest_attn.session.session import SESSION, AttentionSession, session_of

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.cases.case import AttentionCase
    from pytest_attn.cases.tensors import ReferenceTensors
    from pytest_attn.workloads.workload import Workload


#: the plugins with the hooks that are called for each test
_OF_TESTS = ("attn-hooks-of-tests", "attn-results")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have guests register themselves, and declare the options."""
    register_kinds_of_guests()
    add_options(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None, object, object]:
    """Refuse an unknown option that begins as ours do, with those that may have been meant."""
    result = yield
    require_known(args, parser)
    return result


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks for conftests, and take part in each test."""
    pluginmanager.add_hookspecs(hooks)
    pluginmanager.register(HooksOfTests(), _OF_TESTS[0])


def pytest_configure(config: pytest.Config) -> None:
    """Read the settings once, refuse unknown names, and start to collect records."""
    for marker in _marker_lines(config):
        config.addinivalue_line("markers", marker)
    if own := [kind for kind in KINDS.values() if kind.fixture not in globals()]:
        config.pluginmanager.register(fixtures_of_kinds(own), "attn-fixtures-of-kinds")
    session = config.stash[SESSION] = AttentionSession(config)
    settings = session.settings
    if not is_asked_for(config):
        config.pluginmanager.register(BenchmarkTraces(), "attn-benchmark-traces")
    if hasattr(config.option, "parallel_threads"):
        config.pluginmanager.register(InOneThread(), "attn-in-one-thread")
    if settings.gpu_per_worker:
        from pytest_attn.session.devices import take_own_gpu

        take_own_gpu(config)
    if settings.report:
        from pytest_attn.session.output import require_report_libraries

        require_report_libraries()
    for elsewhere in settings.asked["elsewhere"].values():
        session.registrations.named = resolve_name(elsewhere)(config, settings)
    session.registrations.require_selected(settings)
    if settings.asked["kernels"]:
        session.kind_of_kernels.require(config, settings, session.registrations)
    if settings.json:
        from pytest_attn.session.output import open_json_lines

        open_json_lines(session, config)
    config.pluginmanager.register(session.results, _OF_TESTS[1])


def _marker_lines(config: pytest.Config) -> Iterable[str]:
    """Return the markers to declare; their help is long, and is made only where `pytest --markers` shows it."""
    said = [kind.help for kind in KINDS.values() if kind.help]
    if not config.getoption("markers", False):
        return (*(f"{kind.marker}(...)" for kind in KINDS.values() if not kind.help), "attention_requires(...)", *said)
    from pytest_attn.session.marks import marker_help

    return (*(one.text for one in marker_help()), *said)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Have nothing that is imported or called from now on end the run as a success before it is over."""
    attention = session_of(session.config)
    session.config.add_cleanup(keep_status(lambda: int(session.exitstatus) if attention.has_ended else None))


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Leave the terminal to the debugger."""
    if session_of(config).has_attention_tests:
        session_of(config).progress.close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which options differ from their defaults, ready to paste, and where compilers keep what they compile."""
    settings = session_of(config).settings
    shown = settings.as_options()
    if not shown:
        return []
    from pytest_attn.backends.compilers import kept_line

    return [f"attn: {shown}", *filter(None, [kept_line(settings.backends)])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that uses one of the fixtures an item per case."""
    if PARAMETER in metafunc.fixturenames:  # not where the names are those of fixtures, or of parameters, of the user's own
        from pytest_attn.session.collection import parametrize

        parametrize(metafunc, session_of(metafunc.config))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Deselect tests of which the selection left nothing, and what need not run.

    After -k and the like, keep one item of each backend that this machine lacks.
    """
    session = session_of(config)
    if session.has_attention_tests:
        from pytest_attn.backends.compilers import share_cores
        from pytest_attn.session.collection import deselect_unselected, mark_groups
        from pytest_attn.session.cover import choose

        if workers := getattr(config, "workerinput", {}).get("workercount"):
            share_cores(workers)
        if workers or session.worker:
            atexit.register(gc.freeze)  # else its end looks through all objects, which takes seconds with torch's
        deselect_unselected(config, items)
        choose(config, session, items)
        if config.getoption("loadgroup", False):
            mark_groups(items)
    if config.getoption("benchmark_only", False) or config.getoption("benchmark_skip", False):
        from pytest_attn.cases.pytest_benchmark import mark_measured

        mark_measured(config, items)
    if session.manifest is not None:
        session.manifest.collected = list(items)
    result = yield
    if session.has_attention_tests:
        from pytest_attn.session.collection import keep_one_of_each_missing

        surplus = keep_one_of_each_missing(config, session, items)
        if session.manifest is not None:
            session.manifest.absent = surplus
    return result


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_keep_groups_in_ids(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put xdist's groups into the ids: up to 3.8 it writes them where pytest from 9.2 on does not look."""
    for item in items if config.getoption("loadgroup", False) else ():
        if (grouped := getattr(item, "_nodeid", item.nodeid)) != item.nodeid:
            item._id = type(item._id).parse(grouped)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Switch xdist off for --attn-list: the process that collects is the one that prints."""
    if config.getoption("attn_list") and config.pluginmanager.hasplugin("xdist"):
        config.option.dist, config.option.tx, config.option.numprocesses = "no", [], None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run nothing under --attn-list; in a new process that was prepared, nothing before its turn."""
    attention = session_of(session.config)
    if attention.worker is not None:
        attention.worker.wait_at_gate()
    items = items_of(session)  # none in xdist's controller, which takes the records of its workers
    if items and not attention.settings.outputs and not has_test_of_attention(items):
        manager = session.config.pluginmanager
        for plugin in filter(None, map(manager.get_plugin, _OF_TESTS)):
            manager.unregister(plugin)
    attention.collected.due = sum(map(is_case, items))
    if attention.collected.due and attention.worker is None and not attention.settings.list_only:
        tell_conftests(session.config, selected_cases(items))
    return True if attention.settings.list_only else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the cases, which share the rate of false alarms, and for --attn-list what would run."""
    attention = session_of(session.config)
    if attention.has_attention_tests:
        attention.collected.selected = sum(map(is_case, session.items))
        attention.progress  # noqa: B018 - made now, while no output is captured
    if attention.settings.list_only and attention.has_attention_tests:
        from pytest_attn.session.output import count_runnable

        count_runnable(attention, session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist what only the controller knows: the seed that it drew, who else is on the worker's host."""
    session = node.config.stash.get(SESSION, None)
    if session is None:  # tests of plugins start nodes of a config that nobody has configured
        return
    from pytest_attn.session.devices import place_on_host, require_gpu

    node.workerinput["attn_seed"] = str(session.settings.seed)
    node.workerinput["attn_place"] = place_on_host(node.gateway.spec, node.nodemanager.specs)
    if session.settings.gpu_per_worker:
        require_gpu(node.gateway.spec)


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # xdist's own answers, too, and may have been registered later
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Make `-n auto` as many workers as there are GPUs under --attn-gpu-per-worker, however many this host has."""
    if not config.getoption("attn_gpu_per_worker"):
        return None
    from pytest_attn.session.devices import visible_gpus

    return len(visible_gpus()) or None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over how many cases a worker of xdist has chosen, all of them the same."""
    if counts := getattr(node, "workeroutput", {}).get("attn_chosen"):
        collected = session_of(node.config).collected
        collected.chosen, collected.unchosen = counts


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Say in pytest-benchmark's files which GPU and software times belong to."""
    from pytest_attn.cases.pytest_benchmark import machine_info as add_facts

    add_facts(config, machine_info)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # others may end the process here, with the status that they are given
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Count a listing without tests as a success, and a run as none that was to judge and has judged nothing."""
    attention = session_of(session.config)
    attention.has_ended = True
    if not hasattr(session.config, "workerinput"):
        attention.results.settle(bool(attention.settings.outputs))
    if hasattr(session.config, "workeroutput"):
        collected = attention.collected
        session.config.workeroutput["attn_chosen"] = (collected.chosen, collected.unchosen)
    if attention.settings.list_only and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
    is_asked = attention.settings.unjudged != "ignore" and not hasattr(session.config, "workerinput")
    if attention.results.records and is_asked and session.exitstatus == pytest.ExitCode.OK:
        from pytest_attn.session.output import unjudged_because

        attention.unjudged_because = unjudged_because(attention, session.config)
        if attention.unjudged_because and attention.settings.unjudged == "error":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    try:
        return (yield)
    except KeyboardInterrupt:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
        return None
    finally:
        if attention.settings.outputs or attention.unwritten:
            from pytest_attn.session.output import finish_outputs

            finish_outputs(attention, session)


class InOneThread:
    """Has pytest-run-parallel run a test with a case in one thread: what a kernel leaves changed is the whole process's."""

    @pytest.hookimpl(tryfirst=True)  # pytest-run-parallel decides there, too
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Mark it."""
        if is_case(item) or is_marked(item):
            item.add_marker(pytest.mark.thread_unsafe(reason="attention kernels are judged in one thread"))


class HooksOfTests:
    """The hooks that are called for each test that runs; taken out of a run that has no test of attention."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note that its turn came; share the memory of a GPU with the other workers of the run."""
        session, case = session_of(item.config), parameter_of(item)
        session.collected.begun += is_case(item)
        with session.sharing_memory(case.workload if case else None):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test whose attention_requires does not hold, before pytest looks at its marks."""
        if item.get_closest_marker("attention_requires"):
            from pytest_attn.session.collection import skip_unless_met

            skip_unless_met(item, session_of(item.config))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Have the test of a case called that says by what."""
        __tracebackhide__ = True
        case = parameter_of(pyfuncitem)
        if case is None or not case.caller:
            return None
        resolve_name(case.caller)(pyfuncitem)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Refuse a marked test that passes and has judged nothing."""
        __tracebackhide__ = True
        result = yield
        if is_marked(item):
            from pytest_attn.cases.unjudged import refuse_unjudged

            refuse_unjudged(item)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """End the run where a test has changed its judge, once its fixtures have put back what they replace."""
        conclude = sys.modules.get("pytest_attn.cases.conclude")
        if conclude and is_marked(item):
            conclude.require_judge(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the records of a case on its report, on which they reach the controller under xdist."""
        report = yield
        if is_case(item) or is_marked(item):
            from pytest_attn.cases.case_records import attach_records

            session = session_of(item.config)
            attach_records(item, call, report)
            session.kernels.settle(item, report, session.progress)
        return report


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark ends the summary where --benchmark-compare-fail fails
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the summary of the cases, or the listing, and write the outputs; nothing where there is none."""
    session = session_of(config)
    settings = session.settings
    if settings.list_only or settings.asked["closing"] or settings.outputs or session.results.records:
        from pytest_attn.session.output import print_end

        print_end(session, terminalreporter, config)


# -- fixtures ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _attn_parameter(request: pytest.FixtureRequest) -> CaseParameter:
    """The case that the attention marker gave this item; for the other fixtures."""
    if not hasattr(request, "param"):
        text = "must be arguments of the test, not asked for later; a unittest.TestCase can take none: use a plain class"
        pytest.fail(f"{request.node.nodeid}: the attention fixtures {text}", False)
    parameter: CaseParameter = request.param
    return parameter


@pytest.fixture
def attn(request: pytest.FixtureRequest, _attn_parameter: CaseParameter) -> AttentionCase:
    """One attention case: a workload of the marker, with its tensors and judgments.

    Example::

        @pytest.mark.attention("flux-L512", backward=True)
        def test_my_kernel(attn):
            attn.check(lambda q, k, v: my_attention(q, k, v, scale=attn.workload.softmax_scale))

    Its attributes describe the case: workload, backend, device, q, k, v, mask, bias, sinks, alibi_slopes, cu_seqlens, kv_lens,
    page_table and reference. `attn.check(fn)` compares fn with exact attention and raises AssertionError with a
    diagnosis where it is wrong. fn may be a callable of (q, k, v), attn_backend, or a backend's name.
    `attn.check_invariants(fn)` checks what holds of every kernel. `attn.measure(fn)` checks fn, times it, and raises
    AssertionError where its p50 is slower than the baseline of this machine.
    """
    importing = "" if "torch" in sys.modules else "importing torch"
    with session_of(request.config).progress.during(importing, ""):
        make_case = resolve_name(_attn_parameter.maker or kind_of(request.node).maker)
    case: AttentionCase = make_case(request, _attn_parameter)
    return case


@pytest.fixture
def attn_backend(attn: AttentionCase) -> Backend:
    """One of the backends selected by --attn-backends: the test becomes one item per backend.

    Example::

        @pytest.mark.attention("flux")
        def test_every_backend_is_right(attn, attn_backend):
            attn.check(attn_backend)
    """
    from pytest_attn.cases.case import backend_of

    return backend_of(attn)


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
    from pytest_attn.cases.pytest_benchmark import attn_benchmark_recorder

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


def fixtures_of_kinds(kinds: Iterable[Kind]) -> ModuleType:
    """Return a plugin with the fixtures of kinds that guests and others have registered: each is the case, as `attn` is."""
    module = ModuleType("pytest_attn_kinds")
    for kind in kinds:

        def case(attn: object) -> object:
            return attn

        case.__doc__ = kind.about
        setattr(module, kind.fixture, pytest.fixture(name=kind.fixture)(case))
    return module
