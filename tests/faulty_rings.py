"""Every fault of rings.py with a case that shows it, and words of its hint: "" where nothing about ranks explains it."""

from typing import NamedTuple

from exchanges import EmulatedTeam
from judging import spec_of
from rings import AllGather, Problem, Ring, Ulysses

from pytest_attn import Window, Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.ranks.subject import RankedCallable
from pytest_attn.workloads.sharding import Sharding

FULL = Workload(64, heads=4, kv_heads=2, head_dim=32)
CAUSAL = FULL.replace(mask="causal")
UNEVEN = Workload(66, heads=4, kv_heads=2, head_dim=32)
BANDED = Workload(48, 96, heads=4, kv_heads=2, head_dim=32, mask=Window(8, 0))
BIASED = Workload(64, heads=4, head_dim=32, bias="hqk")
#: lse beyond what float32's exp can take
STEEP = FULL.replace(scale=12.0)


class Faulty(NamedTuple):
    kernel: type
    fault: str
    words: str
    workload: Workload = FULL
    ranks: int = 2
    shard: str = "contiguous"


FAULTY = [
    Faulty(Ring, "local causal", "masked by positions within the shards", CAUSAL),
    Faulty(Ring, "causal on the diagonal only", "masked within its own chunk only", CAUSAL, 4),
    Faulty(Ring, "positions of contiguous shards", "masked as if shards were contiguous", CAUSAL, 4, "head-tail"),
    Faulty(Ring, "sources counted backwards", "chunks came in the opposite direction", CAUSAL, 4),
    Faulty(Ring, "merged in base 2", "as if it were one of base 2"),
    Faulty(Ring, "merged by equal weights", "the mean of the chunks' results"),
    Faulty(Ring, "chunks added up", "the sum of the chunks' results"),
    Faulty(Ring, "NaN of rows without keys", "", BANDED),
    Faulty(Ring, "exp of lse itself", "", STEEP),
    Faulty(Ring, "lse in bfloat16", "", FULL, 4),
    Faulty(Ring, "stale keys", "out of all ranks is attention to its own keys only"),
    Faulty(Ring, "stale keys", "reads its own keys and values at every step", CAUSAL.replace(mask=Window(40, 40))),
    Faulty(Ring, "stale values", "reads its own values at every step"),
    Faulty(Ring, "last chunk skipped", "out of rank 1 is attention without the keys of rank 2", FULL, 4),
    Faulty(Ring, "own chunk twice", "out of rank 1 is attention with the keys of rank 1 twice"),
    Faulty(Ring, "rank 1 never receives", "out of rank 1 is attention to its own keys only", FULL, 4),
    Faulty(Ring, "rank 0 right, others not", ""),
    Faulty(Ring, "head and tail swapped", "its two chunks are swapped", CAUSAL, 2, "head-tail"),
    Faulty(Ring, "tail of uneven shards", "to the first 16 keys of each rank", UNEVEN, 4),
    Faulty(Ring, "lse of the own chunk in backward", "with the lse of the rank's own chunk"),
    Faulty(Ring, "D left out", ""),
    Faulty(Ring, "stale keys in backward", "a backward pass that reads its own keys"),
    Faulty(Ring, "dq of one step dropped", "dq of rank 1 is that without the keys of rank 2", FULL, 4),
    Faulty(Ring, "dk and dv not reduced", "dk of all ranks is that of its own rows only: not reduced"),
    Faulty(Ring, "remote dk and dv twice", "the rows of all other ranks twice"),
    Faulty(Ring, "dk and dv stay with the last rank", "dk of rank 1 is that of rank 2: sent to the wrong rank", FULL, 4),
    Faulty(Ring, "gradients divided by the ranks", "the mean over 2 ranks"),
    Faulty(Ring, "gradients reduced twice", "reduced twice over 4 ranks", FULL, 4),
    Faulty(Ring, "dv of rank 0 alone", "dv of rank 1 is 0"),
    Faulty(AllGather, "gathered in reverse order", "chunks in reverse order", CAUSAL),
    Faulty(AllGather, "values of the next rank", "with the values of rank r + 1"),
    Faulty(AllGather, "last rank missing", "zeros in the place of the keys and values of rank 3", FULL, 4),
    Faulty(AllGather, "rows begin at 0 on each rank", "masked as if the rows of each rank began the sequence", CAUSAL),
    Faulty(AllGather, "order not restored", "as if gathered keys lay in the order of the sequence", CAUSAL, 2, "head-tail"),
    Faulty(AllGather, "dk and dv of own rows only", "not reduced over ranks"),
    Faulty(AllGather, "mean over ranks", "the mean over 4 ranks", FULL, 4),
    Faulty(AllGather, "reduced and not scattered home", "sent to the wrong rank", FULL, 4),
    Faulty(Ulysses, "order of rows not restored", "", CAUSAL, 2, "head-tail"),
    Faulty(Ulysses, "heads returned in reverse order", ""),
    Faulty(Ulysses, "key head of the wrong group", ""),
    Faulty(Ulysses, "bias of the first heads", "", BIASED),
    Faulty(Ulysses, "first of the group only", ""),
    Faulty(Ulysses, "mean over the group", "the mean over the 2 query heads of a group"),
]


def judged_over_ranks(kernel, workload, ranks, shard="contiguous", fault="", references=None, **options):
    """Return the comparison of a kernel of rings.py, over ranks that are threads."""
    sharding = Sharding(workload, shard, ranks)
    problem, spec = Problem.of(sharding), spec_of(workload, **{"backward": True, **options})
    team = EmulatedTeam(
        lambda exchange: kernel(exchange, problem, fault, spec.declared.has_lse), sharding, spec.layout, spec.declared.has_lse
    )
    callable_ = spec.subject(Registry(), lambda q, k, v: None, kernel.__name__)
    comparison = judge(RankedCallable(callable_, team, sharding), spec, references)
    return diagnose(comparison, spec.diagnosis_timeout, keep_evidence=True)
