import logging
import os
import sys

import pytest
import torch
from fakes import HERE, LIBRARIES, faulty, install, uninstall
from fakes import put as put_library
from fakes.judged import HOST, assert_passes, judged
from fakes.masks import checkered

from pytest_attn import BooleanMask, Document, Machine, Neighborhood, Window, Workload
from pytest_attn.backends.library import Library
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.inputs import draw_inputs

PACKAGE = "transformer_engine/pytorch/attention/dot_product_attention"
DPA, UTILS = f"{PACKAGE}/dot_product_attention.py", f"{PACKAGE}/utils.py"
FILES = LIBRARIES["transformer_engine"][0]
MODULE = PACKAGE.replace("/", ".")
W = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=16)
SQUARE = W.replace(kv_len=24)
PACKED = Workload(q_lens=(30, 7, 20), heads=2, head_dim=16)
LONGER = {"kv_lens": (30, 40, 50), "kv_len": None}
ALL = ("te_fused", "te_flash", "te_unfused")


@pytest.fixture
def put(monkeypatch, tmp_path):
    def installed(name, **changed):
        put_library(monkeypatch, tmp_path, "transformer_engine", **changed)
        return Registry()[name]

    yield installed
    uninstall(FILES)


def without_visible_keys(batch, heads, q_len, kv_len, device):
    return torch.arange(q_len, device=device)[:, None].expand(q_len, kv_len)[None, None] > 0


def any_mod(b, h, q_idx, kv_idx):
    return kv_idx >= 0


CLAIMED = [
    (W, ALL, True),
    (W.replace(mask="causal", scale=0.3), ("te_fused", "te_unfused"), True),
    (SQUARE.replace(mask="causal"), ALL, True),
    (W.replace(mask="causal-bottom-right"), ALL, False),
    (W.replace(mask=Window(9, 0)), ALL, False),
    (W.replace(mask=Window(9, 3)), ALL, False),
    (W.replace(mask=Window(None, 0)), ("te_flash",), False),
    (W.replace(mask=Window()), ("te_fused",), False),
    (W.replace(v_head_dim=32), ALL, False),
    (W.replace(sinks=True, mask="causal-bottom-right"), ("te_fused", "te_unfused"), True),
    (W.replace(bias="hqk"), ("te_fused",), False),
    (W.replace(bias="hqk", dtype="fp32"), ("te_unfused",), False),
    (W.replace(bias="bk"), ("te_fused",), False),
    (W.replace(bias="bq", kv_lens=(40, 33), dtype="fp32"), ("te_unfused",), False),
    (W.replace(alibi=True, mask="causal-bottom-right"), ("te_flash",), True),
    (W.replace(alibi=True, kv_lens=(40, 33)), ("te_flash",), False),
    (W.replace(alibi=True, dtype="fp32"), ("te_unfused",), False),
    (W.replace(softcap=3.0), ("te_flash",), False),
    (W.replace(softcap=3.0, dtype="fp32"), ("te_unfused",), False),
    (W.replace(kv_lens=(40, 33)), ALL, True),
    (W.replace(kv_lens=(40, 33), mask="causal"), ("te_fused", "te_unfused"), False),
    (W.replace(kv_lens=(40, 31), mask="causal-bottom-right"), ALL, False),
    (W.replace(kv_lens=(40, 31), mask=Window(9, 2)), ALL, False),
    (SQUARE.replace(mask=Document((13, 11))), ALL, False),
    (SQUARE.replace(mask=Document((13, 11), causal=True)), ALL, True),
    (SQUARE.replace(mask=Document((13, 11)), kv_lens=(24, 17)), ("te_unfused",), False),
    (W.replace(mask=BooleanMask(checkered)), ("te_unfused",), True),
    (SQUARE.replace(mask=Neighborhood((24,), (5,))), ("te_unfused",), False),
    (PACKED.replace(mask="causal"), ALL, True),
    (PACKED.replace(**LONGER, mask="causal-bottom-right"), ALL, False),
    (PACKED.replace(kv_heads=1, sinks=True), ("te_fused", "te_unfused"), False),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "workload", "backward"),
    [(name, w, back) for w, names, back in CLAIMED for name in names],
    ids=lambda value: value.id if isinstance(value, Workload) else str(value),
)
def test_it_says_the_workload_in_the_words_of_the_library(put, name, workload, backward):
    backend = put(name)
    assert backend.unsupported_because(workload, HOST, backward) == []
    assert_passes(backend, workload, backward)
    ran = sys.modules[f"{MODULE}.dot_product_attention"].RAN
    assert ran[-1] == (name.removeprefix("te_"), backward)


FULLY_MASKED = "gives queries that see no key other results than zeros"


@pytest.mark.parametrize(
    ("name", "workload", "reasons"),
    [
        ("te_fused", W.replace(softcap=3.0), ["has no softcap"]),
        ("te_fused", W.replace(alibi=True), ["has no ALiBi"]),
        ("te_fused", W.replace(dtype="fp32"), ["takes bfloat16 and float16 only, not float32"]),
        ("te_fused", W.replace(bias="hqk", kv_lens=(40, 33)), ["Disabling FusedAttention for arbitrary mask"]),
        (
            "te_fused",
            W.replace(kv_len=20, mask=Window(9, 0)),
            ["Disabling FusedAttention as it does not support sliding window attention with s_q > s_kv for cross-attention"],
        ),
        ("te_flash", W.replace(mask="causal"), ["has no causal mask aligned to the first key"]),
        ("te_flash", W.replace(sinks=True), ["has no sinks"]),
        ("te_flash", W.replace(mask=Window(9, None)), ["takes no window that is open on one side"]),
        ("te_unfused", PACKED.replace(mask=any_mod), ["takes no mask of its own for packed sequences"]),
        ("te_unfused", W.replace(alibi=True), ["would round the scores with ALiBi to bfloat16"]),
        ("te_unfused", W.replace(bias="k"), ["would round the scores with a bias to bfloat16"]),
        ("te_unfused", W.replace(softcap=3.0), ["would round each step of softcap to bfloat16"]),
        (
            "te_unfused",
            W.replace(alibi=True, kv_lens=(40, 33), dtype="fp32"),
            ["takes no ALiBi for packed or padded sequences"],
        ),
        ("te_unfused", W.replace(alibi=True, mask="causal", dtype="fp32"), ["aligns ALiBi to the first key with such a mask"]),
        ("te_unfused", W.replace(kv_len=20, mask="causal-bottom-right"), [FULLY_MASKED]),
        ("te_unfused", W.replace(kv_lens=(40, 11), mask=Window(3, 3)), [FULLY_MASKED]),
        ("te_unfused", W.replace(mask=BooleanMask(without_visible_keys)), [FULLY_MASKED]),
    ],
)
def test_it_refuses_in_the_words_of_the_selection(put, name, workload, reasons):
    assert put(name).unsupported_because(workload, HOST) == reasons


def test_what_cudnn_says_against_it_is_the_refusal(put):
    told = "CUDNN_BACKEND_TENSOR_DESCRIPTOR cudnnFinalize failed\\n  CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"
    source = faulty("te_utils.py", 'FUSED_REASON = ""\n', f'FUSED_REASON = "{told}"\n')
    assert put("te_fused", **{UTILS: source}).unsupported_because(W, HOST) == [
        "Disabling FusedAttention: CUDNN_BACKEND_TENSOR_DESCRIPTOR cudnnFinalize failed CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"
    ]


def test_what_a_flash_attn_was_built_without_is_a_refusal(put):
    told = "this flash-attn build has head_dim 64 and 128 only"
    check = f"    if q.shape[-1] not in (64, 128):\n        raise RuntimeError({told!r})\n"
    source = faulty("te_dpa.py", "def _check_build(q):\n    pass\n", f"def _check_build(q):\n{check}")
    backend = put("te_flash", **{DPA: source})
    assert backend.unsupported_because(W.replace(head_dim=40), HOST) == [told]
    assert backend.unsupported_because(W.replace(head_dim=64), HOST) == []


def test_a_release_without_an_option_refuses_what_needs_it(put):
    source = (HERE / "te_dpa.py").read_text()
    source = source.replace("        softcap=0.0,\n", "").replace("softcap, softmax_type\n", "0.0, softmax_type\n")
    backend = put("te_flash", **{DPA: source})
    assert backend.unsupported_because(W.replace(softcap=3.0), HOST) == ["this release has no softcap"]
    assert backend.unsupported_because(W, HOST) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong", "workload"),
    [
        ("te_fused", '"top-left" if top_left', '"bottom-right" if top_left', W.replace(mask="causal")),
        ("te_flash", 'and "bottom-right"', 'and "top-left"', W.replace(mask="causal-bottom-right")),
        ("te_flash", "(window[0], ", "(window[0] - 1, ", W.replace(mask=Window(9, 3))),
        ("te_fused", '"scale": self.scale', '"scale": None', W.replace(scale=0.3)),
        ("te_unfused", "attention_mask.logical_not()", "attention_mask", W.replace(mask=BooleanMask(checkered))),
        ("te_fused", '"softmax_offset", None)', '"no_offset", None)', W.replace(sinks=True)),
        ("te_fused", "bias=core_attention_bias", "bias=-core_attention_bias", W.replace(bias="hqk")),
        ("te_flash", '"alibi": alibi_slopes', '"alibi": None', W.replace(alibi=True)),
        ("te_flash", "cu_seqlens_kv, **options", "cu_seqlens_q, **options", PACKED.replace(**LONGER)),
    ],
)
def test_another_meaning_in_the_library_is_found(put, name, right, wrong, workload):
    backend = put(name, **{DPA: faulty("te_dpa.py", right, wrong)})
    assert not judged(backend, workload).passed


def test_cudnn_is_given_the_memory_that_its_layout_names(put, monkeypatch):
    backend = put("te_fused")
    monkeypatch.setattr(type(backend), "as_taken", lambda self, *tensors: tensors)
    assert not judged(backend, W).passed


def test_each_kernel_runs_whatever_ran_before_and_leaves_no_trace(put, monkeypatch, capfd):
    put("te_fused")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    inputs, registry = draw_inputs(W.replace(kv_heads=4)), Registry()
    kernels = {name: registry[name].prepare(inputs) for name in ALL}
    module = sys.modules[f"{MODULE}.dot_product_attention"]
    before = dict(module._attention_backends), dict(os.environ), dict(module._alibi_cache)
    for name in (*ALL, *reversed(ALL)):
        kernels[name](inputs.q, inputs.k, inputs.v)
    assert [name for name, _ in module.RAN] == ["fused", "flash", "unfused", "unfused", "flash", "fused"]
    assert (module._attention_backends, dict(os.environ), module._alibi_cache) == before
    logger = logging.getLogger("DotProductAttention")
    assert (logger.level, logger.propagate) == (logging.WARNING, True)
    assert capfd.readouterr().err == ""


def test_torchs_own_cudnn_comes_before_a_systems(put, monkeypatch, tmp_path):
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    backend = put("te_fused", **{UTILS: "import os\nSEEN = os.environ['CUDNN_HOME']\n" + (HERE / "te_utils.py").read_text()})
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert backend.broken_because() is None
    assert str(tmp_path / "nvidia" / "cudnn") == sys.modules[f"{MODULE}.utils"].SEEN
    assert "CUDNN_HOME" not in os.environ
    monkeypatch.setenv("CUDNN_PATH", "/opt/cudnn")
    assert backend.source.environment() == {}


def test_the_shell_alone_is_not_the_library(monkeypatch, tmp_path):
    files = {"transformer_engine/common/__init__.py": ""}
    install(monkeypatch, tmp_path, files, "transformer-engine", "2.20.2")
    machine = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")
    assert Registry()["te_fused"].unavailable_because(machine) == (
        "transformer-engine is installed, but has no module transformer_engine.pytorch.attention.dot_product_attention;"
        " pip install --no-build-isolation transformer-engine[pytorch]"
    )
    uninstall(files)


def test_causal_masks_through_flash_attn_4_are_a_known_defect(put, monkeypatch):
    defect, of_dq = put("te_flash").known_defects
    causal = W.replace(mask="causal-bottom-right")
    monkeypatch.setattr("pytest_attn.backends.libraries.transformer_engine.FLASH4", Library(("absent",), "absent", ""))
    assert not defect.applies(causal, HOST), "flash-attn 2 takes -1 for an open side"
    monkeypatch.setattr("pytest_attn.backends.libraries.transformer_engine.FLASH4", Library(("torch",), "torch", ""))
    assert defect.applies(causal, HOST)
    assert defect.applies(SQUARE.replace(mask=Document((13, 11), causal=True)), HOST)
    for other in (W, W.replace(mask=Window(9, 0)), causal.replace(softcap=3.0), causal.replace(alibi=True)):
        assert not defect.applies(other, HOST), other.id
    assert of_dq.applies(W.replace(head_dim=8), HOST)
    assert not of_dq.applies(W.replace(head_dim=8, softcap=3.0), HOST), "flash-attn 4 is not taken there"
