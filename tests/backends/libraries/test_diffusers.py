import pytest
from fakes import LIBRARIES, faulty, uninstall
from fakes import put as put_library
from fakes.judged import CPU, H200, assert_passes, judged

from pytest_attn import Document, Window, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry

FILES = LIBRARIES["diffusers"][0]
FLASH = LIBRARIES["flash2"][0]
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def diffusers(monkeypatch, tmp_path):
    def put(name, with_flash=False, **changed):
        if with_flash:
            put_library(monkeypatch, tmp_path, "flash2", **{p: s for p, s in changed.items() if p in FLASH})
        put_library(monkeypatch, tmp_path, "diffusers", **{p: s for p, s in changed.items() if p in FILES})
        return Registry()[f"diffusers:{name}"]

    yield put
    uninstall(FILES)
    uninstall(FLASH)


SQUARE = W.replace(kv_len=48, mask="causal")
MASKED = [
    W.replace(mask="causal", scale=0.3),
    W.replace(mask="causal-bottom-right"),
    W.replace(mask=Window(9, 3)),
    W.replace(kv_lens=(80, 33), bias="hk"),
    W.replace(kv_len=48, mask=Document((30, 18)), v_head_dim=64),
]


@pytest.mark.parametrize("name", ["native", "_native_math"])
@pytest.mark.parametrize("workload", [W, SQUARE, *MASKED], ids=lambda w: w.id)
def test_torchs_kernels_take_every_mask(diffusers, name, workload):
    backend = diffusers(name)
    assert backend.obstacle(workload, machine_of(CPU), True) is None
    assert_passes(backend, workload, backward=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workload", [W, *MASKED[1:]], ids=lambda w: w.id)
def test_flex_takes_a_mask_tensor(diffusers, workload):
    backend = diffusers("flex")
    assert backend.obstacle(workload, machine_of(CPU), False) is None
    assert judged(backend, workload).passed


@pytest.mark.parametrize("workload", [SQUARE, W.replace(mask="causal")], ids=lambda w: w.id)
def test_flex_ignores_is_causal_and_that_is_known(diffusers, workload):
    backend = diffusers("flex")
    comparison = judged(backend, workload)
    assert not comparison.passed
    (defect,) = backend.known_defects
    assert defect.applies(workload, H200)
    assert defect.explains(comparison, workload)
    assert not any(defect.applies(other, H200) for other in (W, W.replace(mask="causal-bottom-right"), MASKED[2]))


def test_flex_that_heeds_is_causal_passes(diffusers):
    heeding = faulty("diffusers.py", "if attn_mask is None:", "if attn_mask is None and not is_causal:")
    backend = diffusers("flex", **{"diffusers/models/attention_dispatch.py": heeding})
    assert judged(backend, SQUARE).passed


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("flash", W.replace(mask="causal-bottom-right", scale=0.3)),
        ("flash", SQUARE),
        ("flash_varlen", W.replace(kv_lens=(80, 51), mask="causal-bottom-right")),
        ("flash_varlen", W.replace(kv_lens=(80, 0))),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else value,
)
def test_flash_is_told_in_its_own_alignment(diffusers, name, workload):
    backend = diffusers(name, with_flash=True)
    assert backend.broken_because() is None
    assert backend.capabilities.refusals(workload, True) == []
    assert_passes(backend, workload, backward=True)


@pytest.mark.parametrize("name", ["flash", "flash_varlen"])
def test_another_alignment_behind_the_dispatcher_is_found(diffusers, name):
    wrong = faulty("flash2.py", '"bottom-right" if causal', '"top-left" if causal')
    backend = diffusers(name, with_flash=True, **{"flash_attn/flash_attn_interface.py": wrong})
    assert not judged(backend, W.replace(mask="causal-bottom-right")).passed


@pytest.mark.parametrize("fault", ["scale=scale, enable_gqa", "scale=scale,\n        enable_gqa"])
def test_an_argument_that_is_not_handed_on_is_found(diffusers, fault):
    wrong = faulty("diffusers.py", fault, fault.replace("scale=scale", "scale=None"))
    backend = diffusers("flex" if "\n" not in fault else "native", **{"diffusers/models/attention_dispatch.py": wrong})
    assert not judged(backend, W.replace(scale=0.3)).passed


@pytest.mark.parametrize(
    ("name", "workload", "reason"),
    [
        ("native", W.replace(softcap=2.0), "has no softcap"),
        ("native", W.replace(alibi=True), "would round ALiBi's distances to bfloat16 in attn_mask"),
        ("native", Workload(q_lens=(3, 4)), "does not support packed sequences"),
        ("flash", W.replace(mask="causal"), "has no causal mask aligned to the first key"),
        ("flash", W.replace(mask=Window(3, 3)), "has no sliding window"),
        ("flash", W.replace(kv_lens=(80, 3)), "does not support padded keys"),
        ("flash_varlen", W.replace(bias="q"), "has no additive bias"),
    ],
)
def test_it_refuses_what_the_dispatcher_has_no_words_for(diffusers, name, workload, reason):
    backend = diffusers(name, with_flash=True)
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == [reason]


def test_flex_refuses_gradients_on_a_cpu(diffusers):
    reasons = diffusers("flex").unsupported_because(W, machine_of(CPU), backward=True)
    assert reasons == ["FlexAttention does not support backward on CPU"]


def test_an_unknown_name_gets_the_list(diffusers):
    assert diffusers("flsh").broken_because() == (
        "diffusers has no attention backend 'flsh'; it has flash, flash_varlen, flex, native, _native_math, sage"
    )


def test_a_quantizing_kernel_is_left_to_its_own_backend(diffusers):
    reason = diffusers("sage").broken_because()
    assert reason.startswith("sage quantizes or is for another device: not judged; judged are native, _native_math,")


def test_a_name_that_is_not_judged_is_not_entered(diffusers):
    """Entering it would download a kernel of the Hub, only to hear that it is not judged."""
    entering = faulty("diffusers.py", "    old = _Attention", "    raise OSError\n    old = _Attention")
    backend = diffusers("native", **{"diffusers/models/attention_dispatch.py": entering})
    assert backend.broken_because() == "OSError: "
    assert "not judged" in Registry()["diffusers:sage"].broken_because()


@pytest.mark.parametrize(("name", "compiles"), [("native", True), ("_native_flash", True), ("flex", True), ("flash", False)])
def test_names_that_run_torchs_own_kernels_have_compiled_variants(name, compiles):
    assert Registry()[f"diffusers:{name}"].variants == (("compile", "max_autotune") if compiles else ())


def test_a_missing_package_is_refused_before_it_is_called(diffusers):
    backend = diffusers("flash")
    missing = "flash-attn is not installed; pip install flash-attn --no-build-isolation"
    assert backend.unavailable_because(H200) == missing
    assert backend.broken_because() == (
        "RuntimeError: Flash Attention backend 'flash' is not usable because of missing package or the version is too old."
        " Please install `flash-attn>=2.6.3`."
    )


def test_the_active_backend_of_diffusers_comes_back(diffusers):
    from importlib import import_module

    backend = diffusers("flex")
    assert backend.broken_because() is None
    judged(backend, W)
    dispatch = import_module("diffusers.models.attention_dispatch")
    assert dispatch._AttentionBackendRegistry._active_backend == "native"
