"""Kernels that leave out tiles of small weights by design: what they declare passes, and nothing else does."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch

from pytest_attn import Threshold, Workload, check
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache

WORKLOAD = Workload(256, heads=2, kv_heads=1, head_dim=64, mask="causal-bottom-right", kv_len=340)
DECLARED = Threshold(2e-3, tile=(32, 64))
REFERENCES = ReferenceCache()


@dataclass(frozen=True)
class Skipping:
    """Attention that leaves tiles out, forward and backward; each field is one decision of such a kernel."""

    weight: float = DECLARED.weight
    tile: tuple[int, int] = DECLARED.tile
    maximum: str = "last"
    base: float = math.e
    decides: str = "all"  # rows of a tile
    first_is_kept: bool = True
    out_of_sum: bool = True
    hidden_agree: bool = True
    in_backward: bool = True

    def __call__(self, q, k, v):
        return _Attention.apply(q, k, v, self)

    def left_out(self, scores, seen):
        """Return which scores are left out, like them."""
        rows, keys = self.tile
        (q_len, kv_len), masked = scores.shape[-2:], scores.masked_fill(~seen, -math.inf)
        padded = torch.nn.functional.pad(masked, (0, -kv_len % keys, 0, -q_len % rows), value=-math.inf)
        tops = padded.unflatten(-1, (-1, keys)).amax(-1)
        if self.maximum == "last":
            largest = tops.amax(-1, keepdim=True)
        else:
            order = tops if self.maximum == "running" else tops.flip(-1)
            before = torch.cat([order.new_full((*order.shape[:-1], 1), -math.inf), order.cummax(-1).values[..., :-1]], -1)
            largest = before if self.maximum == "running" else before.flip(-1)
        if not self.first_is_kept:
            largest = largest.clamp(min=8)
        small = ~(tops - largest > math.log(self.weight, self.base))
        if not self.hidden_agree:
            small &= tops > -math.inf
        small = small.unflatten(-2, (-1, rows))
        agreed = small.all(-2, keepdim=True) if self.decides == "all" else small.any(-2, keepdim=True)
        return agreed.expand_as(small).flatten(-3, -2).repeat_interleave(keys, -1)[..., :q_len, :kv_len]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kernel):
        group = q.shape[1] // k.shape[1]
        keys, values = (one.float().repeat_interleave(group, 1) for one in (k, v))
        scores = q.float() @ keys.mT * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        left_out = kernel.left_out(scores, seen)
        scores = scores.masked_fill(~seen, -math.inf)
        kept = scores.masked_fill(left_out, -math.inf)
        lse = (kept if kernel.out_of_sum else scores).logsumexp(-1, keepdim=True)
        out = ((kept - lse).exp().to(q.dtype).float() @ values).to(q.dtype)
        ctx.save_for_backward(q, keys, values, out, lse, kept if kernel.in_backward else scores)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, dout):
        q, keys, values, out, lse, scores = ctx.saved_tensors
        p, do = (scores - lse).exp(), dout.float()
        ds = p * (do @ values.mT - (do * out.float()).sum(-1, keepdim=True))
        ds, p, scale = ds.to(q.dtype).float(), p.to(q.dtype).float(), q.shape[-1] ** -0.5
        dk, dv = (one.unflatten(1, (-1, ctx.group)).sum(2) for one in (ds.mT @ q.float() * scale, p.mT @ do))
        return *(one.to(q.dtype) for one in (ds @ keys * scale, dk, dv)), None


def compared(kernel, skips, dtype="bfloat16", backward=True, seed=0):
    spec = CheckSpec(
        WORKLOAD.replace(dtype=dtype),
        torch.device("cpu"),
        backward,
        declared=Declaration(precision="flash", skips=skips),
        seed=seed,
    )
    return judge(spec.subject(Registry(), kernel), spec, REFERENCES)


HONEST = {
    "last": (Skipping(), DECLARED),
    "running": (Skipping(maximum="running"), dataclasses.replace(DECLARED, maximum="running")),
    "from-the-last": (
        Skipping(maximum="running-backwards"),
        dataclasses.replace(DECLARED, maximum="running-backwards"),
    ),
    "row-by-row": (Skipping(tile=(1, 16), weight=1e-2), Threshold(1e-2, tile=(1, 16))),
    "nothing": (Skipping(weight=1e-30), DECLARED),
}
MUTANTS = {
    "base-two": Skipping(base=math.exp(1 / math.log(2))),
    "running": Skipping(maximum="running"),
    "for-one-row": Skipping(decides="any"),
    "before-the-first-maximum": Skipping(maximum="running", first_is_kept=False),
    "not-out-of-the-sum": Skipping(out_of_sum=False),
    "masked-rows": Skipping(hidden_agree=False),
    "not-in-backward": Skipping(in_backward=False),
    "ten-times": Skipping(weight=10 * DECLARED.weight),
    "twice": Skipping(weight=2 * DECLARED.weight),
    "lower-tiles": Skipping(tile=(16, 64)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", HONEST)
def test_what_is_declared_passes(name, dtype):
    kernel, skips = HONEST[name]
    found = compared(kernel, skips, dtype)
    assert found.passed, [(row.name, row.distribution, row.levels) for row in found.tensors if not row.passed]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", MUTANTS)
def test_anything_else_is_found(name, dtype):
    assert not compared(MUTANTS[name], DECLARED, dtype).passed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": "a"}, "weight must be a part of a row's largest, > 0 and < 1, got 'a'"),
        ({"weight": 1.0}, "weight must be a part of a row's largest, > 0 and < 1, got 1.0"),
        ({"weight": 0.1, "tile": 5}, r"tile must be \(rows, keys\), two whole numbers > 0, got 5"),
        ({"weight": 0.1, "tile": (32,)}, r"tile must be \(rows, keys\), two whole numbers > 0, got \(32,\)"),
        ({"weight": 0.1, "maximum": "first"}, "maximum must be one of last, running, running-backwards, got 'first'"),
    ],
)
def test_what_is_no_threshold_is_refused_in_words(given, said):
    with pytest.raises(ValueError, match=said):
        Threshold(**given)


@pytest.mark.parametrize("seed", [0, 2])
def test_values_that_are_a_part_of_the_keys_do_not_err_as_one(seed):
    check("math", "features-boolean-quantized-interleaved-vink", inputs=("stepped",), seed=seed)
