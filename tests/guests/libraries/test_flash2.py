import pytest
from fakes import install, planted, uninstall
from fakes.judged import H200, judged

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.contract import ContractError

CACHED = Workload(9, cached=31, batch=2, heads=4, kv_heads=2, head_dim=32, mask="causal-bottom-right")


def test_the_library_appends_new_keys_to_a_cached_prefix(installed):
    backend = installed("flash2_kvcache")
    assert judged(backend, CACHED).passed


def test_new_values_that_the_library_appends_in_another_order_are_found(installed):
    written = "v_cache[b, length : length + v.shape[1]] = v[b]"
    backend = installed("flash2_kvcache", **planted("flash2.py", written, f"{written}.flip(0)"))
    with pytest.raises(
        ContractError, match="of v_cache, where the new key 31 of batch entry 0 belongs, holds that of the new"
    ):
        judged(backend, CACHED)


def test_flash_attn_4_alone_is_not_flash_attn_2(monkeypatch, tmp_path):
    files = {"flash_attn/cute/__init__.py": "raise RuntimeError('not to be imported')"}
    install(monkeypatch, tmp_path, files, "flash-attn-4", "4.0.0b36")
    assert Registry()["flash2"].unavailable_because(H200) == (
        "flash-attn is not installed; pip install flash-attn --no-build-isolation"
    )
    uninstall(files)
