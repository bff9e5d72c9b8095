"""A marked test that passes and has judged nothing: it would stay green whatever its kernel did."""

import pytest

FIXTURE = "judges nothing: it names workloads, but takes none of the fixtures: give it attn, and call attn.check(your_kernel)"
CALL = "judges nothing: it passed without a call of attn.check, check_invariants, measure or assert_close"
TENSORS = "computes with q, k and v, but calls none of attn.check, check_invariants, measure and assert_close"
SMALL = 'Workload(32, heads=2, head_dim=32), device="cpu"'


@pytest.mark.parametrize("fixtures", ["attn", "attn, attn_backend"])
def test_a_test_that_calls_nothing_fails(run, kernel_test, fixtures):
    kernel_test("pass", fixtures=fixtures)
    result = run("--attn-backends=math")
    result.assert_outcomes(failed=1)
    assert f"{CALL} (--attn-unjudged=warn or ignore lets it pass)" in result.stdout.str()
    assert "raised" not in result.stdout.str(), "the kernel did nothing wrong"


CHECKING = "def helper(out, exact):\n    assert out.shape == exact.shape\n"
DECLINING = "def mine(q, k, v):\n    if q.is_cuda:\n        raise NotImplementedError('no GPU')\n    return sdpa(q, k, v)\n"
FORGOTTEN = [
    (f"{DECLINING}mine(attn.q, attn.k, attn.v)", ""),
    ("mine(attn.q, attn.k, attn.v)", DECLINING),
    ("attn.workload", ""),
    ("print(attn.workload, attn.backend)", ""),
    ("if attn.workload.heads > 2:\n    attn.check(sdpa)", ""),
    ("attn.check", ""),
    ("sdpa(attn.q, attn.k, attn.v, scale=attn.workload.scale)", ""),
    ("out, exact = sdpa(attn.q, attn.k, attn.v), attn.reference.out", CHECKING),
    ("helper(attn.q, attn.k)", "def helper(q, k):\n    return q + k\n"),
]


@pytest.mark.parametrize(("body", "before"), FORGOTTEN, ids=[body.splitlines()[-1] for body, _ in FORGOTTEN])
def test_a_forgotten_check_fails_whatever_the_test_reads(run, kernel_test, body, before):
    kernel_test(body, before=before)
    result = run()
    result.assert_outcomes(failed=1)
    assert CALL in result.stdout.str()


def test_a_test_without_a_fixture_fails(run, kernel_test):
    kernel_test("pass", fixtures="")
    result = run()
    result.assert_outcomes(failed=1)
    assert FIXTURE in result.stdout.str()


@pytest.mark.parametrize(
    ("body", "fixtures"),
    [
        ("assert sdpa(attn.q, attn.k, attn.v).isfinite().all()", "attn"),
        ("torch.testing.assert_close(sdpa(*qkv), sdpa(*qkv))", "qkv"),
        ("torch.testing.assert_close(sdpa(*qkv), sdpa(*qkv, scale=attn.workload.scale))", "qkv, attn"),
        ("helper(sdpa(*qkv), qkv[0])", "qkv"),
        ("given(sdpa(*qkv), qkv[0])", "qkv, given"),
    ],
)
def test_a_test_that_compares_by_itself_is_warned(run, kernel_test, body, fixtures):
    """What it compares with, nobody knows: it may be right to."""
    kernel_test(body, fixtures=fixtures, before=f"{CHECKING}\n@pytest.fixture\ndef given():\n    return helper\n")
    result = run("-Wdefault")
    result.assert_outcomes(passed=1, warnings=1)
    assert TENSORS in result.stdout.str()


JUDGES = [
    ("attn.check(sdpa)", "attn"),
    ("attn.check_invariants(sdpa, only='rerun')", "attn"),
    ("attn.measure(sdpa)", "attn"),
    ("assert_attention_close(sdpa(*qkv))", "qkv, assert_attention_close"),
    ("torch.testing.assert_close(sdpa(*qkv).double(), attn_reference.out, atol=0.1, rtol=0.1)", "qkv, attn_reference"),
    ("with pytest.raises(AssertionError):\n    attn.check(lambda q, k, v: q)", "attn"),
    ("def no(q, k, v):\n    raise NotImplementedError\nwith pytest.raises(NotImplementedError):\n    attn.check(no)", "attn"),
    ("helper(sdpa(*qkv), attn_reference.out)", "qkv, attn_reference"),
    ("import pytest_attn\npytest_attn.check(sdpa, attn.workload, device='cpu')", "attn"),
    ("assert attn.backend.name == 'math'", "attn, attn_backend"),
    ("assert attn_workload.heads == 2", "attn_workload"),
    ("attn_benchmark([1e-3] * 5)", "attn, attn_benchmark"),
]


@pytest.mark.parametrize(("body", "fixtures"), JUDGES, ids=[body.splitlines()[0] for body, _ in JUDGES])
def test_a_test_that_judges_passes_without_a_word(run, kernel_test, body, fixtures):
    kernel_test(body, fixtures=fixtures, before=CHECKING)
    result = run("--attn-backends=math", "-Wdefault")
    result.assert_outcomes(passed=1, warnings=0)


@pytest.mark.parametrize("order", ["attn.check(sdpa); yield", "yield; attn.check(sdpa)"], ids=["before", "after"])
def test_what_a_fixture_judges_is_judged(run, kernel_test, order):
    kernel_test("pass", fixtures="attn, judged", before=f"@pytest.fixture\ndef judged(attn):\n    {order}\n")
    run().assert_outcomes(passed=1, warnings=0)


@pytest.mark.parametrize("mark", ["pytest.mark.attention", "pytest.mark.attention(device='cpu')"])
def test_a_mark_that_names_no_workload_asks_for_no_judgment(run, pytester, mark):
    pytester.makepyfile(f"import pytest\n@{mark}\ndef test_other():\n    pass\n")
    run().assert_outcomes(passed=1)


def test_a_helper_beside_tests_of_kernels_is_no_test_of_one(run, pytester):
    """A module's marker is for those of its tests that take a fixture."""
    pytester.makepyfile(f"""
import pytest
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa
pytestmark = pytest.mark.attention({SMALL})

def test_kernel(attn):
    attn.check(sdpa)

def test_helper():
    pass
""")
    run().assert_outcomes(passed=2)


def test_one_that_fails_or_is_skipped_is_left_as_it_is(run, kernel_test):
    kernel_test("pytest.skip('not here')")
    run().assert_outcomes(skipped=1)
    kernel_test("assert False, 'mine'")
    result = run()
    result.assert_outcomes(failed=1)
    assert "mine" in result.stdout.str()
    assert "judges nothing" not in result.stdout.str()


def test_it_is_a_warning_or_nothing_where_asked_for(run, kernel_test, pytester):
    kernel_test("pass")
    result = run("--attn-unjudged=warn", "-Wdefault")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([f"*UnjudgedWarning: {CALL}*"])
    pytester.makeini("[pytest]\nattn_unjudged = ignore")
    run().assert_outcomes(passed=1, warnings=0)
