"""What a check hands over beside values: strides that models have, and the same call again."""

import pytest
import torch
from judging import FULL, attention, causal, failure

import pytest_attn
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.workloads.inputs import draw_inputs

MASKED = FULL.replace(mask="causal")


def of_contiguous_memory(q, k, v):
    """Reads k as if it were contiguous, whatever its strides."""
    return causal(q, k.as_strided(k.shape, torch.empty(k.shape).stride()), v)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_check_hands_over_strides_that_models_have(layout):
    strides = []

    def kernel(q, k, v):
        strides.append(k.stride())
        return causal(q, k, v) if layout == "bhsd" else causal(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    assert pytest_attn.check(kernel, MASKED, layout=layout, device="cpu").passed
    of_models = {"bhsd": (16384, 64, 128, 1), "bshd": (49152, 384, 192, 1)}[layout]
    assert of_models in strides
    assert strides[0] == strides[-1] != of_models  # the first distribution, and the same again with k written anew


def test_a_kernel_that_ignores_strides_is_wrong_and_told_so():
    message = failure(of_contiguous_memory, MASKED)
    assert "inputs flat" in message
    assert "strides    q, k and v are transposed views of (batch, row, head, dim) tensors; contiguous" in message


def test_k_and_v_do_not_share_strides():
    def takes_the_strides_of_k(q, k, v):
        return causal(q, k, v.as_strided(v.shape, k.stride()))

    message = failure(takes_the_strides_of_k, MASKED)
    assert "strides    q and v are transposed views of (batch, row, head, dim) tensors, k is contiguous; contiguous" in message


def test_a_gradient_of_out_has_strides():
    def doubtful(q, k, v):
        out = causal(q, k, v).clone()
        out.register_hook(lambda dout: dout.as_strided(dout.shape, torch.empty(dout.shape).stride()))
        return out

    message = failure(doubtful, MASKED, backward=True)
    assert "strides" in message


def test_a_kernel_that_remembers_is_wrong_and_told_so():
    seen = []

    def scales_by_the_largest_value_so_far(q, k, v):
        seen.append(float(v.abs().max()))
        return causal(q, k, v) * (max(seen) / seen[-1])

    message = failure(scales_by_the_largest_value_so_far, MASKED, inputs=("flat", "structured"))
    assert "state      the same call was right before others came between" in message
    assert "inputs flat" in message


def test_a_result_that_a_later_call_overwrites_is_wrong_and_told_so():
    workspace = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)
    message = failure(lambda q, k, v: workspace.copy_(causal(q, k, v)), MASKED)
    assert "state      its result was right, and has changed while others were computed" in message


@pytest.mark.parametrize("fails_at", [2, 3])
def test_a_kernel_that_raises_once_by_its_state_does_not_refuse_strides(fails_at):
    calls = []

    def kernel(q, k, v):
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError("workspace is in use")
        return causal(q, k, v)

    with pytest.raises(RuntimeError, match="workspace is in use"):
        pytest_attn.check(kernel, MASKED, device="cpu")


def test_a_kernel_that_refuses_strides_each_time_is_right_on_contiguous_tensors():
    def kernel(q, k, v):
        if not q.is_contiguous():
            raise RuntimeError("q must be contiguous")
        return causal(q, k, v)

    assert pytest_attn.check(kernel, MASKED, device="cpu").passed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("period", [2, 3, 4])
@pytest.mark.parametrize("first", [1, 2])
def test_calls_that_are_wrong_at_times_are_told_as_such_and_not_as_strides(period, first):
    calls = []

    def alternates(q, k, v):
        calls.append(q)
        return causal(q, k, v) * (1.1 if (len(calls) - first) % period == 0 else 1)

    message = failure(alternates, MASKED)
    assert "rerun      equal calls return different results" in message
    assert "strides " not in message


def test_rounding_near_a_limit_is_no_matter_of_strides():
    """Another path for other strides rounds otherwise: here a little beyond the limit of a row, there within it."""
    workload = FULL.replace(dtype="float32")
    budget = compute_reference(draw_inputs(workload, "flat"), precision_named("torch_cpu")).tensors["out"].tau

    def kernel(q, k, v):
        out, is_flat = attention(q, k, v), bool(k.std() < 0.8)
        off = 3.8 if q.is_contiguous() else 4.4
        out[:, :, 5] += off * is_flat * budget[:, :, 5]
        return out

    message = failure(kernel, workload, precision="torch_cpu")
    assert "strides " not in message
