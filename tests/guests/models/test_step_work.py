"""A model's step as what is timed: what it runs, what it leaves alone, and attention swapped in it at no cost."""

from contextlib import nullcontext

import pytest
import torch
from guests.models.zoo import HONEST, Case, case_of, causal, stack
from torch import nn

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.guests.models.step import untouched
from pytest_attn.guests.models.step_timing import StepWork, attention_share, optimizer_untouched, substituted
from pytest_attn.guests.models.substitution import (
    BackendSubstitute,
    KeptCall,
    RecordedSubstitute,
    Substitution,
    replacement,
    substitutes_of,
)
from pytest_attn.latency.work import StaleError, WrongResultError, verified
from pytest_attn.workloads.inputs import draw_inputs


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients_of_a_step(case):
    StepWork(*case, "forward+backward").stage()()
    return gradients(case.model)


def assert_close(found, expected):
    for gradient, other in zip(expected.values(), found.values(), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.fixture
def case():
    return HONEST["grouped"](torch.float32)


@pytest.mark.parametrize("runs_backward", [False, True])
def test_a_training_step_leaves_the_gradients_of_one_step(case, runs_backward):
    model, step = case

    def whole():
        loss = step()
        loss.backward()
        return loss.detach()

    work = StepWork(model, whole if runs_backward else step, "forward+backward")
    for _ in range(3):
        work.stage()()
    found = gradients(model)
    model.zero_grad()
    step().backward()

    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(model).items())
    assert work.first_seconds > 0


def test_a_forward_step_runs_without_autograd(case):
    work = StepWork(case.model, case.step, "forward")
    with work.context():
        value = work.stage()()

    assert not value.requires_grad
    assert not gradients(case.model)


def test_an_optimizer_steps_and_is_put_back(case):
    model, step = case
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    with untouched(model), optimizer_untouched(optimizer):
        work = StepWork(model, step, "forward+backward", optimizer)
        work.stage()()
        work.stage()()
        assert optimizer.state
        assert not all(map(torch.equal, before, model.parameters()))

    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_that_is_another_one_each_time_is_refused(case):
    scale = [1.0]

    def step():
        scale[0] *= 2
        return case.step() * scale[0]

    work = StepWork(case.model, step, "forward+backward")
    verified(work)
    with pytest.raises(StaleError, match="the step is not repeatable: its result was"):
        verified(work)


def test_steps_that_are_staged_together_each_begin_with_their_first_call(case):
    backend = BackendSubstitute(Registry()["math"], backward=True)
    with substituted(backend, *case, "forward+backward") as (work, substitution):
        for one in [work.stage() for _ in range(3)]:
            one()
        assert substitution._next == len(backend.substitutes)


@pytest.mark.parametrize("when", ["at once", "late", "never"])
def test_what_is_computed_in_a_timed_step_is_looked_at(when):
    case, calls = HONEST["causal"](torch.float32), []

    def attention(q, k, v, workload):
        calls.append(1)
        out = causal(q, k, v)
        return out * 0.5 if when == "at once" or (when == "late" and len(calls) > 20) else out

    backend = BackendSubstitute(replacement(attention), backward=True)
    with substituted(backend, *case, "forward+backward") as (work, _):
        refused = pytest.raises(WrongResultError, match="timed: the out of attention is not")
        with nullcontext() if when == "never" else refused:
            for at in range(20):
                work.stage()()
                work.verify_kept(is_last=at == 19)
    assert (backend._looks > 3) == (when != "at once")


def test_tensors_that_a_model_has_changed_since_are_not_looked_at():
    workload = Workload(8, heads=2, head_dim=16, dtype="float32")
    inputs = draw_inputs(workload, "randn", 0, torch.device("cpu"))
    out = causal(inputs.q, inputs.k, inputs.v)
    seen = KeptCall.of(inputs, (inputs.q, inputs.k, inputs.v), out)
    assert seen.is_as_it_was
    out.mul_(2)
    assert not seen.is_as_it_was
    with torch.inference_mode():
        assert KeptCall.of(inputs, (inputs.q, inputs.k, inputs.v), out.clone()) is None


@pytest.mark.parametrize("name", ["causal", "grouped", "folded", "scaled", "encoder", "checkpointed", "padded"])
def test_attention_at_no_cost_changes_no_value(name):
    case = HONEST[name](torch.float32)
    expected = gradients_of_a_step(case)
    with substituted(RecordedSubstitute(), *case, "forward+backward"):
        assert_close(gradients(case.model), expected)


def test_attention_at_no_cost_computes_no_attention(case):
    """Were the call made, the other result of a function that is changed meanwhile would be seen."""
    model, step = case
    work = StepWork(model, step, "forward")
    with torch.no_grad():
        expected = work.stage()()
        substitutes = substitutes_of(RecordedSubstitute(), work.stage(), model, ())
        substitution = Substitution(substitutes)
        for block in model.blocks:
            block.attn.q.weight.fill_(9.0)
        with substitution.applied(model, ()):
            substitution.reset()
            found = step()

    assert torch.equal(expected, found)


def test_a_backend_computes_every_call_of_a_timed_step(case):
    seen = []

    def mine(q, k, v, workload):
        seen.append(workload)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    registry = Registry()
    registry.add_function("mine", mine)
    expected = gradients_of_a_step(case)
    with substituted(BackendSubstitute(registry["mine"], True), *case, "forward+backward") as (work, substitution):
        seen.clear()
        substitution.require_complete(work.stage())

    assert len(seen) == 2
    assert isinstance(seen[0], Workload)
    assert_close(gradients(case.model), expected)


class LooksUp:
    """As adapters of libraries: its function is looked up once, while it is prepared."""

    def __init__(self):
        self.prepared = 0

    def prepare(self, inputs, backward=False):
        self.prepared += 1
        function = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: function(q, k, v, is_causal=True, enable_gqa=True)


def test_a_backend_is_prepared_once_for_each_call_and_not_as_it_is_timed(case):
    backend = LooksUp()
    with substituted(BackendSubstitute(backend, True), *case, "forward+backward") as (work, substitution):
        for _ in range(3):
            substitution.require_complete(work.stage())

    assert backend.prepared == 2


def test_a_call_that_goes_through_no_name_is_no_timed_run(case):
    hidden = [torch.nn.functional.scaled_dot_product_attention]

    def attend(q, k, v):
        return hidden[0](q, k, v, is_causal=True)

    words = "2 of 2 attention calls are made through no name that can be replaced"
    assert words in attention_share(*case_of(stack(attend)), "forward")


def test_a_model_without_attention_has_no_share():
    model = nn.Linear(4, 4)
    case = Case(model, lambda: model(torch.ones(1, 4)).sum())

    assert attention_share(case.model, case.step, "forward+backward") == "no attention call was caught"
