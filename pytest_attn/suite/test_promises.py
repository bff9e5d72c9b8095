"""Which bits every selected backend keeps: alone and in any batch, in pieces, token by token, behind a cache, again.

No backend of this package promises any: a table says what changes, which fails no test.
"""

import pytest

from pytest_attn import AttentionCase, Backend

SEEN = ("seen-batch", "seen-chunks", "seen-decode", "seen-prefix", "seen-rerun")


@pytest.mark.attention("promises")
def test_forward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output, computed as in inference."""
    attn.check_invariants(attn_backend, only=SEEN)


@pytest.mark.attention("promises-prefill", "promises-packed", "promises-d128", backward=True)
def test_backward(attn: AttentionCase, attn_backend: Backend) -> None:
    """The output and the gradients, in any batch and again."""
    attn.check_invariants(attn_backend, only=("seen-batch", "seen-rerun"))
