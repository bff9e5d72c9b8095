from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from fakes import faulty, install, uninstall
from fakes.judged import H200, assert_passes, judged

from pytest_attn import Document, Window, Workload
from pytest_attn.backends.defects import CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE
from pytest_attn.backends.libraries import cudnn as adapter
from pytest_attn.backends.registry import Registry

FILES = {"cudnn/__init__.py": "cudnn.py"}
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def cudnn(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))

    def put(**changed):
        install(monkeypatch, tmp_path, {**FILES, **changed}, "nvidia-cudnn-frontend", "1.32.0")
        import_module("cudnn")  # what is imported needs no trial in another process
        return Registry()["cudnn"]

    yield put
    uninstall(FILES)
    adapter._handle.cache_clear()
    adapter._not_supported_because.cache_clear()


CLAIMED = [
    W,
    W.replace(mask="causal", scale=0.3),
    W.replace(mask="causal-bottom-right", dtype="float16"),
    W.replace(kv_len=48, mask="causal-bottom-right", v_head_dim=64),
    W.replace(mask=Window(9, 3)),
    W.replace(mask=Window(None, 5)),
    W.replace(kv_len=48, mask=Window(7, None)),
    W.replace(kv_lens=(80, 33)),
    W.replace(kv_lens=(80, 51), mask="causal-bottom-right"),
    W.replace(kv_len=48, kv_lens=(48, 31), mask="causal"),
    W.replace(bias="hqk"),
    W.replace(bias="bk", mask="causal"),
]


@pytest.mark.parametrize("workload", CLAIMED, ids=lambda workload: workload.id)
def test_it_says_the_workload_in_the_words_of_the_library(cudnn, workload):
    backend = cudnn()
    assert backend.unsupported_because(workload, H200, backward=True) == []
    assert_passes(backend, workload, backward=True)


@pytest.mark.parametrize(
    ("said", "instead", "workload"),
    [
        ("self.scale, self.bias, self.padded = attn_scale", "self.scale, self.bias, self.padded = 1.0", CLAIMED[0]),
        ("length - rows if self.bottom_right else 0", "0", CLAIMED[2]),
        ("j > diagonal + self.right", "j > diagonal + self.right + 1", CLAIMED[4]),
        ("j <= diagonal - self.left", "j < diagonal - self.left", CLAIMED[4]),
        ("(j < length)", "(j < keys)", CLAIMED[7]),
        ("scale=options.scale, bias=bias", "scale=options.scale", CLAIMED[10]),
        ('dict(zip(("dq", "dk", "dv")', 'dict(zip(("dq", "dv", "dk")', CLAIMED[0]),
    ],
)
def test_another_meaning_in_the_library_is_found(cudnn, said, instead, workload):
    backend = cudnn(**{"cudnn/__init__.py": faulty("cudnn.py", said, instead)})
    assert not judged(backend, workload, backward=True).passed


def test_a_graph_is_built_once_per_layout_and_without_stats_for_inference(cudnn):
    backend = cudnn()
    library = import_module("cudnn")
    from pytest_attn.workloads.inputs import draw_inputs

    inputs = draw_inputs(W)
    kernel = backend.prepare(inputs)
    first = kernel(inputs.q, inputs.k, inputs.v)
    assert torch.equal(kernel(inputs.q, inputs.k, inputs.v), first)
    assert len(library.built) == 1
    turned = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernel(turned, inputs.k, inputs.v), first)
    assert [operation for operation, _ in library.built] == ["sdpa", "sdpa"]


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (W.replace(dtype="fp32"), "takes bfloat16 and float16 only, not float32"),
        (W.replace(head_dim=264), "takes a head_dim of at most 256, not head_dim 264"),
        (W.replace(softcap=2.0), "has no softcap"),
        (W.replace(kv_len=48, mask=Document((40, 8))), "has no mask of documents"),
        (
            W.replace(kv_len=40, mask="causal-bottom-right"),
            "Bottom right causal mask does not support max_s_q > max_s_kv.",
        ),
        (
            W.replace(bias="hqk", mask="causal-bottom-right"),
            "Bottom right causal mask is only supported with is_bias=False.",
        ),
        (
            W.replace(kv_len=40, mask=Window(7, None)),
            "Sliding window attention is only supported with max_s_q <= max_s_kv.",
        ),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_refuses_what_the_library_has_no_words_for(cudnn, workload, reason):
    backend = cudnn()
    assert backend.unavailable_because(H200) is None
    assert backend.unsupported_because(workload, H200) == [reason]


def test_it_refuses_a_backward_pass_alone(cudnn):
    one = W.replace(q_len=1, kv_len=1)
    assert cudnn().unsupported_because(one, H200) == []
    assert Registry()["cudnn"].unsupported_because(one, H200, backward=True) == ["s_q = s_kv = 1 is not supported."]


def test_it_shares_the_known_defects_of_sdpas_cudnn():
    assert {CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE} < set(Registry()["cudnn"].known_defects)
    assert {CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE} < set(Registry()["sdpa_cudnn"].known_defects)
