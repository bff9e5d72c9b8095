import pytest
from fakes import LIBRARIES, faulty, install, uninstall
from fakes import put as put_library
from fakes.judged import CPU, H200, judged

from pytest_attn import Document, Window, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.masks import interval

MODELING = "transformers/modeling_utils.py"
FILES = LIBRARIES["transformers"][0]
FLASH = LIBRARIES["flash2"][0]
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
SQUARE = W.replace(kv_len=48)
PACKED = Workload(q_lens=(30, 7, 50), heads=2, head_dim=32, mask="causal")


@pytest.fixture
def transformers(monkeypatch, tmp_path):
    def put(name, source="transformers.py", flash="flash2.py"):
        put_library(monkeypatch, tmp_path, "transformers", **{MODELING: source})
        put_library(monkeypatch, tmp_path, "flash2", **{"flash_attn/flash_attn_interface.py": flash})
        return Registry()[f"transformers:{name}"]

    yield put
    uninstall(FILES)
    uninstall(FLASH)


def passes(backend, workload, backward=False):
    comparison = judged(backend, workload, backward)
    return comparison.passed


DENSE = [
    W,
    W.replace(mask="causal", scale=0.3),
    W.replace(q_len=1, mask="causal"),
    W.replace(mask="causal-bottom-right"),
    W.replace(mask=Window(9, 3)),
    W.replace(kv_lens=(80, 33)),
    W.replace(kv_len=48, mask=Document((30, 18)), v_head_dim=64),
]


@pytest.mark.parametrize(
    "workload", [*DENSE, W.replace(bias="hk"), W.replace(q_len=90, mask=Window(2, 2))], ids=lambda w: w.id
)
def test_sdpa_takes_every_mask(transformers, workload):
    backend = transformers("sdpa")
    assert backend.obstacle(workload, machine_of(CPU), True) is None
    assert passes(backend, workload, backward=True)


@pytest.mark.parametrize("workload", [*DENSE, W.replace(bias="hq", alibi=True, dtype="fp32")], ids=lambda w: w.id)
def test_eager_takes_every_mask(transformers, workload):
    backend = transformers("eager")
    assert backend.obstacle(workload, machine_of(CPU), True) is None
    assert passes(backend, workload, backward=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "workload", [*DENSE[:6], W.replace(bias="hk", alibi=True, kv_lens=(80, 33)), W.replace(softcap=2.0)], ids=lambda w: w.id
)
def test_flex_takes_every_mask(transformers, workload):
    backend = transformers("flex_attention")
    assert backend.broken_because() is None
    assert backend.capabilities.refusals(workload) == []
    assert passes(backend, workload)


FLASH_CASES = [
    W.replace(mask="causal-bottom-right", scale=0.3),
    SQUARE.replace(mask="causal", v_head_dim=16),
    W.replace(mask=Window(9, 0), softcap=2.0),
    W.replace(mask=Window(9, 9)),
    W.replace(mask=Window(200, 0)),
    W.replace(mask=Window(None, 0)),
    W.replace(q_len=1, kv_lens=(80, 33), mask="causal-bottom-right"),
    W.replace(q_len=1, kv_lens=(80, 0)),
    SQUARE.replace(mask=Document((30, 11, 7))),
    SQUARE.replace(mask=Document((30, 11, 7), causal=True)),
    PACKED,
    PACKED.replace(mask=Window(5, 5)),
]


@pytest.mark.parametrize("workload", FLASH_CASES, ids=lambda w: w.id)
def test_flash_attention_is_told_as_the_models_tell_it(transformers, workload):
    backend = transformers("flash_attention_2")
    assert backend.broken_because() is None
    assert backend.capabilities.refusals(workload, True) == []
    assert passes(backend, workload, backward=True)


@pytest.mark.parametrize(
    ("name", "workload", "right", "wrong"),
    [
        ("sdpa", W.replace(mask="causal"), "scale=scaling", "scale=None"),
        ("sdpa", SQUARE.replace(mask="causal"), "is_causal=is_causal, **sdpa", "is_causal=False, **sdpa"),
        ("eager", SQUARE.replace(mask="causal"), "weights = weights + attention_mask", "pass"),
        ("flex_attention", W.replace(softcap=2.0), "softcap * torch.tanh(score / softcap)", "score"),
        ("flex_attention", W.replace(mask=Window(9, 3)), "block_mask=block_mask", "block_mask=None"),
        ("flash_attention_2", W.replace(mask=Window(9, 0)), "(sliding_window - 1, sliding", "(sliding_window, sliding"),
        ("flash_attention_2", PACKED, '{"causal": is_causal', '{"causal": False'),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value and " " not in value else "",
)
def test_a_fault_of_the_dispatcher_is_found(transformers, name, workload, right, wrong):
    workload = workload.replace(scale=0.3)
    assert not passes(transformers(name, faulty("transformers.py", right, wrong)), workload)


def test_another_alignment_in_the_library_is_found(transformers):
    wrong = faulty("flash2.py", '"bottom-right" if causal', '"top-left" if causal')
    backend = transformers("flash_attention_2", flash=wrong)
    assert not passes(backend, W.replace(mask="causal-bottom-right"))


@pytest.mark.parametrize(
    ("name", "workload", "reason"),
    [
        ("sdpa", W.replace(softcap=2.0), "has no softcap"),
        ("sdpa", W.replace(sinks=True), "has no sinks"),
        ("sdpa", PACKED, "does not support packed sequences"),
        ("sdpa", W.replace(alibi=True), "would round ALiBi's distances to bfloat16 in attn_mask"),
        ("eager", W.replace(q_len=90, mask="causal-bottom-right"), "averages all values in rows that see no key"),
        ("eager", W.replace(kv_lens=(80, 0)), "averages all values in rows that see no key"),
        ("flex_attention", PACKED, "does not support packed sequences"),
        ("flex_attention", W.replace(q_len=100), "finds no kernel for q_len * group = 200 rows"),
        ("flash_attention_2", W.replace(mask="causal"), "has no causal mask aligned to the first key"),
        ("flash_attention_2", W.replace(sinks=True), "has no sinks"),
        ("flash_attention_2", W.replace(mask=Window(9, 3)), "takes windows (left, 0) and (n, n) only"),
        ("flash_attention_2", W.replace(mask=Window(9, None)), "takes windows (left, 0) and (n, n) only"),
        (
            "flash_attention_2",
            W.replace(q_len=90, mask=Window(9, 9)),
            "leaves out a window as long as the keys: takes (n, n) for q_len <= kv_len only",
        ),
        ("flash_attention_2", W.replace(v_head_dim=64), "pads values up to head_dim: takes no larger v_head_dim"),
        (
            "flash_attention_2",
            W.replace(kv_lens=(80, 3)),
            "drops queries along with padded keys: takes padded keys for q_len == 1 only",
        ),
    ],
)
def test_it_refuses_what_the_function_has_no_words_for(transformers, name, workload, reason):
    backend = transformers(name)
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == [reason]


@pytest.mark.parametrize("q_len", [1, 4, 9])
@pytest.mark.parametrize(
    "mask", [None, "causal", "causal-bottom-right", *(Window(n, m) for n in (None, 0, 2) for m in (0, 2))]
)
@pytest.mark.parametrize("kv_lens", [None, (6, 6), (6, 1), (6, 0)])
def test_eager_refuses_exactly_the_workloads_with_a_row_that_sees_no_key(q_len, mask, kv_lens):
    workload = Workload(q_len, 6, batch=2, heads=1, head_dim=8, kv_lens=kv_lens, mask=mask, dtype="fp32")
    lengths = kv_lens or (6,)
    spans = [interval(workload.mask, row, q_len, length) for row in range(q_len) for length in lengths]
    reasons = Registry()["transformers:eager"].unsupported_because(workload, machine_of(CPU))
    assert reasons == ["averages all values in rows that see no key"] * any(start == end for start, end in spans)


def test_eager_refuses_a_sequence_without_keys_under_any_mask():
    workload = Workload(6, 6, heads=1, head_dim=8, kv_lens=(6, 0), mask=Document((4, 2)))
    reasons = Registry()["transformers:eager"].unsupported_because(workload, machine_of(CPU))
    assert reasons == ["averages all values in rows that see no key"]


def test_padded_keys_do_drop_queries(transformers):
    """The refusal's ground: with as many queries as keys, transformers takes both to be padded."""
    padded = SQUARE.replace(kv_lens=(48, 33))
    comparison = judged(transformers("flash_attention_2"), padded)
    assert not comparison.passed


def test_sinks_through_flex_are_a_known_defect(transformers):
    backend = transformers("flex_attention")
    (defect,) = backend.known_defects
    assert defect.applies(W.replace(sinks=True), H200)
    assert not defect.applies(W, H200)
    reasons = backend.unsupported_because(W.replace(sinks=True), machine_of(CPU))
    assert reasons == ["Attention sinks cannot be run on CPU with flex attention"]


def test_an_unknown_name_gets_the_list(transformers):
    assert transformers("sdap").broken_because() == (
        "transformers has no attention function 'sdap'; it has eager, flash_attention_2, flex_attention, sdpa, paged|sdpa"
    )


def test_a_function_with_a_cache_of_its_own_is_not_judged(transformers):
    reason = transformers("paged|sdpa").broken_because()
    assert reason.startswith("paged|sdpa takes masks or a cache of its own: not judged; judged are eager, sdpa,")


def test_a_library_that_transformers_does_not_see_is_refused(transformers):
    """It would look for one on the Hub instead."""
    blind = faulty("transformers.py", "lambda: True", "lambda: False")
    reason = transformers("flash_attention_2", blind).broken_because()
    assert reason == "transformers does not find the library of flash_attention_2"


def test_without_the_kernel_s_library_it_says_what_to_install(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, FILES, "transformers", "5.17.0")
    assert Registry()["transformers:flash_attention_2"].unavailable_because(H200) == (
        "flash-attn is not installed; pip install flash-attn --no-build-isolation"
    )
    uninstall(FILES)
