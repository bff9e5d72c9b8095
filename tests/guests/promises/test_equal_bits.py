"""Kernels that break one promise each are found by it, with the size at which they do; kernels that keep it are not."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from judging import asked

from pytest_attn import Pages, Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend
from pytest_attn.guests.promises import equal_bits

#: a batch of 64 takes the slow kernels of this file seconds
BATCHES = (2, 5)
CPU = torch.device("cpu")
CAUSAL = Workload(66, heads=2, head_dim=32, mask="causal", dtype="float16")
PADDED = Workload(1, heads=2, head_dim=32, kv_lens=(90, 40))
LATENT = Workload(1, heads=2, kv_heads=1, head_dim=48, v_head_dim=32, v_in_k=True, kv_lens=(60, 20))
LATENT_PACKED = Workload(q_lens=(70, 20), heads=2, kv_heads=1, head_dim=48, v_head_dim=32, v_in_k=True, mask="causal")
#: the second sequence has fewer scores, and more keys than twice the first's
LONG_SECOND = Workload(q_lens=(45, 1), heads=2, head_dim=32, mask="causal-bottom-right", kv_lens=(45, 110))
NARROW = Workload(1, heads=2, head_dim=32, kv_lens=(100, 50), dtype="float16")


class Keeping(Kernel):
    """Takes rows one by one, and keys in tiles of one size: each product has the same shape in any call."""

    def __init__(self, key_tile=16):
        super().__init__(row_tile=1, key_tile=key_tile)


class SplitByBatch(Keeping):
    def forward(self, call):
        self.key_tile = 16 if call.workload.batch < 5 else 32
        return super().forward(call)


class TiledByRows(Keeping):
    def forward(self, call):
        self.key_tile = 16 if call.workload.q_len > 50 else 32
        return super().forward(call)


class SplitByLongest(Keeping):
    def forward(self, call):
        self.key_tile = 16 if call.workload.kv_len <= 100 else 32
        return super().forward(call)


class TiledByLongest(Keeping):
    def forward(self, call):
        self.key_tile = 32 if call.workload.kv_len <= 64 else 64
        return super().forward(call)


class OrderedByPlace(Keeping):
    def key_tiles(self, seq, rows):
        tiles = super().key_tiles(seq, rows)
        return tiles[::-1] if seq.batch % 2 else tiles


class OtherDecoding(Keeping):
    """Takes keys from the last to the first for one row that sees more than 48 keys."""

    def key_tiles(self, seq, rows):
        tiles = super().key_tiles(seq, rows)
        return tiles[::-1] if seq.q_len == 1 and seq.kv_len > 48 else tiles


class AddedInAnyOrder(Keeping):
    """Adds up dq in the order in which blocks happen to come."""

    def key_tiles_again(self, seq, rows):
        tiles = super().key_tiles_again(seq, rows)
        return random.sample(tiles, len(tiles))


class DrawnConfiguration(Keeping):
    """Draws a configuration for each shape, as an autotuner does whose candidates are equally fast."""

    def __init__(self):
        super().__init__()
        self.drawn, self.draws = {}, random.Random(2)

    def forward(self, call):
        shape = call.q.shape, call.k.shape
        self.key_tile = self.drawn.setdefault(shape, self.draws.choice((16, 32)))
        return super().forward(call)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(equal_bits, "_BATCHES", BATCHES)


def finding(kernel, promise, workload, backward=False):
    spec = CheckSpec(workload, CPU, backward)
    (found,) = asked(KernelBackend("mine", kernel), spec, only=promise).findings
    return found


@pytest.mark.parametrize(
    ("kernel", "promise", "workload", "where"),
    [
        (SplitByBatch, "batch", CAUSAL, "equal up to batch 4, not at batch 5: at place 0"),
        (TiledByRows, "chunks", CAUSAL, "not at chunk 5"),
        (SplitByLongest, "batch", PADDED, "not at batch 2: at place 0"),
        (SplitByLongest, "batch", NARROW, "not at batch 2: at place 0"),
        (SplitByLongest, "batch", LATENT, "not at batch 2: at place 0"),
        (TiledByLongest, "batch", LATENT.replace(kv_len=70, kv_lens=(70, 20)), "at place 2, beside longer and shorter ones"),
        (TiledByLongest, "batch", LATENT.replace(kv_len=55, kv_lens=(55, 20)), "not at batch 2: at place 0, beside longer"),
        (TiledByLongest, "decode", LATENT_PACKED, "not at kv_len"),
        (SplitByLongest, "batch", LONG_SECOND, "not at batch 2: at place 0, beside longer"),
        (TiledByRows, "prefix", CAUSAL.replace(q_len=60, kv_len=60), "equal up to prefix 9, not at prefix 10"),
        (OrderedByPlace, "batch", CAUSAL, "not at batch 2: at place 1"),
        (OtherDecoding, "decode", CAUSAL, "equal up to kv_len 48, not at kv_len 49"),
        (AddedInAnyOrder, "rerun", CAUSAL, "not at rerun"),
        (DrawnConfiguration, "batch", CAUSAL, "not at batch"),
        (DrawnConfiguration, "decode", CAUSAL, "not at kv_len"),
    ],
)
def test_a_broken_promise_is_found_where_it_breaks(kernel, promise, workload, where):
    found = finding(kernel(), f"bits-{promise}", workload, backward=kernel is AddedInAnyOrder)
    print(found.evidence)
    assert found.outcome == "broken"
    assert where in found.evidence
    assert "; both are right" in found.evidence


HONEST = [
    CAUSAL,
    PADDED,
    LATENT,
    PADDED.replace(kv_lens=(1, 1)),
    Workload(heads=2, head_dim=32, q_lens=(5, 1), mask="causal-bottom-right", kv_lens=(5, 40)),
    Workload(heads=2, kv_heads=1, head_dim=32, q_lens=(30, 20), mask="causal-bottom-right", kv_lens=(70, 20)),
    Workload(17, heads=2, head_dim=32, kv_pages=Pages(16), kv_lens=(70, 40), mask="causal-bottom-right"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workload", HONEST, ids=lambda w: w.id)
@pytest.mark.parametrize("promise", ["batch", "chunks", "decode", "prefix", "rerun"])
def test_a_kernel_that_keeps_it_is_right(promise, workload):
    found = finding(Keeping(), f"bits-{promise}", workload)
    print(found)
    assert found.outcome == "passed" or found.evidence == "one row"


def test_rows_before_the_first_key_are_not_asked_in_pieces():
    before = Workload(20, 9, heads=2, head_dim=32, mask="causal-bottom-right")
    assert finding(Keeping(), "bits-decode", before).evidence == "rows before the first key"


def test_a_cpu_is_asked_for_batches_of_some_size():
    whole = SimpleNamespace(probe=SimpleNamespace(device=CPU), workload=CAUSAL, q_len=400, kv_len=400)
    assert equal_bits._batches(whole) == list(BATCHES)


@pytest.mark.parametrize("tiles", [(8, 8), (8, 16)])
def test_a_callable_that_closes_over_lengths_is_asked_again(tiles):
    w = Workload(q_lens=(40, 30), heads=2, head_dim=32)
    tiles = itertools.cycle(tiles)

    def kernel(q, k, v):
        tile, sequences = next(tiles), zip(*(t.transpose(0, 1).float().split(w.q_lens, 1) for t in (q, k, v)), strict=True)
        weights = [((one @ keys.mT * q.shape[-1] ** -0.5).softmax(-1), values) for one, keys, values in sequences]
        parts = (zip(p.split(tile, -1), values.split(tile, -2), strict=True) for p, values in weights)
        return torch.cat([sum(p @ values for p, values in one) for one in parts], 1).transpose(0, 1).to(q.dtype)

    (found,) = asked(kernel, CheckSpec(w, CPU), only="bits-rerun").findings
    print(found)
    assert found.outcome == ("passed" if next(tiles) == next(tiles) else "broken")


def test_what_compiles_for_each_shape_is_asked_few(monkeypatch):
    backend, prepare, prepared = KernelBackend("mine", Keeping()), KernelBackend.prepare, []

    def counted(self, inputs, backward=False):
        prepared.append(inputs.workload)
        return prepare(self, inputs, backward)

    monkeypatch.setattr(KernelBackend, "prepare", counted)
    backend.compiles = True
    names = [f"seen-{name}" for name in ("batch", "chunks", "decode", "prefix", "rerun")]
    report = asked(backend, CheckSpec(CAUSAL, CPU), only=names)
    assert [one.outcome for one in report.findings] == ["passed"] * 5
    assert len(prepared) == len({w.id for w in prepared}) + 1 == 5, [w.id for w in prepared]  # the judge prepares one itself
