from importlib import import_module

import pytest
from fakes import planted
from fakes.judged import H200, judged

from pytest_attn import Window, Workload
from pytest_attn.backends.registry import Registry

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
SQUARE = W.replace(kv_len=48, mask="causal")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("workload", [SQUARE, W.replace(mask="causal")], ids=lambda w: w.id)
def test_flex_ignores_is_causal_and_that_is_known(installed, workload):
    backend = installed("diffusers:flex")
    comparison = judged(backend, workload)
    assert not comparison.passed
    (defect,) = backend.known_defects
    assert defect.applies(workload, H200)
    assert defect.explains(comparison, workload)
    others = (W, W.replace(mask="causal-bottom-right"), W.replace(mask=Window(9, 3)))
    assert not any(defect.applies(other, H200) for other in others)


@pytest.mark.slow("makes many calls")
def test_flex_that_heeds_is_causal_passes(installed):
    heeding = planted("diffusers.py", "if attn_mask is None:", "if attn_mask is None and not is_causal:")
    assert judged(installed("diffusers:flex", **heeding), SQUARE).passed


@pytest.mark.parametrize(("name", "compiles"), [("native", True), ("_native_flash", True), ("flex", True), ("flash", False)])
def test_names_that_run_torchs_own_kernels_have_compiled_variants(name, compiles):
    assert Registry()[f"diffusers:{name}"].variants == (("compile", "max_autotune") if compiles else ())


@pytest.mark.slow("compiles")
def test_the_active_backend_of_diffusers_comes_back(installed):
    backend = installed("diffusers:flex")
    assert backend.broken_because() is None
    judged(backend, W)
    dispatch = import_module("diffusers.models.attention_dispatch")
    assert dispatch._AttentionBackendRegistry._active_backend == "native"
