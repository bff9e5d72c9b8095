"""Every selected backend, forward and backward, against exact attention.

Without --attn-workloads a CPU runs the groups smoke, edges and features, a GPU the whole catalog.
"""

from __future__ import annotations

import pytest

from pytest_attn import AttentionCase, Backend, Workload

INPUTS = ("structured", "flat", "outlier")
#: fields of which each makes a backend that compiles do so anew
_OPTIONS = (
    *("mask", "softcap", "scale", "bias", "alibi", "sinks", "score_mod"),
    *("q_lens", "kv_lens", "head_groups", "dtype"),
)


@pytest.mark.attention(inputs=INPUTS)
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, computed as in inference."""
    skip_compiled_ones(attn)
    attn.check(attn_backend)


@pytest.mark.attention(inputs=INPUTS, backward=True)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients of q, k and v, computed as in training."""
    attn.check(attn_backend)


def skip_compiled_ones(attn: AttentionCase) -> None:
    """On a CPU, leave out workloads of three and more options for a backend that compiles some five seconds for each."""
    assert attn.backend is not None
    w = attn.workload
    if attn.device.type == "cpu" and attn.backend.name.startswith("flex") and str(w.name).startswith("features-"):
        plain = Workload(w.q_len)
        if sum(getattr(w, option) != getattr(plain, option) for option in _OPTIONS) + (w.q_len != w.kv_len) > 2:
            pytest.skip("compiles for every workload; on a CPU for those of one and two options")
