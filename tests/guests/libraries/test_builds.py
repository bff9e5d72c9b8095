"""Libraries as some have them: a build without a feature, a part that does not load, a defect that is known."""

import pytest
from fakes import HERE, planted
from fakes.judged import CPU, H200, HOST

from pytest_attn import Neighborhood, Pages, Window, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
UNGROUPED = W.replace(kv_heads=4)
FMHA = "xformers/ops/fmha/__init__.py"
FEW_HEAD_DIMS = "this flash-attn build has head_dim 64 and 128 only"
RAISES = (
    f"    if operator is flash.FwOp and query.shape[-1] not in (64, 128):\n        raise RuntimeError({FEW_HEAD_DIMS!r})\n"
)
FEW = {FMHA: (HERE / "xformers_fmha.py").read_text().replace("    pass\n", RAISES)}
CUTLASS = "\n\ndef can_run_cutlass_fna(query, key, value, raise_error=False):\n    return True\n"
ABLE = {"natten/backends.py": (HERE / "natten_backends.py").read_text() + CUTLASS}
LOADING = "CUDNN_BACKEND_TENSOR_DESCRIPTOR cudnnFinalize failed", "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"
NOT_LOADED = planted("te_utils.py", 'FUSED_REASON = ""\n', f'FUSED_REASON = "{LOADING[0]}\\n  {LOADING[1]}"\n')


def lacking(feature):
    return planted("flash3.py", "LACKING = ()", f"LACKING = ({feature!r},)")


OF_BUILD = "This flash attention build does not support "
#: backend, files of its library that are others, a workload, and what is said against it
BUILDS = [
    ("flash3", lacking("local attention"), W.replace(mask=Window(9, 3)), f"{OF_BUILD}local attention."),
    ("flash3", lacking("tanh softcapping"), W.replace(softcap=2.0), f"{OF_BUILD}tanh softcapping."),
    ("flash3", lacking("varlen"), W.replace(kv_lens=(80, 51)), f"{OF_BUILD}varlen."),
    ("flash3", lacking("paged KV"), W.replace(kv_pages=Pages(16)), f"{OF_BUILD}paged KV."),
    ("flash3", lacking("local attention"), W, None),
    ("xformers", FEW, UNGROUPED, f"fa2F@2.8.3: {FEW_HEAD_DIMS}"),
    ("xformers", FEW, UNGROUPED.replace(head_dim=64), None),
    ("xformers", FEW, UNGROUPED.replace(dtype="fp32"), None),  # CUTLASS's
    ("natten", ABLE, W.replace(kv_len=48, head_dim=24, mask=Neighborhood((48,), (7,))), None),
    ("te_fused", NOT_LOADED, W, f"Disabling FusedAttention: {' '.join(LOADING)}"),
]


@pytest.mark.parametrize(("name", "files", "workload", "reason"), BUILDS)
def test_what_a_build_lacks_is_refused_in_its_own_words(installed, name, files, workload, reason):
    assert installed(name, **files).unsupported_because(workload, HOST) == ([reason] if reason else [])


EXTENSIONS = "xFormers can't load C++/CUDA extensions. xFormers was built for: PyTorch 2.10.0 with CUDA 1208"
UNLOADED = {"xformers/_cpp_lib.py": f"_cpp_library_load_exception = OSError({EXTENSIONS!r})\n"}
#: to enter a name would download a kernel of the Hub, only to hear that it is not judged
ENTERED = planted("diffusers.py", "    old = _Attention", "    raise OSError\n    old = _Attention")
UNUSABLE = "RuntimeError: Flash Attention backend 'flash' is not usable because of missing package or the version is too old."
TRANSFORMERS = "eager, flash_attention_2, flex_attention, sdpa, paged|sdpa"
#: where transformers does not see a library, it would look for one on the Hub
BLIND = planted("transformers.py", "lambda: True", "lambda: False")
#: backend, the libraries that are there (None: its own), files that are others, and how what is said begins
BROKEN = [
    ("xformers", None, UNLOADED, EXTENSIONS),
    ("xformers", None, {FMHA: "pass\n\n"}, "xformers.ops.fmha is installed but has no memory_efficient_attention"),
    (
        "diffusers:flsh",
        ["diffusers"],
        {},
        "diffusers has no attention backend 'flsh'; it has flash, flash_varlen, flex, native,",
    ),
    ("diffusers:flash", ["diffusers"], {}, f"{UNUSABLE} Please install `flash-attn>=2.6.3`."),
    ("diffusers:native", None, ENTERED, "OSError: "),
    ("diffusers:sage", None, ENTERED, "sage quantizes or is for another device: not judged; judged are native, _native_math,"),
    ("transformers:sdap", None, {}, f"transformers has no attention function 'sdap'; it has {TRANSFORMERS}"),
    ("transformers:paged|sdpa", None, {}, "paged|sdpa takes masks or a cache of its own: not judged; judged are eager, sdpa,"),
    ("transformers:flash_attention_2", None, BLIND, "transformers does not find the library of flash_attention_2"),
]


@pytest.mark.parametrize(("name", "libraries", "files", "reason"), BROKEN)
def test_what_is_not_there_or_not_whole_is_said(installed, name, libraries, files, reason):
    assert installed(name, libraries, **files).broken_because().startswith(reason)


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_a_dispatcher_without_the_library_of_its_kernel_says_what_to_install(installed, library):
    backend = installed({"diffusers": "diffusers:flash", "transformers": "transformers:flash_attention_2"}[library], [library])
    assert backend.unavailable_because(H200) == "flash-attn is not installed; pip install flash-attn --no-build-isolation"


LAST = {"mask": "causal-bottom-right"}
SHORT = Workload(q_lens=(9, 4), kv_lens=(3, 4), **LAST)
ALIBI = W.replace(alibi=True)
#: backend, which of its defects, in what order; workloads in its backward reach, and others
DEFECTS = [
    ("xformers_cutlass", 0, [Workload(257, 129, **LAST), SHORT], [Workload(129, 257, **LAST), Workload(257, 129)]),
    ("transformers:flex_attention", 0, [W.replace(sinks=True)], [W]),
    ("flex_flash", -1, [ALIBI], [W, ALIBI.replace(kv_heads=4)]),
    *(
        (name, 0, [W.replace(head_dim=d) for d in (72, 48)], [W.replace(head_dim=d) for d in (64, 88, 144)])
        for name in ("flash4", "flex_flash")
    ),
    ("sdpa_cudnn", 0, [Workload(704)], [Workload(640), Workload(704, mask="causal")]),
    ("sdpa_cudnn", 1, [Workload(64)], []),
    ("sdpa_cudnn", 2, [Workload(64)], [Workload(64, dtype="float32")]),
    ("sdpa_cudnn", 3, [Workload(257, 129, **LAST)], [Workload(129, 257, **LAST)]),
]


@pytest.mark.parametrize(("name", "which", "within", "beyond"), DEFECTS)
def test_a_known_defect_reaches_some_workloads(name, which, within, beyond):
    defect = Registry()[name].known_defects[which]
    assert all(defect.spoils(workload, H200, backward=True) for workload in within)
    assert not any(defect.spoils(workload, H200, backward=True) for workload in beyond)


@pytest.mark.parametrize(("name", "which"), [("flex_flash", -1), ("sdpa_cudnn", 0), ("sdpa_cudnn", 2)])
def test_a_known_defect_of_gradients_is_of_a_backward_pass_and_of_some_devices(name, which):
    defect, workload = Registry()[name].known_defects[which], Workload(704, heads=4, kv_heads=2, alibi=True)
    assert defect.spoils(workload, H200, backward=True)
    assert not defect.spoils(workload, H200, backward=False)
    assert not defect.spoils(workload, machine_of(CPU), backward=True)
