import pytest
from fakes import faulty, install, uninstall
from fakes.judged import A100, B200, H200, assert_passes, judged

from pytest_attn import Document, Machine, Pages, Window, Workload
from pytest_attn.backends.registry import Registry

RTX = Machine("cuda:0", "NVIDIA RTX PRO 6000", (12, 0), "sm120", 96 << 30, 1, "2.11.0+cu130")
PATH = "flash_attn/cute/__init__.py"
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def flash4(monkeypatch, tmp_path):
    def put(source="flash4.py"):
        install(monkeypatch, tmp_path, {PATH: source}, "flash-attn-4", "4.0.0b36")
        return Registry()["flash4"]

    yield put
    uninstall([PATH])


@pytest.mark.parametrize(
    ("workload", "backward"),
    [
        (W, True),
        (W.replace(mask="causal-bottom-right", scale=0.3), True),
        (W.replace(mask=Window(9, 3), softcap=2.0), True),
        (W.replace(mask=Window(None, 5)), True),
        (W.replace(mask=Window(9, 0), sinks=True), True),
        (W.replace(kv_lens=(80, 51), mask="causal-bottom-right"), True),
        (W.replace(kv_len=48, mask=Document((30, 11, 7), causal=True)), True),
        (Workload(q_lens=(30, 7, 50), heads=2, head_dim=32, mask="causal"), True),
        (W.replace(q_len=3, kv_pages=Pages(16), kv_lens=(80, 33), mask="causal-bottom-right"), False),
        (W.replace(head_dim=192, v_head_dim=128, kv_heads=4), True),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_says_the_workload_in_the_words_of_the_library(flash4, workload, backward):
    backend = flash4()
    assert backend.unsupported_because(workload, H200, backward) == []
    assert_passes(backend, workload, backward)


@pytest.mark.parametrize(
    ("old", "new", "workload"),
    [
        ('"bottom-right" if causal', '"top-left" if causal', W.replace(mask="causal-bottom-right")),
        ("-1 if side is None else side", "-1", W.replace(mask=Window(9, 3))),
        ('"softcap": softcap', '"softcap": 0.0', W.replace(softcap=0.5)),
        ('"scale": softmax_scale', '"scale": None', W.replace(scale=0.5)),
        ('"sink": learnable_sink', '"sink": None', W.replace(sinks=True)),
    ],
)
def test_a_fault_of_the_library_is_found(flash4, old, new, workload):
    assert not judged(flash4(faulty("flash4.py", old, new)), workload).passed


@pytest.mark.parametrize(
    ("machine", "workload", "backward", "reason"),
    [
        (H200, W.replace(mask="causal"), False, "has no causal mask aligned to the first key"),
        (H200, W.replace(dtype="fp32"), False, "takes bfloat16 and float16 only, not float32"),
        (H200, W.replace(head_dim=20), False, "needs a head_dim that is a multiple of 8, not head_dim 20"),
        (H200, W.replace(head_dim=264), False, "takes a head_dim of at most 256, not head_dim 264"),
        (H200, W.replace(alibi=True), False, "has no ALiBi"),
        (
            H200,
            W.replace(head_dim=72, kv_pages=Pages(16)),
            False,
            "needs multiples of 16 with pages, not head_dim 72, v_head_dim 72",
        ),
        (
            H200,
            W.replace(head_dim=192, v_head_dim=128),
            True,
            "GQA backward needs equal dims, not head_dim 192, v_head_dim 128",
        ),
        (A100, W, True, "has no backward pass on sm80"),
        (A100, W.replace(sinks=True), False, "has no sinks on sm80"),
        (RTX, W.replace(kv_pages=Pages(16)), False, "does not support a paged KV cache on sm120"),
        (RTX, W.replace(softcap=2.0), True, "has no backward with softcap on sm120"),
        (
            B200,
            W.replace(head_dim=160),
            False,
            "takes up to 128, 192 with 128, or 256 on sm100, not head_dim 160, v_head_dim 160",
        ),
        (B200, W.replace(head_dim=256, softcap=2.0), True, "has no softcap backward for 256"),
        (B200, W.replace(head_dim=256, sinks=True), True, "has no backward with sinks for 256"),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_refuses_what_an_architecture_has_no_kernel_for(flash4, machine, workload, backward, reason):
    backend = flash4()
    assert backend.unavailable_because(machine) is None
    assert backend.unsupported_because(workload, machine, backward) == [reason]


@pytest.mark.parametrize(("head_dim", "wrong"), [(72, True), (48, True), (64, False), (88, False), (144, False)])
def test_the_known_defect_is_that_of_head_dims_rounded_to_16(head_dim, wrong):
    for name in ("flash4", "flex_flash"):
        defect = Registry()[name].known_defects[0]
        assert defect.applies(W.replace(head_dim=head_dim), H200) is wrong
        assert not defect.applies(W.replace(head_dim=head_dim), B200)


def test_a_folder_of_flash_attn_2_in_its_place_is_broken_not_absent(flash4):
    backend = flash4("import torch\ntorch.no_such_attribute\n")
    assert backend.unavailable_because(H200) is None
    assert "flash_attn.cute is installed but cannot be imported: AttributeError" in backend.broken_because()
