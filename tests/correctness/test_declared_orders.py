"""What the field has both ways, said on the workload: head groups, bias and softcap, sinks' dtype, slopes per batch entry."""

from dataclasses import replace

import pytest
import torch
from judging import judged, spec_of
from reported_faults.judging import Case, check, check_invariants
from reported_faults.kernel import Attention

from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.kernel import honest_backend
from pytest_attn.workloads.workload import grouped, ungrouped

CPU = torch.device("cpu")
INTERLEAVED = Workload(20, 28, heads=6, kv_heads=2, head_dim=16, head_groups="interleaved", mask="causal-bottom-right")
BIAS_FIRST = Workload(20, heads=2, head_dim=16, bias="hqk", softcap=2.0, bias_before_softcap=True, mask="causal")
SINKS = Workload(20, heads=4, kv_heads=2, head_dim=16, sinks="float32", head_groups="interleaved")
SLOPES = Workload(12, 20, batch=3, heads=4, kv_heads=2, head_dim=16, alibi="batch", head_groups="interleaved")
PACKED = Workload(heads=4, kv_heads=2, head_dim=16, q_lens=(5, 9), mask="causal", alibi="batch", head_groups="interleaved")
PAGED = Workload(1, 30, batch=2, heads=4, kv_heads=2, head_dim=16, kv_pages=8, head_groups="interleaved")
ALL = (INTERLEAVED, BIAS_FIRST, SINKS, SLOPES, PACKED, PAGED)


def kernel_of(w, read_as=None, **leaves):
    """Return a fault-free kernel on the inputs of a workload, which it may take for another."""
    inputs = replace(draw_inputs(w), workload=read_as or w)
    return lambda q, k, v: Attention()(inputs, q, k, v, **leaves)[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("w", ALL[:4], ids=lambda w: w.id)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_kernel_that_takes_it_is_right(w, dtype):
    case = Case(w.replace(dtype=dtype), backward=True)
    check(Attention(), case)
    check_invariants(Attention(), case)


@pytest.mark.parametrize("w", ALL, ids=lambda w: w.id)
def test_backends_take_it_or_say_that_they_do_not(w):
    registry, took = Registry(), []
    for backend in (*(registry[name] for name in ("eager", "math", "sdpa", "flex")), honest_backend()):
        backward = not w.kv_pages and backend.name != "flex"
        spec = CheckSpec(w, CPU, backward, inputs=("structured",))
        if backend.obstacle(w, machine_of(CPU), backward) is None and backend.name != "flex":  # which would be compiled
            took.append(backend.name)
            assert judge(backend, spec, ReferenceCache()).passed, backend.name
    assert "honest" in took
    assert w.is_packed or "eager" in took


def test_grouping_is_undone():
    heads = torch.arange(6)[None]
    assert grouped(heads, INTERLEAVED).tolist() == [[0, 2, 4, 1, 3, 5]]
    assert ungrouped(grouped(heads, INTERLEAVED), INTERLEAVED).tolist() == heads.tolist()


@pytest.mark.parametrize(
    ("w", "read_as", "named"),
    [
        (INTERLEAVED, {"head_groups": "contiguous"}, "heads-in-neighboring-groups"),
        (INTERLEAVED.replace(head_groups="contiguous"), {"head_groups": "interleaved"}, "heads-interleaved"),
        (BIAS_FIRST, {"bias_before_softcap": False}, "softcap-before-bias"),
        (BIAS_FIRST.replace(bias_before_softcap=False), {"bias_before_softcap": True}, "softcap-after-bias"),
    ],
)
def test_the_other_way_is_found_and_named(w, read_as, named):
    assert judged(kernel_of(w, w.replace(**read_as)), spec_of(w)).faults == (named,)


def test_slopes_of_the_first_batch_entry_are_found_and_named():
    kernel = kernel_of(SLOPES, slopes=draw_inputs(SLOPES).alibi_slopes[0])
    assert judged(kernel, spec_of(SLOPES)).faults == ("alibi-slopes-of-first-batch-entry",)
