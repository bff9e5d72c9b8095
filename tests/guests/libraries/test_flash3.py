import pytest
from fakes import planted
from fakes.judged import HOST, judged

from pytest_attn import Window, Workload
from pytest_attn.correctness.contract import ContractError

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.mark.parametrize(
    ("name", "module"), [("flash3", "flash_attn_3.flash_attn_interface"), ("flash3/old", "flash_attn_interface")]
)
def test_the_installed_generation_is_chosen(installed, name, module):
    assert installed(name).source.module == module


def test_an_output_without_its_batch_is_found(installed):
    backend = installed("flash3", **planted("flash3.py", "(out, lse) if return_attn_probs else out", "out[0]"))
    with pytest.raises((ContractError, IndexError)):
        judged(backend, W)


def test_another_error_is_no_refusal(installed):
    words = "This flash attention build does not support local"
    backend = installed("flash3", **planted("flash3.py", words, "CUDA error: no kernel for"))
    backend.source.load().LACKING = ("local attention",)
    with pytest.raises(RuntimeError, match="CUDA error"):
        backend.unsupported_because(W.replace(mask=Window(9, 3)), HOST)
