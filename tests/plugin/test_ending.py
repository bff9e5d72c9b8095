"""A kernel cannot end, skip or excuse its test: what it raises to that end is a fault of it, by name."""

import functools
import os
import signal
import subprocess
import sys
import unittest

import pytest
import torch

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.raised import EndsTestError, ending_no_test
from pytest_attn.backends.subject import RefusedError
from pytest_attn.guests.fuzz.fuzz_case import DrawEndsError
from pytest_attn.invariants.invariant import NotApplicable

#: statements of a kernel, and what they are called in its fault
ENDINGS = {
    "pytest.skip('not here')": "mine raised pytest.skip (not here): a kernel cannot end, skip or excuse its test",
    "pytest.xfail('known')": "mine raised pytest.xfail (known)",
    "pytest.fail('odd')": "mine raised pytest.fail (odd)",
    "pytest.exit('done', returncode=0)": "mine raised pytest.exit (done)",
    "pytest.importorskip('no_such_module')": "mine raised pytest.skip (could not import 'no_such_module'",
    "raise unittest.SkipTest('no GPU')": "mine raised unittest.SkipTest (no GPU)",
    "sys.exit(0)": "mine raised SystemExit (0)",
    "os._exit(0)": "mine called os._exit(0)",
    "os.execv('/bin/true', ['true'])": "mine called os.execv(...)",
    "raise Lying('no GPU')": "mine raised Lying, which says itself of which class it is (no GPU)",
    "raise Hidden('no GPU')": "mine raised Hidden, which says itself of which class it is (no GPU)",
    "raise KeyboardInterrupt": "mine raised KeyboardInterrupt",
    "raise GeneratorExit": "mine raised GeneratorExit",
    "raise RefusedError('not this one')": "mine raised pytest-attn's own RefusedError (not this one)",
    "raise NotApplicable('nor this')": "mine raised pytest-attn's own NotApplicable (nor this)",
    "raise DrawEndsError": "mine raised pytest-attn's own DrawEndsError",
    "with refusals(): raise ValueError('by a context of yours')": "mine raised pytest-attn's own RefusedError (by a context",
}
IMPORTS = """
import os, sys, unittest
from pytest_attn.backends.subject import RefusedError
from pytest_attn.guests.fuzz.fuzz_case import DrawEndsError
from pytest_attn.correctness.call import refusals
from pytest_attn.invariants.invariant import NotApplicable

class Lying(Exception):
    __class__ = property(lambda self: pytest.skip.Exception)

class Hidden(Exception):
    def __getattribute__(self, name):
        return unittest.SkipTest if name == "__class__" else super().__getattribute__(name)

class Turning(Exception):
    def __str__(self):
        self.__class__ = unittest.SkipTest
        return "turned"

class Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        {statement}

def forward(q, k, v):
    {statement}

def backward(q, k, v):
    return Ending.apply(sdpa(q, k, v))

def timed(q, k, v, calls=[]):
    calls.append(1)
    if not torch.is_grad_enabled() and len(calls) > 6:
        {statement}
    return sdpa(q, k, v)

def later(q, k, v):
    if q.abs().max() > 30:
        {statement}
    return sdpa(q, k, v)
"""


@pytest.fixture
def in_process(pytester):
    """Run pytest on the files of `pytester` in this process, which a kernel is not to end."""
    return lambda *args: pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("statement", ENDINGS)
def test_what_ends_a_test_is_a_fault_of_the_kernel(in_process, kernel_test, pytester, statement):
    kernel_test(
        'getattr(attn, judgment)(fn, name="mine")',
        marker='Workload(16, heads=1, head_dim=16), device="cpu", backward=True',
        fixtures="attn, judgment, fn",
        before=f"{IMPORTS.replace('{statement}', statement)}\n"
        "asked = [('check', forward), ('check_invariants', backward), ('measure', timed), ('check', backward),\n"
        "         ('check_invariants', forward), ('check_invariants', later), ('measure', forward)]\n"
        "@pytest.mark.parametrize('judgment, fn', asked, ids=lambda one: getattr(one, '__name__', one))",
    )
    ran = pytester.inline_run("-p", "no:cacheprovider", "--attn-timeout=20")
    reports = {report.nodeid: report for report in ran.getreports("pytest_runtest_logreport") if report.when == "call"}
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    assert len(reports) == 7
    for name, report in reports.items():
        assert report.failed, name
        assert ENDINGS[statement] in report.longreprtext, name
        assert not hasattr(report, "wasxfail")


def test_what_turns_into_a_skip_where_its_text_is_read(in_process, kernel_test):
    before = IMPORTS.replace("{statement}", "raise Turning")
    kernel_test("getattr(attn, judgment)(timed)", fixtures="attn, judgment", before=f"{before}\n{EACH_JUDGMENT}")
    in_process().assert_outcomes(failed=2, passed=1)  # whose inputs are never that large


EACH_JUDGMENT = "@pytest.mark.parametrize('judgment', ['check', 'check_invariants', 'measure'])"


def test_on_draws_of_fuzz(in_process, kernel_test):
    kernel_test(
        "attn.check(forward)",
        before=IMPORTS.replace("{statement}", "import hypothesis; hypothesis.assume(q.shape[2] > 1 and False)"),
    )
    result = in_process("--attn-fuzz=3", "-k", "fuzz", "-p", "hypothesispytest")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*forward raised hypothesis.assume (*): a kernel cannot end*"])


def test_in_a_profile(in_process, kernel_test):
    kernel_test(
        "def profiled(q, k, v):\n"
        "    return pytest.skip('only then') if torch.autograd._profiler_enabled() else sdpa(q, k, v)\n"
        "attn.check(profiled)"
    )
    result = in_process("--attn-profile")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*profiled raised pytest.skip (only then)*"])


def test_in_a_model_and_in_what_takes_its_place(in_process, pytester):
    pytester.makepyfile("""
        import pytest
        import torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        import pytest_attn
        from pytest_attn.guests.models.call_to_workload import UnreadableError

        class Model(torch.nn.Module):
            def __init__(self, ends):
                super().__init__()
                self.projection, self.ends = torch.nn.Linear(16, 48), ends

            def forward(self, x):
                q, k, v = self.projection(x).view(1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
                out = sdpa(q, k, v)
                if self.ends:
                    pytest.skip("a layer")
                return out.sum()

        def mine(q, k, v, workload):
            pytest.skip("a function")

        def refuses(q, k, v, workload):
            raise UnreadableError("too odd")

        @pytest.mark.attention_model(device="cpu")
        @pytest.mark.parametrize("ends, target", [(True, None), (False, mine), (False, refuses)])
        def test_model(attn_model, ends, target):
            model = Model(ends)
            attn_model.check(model, lambda: model(torch.randn(1, 8, 16)), target)

        @pytest.mark.parametrize("look", [pytest_attn.check_model, lambda model, step: pytest_attn.capture(step, model)])
        def test_without_the_fixture(look):
            model = Model(True)
            look(model, lambda: model(torch.randn(1, 8, 16)))
        """)
    result = in_process()
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(
        [
            "*the step raised pytest.skip (a layer): a kernel cannot*",
            "*mine raised pytest.skip (a function): a kernel cannot*",
            "*refuses raised pytest-attn's own UnreadableError (too odd)*",
        ]
    )


class Wrapped(torch.nn.Module):
    def forward(self, q, k, v):
        raise unittest.SkipTest("deep inside")


class Exits(torch.autograd.Function):
    forward = staticmethod(lambda ctx, q, k, v: sys.exit(0))


SKIPS = torch.no_grad()(lambda q, k, v: pytest.skip("no"))
ENDS_A_LOOP = functools.partial(lambda q, k, v: next(iter(())))


@pytest.mark.parametrize(
    "target", [Wrapped(), Exits.apply, SKIPS, ENDS_A_LOOP], ids=["module", "operator", "no_grad", "partial"]
)
def test_without_pytest(target):
    with pytest.raises(EndsTestError, match="a kernel cannot end, skip or excuse its test"):
        pytest_attn.check(target, Workload(16, heads=1, head_dim=16), device="cpu")


def test_a_registered_function_and_a_prepared_backend(in_process, kernel_test, pytester):
    pytester.makeconftest("""
        import pytest
        from pytest_attn import Backend

        class Mine(Backend):
            name = "lazy"

            def prepare(self, inputs, backward=False):
                pytest.skip("cannot be prepared")

        def registered(q, k, v, workload):
            pytest.skip("not today")

        def pytest_attn_backends(registry):
            registry.add_function("mine", registered)
            registry.add(Mine())
        """)
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = in_process("--attn-backends=mine,lazy")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*mine raised pytest.skip (not today)*", "*lazy raised pytest.skip (cannot be prepared)*"])


# -- what is no act of a kernel passes ---------------------------------------------------------------------------------


def _signaled():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


def _passed_on():
    try:
        _signaled()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("cleaned up") from None


@pytest.mark.parametrize("interrupted", [_signaled, _passed_on])
def test_a_real_ctrl_c_passes(interrupted, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a worker of xdist ignores
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt), ending_no_test("mine"):
        interrupted()


def test_a_time_limit_of_pytest_timeout_passes():
    home = {"__name__": "pytest_timeout", "pytest": pytest}
    exec("def handler(): pytest.fail('Timeout >1.0s')", home)
    with pytest.raises(pytest.fail.Exception), ending_no_test("mine"):
        home["handler"]()


def test_children_of_a_kernel_end_as_they_like():
    before = os._exit
    with ending_no_test("mine"):
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert subprocess.run([sys.executable, "-c", "import os; os._exit(3)"], check=False).returncode == 3
    assert os._exit is before


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, RuntimeError, AssertionError, MemoryError])
def test_what_fails_a_test_is_raised_as_it_is(kind):
    with pytest.raises(kind) as raised, ending_no_test("mine"):
        raise kind("as ever")
    assert raised.value.args == ("as ever",)


@pytest.mark.parametrize("own", [RefusedError, NotApplicable, DrawEndsError])
def test_our_own_word_is_told_from_a_kernels(own):
    def raised_by_us():
        raise own("ours")

    home = sys.modules["pytest_attn.correctness.judge"].__dict__
    ours = type(raised_by_us)(raised_by_us.__code__, {**home}, closure=raised_by_us.__closure__)
    with pytest.raises(EndsTestError), ending_no_test("mine"):  # only claims to be of that module
        ours()


# -- the process of a run ----------------------------------------------------------------------------------------------


EARLY = {
    "at import": "os._exit(0)",
    "by another name": "import posix; posix._exit(0)",
    "by another program": "os.execv('/bin/true', ['true'])",
    "from a thread": "import threading, time; threading.Timer(0.01, os._exit, (0,)).start(); time.sleep(9)",
    "in the end": "import atexit; atexit.register(os._exit, 0)",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", EARLY)
def test_no_run_ends_as_a_success_before_it_is_over(pytester, way):
    pytester.makepyfile(kernels=f"import os\n{EARLY[way]}\n")
    pytester.makepyfile("import kernels\ndef test_it(): assert False\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 1
    if way != "in the end":
        result.stderr.fnmatch_lines(["os.* was called before the run had ended: it ends with status 1"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hook", ["pytest_sessionfinish(session, exitstatus)", "pytest_unconfigure(config)"])
@pytest.mark.parametrize("passes", [True, False])
def test_a_conftest_may_end_the_process_once_all_tests_have(pytester, hook, passes):
    """As where a library's threads would keep it from ending."""
    status = "exitstatus" if "exitstatus" in hook else "0"
    pytester.makeconftest(f"import os, pytest\n@pytest.hookimpl(tryfirst=True)\ndef {hook}: os._exit({status})\n")
    pytester.makepyfile(f"def test_it(): assert {passes}\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == (0 if passes else 1)
    result.stderr.no_fnmatch_line("*was called before*")


REEXEC = """
import os, sys
def {hook}:
    if "STARTED" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]], {{**os.environ, "STARTED": "1"}})
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hook", ["pytest_sessionstart(session)", "pytest_collection_modifyitems(config, items)"])
@pytest.mark.parametrize("place", ["conftest", "kernels"])
def test_a_conftest_may_start_pytest_anew_and_nothing_that_it_imports(pytester, hook, place):
    started = "def pytest_sessionstart(session): import kernels"
    pytester.makeconftest(REEXEC.format(hook=hook) if place == "conftest" else started)
    pytester.makepyfile(kernels=f"{REEXEC.format(hook='start()')}start()\n")
    pytester.makepyfile("def test_it(): pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s")
    assert result.ret == (0 if place == "conftest" else 1)


def test_what_ends_a_process_goes_to_others_by_its_name(pytester):
    pytester.makepyfile("""
        import multiprocessing, os, pickle
        def test_pickled():
            for end in (os._exit, os.execv):
                assert pickle.loads(pickle.dumps(end)) is end
        def test_spawned():
            process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(7,))
            process.start()
            process.join()
            assert process.exitcode == 7
        """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_what_a_kernel_has_taken_hold_of_ends_the_process_as_ever_afterwards():
    child = os.fork()
    if not child:
        with ending_no_test("mine"):
            held = os._exit
        held(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_ends_a_process_is_as_before_after_a_run(pytester):
    before = os._exit, os.execv, os.execve
    pytester.makepyfile("def test_it(): pass\n")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    assert (os._exit, os.execv, os.execve) == before
