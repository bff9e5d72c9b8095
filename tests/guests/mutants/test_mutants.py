"""The mutants: the fault-free kernel is right, every mutant is wrong where it says, and nowhere else."""

import re
from typing import get_args

import pytest
import torch
from honest.variants import EQUIVALENT, HONEST, VARIANTS

from pytest_attn import Window, Workload
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend
from pytest_attn.guests.mutants.mutant import Condition
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import BooleanMask, Document, Neighborhood
from pytest_attn.workloads.pages import Pages

CPU = torch.device("cpu")


def named(name):
    return builtin_catalog().select(name)[0]


def slanted(score, b, h, q_idx, kv_idx):
    return score * (1 + h) / 2 - (q_idx - kv_idx).abs() / 64


def wider_per_head(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx + 17 * h


def diagonal_blocks(batch, heads, q_len, kv_len, device):
    return torch.arange(q_len)[:, None] // 32 == torch.arange(kv_len)[None] // 32


SMALL = {"heads": 2, "head_dim": 32}
GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 32}

#: Every feature of a workload, and with the smaller ones of the groups smoke and edges every fault's place.
COVERING = [
    *(named(f"smoke-{name}") for name in ("full", "causal-gqa", "cross-br", "half", "single", "window", "padded", "packed")),
    *(named(f"smoke-{name}") for name in ("paged", "softcap")),
    *(named(f"edges-{name}") for name in ("one-row", "q129-k257-top-left", "gqa3", "gqa5", "d8")),
    Workload(1, 200, batch=4, **GROUPED, kv_pages=Pages(64), kv_lens=(200, 90, 33, 64)),
    Workload(3, 100, batch=3, **GROUPED, kv_pages=Pages(16), kv_lens=(100, 0, 33), mask="causal-bottom-right"),
    Workload(130, **GROUPED, sinks=True, mask=Window(40, 3)),
    Workload(70, 150, **GROUPED, alibi=True),
    Workload(130, batch=2, **GROUPED, bias="hqk", softcap=5.0),
    Workload(100, **SMALL, v_head_dim=48, scale=0.3),
    Workload(100, heads=2, head_dim=48, v_head_dim=32, mask=Document((30, 50, 20), causal=True)),
    Workload(96, **SMALL, mask=Neighborhood((8, 12), (3, 5), dilation=(2, 1), causal=(True, False))),
    Workload(100, 40, **SMALL, mask="causal-bottom-right"),
    Workload(**GROUPED, q_lens=(10, 0, 70, 33), kv_lens=(70, 20, 5, 90), mask="causal-bottom-right"),
    Workload(heads=4, q_lens=(150, 20), kv_lens=(150, 40)),
    Workload(100, **SMALL, kv_lens=(100, 0, 33), mask=Window(20, 5), dtype="float16"),
    Workload(100, **SMALL, score_mod=slanted, softcap=8.0, dtype="float32"),
    Workload(90, **GROUPED, mask=wider_per_head),
    Workload(200, **SMALL, mask=BooleanMask(diagonal_blocks)),
    Workload(300, heads=2, batch=2, mask="causal"),
    Workload(8, heads=8, head_dim=32),
]
#: Enough of them to call a kernel honest.
SOME = COVERING[1::2]


@pytest.fixture(scope="module")
def cache():
    return ReferenceCache()


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Let torch fill what it does not initialize with NaN, so that the tests do not depend on what memory held."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


#: on which inputs a call shows a mutant
INPUTS = {"call": ("structured", "flat"), "magnitude": ("outlier", "large")}


def directions(w):
    return (False,) if w.kv_pages else (False, True)


def is_wrong(backend, w, backward, cache, inputs=INPUTS["call"]):
    try:
        return not judge(backend, CheckSpec(w, CPU, backward, inputs), cache).passed
    except ContractError:
        return True


# -- the catalog -----------------------------------------------------------------------------------------------------------

#: The repositories behind the short names in references; others are written in full.
REPOSITORIES = {
    "FA": "Dao-AILab/flash-attention",
    "FI": "flashinfer-ai/flashinfer",
    "PT": "pytorch/pytorch",
    "TE": "NVIDIA/TransformerEngine",
    "xf": "facebookresearch/xformers",
    "ComfyUI": "comfyanonymous/ComfyUI",
    "FlagAttention": "flagos-ai/FlagAttention",
    "HipKittens": "HazyResearch/HipKittens",
    "KernelBench": "ScalingIntelligence/KernelBench",
    "NATTEN": "SHI-Labs/NATTEN",
    "SageAttention": "thu-ml/SageAttention",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "aiter": "ROCm/aiter",
    "cudnn-frontend": "NVIDIA/cudnn-frontend",
    "diffusers": "huggingface/diffusers",
    "executorch": "pytorch/executorch",
    "ffpa": "xlite-dev/ffpa-attn",
    "fla": "fla-org/flash-linear-attention",
    "jax": "jax-ml/jax",
    "llama.cpp": "ggml-org/llama.cpp",
    "onnxruntime": "microsoft/onnxruntime",
    "rocm-libraries": "ROCm/rocm-libraries",
    "sglang": "sgl-project/sglang",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "triton": "triton-lang/triton",
    "vllm": "vllm-project/vllm",
    "zml": "zml/zml",
}


def test_the_catalog_is_large_enough_and_has_every_class():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 80
    kinds = {mutant.kind for mutant in MUTANTS}
    assert kinds >= {"masks", "lengths", "heads", "options", "lse", "magnitude"}
    assert kinds >= {"overflow", "memory", "state", "layout", "gradients"}
    assert {mutant.condition for mutant in MUTANTS} == set(get_args(Condition))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_says_what_it_is(mutant):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
    assert mutant.summary.endswith(".")
    assert "\n" not in mutant.summary
    assert reaching(mutant)
    assert mutant.references
    for reference in mutant.references:
        repository, _ = re.fullmatch(r"([\w./-]+)(#\d+|@[0-9a-f]{7,})", reference).groups()
        assert "/" in repository or repository in REPOSITORIES, reference


#: of these correctness/test_profiles.py asks
ROUNDING = ("rounded-products", "rescaled-by-tiles", "rounded-rescaling", "shifted-scores", "scaled-key", "rounded-sinks")


def with_slow_ones_marked(kernels):
    """Return a parameter for each kernel; those that take over ten seconds, and are like others, are slow."""
    slow = ("tiles-16-16", "tiles-32-128", "tiles-128-32", *ROUNDING)
    return [
        pytest.param(kernel, id=kernel.name, marks=[pytest.mark.slow] if kernel.name in slow else []) for kernel in kernels
    ]


# -- fault-free kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(17)
@pytest.mark.parametrize("honest", with_slow_ones_marked([*VARIANTS, *EQUIVALENT]))
def test_an_honest_kernel_is_right(honest, cache):
    backend = honest.backend()
    for w in COVERING if honest is HONEST else SOME:
        for backward in directions(w):
            comparison = judge(backend, CheckSpec(w, CPU, backward), cache)
            assert comparison.passed, describe(comparison)


@pytest.mark.slow("makes many calls")
def test_the_honest_kernel_is_right_where_scores_are_large(cache):
    for w in SOME:
        for backward in directions(w):
            assert not is_wrong(KernelBackend("honest", Kernel()), w, backward, cache, INPUTS["magnitude"])


# -- what shows a mutant: of those that a call does not show, tests/invariants ------------------------------------------------


def call(backend, inputs):
    """Return out, lse and, where there are any, the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_(not inputs.workload.kv_pages) for t in (inputs.q, inputs.k, inputs.v)]
    out, lse = backend.prepare(inputs, backward=True)(*leaves)
    if inputs.workload.kv_pages:
        return [out, lse]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]


def reaching(mutant):
    """The covering workloads where a mutant applies."""
    return [w for w in COVERING if any(mutant.applies(w, backward) for backward in directions(w))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mutant", with_slow_ones_marked(m for m in MUTANTS if m.condition in INPUTS))
def test_a_mutant_is_wrong_where_it_says(mutant, cache):
    assert any(
        is_wrong(mutant.backend(), w, backward, cache, INPUTS[mutant.condition])
        for w in reaching(mutant)
        for backward in directions(w)
    )


@pytest.mark.one_in(16)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_right_where_it_does_not_apply(mutant, cache):
    for w in (named("edges-one-row"), named("smoke-softcap"), named("smoke-packed")):
        backend = mutant.backend()
        for backward in directions(w):
            assert mutant.applies(w, backward) or not is_wrong(backend, w, backward, cache)


#: Mutants whose calls with the same arguments, in the same order, do not always give the same bits.
RANDOM = frozenset(
    (
        "delta-read-before-it-is-written",
        "empty-rows-unwritten",
        "gradient-of-padding-unwritten",
        "grid-too-large",
        "last-row-tile-unwritten",
        "lse-unwritten",
        "nan-in-one-of-a-hundred-calls",
        "result-kept-by-address",
        "share-of-dk-lost",
        "share-of-out-lost",
        "split-merged-before-it-is-written",
        "values-of-previous-tile",
    )
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name not in RANDOM], ids=lambda mutant: mutant.name)
def test_a_deterministic_mutant_repeats_itself(mutant):
    w = reaching(mutant)[0]
    for one, other in zip(call(mutant.backend(), draw_inputs(w)), call(mutant.backend(), draw_inputs(w)), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
