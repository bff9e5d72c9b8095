"""Kernels behind reentrant checkpointing, which trains by `.backward()` and refuses `autograd.grad`."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.gradients import gradients_of

W = Workload(40, heads=2, head_dim=16, dtype="float32")
SINK = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32))


def with_sink(q, k, v):
    """Attention whose trained sink is in no graph before the checkpoint is computed again."""
    return sdpa(q, k, v) + 0 * SINK[:, None, None]


def reentrant(q, k, v):
    return checkpoint(with_sink, q, k, v, use_reentrant=True)


def wrong(q, k, v):
    k = k.view_as(k)
    k.requires_grad and k.register_hook(lambda dk: 1.05 * dk)
    return reentrant(q, k, v)


class Checkpoint(torch.autograd.Function):
    """As Megatron's and Transformer Engine's, which are not torch's."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return with_sink(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad()")
        tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = with_sink(*tensors)
        torch.autograd.backward(out, dout)
        return tuple(t.grad for t in tensors)


@pytest.mark.parametrize("before", [None, torch.ones(2)])
@pytest.mark.parametrize("through", [reentrant, Checkpoint.apply])
def test_the_gradients_are_the_same_bits_and_no_other_leaf_is_changed(through, before):
    SINK.grad = copy.copy(before)
    q, k, v, unused = (torch.randn(1, 2, 8, 16).requires_grad_() for _ in range(4))
    dout = torch.randn(1, 2, 8, 16)
    expected = torch.autograd.grad(sdpa(q, k, v), (q, k, v), dout)
    q.grad = kept = torch.ones_like(q)
    found = gradients_of([through(q, k, v)], [q, k, v, SINK, unused], [dout])
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=False)] == [True] * 3
    assert found[3] is not None
    assert found[4] is None
    assert q.grad is kept
    assert k.grad is None
    assert (SINK.grad is None) if before is None else torch.equal(SINK.grad, before)


@pytest.mark.parametrize("through", [reentrant, Checkpoint.apply])
def test_a_right_kernel_is_right_wherever_gradients_are_taken(through):
    SINK.grad = None
    options = {"backward": True, "device": "cpu"}
    assert pytest_attn.check(through, W, **options).passed
    assert pytest_attn.check_invariants(through, W, **options).passed
    SINK.requires_grad_(False)  # where all that needs a gradient is frozen
    try:
        assert pytest_attn.check_invariants(through, W, only="alone", **options).passed
    finally:
        SINK.requires_grad_()
    assert SINK.grad is None


def test_a_wrong_gradient_is_found_there():
    with pytest.raises(AssertionError, match="mismatch: dk of"):
        pytest_attn.check(wrong, W, backward=True, device="cpu")


@pytest.mark.parametrize("backward", [True, "both"])
def test_it_is_timed(backward):
    SINK.grad = None
    assert pytest_attn.measure(reentrant, W, backward=backward, device="cpu").p50 > 0
    assert SINK.grad is None


def test_torchs_own_is_known():
    assert "_is_checkpoint_valid" in CheckpointFunction.backward.__code__.co_names
