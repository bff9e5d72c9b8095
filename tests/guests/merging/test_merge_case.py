"""Merges of partial results: honest ones pass in every form, and wrong ones are found, with what is wrong."""

import math
from functools import partial

import pytest
import torch

from pytest_attn import Workload
from pytest_attn.reports.records import read_records

W = Workload(40, 200, heads=4, head_dim=32)
WORKLOADS = (
    W,
    *(W.replace(dtype=dtype) for dtype in ("float32", "float16")),
    W.replace(batch=2, kv_heads=2, mask="causal-bottom-right", kv_lens=(200, 77)),
    Workload(q_lens=(5, 1, 30), kv_lens=(70, 3, 0), heads=4, kv_heads=2, head_dim=32),
    Workload(1, 1, heads=2, head_dim=32),
)
on_all = pytest.mark.attention(*WORKLOADS, device="cpu", returns_lse=True, backward=True)


def merged(outs, lses, exp=torch.exp, log=torch.log):
    """Return what a kernel computes that reads every part once, out in the parts' dtype."""
    outs, lses = torch.stack(outs).float(), torch.stack(lses)
    top = lses.amax(0).clamp(min=-1e30)
    weights = exp(lses - top)
    total = weights.sum(0)
    return outs, weights / total.clamp(min=1e-30), log(total) + top


def combined(outs, weights, lse, like):
    weights = weights.mT if like.dim() == 3 else weights  # packed: out (tokens, heads, dim), lse (heads, tokens)
    return (weights.unsqueeze(-1) * outs).sum(0).to(like.dtype), lse


def of_lists(outs, lses, **base):
    return combined(*merged(outs, lses, **base), outs[0])


def of_two(out_a, lse_a, out_b, lse_b):
    return of_lists([out_a, out_b], [lse_a, lse_b])


def in_place(out_a, lse_a, out_b, lse_b):
    out, lse = of_two(out_a, lse_a, out_b, lse_b)
    return out_a.copy_(out), lse_a.copy_(lse)


def by_logaddexp(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weights = torch.stack([lse_a - lse, lse_b - lse]).exp().nan_to_num(0.0)
    return combined(torch.stack([out_a, out_b]), weights, lse, out_a)


def by_sigmoid(out_a, lse_a, out_b, lse_b):
    """As ring-flash-attn and torch's context parallelism, in the dtype of the parts."""
    share = torch.sigmoid(lse_b - lse_a)
    share = share.mT if out_a.dim() == 3 else share
    return out_a - share.unsqueeze(-1) * (out_a - out_b)


def folded(outs, lses):
    """Merge one part after the other, each time rounded and written over the first."""
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        in_place(outs[0], lses[0], out, lse)
    return outs[0], lses[0]


def in_dtype(out_a, lse_a, out_b, lse_b):
    """Have the weights in the dtype of the parts, so that autograd multiplies and sums gradients in it."""
    lses, outs = torch.stack([lse_a, lse_b]), torch.stack([out_a, out_b])
    weights = lses.softmax(0).nan_to_num(0.0).to(outs.dtype)
    return combined(outs, weights, lses.logsumexp(0), out_a)


class Formula(torch.autograd.Function):
    """A kernel with a backward pass of its own, which knows out as it was rounded; `fault` spoils that."""

    @staticmethod
    def forward(ctx, fault, a, x, b, y):
        out, lse = by_logaddexp(a, x, b, y)
        ctx.fault = fault
        ctx.save_for_backward(a, x, b, y, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        a, x, b, y, out, lse = ctx.saved_tensors
        as_out = (lambda t: t.mT) if out.dim() == 3 else lambda t: t
        shares = {"a": (x - lse).exp(), "b": (y - lse).exp()}
        of_out = as_out((dout.float() * out).sum(-1))
        found = []
        for name, part in (("a", a), ("b", b)):
            w, g = shares[name], as_out((dout.float() * part).sum(-1)) - of_out + dlse
            w, g = ctx.fault(name, w, g, shares, of_out, dlse) if ctx.fault else (w, g)
            found += [(as_out(w).unsqueeze(-1) * dout).to(part.dtype), w * g]
        return None, *found


def by_formula(*parts, fault=None):
    return Formula.apply(fault, *parts)


@on_all
@pytest.mark.parametrize("fn", [of_two, in_place, by_logaddexp, in_dtype, by_formula])
def test_honest_merges_of_two(attn, fn):
    names = {row.name for row in attn.check_merge(fn).tensors}
    assert names == {"out", "lse", "dout_a", "dlse_a", "dout_b", "dlse_b"}


@pytest.mark.attention(W, W.replace(dtype="float32"), device="cpu", backward=True)
def test_a_merge_without_autograd_has_no_gradients(attn):
    def by_pointer(a, x, b, y):
        """Write out over the first part, as a kernel does of which autograd knows nothing."""
        a.data.copy_(of_two(a, x, b, y)[0].detach())
        return a

    for fn, why in ((torch.no_grad()(of_two), "does not require grad"), (by_pointer, "writes over a part without autograd")):
        found = attn.check_merge(fn)
        assert why in found.unjudged[0]
        assert {row.name for row in found.tensors} <= {"out", "lse"}


@pytest.mark.attention(Workload(17, heads=2, dtype="float32", mask="causal"), device="cpu", returns_lse=True, backward=True)
def test_a_backward_pass_may_read_out_as_it_was_rounded(attn):
    attn.check_merge(by_formula)


@pytest.mark.attention(W, device="cpu", returns_lse=True, backward=True)
def test_an_lse_that_autograd_does_not_know_has_no_gradient_to_hand_back(attn):
    def by_pointer(a, x, b, y):
        out, lse = of_two(a, x.clone(), b, y)
        x.data.copy_(lse.detach())
        return out, x

    found = attn.check_merge(by_pointer)
    assert "writes over a part without autograd" in found.unjudged[0]
    assert "dlse_b" in {row.name for row in found.tensors}


@pytest.mark.attention(*WORKLOADS, device="cpu", empty_rows="any", backward=True)
def test_what_the_sigmoid_leaves_where_no_part_has_keys_is_the_caller_s(attn):
    attn.check_merge(by_sigmoid)
    attn.check_merge(lambda a, lse_a, b, lse_b: by_sigmoid(a.float(), lse_a, b.float(), lse_b))


def by_sigmoids(out_a, lse_a, out_b, lse_b):
    """The same with lse: of a first part without keys it is -inf - (-inf)."""
    return by_sigmoid(out_a.float(), lse_a, out_b, lse_b), lse_a - torch.nn.functional.logsigmoid(lse_a - lse_b)


@on_all
def test_a_merge_that_no_empty_part_reaches_says_so(attn):
    attn.check_merge(by_sigmoids, empty_parts=False)
    if attn.workload.kv_len > 1:
        with pytest.raises(AssertionError, match=r"one part has no keys: .*; say empty_parts=False|no part has keys"):
            attn.check_merge(by_sigmoids)


@on_all
@pytest.mark.parametrize("parts", [3, 7])
def test_honest_merges_of_more(attn, parts):
    attn.check_merge(of_lists, parts)
    attn.check_merge(folded, parts)


LAID_OUT = {"layout": "bshd", "lse_layout": "bsh", "lse_base": 2, "returns_lse": True}


@pytest.mark.attention(*WORKLOADS[:4], device="cpu", backward=True, **LAID_OUT)
def test_honest_merges_in_base_2_and_another_layout(attn):
    attn.check_merge(lambda a, lse_a, b, lse_b: of_lists([a, b], [lse_a, lse_b], exp=torch.exp2, log=torch.log2))


# -- mutants ---------------------------------------------------------------------------------------------------------------


def read_as(laid_out, a, lse_a, b, lse_b):
    """Merge with lse whose memory is read in another way than it lies."""
    return of_two(a, laid_out(lse_a), b, laid_out(lse_b))


def nan_without_keys(a, lse_a, b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return combined(torch.stack([a, b]), (torch.stack([lse_a, lse_b]) - lse).exp(), lse, a)


def no_maximum(a, lse_a, b, lse_b):
    weights = torch.stack([lse_a, lse_b]).exp()
    total = weights.sum(0)
    return combined(torch.stack([a, b]), weights / total.clamp(min=1e-30), total.log(), a)


def one_plus_exp(a, x, b, y):
    """As ring-flash-attention's older one; exp of what two lse differ by overflows."""
    return of_two(a, x, b, y)[0], torch.where(x == -math.inf, y, x + (1 + (y - x).exp()).log())


FIRST, HALVES = "parts of 1 and 199 keys", "parts of 100 and 100 keys"
FAR = f"{HALVES}, lse 200 higher or lower, in some rows by part"
BASE_2 = {"exp": torch.exp2, "log": torch.log2}
READ = "the memory of lse is read as contiguous"


def overwriting(a, x, b, y):
    return of_two(a, torch.logaddexp(x, y, out=x), b, y)


#: a fault: the merge that has it, in which arrangement it shows, and its cause, as the report says it
MUTANTS = {
    "base 2 for e": (lambda a, x, b, y: of_lists([a, b], [x, y], **BASE_2), FIRST, "lse in base e is taken as in base 2"),
    "weights of another": (lambda a, x, b, y: of_two(a, y, b, x), FIRST, "each part has the weight of another one"),
    "another scale": (
        lambda a, x, b, y: of_two(a, x, b, y * math.log(2)),
        FIRST,
        "lse in base e is taken as in base 2 in the second part",
    ),
    "factor of a part": (lambda a, x, b, y: of_two(a, x, b * 0.75, y), FIRST, "the second part is multiplied by 0.75"),
    "scaled lse": (lambda a, x, b, y: of_two(a, x, b, y * 1.1), FIRST, "second part's lse is multiplied by 1\\.1"),
    "no sum": (
        lambda a, x, b, y: combined(torch.stack([a, b]), (torch.stack([x, y]) - torch.maximum(x, y)).exp(), x, a)[0],
        FIRST,
        "weights are not divided by their sum",
    ),
    # as vllm#21996 read one that was not contiguous
    "memory of lse": (partial(read_as, lambda t: t.reshape(1, 40, 4).mT), FIRST, rf"{READ} \(batch, rows, heads\)"),
    "as if contiguous": (
        partial(read_as, lambda t: t.as_strided(t.shape, (160, 40, 1))),
        f"{HALVES}, lse strided",
        rf"{READ} \(batch, heads, rows\)",
    ),
    "nan without keys": (
        nan_without_keys,
        "no part has keys in every third row",
        "NaN in rows in which no part has keys",
    ),
    "mean": (lambda a, x, b, y: ((a.float() + b.float()) / 2).to(a.dtype), FIRST, "the mean of the parts"),
    "no maximum": (no_maximum, FAR, "subtract the largest lse"),
    "one and exp": (one_plus_exp, FAR, "subtract the largest lse"),
    "lse not updated": (
        lambda a, x, b, y: (of_two(a, x, b, y)[0], torch.maximum(x, y)),
        FIRST,
        "lse is the largest of the parts'",
    ),
    "empty as zero": (
        lambda a, x, b, y: of_two(a, x, b, y.nan_to_num(neginf=0.0)),
        "the second part has no keys",
        "-inf is taken as 0",
    ),
    "lse overwritten": (overwriting, FIRST, "the first part's lse is overwritten"),
}


@pytest.mark.attention(*WORKLOADS[:2], device="cpu", returns_lse=True)
@pytest.mark.parametrize(("fn", "arrangement", "cause"), MUTANTS.values(), ids=MUTANTS)
def test_a_fault_is_found_in_its_arrangement_and_named(attn, fn, arrangement, cause):
    with pytest.raises(AssertionError, match=rf"(?s)inputs structured, {arrangement}\).*{cause}"):
        attn.check_merge(fn)


@pytest.mark.attention(Workload(1, 90, heads=2, head_dim=32), device="cpu", returns_lse=True)
def test_parts_of_one_row_lie_far_apart_either_way(attn):
    for fn in (one_plus_exp, lambda a, x, b, y: one_plus_exp(b, y, a, x)):
        with pytest.raises(AssertionError, match=r"(?s)lse 200 .*subtract the largest lse"):
            attn.check_merge(fn, empty_parts=False)


def detached(a, x, b, y):
    return of_two(a, x.detach(), b, y.detach())


#: a fault of the backward pass, and its cause
OF_GRADIENTS = {
    "detached weights": (detached, "dlse_a is 0: are weights detached"),
    "one lse detached": (lambda a, x, b, y: of_two(a, x, b, y.detach()), "dlse_b is 0"),
    "one out detached": (lambda a, x, b, y: of_two(a.detach(), x, b, y), "dout_a is 0"),
    "all but one detached": (lambda a, x, b, y: of_two(a, x.detach(), b.detach(), y.detach())[0], "dout_b is 0"),
    "of lse detached": (lambda a, x, b, y: (of_two(a, x, b, y)[0], torch.logaddexp(x, y.detach())), ""),
    "weights swapped": (
        lambda name, w, g, shares, *_: (shares["b" if name == "a" else "a"], g),
        "dout_a has the weight of the second part",
    ),
    "no weight": (lambda name, w, g, *_: (torch.ones_like(w), w * g), "dout_a has no weight"),
    "a factor": (lambda name, w, g, *_: (w * 0.75, g / 0.75), r"dout_a is multiplied by 0\.75"),
    "no sum": (lambda name, w, g, shares, of_out, dlse: (w, g + of_out), "dlse_a lacks - dout . out"),
    "lse's own": (lambda name, w, g, shares, of_out, dlse: (w, g - dlse), "dlse_a lacks what arrives at lse"),
    "base": (lambda name, w, g, *_: (w, g * math.log(2)), r"dlse_a is multiplied by 0\.69\d?, as of another base"),
    "sign": (lambda name, w, g, *_: (w, -g), "dlse_a is multiplied by -1"),
}


@pytest.mark.attention(*WORKLOADS[:3], device="cpu", returns_lse=True, backward=True)
@pytest.mark.parametrize(("fault", "cause"), OF_GRADIENTS.values(), ids=OF_GRADIENTS)
def test_a_wrong_gradient_is_found_and_named(attn, fault, cause):
    fn = fault if not cause or "detached" in cause or cause.endswith("is 0") else partial(by_formula, fault=fault)
    with pytest.raises(AssertionError, match=f"(?s)mismatch.*{cause and f'suggests +{cause}'}"):
        attn.check_merge(fn)


@pytest.mark.attention(W, device="cpu", backward=True)
def test_gradients_of_three_parts(attn):
    with pytest.raises(AssertionError, match=r"(?s)dlses\[2\] of .*suggests +dlses\[2\] is 0"):
        attn.check_merge(lambda outs, lses: of_lists(outs, [*lses[:2], lses[2].detach()]), 3)


@pytest.mark.attention(W, device="cpu", backward=True)
def test_nan_in_the_gradient_of_a_part_without_weight_is_found(attn):
    def fn(a, x, b, y):
        share = ((y - x).exp() + 1).reciprocal()  # of exp's inf it is right, and its gradient 0 * inf
        return share.unsqueeze(-1) * a + (1 - share).unsqueeze(-1) * b

    with pytest.raises(AssertionError, match=rf"{FAR}\)"):
        attn.check_merge(fn, empty_parts=False)
    with pytest.raises(AssertionError, match=r"(?s)the first part has no keys\).*one part has no keys: "):
        attn.check_merge(fn)


@pytest.mark.attention(*WORKLOADS[:2], device="cpu")
def test_faults_of_three_parts(attn):
    faults = {
        "without the third part": lambda outs, lses: of_lists(outs[:2], lses[:2]),
        "the third part counts twice": lambda outs, lses: of_lists([*outs, outs[2]], [*lses, lses[2]]),
        "the weight of another one": lambda outs, lses: of_lists(outs, lses[::-1]),
    }
    for cause, fn in faults.items():
        with pytest.raises(AssertionError, match=rf"(?s)parts of 1, 1 and 198 keys\).*{cause}"):
            attn.check_merge(fn, 3)


@pytest.mark.attention(W, device="cpu")
def test_a_merge_may_decline(attn):
    def fn(a, lse_a, b, lse_b):
        raise NotImplementedError("no such dtype")

    with pytest.raises(pytest.skip.Exception, match="no such dtype"):
        attn.check_merge(fn)


@pytest.mark.attention(W, device="cpu")
def test_what_cannot_be_compared_is_told(attn):
    with pytest.raises(AssertionError, match=r"returned nothing \(None\); expected out or \(out, lse\)"):
        attn.check_merge(lambda a, lse_a, b, lse_b: None)
    with pytest.raises(AssertionError, match=r"lse has shape \(1, 40, 4\); expected \(1, 4, 40\)"):
        attn.check_merge(lambda a, lse_a, b, lse_b: (a, lse_a.mT))
    with pytest.raises(ValueError, match="parts must be a whole number >= 2, got 1"):
        attn.check_merge(of_two, parts=1)
    with pytest.raises(ValueError, match="empty_parts must be one of True, False, got 'yes'"):
        attn.check_merge(of_two, empty_parts="yes")
    with pytest.raises(TypeError, match="takes a callable, got"):
        attn.check_merge("flash2")
    with pytest.raises(TypeError, match="missing 2 required positional arguments") as raised:
        attn.check_merge(of_two, parts=3)
    assert "given lists of 3 outs and lses of shapes (1, 4, 40, 32) and (1, 4, 40)" in "".join(raised.value.__notes__)


def test_it_is_recorded_as_other_judgments_are(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.attention("smoke-full", device="cpu")
        def test_mine(attn):
            attn.check_merge(lambda a, lse_a, b, lse_b: a)
    """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-output=run.jsonl")
    result.assert_outcomes(failed=1)
    (record,) = read_records(pytester.path / "run.jsonl")
    assert (record["question"], record["verdict"], record["faults"]) == ("merge", "mismatch", ["merge-of-one-part"])
    assert "inputs structured, parts of 1 and 127 keys" in record["reason"]
