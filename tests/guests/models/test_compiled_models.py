"""Compiled models: calls judged in the eager run, the compiled run held end to end."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import Attention, Block, Model, Of, case_of, causal, full, stack
from torch import nn

from pytest_attn import check_model
from pytest_attn.guests.models import compiled as compiled_runs
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.compiled import CompiledRun, runs_compiled

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_case(model, dtype, backend="aot_eager"):
    model, step = case_of(model, dtype)
    model.compile(backend=backend)
    return model, step


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # of inductor, as it is imported
@DTYPES
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attend", [full, causal])
def test_an_honest_compiled_model_passes(attend, backend, dtype):
    found = check_model(*compiled_case(stack(attend), dtype, backend), scatter=0)

    run = found.compiled
    assert (run.graphs, run.breaks, run.recompiled, run.unknown) == (1, 0, 0, "")
    assert {"loss", "gradient of blocks.1.attn.q.weight"} <= set(run.ratios)
    assert any("scaled_dot_product" in kernel for kernel in run.kernels)


class Off(torch.autograd.Function):
    """dk of this is a tenth too large."""

    @staticmethod
    def forward(ctx, k):
        return k.view_as(k)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.1


def too_large(q, k, v):
    return F.scaled_dot_product_attention(q, k, v) * 1.05


def sharper(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.25 * 1.05)


def without_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def dk_too_large(q, k, v):
    return F.scaled_dot_product_attention(q, Off.apply(k), v)


FAULTS = {"out": (full, too_large), "scale": (full, sharper), "mask": (causal, without_mask), "dk": (full, dk_too_large)}


def only_compiled(honest, fault):
    """Return attention that is wrong where torch.compile traces it, and nowhere else."""
    return lambda q, k, v: fault(q, k, v) if torch.compiler.is_compiling() else honest(q, k, v)


#: of a model in bfloat16, what its own rounding does not hide; each call is judged for the rest
SEEN_IN_HALF = ("out", "mask")


@pytest.mark.one_in(16)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of dynamo, which instantiates an autograd.Function
@DTYPES
@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one-layer"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_compiled_path_only_is_found_end_to_end(name, everywhere, dtype):
    if dtype == torch.bfloat16 and name not in SEEN_IN_HALF:
        pytest.skip("hidden by the rounding of the whole model")
    honest, fault = FAULTS[name]
    torch.manual_seed(0)
    faulty = only_compiled(honest, fault)
    model = Model(Block(Attention(faulty if everywhere else honest)), Block(Attention(faulty)))

    found = judge_model(*compiled_case(model, dtype), scatter=0)

    assert all(call.passed for call in found.calls)
    assert not found.passed
    assert "the compiled run is wrong" in found.message
    assert "the calls of the eager run are right" in found.message


@pytest.mark.slow("compiles")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of dynamo, behind a break
def test_graph_breaks_and_recompilations_are_told():
    turns = []

    def attend(q, k, v):
        turns.append(1)
        torch._dynamo.graph_break()
        return full(q, k, v)

    run = check_model(*compiled_case(Model(Block(Attention(attend))), torch.float32), scatter=0).compiled

    assert run.breaks >= 1
    assert run.graphs > 1


@pytest.mark.slow("compiles")
def test_a_step_that_is_compiled_again_each_time_says_so():
    model = stack(full)
    sizes = iter([1.0, 2.0, 3.0, 4.0] * 20)
    model, plain = compiled_case(model, torch.float32)
    chosen = [0.0]
    forward = model.forward
    model.forward = lambda x: forward(x) if chosen[0] < 0 else forward(x) + 0 * chosen[0]

    def step():
        chosen[0] = next(sizes)
        return plain()

    run = judge_model(model, step, scatter=0).compiled

    assert run.recompiled >= 1


def test_a_backend_is_judged_in_the_eager_model_and_the_note_says_so():
    found = check_model(*compiled_case(stack(full), torch.bfloat16), "math", scatter=0)

    assert found.compiled is None
    assert "math took the place of attention in the eager model; the compiled one was not run" in found.notes


@pytest.mark.slow("compiles")
def test_what_drops_at_random_is_not_compared():
    model = stack(full)
    model.head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.head)

    assert "head.0 drops at random" in judge_model(*compiled_case(model, torch.float32), scatter=0).compiled.unknown


def test_what_a_step_runs_is_seen_in_the_step_as_well():
    model, step = case_of(stack(full))
    made = torch.compile(model, backend="eager")
    x = torch.randn(2, 45, 64)

    assert not runs_compiled(model, step)
    assert runs_compiled(model, lambda: made(x))
    assert runs_compiled(model, torch.compile(step, backend="eager"))
    assert not runs_compiled(model, functools.partial(model, x))


@pytest.mark.slow("compiles")
def test_what_draws_random_numbers_by_itself_is_not_compared():
    """As libraries drop paths, without a module of torch for it."""
    model = stack(full)
    model.head = Of(lambda own, x: F.dropout(own.inner(x), 0.5, own.training), inner=model.head)

    assert "draws random numbers" in judge_model(*compiled_case(model, torch.float32), scatter=0).compiled.unknown


class Repeated:
    """Runs with exact attention give 1 everywhere, 1.1 rounded at random and 1.2 to nearest, unless a step refuses that."""

    def __init__(self, refuses=False):
        self.model, self.refuses = nn.Identity(), refuses

    def exact(self, mode=None, rounding=None, into=None, **how):
        if into is not None and self.refuses:
            raise TypeError("expected bfloat16")
        value = 1.0 if rounding is None else 1.1 if into is None else 1.2
        return {name: torch.full((100,), value) for name in ("out", "gradient of weight")}


def test_a_compiled_step_without_a_gradient_that_the_eager_one_has_is_wrong():
    run = compiled_runs._compared(CompiledRun(), {"out": torch.ones(100)}, Repeated())

    assert run.ratios == {"out": 0.0, "gradient of weight": math.inf}
    assert run.wrong == ["gradient of weight"]


@pytest.mark.slow("compiles")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 3e-3])
def test_an_honest_compiled_model_whose_gradients_vanish_passes(dtype, scale):
    model, step = compiled_case(stack(full), dtype)

    assert check_model(model, lambda: step() * scale, scatter=0).compiled.limits


@pytest.mark.slow("compiles")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of dynamo, which instantiates an autograd.Function
def test_gradients_that_are_rounding_error_alone_are_not_compared():
    """A normalized output has the same mean square whatever it is made of: all gradients before it cancel."""
    model, _ = case_of(stack(full), torch.bfloat16)
    model = nn.Sequential(model, nn.LayerNorm(7, dtype=torch.bfloat16))
    model.compile(backend="aot_eager")
    x = torch.randn(2, 45, 64, dtype=torch.bfloat16)

    run = check_model(model, lambda: model(x).float().square().mean(), scatter=0).compiled
    assert run.ratios
    assert not any("attn" in name for name in run.limits)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_step_that_takes_no_other_dtype_has_the_unit_of_random_rounding(refuses):
    step = Repeated(refuses)

    unit = compiled_runs._unit(step.exact(), step, [])["out"]
    assert unit == pytest.approx(1 if refuses else 2 * 2**0.5, rel=1e-4)
