import pytest
import torch
from guests.models.zoo import HONEST, flex_case

import pytest_attn
from pytest_attn import Document, Neighborhood, Window, Workload
from pytest_attn.__main__ import main
from pytest_attn.guests.models.capture import workload_as_code, workloads_as_code

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
