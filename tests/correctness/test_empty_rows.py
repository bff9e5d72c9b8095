"""Rows that see no key: 0, unless the test says that its kernel leaves them to the caller."""

import math

import pytest
import torch
from judging import explicit, failure, positions

import pytest_attn
from pytest_attn import Causal, Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.correctness.contract import EmptyRows, rows_without_keys
from pytest_attn.correctness.judge import judge_output
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import BooleanMask

#: the first 32 rows see nothing
LATE = Workload(96, 64, heads=2, head_dim=32, mask=Causal(bottom_right=True), dtype="float32")
PACKED = Workload(heads=2, head_dim=32, q_lens=(40, 9), kv_lens=(16, 9), mask=Causal(bottom_right=True))
_ROWS, _KEYS = positions(96, 64)
SEEN = _KEYS <= _ROWS - 32


class Attention(torch.autograd.Function):
    """Honest attention, but for the rows without keys, which hold what `of_empty` makes of v."""

    @staticmethod
    def forward(ctx, q, k, v, of_empty):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            seen = SEEN | ~SEEN.any(-1, keepdim=True)
            out = explicit(*leaves, mask=seen).masked_fill(~SEEN.any(-1)[:, None], 0)
        held = out.detach().clone()
        held[:, :, :32] = of_empty(v)
        ctx.out = out
        ctx.save_for_backward(held, *leaves)  # as flash-attention does: nobody may write to it
        return held

    @staticmethod
    def backward(ctx, dout):
        _, *leaves = ctx.saved_tensors
        return *torch.autograd.grad(ctx.out, leaves, dout, retain_graph=True), None


def kernel(of_empty):
    return lambda q, k, v: Attention.apply(q, k, v, of_empty)


def mean(v):
    return v.mean(-2, keepdim=True)


def nothing(v):
    return torch.tensor(math.nan)


@pytest.mark.parametrize(
    ("of_empty", "accepted"), [(lambda v: 0.0, ("zero", "finite", "any")), (mean, ("finite", "any")), (nothing, ("any",))]
)
@pytest.mark.parametrize("empty_rows", ["zero", "finite", "any"])
def test_what_a_kernel_may_leave_there_is_what_its_test_says(of_empty, accepted, empty_rows):
    options = {"backward": True, "empty_rows": empty_rows, "device": "cpu"}
    if empty_rows in accepted:
        assert pytest_attn.check(kernel(of_empty), LATE, **options).passed
        if empty_rows == accepted[0]:
            assert pytest_attn.check_invariants(kernel(of_empty), LATE, **options).passed
    else:
        options.pop("device")
        assert "rows 0 to 31 of 96" in failure(kernel(of_empty), LATE, **options)


def test_a_row_that_sees_a_key_counts_whatever_is_said_of_the_others():
    def faulty(q, k, v):
        out = Attention.apply(q, k, v, nothing)
        return torch.cat([out[:, :, :32], 1.01 * out[:, :, 32:33], out[:, :, 33:]], 2)

    assert "rows only 32 of 96" in failure(faulty, LATE, empty_rows="any")


def test_lse_and_dq_of_these_rows_belong_to_the_caller_as_well():
    def with_lse(q, k, v):
        scores = (q @ k.mT / math.sqrt(32)).masked_fill(~SEEN, -1e4)  # a large number instead of -inf
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    assert "mismatch" in failure(with_lse, LATE, returns_lse=True)
    assert pytest_attn.check(with_lse, LATE, returns_lse=True, backward=True, empty_rows="finite", device="cpu").passed


def test_which_rows_these_are():
    assert rows_without_keys(draw_inputs(LATE)).sum() == 2 * 32
    assert rows_without_keys(draw_inputs(LATE))[:, :, :32].all()
    packed = rows_without_keys(draw_inputs(PACKED))
    assert packed.shape == (2, 49)
    assert packed[:, :24].all()
    assert not packed[:, 24:].any()
    assert not rows_without_keys(draw_inputs(LATE.replace(mask=None))).any()
    assert rows_without_keys(draw_inputs(Workload(heads=1, head_dim=32, q_lens=(3, 5), kv_lens=(0, 5))))[:, :3].all()


def test_packed_results_are_forgotten_where_they_lie():
    inputs = draw_inputs(PACKED)
    rows = EmptyRows(inputs, "any")
    out, lse = torch.full((49, 2, 32), math.nan), torch.full((2, 49), 5.0)
    rows.forget({"out": out, "lse": lse})
    assert (out[:24] == 0).all()
    assert out[24:].isnan().all()
    assert (lse[:, :24] == -math.inf).all()
    assert (lse[:, 24:] == 5).all()
    assert not rows.blanked(inputs.dout)[:24].any()
    assert torch.equal(rows.blanked(inputs.dout)[24:], inputs.dout[24:])


def test_sinks_say_what_a_row_without_keys_is():
    assert not EmptyRows(draw_inputs(LATE.replace(sinks=True)), "any").are_there


def test_an_expanded_result_is_not_written_to():
    inputs = draw_inputs(LATE)
    out = torch.zeros(1).expand(1, 2, 96, 32)
    assert not EmptyRows(inputs, "any").forget({"out": out})["out"].any()


def test_an_output_that_a_test_computed_is_left_as_it_is():
    spec = CheckSpec(LATE, torch.device("cpu"), declared=Declaration(empty_rows="any"))
    reference = ReferenceCache().reference_of(spec)
    out = kernel(nothing)(*(getattr(reference.inputs, name) for name in "qkv"))
    assert judge_output(out, spec, reference).passed
    assert out[:, :, :32].isnan().all()


def test_a_mask_of_a_tensor_has_such_rows_as_well():
    workload = LATE.replace(mask=BooleanMask(lambda *sizes: SEEN))
    assert rows_without_keys(draw_inputs(workload))[0, 0].sum() == 32
