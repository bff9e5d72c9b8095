"""Rows that see no key: a library returns there what it likes, and the model's check takes whatever is finite."""

import functools

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import TOKENS, case_of, stack

from pytest_attn.guests.models.check_model import judge_model

#: of the second sequence: those after it are padding, and the last rows see nothing else through a window of 8
KEYS = 25
EMPTY = slice(KEYS + 7, None)


def visible():
    at = torch.arange(TOKENS)
    seen = ((at[:, None] - at).abs() < 8).repeat(2, 1, 1, 1)
    seen[1, :, :, KEYS:] = False
    return seen


def filled(attend, fill):
    """Return an attention function that fills rows without keys as it likes: from v, through which gradients flow."""

    @functools.wraps(F.scaled_dot_product_attention)
    def sdpa(query, key, value, attn_mask=None, **options):
        out = attend(query, key, value, attn_mask=attn_mask, **options)
        return out if attn_mask is None else torch.where(attn_mask.any(-1, keepdim=True), out, fill(value))

    return sdpa


def mean(v):
    return v.mean(-2, keepdim=True)


SDPA = F.scaled_dot_product_attention
FAULTS = {
    "scale": lambda q, k, v, **options: SDPA(q * 1.02, k, v, **options),
    "v": lambda q, k, v, **options: SDPA(q, k, v * 1.02, **options),
    "zeros": lambda q, k, v, **options: SDPA(q, k, v, **options) * (torch.arange(TOKENS) != EMPTY.start - 1)[:, None],
}


@pytest.fixture
def own(monkeypatch):
    """Let a function stand where every model finds SDPA."""
    return lambda function: monkeypatch.setattr(F, "scaled_dot_product_attention", function)


def padded(dtype=torch.bfloat16):
    return case_of(stack(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible())), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fill", [mean, torch.zeros_like], ids=["mean", "zero"])
def test_what_is_finite_there_is_right_although_the_loss_reads_it(own, fill, dtype):
    own(filled(SDPA, fill if fill is mean else lambda v: 0 * mean(v)))

    found = judge_model(*padded(dtype))

    assert found.passed, found.message
    assert len(found.calls) == 2
    assert all(len(call.comparison.tensors) == 4 for call in found.calls)
    assert bool(found.ratios) == (fill is not mean and dtype is torch.bfloat16)
    assert any("rows that see no key are not 0" in note for note in found.notes) == (fill is mean)


def test_nan_there_is_told(own):
    own(filled(SDPA, lambda v: mean(v) * torch.nan))

    found = judge_model(*padded())

    assert not found.passed
    assert "sees no key at all: out must be finite there" in found.message
    assert "empty_rows" not in found.message
    assert found.calls[0].comparison.mismatch.location.batches.found == (1,)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_other_rows_is_found(own, fault):
    own(filled(FAULTS[fault], mean))

    assert not judge_model(*padded()).passed


def test_a_function_in_the_place_of_the_models_may_fill_them_too():
    def mine(q, k, v, workload):
        return filled(SDPA, mean)(q, k, v, attn_mask=visible())

    found = judge_model(*padded(), mine)

    assert found.passed, found.message


def test_the_gradient_of_a_captured_step_is_left_alone(own):
    from pytest_attn import capture

    own(filled(SDPA, mean))
    model, step = padded()
    step().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    capture(lambda: step().backward(), model)

    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before, strict=True))


@pytest.mark.slow("compiles")
@pytest.mark.parametrize("compiled_fill", [mean, torch.zeros_like])
def test_a_compiled_model_that_fills_them_otherwise_is_not_compared(compiled_fill):
    def attend(q, k, v):
        mask = visible()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        fill = compiled_fill if torch.compiler.is_compiling() else torch.zeros_like
        return torch.where(mask.any(-1, keepdim=True), out, fill(v))

    model, step = case_of(stack(attend), torch.bfloat16)
    model.compile(backend="aot_eager")
    found = judge_model(model, step, scatter=0)

    assert found.passed, found.message
    assert found.compiled.kernels
    assert ("rows that see no key is not checked" in found.compiled.unknown) == (compiled_fill is mean)
    assert bool(found.compiled.limits) == (compiled_fill is not mean)
