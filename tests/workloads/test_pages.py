"""Pools as serving kernels have them: how they lie, what belongs to nobody, and their page lists."""

import pytest
import torch

from pytest_attn import Pages, Workload
from pytest_attn.workloads.inputs import draw_inputs, page_lists
from pytest_attn.workloads.kv_layout import canonical, copies_of, fused_pool, handed_over

PACKED = Workload(q_lens=(2, 0, 1), kv_lens=(12, 3, 5), heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("pages", "label", "shape"),
    [
        (Pages(4), "page4", (9, 4, 2, 16)),
        (Pages(4, "HND"), "page4.hnd", (9, 2, 4, 16)),
        (Pages(4, fused=True), "page4.fused", (9, 4, 2, 16)),
        (Pages(4, "HND", fused=True, sliced=True), "page4.hnd.fused.sliced", (9, 2, 4, 16)),
        (Pages(4, pool=20, sliced=True), "page4.pool20.sliced", (20, 4, 2, 16)),
    ],
    ids=repr,
)
def test_a_pool_lies_as_its_workload_says(pages, label, shape):
    w = PACKED.replace(kv_pages=pages)
    assert w.id == f"h2-packed2.0.1-k12.3.5-d16-{label}"
    inputs = draw_inputs(w)
    k, v = handed_over(w, inputs.k, inputs.v)
    assert k.shape == v.shape == shape
    assert k.is_contiguous() == (not pages.fused and not pages.sliced)
    assert all(map(torch.equal, canonical(w, k, v), (inputs.k, inputs.v)))
    if pages.fused:
        whole = fused_pool(k, v)
        assert whole.shape == (9, 2, *shape[1:])
        assert whole.data_ptr() == k.data_ptr()
        assert torch.equal(whole[:, 1], v)
        assert torch.equal(fused_pool(*copies_of((k, v), 256)), whole)
    else:
        with pytest.raises(ValueError, match="k and v are not views of one pool"):
            fused_pool(k, v)


def test_packed_queries_have_the_keys_of_the_packed_workload():
    packed, paged = (
        draw_inputs(PACKED.replace(name="one")),
        draw_inputs(PACKED.replace(name="one", kv_pages=Pages(4, pool=20))),
    )
    assert torch.equal(packed.q, paged.q)
    k, _ = paged.gathered()
    own = torch.cat([k[b, :, :n].transpose(0, 1) for b, n in enumerate(PACKED.kv_lens)])
    assert torch.equal(own, packed.k)
    assert bool(k[1, :, 3:].any()), "what lies beyond a length is told from padding with zeros"
    nobody = torch.ones(20, dtype=torch.bool)
    nobody[paged.page_table.flatten().long()] = False
    assert int(nobody.sum()) == 11
    assert bool(paged.k[nobody].any())


def test_page_lists_are_flashinfers():
    inputs = draw_inputs(PACKED.replace(kv_pages=4, kv_lens=(12, 0, 5)))
    indptr, indices, last = page_lists(inputs)
    assert (indptr.tolist(), last.tolist()) == ([0, 3, 3, 5], [4, 0, 1])
    assert indices.tolist() == [*inputs.page_table[0].tolist(), *inputs.page_table[2, :2].tolist()]
    assert {indptr.dtype, indices.dtype, last.dtype} == {torch.int32}


def test_padding_on_the_left_moves_keys_and_back():
    w = Workload(3, kv_lens=(12, 5), heads=2, head_dim=16, pad="left")
    assert w.id == "b2-h2-q3-k12-leftpad12.5-d16"
    inputs = draw_inputs(w)
    k, v = handed_over(w, inputs.k, inputs.v)
    assert torch.equal(k[0], inputs.k[0])
    assert torch.equal(k[1, :, 7:], inputs.k[1, :, :5])
    assert all(map(torch.equal, canonical(w, k, v), (inputs.k, inputs.v)))


@pytest.mark.parametrize(
    ("fields", "kv_lens", "batch"),
    [
        ({"q_len": 16, "cached": 64}, None, 1),
        ({"q_len": 16, "kv_len": 80, "cached": 64}, None, 1),
        ({"q_len": 4, "cached": (5, 9)}, (9, 13), 2),
        ({"q_len": 3, "batch": 2, "cached": 8, "kv_pages": 4}, (11, 11), 2),
        ({"q_lens": (5, 1, 17), "cached": (59, 32, 0), "kv_pages": 16}, (64, 33, 17), 3),
    ],
)
def test_lengths_of_keys_follow_from_what_is_cached(fields, kv_lens, batch):
    w = Workload(**fields)
    assert (w.kv_lens, w.batch, len(w.cached)) == (kv_lens, batch, batch)
    assert w.replace(heads=2).cached == w.cached
    assert w.replace(batch=1, q_len=1, kv_len=9, q_lens=None, kv_lens=None).cached is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size must be a number of tokens >= 1, got 0"),
        ({"size": 4, "layout": "NDH"}, "layout must be one of NHD, HND, HD, got 'NDH'"),
        ({"size": 4, "layout": "HD"}, 'layout "HD" has no dimension for the tokens of a page and needs size 1, got 4'),
        ({"size": 4, "shared": -1}, "shared must be a number of pages >= 0, got -1"),
        ({"size": 4, "fused": 1}, "fused must be True or False, got 1"),
        ({"size": 4, "pool": 0}, "pool must be a number of pages >= 1 or None, got 0"),
    ],
)
def test_pages_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"Pages: {message}"):
        Pages(**fields)
