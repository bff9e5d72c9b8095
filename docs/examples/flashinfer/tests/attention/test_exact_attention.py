import flashinfer
import pytest
import torch

from pytest_attn import Window, Workload

W = Workload(q_lens=(1, 130, 75), kv_lens=(97, 197, 75), heads=4, kv_heads=2, head_dim=128, dtype="float16")
OPTIONS = {
    W.replace(mask="causal-bottom-right", scale=0.1): {"causal": True, "sm_scale": 0.1},
    W.replace(mask=Window(40, 0), softcap=5.0): {"causal": True, "window_left": 40, "logits_soft_cap": 5.0},
}


@pytest.mark.attention(*OPTIONS, returns_lse=True, lse_base=2, lse_layout="sh", contiguous=True, precision="rounded_sum")
def test_exact_attention(attn):
    space = torch.empty(128 << 20, dtype=torch.uint8, device=attn.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, backend="fa2")
    wrapper.plan(attn.cu_seqlens, attn.cu_seqlens_kv, 4, 2, 128, **OPTIONS[attn.workload])
    attn.check(lambda q, k, v: wrapper.run(q, k, v, return_lse=True))
    attn.check_invariants(lambda q, k, v: wrapper.run(q, k, v, return_lse=True), skip=("magnitude",))
