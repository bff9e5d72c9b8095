"""Every fault of rings.py with a case that shows it, and the identity by which it is named: "" where it is not."""

from functools import partial
from typing import NamedTuple

from exchanges import EmulatedTeam
from judging import spec_of
from rings import AllGather, Problem, Ring, Ulysses

from pytest_attn import Window, Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.guests.ranks.rank_faults import with_ranks
from pytest_attn.guests.ranks.ranked_executor import RankedCallable
from pytest_attn.guests.ranks.sharding import Sharding

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
    named: str
    workload: Workload = FULL
    ranks: int = 2
    shard: str = "contiguous"


FAULTY = [
    Faulty(Ring, "local causal", "mask-by-positions-in-shards", CAUSAL),
    Faulty(Ring, "causal on the diagonal only", "mask-within-own-chunk-only", CAUSAL, 4),
    Faulty(Ring, "positions of contiguous shards", "mask-of-other-shards", CAUSAL, 4, "head-tail"),
    Faulty(Ring, "sources counted backwards", "mask-of-opposite-direction", CAUSAL, 4),
    Faulty(Ring, "merged in base 2", "chunks-merged-in-base-2"),
    Faulty(Ring, "merged by equal weights", "chunks-averaged"),
    Faulty(Ring, "chunks added up", "chunks-added-up"),
    Faulty(Ring, "NaN of rows without keys", "", BANDED),
    Faulty(Ring, "exp of lse itself", "", STEEP),
    Faulty(Ring, "lse in bfloat16", "", FULL, 4),
    Faulty(Ring, "stale keys", "own-keys-only"),
    Faulty(Ring, "stale keys", "stale-keys", CAUSAL.replace(mask=Window(40, 40))),
    Faulty(Ring, "stale values", "stale-values"),
    Faulty(Ring, "last chunk skipped", "rank-keys-missing", FULL, 4),
    Faulty(Ring, "own chunk twice", "rank-keys-twice"),
    Faulty(Ring, "rank 1 never receives", "own-keys-only", FULL, 4),
    Faulty(Ring, "rank 0 right, others not", ""),
    Faulty(Ring, "head and tail swapped", "own-chunks-swapped", CAUSAL, 2, "head-tail"),
    Faulty(Ring, "tail of uneven shards", "shard-tails-missing", UNEVEN, 4),
    Faulty(Ring, "lse of the own chunk in backward", "lse-of-own-chunk"),
    Faulty(Ring, "D left out", ""),
    Faulty(Ring, "stale keys in backward", "stale-keys-in-backward"),
    Faulty(Ring, "dq of one step dropped", "gradient-without-a-rank", FULL, 4),
    Faulty(Ring, "dk and dv not reduced", "gradient-not-reduced"),
    Faulty(Ring, "remote dk and dv twice", "gradient-of-others-twice"),
    Faulty(Ring, "dk and dv stay with the last rank", "gradient-at-wrong-rank", FULL, 4),
    Faulty(Ring, "gradients divided by the ranks", "gradient-averaged-over-ranks"),
    Faulty(Ring, "gradients reduced twice", "gradient-reduced-twice", FULL, 4),
    Faulty(Ring, "dv of rank 0 alone", "gradient-zero"),
    Faulty(AllGather, "gathered in reverse order", "chunks-reversed", CAUSAL),
    Faulty(AllGather, "values of the next rank", "values-of-another-rank"),
    Faulty(AllGather, "last rank missing", "rank-keys-zero", FULL, 4),
    Faulty(AllGather, "rows begin at 0 on each rank", "mask-as-if-rows-begin-sequence", CAUSAL),
    Faulty(AllGather, "order not restored", "mask-of-keys-in-order", CAUSAL, 2, "head-tail"),
    Faulty(AllGather, "dk and dv of own rows only", "gradient-not-reduced"),
    Faulty(AllGather, "mean over ranks", "gradient-averaged-over-ranks", FULL, 4),
    Faulty(AllGather, "reduced and not scattered home", "gradient-at-wrong-rank", FULL, 4),
    Faulty(Ulysses, "order of rows not restored", "", CAUSAL, 2, "head-tail"),
    Faulty(Ulysses, "heads returned in reverse order", ""),
    Faulty(Ulysses, "key head of the wrong group", ""),
    Faulty(Ulysses, "bias of the first heads", "", BIASED),
    Faulty(Ulysses, "first of the group only", ""),
    Faulty(Ulysses, "mean over the group", "gradient-averaged-over-group"),
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
    return diagnose(comparison, keep_evidence=True, locate=partial(with_ranks, sharding=sharding))
