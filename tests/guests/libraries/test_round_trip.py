"""Both ways of each library: what a backend makes of a workload is intercepted, read back, and is that workload again."""

import functools
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from fakes.judged import CPU, HOST
from fakes.masks import checkered

from pytest_attn import BooleanMask, Causal, Document, Neighborhood, Window, Workload, draw_inputs
from pytest_attn.backends.dense import boolean_mask, dense
from pytest_attn.guests.libraries.flashinfer import _options
from pytest_attn.guests.models.call_to_workload import to_inputs
from pytest_attn.guests.models.exact_attention import exact_attention
from pytest_attn.guests.models.interception import intercept_attention

W = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=64)
SQUARE = W.replace(kv_len=24)
PACKED = Workload(q_lens=(30, 7, 20), heads=2, head_dim=64)
LONGER = {"kv_lens": (30, 40, 50), "kv_len": None}
MASKS = ("causal", "causal-bottom-right", Window(9, 0), Window(9, 3), Window(9, 9), Window(None, 5), Window(None, 0), Window())
WORKLOADS = [
    *(w.replace(**scale) for w in (W, SQUARE, W.replace(q_len=1)) for scale in ({}, {"scale": 0.3})),
    *(w.replace(mask=mask) for w in (W, SQUARE, W.replace(kv_heads=4), PACKED, PACKED.replace(**LONGER)) for mask in MASKS),
    *(W.replace(kv_lens=(40, 33), mask=mask) for mask in (None, *MASKS)),
    *(SQUARE.replace(mask=Document((13, 11), causal=causal)) for causal in (False, True)),
    SQUARE.replace(mask=Document((13, 11)), kv_lens=(24, 17)),
    SQUARE.replace(mask=Neighborhood((24,), (7,), stride=(2,), dilation=(3,), causal=(True,)), scale=0.3),
    SQUARE.replace(mask=Neighborhood((4, 6), (3, 2), stride=(2, 1), causal=(True, False))),
    W.replace(mask=BooleanMask(checkered)),
    W.replace(softcap=2.0, mask=Window(9, 3)),
    W.replace(bias="hqk", mask="causal"),
    W.replace(bias="bk", kv_heads=4, dtype="fp32"),
    W.replace(bias="bq", kv_lens=(40, 33)),
    W.replace(alibi=True, mask="causal-bottom-right"),
    W.replace(alibi=True, kv_lens=(40, 33)),
    W.replace(sinks=True, mask="causal-bottom-right"),
    PACKED.replace(kv_heads=1, sinks=True),
    W.replace(v_head_dim=32, kv_heads=4),
    Workload(9, cached=31, batch=2, heads=4, kv_heads=2, head_dim=64, mask="causal-bottom-right"),
]
BACKENDS = (
    *("math", "sdpa", "flex", "flash2", "flash2_kvcache", "flash3", "flash4", "te_fused", "te_flash", "te_unfused"),
    *("xformers", "sage", "natten", "flashinfer_fa3"),
    *("diffusers:native", "diffusers:flex", "diffusers:flash", "diffusers:flash_varlen"),
    *("transformers:eager", "transformers:sdpa", "transformers:flex_attention", "transformers:flash_attention_2"),
)


class Reader:
    """Reads every call that is intercepted, and has exact attention in its place."""

    def __init__(self):
        self.read = []

    def handle(self, call):
        arguments = call.read()
        self.read.append(to_inputs(arguments))
        return arguments.to_result(exact_attention(self.read[-1]))

    def unread(self, module, function, reason):
        raise AssertionError(f"{function} is not read: {reason}")


def as_a_model_calls(backend, monkeypatch):
    """Return the module that is patched in the model's stead; have transformers hand its function out as to a model."""
    if backend.name.startswith("te_"):
        made = import_module("transformer_engine.pytorch").DotProductAttention(2, 8)
        return torch.nn.Sequential(made)
    if backend.name.startswith("transformers:"):
        modeling, plain = import_module("transformers.modeling_utils"), backend._load
        fetched = modeling.AttentionInterface()
        monkeypatch.setattr(backend, "_load", lambda: fetched.get_interface(backend.dispatched, plain()))
    return None


def problem(inputs):
    """Return all that is computed, as one problem: q, k and v, (heads, rows, dim), and what each row sees.

    It can be said in several ways: padded keys or shorter sequences, documents or sequences or a mask, a group of heads or as
    many copies of its keys. So keys that no row sees are left out, and what is left is laid out end to end.
    """
    w = inputs.workload
    k, v = (t.repeat_interleave(w.group, 1) for t in (inputs.k, inputs.v))
    if w.is_packed:
        ends = zip(pairwise(inputs.cu_seqlens.tolist()), pairwise(inputs.cu_seqlens_kv.tolist()), strict=True)
        shapes = [(1, w.heads, end - start, last - first) for (start, end), (first, last) in ends]
        blocks = [dense(w.mask or Window(), shape, CPU).expand(shape)[0] for shape in shapes]
        q, k, v = (t.transpose(0, 1) for t in (inputs.q, k, v))
    else:
        shape, visible = (w.batch, w.heads, w.q_len, w.kv_len), boolean_mask(inputs)
        blocks = (torch.ones(shape, dtype=torch.bool) if visible is None else visible).expand(shape)
        q, k, v = (t.transpose(0, 1).flatten(1, 2) for t in (inputs.q, k, v))
    seen = torch.stack([torch.block_diag(*(block[head] for block in blocks)) for head in range(w.heads)]).bool()
    keys = seen.any(1).any(0)
    scale = torch.tensor(w.softmax_scale)
    return {"q": q, "k": k[:, keys], "v": v[:, keys], "visible": seen[:, :, keys], "scale": scale}


@functools.cache
def drawn(workload):
    return draw_inputs(workload, "structured")


@functools.cache
def expected_of(workload):
    return {**problem(drawn(workload)), "out": exact_attention(drawn(workload))}


def of_one_sequence(backend, inputs):
    """Return FlashInfer's function of one sequence, with the options that its backend plans a batch with."""
    single, options = backend.source.load().single_prefill_with_kv_cache, _options(inputs)
    given = {name: options[name] for name in ("causal", "window_left", "sm_scale", "logits_soft_cap")}
    return lambda q, k, v: single(*(t[0].transpose(0, 1) for t in (q, k, v)), **given).transpose(0, 1)[None]


def round_trips(backend, workloads, model=None):
    """Have a backend compute workloads; yield each, and what is another when its call is read back."""
    reader, made = Reader(), []
    with intercept_attention(reader, model):
        for workload in workloads:
            inputs = drawn(workload)
            kernel = of_one_sequence(backend, inputs) if backend.name == "flashinfer_fa3" else backend.prepare(inputs)
            made.append((inputs, kernel(*(t.clone() for t in (inputs.q, inputs.k, inputs.v)))))
    for (inputs, out), read in zip(made, reader.read, strict=True):
        expected, found = expected_of(inputs.workload), {**problem(read), "out": out}
        names = ("out",) if is_said_by_scores(backend.name, inputs.workload) else expected
        yield inputs.workload, [name for name in names if not torch.equal(expected[name], found[name])]


def is_said_by_scores(name, w):
    """Whether a library hides keys, or adds one for sinks, by a score_mod, which only its result tells."""
    return (name == "flex" and w.sinks) or (name == "diffusers:flex" and (w.bias or w.alibi))


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_backend_makes_of_a_workload_is_read_back_as_that_workload(installed, monkeypatch, name):
    backend = installed(name)
    assert backend.broken_because() is None
    model = as_a_model_calls(backend, monkeypatch)
    taken = [w for w in WORKLOADS if not backend.unsupported_because(w, HOST) and (w.cached or name != "flash2_kvcache")]
    if name == "diffusers:flex":  # which ignores is_causal
        taken = [w for w in taken if not backend.known_defects[-1].applies(w, HOST)]
    if name == "flashinfer_fa3":
        taken = [w.replace(batch=1) for w in taken if w.kv_lens is None and not w.documents]
    print(f"{name}: {len(taken)} workloads")
    assert {w.id: wrong for w, wrong in round_trips(backend, taken, model) if wrong} == {}
    assert taken


def one_key_shorter(mask_of_window):
    return lambda causal, window: mask_of_window(causal, (window[0] - 1, window[1]))


def from_the_top_left(mask_of_window):
    return lambda causal, window: Causal() if causal else mask_of_window(causal, window)


def one_key_longer(masks):
    return {**masks, "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias: Window(bias._window_size, 0)}


@pytest.mark.parametrize(
    ("name", "workload", "file", "attribute", "plant", "wrong"),
    [
        ("flash2", SQUARE.replace(mask=Window(9, 0)), "flash_attention", "mask_of_window", one_key_shorter, ["visible"]),
        (
            "flash4",
            W.replace(mask="causal-bottom-right"),
            "flash_attention",
            "mask_of_window",
            from_the_top_left,
            ["k", "v", "visible"],
        ),
        ("te_fused", W.replace(scale=0.3), "transformer_engine", "_SUBMODULES", lambda names: (), ["scale"]),
        ("xformers", SQUARE.replace(mask=Window(9, 0)), "library", "_MASKS", one_key_longer, ["visible"]),
        (
            "transformers:flash_attention_2",
            PACKED.replace(mask="causal-bottom-right"),
            "transformers",
            "_has_boundaries",
            lambda has: lambda given: False,
            ["visible"],
        ),
    ],
)
def test_a_wrong_reading_is_found(installed, monkeypatch, name, workload, file, attribute, plant, wrong):
    backend = installed(name)
    assert backend.broken_because() is None
    reading = import_module(f"pytest_attn.guests.models.calls.{file}_calls")
    monkeypatch.setattr(reading, attribute, plant(getattr(reading, attribute)))
    assert [*round_trips(backend, [workload], as_a_model_calls(backend, monkeypatch))] == [(workload, [*wrong, "out"])]
