"""attn.check_invariants as a user sees it."""

import pytest

#: once is enough: that records arrive from a worker is told in test_stories
ONCE = pytest.mark.parametrize("run", ["serial"], indirect=True)
KERNEL = 'Workload(70, heads=2, head_dim=32), device="cpu"'
HONEST = "attn.check_invariants(lambda q, k, v: sdpa(q, k, v))"


def test_an_honest_kernel_holds_all(run, kernel_test):
    kernel_test(HONEST, marker=f"{KERNEL}, backward=True")
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 with all invariants that apply; 1 kernel on 1 workload; 1 case judged"])


def test_a_broken_invariant_is_a_failed_test_with_its_evidence(run, kernel_test):
    kernel_test(
        "attn.check_invariants(kept)",
        marker=KERNEL,
        before="KEPT = {}\ndef kept(q, k, v):\n    return KEPT.setdefault(q.data_ptr(), (sdpa(q, k, v), q))[0]\n",
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"E +AssertionError: \d invariants? broken by kept \(h2-s70-d32\)",
            r"E +state +.*: out\[.*\] = .*, was .*",
            r"E +reproduce +pytest .*",
            r"broken +kept on h2-s70-d32: .*state.*",
            r"1 with a broken invariant; 1 kernel on 1 workload",
        ],
        consecutive=False,
    )
    assert "pytest_attn/invariants" not in result.stdout.str()


NONE_APPLIES = "none of the requested invariants applies: graph needs a CUDA device; device "
STORIES = {
    "what applies to nothing has not held": (
        'attn.check_invariants(lambda q, k, v: sdpa(q, k, v), only=["graph", "device"])',
        *("skipped", [f"SKIPPED*{NONE_APPLIES}"]),
    ),
    "a backend is asked by name": ('attn.check_invariants("math")', "passed"),
    "an expected break is no failure": (
        "with pytest.raises(AssertionError, match='broken'):\n"
        "    attn.check_invariants(lambda q, k, v: sdpa(q, k, v) + torch.rand(()))",
        *("passed", ["1 wrong as expected"]),
    ),
}


@ONCE
def test_it_takes_and_ends_as_check_does(tell):
    tell(STORIES)
