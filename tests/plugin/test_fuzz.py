"""--attn-fuzz: what is drawn for a test, what a failure says, and that what it says is true."""

import re
from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

#: the same draws on every run; without a database
STEADY = """
import hypothesis

hypothesis.settings.register_profile("steady", derandomize=True, database=None)
hypothesis.settings.load_profile("steady")
"""

#: with a database, also where CI leaves it out, and other draws on every run
KEPT = """
import hypothesis
from hypothesis.database import DirectoryBasedExampleDatabase

hypothesis.settings.register_profile("kept", database=DirectoryBasedExampleDatabase(".hypothesis/examples"))
hypothesis.settings.load_profile("kept")
"""

CAUSAL = 'Workload(32, heads=2, head_dim=16, mask="causal"), Workload(32, head_dim=16, dtype="float32"), device="cpu"'

FORGETS = """
def forgets(q, k, v, causal):  # the mask, where there are more than 70 keys
    return sdpa(q, k, v, is_causal=causal and k.shape[2] <= 70)
"""

CHECK_FORGETS = "attn.check(lambda q, k, v: forgets(q, k, v, attn.workload.mask is not None))"


@pytest.fixture(autouse=True)
def conftest(pytester):
    """Keep what Hypothesis writes in the test's own folder."""
    profile = hypothesis.settings.get_current_profile_name()
    set_hypothesis_home_dir(pytester.path / ".hypothesis")

    def write(before=STEADY, after=""):
        pytester.makeconftest(f"import pytest\n{before}\n{after}")

    write()
    yield write
    hypothesis.settings.load_profile(profile)
    set_hypothesis_home_dir(None)


@pytest.fixture
def fuzz(pytester):
    def run_it(*args, number=60):
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", f"--attn-fuzz={number}", "-k", "fuzz", *args)

    return run_it


def pasted(result):
    text = result.stdout.str()
    found = re.search(r"-- Captured fuzz call -+\n(.*?)\n(?:=====|_____|-----)", text, re.DOTALL)
    assert found, text
    return found[1]


def test_a_wrong_kernel_fails_with_the_smallest_workload(run, kernel_test):
    kernel_test(CHECK_FORGETS, marker=CAUSAL, before=FORGETS)
    result = run("--attn-fuzz=60")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_kernel[[]fuzz[]] _*",
            "*@pytest.mark.attention*",
            f">*{CHECK_FORGETS}",
            "E*AssertionError: mismatch: out of *lambda*: z * in one element, limit 8 (s71-d16-causal, inputs structured)",
            "E*suggests   it equals attention without the mask *",
            "E*reproduce  pytest '*.py::test_kernel[[]fuzz[]]' *",
            'E*fuzz       draw * failed; the smallest workload that does is Workload(71, head_dim=16, mask="causal")',
            "*- Captured fuzz call -*",
            "# found by --attn-fuzz=60, draw *, --attn-seed=0: mismatch: *",
            "import pytest",
            "from pytest_attn import Workload",
            "from test_* import forgets",
            "",
            "",
            "@pytest.mark.attention(Workload(71, head_dim=16, mask=\"causal\"), device='cpu')",
            "def test_kernel_s71_d16_causal(attn):",
            f"    {CHECK_FORGETS}",
            "mismatch      *lambda* on s71-d16-causal: out z * (found by --attn-fuzz=60, draw *; the smallest that fails)",
            "2 right, 1 wrong; *",
        ]
    )
    text = result.stdout.str()
    assert "Falsifying" not in text
    assert "hypothesis/" not in text, "frames of Hypothesis show"
    assert "fuzz_case.py" not in text, "the plugin's own frames show"


def test_the_printed_test_stands_alone_in_a_file_of_its_own(fuzz, pytester):
    pytester.makepyfile(
        test_mine="""
        import math
        import pytest
        import torch.nn.functional as F
        from pytest_attn import Precision, Window

        LIMIT = 70

        def forgets(q, k, v, causal):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal and k.shape[2] <= LIMIT)

        @pytest.mark.attention("smoke-causal-gqa", "smoke-full", device="cpu", precision=Precision("own"))
        def test_kernel(attn):
            assert math.inf > LIMIT and Window
            attn.check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 1.5)
        """
    )
    first = fuzz(number=5)
    text = pasted(first)
    for line in ("import math", "import torch.nn.functional as F", "from test_mine import LIMIT", "from pytest_attn import"):
        assert re.search(rf"^{line}", text, re.M), text
    pytester.path.joinpath("test_alone.py").write_text(text)
    alone = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_alone.py")
    alone.assert_outcomes(failed=1)
    assert "NameError" not in alone.stdout.str()


@pytest.mark.slow("draws workloads")
def test_a_failure_is_replayed_first_the_next_time(conftest, kernel_test, pytester):
    conftest(before=KEPT)
    kernel_test(CHECK_FORGETS, marker=CAUSAL, before=FORGETS)
    draw = r"draw (\d+) failed; the smallest workload that does is Workload\(71, head_dim=16, mask=\"causal\"\)"
    args = ("-k", "fuzz", "--attn-fuzz=300", "--attn-device=cpu")
    first = pytester.runpytest_inprocess(*args).stdout.str()
    assert re.search(draw, first), first
    assert list(Path(pytester.path, ".hypothesis").rglob("*")), "nothing was kept"
    again = pytester.runpytest_inprocess("--lf", *args)
    again.assert_outcomes(failed=1)
    assert re.search(draw, again.stdout.str())[1] == "1"


@pytest.mark.slow("draws workloads")
def test_refusals_are_counted_and_no_draw(conftest, fuzz, kernel_test):
    conftest(
        after="""
def pytest_attn_backends(registry):
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    registry.add_function("tall", lambda q, k, v, workload: sdpa(q, k, v, enable_gqa=True), unsupported_because=refuses)

def refuses(w):
    needs = (w.mask, w.kv_lens, w.softcap, w.scale, w.bias, w.alibi, w.sinks, w.score_mod)
    return ["wants no mask, option or padding"] if any(needs) else []
"""
    )
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend", marker='"smoke-full", device="cpu"')
    result = fuzz("--attn-backends=tall", number=8)
    result.assert_outcomes(passed=1, deselected=1)
    counts = re.search(r"tall on fuzz.*: .*\b(\d+) draws, ([\d,]+) refused", result.stdout.str())
    assert counts, result.stdout.str()
    assert int(counts[2].replace(",", "")) > 8, "few were refused"
    assert int(counts[1]) == 8, "refused draws count as draws"


@pytest.mark.slow("draws workloads")
def test_a_seed_that_is_given_also_draws_the_workloads(fuzz, kernel_test):
    kernel_test("print('drew', attn.workload.id)\nattn.check(lambda q, k, v: sdpa(q, k, v))")
    one, same, other = (re.findall("drew .*", fuzz("-rA", f"--attn-seed={seed}", number=6).stdout.str()) for seed in (5, 5, 6))
    assert one == same != other


RIGHT = "attn.check(lambda q, k, v: sdpa(q, k, v))"
OF_THE_DRAW = """
q, k, v = qkv
w = attn_workload
assert (w, attn_device) == (attn.workload, attn.device)
assert tuple(q.shape) == (w.batch, w.heads, w.q_len, w.head_dim)
assert attn_reference.out.shape == q.shape
seen.add(tuple(q.shape))
assert_attention_close(sdpa(q, k, v))
"""
MINE = "@pytest.fixture\ndef mine(attn):\n    return sdpa\n"
DRAWING = "from hypothesis import HealthCheck, given, settings, strategies as st\n"
GIVEN = '"smoke-full", device="cpu")\n@settings(suppress_health_check=list(HealthCheck))\n@given(x=st.integers()'
STORIES = {
    "a right kernel": (RIGHT, "passed", ["*lambda* on fuzz*: *60 draws"]),
    "known defects are counted": (
        f"if attn.workload.batch > 1:\n    pytest.xfail('known')\n{RIGHT}",
        *("passed", ["draws, [0-9]* known defects"]),
    ),
    "a test may refuse a draw": (
        f"if attn.workload.heads != 2:\n    pytest.skip('two heads')\n{RIGHT}",
        *("passed", ["draws, [0-9]* refused"]),
    ),
    "an exception shrinks as well": (
        "attn.check(lambda q, k, v: sdpa(q, k, v) * (1 if k.shape[2] < 11 else 1 // 0))",
        "failed",
        [
            "E*ZeroDivisionError: ",
            "E*fuzz       draw * failed; the smallest workload that does is Workload(11, head_dim=32)",
            "# found by --attn-fuzz=60, draw ",
            "raised        - on s11-d32: ZeroDivisionError: * (found by --attn-fuzz=60, draw *; the smallest that fails)",
        ],
    ),
    "pytest.fail is a failure": (
        f"{RIGHT}\nif attn.workload.heads > 1:\n    pytest.fail('several heads')",
        *("failed", ["E*Failed: several heads", "E*smallest workload that does is Workload(1, heads=2, head_dim=32)"]),
    ),
    "a kernel that fails at times": (
        "calls.append(1)\nattn.check(lambda q, k, v: sdpa(q, k, v) * (2 if len(calls) == 5 else 1))",
        "failed",
        ["mismatch: out of *lambda* z ", "It did not fail again on Workload(*)"],
        {"before": "calls = []"},
    ),
    "measure only checks": ("attn.measure(lambda q, k, v: sdpa(q, k, v))\nraise RuntimeError('not reached')", "passed"),
    "measure finds a wrong kernel": (
        "attn.measure(lambda q, k, v: sdpa(q, k, v) * (k.shape[2] < 9))",
        *("failed", ["E*the smallest workload that does is Workload(9, head_dim=32)"]),
    ),
    "every fixture is of the draw": (
        OF_THE_DRAW,
        "passed",
        (),
        {
            "fixtures": "attn, attn_workload, attn_device, qkv, attn_reference, assert_attention_close",
            "before": "seen = set()\n",
            "after": "def test_seen_by_fuzz():\n    assert len(seen) > 10\n",
        },
    ),
    "nothing is judged": ("attn.q", "skipped", ["not fuzzed: the test judges nothing; it never calls attn.check"]),
    "a fixture asks for the case": (
        "attn.check(mine)",
        "skipped",
        ["not fuzzed: fixture 'mine' asks for an attention fixture, and would be made once for all draws"],
        {"before": MINE, "fixtures": "attn, mine"},
    ),
    "Hypothesis draws already": (
        "pass",
        "skipped",
        ["not fuzzed: the test already draws with Hypothesis"],
        {"before": DRAWING, "marker": GIVEN, "fixtures": "attn, x"},
    ),
}


@pytest.mark.slow("draws workloads")
def test_what_is_drawn_ends_as_the_test_does_and_is_said(tell):
    tell(STORIES, "--attn-fuzz=60", "-k", "fuzz", passed=6, deselected=len(STORIES))


def test_an_async_test_is_skipped_as_nothing_awaits_it(fuzz, pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.attention("smoke-full", device="cpu")
        async def test_kernel(attn):
            attn.check("math")
    """)
    result = fuzz("-rs", number=2)
    result.assert_outcomes(skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["*not fuzzed: an async test, which nothing awaits here"])
