import pytest
from fakes import planted
from fakes.judged import CPU, H200, judged

from pytest_attn import Window, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.masks import interval

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.mark.parametrize("q_len", [1, 4, 9])
@pytest.mark.parametrize(
    "mask", [None, "causal", "causal-bottom-right", *(Window(n, m) for n in (None, 0, 2) for m in (0, 2))]
)
@pytest.mark.parametrize("kv_lens", [None, (6, 6), (6, 1), (6, 0)])
def test_eager_refuses_exactly_the_workloads_with_a_row_that_sees_no_key(q_len, mask, kv_lens):
    workload = Workload(q_len, 6, batch=2, heads=1, head_dim=8, kv_lens=kv_lens, mask=mask, dtype="fp32")
    lengths = kv_lens or (6,)
    spans = [interval(workload.mask, row, q_len, length) for row in range(q_len) for length in lengths]
    reasons = Registry()["transformers:eager"].unsupported_because(workload, machine_of(CPU))
    assert reasons == ["averages all values in rows that see no key"] * any(start == end for start, end in spans)


def test_padded_keys_do_drop_queries(installed):
    """The refusal's ground: with as many queries as keys, transformers takes both to be padded."""
    backend = installed("transformers:flash_attention_2")
    assert not judged(backend, W.replace(kv_len=48, kv_lens=(48, 33))).passed


def test_sinks_through_flex_are_a_known_defect():
    (defect,) = Registry()["transformers:flex_attention"].known_defects
    assert defect.applies(W.replace(sinks=True), H200)
    assert not defect.applies(W, H200)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "sdap",
            "transformers has no attention function 'sdap'; it has eager, flash_attention_2, flex_attention, sdpa, paged|sdpa",
        ),
        ("paged|sdpa", "paged|sdpa takes masks or a cache of its own: not judged; judged are eager, sdpa,"),
    ],
)
def test_a_name_that_is_none_or_has_a_cache_of_its_own_is_not_judged(installed, name, reason):
    assert installed(f"transformers:{name}").broken_because().startswith(reason)


def test_a_library_that_transformers_does_not_see_is_refused(installed):
    """It would look for one on the Hub instead."""
    blind = planted("transformers.py", "lambda: True", "lambda: False")
    reason = installed("transformers:flash_attention_2", **blind).broken_because()
    assert reason == "transformers does not find the library of flash_attention_2"


def test_without_the_kernel_s_library_it_says_what_to_install(installed):
    assert installed("transformers:flash_attention_2", ["transformers"]).unavailable_because(H200) == (
        "flash-attn is not installed; pip install flash-attn --no-build-isolation"
    )
