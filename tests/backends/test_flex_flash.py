import dataclasses

import pytest
import torch
from fakes import LIBRARIES, put, uninstall
from fakes.judged import H200

from pytest_attn import Neighborhood, Window, Workload, draw_inputs
from pytest_attn.backends import flex
from pytest_attn.backends.flex import block_mask_of
from pytest_attn.backends.registry import Registry

W = Workload(48, 80, heads=4, kv_heads=2, head_dim=64)
PACKED = Workload(q_lens=(30, 7, 20), kv_lens=(30, 12, 40), heads=2, head_dim=64)


@pytest.fixture
def backend(monkeypatch, tmp_path):
    put(monkeypatch, tmp_path, "flash4")
    yield Registry()["flex_flash"]
    uninstall(LIBRARIES["flash4"][0])


@pytest.mark.parametrize(
    ("workload", "backward"),
    [
        (W, True),
        (W.replace(mask=Window(3, 0), softcap=2.0, bias="hqk", alibi=True), True),
        (PACKED, True),
        (W.replace(head_dim=256), True),
        (W.replace(kv_heads=4, head_dim=32, v_head_dim=48), False),
    ],
    ids=str,
)
def test_it_takes_what_flash_attn_4_has_a_kernel_for(monkeypatch, backend, workload, backward):
    monkeypatch.setattr(torch, "__version__", H200.torch_version)
    assert backend.broken_because() is None
    assert backend.unsupported_because(workload, H200, backward) == []


@pytest.mark.parametrize(
    ("version", "name", "options"),
    [
        ("2.10.0", "FLASH", {"BACKEND": "FLASH"}),
        ("2.9.1", "TRITON", {"FORCE_USE_FLEX_ATTENTION": True}),
        ("2.9.1", "TRITON_DECODE", {}),
    ],
)
def test_it_asks_for_the_kernel_by_name(monkeypatch, version, name, options):
    monkeypatch.setattr(torch, "__version__", version)
    on_gpu = dataclasses.replace(draw_inputs(W, "flat"), device=torch.device("cuda:0"))
    assert flex._kernel_named(name, on_gpu) == options


@pytest.mark.parametrize("rows", [128, 256])
def test_its_blocks_have_the_rows_of_a_tile(rows):
    block_mask = block_mask_of(draw_inputs(W.replace(q_len=300, mask="causal"), "flat"), rows, None)
    assert (rows, 128) == block_mask.BLOCK_SIZE


@pytest.mark.parametrize("name", ["flex", "flex_decode"])
def test_what_flex_declares_is_what_it_claims(name):
    backend = Registry()[name]
    for workload in (
        Workload(16, 64, dtype="fp32", mask=lambda b, h, q, kv: q >= kv, head_dim=20, v_head_dim=36),
        Workload(16, 64, heads=4, kv_heads=2, softcap=2.0, bias="k", alibi=True, sinks=True, kv_lens=(60,)),
    ):
        assert backend.capabilities.refusals(workload) == backend.unsupported_because(workload, H200) == []


def test_an_operation_that_the_kernel_cannot_hold_is_a_refusal():
    backend = Registry()["flex_flash"]
    error = RuntimeError("CuteDSL template failed: ===\nUNSUPPORTED CUTEDSL OPERATION: 'minimum'\n===")
    assert backend.refusal_in(error) == "inductor puts no 'minimum' of a mask_mod or score_mod into this kernel"
    unusable = "BACKEND='FLASH' but flash attention cannot be used: Input buffers require gradients (not supported by flash)"
    assert backend.refusal_in(RuntimeError(unusable)) == "its compiler says that input buffers require gradients"
    assert backend.refusal_in(RuntimeError("out of memory")) is None


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (W.replace(sinks=True), "UNSUPPORTED CUTEDSL OPERATION: 'minimum'"),
        (W.replace(kv_len=48, mask=Neighborhood((6, 8), (3, 3))), "UNSUPPORTED CUTEDSL OPERATION: 'minimum'"),
        (PACKED.replace(mask="causal"), "Type mismatch, store Int64 into a tensor of element type Int32"),
    ],
    ids=["sinks", "neighborhood", "packed and masked"],
)
def test_what_torch_2_11_does_not_compile_is_declared_in_the_compilers_words(monkeypatch, backend, workload, said):
    """As seen on an H100 with flash-attn 4.0.0b36."""
    monkeypatch.setattr(torch, "__version__", H200.torch_version)
    refusals = [backend.refusal_in(RuntimeError(said))]
    assert refusals == backend.declared_refusals(workload) == backend.unsupported_because(workload, H200)
    assert not backend.claims(workload)
    other = workload.replace(dtype="float32")
    assert backend.declared_refusals(other) == ["takes bfloat16 and float16 only, not float32"]
    monkeypatch.setattr(torch, "__version__", "2.12.0+cu130")
    assert backend.declared_refusals(workload) == []
