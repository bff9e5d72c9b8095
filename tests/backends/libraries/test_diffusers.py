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


def test_an_unknown_name_gets_the_list(installed):
    assert installed("diffusers:flsh", ["diffusers"]).broken_because() == (
        "diffusers has no attention backend 'flsh'; it has flash, flash_varlen, flex, native, _native_math, sage"
    )


def test_a_quantizing_kernel_is_left_to_its_own_backend(installed):
    reason = installed("diffusers:sage").broken_because()
    assert reason.startswith("sage quantizes or is for another device: not judged; judged are native, _native_math,")


def test_a_name_that_is_not_judged_is_not_entered(installed):
    """Entering it would download a kernel of the Hub, only to hear that it is not judged."""
    entering = planted("diffusers.py", "    old = _Attention", "    raise OSError\n    old = _Attention")
    assert installed("diffusers:native", **entering).broken_because() == "OSError: "
    assert "not judged" in Registry()["diffusers:sage"].broken_because()


@pytest.mark.parametrize(("name", "compiles"), [("native", True), ("_native_flash", True), ("flex", True), ("flash", False)])
def test_names_that_run_torchs_own_kernels_have_compiled_variants(name, compiles):
    assert Registry()[f"diffusers:{name}"].variants == (("compile", "max_autotune") if compiles else ())


def test_a_missing_package_is_refused_before_it_is_called(installed):
    backend = installed("diffusers:flash", ["diffusers"])
    missing = "flash-attn is not installed; pip install flash-attn --no-build-isolation"
    assert backend.unavailable_because(H200) == missing
    assert backend.broken_because() == (
        "RuntimeError: Flash Attention backend 'flash' is not usable because of missing package or the version is too old."
        " Please install `flash-attn>=2.6.3`."
    )


@pytest.mark.slow("compiles")
def test_the_active_backend_of_diffusers_comes_back(installed):
    backend = installed("diffusers:flex")
    assert backend.broken_because() is None
    judged(backend, W)
    dispatch = import_module("diffusers.models.attention_dispatch")
    assert dispatch._AttentionBackendRegistry._active_backend == "native"
