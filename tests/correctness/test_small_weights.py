"""What leaves out keys of a small weight is found wherever these weights add up, and one missing key among very many."""

import pytest
import torch

from pytest_attn import Workload, check
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.inputs import draw_inputs

#: the sum of weights from which nothing is left out unseen
SEEN = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
REFERENCES = ReferenceCache()


def passes(kernel, workload, *inputs, backward=False):
    spec = CheckSpec(workload, torch.device("cpu"), backward, inputs)
    return judge(spec.subject(Registry(), kernel), spec, REFERENCES).passed


def weights_of(q, k):
    return (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)


def skipping(least):
    """Return attention without the keys whose probability is below `least`, and without them in its gradients."""

    def attention(q, k, v):
        weights = weights_of(q, k)
        return (weights.where(weights >= least, 0) @ v.float()).to(q.dtype)

    return attention


class SkippedBackward(torch.autograd.Function):
    """Right out; the backward pass has no key whose probability is below `least`."""

    @staticmethod
    def forward(ctx, q, k, v, least):
        weights = weights_of(q, k)
        out = (weights @ v.float()).to(q.dtype)
        ctx.least = least
        ctx.save_for_backward(q, k, v, weights, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, weights, out = (tensor.float() for tensor in ctx.saved_tensors)
        weights = weights.where(weights >= ctx.least, 0)
        ds = weights * (dout.float() @ v.mT - (dout.float() * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        gradients = ds @ k, ds.mT @ q, weights.mT @ dout.float()
        return *(one.to(dout.dtype) for one in gradients), None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("keys", [64, 256])
@pytest.mark.parametrize("dtype", SEEN)
def test_keys_of_small_weights_are_missed(dtype, keys, heads):
    workload = Workload(64, keys, heads=heads, head_dim=64, dtype=dtype)
    least = SEEN[dtype] / keys
    assert passes(skipping(0), workload, "flat")
    assert not any(passes(skipping(least * more), workload, "flat") for more in (1, 4, 32))
    assert passes(lambda q, k, v: SkippedBackward.apply(q, k, v, 0), workload, "flat", backward=True)
    assert not passes(lambda q, k, v: SkippedBackward.apply(q, k, v, least), workload, "flat", backward=True)


@pytest.mark.parametrize("keys", [8192, pytest.param(262_144, marks=pytest.mark.slow)])
def test_one_key_of_very_many_is_missed(keys):
    workload, missing = Workload(16, keys, head_dim=64), keys // 2 + 77

    def without_one(q, k, v):
        scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
        scores[..., missing] = -torch.inf
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    assert passes(skipping(0), workload, "flat")
    assert not passes(without_one, workload, "flat")
    assert not passes(skipping(0.03 / keys), workload, "flat")


def test_rows_of_both_kinds_are_there():
    drawn = draw_inputs(Workload(64, 256, heads=2, dtype="float32"), "flat")
    largest = weights_of(drawn.q, drawn.k).amax(-1)[0]
    assert bool((largest[0] < 0.01).all())
    assert bool((largest[1] > 0.5).all())


def test_a_heavy_score_that_is_rounded_moves_all_of_its_row():
    def largest_rounded_up(q, k, v):
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        top = scores.detach().amax(-1, keepdim=True)
        step = torch.exp2(top.clamp(min=1e-9).log2().floor() - 8)
        scores = scores + torch.where(scores.detach() == top, step, 0)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    w = Workload(512, heads=4, head_dim=128)
    found = check(largest_rounded_up, w, backward=True, inputs=("flat",), precision="eager", device="cpu")
    (dq,) = (one for one in found.tensors if one.name == "dq")
    assert dq.z_element < 1.8, "2.1 where the keys of a row count as moved apart"
