import pytest
from fakes import faulty, install, uninstall
from fakes.judged import B200, CPU, H200, assert_passes, judged

from pytest_attn import Document, Pages, Window, Workload
from pytest_attn.backends.libraries.flash_attention import _refused_by_build
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.diagnosis.diagnose import diagnose

HERE_MACHINE = machine_of(CPU)
NEW, OLD = "flash_attn_3/flash_attn_interface.py", "flash_attn_interface.py"
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def flash3(monkeypatch, tmp_path):
    def put(path=NEW, source=None):
        source = source or ("flash3.py" if path == NEW else "flash3_old.py")
        install(monkeypatch, tmp_path, {path: source}, "flash-attn-3", "3.0.0b1")
        _refused_by_build.cache_clear()
        return Registry()["flash3"]

    yield put
    _refused_by_build.cache_clear()
    uninstall((NEW, OLD))


@pytest.mark.parametrize("generation", [NEW, OLD], ids=["new", "old"])
@pytest.mark.parametrize(
    ("workload", "backward"),
    [
        (W, True),
        (W.replace(mask="causal-bottom-right", scale=0.3), True),
        (W.replace(mask=Window(9, None), softcap=2.0), True),
        (W.replace(kv_lens=(80, 51), mask="causal-bottom-right"), True),
        (W.replace(kv_len=48, mask=Document((30, 11, 7), causal=True)), True),
        (Workload(q_lens=(30, 7, 50), heads=2, head_dim=32, mask="causal"), True),
        (W.replace(q_len=3, kv_pages=Pages(16), kv_lens=(80, 33), mask="causal-bottom-right"), False),
        (W.replace(head_dim=192, v_head_dim=128), True),
        (W.replace(head_dim=64, v_head_dim=512), False),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_says_the_workload_in_the_words_of_either_generation(flash3, generation, workload, backward):
    backend = flash3(generation)
    assert backend.unsupported_because(workload, HERE_MACHINE, backward) == []
    assert_passes(backend, workload, backward)


@pytest.mark.parametrize(("path", "module"), [(NEW, "flash_attn_3.flash_attn_interface"), (OLD, "flash_attn_interface")])
def test_the_installed_generation_is_chosen(flash3, path, module):
    backend = flash3(path)
    assert backend.source.module == module
    assert backend.unavailable_because(H200) is None


@pytest.mark.parametrize(
    ("old", "new", "workload"),
    [
        ('"bottom-right" if causal', '"top-left" if causal', W.replace(mask="causal-bottom-right")),
        ('"window": window_size', '"window": (-1, -1)', W.replace(mask=Window(9, 3))),
        ('"softcap": softcap', '"softcap": 0.0', W.replace(softcap=0.5)),
        ('"scale": softmax_scale', '"scale": None', W.replace(scale=0.5)),
    ],
)
def test_a_fault_of_the_library_is_found(flash3, old, new, workload):
    assert not judged(flash3(NEW, faulty("flash3.py", old, new)), workload).passed


def test_an_output_without_its_batch_is_found(flash3):
    backend = flash3(NEW, faulty("flash3.py", "(out, lse) if return_attn_probs else out", "out[0]"))
    with pytest.raises((ContractError, IndexError)):
        judged(backend, W)


@pytest.mark.parametrize(
    ("feature", "workload"),
    [
        ("local attention", W.replace(mask=Window(9, 3))),
        ("tanh softcapping", W.replace(softcap=2.0)),
        ("varlen", W.replace(kv_lens=(80, 51))),
        ("paged KV", W.replace(kv_pages=Pages(16))),
    ],
)
def test_a_build_without_a_feature_refuses_it_in_its_own_words(flash3, feature, workload):
    backend = flash3(NEW, faulty("flash3.py", "LACKING = ()", f"LACKING = ({feature!r},)"))
    assert backend.unsupported_because(workload, HERE_MACHINE) == [f"This flash attention build does not support {feature}."]
    assert backend.unsupported_because(W, HERE_MACHINE) == []


def test_another_error_is_no_refusal(flash3):
    backend = flash3(
        NEW, faulty("flash3.py", "This flash attention build does not support local", "CUDA error: no kernel for")
    )
    backend.source.load().LACKING = ("local attention",)
    with pytest.raises(RuntimeError, match="CUDA error"):
        backend.unsupported_because(W.replace(mask=Window(9, 3)), HERE_MACHINE)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (W.replace(mask="causal"), "has no causal mask aligned to the first key"),
        (W.replace(dtype="fp32"), "takes bfloat16 and float16 only, not float32"),
        (W.replace(head_dim=264), "takes a head_dim of at most 256, not head_dim 264"),
        (W.replace(alibi=True), "has no ALiBi"),
        (W.replace(sinks=True), "has no sinks"),
        (
            W.replace(head_dim=128, v_head_dim=64),
            "takes a v_head_dim of 97 to 128 with a head_dim of 129 to 192, or any with a head_dim of at most 64,"
            " not head_dim 128, v_head_dim 64",
        ),
    ],
)
def test_it_refuses_what_the_library_has_no_words_for(flash3, workload, reason):
    backend = flash3()
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == [reason]


def test_wide_values_have_no_backward_pass(flash3):
    wide = W.replace(head_dim=64, v_head_dim=512)
    assert flash3().unsupported_because(wide, H200, backward=True) == [
        "takes a head_dim of at most 256, not head_dim 64, v_head_dim 512"
    ]


def test_other_architectures_are_unavailable(flash3):
    assert flash3().unavailable_because(B200) == "needs sm90, this device is sm100"


FP8 = W.replace(dtype="fp8", descales="head")


@pytest.mark.parametrize(
    "workload", [FP8, FP8.replace(descales="tensor"), FP8.replace(mask="causal-bottom-right")], ids=lambda w: w.id
)
def test_fp8_comes_with_descales_for_each_key_head(flash3, workload):
    backend = flash3()
    assert backend.unsupported_because(workload, HERE_MACHINE) == []
    assert judged(backend, workload).passed


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_descale_that_does_not_arrive_is_found(flash3, name):
    said, instead = (f"{name}_descale, ", "None, ") if name != "v" else ("v_descale))", "None))")
    wrong = flash3(source=faulty("flash3.py", said, instead))
    assert f"without the descale of {name}" in describe(diagnose(judged(wrong, FP8)))


def test_fp8_that_is_not_documented_is_refused(flash3):
    backend = flash3()
    for workload in (FP8.replace(kv_lens=(80, 51)), FP8.replace(q_len=3, kv_pages=Pages(16))):
        assert backend.unsupported_because(workload, HERE_MACHINE)[0].startswith("takes fp8 in dense tensors only")
    assert backend.unsupported_because(FP8.replace(descales="token"), HERE_MACHINE) == ["does not support descales per token"]
    assert backend.unsupported_because(W.replace(kv_dtype="int8"), HERE_MACHINE) == ["does not support int8 keys and values"]
