"""Faulty kernels in one layer and in all of a small model: each is found, and named with its layer.

They run where the models are: on a GPU if there is one, else on a CPU. `pytest tests/guests/models/test_planted_faults.py`
"""

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fakes import put
from guests.models.zoo import Attention, Block, Model

from pytest_attn import Causal, Window, capture
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import Kernel
from pytest_attn.workloads.inputs import Inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, TOKENS, WINDOW = 4, 2, 64, 96, 24
LAYERS, CHOSEN = 3, 1


def seen(kind):
    """Return what is visible, (rows, keys), or None for all."""
    at = torch.arange(TOKENS, device=DEVICE)
    ahead = at[:, None] - at
    document = (at >= 40).int()
    masks = {
        "causal": ahead >= 0,
        "window": (ahead >= 0) & (ahead <= WINDOW),
        "documents": (document[:, None] == document) & (ahead >= 0),
    }
    return masks.get(kind)


def computed(q, k, v, workload, kernel):
    """Compute attention by a kernel of the mutants, in small steps."""
    return kernel(Inputs(workload, q.device, q, k, v, q), q, k, v)[0]


honest = partial(computed, kernel=Kernel())


def larger_scale(q, k, v, workload):
    return honest(1.01 * q, k, v, workload)


def larger_dk(q, k, v, workload):
    k = k.view_as(k)
    if k.requires_grad:
        k.register_hook(lambda gradient: 1.01 * gradient)
    return honest(q, k, v, workload)


def lost_key(q, k, v, workload):
    mask = seen("causal")
    mask[TOKENS // 2 + 1 :, TOKENS // 2] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def next_token_in_one_head(q, k, v, workload):
    mask = seen("causal").expand(HEADS, -1, -1).clone()
    mask[1] |= torch.ones_like(mask[1]).tril(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


#: fault -> the mask that it needs, the tensor that shows it first, what it is called, if it has a name, and what has it
FAULTS = {
    "scale": (None, "out", ("scale-wrong",), larger_scale),
    "dk": ("causal", "dk", ("gradient-scaled",), larger_dk),
    "lost key": ("causal", "out", ("keys-unseen",), lost_key),
    "next token": ("causal", "out", ("causal-shows-next-key",), next_token_in_one_head),
}
OF_MUTANTS = {
    "left-edge-one-key-late": ("window", "out"),
    "last-key-tile-missing": (None, "out"),
    "groups-interleaved": ("causal", "out"),
    "causal-ignored": ("causal", "out"),
    "documents-not-separated": ("documents", "out"),
    "delta-missing": ("causal", "dq"),
}
FAULTS |= {
    one.name: (*OF_MUTANTS[one.name], one.faults, partial(computed, kernel=one.kernel()))
    for one in MUTANTS
    if one.name in OF_MUTANTS
}


class Planted:
    """Stands in for a model's attention: faulty in all layers, or in the second alone."""

    def __init__(self, faulty, everywhere):
        self.faulty, self.everywhere, self.calls = faulty, everywhere, 0

    def __call__(self, q, k, v, workload):
        is_faulty = self.everywhere or self.calls % LAYERS == CHOSEN
        self.calls += 1
        return (self.faulty if is_faulty else honest)(q, k, v, workload)


def case(kind, dtype, attend=None):
    """Return a model of three layers with grouped heads, and its training step."""

    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(kind), enable_gqa=True)

    torch.manual_seed(0)
    model = Model(*(Block(Attention(attend or grouped, HEADS, KV_HEADS, DIM)) for _ in range(LAYERS))).to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, DIM, generator=generator).to(DEVICE, dtype)
    labels = torch.randint(7, (2 * TOKENS,), generator=generator).to(DEVICE)
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), labels)


DTYPES = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow)]
)


@DTYPES
@pytest.mark.parametrize("kind", [None, "causal", "window", "documents"])
def test_a_kernel_without_a_fault_is_right_in_a_model(kind, dtype):
    found = judge_model(*case(kind, dtype), honest, scatter=0, precision="flash")

    assert found.passed, found.message


@pytest.mark.one_in(18)
@pytest.mark.parametrize(
    ("everywhere", "dtype"),
    [
        pytest.param(False, torch.bfloat16, id="one-layer-bf16"),
        pytest.param(True, torch.bfloat16, id="all-bf16"),
        pytest.param(False, torch.float32, id="one-layer-fp32"),
        pytest.param(True, torch.float16, id="all-fp16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_named_with_its_layer(fault, everywhere, dtype):
    kind, tensor, called, faulty = FAULTS[fault]
    model, step = case(kind, dtype)

    found = judge_model(model, step, Planted(faulty, everywhere), scatter=0, precision="flash")

    layers = range(LAYERS) if everywhere else [CHOSEN]
    wrong = [call for call in found.calls if not call.passed]
    assert [call.module for call in wrong] == [f"blocks.{n}.attn" for n in layers]
    assert f"{len(layers)} of {LAYERS} attention calls of Planted are wrong: " in found.message
    assert all(f"blocks.{n}.attn" in found.message for n in layers)
    given = {fault for call in wrong for fault in call.comparison.faults}
    assert given <= {*called}
    assert given or fault == "lost key" or dtype != torch.float32, "elsewhere rounding may hide which fault it is"
    assert tensor in {row.name for call in wrong for row in call.comparison.tensors if not row.passed}


@pytest.mark.one_in(2)
@DTYPES
@pytest.mark.parametrize("everywhere", [False, True], ids=["one-layer", "all"])
def test_sinks_that_are_not_passed_are_found(monkeypatch, tmp_path, everywhere, dtype):
    """Through flash-attn 4, whose function takes them."""
    put(monkeypatch, tmp_path, "flash4")
    library, calls = importlib.import_module("flash_attn.cute"), []
    right = library.flash_attn_func

    def flash_attn_func(q, k, v, causal=False, learnable_sink=None):
        is_faulty = everywhere or len(calls) % LAYERS == CHOSEN
        calls.append(q)
        return right(q, k, v, causal=causal, learnable_sink=None if is_faulty else learnable_sink)

    monkeypatch.setattr(library, "flash_attn_func", flash_attn_func)
    sinks = torch.full((HEADS,), 2.0, device=DEVICE)

    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return library.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)[0].transpose(1, 2)

    model, step = case("causal", dtype, attend)
    asked = capture(step, model)
    calls.clear()
    found = judge_model(model, step, scatter=0)

    assert all(call.workload.sinks for call in asked)
    wrong = [call.module for call in found.calls if not call.passed]
    assert wrong == [f"blocks.{n}.attn" for n in (range(LAYERS) if everywhere else [CHOSEN])]


def hints_of(model, step, attend):
    """Return which tensor is wrong first, and what is suggested, in calls of a model whose attention `attend` computes."""
    found = judge_model(model, step, attend, scatter=0)
    wrong = [call.comparison for call in found.calls if not call.passed]
    return [(one.mismatch.row.name, *one.faults) for one in wrong]


def test_a_scale_that_shows_as_the_slope_of_a_gradient_is_named():
    model, step = case(None, torch.bfloat16)
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.attn.q.parameters():  # almost uniform, so that out hardly changes
                parameter.mul_(0.03)
            block.attn.k.weight.mul_(0.03)

    assert hints_of(model, step, Planted(larger_scale, everywhere=False)) == [("dk", "scale-wrong")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize(("kind", "mask"), [("causal", Causal()), ("window", Window(WINDOW, 0))])
def test_padding_that_is_ignored_is_named(kind, mask, is_additive):
    visible = seen(kind).expand(2, 1, TOKENS, TOKENS).clone()
    visible[0, ..., :7], visible[1, ..., :3] = False, False
    visible |= torch.eye(TOKENS, dtype=torch.bool, device=DEVICE) & ~visible.any(-1, keepdim=True)
    low = torch.zeros(visible.shape, device=DEVICE).bfloat16().masked_fill(~visible, torch.finfo(torch.bfloat16).min)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=low if is_additive else visible, enable_gqa=True)

    def ignores(q, k, v, workload):
        return honest(q, k, v, workload.replace(mask=mask))

    model, step = case(kind, torch.bfloat16, attend)

    assert hints_of(model, step, ignores) == [("out", "padding-ignored")] * LAYERS
