"""As few cases as reach each value, or each pair of values, always the same."""

import pytest

from pytest_attn import Capabilities
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.covering import ENOUGH, covering, for_any_kernel, targets_of, values_of, within
from pytest_attn.workloads.traits import traits_of

CASES = {"plain": "a", "both": "abc", "other": "cd", "last": "bd", "again": "abc"}


def reached(cases, strength, chosen):
    return frozenset().union(*(targets_of(cases[case], strength) for case in chosen))


@pytest.mark.parametrize(("strength", "chosen"), [(0, ["both"]), (1, ["both", "other"]), (2, ["both", "other", "last"])])
def test_what_adds_most_comes_first_and_nothing_comes_that_adds_nothing(strength, chosen):
    assert covering(CASES, strength) == chosen


def test_what_does_not_run_is_replaced_and_only_what_would_be_chosen_is_asked():
    asked = []

    def runs(case):
        asked.append(case)
        return case != "both"

    assert covering(CASES, 1, runs) == ["again", "other"]
    assert asked == ["both", "again", "other"]
    assert covering(CASES, 0, lambda case: False) == []


def test_what_others_reach_needs_nobody():
    assert covering(CASES, 1, reached=targets_of("abc", 1)) == ["other"]
    assert covering(CASES, 0, reached=targets_of("abcd", 1)) == []
    assert covering({}, 2) == []


@pytest.mark.parametrize("strength", [1, 2])
def test_of_the_catalog_all_is_reached_with_fewer(strength):
    cases = {w.id: values_of(w) for w in builtin_catalog().select("all")}
    chosen = covering(cases, strength)
    assert reached(cases, strength, chosen) == reached(cases, strength, cases)
    assert chosen == covering(cases, strength)
    assert len(chosen) < len(cases) * (0.25, 0.75)[strength - 1]


#: kinds of faults that were not found by default, and what finds them
KINDS = {
    "decoding in two passes": lambda w: w.q_len == 1 and w.kv_len > 2048 and w.batch == 2 and w.group == 2,
    "head_dim above 256": lambda w: w.head_dim == 512,
    "a bias that is constant over keys": lambda w: w.bias == "hq",
    "a bias that is constant over heads": lambda w: w.bias == "qk",
    "a bias that is constant over queries": lambda w: w.bias == "hk",
    "four entries with a bias each": lambda w: w.batch == 4 and "b" in (w.bias or ""),
    "descales of tokens in a sliced pool": lambda w: w.descales == "token" and w.kv_pages and w.kv_pages.sliced,
    "a sink, a window and few queries": lambda w: w.sinks and w.mask and w.mask.kind == "window" and w.q_len == 4,
    "a given mask for many heads": lambda w: w.q_len == 1 and w.heads == 40 and w.batch > 2 and "boolean" in traits_of(w),
    "latent decoding beyond one tile": lambda w: w.v_in_k and w.q_len == 1 and w.kv_len > 128 and w.kv_pages is None,
    "pages of 64": lambda w: w.kv_pages and w.kv_pages.size == 64 and w.q_len == 1,
    "page numbers beyond 16 bits": lambda w: w.kv_pages and (w.kv_pages.pool or 0) > 1 << 17,
    "dropout": lambda w: w.dropout,
    "narrow values": lambda w: w.v_head_dim < w.head_dim and not w.has_no_gradient_because,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_generated_for_any_kernel_has_each_kind(kind):
    assert list(filter(KINDS[kind], for_any_kernel()))


def test_a_generated_workload_is_named_after_what_it_is():
    names = [w.name for w in for_any_kernel()]
    assert names == [f"covering-{w.shape_id}" for w in for_any_kernel()]
    ids = {w.id for w in for_any_kernel()}
    assert len(ids) == len(names)
    assert {"covering-b2-h4-kv2-q1-k2304-d64", "covering-h2-s65-d512", "covering-h2-s65-d64-bias.hq"} <= ids


@pytest.mark.parametrize(
    "can",
    [
        Capabilities(features=frozenset({"bias"})),
        Capabilities(masks=frozenset({"causal"}), square=True, dtypes=("float32",)),
        Capabilities(head_dims=(512,)),
        Capabilities(head_dims=(80,), dtypes=("float16",)),
        Capabilities(features=frozenset({"paged", "padded"})),
    ],
    ids=["bias", "causal", "512", "80", "paged"],
)
def test_what_is_generated_is_within_what_a_kernel_takes_and_always_the_same(can):
    found = within(lambda w: not can.refusals(w))
    assert 40 <= len(found) <= ENOUGH
    assert not any(map(can.refusals, found))
    assert found == within(lambda w: not can.refusals(w))
    assert len({w.id for w in found}) == len(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "takes",
    [
        lambda w: w.score_mod is not None and w.mask is not None,
        lambda w: w.mask is None and 1 < w.q_len < w.kv_len,
        lambda w: w.kv_pages is not None and w.kv_pages.size == 64 and w.v_in_k,
        lambda w: w.cached is not None,
    ],
    ids=["a score_mod with a mask", "some queries", "pages of 64", "a cache in rows and in pages"],
)
def test_a_kernel_for_one_kind_of_call_is_asked_that(takes):
    found = within(takes)
    assert len(found) >= 20
    assert all(map(takes, found))


def test_each_option_comes_alone_and_with_others():
    can = Capabilities(masks=frozenset({"causal"}), features=frozenset({"bias", "grouped heads"}))
    found = [traits_of(w) - {"plain", "fewer queries", "fewer keys", "dropout"} for w in within(lambda w: not can.refusals(w))]
    assert {frozenset({"bias"}), frozenset({"causal"})} <= set(found)
    assert any({"bias", "causal-bottom-right", "grouped heads"} <= one for one in found)


def test_the_catalog_knows_what_is_generated_by_its_name():
    catalog = builtin_catalog()
    assert catalog.select("covering") == list(for_any_kernel())
    assert [w.name for w in catalog.select("covering-h2-s65-d512")] == ["covering-h2-s65-d512"]
    assert catalog.group_of("covering-h2-s65-d512") == "covering"
    assert not {w.name for w in catalog.select("all")} & {w.name for w in for_any_kernel()}
