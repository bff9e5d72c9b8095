import shutil
from importlib import import_module

import pytest
import torch
from fakes import faulty, install, uninstall
from fakes.judged import A100, H200, HOST, assert_passes, judged

from pytest_attn import BooleanMask, Document, Neighborhood, Pages, Window, Workload
from pytest_attn.backends.registry import Registry

COMPILER = "def get_cuda_path():\n    return '/usr/local/cuda'\n"
WORDS = "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
NO_COMPILER = f"def get_cuda_path():\n    raise RuntimeError({WORDS!r})\n"
FILES = {
    "flashinfer/__init__.py": "flashinfer.py",
    "flashinfer/jit/cpp_ext.py": COMPILER,
    "flashinfer/jit/env.py": "def has_flashinfer_jit_cache():\n    return False\n",
}
W = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=64)
PACKED = Workload(q_lens=(30, 7, 20), kv_lens=(30, 12, 40), heads=2, head_dim=64)


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    def put(template, **changed):
        install(monkeypatch, tmp_path, {**FILES, **changed}, "flashinfer-python", "0.5.3")
        import_module("flashinfer")  # what is imported needs no trial in another process
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        return Registry()[f"flashinfer_{template}"]

    yield put
    uninstall(FILES)


def by_batch(batch, heads, q_len, kv_len, device):
    seen = torch.arange(kv_len, device=device) % 3 != torch.arange(batch, device=device)[:, None]
    return seen.view(batch, 1, 1, kv_len)


def by_head(b, h, q_idx, kv_idx):
    return (kv_idx + h) % 3 != 0


def every_third(b, h, q_idx, kv_idx):
    return (kv_idx + q_idx + b) % 3 != 0


BOTH = [
    W,
    W.replace(mask="causal-bottom-right", scale=0.3),
    W.replace(kv_len=24, mask="causal", softcap=2.0),
    W.replace(mask=Window(9, 0)),
    W.replace(kv_lens=(40, 0)),
    W.replace(kv_lens=(40, 31), mask="causal-bottom-right"),
    W.replace(kv_len=24, mask=Document((13, 11), causal=True)),
    W.replace(head_dim=192, v_head_dim=128, dtype="float16"),
    PACKED,
    PACKED.replace(mask="causal-bottom-right"),
    W.replace(q_len=2, kv_len=70, kv_pages=Pages(16), kv_lens=(70, 33), mask="causal-bottom-right"),
    W.replace(q_len=2, kv_len=70, kv_pages=Pages(1), kv_lens=(70, 0), scale=0.2),
    PACKED.replace(kv_pages=Pages(16), mask="causal-bottom-right"),
    PACKED.replace(kv_pages=Pages(8, "HND", pool=40), q_lens=(5, 0, 9), mask=Window(9, 0)),
]
ONLY_FA2 = [
    W.replace(mask="causal"),
    W.replace(mask=Window(5, 3)),
    W.replace(mask=Window(5, None)),
    W.replace(mask=BooleanMask(by_batch)),
    W.replace(mask=every_third),
    W.replace(kv_len=24, mask=Neighborhood((4, 6), (3, 3))),
    PACKED.replace(mask="causal"),
    PACKED.replace(mask=every_third),
]


@pytest.mark.parametrize(
    ("template", "workload"),
    [("fa2", w) for w in BOTH + ONLY_FA2] + [("fa3", w) for w in BOTH],
    ids=lambda value: value.id if isinstance(value, Workload) else value,
)
def test_it_says_the_workload_in_the_words_of_the_library(flashinfer, template, workload):
    backend = flashinfer(template)
    assert backend.unsupported_because(workload, HOST) == []
    assert_passes(backend, workload)


@pytest.mark.parametrize(
    ("said", "instead", "workload"),
    [
        ('"bottom-right" if causal', '"top-left" if causal', BOTH[1]),
        ("dim**-0.5 if sm_scale is None else sm_scale", "dim**-0.5", BOTH[1]),
        ('"softcap": soft_cap', '"softcap": 2 * soft_cap', BOTH[2]),
        ("(window_left, -1)", "(window_left - 1, -1)", BOTH[3]),
        ("logits_soft_cap, custom_mask)", "logits_soft_cap, custom_mask.flip(0))", ONLY_FA2[0]),
        (": self._lens_kv[b]]", ": self._lens_kv[0]]", BOTH[10]),
        ("return self._sequences(q, keys_of)", "return self._sequences(q, lambda b: keys_of(0))", BOTH[10]),
    ],
)
def test_another_meaning_in_the_library_is_found(flashinfer, said, instead, workload):
    backend = flashinfer("fa2", **{"flashinfer/__init__.py": faulty("flashinfer.py", said, instead)})
    assert not judged(backend, workload).passed


@pytest.mark.parametrize(
    ("template", "workload", "reason"),
    [
        ("fa2", W.replace(dtype="fp32"), "takes bfloat16 and float16 only, not float32"),
        ("fa2", W.replace(head_dim=96), "takes head_dim 64, 128, 192 and 256 only, not head_dim 96"),
        ("fa2", W.replace(head_dim=192), "has no kernel for head_dim 192 with v_head_dim 192"),
        (
            "fa2",
            W.replace(kv_pages=Pages(16), head_dim=192, v_head_dim=128),
            "needs v_head_dim equal to head_dim where keys are paged",
        ),
        ("fa2", W.replace(mask=by_head), "takes one mask for all heads"),
        (
            "fa2",
            W.replace(kv_lens=(40, 20), mask="causal"),
            "takes padded keys and a paged KV cache with masks up to the last key only (bottom-right causal, or right=0)",
        ),
        ("fa2", W.replace(q_len=1 << 16, kv_len=1 << 15, mask="causal"), "counts the entries of a custom_mask in 32 bits"),
        ("fa2", W.replace(alibi=True), "has no ALiBi"),
        ("fa3", W.replace(mask="causal"), "has no causal mask aligned to the first key"),
        ("fa3", W.replace(mask=Window(3, 3)), "takes windows up to the last key only (right=0)"),
        ("fa3", W.replace(mask=every_third), "has no mask given as a tensor or function"),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_refuses_what_the_library_has_no_words_for(flashinfer, template, workload, reason):
    (said,) = flashinfer(template).unsupported_because(workload, HOST)
    assert said.startswith(reason)


def test_it_has_no_backward_pass(flashinfer):
    assert flashinfer("fa2").unsupported_because(W, HOST, backward=True) == ["has no backward pass"]


def test_fa3_is_for_hopper(flashinfer):
    backend = flashinfer("fa3")
    assert backend.unavailable_because(H200) is None
    assert backend.unavailable_because(A100) == "needs sm90, this device is sm80"
    assert Registry()["flashinfer_fa2"].unavailable_because(A100) is None


def test_without_a_compiler_it_is_broken(flashinfer):
    assert flashinfer("fa2", **{"flashinfer/jit/cpp_ext.py": NO_COMPILER}).broken_because() == WORDS


def test_kernels_that_are_already_compiled_need_no_compiler(flashinfer):
    compiled = FILES["flashinfer/jit/env.py"].replace("False", "True")
    changed = {"flashinfer/jit/cpp_ext.py": NO_COMPILER, "flashinfer/jit/env.py": compiled}
    assert flashinfer("fa2", **changed).broken_because() is None


def test_without_ninja_it_is_broken(flashinfer, monkeypatch):
    backend = flashinfer("fa2")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert backend.broken_because() == "needs ninja on the PATH to compile its kernels"
