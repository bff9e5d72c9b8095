"""Kernels over ranks that are right pass on every shard, world and workload; each planted fault is found, and named."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from faulty_rings import CAUSAL, FAULTY, FULL, judged_over_ranks
from judging import spec_of
from rings import HONEST, AllGather, Ring

from pytest_attn import Document, Workload
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.guests.ranks.rank_faults import faults_of_ranks, with_ranks
from pytest_attn.guests.ranks.sharding import SHARDS, Sharding

REFERENCES = ReferenceCache()
WORKLOADS = [
    CAUSAL.replace(q_len=65, kv_len=65),
    Workload(q_lens=(40, 17, 9), heads=4, kv_heads=1, head_dim=32, mask="causal"),
    Workload(48, 96, batch=2, heads=4, head_dim=32, mask="causal-bottom-right", kv_lens=(80, 96)),
    Workload(64, heads=4, head_dim=32, bias="hqk", softcap=20.0),
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.id)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_honest_kernels_pass(workload, shard, ranks):
    for kernel in HONEST:
        comparison = judged_over_ranks(kernel, workload, ranks, shard, references=REFERENCES, returns_lse=True)
        assert comparison.passed, describe(comparison)
        assert {row.name for row in comparison.tensors} == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.slow("makes many calls")
def test_every_number_of_ranks_is_as_good_as_one():
    for ranks in (1, 3, 8):
        assert judged_over_ranks(Ring, FULL.replace(mask=Document((40, 24))), ranks, references=REFERENCES).passed


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inputs", ["structured", "flat", "outlier"])
def test_gradients_may_be_rounded_with_every_step_of_a_ring(inputs):
    """As Transformer Engine sums them: in the dtype, each part rounded before it is added. It adds up over eight ranks."""

    class Rounded(Ring):
        sums = torch.bfloat16

    assert judged_over_ranks(Rounded, Workload(512, batch=2, heads=4), 8, references=REFERENCES, inputs=(inputs,)).passed


def test_tensors_may_have_rows_before_heads():
    """Emulated kernels take (batch, heads, rows, dim): this one is handed the other layout, and swaps it back."""

    class Swapped(AllGather):
        def __call__(self, q, k, v):
            return super().__call__(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    assert judged_over_ranks(Swapped, CAUSAL, 2, references=REFERENCES, layout="bshd").passed


@pytest.mark.one_in(8)
@pytest.mark.parametrize("faulty", FAULTY, ids=lambda faulty: f"{faulty.kernel.__name__}-{faulty.fault}")
def test_a_fault_is_found_and_named(faulty):
    kernel, fault, named, workload, ranks, shard = faulty
    comparison = judged_over_ranks(kernel, workload, ranks, shard, fault, REFERENCES)
    assert not comparison.passed
    assert "ranks" in [hint.label for hint in comparison.mismatch.hints]
    if named:
        assert named in comparison.faults
    else:
        hypotheses = faults_of_ranks(comparison.mismatch.row.name, Sharding(workload, shard, ranks))
        assert not {one.fault for one in hypotheses}.intersection(comparison.faults)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("faulty", FAULTY, ids=lambda faulty: f"{faulty.kernel.__name__}-{faulty.fault}")
def test_a_fault_is_named_where_results_and_references_are_on_a_gpu(faulty):
    kernel, fault, named, workload, ranks, shard = faulty
    comparison = judged_over_ranks(kernel, workload, ranks, shard, fault, REFERENCES)
    mismatch, device = comparison.mismatch, torch.device("cuda")
    spec = replace(spec_of(workload, backward=True), device=device)
    failed = mismatch.evidence.failed._replace(
        reference=REFERENCES.reference_of(spec, mismatch.row.distribution),
        tensors={name: t.to(device) for name, t in mismatch.evidence.failed.tensors.items()},
    )
    evidence = mismatch.evidence._replace(failed=failed, returned=[failed])
    there = replace(comparison, mismatch=replace(mismatch, hints=(), evidence=evidence))
    assert not named or named in diagnose(there, locate=partial(with_ranks, sharding=Sharding(workload, shard, ranks))).faults


def test_the_rank_that_is_wrong_is_named_with_its_rows():
    comparison = judged_over_ranks(Ring, FULL, 4, fault="rank 1 never receives", references=REFERENCES)
    text = describe(comparison)
    assert "rank 1 (of 4): all 16 rows, 16 to 31\n" in text
    assert "suggests   out of rank 1 is attention to its own keys only" in text
    assert "rank 2" not in text


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stale keys", "out of all ranks is attention to its own keys only"),
        ("last chunk skipped", "out of rank 1 is attention without the keys of rank 2"),
        ("dk and dv stay with the last rank", "dk of rank 1 is that of rank 2: sent to the wrong rank"),
    ],
)
def test_a_hint_says_of_which_ranks_it_is(fault, words):
    assert words in describe(judged_over_ranks(Ring, FULL, 4, fault=fault, references=REFERENCES))


class Misbehaving(AllGather):
    """What no result of a kernel may be, whatever its values."""

    def __call__(self, q, k, v):
        if self.fault.startswith("changes k") and self.rank == 1:
            with torch.no_grad():
                k.add_(1 if self.fault == "changes k" else torch.nan)
        out = super().__call__(q, k, v)
        if self.fault == "reads beyond its shard":
            longer = q.as_strided((*q.shape[:2], q.shape[2] + 1, q.shape[3]), q.stride())
            return out + 0 * longer[:, :, -1:]
        if self.fault == "whole everywhere":
            return self.whole(out)
        if self.fault == "whole, and other on rank 1":
            return self.whole(out) + 0.5 * (self.rank == 1)
        if self.fault == "heads and rows swapped":
            return out.transpose(1, 2)
        if self.fault == "another dtype":
            return out.double() if self.rank == 1 else out
        return out.detach() if self.fault == "no gradient" else out

    def whole(self, out):
        return torch.cat(self.exchange.all_gather(out), 2)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("changes k", r"rank 1: the callable changed its input k in place \(by up to 1"),
        ("changes k to NaN", r"rank 1: the callable changed its input k in place \(by up to nan"),
        ("heads and rows swapped", r"rank 0: out has shape \(1, 32, 4, 32\); expected \(1, 4, 32, 32\), its shard"),
        ("another dtype", "rank 1: out has dtype torch.float64; rank 0 returned torch.bfloat16"),
        ("no gradient", "rank 0: out carries no gradient"),
        ("whole, and other on rank 1", "out is whole on every rank, and differs between rank 0 and rank 1"),
    ],
)
def test_a_result_that_cannot_be_compared_names_its_rank(fault, text):
    with pytest.raises(AssertionError, match=text):
        judged_over_ranks(Misbehaving, FULL, 2, fault=fault, references=REFERENCES, backward=fault == "no gradient")


def test_what_lies_behind_a_shard_shows():
    comparison = judged_over_ranks(Misbehaving, FULL, 2, fault="reads beyond its shard", references=REFERENCES, backward=False)
    assert "holds" in describe(comparison)
    assert "NaN" in describe(comparison)


def test_a_result_may_be_whole_on_every_rank():
    assert judged_over_ranks(Misbehaving, FULL, 2, fault="whole everywhere", references=REFERENCES, backward=False).passed
