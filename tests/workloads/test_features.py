"""The group `features` is what benchmarks/features.py generates, and has every pair of options that a kernel can take."""

import sys
from itertools import combinations
from pathlib import Path

import pytest
from judging import judged
from reported_faults.judging import CPU, Case, check, check_invariants
from reported_faults.kernel import Attention, KernelBackend

from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads import catalog
from pytest_attn.workloads.workload import Workload, sequence_lengths

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import features

REFERENCES = ReferenceCache()
GROUP = catalog.builtin_catalog().select("features")


def pairs_of(workloads):
    return {pair for w in workloads for pair in combinations(sorted(features.words_of(w)), 2)}


@pytest.mark.slow("draws workloads")
def test_the_catalog_has_what_the_script_generates():
    covered = set().union(*map(features.targets_of, features.own()))
    assert features.generated(covered) == catalog._pairs(), "python benchmarks/features.py prints the lines of the catalog"


@pytest.mark.parametrize("name", features.KERNELS)
def test_a_kernel_is_given_every_pair_that_it_can_take(name):
    takes = features.KERNELS[name]
    able = set(features.smallest(takes))
    assert len(able) >= 30
    assert not able - pairs_of(filter(takes, GROUP))


def test_a_pair_that_is_in_no_workload_is_taken_by_no_kernel_or_refused_by_the_workload():
    missing = set(combinations(sorted(features.FACTOR_OF), 2)) - pairs_of(GROUP)
    legal = {pair: words for pair, words in features.rows_with_a_pair() if pair in missing}
    assert missing - set(legal), "a workload has one mask, so some pairs are in none"
    for pair, words in legal.items():
        takers = [name for name, takes in features.kernels().items() if takes(Workload(**features.fields_of(words)))]
        assert not takers, (pair, takers)


HAS = {
    "fp8 and int8": lambda w: w.kv_dtype == "int8" or w.dtype == "float8_e4m3fn",
    "packed fp8": lambda w: w.is_packed and w.is_quantized,
    "v in k": lambda w: w.v_in_k,
    "dropout": lambda w: w.dropout,
    "padding on the left": lambda w: w.pad == "left",
    "ALiBi per batch entry": lambda w: w.alibi == "batch",
    "a dtype of sinks": lambda w: isinstance(w.sinks, str) and w.sinks != w.dtype,
    "fused pages": lambda w: w.kv_pages and w.kv_pages.fused,
    "sliced pages": lambda w: w.kv_pages and w.kv_pages.sliced,
    "pages of 1": lambda w: w.kv_pages and w.kv_pages.size == 1,
    "pages of 128": lambda w: w.kv_pages and w.kv_pages.size == 128,
    "pages with a window": lambda w: w.kv_pages and w.mask and w.mask.kind == "window",
    "pages with a soft-cap": lambda w: w.kv_pages and w.softcap,
    "cached in pages": lambda w: w.cached and w.kv_pages,
    "cached in pages, as servers append": lambda w: (
        features.words_of(w) == {"cached", "paged", "causal-bottom-right", "grouped heads", "q < k"}
    ),
    "unequal prefixes": lambda w: w.cached and len(set(w.cached)) > 1,
    "cached with a window": lambda w: w.cached and w.mask and w.mask.kind == "window",
    "padded with fewer queries": lambda w: w.kv_lens and not w.is_packed and not w.kv_pages and 1 < w.q_len < w.kv_len,
    "padded with fewer keys": lambda w: w.kv_lens and not w.is_packed and not w.kv_pages and w.q_len > w.kv_len,
    "packed with an empty sequence": lambda w: (
        w.packs_keys and (0, 0) not in sequence_lengths(w) and 0 in w.q_lens + w.kv_lens
    ),
    "packed with one sequence": lambda w: w.packs_keys and w.batch == 1,
    "one query with sinks": lambda w: w.q_len == 1 and w.kv_len > 200 and w.sinks,
    "one query with ALiBi": lambda w: w.q_len == 1 and w.kv_len > 200 and w.alibi,
    "one query past a split of 256": lambda w: w.q_len == 1 and w.kv_len == 257,
    "one query past a split of 512": lambda w: w.q_len == 1 and w.kv_len == 513,
    "a bias at 128": lambda w: w.bias and w.q_len == w.kv_len == 128,
    **{f"{n} queries": lambda w, n=n: w.q_len == n for n in (31, 33, 63, 65, 127, 129)},
}


@pytest.mark.parametrize("what", HAS)
def test_a_workload_has(what):
    assert any(HAS[what](w) for w in GROUP)


def within_the_batch(t):
    """Return a tile with its rows and keys counted over all packed sequences: fewer before it have what is not packed."""
    places = (range(part.start + first, part.stop + first) for part, first in ((t.rows, t.e.row), (t.keys, t.e.key)))
    return t._replace(**dict(zip(("rows", "keys"), places, strict=True)))


class Slipped(Attention):
    """Has one option wrong behind the first sequence: it takes places in the batch for those in a sequence, or forgets it."""

    def __init__(self, option):
        super().__init__()
        self.option = option

    def slips(self, t, *options):
        return self.option in options and t.e.b > 0

    def distance(self, t):
        return super().distance(within_the_batch(t) if self.slips(t, "places of alibi") else t)

    def score_mod(self, t, x):
        return (
            x
            if self.slips(t, "score_mod")
            else super().score_mod(within_the_batch(t) if self.slips(t, "places of score_mod") else t, x)
        )

    def slopes(self, t, slopes):
        if self.slips(t, "ALiBi per batch entry") and slopes.dim() > 1:
            return slopes[0]
        return super().slopes(t, slopes) * (not self.slips(t, "alibi"))

    def visible(self, t):
        if self.slips(t, "causal", "causal-bottom-right", "window", "mask_mod", "boolean", "neighborhood", "documents"):
            return t.j >= 0
        return super().visible(t)

    def in_other_mask(self, t):
        return super().in_other_mask(within_the_batch(t) if self.slips(t, "places of mask_mod") else t)

    def capped(self, t, x):
        return x if self.slips(t, "softcap") else super().capped(t, x)

    def logits(self, t):
        scale = self.scale(t.call) * t.w.head_dim**0.5 if self.slips(t, "scale") else 1
        return super().logits(t) / scale

    def bias(self, t, bias):
        return super().bias(t, bias) * (not self.slips(t, "bias"))


OF_ONE = ["causal", "causal-bottom-right", "window", "mask_mod", "boolean", "neighborhood", "documents", "softcap", "scale"]
OF_ONE += ["bias", "alibi", "ALiBi per batch entry", "score_mod"]
SLIPS = [(option, layout) for option in OF_ONE for layout in ("padded", "left-padded", "packed", "paged", "packed pages")]
SLIPS += [(f"places of {option}", "packed") for option in ("alibi", "score_mod", "mask_mod")]


@pytest.mark.one_in(36)
@pytest.mark.parametrize(("slip", "layout"), SLIPS)
def test_an_option_that_only_the_first_sequence_has_right_is_seen_in_every_layout(slip, layout):
    option = slip.removeprefix("places of ")
    having = [w for w in GROUP if {option, layout} <= features.words_of(w) and not w.is_quantized and not w.dropout]
    if not having:
        assert (*sorted((option, layout)),) not in features.smallest(features.KERNELS["emulated"])
        return
    made = KernelBackend(slip, Slipped(slip))
    assert any(not judged(made, CheckSpec(w, CPU), REFERENCES).passed for w in having if w.batch > 1)


@pytest.mark.one_in(84)
@pytest.mark.parametrize("w", GROUP, ids=lambda w: w.id)
def test_a_kernel_without_a_fault_is_right(w):
    for backward in (False, True)[: 1 if w.has_no_gradient_because else 2]:
        check(Attention(), Case(w, backward))
        check_invariants(Attention(), Case(w, backward))
