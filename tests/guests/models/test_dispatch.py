"""What computed each call: the kernel that is told, layers that none was told of, precision, and known defects."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import Attention, Block, Model, case_of, causal, full, stack
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_attn import KnownDefect, Machine, Workload, check_model
from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.guests.models.call_judge import known_defect_of
from pytest_attn.guests.models.check_model import judge_model

H200 = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")


@pytest.mark.parametrize(("kernel", "told"), [(SDPBackend.MATH, "SDPA math"), (SDPBackend.FLASH_ATTENTION, "SDPA flash")])
def test_the_kernel_that_torch_chose_is_told_for_each_layer(kernel, told):
    model, step = case_of(stack(causal), torch.bfloat16)
    with sdpa_kernel([kernel]):
        found = check_model(model, step, scatter=0)

    assert [call.kernel for call in found.calls] == [told, told]


def test_layers_with_different_kernels_are_told_apart():
    torch.manual_seed(0)

    def with_math(q, k, v):
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v)

    model, step = case_of(Model(Block(Attention(full)), Block(Attention(with_math))), torch.bfloat16)

    assert [call.kernel for call in check_model(model, step, scatter=0).calls] == ["SDPA flash", "SDPA math"]


@pytest.mark.parametrize(("backend", "told"), [("math", "SDPA math"), ("sdpa_flash", "SDPA flash"), ("eager", "")])
def test_the_kernel_of_a_replacement_is_told(backend, told):
    model, step = case_of(stack(causal), torch.bfloat16)

    assert {call.kernel for call in check_model(model, step, backend, scatter=0).calls} == {told}


def test_a_layer_that_makes_no_call_is_named_though_nothing_was_to_be_replaced():
    torch.manual_seed(0)
    model, step = case_of(Model(Block(Attention(full)), Block(Attention(lambda q, k, v: v)), Block(Attention(full))))

    (note,) = check_model(model, step).notes

    assert note == "not judged: blocks.1.attn made no attention call, while others of its kind made one"


# -- where it rounds -----------------------------------------------------------------------------------------------------


def eager(q, k, v, workload=None, scale=None):
    del workload, scale
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_a_function_that_declares_where_it_rounds_is_held_to_that():
    model, step = case_of(stack(full), torch.bfloat16)

    assert "fits the precision profile 'eager'" in judge_model(model, step, eager, scatter=0).message
    assert check_model(model, step, eager, precision="eager").passed


def test_the_models_own_function_is_held_to_what_is_declared():
    model, step = case_of(stack(lambda q, k, v: eager(q, k, v)), torch.bfloat16)

    assert not judge_model(model, step, functions=[eager], scatter=0).passed
    assert check_model(model, step, functions=[eager], precision="eager").passed


def test_a_backend_says_itself_where_it_rounds():
    model, step = case_of(stack(full), torch.bfloat16)

    assert check_model(model, step, "eager", scatter=0, precision="flash").passed


def test_an_unknown_precision_is_refused_before_anything_runs():
    model, _ = case_of(stack(full))
    with pytest.raises(ValueError, match="unknown precision"):
        check_model(model, lambda: pytest.fail("the step ran"), precision="flush")


# -- known defects -------------------------------------------------------------------------------------------------------


def wrong(q, k, v, workload):
    return F.scaled_dot_product_attention(q, k, v, is_causal=workload.mask is not None) * 1.1


def with_defect(**known):
    """Return a backend with a wrong out, which it is known for where there is a mask."""
    backend = FunctionBackend("known", wrong)
    defect = {"issue": "lib#1", "summary": "out is a tenth too large", "tensors": ("out", "dq", "dk", "dv")}
    backend.known_defects = (KnownDefect(**{**defect, "applies": lambda w, m: w.mask is not None, **known}),)
    return backend


def test_a_known_defect_of_a_backend_explains_what_is_wrong():
    found = judge_model(*case_of(stack(causal)), with_defect())

    assert not found.passed
    assert found.known_defects == ("lib#1: out is a tenth too large",)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("attend", "known"), [(full, {}), (causal, {"tensors": ("dq",)}), (causal, {"only_nan": True})])
def test_what_a_known_defect_does_not_explain_stays_wrong(attend, known):
    found = judge_model(*case_of(stack(attend)), with_defect(**known))

    assert (found.passed, found.known_defects) == (False, ())


def test_a_model_with_a_layer_that_is_not_replaced_has_more_than_a_known_defect():
    torch.manual_seed(0)
    old = Attention(lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v)
    model, step = case_of(Model(Block(Attention(causal)), Block(old)))

    assert judge_model(model, step, with_defect()).known_defects == ()


def test_cudnn_s_stale_strides_excuse_garbage_of_its_own_kernel_only():
    def known(kernel, l2):
        call = SimpleNamespace(subject=None, kernel=kernel, workload=Workload(88, heads=2, head_dim=16), gradients={"dk": 1})
        wrong = SimpleNamespace(name="dk", passed=False, elements=9, wrong_positions=0, relative_l2=l2, worst=(0, 0, 0, 0))
        return known_defect_of(call, SimpleNamespace(passed=False, tensors=[wrong], changed=()), H200)

    assert "dout is read with the strides" in known("SDPA cudnn", 1.2)
    assert known("SDPA cudnn", 0.05) == known("SDPA flash", 1.2) == ""


def test_cudnn_s_half_filled_tile_excuses_nan_in_dq_alone():
    def known(name="dq", rows=64, wrong_positions=32, kernel="SDPA cudnn"):
        w = Workload(rows, heads=2, head_dim=16, mask="causal")
        call = SimpleNamespace(subject=None, kernel=kernel, workload=w, gradients={"dq": 1})
        wrong = SimpleNamespace(name=name, passed=False, elements=2048, wrong_positions=wrong_positions, relative_l2=0.0)
        return known_defect_of(call, SimpleNamespace(passed=False, tensors=[wrong], changed=()), H200)

    assert known().startswith("pytorch#196678: NaN in dq where q_len is 64")
    assert known("dk") == known("out") == known(rows=63) == known(wrong_positions=0) == known(kernel="SDPA flash") == ""
