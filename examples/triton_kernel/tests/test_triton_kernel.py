"""The Triton kernel against exact attention. Without a GPU, TRITON_INTERPRET=1 lets Triton's interpreter run it."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a Triton kernel needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from example_triton_kernel import attention

from pytest_attn import Workload

PLAIN = Workload(70, heads=2, head_dim=32, dtype="float16")
CAUSAL = PLAIN.replace(mask="causal")
GROUPED = Workload(64, heads=4, kv_heads=2, head_dim=32, dtype="float16")


@pytest.mark.attention(PLAIN, CAUSAL, GROUPED)
def test_forward(attn):
    """Grouped heads are declined by the kernel, which makes that case a skip with its words."""
    causal = attn.workload.mask is not None
    attn.check(lambda q, k, v: attention(q, k, v, causal=causal), name="triton")
