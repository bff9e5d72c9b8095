"""What a check that passed could not see: options without which exact attention passes as well, and long sums."""

import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import Window, Workload, check
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.guests.models.model_comparison import CallComparison, ModelComparison
from pytest_attn.reports.records import new_record
from pytest_attn.reports.terminal import untested
from pytest_attn.reports.verdict import LONG_SUMS


def workload(**options):
    return Workload(48, heads=2, head_dim=32, dtype="float32", **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"softcap": 1e4}, ("softcap",)),
        ({"softcap": 1.0}, ()),
        ({"mask": Window(47, 0)}, ("window",)),
        ({"mask": Window(8, 0)}, ()),
        ({"sinks": True}, ()),
        ({"bias": "hq"}, ("bias",)),
        ({"bias": "hqk"}, ()),
        ({"alibi": True, "softcap": 1e4}, ("softcap",)),
        ({"mask": "causal"}, ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_option_is_untested_where_exact_attention_without_it_passes(options, expected, backward):
    assert check("eager", workload(**options), backward=backward, device="cpu").untested == expected


def test_a_kernel_that_ignores_an_option_passes_exactly_where_it_is_untested():
    def without(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    assert check(without, workload(mask=Window(47, 0)), device="cpu").untested == ("window",)
    with pytest.raises(AssertionError):
        check(without, workload(mask=Window(40, 0)), device="cpu")


@pytest.mark.parametrize(
    ("keys", "dtype", "expected"), [(64, "bfloat16", (LONG_SUMS,)), (2048, "bfloat16", ()), (64, "float32", ())]
)
def test_sums_in_a_low_precision_need_many_keys(keys, dtype, expected):
    assert check(sdpa, Workload(4, keys, heads=1, head_dim=16, dtype=dtype), device="cpu").untested == expected


def test_a_model_tests_an_option_where_any_of_its_calls_does():
    capped, windowed = workload(softcap=50.0), workload(softcap=50.0, mask=Window(8, 0))

    def call(w, *unseen):
        return CallComparison("layer", "layer", "f", w, Comparison(w.id, "f", (), untested=unseen))

    assert ModelComparison("", (call(capped, "softcap"), call(windowed, "softcap"))).untested == ("softcap",)
    assert ModelComparison("", (call(capped, "softcap"), call(windowed))).untested == ()
    assert ModelComparison("", (call(windowed, "window", "softcap"), call(capped, "softcap"))).untested == (
        "window",
        "softcap",
    )


def record(name, *unseen, subject="mine", kv_len=64):
    shape = {"dtype": "bfloat16", "kv_len": kv_len}
    return new_record(question="check", verdict="passed", workload=name, subject=subject, shape=shape, untested=unseen)


def test_it_is_said_once_and_sums_only_where_no_workload_of_a_kernel_is_long():
    several = [record(name, "softcap", LONG_SUMS) for name in ("a", "b", "c", "d", "a")]
    option = "softcap of a, b, c and 1 more: results without it are within every limit"
    assert list(untested(several)) == [
        option,
        "sums of mine in low precision: faults in them show over about 2,000 keys, the longest workload has 64",
    ]
    assert list(untested([*several, record("long", kv_len=4096)])) == [option]
    assert list(untested([])) == []


def test_a_run_that_is_too_short_for_sums_in_a_low_precision_says_so(pytester):
    pytester.makepyfile("""
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention("smoke-full", device="cpu")
def test_it(attn):
    attn.check(sdpa)
""")
    about = "faults in them show over about 2,000 keys, the longest workload has 128"
    line = f"untested      sums of scaled_dot_product_attention in low precision: {about}"
    pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout.fnmatch_lines([line])
