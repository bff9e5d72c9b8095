"""What a callable takes and returns beside (q, k, v) -> out: each declared form is right, and each fault in it is found."""

import math

import pytest
import torch
from judging import judged, spec_of

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.contract import AdaptedCallable
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import draw_inputs

W = Workload(20, 36, heads=3, head_dim=16, mask="causal-bottom-right")
W_PACKED = Workload(heads=2, head_dim=16, q_lens=(5, 12), mask="causal")


def attention(q, k, v, causal=True):
    """(..., heads, rows, head_dim); returns out, lse, weights in float32, and the row maxima."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows), -math.inf)
    weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype), scores.logsumexp(-1), weights, scores.amax(-1)


def everything(q, k, v):
    out, lse, weights, maxima = attention(q, k, v)
    return "not a tensor", weights.to(q.dtype), maxima, out, lse


EVERYTHING = ("ignored", "weights", "max", "out", "lse")


def batchless(q, k, v):
    """(rows, heads, d) in, (heads, rows, d) out, lse (rows, heads) in base 2."""
    out, lse, weights, _ = attention(*(t.transpose(0, 1) for t in (q, k, v)))
    return out, (lse / math.log(2)).T, weights


BATCHLESS = {"layout": "shd", "out_layout": "hsd", "returns": ("out", "lse", "weights"), "lse_base": 2, "lse_layout": "sh"}


def writing(q, k, v, out):
    out.copy_(attention(q, k, v)[0])


def test_results_in_any_order():
    judged = pytest_attn.check(everything, W, returns=EVERYTHING, backward=True)
    assert {row.name for row in judged.tensors} == {"out", "lse", "weights", "max", "dq", "dk", "dv"}
    pytest_attn.check_invariants(everything, W, returns=EVERYTHING, backward=True)


def test_without_a_batch_dimension_in_base_2():
    pytest_attn.check(batchless, W, backward=True, **BATCHLESS)
    pytest_attn.check_invariants(batchless, W, **BATCHLESS)


def test_lse_alone_beside_an_out_to_write_into():
    def into(q, k, v, out):
        result, lse, *_ = attention(q, k, v)
        out.copy_(result.transpose(1, 2))
        return lse.transpose(1, 2)

    declared = {"returns": ("lse",), "takes_out": True, "out_layout": "bshd", "lse_layout": "bsh"}
    pytest_attn.check(into, W.replace(batch=2), **declared)
    pytest_attn.check_invariants(into, W.replace(batch=2), **declared)


def test_packed_lse_by_rows():
    def packed(q, k, v):
        parts = [attention(*(t[one].transpose(0, 1) for t in (q, k, v))) for one in (slice(0, 5), slice(5, 17))]
        return torch.cat([out.transpose(0, 1) for out, *_ in parts]), torch.cat([part[1].T for part in parts]) / math.log(2)

    pytest_attn.check(packed, W_PACKED, returns=("out", "lse"), lse_layout="sh", lse_base=2)
    with pytest.raises(ValueError, match="weights cannot be compared where sequences are packed"):
        pytest_attn.check(packed, W_PACKED, returns=("out", "weights"))


def test_a_query_without_batch_over_pages():
    w = Workload(1, 20, heads=2, head_dim=16, kv_pages=4)
    inputs = draw_inputs(w)

    def paged(q, k, v):
        keys, values = (pool[inputs.page_table[0].long()].flatten(0, 1)[:20].transpose(0, 1) for pool in (k, v))
        return attention(q, keys, values, causal=False)[0]

    pytest_attn.check(paged, w, layout="hsd", inputs="structured")


def test_rows_without_keys():
    w = Workload(20, 8, heads=2, head_dim=16, mask="causal-bottom-right")

    def zero(q, k, v):
        out, lse, weights, maxima = attention(q, k, v)
        return out.nan_to_num(), lse, weights.nan_to_num(), maxima

    pytest_attn.check(zero, w, returns=("out", "lse", "weights", "max"))
    pytest_attn.check(attention, w, returns=("out", "lse", "weights", "max"), empty_rows="any")

    def all_but_empty(q, k, v, out):
        out[:, :, 12:] = attention(q[:, :, 12:], k, v)[0]

    pytest_attn.check(all_but_empty, w, takes_out=True, empty_rows="any")
    with pytest.raises(AssertionError, match="384 of 640 elements of the out= that it was given unwritten"):
        pytest_attn.check(all_but_empty, w, takes_out=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_out_is_written_in_every_dtype(dtype):
    pytest_attn.check(writing, W.replace(dtype=dtype), takes_out=True)
    pytest_attn.check(lambda q, k, v, out: (writing(q, k, v, out), out)[1], W.replace(dtype=dtype), takes_out=True)


def test_out_that_is_not_what_was_given():
    def other(q, k, v, out):
        writing(q, k, v, out)
        return out.clone()

    with pytest.raises(AssertionError, match=r"returned a tensor other than the out= .* \(it wrote all of out=, too\)"):
        pytest_attn.check(other, W, takes_out=True)
    with pytest.raises(AssertionError, match="it left 960 of 960 elements of out= unwritten"):
        pytest_attn.check(lambda q, k, v, out: attention(q, k, v)[0], W, takes_out=True)

    def tail(q, k, v, out):
        out[:, :, :16] = attention(q, k, v)[0][:, :, :16]

    with pytest.raises(AssertionError, match=r"192 of 960 elements .* unwritten, the first at \[0, 0, 16, 0\]"):
        pytest_attn.check(tail, W, takes_out=True)


def test_nan_of_its_own_is_no_unwritten_memory():
    def nan(q, k, v, out):
        writing(q, k, v, out)
        out[0, 0, 3, 0] = math.nan

    with pytest.raises(AssertionError, match="1 element is NaN or infinite"):
        pytest_attn.check(nan, W, takes_out=True)


# -- faults in what is returned beside out ------------------------------------------------------------------------------


def faulty(name, change):
    def kernel(q, k, v):
        out, lse, weights, maxima = attention(q, k, v)
        results = {"out": out, "lse": lse, "weights": weights, "max": maxima}
        results[name] = change(results[name], results)
        return tuple(results.values())

    return kernel


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("weights", lambda x, r: x * (r["lse"] - r["max"]).exp()[..., None], ("weights-not-divided",)),
        ("weights", lambda x, r: x.log() + r["lse"][..., None], ("weights-are-scores",)),
        ("weights", lambda x, r: x.mean(1, keepdim=True).expand_as(x), ("weights-averaged-over-heads",)),
        ("weights", lambda x, r: x.roll(1, 2), ()),
        ("weights", lambda x, r: x * 1.02, ()),
        ("max", lambda x, r: x / math.log(2), ("max-base-2",)),
        ("max", lambda x, r: r["lse"], ("max-is-lse",)),
        ("lse", lambda x, r: x / math.log(2), ("lse-base-2",)),
    ],
)
def test_faults_are_found_and_named(name, change, named):
    comparison = judged(faulty(name, change), spec_of(W, returns=("out", "lse", "weights", "max")))
    assert comparison.mismatch.row.name == name
    assert comparison.faults == named


def test_a_base_that_is_not_the_declared_one():
    with pytest.raises(AssertionError, match=r"(?s)mismatch: lse .* is natural where lse_base=2 is said"):
        pytest_attn.check(lambda q, k, v: attention(q, k, v)[:2], W, returns=("out", "lse"), lse_base=2)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"returns": ("out", "lse")}, r"a tuple of 4; expected a tuple \(out, lse\)"),
        ({}, "returned a tuple of 4"),
        ({"returns": ("out", "lse", "ignored", "ignored"), "lse_layout": "bsh"}, r"lse has shape .* \(lse_layout='bsh'\)"),
        ({"returns": ("lse", "out", "ignored", "ignored")}, r"out has shape \(1, 3, 20\)|lse has shape"),
        ({"returns": ("out", "ignored", "ignored", "weights")}, r"weights has shape .* expected \(1, 3, 20, 36\)"),
    ],
)
def test_results_of_another_form(declared, said):
    with pytest.raises(AssertionError, match=said):
        pytest_attn.check(attention, W, **declared)


def test_contiguous_kernels_get_a_contiguous_dout_in_their_own_layout():
    seen = []

    def swapped(q, k, v):
        out = attention(*(t.transpose(1, 2) for t in (q, k, v)))[0]
        out.register_hook(lambda dout: seen.append(dout.is_contiguous()))
        return out.clone()

    pytest_attn.check(swapped, W, layout="bshd", out_layout="bhsd", backward=True, contiguous=True)
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"layout": "sbhd"}, "layout must be one of bhsd, bshd, thd, hsd, shd, bthd, bhtd, got 'sbhd'"),
        ({"returns": ("out", "logits")}, "returns must be one of out, lse, weights, max, keep, ignored, got 'logits'"),
        ({"returns": ("lse",)}, "returns must name 'out'"),
        ({"returns": ("out", "lse", "lse")}, "twice"),
        ({"returns": ()}, "returns must be names"),
        ({"returns": ("out", "lse"), "lse_base": 10}, "lse_base must be one of e, 2, got 10"),
        ({"returns": ("out", "lse"), "lse_layout": "hbs"}, "lse_layout must be one of"),
        ({"lse_base": 2}, "name it: returns="),
        ({"returns_lse": True, "returns": ("out",)}, "contradict"),
        ({"takes_out": "yes"}, "takes_out must be one of True, False"),
        ({"out_layout": "thd"}, "of packed workloads both"),
        ({"layout": "bthd", "out_layout": "bshd"}, "or neither, got 'bthd' and 'bshd'"),
    ],
)
def test_what_cannot_be_declared(arguments, said):
    with pytest.raises(ValueError, match=said):
        Declaration(**arguments)


@pytest.mark.parametrize(
    ("declared", "is_plain"),
    [
        ({}, True),
        ({"layout": "bshd", "returns_lse": True}, True),
        ({"returns": "out", "out_layout": "bhsd", "precision": "eager", "empty_rows": "any"}, True),
        ({"layout": "hsd"}, False),
        ({"out_layout": "bshd"}, False),
        ({"takes_out": True}, False),
        ({"returns": ("out", "lse")}, False),
        ({"returns_lse": True, "lse_base": 2}, False),
        ({"returns_lse": True, "lse_layout": "bsh"}, False),
    ],
)
def test_a_callable_is_adapted_where_it_takes_or_returns_something_else(declared, is_plain):
    assert Declaration(**declared).is_plain == is_plain
    adapted = CheckSpec(W, torch.device("cpu"), declared=Declaration(**declared)).subject(Registry(), attention)
    assert isinstance(adapted, AdaptedCallable) != is_plain


def test_names_in_a_list_are_those_in_a_tuple():
    assert Declaration(returns=["lse", "out"]) == Declaration(returns=("lse", "out"))
    assert Declaration(returns=["lse", "out"]).results == ("out", "lse")


def test_weights_that_float32_cannot_hold_are_0():
    pytest_attn.check(everything, W, returns=EVERYTHING, inputs="large")
