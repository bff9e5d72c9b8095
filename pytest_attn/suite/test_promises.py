"""Which bits every selected backend keeps: alone and in any batch, in pieces, token by token, behind a cache, again.

No backend of this package promises any: a table says what changes, which fails no test.
"""

import pytest

from pytest_attn import AttentionCase, Backend

#: floating-point operations of the forward pass above which a hundred calls take a CPU too long
_TOO_LONG_FOR_A_CPU = 2e8
_FORWARD = ("seen-batch", "seen-chunks", "seen-decode", "seen-prefix", "seen-rerun")


@pytest.mark.attention("promises", covering=1)
def test_forward(attn: AttentionCase, attn_backend: Backend, pytestconfig: pytest.Config) -> None:
    """The output, computed as in inference."""
    look(attn, attn_backend, pytestconfig, *_FORWARD)


@pytest.mark.attention("promises", covering=1, backends=("flash2@num_splits=1", "flash2_kvcache@num_splits=1"))
def test_one_split(attn: AttentionCase, attn_backend: Backend, pytestconfig: pytest.Config) -> None:
    """The output of kernels that may be told not to split keys, beside their own choice."""
    look(attn, attn_backend, pytestconfig, *_FORWARD)


@pytest.mark.attention("promises-prefill", "promises-packed", "promises-d128", backward=True, covering=1)
def test_backward(attn: AttentionCase, attn_backend: Backend, pytestconfig: pytest.Config) -> None:
    """The output and the gradients, in any batch and again."""
    look(attn, attn_backend, pytestconfig, "seen-batch", "seen-rerun")


def look(attn: AttentionCase, backend: Backend, config: pytest.Config, *promises: str) -> None:
    """Look at promises; of backends that compile for every shape on a GPU alone, and where workloads are named."""
    if attn.device.type == "cpu" and (backend.compiles or attn.workload.flops() > _TOO_LONG_FOR_A_CPU):
        pytest.skip("too long for a CPU")
    if backend.compiles and not config.getoption("attn_workloads"):
        pytest.skip("compiles for every shape; --attn-workloads=promises runs it")
    attn.check_invariants(backend, only=promises)
