"""Each fault is named where it was planted, by its identity, and nothing is named where another fault was."""

import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from honest.variants import RoundedSum
from judging import FULL, judged
from planted_faults import PLANTED, judgment_of, summed_in_the_dtype
from reported_faults.judging import Case, check
from reported_faults.table import FAULTS as REPORTED
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Document, Neighborhood, Pages, Window, Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.precision import PRECISIONS, precision_named
from pytest_attn.correctness.comparison import Hint
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.diagnosis.attention_faults import attention_faults, near_misses
from pytest_attn.diagnosis.faults import FAULTS, PRECISION, RECOMPUTED, is_known
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend
from pytest_attn.suite.test_correctness import INPUTS
from pytest_attn.workloads.catalog import _pairs, builtin_catalog
from pytest_attn.workloads.inputs import draw_inputs

REFERENCES = ReferenceCache()
CPU = torch.device("cpu")
#: with few options each, as it takes to tell one fault from another
GROUPS = [w for group in ("features", "edges", "smoke") for w in builtin_catalog().select(group)]
PAIRS = _pairs()
SMALL = [w for w in GROUPS if not (w.dropout or w.is_quantized or w in PAIRS)]


# -- planted faults, and mutants -------------------------------------------------------------------------------------------


@pytest.mark.one_in(6)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found_and_named(planted):
    spec = CheckSpec(planted.workload, CPU, planted.backward, declared=Declaration(returns_lse=planted.returns_lse))
    comparison = judged(planted.kernel, spec)
    assert not comparison.passed
    assert judgment_of(comparison.mismatch.hints, planted.faults) == ("named" if planted.faults else "none")


#: mutants that have a name and get none on these workloads, or are not found by a check of one callable
UNNAMED = {
    *("values-read-with-keys-head-dim", "out-offset-wraps", "gradient-offset-wraps", "lse-unwritten"),
    *("expanded-read-as-contiguous", "innermost-stride-ignored"),
}
#: whose rows may by chance hold what another fault would leave there
UNWRITTEN = {"empty-rows-unwritten"}
NAMED = [m for m in MUTANTS if m.faults and m.name not in UNNAMED]


def hints_of(mutant, workload, backward):
    """Return what is said of a mutant on a workload; None where it passes."""
    try:
        comparison = judged(mutant.backend(), CheckSpec(workload, CPU, backward, INPUTS), REFERENCES)
    except ContractError as error:
        return (Hint(error.fault, str(error)),)
    return None if comparison.passed else comparison.mismatch.hints


@pytest.mark.one_in(137)
@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: f"{mutant.kind}-{mutant.name}")
def test_the_fault_of_a_mutant_is_named(mutant):
    """On one of the first three workloads that show it, and nothing else is on any of them."""
    backward = not any(mutant.applies(w, False) for w in SMALL)
    reached = (w for w in SMALL if mutant.applies(w, backward) and not (backward and w.has_no_gradient_because))
    found = (hints for w in reached if (hints := hints_of(mutant, w, backward)) is not None)
    judgments = [judgment_of(hints, mutant.faults) for hints in itertools.islice(found, 3)]
    assert "named" in judgments
    assert "wrong" not in judgments or mutant.name in UNWRITTEN


# -- other faults ----------------------------------------------------------------------------------------------------------


HONEST_OTHERWISE = {
    "noise": lambda q, k, v: (
        sdpa(q, k, v) * (1 + 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(1))).to(q.dtype)
    ),
    "a column": lambda q, k, v: sdpa(q, k, v) + torch.eye(64, dtype=q.dtype)[7],
    "rows shuffled": lambda q, k, v: sdpa(q, k, v)[:, :, torch.randperm(128, generator=torch.Generator().manual_seed(2))],
    "a random scale for each row": lambda q, k, v: sdpa(q * torch.linspace(0.5, 2, 128)[:, None].to(q.dtype), k, v),
    "values squared": lambda q, k, v: sdpa(q, k, v * v),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", HONEST_OTHERWISE)
def test_another_fault_is_given_no_name(name):
    comparison = judged(HONEST_OTHERWISE[name], CheckSpec(FULL, CPU))
    assert not comparison.passed
    assert comparison.faults == ()
    assert {hint.label for hint in comparison.mismatch.hints} <= {"scope"}


def test_a_factor_of_rows_that_rounding_cannot_make_asks_for_the_keys_of_the_denominator():
    factors = torch.linspace(1, 1.9, 128)[:, None]
    comparison = judged(lambda q, k, v: (sdpa(q, k, v).float() * factors).to(q.dtype), CheckSpec(FULL, CPU))
    (hint,) = comparison.mismatch.hints
    assert hint.fault == "denominator-off"
    assert hint.words.endswith("is the denominator that of all keys?")


@pytest.mark.parametrize(("step", "words"), [(8, "every 8 keys"), (1, "each key")])
def test_a_sum_that_is_rounded_often_is_named_with_how_often(step, words):
    comparison = judged(partial(summed_in_the_dtype, step=step), CheckSpec(FULL, CPU))
    (hint,) = comparison.mismatch.hints
    assert hint.fault == "sums-in-few-bits"
    assert f"is rounded to bfloat16 after {words}, and so is each of its terms" in hint.words


def test_a_sum_of_rounded_p_is_told_from_another_v():
    comparison = judged(KernelBackend("rounded", RoundedSum()), CheckSpec(FULL, CPU))
    assert comparison.mismatch.row.name == "lse"
    assert [hint.fault for hint in comparison.mismatch.hints] == ["precision-rounded_sum"]


class RoundedSinks(Kernel):
    """A kernel that takes float32 sinks as bfloat16."""

    def sinks(self, seq):
        sinks = super().sinks(seq)
        return None if sinks is None else sinks.bfloat16().float()


def test_sinks_that_are_rounded_are_named():
    workload = Workload(96, heads=4, head_dim=32, sinks=True, dtype="float32")
    comparison = judged(KernelBackend("rounded", RoundedSinks(), returns_lse=False), CheckSpec(workload, CPU))
    assert comparison.faults == ("sinks-rounded",)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "workload", "words"),
    [
        ("dropout-missing-in-dp", "dropout", "dq is that of a backward pass that recomputes P without dropout"),
        ("dv-without-the-factor-of-dropout", "dropout", "what dropout leaves is not divided by 1 - dropout"),
        ("window-one-row-off-for-several-queries", "paged-window", "kv_lens one too short, or a window one key too early"),
        ("window-one-row-off-for-several-queries", "window-packedpages-vink-hnd", "whose window stands one key too early"),
        ("pages-ignored-in-a-prefill", "paged-window", "that does not read the page table"),
        ("padding-on-the-left-seen", "boolean-decode-left-interleaved", "that ignores kv_lens and sees padding"),
        ("new-keys-not-attended", "cached", "without the new keys"),
        ("out-truncated", "smoke-full", ""),  # which is not that of another scale
    ],
)
def test_a_reported_fault_is_named(name, workload, words):
    (fault,) = (one for one in REPORTED if one.name == name)
    (w,) = builtin_catalog().select(workload if words == "" else f"features-{workload}")
    with pytest.raises(AssertionError) as error:
        check(fault.kernel(), Case(w, backward=bool(words) and w.has_no_gradient_because is None))
    hints = re.findall(r"suggests +(.*)", str(error.value))
    assert [words in hint for hint in hints] == [True] * bool(words)


# -- hypotheses ------------------------------------------------------------------------------------------------------------


VARIED = (
    Workload(70, 130, heads=4, kv_heads=2, head_dim=32, mask=Window(20, 3), sinks=True, softcap=4.0, bias="hqk"),
    Workload(70, 130, heads=4, kv_heads=2, head_dim=32, alibi=True, mask="causal-bottom-right"),
    Workload(96, heads=2, head_dim=40, v_head_dim=32, mask=Document((50, 46), causal=True), dtype="float16"),
    Workload(96, heads=2, head_dim=32, mask=Neighborhood((8, 12), (3, 5))),
    Workload(70, heads=2, head_dim=32, kv_lens=(70, 20), dtype="float32"),
    Workload(heads=4, kv_heads=2, head_dim=32, q_lens=(10, 0, 40), kv_lens=(70, 20, 30), mask="causal-bottom-right"),
    Workload(3, 100, batch=3, heads=4, kv_heads=2, kv_pages=Pages(16), kv_lens=(100, 0, 33)),
)


@pytest.mark.parametrize("workload", VARIED, ids=lambda w: w.id)
def test_faults_are_those_of_every_draw_and_each_is_an_attention(workload):
    """What was thought of with one draw of inputs can be computed with another."""
    of_one, of_other = (draw_inputs(workload, name) for name in ("structured", "flat"))
    faults = list(attention_faults(workload, of_one))
    assert [fault.words for fault in faults] == [fault.words for fault in attention_faults(workload, of_other)]
    assert len(faults) > 10
    for fault in faults:
        assert fault.fault in FAULTS
        inputs, other = fault.attention(of_other)
        out = compute_reference(inputs, precision_named("flash"), workload=other).tensors["out"].value
        assert out.isfinite().all(), fault.words


def test_a_near_miss_of_a_mask_hides_or_shows_something():
    w = Workload(70, 130, heads=2, head_dim=32, mask=Window(20, 3))
    inputs = draw_inputs(w)
    index = torch.meshgrid(*(torch.arange(n) for n in (1, 2, 70, 130)), indexing="ij")
    honest = inputs.mask_mod()(*index)
    changed = [fault for fault, _, mask in near_misses(w, inputs) if not (mask(*index) & (index[3] < 130)).equal(honest)]
    assert "window-left-one-too-long" in changed
    assert len(changed) > 15


# -- identities ------------------------------------------------------------------------------------------------------------


def test_an_identity_is_known_wherever_it_stands():
    of_mutants = {fault for mutant in MUTANTS for fault in mutant.faults}
    assert [fault for fault in of_mutants if not is_known(fault)] == []
    assert [fault for planted in PLANTED for fault in planted.faults if not is_known(fault)] == []
    assert is_known(f"{RECOMPUTED}mask-ignored")
    assert not is_known("a-fault-that-nobody-knows")
    assert {f.removeprefix(PRECISION) for f in of_mutants if f.startswith(PRECISION)} <= PRECISIONS.keys()


def test_mutants_share_identities_with_hints_and_no_code():
    """Or what is said of a mutant would not measure the hints. That no hint knows of a mutant is seen in test_layers."""
    rooms = Path(pytest_attn.__file__).parent
    imported = {
        name
        for path in (rooms / "guests" / "mutants").glob("*.py")
        for name in re.findall(r"from (pytest_attn\.\S+) import", path.read_text())
    }
    assert [name for name in imported if name.startswith("pytest_attn.diagnosis")] == ["pytest_attn.diagnosis.faults"]
    assert not re.search(
        r"^(from|import) (?!__future__|collections|pytest_attn.seam)", (rooms / "diagnosis" / "faults.py").read_text(), re.M
    )


def test_every_fault_of_the_list_stands_in_the_code_that_names_it():
    root = Path(pytest_attn.__file__).parent
    sources = [path for room in ("diagnosis", "correctness", "workloads", "guests") for path in (root / room).rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources if path.name != "faults.py")
    stems = re.findall(r'f"([a-z0-9-]+)\{', code)
    unsaid = [fault for fault in FAULTS if f'"{fault}"' not in code and not fault.startswith(tuple(stems))]
    assert unsaid == []
