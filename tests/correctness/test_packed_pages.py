"""Packed queries over keys in pages: the reference, and faults with pages and lengths."""

import pytest
import torch

from pytest_attn import Machine, Pages, Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.precision import precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import KernelBackend, honest_backend
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
W = Workload(q_lens=(5, 0, 1, 17), kv_lens=(64, 20, 33, 17), kv_pages=Pages(16), heads=4, kv_heads=2, head_dim=16).replace(
    mask="causal-bottom-right"
)
LENGTHS = [m for m in MUTANTS if m.kind == "lengths" and m.applies(W, False) and m.condition == "call"]


@pytest.fixture(scope="module")
def cache():
    return ReferenceCache()


@pytest.mark.parametrize("options", [{}, {"alibi": True, "sinks": True}, {"softcap": 2.0, "mask": None}], ids=str)
def test_exact_attention_is_that_of_packed_keys(options):
    names = {"name": "one", **options}
    packed, paged = W.replace(kv_pages=None, **names), W.replace(**names)
    one, other = (compute_reference(draw_inputs(w), precision_named("flash")).tensors for w in (packed, paged))
    for name in ("out", "lse"):
        torch.testing.assert_close(one[name].value, other[name].value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one["out"].tau, other["out"].tau)


def test_an_honest_kernel_is_right_and_keeps_the_invariants(cache):
    spec = CheckSpec(W, CPU, declared=Declaration(returns_lse=True))
    subject = spec.subject(Registry(), honest_backend())
    assert judge(subject, spec, cache).passed
    report = judge_invariants(subject, spec, cache, ("poison", "leak", "options", "equivalence"), None)
    assert report.passed
    assert {finding.outcome for finding in report.findings} == {"passed"}


@pytest.mark.parametrize("mutant", LENGTHS, ids=lambda mutant: mutant.name)
def test_faults_of_lengths_and_pages_are_found(mutant, cache):
    spec = CheckSpec(W, CPU, inputs=("structured",))
    assert not judge(spec.subject(Registry(), KernelBackend(mutant.name, mutant.kernel())), spec, cache).passed


def test_the_faults_are_those_of_pages():
    assert len(LENGTHS) >= 8
    assert {"pages-of-first-sequence", "newest-key-not-seen", "last-page-skipped"} <= {m.name for m in LENGTHS}


SERVING = {
    "packed pages": (W.replace(head_dim=64, kv_pages=256), {"flash2", "flashinfer_fa2", "flashinfer_fa3"}),
    "HND": (Workload(1, 64, head_dim=64, kv_pages=Pages(256, "HND")), {"eager", "flashinfer_fa2", "flashinfer_fa3"}),
    "fused": (Workload(1, 64, head_dim=64, kv_pages=Pages(256, fused=True)), {"eager"}),
    "left": (Workload(4, kv_lens=(40, 17), head_dim=64, pad="left"), {"eager"}),
    "cached": (Workload(4, cached=40, head_dim=64, mask="causal-bottom-right"), {"kv_cache", "flash2_kvcache"}),
    "cached pages": (Workload(4, cached=40, head_dim=64, kv_pages=256, mask="causal-bottom-right"), set()),
}


@pytest.mark.parametrize(("workload", "able"), SERVING.values(), ids=SERVING)
def test_backends_refuse_what_they_cannot_say(workload, able):
    machine, registry = Machine("cpu", "CPU", None, "cpu", 1 << 36, 1, "2.13.0"), Registry()
    taken = {name for name in registry.names if not registry[name].unsupported_because(workload, machine)}
    assert taken == able
