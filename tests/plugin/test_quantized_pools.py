"""Quantized and latent caches in every kind of pool: descales and v lie where the pool's keys do."""

from itertools import product

import pytest

KERNEL = """
import pytest, torch
from pytest_attn import Pages, Workload

CASES = {{"q_len": 1, "heads": 4, "kv_lens": (40, 21), **{fields}}}
POOL = {pool}


@pytest.mark.attention(Workload(**CASES, kv_pages=POOL))
def test_it(attn):
    def rows(pool):
        pool = pool.transpose(1, 2) if POOL.layout == "HND" else pool
        return pool.float()[attn.page_table.long()].flatten(1, 2).transpose(1, 2)  # (batch, kv_heads, keys, d)

    def scaled(pool, descale):
        if descale is None:
            return rows(pool)
        if attn.workload.descales == "token":  # (pages, size, kv_heads)
            return rows(pool) * descale[attn.page_table.long()].flatten(1, 2).transpose(1, 2)[..., None]
        return rows(pool) * descale[..., None, None]

    def kernel(q, k, v):
        of_q, of_k, of_v = attn.descales or (None, None, None)
        {pick}
        key, value = scaled(k, of_k), scaled(v, of_v)
        group = q.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        query = q.float() if of_q is None else q.float() * of_q[..., None, None]
        scores = query @ key.mT * q.shape[-1] ** -0.5
        unseen = torch.arange(scores.shape[-1]) >= attn.kv_lens[:, None, None, None]
        out = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value.masked_fill(unseen.mT, 0)  # NaN may lie there
        return out.to(torch.bfloat16)

    attn.check(kernel)
    attn.check_invariants(kernel)
"""
POOLS = {
    "NHD": "Pages(8)",
    "HND": 'Pages(8, "HND")',
    "fused": "Pages(8, fused=True)",
    "HND, fused, of 20": 'Pages(8, "HND", fused=True, pool=20)',
    "sliced": "Pages(8, sliced=True)",
}
CACHES = {
    "int8 per token": '{"kv_heads": 2, "kv_dtype": "int8", "descales": "token"}',
    "fp8 per head": '{"kv_heads": 2, "kv_dtype": "float8_e4m3fn", "descales": "head"}',
    "latent": '{"kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "v_in_k": True}',
}


@pytest.fixture
def judged(pytester):
    def run(cases, pick="pass"):
        texts = [KERNEL.format(fields=CACHES[cache], pool=POOLS[pool], pick=pick) for cache, pool in cases]
        pytester.makepyfile(**{f"test_{number}": text for number, text in enumerate(texts)})
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu")

    return run


@pytest.mark.parametrize("cache", ["int8 per token", "fp8 per head"])
def test_a_quantized_cache_is_read_with_its_descales(judged, cache):
    judged(product([cache], POOLS)).assert_outcomes(passed=len(POOLS))


def test_v_lies_in_k(judged):
    judged(product(["latent"], ["NHD", "HND", "sliced"]), "assert v.data_ptr() == k.data_ptr()").assert_outcomes(passed=3)


def test_another_s_descale_is_found(judged):
    result = judged(product(["int8 per token"], POOLS), "of_v = of_v.roll(1, 0)")
    result.assert_outcomes(failed=len(POOLS))
    assert sum("AssertionError: mismatch: out of " in line for line in result.outlines) == len(POOLS)
