import pytest
from fakes import install, planted, uninstall
from fakes.judged import H200, judged

from pytest_attn import Pages, Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.contract import ContractError

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
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


def test_flash_attn_splits_the_keys_of_a_cache():
    registry, paged = Registry(), W.replace(q_len=1, kv_len=600, kv_pages=Pages(256), kv_lens=(600, 77))
    splits = [{"num_splits": number} for number in (1, 2, 4, 8, 16, 32)]
    assert list(registry["flash2_kvcache"].configurations(W, H200)) == splits
    assert list(registry["flash2"].configurations(paged, H200)) == splits
    assert list(registry["flash2"].configurations(W, H200)) == []
    assert registry["flash2@num_splits=2"].unsupported_because(W, H200) == [
        "splits the keys of a page table only, for queries of one length"
    ]
    assert list(registry["flash3"].configurations(W, H200)) == [*splits, {"pack_gqa": True}, {"pack_gqa": False}]
    assert list(registry["flash3"].configurations(W, H200, backward=True)) == []


def test_flash_attn_gets_the_number_of_splits(monkeypatch, installed):
    backend = installed("flash2_kvcache@num_splits=4")
    from flash_attn import flash_attn_interface

    real, seen = flash_attn_interface.flash_attn_with_kvcache, []
    monkeypatch.setattr(
        flash_attn_interface, "flash_attn_with_kvcache", lambda *a, **k: (seen.append(k["num_splits"]), real(*a, **k))[1]
    )
    decode = W.replace(q_len=3, mask="causal-bottom-right")
    assert judged(backend, decode).passed
    assert set(seen) == {4}
