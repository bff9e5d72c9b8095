from fakes import HERE
from fakes.judged import HOST

from pytest_attn import Workload
from pytest_attn.backends.libraries.xformers import XformersCutlass

FMHA = "xformers/ops/fmha/__init__.py"
W = Workload(41, 75, batch=2, heads=4, head_dim=32)


def test_what_a_flash_attn_was_built_without_is_a_refusal(installed):
    told = "this flash-attn build has head_dim 64 and 128 only"
    source = (HERE / "xformers_fmha.py").read_text()
    check = f"    if operator is flash.FwOp and query.shape[-1] not in (64, 128):\n        raise RuntimeError({told!r})\n"
    backend = installed("xformers", **{FMHA: source.replace("    pass\n", check)})
    assert backend.unsupported_because(W, HOST) == [f"fa2F@2.8.3: {told}"]
    assert backend.unsupported_because(W.replace(head_dim=64), HOST) == []
    assert backend.unsupported_because(W.replace(dtype="fp32"), HOST) == []  # CUTLASS's


def test_an_extension_that_does_not_load_is_reported_in_the_librarys_own_words(installed):
    words = "xFormers can't load C++/CUDA extensions. xFormers was built for: PyTorch 2.10.0 with CUDA 1208"
    backend = installed("xformers", **{"xformers/_cpp_lib.py": f"_cpp_library_load_exception = OSError({words!r})\n"})
    assert backend.broken_because() == words


def test_an_empty_module_is_no_library(installed):
    backend = installed("xformers", **{FMHA: "pass\n\n"})
    assert backend.broken_because() == "xformers.ops.fmha is installed but has no memory_efficient_attention"


def test_gradients_of_fully_masked_rows_are_a_known_defect_of_cutlass():
    defect, *_ = XformersCutlass.known_defects
    assert defect.applies(Workload(257, 129, mask="causal-bottom-right"), HOST)
    assert defect.applies(Workload(q_lens=(9, 4), kv_lens=(3, 4), mask="causal-bottom-right"), HOST)
    assert not defect.applies(Workload(129, 257, mask="causal-bottom-right"), HOST)
    assert not defect.applies(Workload(257, 129), HOST)
