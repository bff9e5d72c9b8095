"""Runs that only compile: each kernel is called once in a case, nothing is judged, and no such run looks like a pass."""

import pytest

TESTS = """
    import pytest, torch
    from pytest_attn import Workload
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    W = Workload(16, heads=2, head_dim=32, dtype="float32")
    calls = []

    def mine(q, k, v):
        calls.append(type(q).__name__)
        print("called", *calls)
        return sdpa(q, k, v) * 2
"""
MARK = '@pytest.mark.attention(W, W.replace(q_len=5), device="cpu")'


@pytest.fixture
def compile_only(pytester):
    def run(tests, *options):
        pytester.makepyfile(TESTS + tests)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-compile-only", "-rs", "-s", *options)

    return run


WRONG = f"""
    {MARK}
    def test_wrong(attn):
        assert attn.check(mine).passed
"""


def test_a_wrong_kernel_is_called_once_in_each_case_and_never_green(compile_only):
    result = compile_only(WRONG)
    result.assert_outcomes(skipped=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*called Tensor",
            "*called Tensor Tensor",
            "2 cases of 1 kernel called once, 0 compiled; none was judged",
            "nothing was judged: --attn-compile-only calls each kernel once; --attn-unjudged=warn lets it pass",
            "SKIPPED * called once in * s and not judged: nothing compiled",
        ]
    )
    assert compile_only(WRONG, "--attn-unjudged=warn").ret == 0


def test_all_kernels_of_a_test_are_called_once(compile_only):
    result = compile_only(
        """
    @pytest.mark.attention(W, device="cpu")
    def test_several(attn, attn_backend):
        attn.check(mine)
        attn.check_invariants(mine)
        attn.check(torch.compile(lambda q, k, v: sdpa(q, k, v), backend="eager"), name="compiled")
        attn.check_steady(attn_backend)
        attn.measure(mine)
        assert len(calls) == 1
        raise AssertionError("what follows is no kernel's doing")
    """,
        "--attn-backends=sdpa",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["1 case of 3 kernels called once, 1 compiled; none was judged", "*test_several*"])
    result.stdout.no_fnmatch_line("*called Tensor Tensor*")


def test_a_kernel_that_raises_fails_and_one_that_declines_is_skipped(compile_only):
    result = compile_only(f"""
    {MARK}
    def test_raises(attn):
        attn.check(lambda q, k, v: q.nothing)

    @pytest.mark.attention(W, device="cpu")
    def test_skips_itself(attn):
        attn.check(lambda q, k, v: pytest.skip("I am fine"))

    @pytest.mark.attention(W, device="cpu")
    def test_declines(attn):
        def none(q, k, v):
            raise NotImplementedError("takes nothing")
        attn.check(none)
    """)
    result.assert_outcomes(failed=3, skipped=1)
    result.stdout.fnmatch_lines(["E *AttributeError: *", "SKIPPED * takes nothing*"])


def test_gradients_and_fake_tensors(compile_only):
    result = compile_only("""
    from torch._subclasses.fake_tensor import FakeTensorMode

    @pytest.fixture(autouse=True)
    def fake():
        with FakeTensorMode():
            yield

    @pytest.mark.attention(W, device="cpu", backward=True)
    def test_fake(attn):
        attn.check(mine)
    """)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*called FakeTensor"])


def test_a_kernel_over_ranks_is_not_called(compile_only):
    result = compile_only("""
    @pytest.mark.attention(W, device="cpu", ranks=2)
    def test_ring(attn):
        attn.check(lambda q, k, v: torch.distributed.all_reduce(q, group=attn.group))
    """)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not called: --attn-compile-only calls kernels that are handed to attn"])
    assert result.ret == 1


def test_what_passes_without_a_call_by_attn_is_never_green(compile_only):
    tests = """
    @pytest.mark.attention(W, device="cpu")
    def test_judges_nothing(attn):
        pass

    @pytest.mark.attention(W, device="cpu")
    def test_compares_by_itself(qkv):
        assert mine(*qkv).shape == qkv[0].shape

    @pytest.mark.xfail
    @pytest.mark.attention(W, device="cpu")
    def test_known_to_be_wrong(attn):
        attn.check(mine)
    """
    result = compile_only(tests)
    result.assert_outcomes(skipped=3)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["1 case of 1 kernel called once, *", "nothing was judged: *", "SKIPPED * not called: *"])
    assert compile_only(tests, "-k", "nothing or itself").ret == 1


def test_what_judges_or_times_contradicts(compile_only):
    result = compile_only("", "--attn-latency=require")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--attn-latency=require: judges or times, and --attn-compile-only does neither*"])


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_hook_has_the_cases_before_the_first_runs(compile_only, pytester, workers):
    pytester.makeconftest("""
        from pathlib import Path

        def pytest_attn_cases(cases):
            text = "".join(f"{one.test} {one.workload.q_len} {one.backend} {one.backward} {one.device};" for one in cases)
            Path("cases.txt").write_text(text)
        """)
    result = compile_only(
        f"""
    {MARK}
    def test_mine(attn):
        import pathlib
        print(pathlib.Path("cases.txt").read_text())
        attn.check(mine)

    @pytest.mark.attention(W, device="cpu", backward=True)
    def test_left_out(attn):
        pass
    """,
        "-k",
        "mine",
        *workers,
    )
    result.assert_outcomes(skipped=2, **({} if workers else {"deselected": 1}))
    of = "test_a_hook_has_the_cases_before_the_first_runs.py::test_mine"
    expected = f"{of}[h2-s16-d32-fp32] 16 None False cpu;{of}[h2-s5-d32-fp32] 5 None False cpu;"
    assert (pytester.path / "cases.txt").read_text() == expected
    assert result.ret == 1


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_what_a_hook_raises_is_named(compile_only, pytester, workers):
    pytester.makeconftest('def pytest_attn_cases(cases): raise RuntimeError("no compiler")')
    result = compile_only(
        f"""
    {MARK}
    def test_mine(attn):
        attn.check(mine)
    """,
        *workers,
    )
    assert "RuntimeError: no compiler" in result.stdout.str() + result.stderr.str()
    if not workers:
        result.stderr.fnmatch_lines(["ERROR: pytest_attn_cases of a conftest raised RuntimeError: no compiler"])
        assert result.ret == 4
