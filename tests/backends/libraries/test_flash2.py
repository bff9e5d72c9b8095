import pytest
from fakes import LIBRARIES, faulty, install, uninstall
from fakes import put as put_library
from fakes.judged import H200, assert_passes, judged

from pytest_attn import Document, Pages, Window, Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.contract import ContractError

FILES = LIBRARIES["flash2"][0]
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
DECODE = W.replace(q_len=3, mask="causal-bottom-right")
PACKED_PAGES = Workload(
    q_lens=(5, 0, 9), kv_lens=(300, 20, 9), kv_pages=Pages(256), heads=2, head_dim=32, mask="causal-bottom-right"
)
CACHED = Workload(9, cached=31, batch=2, heads=4, kv_heads=2, head_dim=32, mask="causal-bottom-right")


@pytest.fixture
def flash2(monkeypatch, tmp_path):
    def put(**changed):
        put_library(monkeypatch, tmp_path, "flash2", **changed)
        return Registry()["flash2"]

    yield put
    uninstall(FILES)


@pytest.mark.parametrize(
    ("workload", "backward"),
    [
        (W, True),
        (W.replace(mask="causal-bottom-right", scale=0.3), True),
        (W.replace(kv_len=48, mask="causal", alibi=True), True),
        (W.replace(mask=Window(9, 3), softcap=2.0), True),
        (W.replace(kv_lens=(80, 33)), True),
        (W.replace(kv_lens=(80, 51), mask="causal-bottom-right"), True),
        (W.replace(kv_len=48, mask=Document((30, 11, 7))), True),
        (Workload(q_lens=(30, 7, 50), heads=2, head_dim=32, mask="causal"), True),
        (W.replace(q_len=1, kv_len=600, kv_pages=Pages(256), kv_lens=(600, 77)), False),
        (PACKED_PAGES, False),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_says_the_workload_in_the_words_of_the_library(flash2, workload, backward):
    backend = flash2()
    assert backend.capabilities.refusals(workload, backward) == []
    assert_passes(backend, workload, backward)


def test_decoding_appends_to_the_librarys_cache(flash2):
    flash2()
    assert judged(Registry()["flash2_kvcache"], DECODE).passed


def test_the_library_appends_new_keys_to_a_cached_prefix(flash2):
    flash2()
    assert judged(Registry()["flash2_kvcache"], CACHED).passed


def test_new_values_that_the_library_appends_in_another_order_are_found(flash2):
    written = "v_cache[b, length : length + v.shape[1]] = v[b]"
    flash2(**{"flash_attn/flash_attn_interface.py": faulty("flash2.py", written, f"{written}.flip(0)")})
    with pytest.raises(
        ContractError, match="of v_cache, where the new key 31 of batch entry 0 belongs, holds that of the new"
    ):
        judged(Registry()["flash2_kvcache"], CACHED)


def test_another_alignment_in_the_library_is_found(flash2):
    wrong = faulty("flash2.py", '"bottom-right" if causal', '"top-left" if causal')
    backend = flash2(**{"flash_attn/flash_attn_interface.py": wrong})
    assert not judged(backend, W.replace(mask="causal-bottom-right")).passed


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (W.replace(mask="causal"), "has no causal mask aligned to the first key"),
        (W.replace(dtype="fp32"), "takes bfloat16 and float16 only, not float32"),
        (W.replace(head_dim=264), "takes a head_dim of at most 256, not head_dim 264"),
        (W.replace(head_dim=20), "needs a head_dim that is a multiple of 8, not head_dim 20"),
        (W.replace(v_head_dim=64), "needs v_head_dim equal to head_dim"),
        (W.replace(bias="hqk"), "has no additive bias"),
        (W.replace(sinks=True), "has no sinks"),
        (W.replace(kv_pages=Pages(16)), "takes pages of a multiple of 256 tokens, not 16"),
        (PACKED_PAGES.replace(kv_pages=Pages(256, "HND")), "takes contiguous pools (pages, size, kv_heads, head_dim) only"),
        (W.replace(kv_lens=(80, 33), pad="left"), "does not support keys padded on the left"),
        (CACHED, "does not support a cached prefix beside new keys"),
    ],
)
def test_it_refuses_what_the_library_has_no_words_for(flash2, workload, reason):
    backend = flash2()
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == [reason]


def test_flash_attn_4_alone_is_not_flash_attn_2(monkeypatch, tmp_path):
    files = {"flash_attn/cute/__init__.py": "raise RuntimeError('not to be imported')"}
    install(monkeypatch, tmp_path, files, "flash-attn-4", "4.0.0b36")
    assert Registry()["flash2"].unavailable_because(H200) == (
        "flash-attn is not installed; pip install flash-attn --no-build-isolation"
    )
    uninstall(files)
