"""Long workloads: what is looked at, that faults at borders are found there, and that short ones stay whole."""

import dataclasses
import math

import pytest
import torch
from judging import causal, with_gradients
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Window, Workload, draw_inputs
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import obstacle_of_any
from pytest_attn.correctness import budget, call, reference
from pytest_attn.correctness.judge import _Judgment, compare_all, judge
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads import distributions, positions
from pytest_attn.workloads.catalog import LONG_GROUPS, builtin_catalog
from pytest_attn.workloads.distributions import LongNeedles, edge_targets
from pytest_attn.workloads.masks import interval, intervals, visible_pairs

CPU = torch.device("cpu")
S = 768
CAUSAL = Workload(S, heads=2, head_dim=32, mask="causal", name="long-enough")
GPU = Machine("cuda:0", "a GPU", (9, 0), "sm90", 40 << 30, 1, "2.11.0")
HOST = Machine("cpu", "a CPU", None, "", 1 << 40, 1, "2.11.0")


@pytest.fixture
def few(monkeypatch):
    """Sequences of some hundred tokens count as long, and 64 of their rows are looked at."""
    for module in (positions, distributions):
        monkeypatch.setattr(module, "sampled_positions", lambda length, most=64, far=(): SAMPLED(length, 64, far))
        monkeypatch.setattr(module, "borders", lambda length, most=64: BORDERS(length, 64))
    monkeypatch.setattr(positions, "LONG_PAIRS", 1 << 16)
    monkeypatch.setattr(reference, "_FULL_ELEMENTS", {"cpu": 1 << 18})
    monkeypatch.setattr(reference, "_SAMPLED_ROWS", 64)


SAMPLED, BORDERS = positions.sampled_positions, positions.borders


def without_key(key):
    """Causal attention that loses one key, for all rows but the key's own."""

    def lossy(q, k, v):
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        mask[key + 1 :, key] = False
        return sdpa(q, k, v, attn_mask=mask)

    return lossy


def compared(fn, workload=CAUSAL, **asked):
    spec = CheckSpec(workload, CPU, declared=Declaration(precision="torch_cpu"), **asked)
    return judge(spec.subject(Registry(), fn), spec, ReferenceCache())


# -- what is looked at -----------------------------------------------------------------------------------------------------


def test_the_ends_both_sides_of_every_border_and_random_rows_are_looked_at():
    length = (1 << 20) + 37
    found = set(positions.sampled_positions(length))
    assert {0, 1, length - 2, length - 1, 1 << 20, (1 << 20) - 1} <= found
    for part in range(1, 16):  # 2, 4 and 8 ranks, with two chunks each
        assert {part * length // 16 - 1, part * length // 16} <= found
    tiles = [p for p in positions.borders(length) if p % 128 == 0]
    assert len(tiles) > 500
    assert {side for p in tiles for side in (p - 1, p)} <= found
    assert len({p for p in found if p % 128 not in (0, 127)}) > 900
    assert 1800 < len(found) < 2300
    assert positions.sampled_positions(2048) == list(range(2048))


def test_rows_at_offsets_that_leave_32_bits_are_looked_at():
    w = Workload(1 << 20, heads=32, kv_heads=8, head_dim=128, mask="causal")
    far = set(positions.far_positions(w, w.heads, w.q_len, w.head_dim))
    by_rows, fused = 2**31 // (32 * 128), -(-(2**31) // (48 * 128))
    assert {by_rows - 1, by_rows, fused - 1, fused, 2**31 // w.kv_len} <= far
    assert len(far) < 100
    assert far <= set(positions.sampled_positions(w.q_len, far=tuple(far)))
    assert not positions.far_positions(Workload(4096, heads=2), 2, 4096, 64)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, "causal", Window(300, 0)])
def test_every_border_is_a_needle_of_a_row_that_is_looked_at(few, mask, heads):
    w = CAUSAL.replace(mask=mask, heads=heads)
    long = LongNeedles(w, S, S)
    aimed = long.targets(long.looked_at)
    assert set(long.borders.tolist()) <= set(aimed.flatten().tolist())
    assert {0, 127, 128, S - 1} <= set(long.borders.tolist())
    first, end = intervals(w.plain_mask, long.looked_at, S, S)
    assert float(((aimed >= first) & (aimed < end)).float().mean()) > 0.75  # the others are forbidden, or have none


def test_a_needle_has_a_large_share_of_its_row(few):
    inputs, long = draw_inputs(CAUSAL), LongNeedles(CAUSAL, S, S)
    scores = (inputs.q.double() @ inputs.k.double().mT) / math.sqrt(32)
    scores.masked_fill_(torch.ones(S, S).triu(1).bool(), -math.inf)
    rows = long.looked_at[long.looked_at > 128]
    targets = long.targets(rows)
    p = scores.softmax(-1)[0][:, rows].gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    seen = (targets >= 0) & (targets <= rows)
    assert float(p[seen].median()) > 0.3


def test_short_workloads_have_the_needles_that_they_had():
    before = Workload(128, heads=2)
    assert not positions.has_long_sequences(before)
    assert all(
        not positions.has_long_sequences(w) for g in ("smoke", "edges", "features") for w in builtin_catalog().select(g)
    )
    rows = torch.arange(0, 12, 2)
    for mask, edges in (("causal", [0, 2, 0, 7, 8, 39]), (None, [0, 39, 0, 6, 8, 39]), (Window(5, 7), [0, 9, 0, 14, 2, 39])):
        span = intervals(Workload(40, mask=mask).plain_mask, rows, 40, 40)
        assert edge_targets(rows, span, 40, 40).tolist() == edges
    assert edge_targets(rows, None, 40, 40).tolist() == [0, 39, 0, 6 * 7919 % 40, 8, 39]


@pytest.mark.parametrize(
    "mask", ["causal", "causal-bottom-right", Window(3, 0), Window(0, 4), Window(None, 2), Window(2, None)]
)
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (17, 17), (1, 30), (30, 1)])
def test_intervals_and_pairs_are_those_of_each_row(mask, lengths):
    plain = Workload(*lengths, mask=mask).plain_mask
    each = [interval(plain, row, *lengths) for row in range(lengths[0])]
    first, end = intervals(plain, torch.arange(lengths[0]), *lengths)
    assert list(zip(first.tolist(), end.tolist(), strict=True)) == each
    assert visible_pairs(plain, *lengths) == sum(stop - start for start, stop in each)


# -- what is found ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_an_honest_kernel_passes_and_the_counts_are_said(few, backward):
    comparison = compared(causal, backward=backward)
    assert comparison.passed
    rows, length = comparison.sampled["rows"]
    assert 60 < rows < 150
    assert length == S
    assert ("keys" in comparison.sampled) == backward


@pytest.mark.parametrize("key", [0, 127, 384, 639])
def test_one_key_that_is_lost_at_a_border_is_found(few, key):
    comparison = compared(without_key(key), inputs=("structured",))
    assert not comparison.passed
    assert comparison.mismatch is not None
    assert comparison.worst.name == "out"


def last_tile_cut(q, k, v):
    out = causal(q, k, v).clone()
    full = S // 512 * 512
    out[:, :, full:] = sdpa(q[:, :, full:], k[:, :, :full], v[:, :, :full])
    return out


def keys_wrap(q, k, v):
    at = torch.arange(S)
    at = torch.where(at < 500, at, at - 500)  # as a fused projection's offsets do in int32
    return causal(q, k[:, :, at], v[:, :, at])


FAULTS = {"last tile cut": last_tile_cut, "offsets wrap": keys_wrap}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(few, fault):
    assert not compared(fault, inputs=("structured",)).passed


# a kernel that has learned which rows are always looked at, and computes these alone


def rows_known():
    return torch.tensor(positions.sampled_positions(S))


def guessed(full, known):
    """Keep what is looked at, and put something like it everywhere else."""
    out = full.roll(1, 2)
    out[:, :, known] = full[:, :, known]
    return out


def learned(*names):
    """Return attention that is right where it is looked at: of the gradients that are named, or of out."""

    def gradients_of(gradients, dout):
        found = dict(zip(("dq", "dk", "dv"), gradients(dout), strict=True))
        return tuple(guessed(g, rows_known()) if name in names else g for name, g in found.items())

    def attention(q, k, v):
        out = with_gradients(gradients_of, causal)(q, k, v)
        return guessed(out, rows_known()) if "out" in names else out

    return attention


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_rows_that_are_always_looked_at_are_not_enough(few, name):
    comparison = compared(learned(name), backward=name != "out")
    assert [row.name for row in comparison.tensors if not row.passed][:1] == [name]
    wrong = comparison.mismatch.location.rows.found
    assert not set(wrong) & set(rows_known().tolist())
    assert wrong  # which a message names


def test_each_call_has_rows_of_its_own_that_are_looked_at(few):
    references, spec = ReferenceCache(), CheckSpec(CAUSAL, CPU)
    subject = spec.subject(Registry(), learned("out"))
    one, other = (judge(subject, spec, references).mismatch.location.rows.found for _ in range(2))
    assert one != other
    assert references.computed == len(spec.inputs)


def test_whether_dp_was_rounded_is_asked_of_drawn_rows_too(few, monkeypatch):
    looked_at, compare = [], _Judgment._compared

    def noted(self, distribution, found, tensors):
        looked_at.append(set(found.tensors["dq"].rows.tolist()) - set(rows_known().tolist()))
        return compare(self, distribution, found, tensors)

    monkeypatch.setattr("pytest_attn.correctness.judge.may_round_dp", lambda *_: True)
    monkeypatch.setattr(_Judgment, "_compared", noted)
    compared(causal, backward=True)
    assert len(looked_at) > 1
    assert all(looked_at)


def test_rows_that_are_asked_for_are_looked_at(few):
    """As those are that a failure has named."""

    def one_wrong(q, k, v):
        out = causal(q, k, v)
        out[:, :, 333] += 1
        return out

    spec = CheckSpec(CAUSAL, CPU, declared=Declaration(precision="torch_cpu"))
    for _ in range(4):
        comparison = judge(spec.subject(Registry(), one_wrong), spec, ReferenceCache(rows=(333,)))
        assert comparison.mismatch.location.rows.found == (333,)


def test_a_result_that_changes_later_is_found_by_its_fingerprint(few, monkeypatch):
    monkeypatch.setattr(call, "_LARGE", 1)
    memory = {}

    def reuses_memory(q, k, v):
        out = causal(q, k, v)
        return memory.setdefault("out", out.clone()).copy_(out)

    assert compared(causal).passed
    comparison = compared(reuses_memory)
    assert not comparison.passed
    assert comparison.mismatch.hints[0].label == "state"


def test_fingerprints_tell_one_bit_and_two_elements_that_change_places(monkeypatch):
    monkeypatch.setattr(call, "_PART", 100)
    one = torch.randn(2, 3, 70, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = call.fingerprint(one)
    assert call.fingerprint(one.transpose(1, 2).contiguous().transpose(1, 2)) == same
    other = one.clone()
    other.view(torch.int16)[1, 2, 69, 7] ^= 1
    swapped = one.clone()
    swapped[0, 0, 0, 0], swapped[1, 0, 0, 0] = one[1, 0, 0, 0].clone(), one[0, 0, 0, 0].clone()
    assert len({same, call.fingerprint(other), call.fingerprint(swapped)}) == 3


# -- memory, selection, skips ----------------------------------------------------------------------------------------------


def test_inputs_are_let_go_and_drawn_again(few):
    references = ReferenceCache()
    made = references.reference_of(CheckSpec(CAUSAL, CPU))
    before = made.inputs.q.clone()
    assert made.inputs.dout.untyped_storage().nbytes() <= 8  # no gradient is asked for
    made.free_inputs()
    assert made._inputs is None
    assert made.nbytes < before.nbytes * 4
    assert torch.equal(made.inputs.q, before)
    short = references.reference_of(CheckSpec(Workload(64, heads=2), CPU))
    short.free_inputs()
    assert short._inputs is not None
    assert not short.is_sampled
    assert short.sampled == {}


def test_a_kernel_never_gets_the_inputs_own_memory(few):
    spec = CheckSpec(Workload(1, 600, heads=1, head_dim=32), CPU)  # of one head or one row, swapping changes no stride
    made = ReferenceCache().reference_of(spec)
    own = {t.untyped_storage().data_ptr() for t in (made.inputs.q, made.inputs.k, made.inputs.v)}
    with pytest.raises(pytest_attn.ContractError, match="changed its input q in place"):
        pytest_attn.check(lambda q, k, v: sdpa(q.mul_(2), k, v), spec.workload, device="cpu")
    seen = set()

    def looks(q, k, v):
        seen.update(t.untyped_storage().data_ptr() for t in (q, k, v))
        return sdpa(q, k, v)

    references = ReferenceCache()
    references._kept[next(iter(references._kept), ())] = made
    judge(spec.subject(Registry(), looks), spec, references)
    assert not own & seen


def test_long_groups_run_only_where_they_are_named():
    catalog = builtin_catalog()
    named = {w.name for group in LONG_GROUPS for w in catalog.select(group)}
    assert len(named) == 15
    assert not named & {w.name for w in catalog.default}
    assert named < {w.name for w in catalog.select("all")}


def test_skips_say_how_much_memory_is_needed():
    (w,) = builtin_catalog().select("long-1m-causal")
    needed = 3 * w.bytes()
    assert obstacle_of_any(w, HOST, False) == (
        f"long-1m-causal is for a GPU, with {needed / 2**30:.1f} GiB ({needed:,} bytes): a CPU takes too long"
    )
    assert obstacle_of_any(w, GPU, False) is None
    small = dataclasses.replace(GPU, memory=16 << 30)
    assert obstacle_of_any(w, small, False) == "long-1m-causal needs about 24 GiB, a GPU has 16 GiB"


def test_offsets_in_int32_are_found_with_little_memory():
    def read(t):
        offsets = torch.zeros((), dtype=torch.int32)
        for size, stride in zip(t.shape, t.stride(), strict=True):
            step = torch.tensor((stride + 2**31) % 2**32 - 2**31, dtype=torch.int32)
            offsets = offsets[..., None] + torch.arange(size, dtype=torch.int32) * step
        elements = t.untyped_storage().nbytes() // t.element_size()
        return t.as_strided((elements,), (1,), 0)[(t.storage_offset() + offsets.long()) % elements]

    w = Workload(48, heads=2, head_dim=16, mask="causal")
    asked = {"only": "offsets", "thorough": True, "device": "cpu", "precision": "torch_cpu"}
    assert pytest_attn.check_invariants(causal, w, **asked).applied
    with pytest.raises(AssertionError, match="q spread over more than 2\\^31 elements along dimension 2"):
        pytest_attn.check_invariants(lambda q, k, v: causal(read(q), read(k), read(v)), w, **asked)


@pytest.mark.slow("makes many calls")
def test_what_tensor_cores_cut_off_a_sum_of_a_million_products_is_granted(monkeypatch):
    """On an H200 torch's flash kernel loses 0.4 % on average there, and 1.4 % at most."""
    w = Workload(1, 1 << 20, heads=1, head_dim=16)

    def is_right(lost):
        exact = reference.compute_reference(draw_inputs(w, "structured"), precision_named("flash"))
        out = (exact.tensors["out"].value * (1 - lost)).bfloat16()
        return all(row.passed for row in compare_all("structured", {"out": out}, exact, w, limits_named("default")))

    assert is_right(0.014)
    assert not is_right(0.1)
    monkeypatch.setattr(budget, "_CUT_FROM_SUM", 0.0)
    assert not is_right(0.014)
