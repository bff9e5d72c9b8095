import sys

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import HONEST, case_of, causal, flex_case, full, stack
from torch.nn.attention import flex_attention as flex_module

import pytest_attn
from pytest_attn import Document, Neighborhood, Window, Workload
from pytest_attn.__main__ import main
from pytest_attn.guests.models.capture import NotReadError, workload_as_code, workloads_as_code

sdpa = F.scaled_dot_product_attention
TABLE = {"sdpa": F.scaled_dot_product_attention}


class HoldsIt:
    attend = staticmethod(F.scaled_dot_product_attention)


def test_calls_come_with_module_function_workload_and_tensors():
    model, step = case_of(stack(causal))

    calls = pytest_attn.capture(lambda: step().backward(), model)

    assert [call.module for call in calls] == ["blocks.0.attn", "blocks.1.attn"]
    assert {call.function for call in calls} == {"F.scaled_dot_product_attention"}
    assert calls[0].workload == Workload(45, batch=2, heads=4, head_dim=16, dtype="float32", mask="causal")
    assert calls[0].q.shape == calls[0].k.shape == calls[0].v.shape == calls[0].dout.shape == (2, 4, 45, 16)
    assert calls[0].gradients.keys() == {"dq", "dk", "dv"}
    assert calls[0].mask.shape[-2:] == (45, 45)


def test_without_a_model_names_begin_at_the_module_that_runs():
    _, step = case_of(stack(full))

    assert [call.module for call in pytest_attn.capture(step)] == ["blocks.0.attn", "blocks.1.attn"]
    assert pytest_attn.capture(step)[0].dout is None


@pytest.mark.parametrize(
    "attend",
    [sdpa, lambda *qkv: TABLE["sdpa"](*qkv), lambda *qkv: HoldsIt.attend(*qkv), lambda *qkv, fn=sdpa: fn(*qkv)],
    ids=["imported", "in a table", "of a class", "a default"],
)
def test_sdpa_is_caught_however_it_is_held(attend):
    model, step = case_of(stack(attend))

    assert len(pytest_attn.capture(step, model)) == 2


def test_everything_is_restored_whatever_happens():
    model, _ = case_of(stack(full))
    functions = sdpa, flex_module.flex_attention, sys.modules[__name__].sdpa, HoldsIt.attend

    def raises():
        assert F.scaled_dot_product_attention is not functions[0]
        model(torch.randn(2, 45, 64))
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        pytest_attn.capture(raises, model)

    assert (F.scaled_dot_product_attention, flex_module.flex_attention, sdpa, HoldsIt.attend) == functions
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_call_that_no_workload_can_say_is_an_error():
    model, _ = case_of(stack(full), torch.float64)

    with pytest.raises(
        NotReadError, match=r"blocks.0.attn: F.scaled_dot_product_attention is not read: q, k and v are float64"
    ):
        pytest_attn.capture(lambda: model(torch.randn(2, 45, 64, dtype=torch.float64)), model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("window", {"mask": Window(7, 0)}),
        ("documents", {"mask": Document((16, 16, 13))}),
        ("padded", {"kv_lens": (45, 30)}),
        ("biased", {"bias": "qk"}),
        ("grouped", {"kv_heads": 2, "mask": pytest_attn.Causal()}),
        ("scaled", {"scale": 0.1, "v_head_dim": 8}),
        ("folded", {"batch": 1, "heads": 8}),
        ("shifted-windows", {"batch": 10, "q_len": 9}),
    ],
)
def test_a_call_becomes_the_workload_that_it_is(name, expected):
    model, step = HONEST[name](torch.float32)

    found = pytest_attn.capture(step, model)[0].workload

    assert {field: getattr(found, field) for field in expected} == expected


def test_a_module_that_makes_several_calls_numbers_them():
    model, step = case_of(stack(full, layers=1))

    calls = pytest_attn.capture(lambda: (step(), step()), model)

    assert [call.label for call in calls] == ["blocks.0.attn", "blocks.0.attn, call 2"]


WORKLOADS = [
    Workload(45, batch=2, heads=4, kv_heads=2, mask="causal", dtype="float32"),
    Workload(20, 45, mask="causal-bottom-right", scale=0.1, v_head_dim=8, head_dim=16),
    Workload(45, mask=Window(7, 0), softcap=5.0, sinks=True),
    Workload(45, mask=Document((16, 29), causal=True), bias="hqk"),
    Workload(45, mask=Neighborhood((45,), (7,)), alibi=True),
    Workload(45, kv_lens=(45, 30), heads=2),
    Workload(q_lens=(5, 9), kv_lens=(7, 9), mask="causal-bottom-right"),
    Workload(q_lens=(5, 9)),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
def test_the_code_of_a_workload_makes_it_again(workload):
    assert eval(workload_as_code(workload)[0], vars(pytest_attn), {}) == workload


def test_the_workloads_of_a_model_are_code_with_counts():
    model, step = HONEST["window"](torch.float32)
    code = workloads_as_code(pytest_attn.capture(step, model))
    names = {}
    exec(code, names)

    assert names["WORKLOADS"] == [Workload(45, batch=2, heads=4, head_dim=16, dtype="float32", mask=Window(7, 0))]
    assert "# 2 calls of blocks.0.attn, blocks.1.attn" in code


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_no_code_can_say_is_told():
    model, step = flex_case()

    assert "its score_mod is the model's own" in workloads_as_code(pytest_attn.capture(step, model))


def test_the_command_prints_the_code(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def step():\n    sdpa(*torch.randn(3, 1, 2, 33, 16), is_causal=True)\n"
    )

    assert main(["capture", f"{path}:step"]) == 0
    assert (
        'Workload(33, heads=2, head_dim=16, dtype="float32", mask="causal"),  # 1 call of no module' in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (None, "step", "there is no file"),
        ("", "step", "has no function 'step'"),
        ("def step(): pass", "step", "step made no attention call that is caught"),
    ],
)
def test_what_is_no_such_function_is_a_usage_error(tmp_path, capsys, source, name, said):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)

    with pytest.raises(SystemExit) as ended:
        main(["capture", f"{path}:{name}"])

    assert ended.value.code == 2
    assert said in capsys.readouterr().err
