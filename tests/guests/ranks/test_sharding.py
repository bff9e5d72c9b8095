"""Who holds which rows: each position is held once, whatever the length; a user's function must say so, too."""

import pytest
import torch

from pytest_attn import Pages, Workload
from pytest_attn.guests.ranks.sharding import SHARDS, Sharding, positions_of
from pytest_attn.guests.ranks.shards import cut, join, laid_like


def lists(shards):
    return [one.tolist() for one in shards]


def test_the_named_shards_are_what_their_libraries_mean():
    assert lists(positions_of("contiguous", 8, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lists(positions_of("head-tail", 8, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert lists(positions_of("striped", 8, 2)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_each_position_is_held_once(shard, length):
    for ranks in (1, 2, 3, 8):
        assert sorted(torch.cat(positions_of(shard, length, ranks)).tolist()) == list(range(length))


def test_packed_sequences_are_split_each_by_itself():
    sharding = Sharding(Workload(q_lens=(4, 3), heads=1), "contiguous", 2)
    assert lists(sharding.rows) == [[0, 1, 4, 5], [2, 3, 6]]
    assert sharding.lengths_of((4, 3), 1) == [2, 1]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([[0, 1]], "must return a list of 2 index tensors"),
        ([[0, 1], [3]], r"\(missing 2\)"),
        ([[0, 1], [1, 2, 3]], r"\(doubled 1\)"),
        ([[0, 1], [2, 3, 4]], "others are beyond the sequence"),
    ],
)
def test_a_function_that_splits_wrongly_is_told_how(found, text):
    with pytest.raises(ValueError, match=text):
        positions_of(lambda length, ranks: found, 4, 2)


def test_a_function_may_give_any_order():
    sharding = Sharding(Workload(4, heads=1), lambda length, ranks: [torch.tensor([3, 0]), [2, 1]], 2)
    assert lists(sharding.rows) == [[3, 0], [2, 1]]
    assert sharding.refused_because() is None


@pytest.mark.parametrize(
    ("workload", "shard", "text"),
    [
        (Workload(1, 64, heads=1), "contiguous", "rank 1 of 2 would have no query row"),
        (Workload(1, 64, heads=1, kv_pages=Pages(16)), "head-tail", "shared by pages (contiguous) or by tokens (striped)"),
        (Workload(1, 16, heads=1, kv_pages=Pages(16)), "contiguous", "rank 1 of 2 would have no key"),
        (Workload(1, 4, heads=1, kv_pages=Pages(16)), lambda length, ranks: [[1, 0], [2, 3]], "ascending order"),
        (Workload(4, heads=1, batch=2, kv_lens=(3, 4)), lambda length, ranks: [[1, 0], [2, 3]], "ascending order"),
    ],
)
def test_what_cannot_be_split_says_why(workload, shard, text):
    assert text in Sharding(workload, shard, 2).refused_because()


@pytest.mark.parametrize(("layout", "shape"), [("bhsd", (2, 3, 8, 4)), ("bshd", (2, 8, 3, 4)), ("thd", (8, 3, 4))])
def test_shards_join_to_what_they_were_cut_from(layout, shape):
    sharding, whole = Sharding(Workload(8, heads=3), "head-tail", 2), torch.randn(shape)
    parts = [cut(whole, "q", sharding, layout, rank) for rank in range(2)]
    assert torch.equal(join(parts, "dq", shape, sharding, layout), whole)


def test_a_shard_lies_in_memory_as_the_whole_tensor_does():
    plain = torch.randn(1, 2, 8, 4)
    views = {
        "contiguous": plain,
        "swapped": plain.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": torch.randn(1, 2, 8, 12)[..., 4:8],
    }
    for name, whole in views.items():
        shard = laid_like(whole[:, :, :4].clone(), whole)
        assert torch.equal(shard, whole[:, :, :4])
        assert shard.is_contiguous() == (name == "contiguous")
        assert (shard.stride(1) < shard.stride(2)) == (name == "swapped")
        assert (shard.stride(2) == 12) == (name == "slice")
