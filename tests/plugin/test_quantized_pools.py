"""Quantized and latent caches in every kind of pool: descales and v lie where the pool's keys do."""

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
    """Return a function that runs the kernel on a cache in a pool."""

    def run(cache, pool, pick="pass"):
        pytester.makepyfile(KERNEL.format(fields=CACHES[cache], pool=POOLS[pool], pick=pick))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu")

    return run


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("cache", ["int8 per token", "fp8 per head"])
def test_a_quantized_cache_is_read_with_its_descales(judged, cache, pool):
    judged(cache, pool).assert_outcomes(passed=1)


@pytest.mark.parametrize("pool", ["NHD", "HND", "sliced"])
def test_v_lies_in_k(judged, pool):
    judged("latent", pool, pick="assert v.data_ptr() == k.data_ptr()").assert_outcomes(passed=1)


@pytest.mark.parametrize("pool", POOLS)
def test_another_s_descale_is_found(judged, pool):
    result = judged("int8 per token", pool, pick="of_v = of_v.roll(1, 0)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*mismatch: out of *"])
