"""One test cannot spoil another, and no fault hides behind the plumbing."""

import torch


def test_tensors_belong_to_the_case(run, pytester):
    pytester.makepyfile(
        """
        import pytest
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        from pytest_attn import Workload

        WORKLOAD = Workload(32, heads=2, head_dim=32)

        @pytest.mark.attention(WORKLOAD, device="cpu")
        def test_a(qkv, attn_reference):
            for tensor in qkv:
                tensor.zero_()
            qkv[0].requires_grad_()
            attn_reference.out.zero_()
            assert not attn_reference.out.any()

        @pytest.mark.attention(WORKLOAD, device="cpu")
        def test_b(attn):
            attn.check(sdpa)
        """
    )
    run().assert_outcomes(passed=2)


GREEDY = """
def greedy(q, k, v):
    out = sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    v.zero_()
    return out
"""
EXPECTED = (
    "with pytest.raises(AssertionError, match='without the last key'):\n"
    "    attn.check(lambda q, k, v: sdpa(q, k[:, :, :-1], v[:, :, :-1]))"
)
STORIES = {
    "changed inputs are seen in either layout": (
        "attn.check(greedy)",
        "failed",
        ["the callable changed its input v in place"],
        {"before": GREEDY, "marker": 'Workload(32, heads=2, head_dim=32), device="cpu", layout="bshd"'},
    ),
    "a backend that a check names may refuse": (
        'attn.check("sdpa")',
        "skipped",
        ["sdpa: has no sinks"],
        {"marker": 'Workload(32, sinks=True), device="cpu"'},
    ),
    "what is no callable is refused": (
        *("attn.check(42)", "failed"),
        ["E*TypeError: needs a callable of (q, k, v), a backend or a backend's name, got int"],
    ),
    "a mismatch that the test expects is not called wrong": (EXPECTED, "passed", ["1 wrong as expected"]),
}


def test_what_a_test_does_or_expects_is_seen(tell):
    assert tell(STORIES).stdout.str().count("mismatch  ") == 1


def test_fixtures_asked_for_later_are_refused(run, pytester):
    pytester.makepyfile("""
        import unittest

        import pytest

        @pytest.mark.attention("smoke-full")
        def test_it(request):
            request.getfixturevalue("attn")

        @pytest.mark.attention("smoke-full")
        class TestIt(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def take(self, attn):
                pass

            def test_it(self):
                pass
        """)
    result = run()
    result.assert_outcomes(failed=1, errors=1)
    text = "::test_it: the attention fixtures must be arguments of the test, not asked for later; a unittest.TestCase"
    assert result.stdout.str().count(text) >= 2


def test_after_a_lost_cuda_context_the_other_cases_are_skipped_with_its_test(pytester, monkeypatch):
    """A stand-in of torch.cuda: an illegal memory access makes every later call fail."""
    for name in ("is_initialized", "synchronize"):  # which come back
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    pytester.makepyfile(
        """
        import pytest
        import torch

        @pytest.mark.attention("smoke-full")
        def test_reads_past_the_end(attn):
            def refuse(*_):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, refuse
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def test_stand_in(request):
            from pytest_attn.session.session import SESSION

            session = request.config.stash[SESSION]
            assert "test_reads_past_the_end[smoke-full] corrupted" in session.cuda.lost_because
            session.machines._devices["auto"] = torch.device("cuda")

        @pytest.mark.attention("smoke-full")
        def test_innocent(attn):
            raise AssertionError("is not run")
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *test_reads_past_the_end* corrupted this process's CUDA context (CUDA error*"])
