"""The gradient of one input alone is what it is with those of the others."""

import math

import pytest
import torch
from judging import asked, assert_few_calls
from reported_faults.kernel import Attention, KernelBackend

from pytest_attn import Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
W = Workload(40, 48, heads=2, head_dim=16, dtype="float32")
CLOSED = W.replace(sinks=True, bias="hqk")


def formula(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class Loses(Attention):
    """Attention whose backward pass loses one gradient unless that of another is needed, too; "" loses none."""

    def __init__(self, name="", unless="q"):
        super().__init__()
        self.name, self.unless = name, unless

    def gradients(self, call, out, lse, dout, dlse, needed):
        sums = super().gradients(call, out, lse, dout, dlse, needed)
        if self.name and not needed[self.unless]:
            sums[self.name].zero_()
        return sums


def kernel_of(kernel, workload=W, **closed):
    inputs = draw_inputs(workload)
    return lambda q, k, v: kernel(inputs, q, k, v, **closed)[0]


def ask(kernel, workload=W, parameters=None, **options):
    return asked(kernel, CheckSpec(workload, CPU, True, parameters=parameters or {}), **options)


def closed_over():
    inputs = draw_inputs(CLOSED, "structured", 0)
    return {"sinks": inputs.sinks.requires_grad_(), "bias": inputs.bias.requires_grad_()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "unless"), [("q", "k"), ("k", "v"), ("v", "q"), ("k", "q")])
def test_a_gradient_that_is_lost_without_another(name, unless):
    faulty = kernel_of(Loses(name, unless))
    (finding,) = ask(faulty, only="alone").broken
    assert finding.evidence.startswith(f"where nothing but {name} needs a gradient: d{name}[0, 0, 0, 0] = 0, was ")
    assert ask(faulty, skip="alone").passed
    assert ask(kernel_of(Loses())).passed


@pytest.mark.parametrize(("name", "unless"), [("sinks", "q"), ("bias", "k"), ("q", "bias")])
def test_so_are_those_of_what_is_closed_over(name, unless):
    parameters = closed_over()
    (finding,) = ask(kernel_of(Loses(name, unless), CLOSED, **parameters), CLOSED, parameters, only="alone").broken
    assert f"where nothing but {name} needs a gradient: d{name}[" in finding.evidence
    report = ask(kernel_of(Loses(), CLOSED, **parameters), CLOSED, parameters)
    assert report.passed
    assert_few_calls(report)
    assert all(one.requires_grad for one in parameters.values())


def test_a_kernel_that_goes_another_way_without_q():
    def forgets(q, k, v):
        with torch.set_grad_enabled(q.requires_grad):
            return formula(q, k, v)

    (finding,) = ask(forgets, only="alone").broken
    assert finding.evidence == "out carries no gradient where nothing but v needs one"


def test_what_a_kernel_raises_then_is_told_with_the_reason():
    def hooks(q, k, v):
        q.register_hook(lambda grad: grad)
        return formula(q, k, v)

    (finding,) = ask(hooks, only="alone").broken
    assert finding.evidence.startswith(
        "where nothing but v needs a gradient: the kernel raised RuntimeError: cannot register a"
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_backend_is_asked_for_dk_or_dv_by_workload(name):
    backend, workloads = KernelBackend("mine", Loses(name, "k" if name == "q" else "q")), [W, W.replace(kv_len=40)]
    found = [finding for w in workloads for finding in ask(backend, w, only="alone").broken]
    assert len(found) == (2 if name == "q" else 1)
    assert all(f"nothing but {name} needs" in finding.evidence for finding in found)


def test_the_thorough_set_asks_a_backend_for_all_three():
    assert ask("math", only="alone").calls == 3
    assert ask("math", only="alone", thorough=True).calls == 4
