"""Covering sets cover every legal pair."""

from itertools import combinations, product

import pytest
from covering import covering_pairs, pairwise_workloads

from pytest_attn import check
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.workloads.catalog import Catalog
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.traits import layout_of, traits_of

FACTORS = {"a": range(6), "b": "xyzuv", "c": (True, False), "d": [[1], [2], [3]], "e": range(4), "f": range(4)}


def pairs_of(row):
    return {((a, repr(row[a])), (b, repr(row[b]))) for a, b in combinations(sorted(row), 2)}


def legal_pairs(factors, allowed):
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return set().union(*(pairs_of(row) for row in rows if allowed(row)))


def forbidden(row):
    return not (row.get("a") == 0 and row.get("b") in ("x", "y")) and not (row.get("c") and row.get("e") == row.get("f") == 3)


@pytest.mark.parametrize("allowed", [lambda row: True, forbidden], ids=["all", "some"])
def test_every_legal_pair_is_covered_by_few_legal_rows(allowed):
    rows = covering_pairs(FACTORS, allowed)
    assert set().union(*map(pairs_of, rows)) == legal_pairs(FACTORS, allowed)
    assert all(list(row) == list(FACTORS) and allowed(row) for row in rows)
    assert 28 <= len(rows) <= 40, "6 x 5 values are the lower bound, 2,880 the product"


def test_a_covering_set_is_the_same_each_time():
    assert covering_pairs(FACTORS, forbidden) == covering_pairs(FACTORS, forbidden)


def test_small_and_empty_factors():
    assert covering_pairs({"a": (1, 2), "b": (3,)}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert covering_pairs({"a": (1, 2), "b": (3,)}, lambda row: False) == []
    with pytest.raises(ValueError, match="factor 'b' has no values"):
        covering_pairs({"a": (1, 2), "b": ()})


def test_pairwise_workloads_are_few_named_and_distinct():
    found = pairwise_workloads()
    assert 50 <= len(found) <= 60
    catalog = Catalog()
    for w in found:
        catalog.add(w, "pairs")  # refuses two workloads of one name
        assert w.name.startswith("pairs-")
        assert w.pairs() <= 2 * 65 * 65
    assert len(catalog) == len(found)


def test_pairwise_workloads_cover_what_they_promise():
    has = [
        {
            "mask": w.mask and w.mask.kind,
            "layout": layout_of(w),
            "dtype": w.dtype,
            "group": w.group,
            "lengths": (w.q_len > w.kv_len) - (w.q_len < w.kv_len),
            "option": next(
                (name for name in ("scale", "softcap", "bias", "alibi", "sinks", "score_mod") if name in traits_of(w)), None
            ),
            "v": w.v_head_dim != w.head_dim,
        }
        for w in pairwise_workloads()
    ]
    met = set().union(*map(pairs_of, has))
    square, unpacked = ("documents", "neighborhood"), ("documents", "neighborhood", "boolean")
    for a, b in combinations(sorted(has[0]), 2):
        for x, y in product({row[a] for row in has}, {row[b] for row in has}):
            one = {a: x, b: y}
            if one.get("mask") in square and one.get("lengths", 0) != 0:
                continue
            if one.get("layout") == "packed" and (one.get("mask") in unpacked or one.get("option") == "bias"):
                continue
            assert pairs_of(one) <= met, one


@pytest.mark.parametrize("workload", [w for w in pairwise_workloads() if not w.is_packed], ids=lambda w: w.id)
def test_attention_written_out_is_right_on_pairwise_workloads(workload):
    assert check("eager", workload, device="cpu", inputs="structured").passed


def test_packed_pairwise_workloads_have_a_reference():
    packed = [w for w in pairwise_workloads() if w.is_packed]
    assert len(packed) > 8
    for w in packed:
        compute_reference(draw_inputs(w), precision_named("flash"), True)
