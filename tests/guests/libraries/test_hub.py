import json

import pytest
from fakes import install, source_of, uninstall
from fakes.judged import CPU, H200, assert_passes, judged

from pytest_attn import Document, Pages, Window, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry

FILES = {"kernels/__init__.py": "kernels.py"}
METADATA = {
    "id": "_me_flash",
    "name": "me-flash",
    "version": 1,
    "license": "BSD-3-Clause",
    "python-depends": [],
    "backend": {"type": "cuda"},
}
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
FLASH2 = source_of("flash2.py")
#: as FlashAttention 4 says the same: None for an open window, no dropout, and (out, lse)
FLASH4 = source_of("hub.py")
WITHOUT_VARLEN = f"{FLASH2}del flash_attn_varlen_func\n"
WITHOUT_SOFTCAP = "from fakes.signatures import without\nflash_attn_func = without(flash_attn_func, 'softcap')\n"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def put(source, asked="me/flash"):
        install(monkeypatch, tmp_path / "site", FILES, "kernels", "0.17.2")
        variant = tmp_path / "repository" / "build" / "torch-universal"
        variant.mkdir(parents=True)
        (variant / "__init__.py").write_text(source)
        (variant / "metadata.json").write_text(json.dumps(METADATA))
        monkeypatch.setenv("LOCAL_KERNELS", f"me/flash={tmp_path / 'repository'}")
        return Registry()[f"hub:{asked}"]

    yield put
    uninstall(FILES)


COMMON = [
    *(W, W.replace(mask="causal-bottom-right", scale=0.3), W.replace(mask=Window(9, 3), softcap=2.0)),
    *(W.replace(mask=Window(9, None)), W.replace(kv_lens=(80, 51), mask="causal-bottom-right")),
    *(W.replace(kv_len=48, mask=Document((30, 11, 7))), Workload(q_lens=(30, 7, 50), heads=2, head_dim=32, mask="causal")),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("source", "precision", "workload"),
    [
        *((FLASH2, "flash2", workload) for workload in [*COMMON, W.replace(kv_len=48, mask="causal", alibi=True)]),
        *((FLASH4, "flash", workload) for workload in COMMON),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else value[:6].strip('"'),
)
def test_it_speaks_the_signature_that_it_finds(hub, source, precision, workload):
    backend = hub(source)
    assert backend.obstacle(workload, machine_of(CPU), True) is None
    assert backend.precision_on("cuda") == precision
    assert_passes(backend, workload, backward=True)


def test_a_kernel_with_packed_sequences_only_serves_dense_ones(hub):
    backend = hub(f"{FLASH2}del flash_attn_func\n")
    assert backend.obstacle(W, machine_of(CPU), False) is None
    assert judged(backend, W.replace(mask="causal-bottom-right")).passed


@pytest.mark.parametrize("source", [FLASH2, FLASH4], ids=["flash2", "flash4"])
@pytest.mark.parametrize("workload", [W, W.replace(kv_lens=(80, 51))], ids=["dense", "packed"])
def test_another_alignment_in_the_kernel_is_found(hub, source, workload):
    backend = hub(source.replace('"bottom-right" if causal', '"top-left" if causal'))
    assert not judged(backend, workload.replace(mask="causal-bottom-right")).passed


@pytest.mark.parametrize(
    ("asked", "offline", "error"),
    [
        ("kernels-community/flash-attn2@v1", "0", "ValueError: Kernel repository 'kernels-community/flash-attn2' could not"),
        ("kernels-community/flash-attn2@v1", "1", "ValueError: Version 1 of 'kernels-community/flash-attn2' is not available"),
        ("org/repo@3b8334d", "1", "FileNotFoundError: Cannot find a local snapshot for org/repo (revision: 3b8334d)."),
    ],
)
def test_without_a_network_it_says_what_to_do(hub, monkeypatch, asked, offline, error):
    backend, (repo, _, version) = hub(FLASH2, asked), asked.partition("@")
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    assert backend.unavailable_because(H200) is None
    reason = backend.broken_because()
    assert reason.startswith(f"{repo} cannot be loaded: {error}")
    assert reason.endswith(f" (go online, or name a local copy: LOCAL_KERNELS={repo}=/path/to/repository)")
    assert backend.version() == version


def test_the_hub_is_asked_once(hub, monkeypatch):
    import importlib

    backend, asked = hub(FLASH2, "org/repo"), []

    def get_kernel(repo_id, *, revision=None, version=None):
        asked.append((repo_id, revision, version))
        raise ValueError("no")

    monkeypatch.setattr(importlib.import_module("kernels"), "get_kernel", get_kernel)
    assert backend.broken_because() == backend.broken_because()
    assert asked == [("org/repo", "main", None)]


def test_a_local_copy_is_named_in_the_report(hub):
    backend = hub(FLASH2, "me/flash@v1")
    assert (backend.name, backend.library, backend.version()) == ("hub:me/flash@v1", "me/flash", "local")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def relu(x): ...\n", "me/flash has neither flash_attn_func nor flash_attn_varlen_func; it exports relu"),
        ("raise OSError('undefined:\\n  _ZN3')\n", "me/flash cannot be loaded: OSError: undefined: _ZN3"),
    ],
)
def test_a_kernel_that_is_none_is_refused(hub, source, reason):
    assert hub(source).broken_because() == reason


@pytest.mark.parametrize(
    ("source", "workload", "backward", "reason"),
    [
        (FLASH2, W.replace(mask="causal"), False, "has no causal mask aligned to the first key"),
        (FLASH2, W.replace(sinks=True), False, "has no sinks"),
        (FLASH2, W.replace(kv_pages=Pages(256)), False, "does not support a paged KV cache"),
        (FLASH4, W.replace(alibi=True), False, "its flash_attn_func has no alibi_slopes"),
        (FLASH2 + WITHOUT_SOFTCAP, W.replace(softcap=2.0), False, "its flash_attn_func has no softcap"),
        (WITHOUT_VARLEN, W.replace(kv_lens=(80, 3)), False, "its module has no flash_attn_varlen_func"),
        (FLASH2.replace("> 256", "> 16"), W, False, "refuses one token: RuntimeError: FlashAttention forward only supports"),
        (FLASH2.replace("else out\n", "else out.detach()\n"), W, True, "its output carries no gradient"),
    ],
)
def test_it_refuses_what_the_kernel_has_no_words_for(hub, source, workload, backward, reason):
    backend = hub(source)
    assert backend.broken_because() is None
    reasons = backend.unsupported_because(workload, machine_of(CPU), backward)
    assert len(reasons) == 1
    assert reasons[0].startswith(reason)
