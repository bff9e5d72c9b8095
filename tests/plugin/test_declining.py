"""A function declines a case by a NotImplementedError with a text: a skip that says so, and never a pass."""

import pytest
import torch

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.raised import declined_because
from pytest_attn.reports.records import read_records

DECLINES = """
def declines(q, k, v):
    raise NotImplementedError("no softcap")

def stub(q, k, v):
    raise NotImplementedError

def lacks_a_kernel(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.to("meta"), k, v)[0].to("cpu")

def declines_flat_inputs(q, k, v):
    if q.std() < 0.3 or k.std() < 0.3:
        raise NotImplementedError("no flat inputs")
    return sdpa(q, k, v, scale=1.0)

def declines_large_values(q, k, v):
    if q.abs().max() > 30:
        raise NotImplementedError("no large values")
    return sdpa(q, k, v)
"""


NESTED = """
import pytest_attn

def without_a_kernel(q, k, v):
    raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

class Own(pytest_attn.Backend):
    name, library, capabilities = "own", "torch", pytest_attn.Capabilities(dtypes=("float32", "bfloat16"))

    def prepare(self, inputs, backward=False):
        return without_a_kernel

class Plain(Own):
    def prepare(self, inputs, backward=False):
        return sdpa
"""
JUDGMENTS = ("check", "check_invariants", "measure")
LATER = (
    "calls = []\ndef late(q, k, v):\n    calls.append(1)\n    if len(calls) > 6:\n        raise NotImplementedError('tired')\n"
)
STORIES = {
    **{one: (f"attn.{one}(declines)", "skipped", ["SKIPPED * declines: no softcap"]) for one in JUDGMENTS},
    **{
        f"torch has no kernel, {one}": (f"attn.check({one})", "skipped", ["SKIPPED *No viable backend*"], {"before": NESTED})
        for one in ("without_a_kernel", "Own()")
    },
    "a backend of a test's own declines what it does not take": (
        "attn.check(Plain())",
        "skipped",
        ["SKIPPED * own: cannot say which probabilities it dropped*"],
        {"before": NESTED, "marker": 'Workload(32, heads=2, head_dim=32, dropout=0.1), device="cpu"'},
    ),
    "a stub without a text": ("attn.check(stub)", "failed"),
    "a later refusal hides no mismatch": (f"{LATER}    return sdpa(q, k, v, scale=1.0)\nattn.check(late)", "failed"),
    "a variant of an invariant does not apply": (
        "report = attn.check_invariants(declines_large_values)\n"
        "(declined,) = [f for f in report.findings if f.evidence == 'no large values']\n"
        "assert (declined.invariant, declined.outcome) == ('magnitude', 'not applicable') and report.applied",
        "passed",
    ),
}


def test_what_a_function_declines_is_a_skip_with_its_text(tell):
    tell({name: (*story, *((), {"before": DECLINES})[len(story) - 2 :]) for name, story in STORIES.items()})


def test_without_pytest_it_is_a_not_implemented_error():
    def declines(q, k, v):
        raise NotImplementedError("no softcap")

    with pytest.raises(NotImplementedError, match="declines h2-s32-d32: no softcap"):
        pytest_attn.check(declines, Workload(32, heads=2, head_dim=32), device="cpu", name="mine")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


@pytest.mark.parametrize(
    "fault",
    [
        lambda: torch.empty(2, device="meta").tolist(),
        lambda: NoBackward.apply(torch.ones(1, requires_grad=True)).sum().backward(),
        lambda: torch.ops.aten._fused_sdp_choice(*(torch.empty(1, 1, 1, 1).to_sparse() for _ in range(3))),
        lambda: (_ for _ in ()).throw(NotImplementedError("thrown, not raised by its author")),
    ],
)
def test_what_torch_raises_is_a_fault(fault):
    with pytest.raises(NotImplementedError) as raised:
        fault()
    assert declined_because(raised.value) is None


def test_a_group_that_has_dropout_skips_callables_that_say_not_what_they_dropped(pytester):
    pytester.makepyfile("""
        import pytest
        import torch
        from pytest_attn import Workload

        def attention(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        @pytest.mark.attention("features-dropout", "features-batch", device="cpu")
        def test_of_a_group(attn):
            attn.check(attention)

        @pytest.mark.attention(Workload(64, heads=2, dropout=0.2), device="cpu")
        def test_of_its_own(attn):
            attn.check(attention)
        """)
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*has dropout: needs a callable that returns which weights it kept*"])
    result.stdout.fnmatch_lines(["*ValueError*has dropout: let the callable return which weights it kept*"])


# -- a run may ask that nothing is declined -------------------------------------------------------------------------------

BACKENDS = """
import pytest
from pytest_attn import Backend

class Refusing(Backend):
    name = "refusing"

    def unsupported_because(self, workload, machine, backward=False):
        return ["has no such mask"]

    def prepare(self, inputs, backward=False):
        raise AssertionError("nobody calls it")

class Missing(Refusing):
    name = "missing"

    def unavailable_because(self, machine):
        return "is not installed"

def registered(q, k, v, workload):
    raise NotImplementedError("no window")

def pytest_attn_backends(registry):
    registry.add(Refusing())
    registry.add(Missing())
    registry.add_function("registered", registered)
"""
TIMED = """
def in_inference(q, k, v, calls=[]):
    calls.append(1)
    if len(calls) > 8:
        raise NotImplementedError("not again")
    return sdpa(q, k, v)
"""


@pytest.fixture
def in_process(pytester):
    return lambda *args: pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)


def test_what_is_declined_fails_where_that_is_asked_for(tell):
    said = ["E * declined: declines: no softcap", "E * allow *--attn-declines=skip", "no result * declined: no softcap"]
    stories = {one: (f"attn.{one}(declines)", "failed", said, {"before": DECLINES}) for one in JUDGMENTS}
    tell(stories, "--attn-declines=fail")


def test_a_backend_declines_and_what_is_not_here_does_not(in_process, kernel_test, pytester):
    pytester.makeconftest(BACKENDS)
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = in_process("--attn-declines=fail", "--attn-backends=refusing,missing,registered")
    result.assert_outcomes(failed=1, errors=1, skipped=1)
    result.stdout.fnmatch_lines_random(["*declined: refusing: has no such mask", "*declined: registered: no window"])


@pytest.mark.parametrize(("latency", "outcome"), [("auto", "skipped"), ("require", "failed")])
def test_what_is_declined_only_when_timed(in_process, kernel_test, latency, outcome):
    kernel_test('attn.measure(in_inference, name="mine")', before=TIMED)
    result = in_process(f"--attn-latency={latency}", "-rs")
    result.assert_outcomes(**{outcome: 1})
    said = {
        "auto": "mine: right, but not timed: not again",
        "require": "it passed its check, and declined to be timed: not again",
    }
    result.stdout.fnmatch_lines_random([f"*{said[latency]}*", "*1 case judged*"])


# -- nothing judged is no pass ---------------------------------------------------------------------------------------------

OTHERS = "\ndef test_of_something_else():\n    pass\n"


def test_a_run_in_which_all_is_declined_is_not_green(run, kernel_test):
    kernel_test("attn.check(declines)", before=DECLINES + OTHERS)
    result = run()
    result.assert_outcomes(skipped=1, passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "nothing was judged, 1 declined; *",
            "nothing was judged: the kernels declined every case *; --attn-unjudged=warn lets it pass",
        ]
    )
    for allowed in ("--attn-unjudged=warn", "--attn-unjudged=ignore", "--splits=2"):
        assert run(allowed, *(["--group=1", "-k", "kernel"] if "splits" in allowed else [])).ret in (0, 5), allowed


BROKEN = """
from pytest_attn import Backend, Capabilities

class Broken(Backend):
    name = "broken"
    capabilities = Capabilities(masks=frozenset(), features=frozenset())

    def broken_because(self):
        print("its import is tried")
        return "its library is installed but cannot be imported"

    def prepare(self, inputs, backward=False):
        raise AssertionError("it was called")

def pytest_attn_backends(registry):
    registry.add(Broken())
"""


def test_a_library_that_cannot_be_imported_is_not_here(run, kernel_test, pytester):
    pytester.makeconftest(BROKEN)
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend", marker='Workload(8), Workload(8, mask="causal")')
    result = run("--attn-backends=broken", "--attn-output=run.jsonl")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["nothing was judged: the backends that --attn-backends names are missing here; *"])
    causes = {one["reason"]: one["cause"] for one in read_records(pytester.path / "run.jsonl")}
    assert causes == {"its library is installed but cannot be imported": "not here", "has no causal mask": "declined"}
    result = run("--attn-backends=broken", "-k", "causal", "-s")
    assert "is tried" not in result.stdout.str()
    result.stdout.fnmatch_lines(["nothing was judged: the kernels declined every case that could run; *"])


def test_a_run_whose_cases_were_taken_away_meanwhile_is_not_green(in_process, kernel_test):
    """By what a kernel finds among all objects: pytest's list of tests."""
    before = """
import gc

def ends_the_run(q, k, v):
    found = next(one for one in gc.get_objects() if type(one) is pytest.Session and one.config is CONFIG[0])
    del found.items[1:]
    return sdpa(q, k, v)

CONFIG = []

@pytest.fixture(autouse=True)
def the_run(request):
    CONFIG[:] = [request.config]
"""
    kernel_test("attn.check(ends_the_run)", before=before, marker="Workload(8), Workload(9), Workload(10)")
    result = in_process()
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["2 of 3 cases never ran, and nothing stopped the run: they were taken out of *; *"])
    assert in_process("-x", "--attn-unjudged=warn").ret == pytest.ExitCode.OK


def test_a_run_that_has_judged_something_is(in_process, kernel_test, pytester):
    pytester.makeconftest(BACKENDS)
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = in_process("--attn-backends=math,refusing,missing")
    result.assert_outcomes(passed=1, skipped=2)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["1 right; * 1 case judged, 1 declined, 1 skipped; -rs lists the reasons of skips"])


@pytest.mark.parametrize(
    ("options", "others", "status"),
    [
        (["--attn-backends=missing"], "", pytest.ExitCode.TESTS_FAILED),
        (["--attn-backends=missing"], OTHERS, pytest.ExitCode.OK),
        (["-o", "attn_backends=missing"], "", pytest.ExitCode.OK),
        (["--attn-backends=available"], "", pytest.ExitCode.OK),
    ],
    ids=["named", "beside others", "in an ini file", "available"],
)
def test_backends_that_are_not_here(in_process, kernel_test, pytester, options, others, status):
    pytester.makeconftest(BACKENDS)
    marker = 'Workload(32, heads=2, head_dim=32), device="cpu", backends=("missing", "math")'
    kernel_test("attn.check(attn_backend)", marker, fixtures="attn, attn_backend", before=others)
    assert in_process(*options).ret == status


def test_hardware_that_is_not_here_is_no_fault(in_process, kernel_test):
    kernel_test("attn.check(sdpa)", before='@pytest.mark.attention_requires(arch=">=9.0")')
    assert in_process("-q").ret == pytest.ExitCode.OK


SLOW = """
from pytest_attn import Backend

class Slow(Backend):
    name = "slow"
    compiled = []

    def unsupported_because(self, workload, machine, backward=False):
        return ["has no softcap"] if workload.softcap else []

    def refusal_in(self, error):
        return "its compiler knows no such mask"

    def prepare(self, inputs, backward=False):
        def call(q, k, v):
            self.compiled.append(inputs.workload)
            raise RuntimeError("mask")
        return call

def pytest_attn_backends(registry):
    registry.add(Slow())

def pytest_sessionfinish():
    print("compiled", len(Slow.compiled))
"""


def test_a_backend_that_refuses_as_it_compiles_is_asked_once(in_process, kernel_test, pytester):
    pytester.makeconftest(SLOW)
    workloads = ", ".join(f"Workload(32, heads=2, head_dim=32, {option})" for option in ("mask='causal'", "softcap=3.0"))
    asked = [("check", ""), ("check_invariants", ""), ("measure", ""), ("check", gradients := ", backward=True")]
    more = "".join(
        f"@pytest.mark.attention({workloads}, device='cpu', backends='slow'{also})\n"
        f"def test_{number}(attn, attn_backend):\n    attn.{judgment}(attn_backend)\n"
        for number, (judgment, also) in enumerate([*asked, ("measure", gradients)])
    )
    kernel_test("attn.check(sdpa)", before=more)
    result = in_process("-rs")
    result.assert_outcomes(passed=1, skipped=10)
    result.stdout.fnmatch_lines(["*compiled 2"])  # forward, and with gradients
    assert sum("slow: its compiler knows no such mask" in line for line in result.outlines if line.startswith("SKIPPED")) == 5
