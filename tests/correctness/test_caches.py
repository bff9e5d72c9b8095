"""A kernel is handed a cache with the prefix alone, and held to what it then writes into it."""

import pytest
import torch

from pytest_attn import Pages, Workload, check
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.kernel import Kernel, honest_backend
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.kv_layout import canonical, handed_over, split_cache

GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 16, "mask": "causal-bottom-right"}
PAGED = Workload(q_lens=(5, 1, 7), cached=(19, 12, 0), kv_pages=8, **GROUPED)
CACHED = [
    PAGED,
    PAGED.replace(kv_pages=Pages(4, "HND", fused=True, pool=40)),
    Workload(4, cached=(9, 0), **GROUPED),
    Workload(4, cached=7, batch=2, **GROUPED),
    Workload(q_lens=(5, 3), cached=(9, 2), **GROUPED),
]


@pytest.mark.parametrize("w", CACHED, ids=lambda w: w.id)
def test_a_cache_holds_the_prefix_and_nothing_else(w):
    inputs = draw_inputs(w)
    layout = "thd" if w.is_packed else "bhsd"
    split = split_cache(inputs, *handed_over(w, inputs.k, inputs.v), layout)
    pool = split.k_cache.transpose(1, 2) if layout == "bhsd" and not w.kv_pages else split.k_cache
    pool = (canonical(w, pool, pool)[0] if w.kv_pages else pool).flatten(0, 1)
    unwritten = pool.isnan() if w.kv_pages else pool == 100
    assert int((~unwritten.all(-1).all(-1)).sum()) == sum(w.cached)
    assert bool(unwritten[split.slot_mapping].all())
    assert len(split.slot_mapping) == sum(w.q_lens or (w.q_len,) * w.batch)
    assert split.k_new.shape[-1] == 16
    assert split.cache_seqlens.tolist() == list(w.cached)
    again = split_cache(inputs, *handed_over(w, inputs.k, inputs.v), layout)
    assert again.k_cache.data_ptr() != split.k_cache.data_ptr()


@pytest.mark.parametrize("w", CACHED, ids=lambda w: w.id)
def test_an_honest_kernel_that_appends_is_right(w):
    spec = CheckSpec(w, torch.device("cpu"))
    subject = spec.subject(Registry(), honest_backend())
    assert judge(subject, spec, ReferenceCache()).passed
    assert judge_invariants(subject, spec, ReferenceCache(), ("poison", "equivalence", "leak"), None).passed


def appending(fault):
    """Append to pages of PAGED and attend to them, with a fault."""
    given, kernel = draw_inputs(PAGED), Kernel()

    def fn(q, k, v):
        cache = split_cache(given, k, v, "thd", appends=fault != "appends=False")
        at, keys = cache.slot_mapping, cache.k_new
        if fault == "the slots of other tokens":
            at = at.flip(0)
        if fault == "rounded keys":
            keys = keys * 1.01
        if fault == "one slot further":
            at = (at + 1) % 72
        if fault != "nothing":
            cache.k_cache[at // 8, at % 8] = keys
            cache.v_cache[at // 8, at % 8] = cache.v_new
        if fault == "the prefix":
            cache.v_cache[given.page_table[0, 0], 3] = 0
        if fault == "another's cache":
            return kernel(given, q, *(t.roll(1, 0) for t in (cache.k_cache, cache.v_cache)))[0]
        return kernel(given, q, cache.k_cache, cache.v_cache)[0]

    return fn


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing", "wrote none of the 13 new keys into k_cache; for a kernel that leaves that to others, say"),
        (
            "the slots of other tokens",
            "where the new key 19 of batch entry 0 belongs, holds that of the new key 6 of batch entry 2",
        ),
        ("rounded keys", "belongs, holds something else; 13 of 13 new keys are not as they were given"),
        ("one slot further", "of k_cache, which is not one of the new keys'"),
        ("the prefix", r"of v_cache, which is not one of the new keys' \(3 of batch entry 0\): it holds none of"),
        ("appends=False", "wrote new keys into k_cache, though the test said attn.split_cache\\(..., appends=False\\)"),
        ("another's cache", "mismatch: out of"),
    ],
)
def test_what_a_kernel_writes_wrongly_is_said(fault, said):
    with pytest.raises(AssertionError, match=said):
        check(appending(fault), PAGED, device="cpu")


def test_a_kernel_that_appends_rightly_passes_without_pytest():
    assert check(appending(None), PAGED, device="cpu").passed


def test_a_callable_that_takes_no_cache_is_told():
    given = draw_inputs(PAGED)
    with pytest.raises(AssertionError, match=r"call cache = attn.split_cache\(k, v\) .* pytest_attn.split_cache\("):
        check(lambda q, k, v: Kernel()(given, q, k, v)[0], PAGED, device="cpu")


def test_a_prefix_that_is_not_read_is_named():
    w = Workload(4, cached=(9, 0, 30), **GROUPED)
    given = draw_inputs(w)
    alone = draw_inputs(w.replace(kv_len=4, kv_lens=None))

    def fn(q, k, v):
        new = split_cache(given, k, v, appends=False)
        return Kernel()(alone, q, new.k_new, new.v_new)[0]

    with pytest.raises(AssertionError, match="does not read the keys before the new tokens"):
        check(fn, w, device="cpu")


def test_a_workload_without_a_prefix_has_nothing_to_split():
    w = Workload(4, 20, head_dim=16)
    given = draw_inputs(w)
    with pytest.raises(ValueError, match=r"split_cache needs a workload that says how many keys are cached, e.g. cached=16"):
        split_cache(given, given.k, given.v)
