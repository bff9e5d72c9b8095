"""Forms in which kernels of others take what a workload has: each is judged right, and found where it is misread."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from judging import explicit

from pytest_attn import Pages, Workload

DECODING = {"heads": 4, "kv_heads": 2, "head_dim": 32, "mask": "causal-bottom-right"}
PACKED = Workload(heads=4, kv_heads=2, q_lens=(7, 30, 12), mask="causal")


def causal(rows, keys):
    """An additive mask whose last row sees the last key."""
    return torch.full((rows, keys), -math.inf).triu(keys - rows + 1)


def judge(attn, kernel, is_right):
    if is_right:
        attn.check(kernel)
        attn.check_invariants(kernel)
    else:
        with pytest.raises(AssertionError):
            attn.check(kernel)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.attention(*(Workload(3, kv_lens=(20, 9), pad=pad, **DECODING) for pad in ("right", "left")))
def test_masks_may_be_added_and_padding_may_be_a_mask_of_keys(attn, is_right):
    def kernel(q, k, v):
        seen = attn.key_mask.flip(1) if not is_right else attn.key_mask
        low = torch.finfo(q.dtype).min
        both = attn.additive_mask(low).float().masked_fill(~seen[:, None, None], low)
        return explicit(q, k, v, bias=both)

    judge(attn, kernel, is_right)


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9])
@pytest.mark.attention(Workload(3, 20, dtype="float16", mask="causal"))
def test_a_mask_of_numbers_that_its_dtype_does_not_have_is_refused(attn, low):
    with pytest.raises(ValueError, match=r"torch.float16 has no -.*; say torch.finfo\(torch.float16\).min, or nothing"):
        attn.additive_mask(low)
    attn.check(lambda q, k, v: explicit(q, k, v, bias=attn.additive_mask(torch.finfo(q.dtype).min).float()))


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.attention(Workload(5, cached=(20, 7, 13), pad="left", **DECODING), Workload(5, cached=0, **DECODING))
def test_a_cache_may_be_empty_or_padded_on_the_left(attn, is_right):
    w = attn.workload

    def kernel(q, k, v):
        cache = attn.split_cache(k, v)
        new = slice(w.kv_len - w.q_len, w.kv_len)
        cache.k_cache[:, :, new], cache.v_cache[:, :, new] = cache.k_new, cache.v_new
        k, v = cache.k_cache[:, :, : w.kv_len], cache.v_cache[:, :, : w.kv_len]
        mask = attn.additive_mask().float()
        return explicit(q, k, v, bias=mask if is_right else mask.roll(1, -1))

    judge(attn, kernel, is_right)


QUANTIZED = [
    Workload(5, cached=20, kv_dtype=dtype, descales=descales, **DECODING)
    for dtype, descales in (("int8", "tensor"), ("int8", "token"), ("float8_e4m3fn", "head"))
]


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.attention(*QUANTIZED)
def test_new_keys_may_be_put_into_a_quantized_cache(attn, is_right):
    def kernel(q, k, v):
        cache = attn.split_cache(k, v)
        new = slice(20, 25) if is_right else slice(20, 24)
        for whole, own, descale in (
            (cache.k_cache, cache.k_new, attn.descales.k),
            (cache.v_cache, cache.v_new, attn.descales.v),
        ):
            whole[:, :, new] = own[:, :, : new.stop - new.start]
            shape = (*descale.shape, *(1,) * (4 - descale.dim()))
            yield whole[:, :, :25].float() * descale.view(shape)

    def whole(q, k, v):
        return explicit(q, *kernel(q, k, v), bias=causal(5, 25))

    judge(attn, whole, is_right)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.attention(
    Workload(1, 40, batch=2, kv_pages=Pages(1, "HD"), kv_lens=(40, 11), **DECODING),
    Workload(1, 40, batch=2, kv_pages=Pages(1, "HD", fused=True, pool=90), kv_lens=(40, 11), **DECODING),
    Workload(2, 70, batch=3, kv_pages=Pages(16, shared=2), kv_lens=(70, 40, 33), **DECODING),
)
def test_pages_may_lack_their_dimension_and_be_those_of_several_sequences(attn, is_right):
    w = attn.workload

    def kernel(q, k, v):
        assert k.dim() == (3 if w.kv_pages.layout == "HD" else 4)
        table, out = attn.page_table.long() if is_right else attn.page_table.long().roll(1, 1), []
        for b, keys in enumerate(attn.kv_lens.tolist()):
            own = (pool[table[b]].view(-1, *pool.shape[-2:])[:keys].transpose(0, 1)[None] for pool in (k, v))
            out.append(explicit(q[b : b + 1], *own, bias=causal(w.q_len, keys)))
        return torch.cat(out)

    judge(attn, kernel, is_right)


def of_sequences(attn, heads_first, ends):
    """Attend to one sequence after the other, (1, heads, rows, dim)."""
    out, lse = [], []
    for start, end in pairwise(ends):
        q, k, v = (t[:, :, start:end] for t in heads_first)
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        scores = q.float() @ k.float().repeat_interleave(2, 1).mT / 8 + causal(end - start, end - start)
        lse.append(scores.logsumexp(-1))
    return torch.cat(out, 2), torch.cat(lse, -1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.attention(PACKED, backward=True, layout="bthd")
def test_packed_rows_may_have_a_batch_dimension(attn, is_right):
    ends = (attn.cu_seqlens if is_right else attn.cu_seqlens[[0, 1, 3]]).tolist()

    def kernel(q, k, v):
        assert (q.shape, k.shape) == ((1, 49, 4, 64), (1, 49, 2, 64))
        return of_sequences(attn, [t.transpose(1, 2) for t in (q, k, v)], ends)[0].transpose(1, 2)

    judge(attn, kernel, is_right)


@pytest.mark.attention(PACKED, backward=True, layout="bhtd", returns_lse=True, lse_layout="bhs")
def test_packed_heads_may_have_a_batch_dimension(attn):
    attn.check(lambda q, k, v: of_sequences(attn, (q, k, v), attn.cu_seqlens.tolist()))


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.attention(
    Workload(40, heads=4, bias="hqk", bias_dtype="float32"), backward=("q", "k", "v", "bias"), precision="eager"
)
def test_a_bias_may_have_a_dtype_of_its_own(attn, is_right):
    assert attn.bias.dtype == torch.float32

    def kernel(q, k, v):
        bias = attn.bias if is_right else attn.bias.bfloat16() * 1.05
        return (q.float() @ k.float().mT / 8 + bias).softmax(-1).to(q.dtype) @ v

    judge(attn, kernel, is_right)
