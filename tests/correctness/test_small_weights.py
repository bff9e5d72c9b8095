"""What leaves out keys of a small weight is found wherever the weights that it leaves out add up."""

import pytest
import torch

from pytest_attn import Workload, check

#: the sum of weights from which nothing is left out unseen: e times what a row of the dtype shows, as sums are e apart
SEEN = {"float32": 6e-5, "float16": 1e-2, "bfloat16": 6e-2}


def skipping(least):
    """Return attention without the keys whose probability is below `least`, and without them in its gradients."""

    def attention(q, k, v):
        weights = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)
        return (weights.where(weights >= least, 0) @ v.float()).to(q.dtype)

    return attention


@pytest.mark.one_in(3)
@pytest.mark.parametrize("keys", [64, 256, 1024])
@pytest.mark.parametrize("dtype", SEEN)
def test_keys_of_small_weights_are_missed(dtype, keys):
    workload = Workload(64, keys, heads=2, head_dim=64, dtype=dtype)
    check(skipping(0), workload)
    with pytest.raises(AssertionError, match="of skipping"):
        check(skipping(SEEN[dtype] / keys), workload)


def test_they_are_missed_by_few_rows_over_many_keys():
    with pytest.raises(AssertionError, match="of skipping"):
        check(skipping(2e-3 / 8192), Workload(16, 8192, heads=2, head_dim=64, dtype="float32"))


def test_rows_of_the_other_kind_stay():
    from pytest_attn.workloads.inputs import draw_inputs

    drawn = draw_inputs(Workload(64, 256, heads=2, dtype="float32"), "flat")
    largest = (drawn.q @ drawn.k.mT * 64**-0.5).softmax(-1).amax(-1)
    assert int((largest > 0.5).sum()) == 2 * 64 // 4
    assert int((largest < 0.01).sum()) == 2 * 64 * 3 // 4
    assert torch.equal(drawn.k[:, :, 0].abs(), torch.full_like(drawn.k[:, :, 0], 1.25))
