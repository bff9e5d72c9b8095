import pytest
from fakes import HERE, LIBRARIES, faulty, uninstall
from fakes import put as put_library
from fakes.judged import HOST, assert_passes, judged
from fakes.masks import checkered

from pytest_attn import BooleanMask, Document, Machine, Neighborhood, Window, Workload
from pytest_attn.backends.libraries.xformers import XformersCutlass
from pytest_attn.backends.registry import Registry

FILES = LIBRARIES["xformers"][0]
FMHA, MASKS = "xformers/ops/fmha/__init__.py", "xformers/ops/fmha/attn_bias.py"
W = Workload(41, 75, batch=2, heads=4, head_dim=32)
SQUARE = W.replace(kv_len=41)
GROUPED = W.replace(kv_heads=2)
LONGER = {"kv_lens": (30, 60, 50), "kv_len": None}
PACKED = Workload(q_lens=(30, 7, 50), heads=2, head_dim=32)
BOTH = ("xformers", "xformers_cutlass")


@pytest.fixture
def put(monkeypatch, tmp_path):
    def installed(name, **changed):
        put_library(monkeypatch, tmp_path, "xformers", **changed)
        return Registry()[name]

    yield installed
    uninstall(FILES)


def any_mod(b, h, q_idx, kv_idx):
    return kv_idx >= 0


CLAIMED = [
    (W, BOTH, True),
    (W.replace(mask="causal", scale=0.3), BOTH, True),
    (SQUARE.replace(mask="causal"), BOTH, True),
    (W.replace(mask="causal-bottom-right"), BOTH, True),
    (W.replace(mask=Window(9, 0)), ("xformers",), True),
    (W.replace(mask=Window(9, 0)), ("xformers_cutlass",), False),
    (W.replace(mask=Window(None, 0)), BOTH, True),
    (W.replace(mask=Window(9, 3)), ("xformers",), True),
    (W.replace(mask=Window(None, 3)), ("xformers",), False),
    (W.replace(mask=Window(4, None)), ("xformers",), False),
    (W.replace(bias="hk", dtype="fp32"), BOTH, True),
    (W.replace(bias="bq", mask="causal", kv_lens=(75, 33)), BOTH, True),
    (W.replace(alibi=True, dtype="fp32", kv_lens=(75, 33)), BOTH, True),
    (W.replace(mask=BooleanMask(checkered)), BOTH, True),
    (SQUARE.replace(mask=Neighborhood((41,), (5,))), BOTH, False),
    (W.replace(v_head_dim=48), BOTH, True),
    (W.replace(kv_lens=(75, 33)), BOTH, True),
    (W.replace(kv_lens=(75, 33), mask="causal"), BOTH, True),
    (W.replace(kv_lens=(75, 51), mask="causal-bottom-right"), BOTH, True),
    (W.replace(kv_lens=(75, 51), mask=Window(9, 0)), ("xformers",), True),
    (SQUARE.replace(mask=Document((30, 11))), BOTH, True),
    (SQUARE.replace(mask=Document((30, 11), causal=True)), BOTH, True),
    (SQUARE.replace(mask=Document((30, 11)), kv_lens=(41, 33)), BOTH, True),
    (PACKED.replace(mask="causal"), BOTH, True),
    (PACKED.replace(**LONGER, mask="causal-bottom-right"), BOTH, True),
    (GROUPED.replace(mask="causal-bottom-right"), BOTH, False),
    (GROUPED.replace(bias="hqk"), BOTH, False),
    (PACKED.replace(kv_heads=1), BOTH, False),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "workload", "backward"),
    [(name, w, back) for w, names, back in CLAIMED for name in names],
    ids=lambda value: value.id if isinstance(value, Workload) else str(value),
)
def test_it_says_the_workload_in_the_words_of_the_library(put, name, workload, backward):
    backend = put(name)
    assert backend.unsupported_because(workload, HOST, backward) == []
    assert_passes(backend, workload, backward)


LOCAL = "attn_bias type is <class 'xformers.ops.fmha.attn_bias.LocalAttentionFromBottomRightMask'>"


@pytest.mark.parametrize(
    ("name", "workload", "backward", "reasons"),
    [
        ("xformers", W.replace(softcap=5.0), False, ["has no softcap"]),
        ("xformers", W.replace(sinks=True), False, ["has no sinks"]),
        ("xformers", W.replace(alibi=True), False, ["would round ALiBi's distances to bfloat16 in attn_bias"]),
        (
            "xformers",
            PACKED.replace(mask=any_mod),
            False,
            ["takes neither ALiBi nor a mask of its own for packed sequences"],
        ),
        (
            "xformers",
            W.replace(kv_lens=(75, 33), mask=Window(3, 3)),
            False,
            ["has no window to the right of a query for packed or padded sequences"],
        ),
        (
            "xformers",
            PACKED.replace(kv_lens=(30, 6, 50), mask="causal-bottom-right"),
            False,
            ["Block #1 has num_keys=6 and num_queries=7. Expected `num_keys >= num_queries`"],
        ),
        (
            "xformers",
            GROUPED,
            True,
            ["fa2B@2.8.3: operator does not support BMGHK format", "cutlassB-pt: operator does not support BMGHK format"],
        ),
        (
            "xformers",
            W.replace(mask=Window(3, 3), v_head_dim=64),
            False,
            ["fa2F@2.8.3: query.shape[-1] != value.shape[-1]", f"cutlassF-pt: {LOCAL}"],
        ),
        ("xformers_cutlass", W.replace(mask=Window(3, 3)), True, [LOCAL]),
        ("xformers_cutlass", GROUPED, True, ["operator does not support BMGHK format"]),
        ("xformers_cutlass", W.replace(head_dim=36), False, ["needs a head_dim that is a multiple of 8, not head_dim 36"]),
    ],
)
def test_it_refuses_in_the_words_of_the_operators(put, name, workload, backward, reasons):
    assert put(name).unsupported_because(workload, HOST, backward) == reasons


def test_what_a_flash_attn_was_built_without_is_a_refusal(put):
    told = "this flash-attn build has head_dim 64 and 128 only"
    source = (HERE / "xformers_fmha.py").read_text()
    check = f"    if operator is flash.FwOp and query.shape[-1] not in (64, 128):\n        raise RuntimeError({told!r})\n"
    backend = put("xformers", **{FMHA: source.replace("    pass\n", check)})
    assert backend.unsupported_because(W, HOST) == [f"fa2F@2.8.3: {told}"]
    assert backend.unsupported_because(W.replace(head_dim=64), HOST) == []
    assert backend.unsupported_because(W.replace(dtype="fp32"), HOST) == []  # CUTLASS's


@pytest.mark.parametrize(
    ("file", "right", "wrong", "workload"),
    [
        (MASKS, "right, bottom_right = 0, False\n\n\nclass LowerTriangularFrom", None, W.replace(mask="causal")),
        (MASKS, "self.left = self._window_size - 1", "self.left = self._window_size", W.replace(mask=Window(9, 0))),
        (
            MASKS,
            "self.left, self.right = self.win",
            "self.right, self.left = self.win",
            W.replace(mask=Window(9, 3)),
        ),
        (FMHA, "scale=scale, **options", "**options", W.replace(scale=0.3)),
        (FMHA, "attn_bias.flatten(1, -3)", "-attn_bias.flatten(1, -3)", W.replace(bias="hqk")),
        (FMHA, "for t in (query, key, value))\n    options", "for t in (query, key.roll(1, 2), value))\n    options", GROUPED),
        (MASKS, "right, bottom_right = 0, False\n\n\n@dataclass", None, PACKED.replace(**LONGER, mask="causal")),
    ],
)
def test_another_meaning_in_the_library_is_found(put, file, right, wrong, workload):
    backend = put("xformers", **{file: faulty(FILES[file], right, wrong or right.replace("False", "True"))})
    assert not judged(backend, workload).passed


def test_an_extension_that_does_not_load_is_reported_in_the_librarys_own_words(put):
    words = "xFormers can't load C++/CUDA extensions. xFormers was built for: PyTorch 2.10.0 with CUDA 1208"
    backend = put("xformers", **{"xformers/_cpp_lib.py": f"_cpp_library_load_exception = OSError({words!r})\n"})
    assert backend.unavailable_because(Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 1, 1, "2.11.0")) is None
    assert backend.broken_because() == words


def test_an_empty_module_is_no_library(put):
    backend = put("xformers", **{FMHA: "pass\n\n"})
    assert backend.broken_because() == "xformers.ops.fmha is installed but has no memory_efficient_attention"


def test_an_import_that_fails_is_reported(put):
    backend = put("xformers", **{FMHA: "raise ImportError('Requires Flash-Attention version >=2.7.1')\n\n"})
    assert backend.broken_because() == (
        "xformers.ops.fmha is installed but cannot be imported: ImportError: Requires Flash-Attention version >=2.7.1"
    )


def test_cutlass_ends_at_sm90(put):
    b200 = Machine("cuda:0", "NVIDIA B200", (10, 0), "sm100", 150 << 30, 1, "2.11.0+cu130")
    assert put("xformers_cutlass").unavailable_because(b200) == "needs sm50 to sm90, this device is sm100"


def test_gradients_of_fully_masked_rows_are_a_known_defect_of_cutlass():
    defect, *_ = XformersCutlass.known_defects
    assert defect.applies(Workload(257, 129, mask="causal-bottom-right"), HOST)
    assert defect.applies(Workload(q_lens=(9, 4), kv_lens=(3, 4), mask="causal-bottom-right"), HOST)
    assert not defect.applies(Workload(129, 257, mask="causal-bottom-right"), HOST)
    assert not defect.applies(Workload(257, 129), HOST)
