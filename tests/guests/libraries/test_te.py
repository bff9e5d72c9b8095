import logging
import os
import sys

import pytest
from fakes import HERE, install, planted, uninstall
from fakes.judged import H200, HOST, judged

from pytest_attn import Document, Window, Workload
from pytest_attn.backends.library import Library
from pytest_attn.backends.registry import Registry
from pytest_attn.guests.libraries.transformer_engine import TRANSFORMER_ENGINE
from pytest_attn.workloads.inputs import draw_inputs

PACKAGE = "transformer_engine/pytorch/attention/dot_product_attention"
DPA, UTILS = f"{PACKAGE}/dot_product_attention.py", f"{PACKAGE}/utils.py"
MODULE = PACKAGE.replace("/", ".")
W = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=16)
ALL = ("te_fused", "te_flash", "te_unfused")


@pytest.mark.parametrize("version", ["2.8.3", "4.0.0b36"])
def test_what_a_flash_attn_was_built_without_is_a_refusal_but_flash_attn_4_is_compiled_as_asked(installed, version):
    told = "this flash-attn build has head_dim 64 and 128 only"
    check = f"    if q.shape[-1] not in (64, 128):\n        raise RuntimeError({told!r})\n"
    source = planted("te_dpa.py", "def _check_build(q):\n    pass\n", f"def _check_build(q):\n{check}")
    source |= planted("te_utils.py", 'version="2.8.3"', f'version="{version}"')
    backend = installed("te_flash", **source)
    assert backend.unsupported_because(W.replace(head_dim=40), HOST) == ([told] if version == "2.8.3" else [])
    assert backend.unsupported_because(W.replace(head_dim=64), HOST) == []
    no_backward = ["has no backward kernel on sm90 for v_head_dim 48, not a multiple of 32"]
    other_dims = W.replace(head_dim=64, v_head_dim=48, kv_heads=4)
    assert backend.unsupported_because(other_dims, HOST) == []
    assert backend.unsupported_because(other_dims, HOST, backward=True) == ([] if version == "2.8.3" else no_backward)


def test_a_release_without_an_option_refuses_what_needs_it(installed):
    source = (HERE / "te_dpa.py").read_text()
    made = "DotProductAttention.__init__"
    source += f"from fakes.signatures import without\n{made} = without({made}, 'softcap')\n"
    backend = installed("te_flash", **{DPA: source})
    assert backend.unsupported_because(W.replace(softcap=3.0), HOST) == ["this release has no softcap"]
    assert backend.unsupported_because(W, HOST) == []


def test_cudnn_is_given_the_memory_that_its_layout_names(installed, monkeypatch):
    backend = installed("te_fused")
    monkeypatch.setattr(type(backend), "as_taken", lambda self, *tensors: tensors)
    assert not judged(backend, W).passed


def test_each_kernel_runs_whatever_ran_before_and_leaves_no_trace(installed, monkeypatch, capfd):
    installed("te_fused")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    inputs, registry = draw_inputs(W.replace(kv_heads=4)), Registry()
    kernels = {name: registry[name].prepare(inputs) for name in ALL}
    module = sys.modules[f"{MODULE}.dot_product_attention"]
    before = dict(module._attention_backends), dict(os.environ), dict(module._alibi_cache)
    for name in (*ALL, *reversed(ALL)):
        kernels[name](inputs.q, inputs.k, inputs.v)
    assert [(name, False) for name in ("fused", "flash", "unfused", "unfused", "flash", "fused")] == module.RAN
    assert (module._attention_backends, dict(os.environ), module._alibi_cache) == before
    logger = logging.getLogger("DotProductAttention")
    assert (logger.level, logger.propagate) == (logging.WARNING, True)
    assert capfd.readouterr().err == ""
    registry["te_flash"].prepare(inputs, backward=True)(*(t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)))
    assert module.RAN[-1] == ("flash", True)


def test_torchs_own_cudnn_comes_before_a_systems(installed, monkeypatch, tmp_path):
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    backend = installed(
        "te_fused", **{UTILS: "import os\nSEEN = os.environ['CUDNN_HOME']\n" + (HERE / "te_utils.py").read_text()}
    )
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert backend.broken_because() is None
    assert str(tmp_path / "nvidia" / "cudnn") == sys.modules[f"{MODULE}.utils"].SEEN
    assert "CUDNN_HOME" not in os.environ
    monkeypatch.setenv("CUDNN_PATH", "/opt/cudnn")
    assert "CUDNN_HOME" not in backend.source.environment()


def test_the_shell_alone_is_not_the_library(monkeypatch, tmp_path):
    files = {"transformer_engine/common/__init__.py": ""}
    install(monkeypatch, tmp_path, files, "transformer-engine", "2.20.2")
    assert Registry()["te_fused"].unavailable_because(H200) == (
        "transformer-engine is installed, but has no module transformer_engine.pytorch.attention.dot_product_attention;"
        " pip install --no-build-isolation transformer-engine[pytorch]"
    )
    uninstall(files)


def test_causal_masks_through_flash_attn_4_are_a_known_defect(installed, monkeypatch):
    defect, of_dq = installed("te_flash").known_defects
    causal = W.replace(mask="causal-bottom-right")
    monkeypatch.setattr("pytest_attn.guests.libraries.transformer_engine.FLASH4", Library(("absent",), "absent", ""))
    assert not defect.applies(causal, HOST), "flash-attn 2 takes -1 for an open side"
    monkeypatch.setattr("pytest_attn.guests.libraries.transformer_engine.FLASH4", Library(("torch",), "torch", ""))
    assert defect.applies(causal, HOST)
    assert defect.applies(W.replace(kv_len=24, mask=Document((13, 11), causal=True)), HOST)
    for other in (W, W.replace(mask=Window(9, 0)), causal.replace(softcap=3.0), causal.replace(alibi=True)):
        assert not defect.applies(other, HOST), other.id
    assert of_dq.applies(W.replace(head_dim=8), HOST)
    assert not of_dq.applies(W.replace(head_dim=8, softcap=3.0), HOST), "flash-attn 4 is not taken there"


@pytest.mark.parametrize("variable", ["CUDNN_HOME", None])
def test_flash_attn_4_within_it_keeps_what_it_compiles(monkeypatch, variable):
    if variable:
        monkeypatch.setenv(variable, "/theirs")
    switch = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.delenv(switch, raising=False)
    assert TRANSFORMER_ENGINE.environment()[switch] == "1"
    monkeypatch.setenv(switch, "0")
    assert switch not in TRANSFORMER_ENGINE.environment()
