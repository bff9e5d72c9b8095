"""A paged cache that ranks share: who has which tokens, fault-free kernels pass, and each fault is found and located."""

import pytest
import torch
from caches import PagedRing
from faulty_rings import judged_over_ranks
from rings import Problem

from pytest_attn import Pages, Workload
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.shards import RankCache, parts_of
from pytest_attn.workloads.inputs import draw_inputs

REFERENCES = ReferenceCache()
DECODE = Workload(1, 70, batch=3, heads=4, kv_heads=2, head_dim=32, kv_pages=Pages(8), kv_lens=(70, 33, 5))
WORKLOADS = [
    DECODE,
    DECODE.replace(kv_pages=Pages(16, layout="HND", fused=True)),
    DECODE.replace(q_len=3, mask="causal-bottom-right", kv_pages=Pages(1, sliced=True)),
    Workload(
        q_lens=(3, 1, 5), kv_lens=(40, 70, 9), heads=4, head_dim=32, kv_pages=Pages(8, pool=40), mask="causal-bottom-right"
    ),
    DECODE.replace(kv_lens=None, batch=1),
]


@pytest.fixture(autouse=True)
def _no_dense_problem(monkeypatch):
    """Kernels over pages know their mask by themselves."""
    monkeypatch.setattr(Problem, "of", classmethod(lambda cls, sharding: cls(sharding, None, None)))


def tokens_of(sharding, rank):
    w = sharding.workload
    inputs = draw_inputs(w)
    whole = {"q": inputs.q, **dict(zip("kv", inputs.gathered(), strict=True))}
    cache, parts = RankCache(sharding, rank), parts_of(whole, sharding, "bhsd", rank)
    read = parts["k"][cache.page_table.long()].flatten(1, 2)
    return whole["k"], [read[batch, :length] for batch, length in enumerate(cache.kv_lens.tolist())]


@pytest.mark.parametrize("shard", ["contiguous", "striped", lambda length, ranks: [range(5), range(5, length)]])
def test_each_token_is_in_one_rank_s_pages(shard):
    sharding = Sharding(DECODE, shard, 2)
    assert sharding.refused_because() is None
    for batch, length in enumerate(DECODE.kv_lens):
        found = 0
        for rank in range(2):
            whole, mine = tokens_of(sharding, rank)
            positions = [at for at in sharding.keys[rank].tolist() if at < length]
            assert torch.equal(mine[batch], whole[batch, :, positions].transpose(0, 1))
            found += len(positions)
        assert found == length


def test_contiguous_is_by_page_and_striped_by_token():
    assert Sharding(DECODE, "contiguous", 2).keys[0].tolist() == list(range(40))
    assert Sharding(DECODE, "striped", 2).keys[1].tolist() == list(range(1, 70, 2))
    assert RankCache(Sharding(DECODE, "contiguous", 2), 1).kv_lens.tolist() == [30, 0, 0]
    assert all(len(rows) == 1 for rows in Sharding(DECODE, "striped", 2).rows)


def test_what_no_page_table_names_is_nan():
    sharding = Sharding(DECODE, "striped", 2)
    inputs = draw_inputs(DECODE)
    whole = {"q": inputs.q, **dict(zip("kv", inputs.gathered(), strict=True))}
    pool, table = parts_of(whole, sharding, "bhsd", 0)["k"], RankCache(sharding, 0).page_table
    assert pool[table.flatten().long()].isfinite().all()
    assert int(pool.isnan().flatten(1).all(1).sum()) == 1
    assert table.flatten().tolist() != sorted(table.flatten().tolist()), "pages lie in no order"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
@pytest.mark.parametrize("shard", ["contiguous", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_honest_kernels_pass(workload, shard, ranks):
    options = {"references": REFERENCES, "backward": False, "returns_lse": True}
    comparison = judged_over_ranks(PagedRing, workload, ranks, shard, **options)
    assert comparison.passed, describe(comparison)
    assert {row.name for row in comparison.tensors} == {"out", "lse"}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
def test_each_rank_may_return_its_heads_only(workload):
    def shares_heads(*given):
        return PagedRing(*given, shares_heads=True)

    assert judged_over_ranks(shares_heads, workload, 2, references=REFERENCES, backward=False, returns_lse=True).passed


@pytest.mark.one_in(8)
@pytest.mark.parametrize("shard", ["contiguous", "striped"])
@pytest.mark.parametrize("returns_lse", [False, True])
@pytest.mark.parametrize(
    ("fault", "named", "words"),
    [
        ("last page of rank 1 unread", "rank-last-page-missing", "out is attention without the last page of rank 1"),
        ("first page of rank 0 twice", "rank-page-twice", "out is attention with page 0 of rank 0 twice"),
        ("merged in base 2", "chunks-merged-in-base-2", ""),
        ("mean of ranks", "chunks-averaged", ""),
    ],
)
def test_a_fault_is_found_and_located(fault, named, words, shard, returns_lse):
    workload = DECODE.replace(kv_lens=(70, 65, 50))  # each rank has tokens of each
    options = {"references": REFERENCES, "backward": False, "returns_lse": returns_lse}
    comparison = judged_over_ranks(PagedRing, workload, 2, shard, fault, **options)
    assert not comparison.passed
    assert named in comparison.faults
    assert words in describe(comparison)


def test_results_that_ranks_merge_differently_are_refused():
    with pytest.raises(AssertionError, match="out is whole on every rank, and differs between rank 0 and rank 1"):
        judged_over_ranks(PagedRing, DECODE, 2, "striped", "rank 0 merges alone", REFERENCES, backward=False)
