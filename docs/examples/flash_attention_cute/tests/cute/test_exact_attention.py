import pytest
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

from pytest_attn import Window, Workload

W = Workload(130, 197, batch=2, heads=4, kv_heads=2, dtype="bfloat16")
PACKED = Workload(q_lens=(1, 130, 7), kv_lens=(97, 197, 7), heads=4, kv_heads=2, dtype="bfloat16", mask="causal-bottom-right")
OPTIONS = {
    W.replace(softcap=5.0, scale=0.3): {"softcap": 5.0, "softmax_scale": 0.3},
    W.replace(mask=Window(40, 0), sinks=True): {"window_size": (40, 0)},
    PACKED: {"causal": True, "max_seqlen_q": 130, "max_seqlen_k": 197},
}


@pytest.mark.attention(*OPTIONS, layout="bshd", returns_lse=True, backward=True)
def test_exact_attention(attn):
    ends = {"cu_seqlens_q": attn.cu_seqlens, "cu_seqlens_k": attn.cu_seqlens_kv} if attn.workload == PACKED else {}
    options = {"return_lse": True, "learnable_sink": attn.sinks, **ends, **OPTIONS[attn.workload]}
    for judge, skip in ((attn.check, {}), (attn.check_invariants, {"skip": "magnitude"})):  # lse is infinite far below sinks
        judge(lambda q, k, v: (flash_attn_varlen_func if ends else flash_attn_func)(q, k, v, **options), **skip)
