"""The invariants: they hold for fault-free kernels, each sees a fault of its own, and none costs more than it says."""

import itertools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from honest.variants import HONEST, VARIANTS
from judging import asked, assert_few_calls, with_lse
from reported_faults.judging import callable_of
from reported_faults.kernel import Attention, KernelBackend
from reported_faults.narrow_reports import NARROW

from pytest_attn import Window, Workload, check, check_invariants
from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.invariants.algebra import _is_merged
from pytest_attn.invariants.all_invariants import INVARIANTS, judge_invariants
from pytest_attn.invariants.invariant import Probe
from pytest_attn.invariants.report import describe_invariants as describe
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import BooleanMask, Document
from pytest_attn.workloads.pages import Pages

CPU = torch.device("cpu")
PLAIN = Workload(70, 80, heads=2, head_dim=32)
CAUSAL = Workload(70, heads=4, kv_heads=2, head_dim=32, mask="causal")
PADDED = Workload(70, 90, heads=2, head_dim=32, kv_lens=(90, 41))
PACKED = Workload(heads=2, head_dim=32, q_lens=(7, 64, 33), mask="causal")
PAGED = Workload(1, 100, batch=2, heads=4, kv_heads=2, head_dim=32, kv_pages=Pages(16), kv_lens=(100, 37))
BATCHED = Workload(70, batch=3, heads=2, head_dim=32, mask=Window(20, 3))
SLOPED = Workload(40, batch=3, heads=2, head_dim=32, alibi="batch")
CAPPED = Workload(70, heads=2, head_dim=32, softcap=5.0, mask="causal", dtype="float32")
SUNK = Workload(70, heads=2, head_dim=32, sinks=True, alibi=True, dtype="float16")
SHOWN = Workload(70, heads=2, head_dim=32, mask=BooleanMask(lambda *sizes: torch.arange(70)[:, None] % 3 < 2))
DOCUMENTS = Workload(70, heads=2, head_dim=32, mask=Document((30, 40), causal=True))
WORKLOADS = (PLAIN, CAUSAL, PADDED, PACKED, PAGED, BATCHED, SLOPED, CAPPED, SUNK, DOCUMENTS)

#: for every invariant, faults that it sees on a workload
FAULTS = {
    "rerun": [("share-of-out-lost", PLAIN), ("share-of-dk-lost", CAUSAL), ("delta-read-before-it-is-written", PLAIN)],
    "poison": [
        ("unused-values-read", PADDED),
        ("unused-keys-read", PADDED),
        ("last-row-tile-unwritten", PLAIN),
        ("gradient-of-padding-unwritten", PADDED),
        ("lse-unwritten", PLAIN),
    ],
    "layout": [
        ("q-assumed-contiguous", PLAIN),
        ("v-read-with-strides-of-k", CAUSAL),
        ("out-written-with-strides-of-q", BATCHED),
        ("head-stride-from-batch-stride", BATCHED),
        ("storage-offset-ignored", BATCHED),
        ("expanded-read-as-contiguous", CAUSAL),
        ("keys-read-again-with-strides-of-q", BATCHED),
        ("dout-assumed-contiguous", PLAIN),
        ("dq-written-with-strides-of-q", PLAIN),
        ("strides-of-first-call", PLAIN),
        ("dout-strides-of-first-call", PLAIN),
    ],
    "leak": [
        ("right-edge-one-key-late", CAUSAL),
        ("right-edge-one-key-early", CAUSAL),
        ("left-edge-one-key-late", BATCHED),
        ("tail-keys-counted", PLAIN),
        ("documents-not-separated", DOCUMENTS),
        ("lse-in-base-2", PLAIN),
        ("sequences-not-separated", PACKED),
        ("pages-taken-in-order", PAGED),
    ],
    "gradients": [
        ("mask-missing-in-backward", CAUSAL),
        ("scale-missing-in-dk", PLAIN),
        ("delta-missing", PLAIN),
        ("always-causal-in-backward", PLAIN),
    ],
    "lse-gradient": [("gradient-of-lse-ignored", PLAIN), ("gradient-of-lse-with-wrong-sign", CAUSAL)],
    "algebra": [("last-key-tile-missing", PLAIN), ("keys-of-first-batch-entry", BATCHED)],
    "magnitude": [
        ("no-maximum-subtracted", PLAIN),
        ("maximum-taken-for-10", PLAIN),
        ("maximum-starts-at-minus-50000", PLAIN),
        ("tanh-by-exponentials", CAPPED),
        ("p-from-exponential-of-lse", PLAIN),
    ],
    "options": [
        ("scale-of-first-call", PLAIN),
        ("softcap-of-first-call", CAPPED),
        ("causal-flag-of-first-call", CAUSAL),
        ("mask-kept-by-shape", SHOWN),
        ("lengths-of-first-call", PADDED),
        ("page-table-of-first-call", PAGED),
        ("softcap-ignored", CAPPED),
    ],
    "equivalence": [("groups-interleaved", CAUSAL.replace(heads=6, kv_heads=3)), ("pages-of-first-sequence", PAGED)],
    "batch": [("lse-of-first-batch-entry", BATCHED)],
    "state": [
        ("result-kept-by-address", PLAIN),
        ("out-buffer-reused", PLAIN),
        ("saved-lse-in-shared-workspace", PLAIN),
        ("gradient-sums-not-cleared", PLAIN),
    ],
    "alignment": [("address-rounded-to-16-bytes", PLAIN)],
    "shapes": [("head-dim-tail-not-read", PLAIN), ("tile-of-one-key-lost", CAUSAL)],
}


def mutant_named(name):
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def ask(subject, workload, only=None, backward=None, **options):
    backward = not workload.kv_pages if backward is None else backward
    return asked(subject, CheckSpec(workload, CPU, backward), only, **options)


def scaled_dot_product(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


# -- fault-free kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
@pytest.mark.parametrize("honest", [HONEST, VARIANTS[10], VARIANTS[11]], ids=lambda honest: honest.name)
def test_every_invariant_holds_for_an_honest_kernel(honest, workload):
    report = ask(honest.backend(), workload)
    assert report.passed, describe(report)
    assert_few_calls(report)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["sdpa", "math", "eager"])
@pytest.mark.parametrize("workload", [PLAIN, CAUSAL, PADDED, BATCHED], ids=lambda w: w.id)
def test_every_invariant_holds_for_torch(name, workload):
    for backward in (False, True):
        report = check_invariants(name, workload, backward=backward, device="cpu")
        assert report.passed
        assert_few_calls(report)


@pytest.mark.slow("makes many calls")
def test_the_thorough_set_holds_for_an_honest_kernel():
    for workload in (CAUSAL, PADDED):
        report = ask(HONEST.backend(), workload, thorough=True)
        assert report.passed, describe(report)
        assert len(report.findings) == len(INVARIANTS)


def test_a_callable_is_asked_what_it_can_answer():
    report = check_invariants(scaled_dot_product, PLAIN, backward=True, device="cpu")
    outcomes = {finding.invariant: finding for finding in report.findings}
    assert outcomes["options"].outcome == "not applicable"
    assert "closed over" in outcomes["options"].evidence
    assert outcomes["algebra"].outcome == outcomes["layout"].outcome == outcomes["gradients"].outcome == "passed"


def test_a_callable_may_take_rows_before_heads_and_return_lse():
    honest = HONEST.backend()

    def bshd(q, k, v):
        out, lse = honest.prepare(inputs)(*(t.transpose(1, 2) for t in (q, k, v)))
        return out.transpose(1, 2), lse

    inputs = draw_inputs(CAUSAL, device="cpu")
    report = check_invariants(bshd, CAUSAL, backward=True, layout="bshd", returns_lse=True, device="cpu")
    assert report.passed
    assert {f.invariant for f in report.findings if f.outcome == "passed"} >= {"layout", "leak", "lse-gradient"}


@pytest.mark.parametrize("name", ["tf32-products", "rounded-tf32-products"])
def test_products_in_tf32_that_are_declared_keep_the_gradient_of_lse(name):
    honest = next(variant for variant in VARIANTS if variant.name == name)
    (workload,) = builtin_catalog().select("smoke-single")
    report = ask(honest.backend(), workload, "lse-gradient")
    assert [finding.outcome for finding in report.findings] == ["passed"]


# -- faults ----------------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("invariant", "name", "workload"),
    [(invariant, name, workload) for invariant, faults in FAULTS.items() for name, workload in faults],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invariant_sees_its_fault(invariant, name, workload):
    mutant = mutant_named(name)
    report = ask(mutant.backend(), workload, invariant)
    assert [finding.invariant for finding in report.broken] == [invariant], report.findings
    assert report.broken[0].evidence in describe(report)


#: of compiled kernels: an invariant that asks less, a fault that its other calls would show, and what finds it now
ASKED_LESS = [
    ("layout", "strides-of-first-call", "layout"),
    ("layout", "dout-strides-of-first-call", "layout"),
    *(
        ("options", f"{option}-of-first-call", "options")
        for option in ("scale", "causal-flag", "softcap", "lengths", "page-table")
    ),
    ("equivalence", "groups-interleaved", "algebra"),
    ("equivalence", "pages-of-first-sequence", "leak"),
    ("batch", "lse-of-first-batch-entry", "algebra"),
]


@pytest.fixture
def compiled(monkeypatch):
    """Let every kernel count as one that is compiled anew for other strides and options."""
    monkeypatch.setattr(Probe, "is_compiled", True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("invariant", "name", "by"), ASKED_LESS)
def test_a_fault_of_a_compiled_kernel_is_found_though_less_is_asked(compiled, invariant, name, by):
    (workload,) = (workload for fault, workload in FAULTS[invariant] if fault == name)
    report = ask(mutant_named(name).backend(), workload, {invariant, by})
    assert [finding.invariant for finding in report.broken] == [by], report.findings


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
def test_what_is_asked_of_a_compiled_kernel_holds_for_an_honest_one(compiled, workload):
    report = ask(HONEST.backend(), workload, ("layout", "options", "equivalence", "batch"))
    assert report.passed, describe(report)
    assert [finding.calls for finding in report.findings if finding.invariant in ("options", "batch")] == [1, 0]


@pytest.mark.parametrize("name", ["last-row-tile-unwritten", "gradient-of-padding-unwritten", "lse-unwritten"])
def test_unwritten_memory_that_held_nan_in_the_plain_call_too_is_seen(name):
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        report = ask(mutant_named(name).backend(), PADDED, "poison")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [finding.invariant for finding in report.broken] == ["poison"]
    assert report.broken[0].evidence.endswith("and so it was in the plain call")


def test_memory_is_filled_without_an_import_of_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: pytest.fail("it imports torch._inductor"))
    assert ask(HONEST.backend(), PLAIN, "poison").passed
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_invariant_has_a_fault():
    tested_below = {"alone", "offsets", "opcheck", "graph", "device"}
    missing = {invariant.name for invariant in INVARIANTS} - set(FAULTS) - tested_below
    assert not missing, f"FAULTS wants a mutant that each finds, with a workload: {missing}"


def test_every_mutant_that_no_call_shows_is_a_fault_of_an_invariant():
    seen = {name for faults in FAULTS.values() for name, _ in faults}
    unseen = [mutant.name for mutant in MUTANTS if mutant.condition not in ("call", "magnitude") and mutant.name not in seen]
    assert unseen == ["nan-in-one-of-a-hundred-calls", "innermost-stride-ignored"], "which the thorough set sees"


def test_values_that_alone_are_transposed_are_asked_about():
    def copies_with_the_keys(q, k, v):
        if not (q.is_contiguous() and k.is_contiguous()):
            return scaled_dot_product(q, k, v)
        return scaled_dot_product(q, k, torch.as_strided(v, v.shape, k.stride(), v.storage_offset()))

    (finding,) = ask(copies_with_the_keys, PLAIN, "layout").broken
    assert finding.evidence.startswith("v alone swapped in memory: out[")
    assert ask(copies_with_the_keys, PLAIN, skip="layout").passed


class RoundsRowSums(torch.autograd.Function):
    """Attention of float32 whose D is rounded to bfloat16, from sums in another order where q is not contiguous."""

    @staticmethod
    def forward(ctx, q, k, v):
        lse = (q @ k.mT * q.shape[-1] ** -0.5).logsumexp(-1, keepdim=True)
        out = (q @ k.mT * q.shape[-1] ** -0.5 - lse).exp() @ v
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        products = (dout * out).bfloat16() if q.is_contiguous() else (dout * out)
        row_sum = products.float().sum(-1, keepdim=True).bfloat16().float()
        p = (q @ k.mT * q.shape[-1] ** -0.5 - lse).exp()
        ds = p * (dout @ v.mT - row_sum) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ dout


def test_rounding_is_no_matter_of_strides():
    workload = PLAIN.replace(dtype="float32")
    assert ask(RoundsRowSums.apply, workload, "layout").passed


def wrong_each(period):
    calls = itertools.count(1)
    return lambda q, k, v: scaled_dot_product(q, k, v) * (1 if next(calls) % period else 1.1)


def test_every_second_or_third_call_wrong_is_told_as_calls_that_differ():
    for period in (2, 3):
        (finding,) = ask(wrong_each(period), PLAIN, "layout").broken
        assert "; but equal calls differ as well, which rerun is about: out[" in finding.evidence
    (finding,) = ask(wrong_each(2), PLAIN, "rerun").broken
    assert finding.evidence.startswith("rerun 1 of 1 on the same tensors: out[")
    assert "; but equal calls" not in ask(mutant_named("q-assumed-contiguous").backend(), PLAIN, "layout").broken[0].evidence


PAGES = Workload(1, 300, batch=2, heads=2, head_dim=32, kv_pages=Pages(16), kv_lens=(200, 37), mask=Window(31, 0))


def paged(w, reads, gathered=lambda pool, table: pool[table.long()].flatten(0, 1)):
    """Attention over pages that reads from the first that `reads` names, given the first visible key."""
    table = draw_inputs(w, device="cpu").page_table

    def attention(q, k, v):
        outs = []
        for batch, length in enumerate(w.kv_lens):
            first = reads(max(0, length - 32)) // 16
            pages = table[batch, first : -(-length // 16)]
            keys, values = (gathered(pool, pages)[: length - 16 * first].transpose(0, 1).float() for pool in (k, v))
            scores = q[batch].float() @ keys.mT * 32**-0.5
            unseen = torch.arange(16 * first, length) < (length - 32 if w.mask else 0)
            outs.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values)
        return torch.stack(outs).to(q.dtype)

    return attention


def test_nan_in_pages_before_every_window_is_not_read():
    everything = paged(PAGES, lambda first: 0)
    assert asked(everything, CheckSpec(PAGES, CPU), skip="poison").passed
    (finding,) = ask(everything, PAGES, "poison").broken
    assert "nan in pages that lie wholly before every window, which a server gives to others: out[0, 0, 0, 0] = nan" in (
        finding.evidence
    )
    assert finding.evidence.endswith(
        "with 100 there nothing changes: 0 times NaN is NaN, so leave these keys out, or read their k and v as 0"
    )
    (counted,) = ask(mutant_named("gradient-of-padding-unwritten").backend(), PADDED, "poison").broken
    assert "0 times NaN" not in counted.evidence
    for honest in (paged(PAGES, lambda first: first), paged(PAGES, lambda first: first // 128 * 128)):  # reads whole tiles
        assert ask(honest, PAGES).passed


def test_pages_before_every_window_are_not_multiplied_by_zero():
    """Of packed queries as well, by a callable or a backend that does not hide keys behind a mask."""
    w = Workload(heads=2, head_dim=32, q_lens=(1, 0, 3), kv_lens=(77, 200, 400), kv_pages=Pages(16), mask=Window(20, 0))

    spec = CheckSpec(w, CPU, declared=Declaration(returns=("out", "lse")))

    def told(kernel, backend=KernelBackend):
        return [asked(one, spec, "poison").passed for one in (backend("own", kernel), callable_of(kernel, w))]

    class Masked(KernelBackend):
        def pads_by_mask(self, workload):
            return True

    faulty = NARROW["ValuesBeforeTheWindowMustBeFinite"].kernel
    assert told(faulty()) == [False, False]
    assert told(Attention()) == [True, True]
    assert told(faulty(), Masked) == [True, False]


@pytest.fixture
def near(monkeypatch):
    """Let 2^17 elements stand for more than 2^31."""
    monkeypatch.setattr("pytest_attn.invariants.memory_layout._FAR", 1 << 17)
    monkeypatch.setattr("pytest_attn.invariants.memory_layout._unspreadable_because", lambda *_: None)


def test_pages_that_nobody_reads_are_not_what_lies_far_away(near):
    w = next(w for w in (PAGES.replace(kv_lens=(200, n), mask=None) for n in range(1, 200)) if last_page_read(w) < 36)

    def wraps(tensor, table):
        at = table.long() * tensor.stride(0)
        at = at.where(at < 1 << 17, 0)  # the first page's: what lies between pages is any value, the right ones too
        within = torch.arange(16)[:, None] * tensor.stride(1)
        whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        heads = torch.arange(2)[:, None] * tensor.stride(2) + torch.arange(32)
        return whole[(at[:, None] + within.T)[..., None, None] + heads].flatten(0, 1)

    assert asked(paged(w, lambda first: 0), CheckSpec(w, CPU), "offsets").passed
    (finding,) = asked(paged(w, lambda first: 0, wraps), CheckSpec(w, CPU), "offsets").broken
    assert finding.evidence.startswith("v spread over more than 2^31 elements along dimension 0: out[")


def last_page_read(w):
    table = draw_inputs(w, device="cpu").page_table
    return max(int(table[batch, : -(-length // 16)].max()) for batch, length in enumerate(w.kv_lens))


def test_layouts_that_no_model_passes_are_asked_thoroughly():
    innermost = mutant_named("innermost-stride-ignored")
    assert not ask(innermost.backend(), PLAIN, "layout").broken
    assert ask(innermost.backend(), PLAIN, "layout", thorough=True).broken


def test_a_kernel_that_is_documented_to_take_contiguous_tensors_is_asked_no_other():
    def contiguous_only(q, k, v):
        assert all(tensor.is_contiguous() for tensor in (q, k, v)), "a stride"
        return scaled_dot_product(q, k, v)

    for thorough in (False, True):
        report = check_invariants(contiguous_only, PLAIN, thorough=thorough, contiguous=True, device="cpu")
        reasons = {f.invariant: f.evidence for f in report.findings if f.outcome == "not applicable"}
        assert reasons["layout"] == "the marker says that the kernel takes contiguous tensors only"
        assert ("alignment" in reasons) is thorough
        assert report.passed
    assert check(contiguous_only, PLAIN, contiguous=True, device="cpu").passed
    (strides,) = check_invariants(contiguous_only, PLAIN, only="layout", device="cpu").findings
    assert strides.outcome == "not applicable"
    assert strides.evidence.endswith("swapped in memory: refused in its own words: a stride")


@pytest.mark.slow("makes many calls")
def test_one_of_a_hundred_calls_is_found_by_the_thorough_set():
    assert ask(mutant_named("nan-in-one-of-a-hundred-calls").backend(), PLAIN, thorough=True).broken


def test_offsets_that_wrap_round_are_seen(near):
    (finding,) = ask(mutant_named("key-offset-wraps").backend(), PLAIN, "offsets").broken
    assert finding.evidence.startswith("k spread over more than 2^31 elements along dimension 2: out[0, 0, 0, 0] = ")
    assert ask(HONEST.backend(), PLAIN, "offsets").passed


class Capturing:
    """A stand-in for CUDA graphs, and attention that it captures: a replay does what the kernel launched, or its fault."""

    def __init__(self, fault):
        self.fault, self.is_capturing = fault, False

    @contextmanager
    def graph(self, graph, stream=None):
        self.is_capturing = True
        yield
        self.is_capturing = False

    def kernel(self, q, k, v):
        found = with_lse()(q, k, v)
        if self.is_capturing and self.fault == "waits":
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
        if self.is_capturing:
            read = q.clone() if self.fault == "reads what was captured" else q

            def replay():
                for kept, now in zip(found, with_lse()(read, k, v), strict=True):
                    kept.copy_(now)

            self.replay = (lambda: None) if self.fault == "on the host" else replay
        return found


def test_what_a_graph_leaves_out_is_seen(monkeypatch):
    def found_of(fault):
        cuda, stream = Capturing(fault), SimpleNamespace(wait_stream=lambda other: None)
        stand_ins = {"CUDAGraph": lambda: cuda, "graph": cuda.graph, "stream": nullcontext}
        for name, stand_in in {**stand_ins, "Stream": lambda device: stream, "current_stream": lambda *_: stream}.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        return asked(cuda.kernel, CheckSpec(PLAIN, CPU, declared=Declaration(returns_lse=True)), "graph")

    assert found_of("").findings[0].evidence == "needs a CUDA device"
    monkeypatch.setattr("pytest_attn.invariants.invariant.Invariant.inapplicable_because", lambda *_: None)
    assert found_of("").findings[0].outcome == "passed"
    assert found_of("waits").findings[0].evidence == "cannot be captured: operation not permitted when stream is capturing"
    for fault, found in (("on the host", "nan"), ("reads what was captured", "")):
        (finding,) = found_of(fault).broken
        words = "replayed in a CUDA graph on other values than it was captured on: out[0, 0, 0, 0] = "
        assert finding.evidence.startswith(words + found)


def test_a_kernel_that_is_launched_on_the_current_device_is_seen(monkeypatch):
    on_it, tensors_on, second = [], [CPU], torch.device("cpu", 0)  # one CPU stands for two devices

    @contextmanager
    def current(device):
        on_it.append(device)
        yield
        on_it.pop()

    def moved(probe, device, move=Probe.on_device):
        tensors_on[0] = device
        return move(probe, device)

    def launched_on_the_current(q, k, v):
        return scaled_dot_product(q, k, v) * (on_it[-1] == tensors_on[0])

    def refusing(q, k, v):
        if tensors_on[0] == second:
            raise RuntimeError("Expected all tensors to be on the same device")
        return scaled_dot_product(q, k, v)

    def asked(kernel):
        tensors_on[0] = CPU
        return ask(kernel, PLAIN, "device", backward=False)

    monkeypatch.setattr("pytest_attn.invariants.invariant.current", current)
    assert asked(launched_on_the_current).findings[0].evidence == "needs a second CUDA device"
    monkeypatch.setattr("pytest_attn.invariants.runtime._second_to", lambda device: second)
    monkeypatch.setattr(Probe, "on_device", moved)
    (finding,) = asked(launched_on_the_current).broken
    assert finding.evidence.startswith("tensors on cpu:0, while cpu is the current device: out[0, 0, 0, 0] = ")
    assert asked(scaled_dot_product).findings[0].outcome == "passed"
    assert asked(refusing).findings[0].evidence == "refused in its own words: Expected all tensors to be on the same device"


def test_a_write_beside_an_input_is_seen():
    def writes_behind_k(q, k, v):
        if k.untyped_storage().nbytes() > k.nbytes:
            k.detach().as_strided((1,), (1,), k.storage_offset() + k.numel()).zero_()
        return scaled_dot_product(q, k, v)

    report = ask(writes_behind_k, PLAIN, "poison")
    assert report.broken[0].evidence == "the kernel wrote outside k, whose neighboring memory is no longer NaN"


def test_an_operator_without_a_fake_is_broken():
    @torch.library.custom_op("pytest_attn_tests::no_fake", mutates_args=())
    def no_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product(q, k, v)

    report = ask(no_fake, PLAIN, "opcheck", backward=False)
    assert "test_faketensor" in report.broken[0].evidence
    no_fake.register_fake(lambda q, k, v: torch.empty_like(q))
    assert ask(no_fake, PLAIN, "opcheck", backward=False).passed


# -- what is no fault ------------------------------------------------------------------------------------------------------


def test_an_exception_elsewhere_is_a_fault():
    def only_small(q, k, v):
        if v.abs().max() > 7:
            raise ValueError("too large")
        return scaled_dot_product(q, k, v)

    (finding,) = ask(only_small, PLAIN, "algebra", backward=False).broken
    assert finding.evidence == "the kernel raised ValueError: too large"


def test_a_backend_that_refuses_other_workloads_is_not_asked_about_them():
    def only_this(workload):
        return [] if workload == PLAIN else ["takes one workload only"]

    backend = FunctionBackend("own", lambda q, k, v, workload: scaled_dot_product(q, k, v), unsupported_because=only_this)
    report = ask(backend, PLAIN, ["options", "equivalence"])
    assert [finding.outcome for finding in report.findings] == ["not applicable"] * 2


# -- selection and words ---------------------------------------------------------------------------------------------------


def test_invariants_are_selected_by_name():
    def names(**options):
        return [finding.invariant for finding in ask(scaled_dot_product, PLAIN, **options).findings]

    assert names(only=["state", "rerun"]) == ["rerun", "state"]
    assert "leak" not in names(skip="leak")
    assert {"shapes", "offsets", "device"}.isdisjoint(names())
    with pytest.raises(ValueError, match=r"unknown invariant 'no'; known: rerun, poison, layout, "):
        names(only="no")
    with pytest.raises(ValueError, match=r"unknown invariant 'bad'; known: "):
        names(skip=("bad",))
    with pytest.raises(ValueError, match=r"no invariant is left to run: skip has all of leak; name fewer there, or others"):
        names(only="leak", skip=("leak", "rerun"))


def test_a_failure_says_what_where_and_how_to_repeat_it():
    report = ask(mutant_named("lse-in-base-2").backend(), PLAIN, ["leak", "rerun"])
    first, leak = describe(report).splitlines()
    assert first == f"1 invariant broken by lse-in-base-2 ({PLAIN.id})"
    assert leak.startswith("  leak         q = k = 0: lse[0, 0, 0] = 6.32")
    with pytest.raises(AssertionError, match=r"1 invariant broken by doubled"):
        check_invariants(doubled, PLAIN, only="leak", device="cpu")


def doubled(q, k, v):
    return 2 * scaled_dot_product(q, k, v)


def test_halves_of_the_keys_are_put_together_by_lse():
    said = []
    for backend in (HONEST.backend(), mutant_named("lse-in-base-2").backend()):
        spec = CheckSpec(Workload(65, 130, batch=2, heads=4, kv_heads=2), CPU).for_subject(backend)
        probe = Probe(backend, spec, ReferenceCache().inputs_of(spec, "structured"), thorough=True)
        said.append(_is_merged(probe))
        assert probe.count.calls == 2
    assert said[0] == ""
    assert said[1].startswith("two halves of the keys, put together by their lse: ")


@pytest.mark.parametrize(("name", "bits"), [("algebra", [0, 1]), ("layout", [0])])
def test_exact_attention_is_not_computed_twice_nor_for_equal_bits(name, bits, monkeypatch):
    cache, spec, off = ReferenceCache(), CheckSpec(PLAIN, CPU), itertools.cycle(bits)

    def kernel(q, k, v):
        out = scaled_dot_product(q, k, v)
        return torch.nextafter(out, torch.zeros_like(out)) if next(off) else out

    monkeypatch.setattr("pytest_attn.invariants.invariant.compute_reference", None)
    judge(spec.subject(Registry(), kernel), spec, cache)
    assert judge_invariants(spec.subject(Registry(), kernel), spec, cache, only=name).passed
    assert cache.computed == len(spec.inputs)


def test_a_backend_that_cannot_take_a_workload_refuses_it():
    with pytest.raises(ValueError, match=r"backend 'sdpa' cannot take .*: does not support packed sequences|has no packed"):
        check_invariants("sdpa", PACKED, device="cpu")


def behind_the_maximum(q, k, v):
    """Round P in sight of autograd, which gives the maximum a gradient that is zero but for these roundings."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return ((p.to(v.dtype) @ v).float() / p.sum(-1, keepdim=True)).to(q.dtype)


def test_gradients_that_a_check_takes_for_rounded_break_no_invariant():
    spec = CheckSpec(Workload(96, heads=2, head_dim=32), torch.device("cpu"), backward=True)
    assert check(behind_the_maximum, spec.workload, backward=True, device="cpu").passed
    report = asked(behind_the_maximum, spec, ["algebra"])
    assert report.passed, describe(report)
    probe = Probe(spec.subject(Registry(), behind_the_maximum), spec, draw_inputs(spec.workload))
    off = {**probe.base, "dv": probe.base["dv"] * 1.5}
    assert "times what rounding explains" in probe.change(off), "no more than roundings are allowed"
