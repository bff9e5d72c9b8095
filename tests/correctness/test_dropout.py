"""Dropout with the kernel's own keep mask: what it leaves is judged exactly, and the mask itself as coins."""

import math

import pytest
import torch

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.contract import CHANCE, ContractError, require_fair
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import draw_inputs

W = Workload(40, 48, batch=2, heads=4, kv_heads=2, head_dim=16, mask="causal-bottom-right", dropout=0.2)
RETURNS = ("out", "keep", "lse")


def coins(shape, p):
    return torch.rand(shape) >= p


def kernel(p=W.dropout, scale=1 / (1 - W.dropout), mask=coins, say=lambda keep: keep, dq=1.0):
    def attention(q, k, v):
        q = q + (dq - 1) * (q - q.detach())  # the value, with a gradient that may be too large
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).float() for t in (k, v))
        scores = q.float() @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1 + k.shape[2] - q.shape[2]).bool(), -math.inf)
        keep = mask(scores.shape, p)
        return ((scores.softmax(-1) * keep * scale) @ v).to(q.dtype), say(keep), scores.logsumexp(-1)

    return attention


def by_key_heads(keep):
    """Give head h of batch entry b the mask of number 2 b + h."""
    return keep.flatten(0, 1)[torch.arange(2)[:, None] * W.kv_heads + torch.arange(W.heads)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_left_is_judged_forward_and_backward(dtype):
    w = W.replace(dtype=dtype)
    judged = pytest_attn.check(kernel(), w, returns=RETURNS, backward=True)
    assert {row.name for row in judged.tensors} == {"out", "lse", "dq", "dk", "dv"}
    assert max(row.z_element for row in judged.tensors) < 6


def test_an_eager_kernel_rounds_twice():
    def eager(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).float()
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(9).bool(), -math.inf)
        keep = coins(scores.shape, 0.2)
        return (scores.softmax(-1).to(q.dtype) * keep / 0.8) @ v, keep

    pytest_attn.check(eager, W, returns=("out", "keep"), precision="eager", backward=True)


def test_the_generators_are_left_as_they_were():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    pytest_attn.check(kernel(), W, returns=RETURNS)
    pytest_attn.check_invariants(kernel(), W, returns=RETURNS, backward=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_interleaved_groups_with_dropout():
    w = W.replace(head_groups="interleaved")

    def interleaved(q, k, v):
        return kernel()(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    pytest_attn.check(interleaved, w, returns=RETURNS, backward=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"scale": 1.0}, "does not divide what is left by 1 - dropout"),
        ({"scale": 1 / 0.64}, "divides twice by 1 - dropout"),
        ({"say": lambda keep: ~keep}, r"keeps 2\d\.\d+% of 6,720 visible|keeps 1\d\.\d+% of"),
        ({"say": lambda keep: keep.roll(1, 3)}, "mismatch: out"),
        ({"dq": 1.02}, "mismatch: dq"),
        ({"p": 0.3}, r"where dropout=0.2 keeps 80.00% \(the chance of that is below 1e-09\)"),
        ({"mask": lambda shape, p: coins((shape[0], 1, *shape[2:]), p).expand(shape)}, "the keep mask repeats: heads 0 and 1"),
        ({"mask": lambda shape, p: coins((1, *shape[1:]), p).expand(shape)}, "the keep mask repeats: batch entries 0 and 1"),
        ({"mask": lambda shape, p: coins((*shape[:2], 1, shape[3]), p).expand(shape)}, "the keep mask repeats: rows"),
        ({"mask": lambda shape, p: coins((*shape[:3], 1), p).expand(shape)}, "the keep mask repeats: (rows|keys)"),
        (
            {"mask": lambda shape, p: by_key_heads(coins(shape, p))},
            "the keep mask repeats: heads of all batch entries 2 and 4",
        ),
        ({"say": lambda keep: keep.float()}, "keep has dtype torch.float32; expected torch.bool"),
        ({"say": lambda keep: keep[0]}, r"keep has shape .* expected \(2, 4, 40, 48\)"),
    ],
)
def test_faults_are_found(fault, said):
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        pytest_attn.check(kernel(**fault), W, returns=RETURNS, backward=True)


def test_a_mask_that_does_not_follow_the_seed():
    own = torch.Generator().manual_seed(1)
    with pytest.raises(AssertionError, match=r"two calls after torch.manual_seed with the same seed drop other probabilities"):
        pytest_attn.check(kernel(mask=lambda shape, p: torch.rand(shape, generator=own) >= p), W, returns=RETURNS)


def seeded_by(seed):
    return kernel(mask=lambda shape, p: torch.rand(shape, generator=torch.Generator().manual_seed(seed())) >= p)


def test_a_mask_that_no_seed_changes():
    with pytest.raises(
        AssertionError, match=r"with different seeds drop the same of 9,120 probabilities.* int\(torch.randint"
    ):
        pytest_attn.check(seeded_by(lambda: 1), W, returns=RETURNS)
    pytest_attn.check(seeded_by(lambda: int(torch.randint(2**31, ()))), W, returns=RETURNS, backward=True)
    pytest_attn.check(seeded_by(torch.initial_seed), W, returns=RETURNS)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_a_mask_that_repeats_from_tile_to_tile_is_found_by_the_suite(tile):
    """The offset of the generator counts keys, or rows, of a tile: the workload is longer than tiles are."""
    (w,) = builtin_catalog().select("features-dropout-bias")
    inputs, keep = draw_inputs(w), coins((w.batch, w.heads, w.q_len, w.kv_len), w.dropout)
    with pytest.raises(ContractError, match="repeats: keys 0 and"):
        require_fair(keep[..., torch.arange(w.kv_len) % tile], inputs)
    if tile < w.q_len:
        with pytest.raises(ContractError, match="repeats: rows 0 and"):
            require_fair(keep[:, :, torch.arange(w.q_len) % tile], inputs)


def test_masks_that_few_coins_make_equal_are_no_fault():
    few = Workload(1, 5, heads=2, head_dim=16, dropout=0.2)
    pytest_attn.check(kernel(mask=lambda shape, p: torch.ones(shape).bool()), few, returns=RETURNS)


def test_fair_masks_are_never_refused():
    inputs = draw_inputs(W)
    for seed in range(200):
        torch.manual_seed(seed)
        require_fair(coins((2, 4, 40, 48), 0.2), inputs)
    assert CHANCE <= 1e-9


def test_dropout_needs_its_mask():
    with pytest.raises(ValueError, match="returns=\\('out', 'keep'\\)"):
        pytest_attn.check(kernel(), W)
    with pytest.raises(ValueError, match="has none; say Workload\\(dropout="):
        pytest_attn.check(kernel(), W.replace(dropout=0.0), returns=RETURNS)
    reason = Registry()["eager"].obstacle(W, machine_of(torch.device("cpu")), False)
    assert reason == "cannot say which probabilities it dropped (dropout=0.2)"
