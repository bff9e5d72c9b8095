"""A marked test that passes and has judged nothing: it would stay green whatever its kernel did."""

import pytest

FIXTURE = "judges nothing: it names workloads, but takes none of the fixtures: give it attn, and call attn.check(your_kernel)"
CALL = "judges nothing: it passed without a call of attn.check, check_invariants, measure or assert_close"
TENSORS = "computes with q, k and v, but calls none of attn.check, check_invariants, measure and assert_close"
SMALL = 'Workload(32, heads=2, head_dim=32), device="cpu"'


CHECKING = "def helper(out, exact):\n    assert out.shape == exact.shape\n"
DECLINING = "def mine(q, k, v):\n    if q.is_cuda:\n        raise NotImplementedError('no GPU')\n    return sdpa(q, k, v)\n"
FORGOTTEN = {
    "nothing is called": ("pass", ""),
    "the tensors are used": (f"{DECLINING}mine(attn.q, attn.k, attn.v)", ""),
    "by a function of the module": ("mine(attn.q, attn.k, attn.v)", DECLINING),
    "something is read": ("attn.workload", ""),
    "something is printed": ("print(attn.workload, attn.backend)", ""),
    "a branch is not taken": ("if attn.workload.heads > 2:\n    attn.check(sdpa)", ""),
    "check is not called": ("attn.check", ""),
    "a time without a judgment": ("sdpa(attn.q, attn.k, attn.v, scale=attn.workload.scale)", ""),
    "the reference is not compared with": ("out, exact = sdpa(attn.q, attn.k, attn.v), attn.reference.out", CHECKING),
    "a helper asserts nothing": ("helper(attn.q, attn.k)", "def helper(q, k):\n    return q + k\n"),
}


def test_a_forgotten_check_fails_whatever_the_test_reads(tell):
    forgotten = {name: (body, "failed", [CALL], {"before": before}) for name, (body, before) in FORGOTTEN.items()}
    no_fixture = ("pass", "failed", [FIXTURE], {"fixtures": ""})
    a_backend = (
        "pass",
        "failed",
        [f"{CALL} (--attn-unjudged=warn or ignore lets it pass)"],
        {"fixtures": "attn, attn_backend"},
    )
    result = tell({**forgotten, "no fixture": no_fixture, "a backend": a_backend}, "--attn-backends=math")
    assert "raised" not in result.stdout.str(), "the kernel did nothing wrong"


UNUSED = "no backend was judged, as it takes attn_backend and does not use it: judge that, or leave the argument out"


def test_a_backend_that_is_taken_and_not_used_fails(tell):
    unused = {"attn.check(sdpa)": "attn, attn_backend", "attn.measure(sdpa)": "attn, attn_backend"}
    tell({body: (body, "failed", [UNUSED], {"fixtures": names}) for body, names in unused.items()}, "--attn-backends=math")


#: what is compared, and the fixtures: with what, nobody knows; it may be right to
COMPARED = [
    ("assert sdpa(attn.q, attn.k, attn.v).isfinite().all()", "attn"),
    ("torch.testing.assert_close(sdpa(*qkv), sdpa(*qkv))", "qkv"),
    ("torch.testing.assert_close(sdpa(*qkv), sdpa(*qkv, scale=attn.workload.scale))", "qkv, attn"),
    ("helper(sdpa(*qkv), qkv[0])", "qkv"),
    ("given(sdpa(*qkv), qkv[0])", "qkv, given"),
]


def test_a_test_that_compares_by_itself_is_warned(tell):
    before = f"{CHECKING}\n@pytest.fixture\ndef given():\n    return helper\n"
    stories = {body: (body, "passed", (), {"fixtures": fixtures, "before": before}) for body, fixtures in COMPARED}
    result = tell(stories, "-Wdefault", warnings=len(COMPARED))
    assert result.stdout.str().count(TENSORS) == len(COMPARED)


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
    ("attn.check(attn_backend)", "attn, attn_backend"),
    ("attn.measure(attn_backend)", "attn, attn_backend"),
    ("attn.check(lambda q, k, v: sdpa(q, k, v, scale=None if attn_backend.name else 0))", "attn, attn_backend"),
    ("attn.assert_close(attn_backend.name and sdpa(*qkv))", "attn, qkv, attn_backend"),
    ("attn.check(attn.backend)", "attn, attn_backend"),
    ("attn.check(sdpa)", "attn, attn_backend, uses"),
    ("assert attn_workload.heads == 2", "attn_workload"),
    ("attn_benchmark([1e-3] * 5)", "attn, attn_benchmark"),
    ("assert before", "attn, before"),
    ("assert after", "attn, after"),
]


def test_a_test_that_judges_or_whose_fixture_does_passes_without_a_word(tell):
    fixture = "@pytest.fixture\ndef {}(attn):\n    {}\n"
    fixtures = fixture.format("before", "attn.check(sdpa); yield True") + fixture.format(
        "after", "yield True; attn.check(sdpa)"
    )
    fixtures += "@pytest.fixture\ndef uses(attn_backend):\n    return attn_backend.name\n"
    stories = {f"{body} {n}": (body, "passed", (), {"fixtures": n, "before": CHECKING + fixtures}) for body, n in JUDGES}
    tell(stories, "--attn-backends=math", "-Wdefault", warnings=0)


@pytest.mark.parametrize("mark", ["pytest.mark.attention", "pytest.mark.attention(device='cpu')"])
def test_a_mark_that_names_no_workload_asks_for_no_judgment(run, pytester, mark):
    pytester.makepyfile(f"import pytest\n@{mark}\ndef test_other():\n    pass\n")
    run().assert_outcomes(passed=1)


def test_a_unittest_whose_method_or_class_has_a_marker_is_told_what_to_do(run, pytester):
    pytester.makepyfile("""
import unittest
import pytest

class One(unittest.TestCase):
    @pytest.mark.attention("smoke-full")
    def test_method(self): pass
    def test_other(self): pass

@pytest.mark.attention_model
class Two(unittest.TestCase):
    def test_class(self): pass

@pytest.mark.attention
class Three(unittest.TestCase):
    def test_of_no_kernel(self): pass
""")
    result = run()
    result.assert_outcomes(passed=2, failed=2)
    words = (
        "judges nothing: it has the marker {}, and a unittest.TestCase can take no fixture: make it a plain class, * takes {}*"
    )
    result.stdout.fnmatch_lines([words.format("attention", "attn"), words.format("attention_model", "attn_model")])


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


def test_one_that_fails_or_is_skipped_is_left_as_it_is(tell):
    stories = {"skipped": ("pytest.skip('not here')", "skipped"), "failed": ("assert False, 'mine'", "failed", ["mine"])}
    assert "judges nothing" not in tell(stories).stdout.str()


def test_it_is_a_warning_or_nothing_where_asked_for(run, kernel_test, pytester):
    kernel_test("pass")
    result = run("--attn-unjudged=warn", "-Wdefault")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([f"*UnjudgedWarning: {CALL}*"])
    pytester.makeini("[pytest]\nattn_unjudged = ignore")
    run().assert_outcomes(passed=1, warnings=0)
