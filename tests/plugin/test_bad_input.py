"""Bad input: one clear error that says who, what was found, what was expected; nothing runs."""

import sys
import time

import pytest
import torch

from pytest_attn.cases.tensors import ReferenceTensors
from pytest_attn.reports.records import read_records

GRADIENTS = 'backward must be True, False, or a tuple of "q", "k", "v", "sinks", "bias", "alibi"'
MARKERS = [
    ('"flix"', "unknown workload 'flix'; did you mean flux? groups: smoke, edges, features, flux"),
    ("[]", "attention was given an empty list of workloads; name one, or nothing for the run's selection"),
    ("42", "a workload must be a name or a Workload, got int 42; say for example Workload(200, heads=2)"),
    ('"smoke-full", backwards=True', "attention got an unknown argument 'backwards'; did you mean backward"),
    ('"smoke-full", atol=1e-3', "attention got an unknown argument 'atol'; each element has a budget of its own: precision="),
    ('"smoke-full", masks="causal"', "attention got an unknown argument 'masks'; say Workload(..., mask=...);"),
    ('workloads="smoke-full"', "attention got an unknown argument 'workloads'; they come first and have no name: attention("),
    ('"smoke-full", heads=4', "attention got an unknown argument 'heads'; Workload(...) takes it; known: backends"),
    ('"smoke-full", backend="sdpa"', "attention got an unknown argument 'backend'; did you mean backends"),
    ('"smoke-full", backends=["spda"]', "unknown backend 'spda'; did you mean sdpa? known: math"),
    ('"smoke-full", dtypes=["int4"]', "unknown dtype 'int4'; known: bfloat16"),
    ('"smoke-full", layout="sbhd"', "layout must be one of bhsd, bshd, thd, hsd, shd, bthd, bhtd, got 'sbhd'"),
    ('"smoke-full", device="tpu"', "device must be cpu, cuda, cuda:N, xpu or mps, got 'tpu'"),
    ('"smoke-full", inputs="rand"', "unknown input distribution 'rand'; known: structured, flat"),
    ('"smoke-full", precision="int2"', "unknown precision 'int2'; did you mean int8? known: flash, flash2, eager"),
    ('"smoke-full", precision=[8]', "unknown precision [8]; known: flash, flash2, eager"),
    ('"smoke-full", empty_rows="nan"', "empty_rows must be one of zero, finite, any, got 'nan'"),
    ('"smoke-full", contiguous="yes"', "contiguous must be one of True, False, got 'yes'"),
    ('"smoke-full", backward="yes"', 'backward must be True, False, or a tuple of "q", "k"'),
    ('"smoke-full", device="cuda:99"', "device 'cuda:99' is not there; this machine has"),
    ('"smoke-full", layout="thd"', "layout 'thd' is for packed workloads (q_lens), smoke-full is not one; say 'shd'"),
    ('Workload(36, batch=2), layout="shd"', "layout 'shd' has no batch dimension and needs batch=1; b2-s36-d64 has batch=2"),
    ('"smoke-full", backward=("q", "k", "v", "mask")', f"{GRADIENTS}, got "),
    ('"smoke-full", backward=()', f"{GRADIENTS}, got ()"),
    ('"smoke-full", backward=("q", "bias")', "backward asks for a gradient of bias, and no workload has bias"),
    ('"smoke-full", covering=3', "covering must be one of None, 1, 2, got 3"),
    ('"smoke-full", ranks=0', "ranks must be a number of processes, 1 or more"),
    ('"smoke-full", ranks=(2, "4")', "ranks must be a number of processes"),
    ('"smoke-full", shard="striped"', "shard says how ranks share a sequence; say over how many"),
    ('"smoke-full", ranks=2, shard="zigzag"', "shard must be contiguous, head-tail, striped, or a function"),
    ('Workload(64, sinks=True), ranks=2, backward=("q", "k", "v", "sinks")', "ranks have gradients of q, k and v"),
    (
        'Workload(32, name="ours"), Workload(33, name="ours")',
        "two different workloads are named 'ours': s32-d64 and s33-d64; rename one",
    ),
]


@pytest.fixture
def run_each(run, kernel_test, pytester):
    """Return a function that writes a test file for each of several arguments of `kernel_test`, and runs all at once."""

    def running(body, several, *options):
        for number, arguments in enumerate(several):
            kernel_test(body, **arguments)
            (written,) = pytester.path.glob("test_a*.py")
            written.rename(pytester.path / f"test_{number}.py")
        result = run(*options)
        assert "INTERNALERROR" not in result.stdout.str()
        return result

    return running


def test_a_bad_marker_is_a_collection_error(run_each):
    result = run_each("raise SystemExit('ran')", [{"marker": marker} for marker, _ in MARKERS])
    result.assert_outcomes(errors=len(MARKERS))
    for number, (_, message) in enumerate(MARKERS):
        assert f"test_{number}.py::test_kernel: {message}" in result.stdout.str()


#: a marker, its arguments, and what is said of them
OTHER_MARKERS = [
    ("requires", "sm=90", "attention_requires got an unknown argument 'sm'; known: backend, arch, memory, gpus"),
    ("requires", "'sm90'", "attention_requires takes keyword arguments only, got 'sm90'"),
    ("requires", "arch='hopper'", "arch must be like '>=8.0,<10.0', 'sm90', 'gfx942' or 'cpu', got 'hopper'"),
    ("requires", "memory='much'", "memory must be a size such as '4 GiB', got 'much'"),
    ("requires", "gpus=-1", "gpus must be a whole number >= 0, got -1"),
    ("requires", "backend='nope>=2'", "unknown backend 'nope'"),
    ("requires", "timed='yes'", "timed must be one of True, False, got 'yes'"),
]


def with_mark(mark, arguments):
    return {"before": f"pytestmark = pytest.mark.attention_{mark}({arguments})"}


def test_a_bad_argument_of_another_marker_is_a_collection_error(run_each):
    result = run_each("pass", [with_mark(mark, arguments) for mark, arguments, _ in OTHER_MARKERS])
    result.assert_outcomes(errors=len(OTHER_MARKERS))
    assert [message for *_, message in OTHER_MARKERS if message not in result.stdout.str()] == []


UNMET = [
    ("arch='>=9.0'", "needs arch >=9.0, this device is cpu"),
    ("arch='gfx942'", "needs arch gfx942, this device is cpu"),
    ("memory='900 TiB'", "needs 921600 GiB of memory, this device has"),
    ("gpus=64", "needs 64 GPUs, this machine has"),
    ("backend='sdpa_cudnn'", "needs backend sdpa_cudnn: needs a CUDA device"),
    ("backend='math>=99'", "needs backend math>=99, version "),
]


def test_an_unmet_requirement_skips_with_its_reason_and_a_met_one_runs(tell):
    unmet = {one: ("raise SystemExit('ran')", "skipped", [reason], with_mark("requires", one)) for one, reason in UNMET}
    met = with_mark("requires", "arch='cpu', memory='1 MiB', gpus=0, backend='math>=2.0'")
    tell({**unmet, "met": ("attn.check(sdpa)", "passed", (), met)})


@pytest.mark.parametrize("marker", ['"smoke-full", device="cuda:99", covering=2', 'device="cuda:99", backends="math"'])
def test_a_requirement_on_a_device_that_is_not_there_skips_and_the_others_run(run, kernel_test, pytester, marker):
    kernel_test("raise SystemExit('ran')", marker=marker, fixtures="attn, attn_backend")
    (missing,) = pytester.path.glob("test_a*.py")
    missing.write_text(f"{missing.read_text()}\npytestmark = pytest.mark.attention_requires(gpus=1)\n")
    missing.rename(pytester.path / "test_0.py")
    kernel_test("attn.check(sdpa)")
    for option, outcome in (("-rs", "passed"), ("--attn-list", None)):
        result = run(option)
        assert "device 'cuda:99' is not there; this machine has cpu" in result.stdout.str()
        assert outcome is None or result.parseoutcomes()[outcome] == 1


def test_two_markers_on_one_test_are_a_collection_error(run, kernel_test):
    kernel_test("raise SystemExit('ran')", marker='"smoke-full")\n@pytest.mark.attention(dtypes="fp16"')
    result = run()
    result.assert_outcomes(errors=1)
    assert "::test_kernel: has two attention markers; put their arguments into one" in result.stdout.str()


def test_a_marker_that_is_misspelt_is_named(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.atention('smoke-full')\ndef test_it(attn): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-W", "ignore")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*::test_it: uses attn but has no marker attention, only atention; say for example @pytest.mark.attention(*"]
    )


def test_fixtures_and_parameters_of_the_users_own_may_have_our_names(pytester):
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef qkv(): return 'mine'")
    pytester.makepyfile(
        """
        import pytest

        def test_fixture(qkv):
            assert qkv == "mine"

        @pytest.mark.parametrize("attn_workload", ["mine"])
        def test_parameter(attn_workload):
            assert attn_workload == "mine"

        @pytest.mark.attention("smoke-full")
        def test_marked(qkv):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["judges nothing: it names workloads, but takes none of the fixtures: *"])


def test_a_workload_larger_than_the_device_is_skipped_with_the_sizes(run, kernel_test):
    kernel_test("attn.check(attn_backend)", marker='Workload(500_000, heads=64), device="cpu"', fixtures="attn, attn_backend")
    result = run("--attn-backends=math", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *h64-s500000-d64 needs about * GiB, * has * GiB"])


def test_a_callable_that_raises_fails_with_its_own_words(run, kernel_test, pytester):
    kernel_test("attn.check(broken)", before="def broken(q, k, v):\n    raise RuntimeError('no kernel image')\n")
    result = run("--attn-output=run.jsonl")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*RuntimeError: no kernel image", "raised        broken on h2-s32-d32: RuntimeError: no kernel image"]
    )
    assert "pytest_attn/" not in result.stdout.str(), "the plugin's own frames show"
    if sys.version_info >= (3, 11):  # before that, exceptions have no notes
        by = "E *by         broken on h2-s32-d32, given layout bhsd"
        (record,) = read_records(pytester.path / "run.jsonl")
        assert record["explanation"][1:] == [{"label": "by", "text": "broken on h2-s32-d32, given layout bhsd"}]
        result.stdout.fnmatch_lines([by, "E *reproduce  pytest 'test_*.py::test_kernel[[]h2-s32-d32]' --attn-device=cpu"])


#: without which nothing is said beneath what a callable raised
HAS_NOTES = sys.version_info >= (3, 11)

STORIES = {
    "a tolerance": (
        "attn.check(sdpa, rtol=1e-2)",
        "failed",
        ["E*attn.check has no argument 'rtol'; each element has a budget of its own: precision= says *; it takes fn, name,"],
    ),
    "an argument of the marker": (
        "attn.check(sdpa, backward=True)",
        "failed",
        ["E*attn.check has no argument 'backward'; the marker takes it: @pytest.mark.attention(..., backward=...); it takes"],
    ),
    "a word that is misspelt": ("attn.chek(sdpa)", "failed", ["E*attn has no attribute 'chek'; did you mean check?"]),
    "no word of ours": (
        "attn.xyz(sdpa)",
        "failed",
        ["E*attn has no attribute 'xyz'; its judgments are assert_close, *check_m"],
    ),
    "a tensor, not a function": (
        "attn.check(sdpa(attn.q, attn.k, attn.v))",
        "failed",
        ["E*got a bfloat16 tensor of shape (1, 2, 32, 32); pass the function, do not call it"],
    ),
    "a function and its tensors": (
        "attn.check(sdpa, attn.q, attn.k, attn.v)",
        "failed",
        ["E*TypeError: attn.check takes fn, name, dequantized; q, k, v and exact attention are its own"],
    ),
    "a backend that is called": (
        "attn.check(lambda q, k, v: attn_backend(q, k, v))",
        "failed",
        ["E *backend    attn_backend is not a function of (q, k, v): hand it over itself" if HAS_NOTES else "E*not callable"],
        {"fixtures": "attn, attn_backend", "marker": '"smoke-full", backends="math"'},
    ),
    "several invariants in a text": (
        "attn.check_invariants(sdpa, only='rerun,poison')",
        "failed",
        ["E*unknown invariant 'rerun,poison'; did you mean ('rerun', 'poison')? known: "],
    ),
    "a function, not a tensor": (
        "attn.assert_close(sdpa)",
        "failed",
        ["E*takes out, a tensor; attn.check(fn) calls fn itself"],
    ),
    "lengths that nobody read": (
        "attn.check(sdpa)",
        "failed",
        ["E*suggests   it equals attention that ignores kv_lens *", "E*unread     * never read attn.kv_lens"],
        {"marker": "Workload(32, heads=2, kv_lens=(32, 9))"},
    ),
    "a test that ends early": ("raise RuntimeError('early')", "failed", ["ended before a kernel was judged"]),
    "a device may be torch's own": ("attn.check(sdpa)", "passed", (), {"marker": '"smoke-full", device=torch.device("cpu")'}),
    **{
        f"{judgment} of one that raises": (
            f"attn.{judgment}({judgment}_raises)",
            "failed",
            ["E*KeyError: 'tile'", f"raised        {judgment}_raises on h2-s32-d32: KeyError: 'tile'"],
            {"before": f"def {judgment}_raises(q, k, v):\n    raise KeyError('tile')\n"},
        )
        for judgment in ("check", "check_invariants", "measure")
    },
}


@pytest.mark.skipif(not HAS_NOTES, reason="before Python 3.11 exceptions have no notes")
@pytest.mark.parametrize(
    "said", ["Torch not compiled with CUDA enabled", "Expected all tensors, but found at least two devices"]
)
def test_cuda_that_a_test_on_a_cpu_asks_for_is_answered_with_what_to_type(run, kernel_test, said):
    kernel_test("attn.check(moved)", before=f"def moved(q, k, v):\n    raise AssertionError({said!r})\n")
    said = "E *device     the tensors of this case are on the cpu: compute where q is, q.device; *attention_requires(gpus=1)"
    run().stdout.fnmatch_lines([said])


def test_whatever_is_asked_what_cannot_be_judged_is_named_and_shown_alone(tell):
    assert "pytest_attn/" not in tell(STORIES).stdout.str(), "the plugin's own frames show"


ENDLESS = """
def endless(q, k, v):
    while True:
        pass

def stubborn(q, k, v):
    try:
        endless(q, k, v)
    except Exception:
        return sdpa(q, k, v)
"""


def test_a_callable_that_never_returns_is_stopped_and_named(tell):
    said = "no result after 0.3 s (--attn-timeout): {} on h2-s32-d32, *::test_kernel[[]h2-s32-d32[]]"
    stories = {
        name: (f"attn.check({name})", "failed", [f"E*{said.format(name)}", "no result *no result after"], {"before": ENDLESS})
        for name in ("endless", "stubborn")
    }
    tell(stories, "--attn-timeout=0.3")


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("workers", [(), ("-n", "1", "--max-worker-restart=0")], ids=["serial", "xdist"])
def test_a_callable_that_never_comes_back_to_python_ends_the_process(pytester, kernel_test, workers):
    """As a kernel that spins would: a mutex locked twice, in C, that no exception can interrupt."""
    kernel_test(
        "attn.check(spins)",
        before="""
import ctypes
import pytest_attn.session.deadline as deadline

deadline.GRACE = 1.0

def spins(q, k, v):
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
""",
    )
    started = time.monotonic()
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--attn-timeout=1", *workers)
    assert time.monotonic() - started < 60
    assert result.ret == (1 if workers else 70)
    assert "no result after 1 s (--attn-timeout): spins on h2-s32-d32, " in result.stderr.str()
    if workers:
        result.stdout.fnmatch_lines(["*worker 'gw0' crashed while running '*::test_kernel[[]h2-s32-d32[]]'*"])


FAULTY = """
import pytest
from pytest_attn import Backend
from pytest_attn.backends.library import Library


class Faulty(Backend):
    name = "faulty"

    def prepare(self, inputs, backward=False):
        return lambda q, k, v: q

    {method}


def pytest_attn_backends(registry):
    registry.add(Faulty())
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "method",
    [
        "def unavailable_because(self, machine): raise KeyError('boom')",
        "def broken_because(self): raise KeyError('boom')",
        "def unsupported_because(self, workload, machine, backward=False): raise KeyError('boom')",
        "def version(self): raise KeyError('boom')",
    ],
)
def test_a_faulty_backend_harms_neither_the_listing_nor_the_others(run, kernel_test, pytester, method):
    pytester.makeconftest(FAULTY.format(method=method))
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    listing = run("--attn-list", "--attn-backends=faulty,math")
    assert listing.ret == 0
    listing.stdout.fnmatch_lines(["math *available"])
    result = run("--attn-backends=faulty,math", "--attn-output=out.support.md")
    assert "INTERNALERROR" not in result.stdout.str()
    if "version" in method:
        result.stdout.fnmatch_lines(["mismatch      faulty on *"])
    else:
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["raised        faulty on *: KeyError: 'boom'", "1 right, 1 raised; *"])
        assert "| `faulty` | 1 raised |" in (pytester.path / "out.support.md").read_text()


def test_lengths_are_handed_to_a_function_by_its_name(run, kernel_test):
    named = "torch.nn.functional:scaled_dot_product_attention"
    kernel_test(f"attn.check({named!r})", marker="Workload(32, heads=2, kv_lens=(32, 9))")
    result = run()
    result.stdout.fnmatch_lines(["E*suggests   it equals attention that ignores kv_lens *"])
    assert "never read" not in result.stdout.str()


@pytest.mark.parametrize(
    ("registration", "said"),
    [
        ("1 / 0", "pytest_attn_backends of a conftest raised ZeroDivisionError: division by zero"),
        ("registry.add(print)", "add takes an instance of pytest_attn.Backend, got <built-in function print>"),
    ],
)
def test_a_conftest_that_fails_to_register_is_named(run, kernel_test, pytester, registration, said):
    pytester.makeconftest(f"def pytest_attn_backends(registry):\n    {registration}\n")
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = run("--attn-backends=math")
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert said in result.stdout.str() + result.stderr.str()


def test_the_exact_results_are_no_tensor():
    exact = ReferenceTensors(*[torch.zeros(1)] * 5)
    said = r"allclose takes a tensor, and attn.reference is \(out, lse, dq, dk, dv\); say attn.reference.out, or "
    with pytest.raises(TypeError, match=said):
        torch.allclose(exact.out, exact)
    assert torch.cat(exact[:2]).shape == torch.stack(exact).flatten()[:2].shape
