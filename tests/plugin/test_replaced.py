"""What a callable replaces is back before the next test, which judges as if nothing had been."""

CHEATS = """
def equal(*args):
    return True

def replaces_equal(q, k, v):
    out = sdpa(q, k, v)
    torch.equal = equal
    return out

def wrong(q, k, v):
    return v * 0.5

@pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")
def test_cheat(attn):
    attn.check(replaces_equal)

"""


def test_a_wrong_kernel_fails_after_a_test_whose_callable_replaced_a_function_of_torch(run, kernel_test):
    kernel_test("attn.check(wrong)", before=CHEATS)
    result = run("-rf")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*the callable replaced torch.equal by equal of *: *",
            "E*by *replaces_equal on *",
            "E*reproduce *test_cheat*",
            "E*mismatch: out of wrong*",
        ]
    )
