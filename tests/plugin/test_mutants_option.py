"""--attn-mutants, as a user sees it."""

import re

TEST = """
import pytest, torch
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v):
    return sdpa(q, k, v, is_causal=True)

@pytest.mark.attention(Workload(70, heads=2, head_dim=16, mask="causal", name="w"), device="cpu")
def test_checked(attn):
    attn.check(mine)
"""
LAX = """
@pytest.mark.attention(Workload(70, heads=2, head_dim=16, mask="causal", name="w"), device="cpu")
def test_lax(attn):
    try:
        attn.check(mine)
    except AssertionError:
        pass
"""
WRONG = """
@pytest.mark.attention(Workload(70, heads=2, head_dim=16, mask="causal", name="w"), device="cpu")
def test_wrong(attn):
    attn.check(mine)
    assert False, "whatever the kernel"
"""
BACKEND = """
@pytest.mark.attention("smoke-window", "smoke-full", device="cpu")
def test_backends(attn, attn_backend):
    attn.check(attn_backend)
"""


def run(pytester, text, *args):
    pytester.makepyfile(test_it=text)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-mutants", *args)


def test_a_test_that_checks_kills_what_it_reaches(pytester):
    result = run(pytester, TEST)
    assert result.ret == 0
    result.stdout.re_match_lines(
        [
            r".* attention mutants .*",
            r"test +found +tried",
            r"test_it\.py::test_checked +\d\d +\d\d +\d+%",
            r"class +found +tried",
            r"masks +\d+ +\d+ +\d+%",
            r"mutation score \d+%: \d\d of \d\d faulty kernels found",
        ],
        consecutive=False,
    )
    score = int(re.search(r"mutation score (\d+)%", result.stdout.str())[1])
    assert 50 < score <= 100
    assert "largest passing z" not in result.stdout.str()


def test_a_lax_test_kills_nothing_and_the_survivors_are_named(pytester):
    result = run(pytester, TEST.replace("def test_checked", "def checked") + LAX)
    assert result.ret == 0
    result.stdout.re_match_lines(
        [
            r"test_it\.py::test_lax +0 +\d\d +0%",
            r"survived  right-edge-one-key-late: Each row .* sees one key too many on its right\. Try .*",
            r"mutation score 0%: 0 of \d\d faulty kernels found",
        ],
        consecutive=False,
    )


def test_a_test_that_fails_on_the_honest_kernel_is_a_failed_test(pytester):
    result = run(pytester, TEST.replace("def test_checked", "def checked") + WRONG)
    assert result.ret == 1
    assert "test_wrong[w-honest]" in result.stdout.str()
    assert result.parseoutcomes()["failed"] == 1


def test_a_mutant_is_run_until_it_is_killed(pytester):
    result = run(pytester, TEST.replace("def test_checked", "def checked") + BACKEND, "-rs")
    result.stdout.re_match_lines([r"SKIPPED \[\d+\] .* was found already"], consecutive=False)
    result.stdout.re_match_lines([r"masks +(\d+) +\1 +100%"], consecutive=False)


def test_names_can_be_chosen_with_k_and_ids_tell_them(pytester):
    result = run(pytester, TEST, "-k", "right-edge-one-key-late or honest", "-v")
    result.stdout.fnmatch_lines(["*::test_checked[[]w-right-edge-one-key-late] PASSED*", "mutation score 100%: 1 of 1 *"])


def test_times_are_not_taken(pytester):
    result = run(pytester, TEST.replace("attn.check", "attn.measure"), "-k", "right-edge-one-key-late or honest")
    result.stdout.fnmatch_lines(["mutation score 100%: 1 of 1 *"])
    result.assert_outcomes(passed=1, skipped=1)


def test_workers_bring_what_they_found(pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--attn-mutants", "-n", "2", "-k", "right-edge")
    result.stdout.re_match_lines([r"mutation score 100%: \d of \d faulty kernels found"], consecutive=False)
