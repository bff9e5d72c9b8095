"""`check(reference=)`: kernels of an exact form of the user's own pass, however they round, planted faults are found."""

import itertools
import math
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_attn import Window, Workload, check
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.rounded import OwnReferences
from pytest_attn.correctness.spec import CheckSpec

CPU = torch.device("cpu")
SIZES = ((65, 65, 2, 32), (64, 64, 4, 64), (33, 130, 2, 64), (120, 120, 2, 32), (17, 17, 2, 16))


@cache
def gate(*shape):
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def sees(q_len, kv_len, causal, more=0):
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(more if causal else kv_len)


def feature(x):
    return F.elu(x) + 1


# -- exact forms ---------------------------------------------------------------------------------------------------------


def weighted(weight, causal, q, k, v):
    """Return the sum of v with weights of scores, as of ReLU and sigmoid attention."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return (weight(scores, k.shape[2]) * sees(*scores.shape[2:], causal)) @ v


def relu_weight(scores, keys):
    return scores.relu() / keys


def sigmoid_weight(scores, keys):
    return torch.sigmoid(scores - math.log(keys))


def gated_form(causal, q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~sees(*scores.shape[2:], causal), -math.inf).softmax(-1)
    return p @ v * torch.sigmoid(gate(*q.shape[1:]).double())


def linear_form(causal, q, k, v):
    weights = (feature(q) @ feature(k).mT) * sees(q.shape[2], k.shape[2], causal)
    return weights @ v / weights.sum(-1, keepdim=True)


def linear_form_by_states(causal, q, k, v):
    if not causal:
        return (feature(q) @ (feature(k).mT @ v)) / (feature(q) @ feature(k).sum(2, keepdim=True).mT)
    states = (feature(k)[..., None] * v[..., None, :]).cumsum(2)
    return (feature(q)[..., None, :] @ states)[..., 0, :] / (feature(q) * feature(k).cumsum(2)).sum(-1, keepdim=True)


FORMS = {
    "relu": partial(weighted, relu_weight),
    "sigmoid": partial(weighted, sigmoid_weight),
    "gated": gated_form,
    "linear": linear_form,
    "linear by states": linear_form_by_states,
}

# -- kernels -------------------------------------------------------------------------------------------------------------


def kernel(form, causal, q, k, v, tile=None, rounds=True, backwards=False, late=False, eager=False, fault=None):
    """Return out of a kernel in float32 that rounds operands of products where `rounds`. late: divides last."""
    dtype, keys, factor = q.dtype, k.shape[2], 1.01 if fault == "scale" else 1.0
    if fault == "head":
        k, v = (torch.cat((t[:, -1:], t[:, 1:]), 1) for t in (k, v))
    seen = sees(q.shape[2], keys, causal, more=int(fault == "causal"))
    if fault == "key":  # the last one, or in the middle, where the last is seen once
        seen[:, keys // 2 if causal else -1] = False

    def operand(x):
        return x.to(dtype).float() if rounds else x

    if form.startswith("linear"):
        of_q, of_k = (operand(feature(t if eager else t.float())) for t in (q, k))
        weights = (of_q @ of_k.mT) * seen
    else:
        scores = (q.float() @ k.float().mT) * (q.shape[-1] ** -0.5 * factor)
        hidden = scores.masked_fill(~seen, -math.inf)
        weights = {
            "relu": lambda: scores.relu() * seen / (1 if late else keys),
            "sigmoid": lambda: sigmoid_weight(scores, keys) * seen,
            "gated": lambda: (hidden - hidden.amax(-1, keepdim=True)).exp(),
        }[form]()
    total = weights.sum(-1, keepdim=True)
    if form == "gated" and not late:
        weights, total = weights / total, 1.0
    tiles = [slice(start, start + (tile or keys)) for start in range(0, keys, tile or keys)]
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for at in reversed(tiles) if backwards else tiles:
        out += operand(weights[..., at]) @ v[:, :, at].float()
    if form == "relu":
        return (out * (1 / keys) if late else out).to(dtype)
    if form == "sigmoid":
        return out.to(dtype)
    if form == "gated":
        opened = gate(*q.shape[1:]).to(dtype if eager else torch.float32)
        opened = torch.ones(()) if fault == "gate" else opened.sigmoid()
        return (out / total).to(dtype) * opened if eager else (out / total * opened).to(dtype)
    return (out / total * factor).to(dtype)


HONEST = (
    {},
    {"rounds": False},
    {"tile": 32},
    {"tile": 16, "backwards": True},
    {"late": True},
    {"tile": 1, "rounds": False},
    {"eager": True},
)
FAULTS = ("key", "scale", "head", "causal", "gate")


class Kept(OwnReferences):
    """Those of one form, which several kernels share."""

    def __init__(self, form, spec):
        super().__init__(form, spec)
        self.kept = {}

    def reference_of(self, spec, distribution=None, subject=None):
        if distribution not in self.kept:
            self.kept[distribution] = super().reference_of(spec, distribution, subject)
        return self.kept[distribution]


def judged(form, dtype, causal, seed, several):
    """Yield what is asked of a kernel, and how it compares. several: options of `kernel`."""
    q_len, kv_len, heads, dim = SIZES[seed % len(SIZES)]
    kv_len = q_len if causal else kv_len
    w = Workload(q_len, kv_len, heads=heads, head_dim=dim, dtype=dtype, mask="causal" if causal else None)
    spec = CheckSpec(w, CPU, seed=seed)
    gate(heads, q_len, dim)  # which a form takes, and does not make
    references = Kept(partial(FORMS[form], causal), spec)
    for options in several:
        yield options, judge(spec.subject(Registry(), partial(kernel, form, causal, **options), "k"), spec, references)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "seeds", [range(4, 5), pytest.param(range(10), marks=pytest.mark.slow("2,100 honest kernels, 1,086 faults"))], ids=str
)
def test_honest_kernels_pass_and_faults_are_found(form, dtype, seeds):
    for seed, causal in itertools.product(seeds, (False, True)):
        left_out = set() if causal else {"causal"}
        left_out |= {"gate"} if form != "gated" else {"scale"} if SIZES[seed % len(SIZES)][0] < 64 else set()  # of a softmax
        faults = [{"fault": fault} for fault in FAULTS if fault not in left_out]
        refused = [options for options, found in judged(form, dtype, causal, seed, HONEST) if not found.passed]
        missed = [options for options, found in judged(form, dtype, causal, seed, faults) if found.passed]
        assert (refused, missed) == ([], []), (seed, causal)


# -- gradients -----------------------------------------------------------------------------------------------------------


class Operands(TorchDispatchMode):
    """Rounds operands of products to a dtype, as tensor cores take them."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_product = func._opname in ("mm", "bmm")
        return func(*(t.to(self.dtype).to(t.dtype) for t in args) if is_product else args, **(kwargs or {}))


class Fused(torch.autograd.Function):
    """A form in float32, forward and backward, with rounded operands."""

    @staticmethod
    def forward(ctx, form, q, k, v):
        ctx.dtype, ctx.leaves = q.dtype, [t.detach().float().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad(), Operands(q.dtype):
            ctx.out = form(*ctx.leaves)
        return ctx.out.detach().to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        with Operands(ctx.dtype):
            found = torch.autograd.grad(ctx.out, ctx.leaves, dout.to(ctx.out.dtype), retain_graph=True)
        return (None, *(t.to(ctx.dtype) for t in found))


def with_wrong_gradients(wrong):
    """Return a kernel of a form whose out is right. wrong: takes q, k, v and the form's out, and returns it."""
    return lambda form, q, k, v: Fused.apply(lambda *leaves: wrong(form, *leaves), q, k, v)


def scaled(tensor, factor):
    return tensor * factor - (tensor * (factor - 1)).detach()


TRAINED = {
    "fused": lambda form, q, k, v: Fused.apply(form, q, k, v),
    "float32": lambda form, q, k, v: form(q.float(), k.float(), v.float()).to(q.dtype),
    "eager": lambda form, q, k, v: form(q, k, v).to(q.dtype),
}
WRONG = {
    "dq 3 % too large": with_wrong_gradients(lambda form, q, k, v: form(scaled(q, 1.03), k, v)),
    "dk of the last key lost": with_wrong_gradients(
        lambda form, q, k, v: form(q, torch.cat((k[:, :, :-1], k[:, :, -1:].detach()), 2), v)
    ),
    "dv 3 % too small": with_wrong_gradients(lambda form, q, k, v: form(q, k, scaled(v, 0.97))),
    "dk lost": with_wrong_gradients(lambda form, q, k, v: form(q, k.detach() + 0 * k, v)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [name for name in FORMS if name != "relu"])
@pytest.mark.parametrize(
    "seeds", [range(4, 5), pytest.param(range(10), marks=pytest.mark.slow("480 honest kernels, 640 faults"))], ids=str
)
def test_gradients_are_those_of_autograd(form, dtype, seeds):
    for seed, causal in itertools.product(seeds, (False, True)):
        q_len, kv_len, heads, dim = SIZES[seed % len(SIZES)]
        w = Workload(q_len, q_len if causal else kv_len, heads=heads, head_dim=dim, dtype=dtype)
        gate(heads, q_len, dim)
        exact, found = partial(FORMS[form], causal), {}
        for precision, kernels in ("flash", ["fused", "float32", *WRONG]), ("eager", ["eager"]):
            spec = CheckSpec(w, CPU, True, declared=Declaration(precision=precision), seed=seed)
            references = Kept(exact, spec)
            for name in kernels:
                kernel = partial({**TRAINED, **WRONG}[name], exact)
                found[name] = judge(spec.subject(Registry(), kernel, name), spec, references).passed
        assert found == dict.fromkeys(TRAINED, True) | dict.fromkeys(WRONG, False), (seed, causal)


def late_division(q, k, v):
    p = scores(q, k).exp()
    return p @ v / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("exact", [lambda q, k, v: scores(q, k).softmax(-1) @ v, late_division], ids=["softmax", "sums"])
def test_a_kernel_may_have_row_sums_of_gradients_from_its_rounded_out(exact):
    of_flash = partial(F.scaled_dot_product_attention, scale=0.25)
    assert check(of_flash, Workload(24, heads=2, head_dim=16), reference=exact, backward=True, device="cpu").passed

    def without_row_sums(q, k, v):
        s = scores(q.float(), k.float())
        return ((s - s.logsumexp(-1, keepdim=True).detach()).exp() @ v.float()).to(q.dtype)

    with pytest.raises(AssertionError, match="mismatch: dq"):
        check(without_row_sums, SMALL, reference=exact, backward=True, device="cpu")


# -- what is refused, and what is said -----------------------------------------------------------------------------------

SMALL = Workload(40, heads=2, head_dim=16)


def scores(q, k):
    return (q @ k.mT) * 0.25


def relu(q, k, v):
    return F.relu(scores(q, k)) @ v


CALLS, GATE = itertools.count(), gate(2, 40, 16)
REFUSED = {
    "float64 tensor": lambda q, k, v: None,
    "computes in torch.float32 in aten::_to_copy": lambda q, k, v: relu(q.float(), k.float(), v.float()).double(),
    "computes in torch.bfloat16 in aten::sigmoid": lambda q, k, v: relu(q, k, v) * GATE.sigmoid(),
    r"returned shape \(1, 2, 1, 16\), expected that of out, \(1, 2, 40, 16\)": lambda q, k, v: relu(q, k, v)[:, :, :1],
    "draws some, or depends on earlier calls": lambda q, k, v: relu(q, k, v) * next(CALLS),
    "_scaled_dot_product_.*, in which rounding cannot be followed": F.scaled_dot_product_attention,
    "aten::topk, in which": lambda q, k, v: scores(q, k).topk(4).values @ v[:, :, :4],
    "jumps: its out": lambda q, k, v: (scores(q, k) > 0.5).double() @ v,
    "it is int, expected a function": 5,
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_form_to_which_no_kernel_can_be_held_is_refused(words):
    with pytest.raises(ValueError, match=f"^reference.*{words}"):
        check(relu, SMALL, reference=REFUSED[words], device="cpu")


@pytest.mark.parametrize(
    ("workload", "options", "words"),
    [
        (SMALL.replace(softcap=10.0), {}, "has softcap"),
        (SMALL.replace(mask=Window(8, 0)), {}, "has window"),
        (SMALL, {"returns_lse": True}, "nothing of lse"),
        (SMALL.replace(dtype="float32"), {"backward": True}, "gradients in float32 show how"),
        (SMALL, {"precision": "int8"}, "precision 'int8' says what a softmax rounds"),
        (SMALL, {"dequantized": lambda q, k, v: (q, k, v)}, "leave out dequantized"),
    ],
)
def test_what_a_form_does_not_say_is_refused(workload, options, words):
    with pytest.raises(ValueError, match=f"^reference=: .*{words}"):
        check(relu, workload, reference=relu, device="cpu", **options)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (relu, r"reference jumps: its dq\["),
        (lambda q, k, v: relu(q, k, v).detach(), "no gradients: autograd does not reach q, k or v"),
        (lambda q, k, v: relu(q.detach(), k, v), "no gradient of q: autograd does not reach it"),
    ],
)
def test_gradients_that_no_kernel_can_be_held_to_are_refused(form, words):
    with pytest.raises(ValueError, match=words):
        check(relu, SMALL, reference=form, backward=True, device="cpu")


def test_no_fault_of_a_softmax_is_named():
    softmax = partial(torch.nn.functional.scaled_dot_product_attention, scale=0.25)
    with pytest.raises(AssertionError, match="mismatch: out of") as failure:
        check(softmax, SMALL, name="softmax", reference=relu, device="cpu")
    assert "suggests" not in str(failure.value)
    assert check(softmax, SMALL, reference=lambda q, k, v: scores(q, k).softmax(-1) @ v, device="cpu").passed


def test_rows_of_nothing_are_nan_in_both_and_steps_in_place_count():
    def strictly_before(q, k, v):
        weights = F.relu(scores(q, k)).mul_(torch.ones(40, 40).tril(-1))
        return weights @ v / weights.sum(-1, keepdim=True)

    assert check(lambda q, k, v: strictly_before(q, k, v).to(q.dtype), SMALL, reference=strictly_before, device="cpu").passed


def test_a_form_may_add_up_in_another_order_each_time():
    """As atomic additions do on a GPU."""
    order = itertools.cycle([torch.arange(40), torch.arange(39, -1, -1)])

    def in_any_order(q, k, v):
        at = next(order)
        return scores(q, k[:, :, at]).sigmoid() @ v[:, :, at]

    assert check(lambda q, k, v: scores(q, k).sigmoid() @ v, SMALL, reference=in_any_order, device="cpu").passed


def test_a_form_may_make_constants_on_another_device(monkeypatch):
    """A generator fills tensors of its own device alone, as those of a GPU and a CPU do."""
    uniform_ = torch.Tensor.uniform_

    def uniform_there(tensor, *limits, generator):
        assert tensor.device == generator.device
        return uniform_(tensor, *limits, generator=generator)

    def of_constants(q, k, v):
        assert (torch.ones(40, device="meta") * 2).is_meta
        return scores(q, k).sigmoid() @ v

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_there)
    assert check(lambda q, k, v: scores(q, k).sigmoid() @ v, SMALL, reference=of_constants, device="cpu").passed


def test_eager_rounds_each_step():
    def kernel(q, k, v):
        return ((q @ k.mT * 0.25).softmax(-1).to(q.dtype) @ v) * 1.0

    def exact(q, k, v):
        return scores(q, k).softmax(-1) @ v

    found = [check(kernel, SMALL, reference=exact, device="cpu", precision=name).worst for name in ("flash", "eager")]
    assert found[1].budget > 1.2 * found[0].budget
