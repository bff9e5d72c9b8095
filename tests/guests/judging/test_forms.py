"""Workloads and kernels in the forms of flashinfer-trace, KernelBench and KernelBot."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pytest_attn import Pages, Workload
from pytest_attn.guests.judging.answers import workloads_of

EXAMPLES = Path(__file__).parents[3] / "docs/examples"
SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16, "head_dim_ckv": 32, "head_dim_kpe": 16}
LENGTHS = {"qo_indptr": [0, 3, 4], "kv_indptr": [0, 2, 5], "kv_last_page_len": [7, 16, 0]}
Q, POOL = "total_q num_qo_heads head_dim", "num_pages page_size num_kv_heads head_dim"
PAGED = {"kv_indices": "num_kv_indices", "kv_indptr": "len_indptr", "kv_last_page_len": "len_indptr"}
PREFILL = {"q": Q, "k_cache": POOL, "v_cache": POOL, "qo_indptr": "len_indptr", **PAGED}
MLA = {f"q_{one}": f"batch_size num_qo_heads head_dim_{dim}" for one, dim in (("nope", "ckv"), ("pe", "kpe"))}
MLA |= {f"{one}_cache": f"num_pages page_size head_dim_{one}" for one in ("ckv", "kpe")} | PAGED
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 32, "scale": 0.125}
KINDS = {
    "gqa_paged prefill": PREFILL,
    "gqa_paged decode": {name: shape for name, shape in PREFILL.items() if name != "qo_indptr"},
    "gqa_ragged": {"q": Q, **dict.fromkeys("kv", "total_kv num_kv_heads head_dim"), "qo_indptr": "len_indptr", **PAGED},
    "mla_paged": MLA,
}
del KINDS["gqa_ragged"]["kv_indices"], KINDS["gqa_ragged"]["kv_last_page_len"]
MADE = {
    "gqa_paged prefill": Workload(q_lens=(3, 1), kv_lens=(23, 48), kv_pages=Pages(16), mask="causal-bottom-right", **HEADS),
    "gqa_paged decode": Workload(1, kv_lens=(23, 48), kv_pages=Pages(16), **HEADS),
    "gqa_ragged": Workload(q_lens=(3, 1), kv_lens=(2, 3), mask="causal-bottom-right", **HEADS),
    "mla_paged": Workload(
        1, kv_lens=(23, 48), kv_pages=Pages(16), v_in_k=True, **{**HEADS, "kv_heads": 1, "head_dim": 48, "v_head_dim": 32}
    ),
}


@pytest.fixture
def read(tmp_path):
    """Return a function that writes a definition of a kind and a line, both changed by a function, and reads workloads."""

    def run(kind, change=lambda definition, line: None):
        op_type, shapes = kind.split()[0], KINDS[kind]
        inputs = {name: {"shape": shape.split(), "dtype": "bfloat16"} for name, shape in shapes.items()}
        inputs |= {name: {"shape": None, "dtype": "float32", "optional": True} for name in ("sm_scale", "return_lse")}
        names = {axis for shape in shapes.values() for axis in shape.split()}
        axes = {axis: {"type": "const", "value": SIZES[axis]} if axis in SIZES else {"type": "var"} for axis in names}
        definition = {"name": f"{op_type}_causal", "op_type": op_type, "axes": axes, "inputs": inputs, "reference": "..."}
        file = {"type": "safetensors", "path": "./lengths.safetensors"}
        handed = {name: {**file, "tensor_key": name} if name in LENGTHS else {"type": "random"} for name in shapes}
        handed["sm_scale"] = {"type": "scalar", "value": 0.125}
        line = {"definition": "one", "workload": {"uuid": "a1b2c3d4-e5", "axes": {"len_indptr": 3}, "inputs": handed}}
        change(definition, line["workload"])
        lengths = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in LENGTHS.items()}
        save_file({**lengths, "halves": torch.ones(3) / 2}, tmp_path / "lengths.safetensors")
        for folder, name, content in (("definitions", "one.json", definition), ("workloads", "one.jsonl", line)):
            (tmp_path / folder / op_type).mkdir(parents=True)
            (tmp_path / folder / op_type / name).write_text(json.dumps(content))
        return workloads_of(f"{tmp_path}/workloads/{op_type}/one.jsonl")

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_flashinfer_trace_is_a_workload(read, kind):
    (found,) = read(kind)
    assert found.replace(name=None) == MADE[kind]
    assert found.name == f"{kind.split()[0]}_causal-a1b2c3d4"


def test_a_file_is_where_it_is_named_and_not_where_a_link_leads(read, tmp_path):
    found, path = read("mla_paged"), tmp_path / "workloads/mla_paged/one.jsonl"
    path.symlink_to(path.rename(tmp_path / "blob"))  # as huggingface_hub keeps what it downloads
    assert workloads_of(str(path)) == found


def test_a_file_of_lengths_that_was_cut_is_refused(read, tmp_path):
    read("mla_paged")
    file = tmp_path / "lengths.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"^one.jsonl, line 1: kv_indptr: ./lengths.safetensors cannot be read: "):
        workloads_of(f"{tmp_path}/workloads/mla_paged/one.jsonl")


UNKNOWN = {
    'op_type: found "moe", expected "gqa_paged" or': lambda d, w: d.update(op_type="moe"),
    "window: found a field that is unknown": lambda d, w: d.update(window=4),
    "inputs.sinks: found an input that is unknown": lambda d, w: d["inputs"].update(sinks=d["inputs"]["q"]),
    "inputs.q.shape: found head_dim num_qo_heads total_q": lambda d, w: d["inputs"]["q"]["shape"].reverse(),
    "inputs: found dtypes bfloat16, float16": lambda d, w: d["inputs"]["q"].update(dtype="float16"),
    "says whether it is causal": lambda d, w: d.update(name="non-causal"),
    "found no 'num_kv_heads'": lambda d, w: d["axes"].pop("num_kv_heads"),
    "workload.seed: found a field that is unknown": lambda d, w: w.update(seed=1),
    "inputs.return_lse: found an input that is unknown": lambda d, w: w["inputs"].update(return_lse={"type": "random"}),
    "kv_indptr: found random, expected a safetensors": lambda d, w: w["inputs"].update(kv_indptr={"type": "random"}),
    "sm_scale: found None, expected the number": lambda d, w: w["inputs"].pop("sm_scale"),
    "axes.len_indptr: found 4, expected 3": lambda d, w: w["axes"].update(len_indptr=4),
    "found no 'x'": lambda d, w: w["inputs"]["kv_indptr"].update(tensor_key="x"),
    r"kv_indptr: found float32 \[3\], expected integers": lambda d, w: w["inputs"]["kv_indptr"].update(tensor_key="halves"),
}


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_is_not_known_is_refused_by_its_name(read, said):
    with pytest.raises(ValueError, match=f"^one.json.*{said}"):
        read("gqa_paged prefill", UNKNOWN[said])


PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, Q, K, V): return torch.nn.functional.scaled_dot_product_attention(Q, K, V{more})
def get_inputs(): return [torch.rand(2, 3, 33, 16) for _ in range(3)]
def get_init_inputs(): return []
"""


def test_a_model_and_its_new_one_are_judged():
    example, names = runpy.run_path(str(EXAMPLES / "kernelbench_form.py")), {}
    exec(PROBLEM.format(more=""), names)
    for more, right in (("", True), (", scale=0.3", False)):
        solution = PROBLEM.format(more=more).replace("Model(", "ModelNew(")
        assert example["judge"](names, solution, device="cpu").right is right
    exec(PROBLEM.format(more=", is_causal=True"), names)
    with pytest.raises(ValueError, match="Model is not attention of b2-h3-s33"):
        example["judge"](names, "", device="cpu")


SUBMISSION = """
from task import input_t, output_t
def custom_kernel(data: input_t) -> output_t:
    q, caches, qo_indptr, kv_indptr, config = data
    k = caches["bf16"].view(config["batch_size"], config["kv_seq_len"], -1)
    p = (q.float() @ k.float().mT * {scale}).softmax(-1)
    return (p @ k[..., : config["v_head_dim"]].float()).to(q.dtype)
"""


def test_a_custom_kernel_is_judged():
    example = runpy.run_path(str(EXAMPLES / "kernelbot_form.py"))
    w = example["workload_of"]({"batchsize": 2, "qseqlen": 1, "kvseqlen": 40, "seed": 1}, heads=4, dim=48, v_dim=32)
    for scale, right in (('config["sm_scale"]', True), ("0.125", False)):
        assert example["judge"](SUBMISSION.format(scale=scale), w, device="cpu").right is right
    other = SUBMISSION.format(scale=1).replace('"bf16"', '"fp8"')
    found = example["judge"](other, w, device="cpu")
    assert "the cache fp8 is not given" in str(found)
    assert found.exit_code == 2
    with pytest.raises(ValueError, match="qseqlen: found 2, expected 1"):
        example["workload_of"]({"batchsize": 2, "qseqlen": 2, "kvseqlen": 40})
