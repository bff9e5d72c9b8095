from importlib import import_module

import torch
from fakes.judged import H200

from pytest_attn import Workload
from pytest_attn.backends.defects import CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.inputs import draw_inputs

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


def test_a_graph_is_built_once_per_layout_and_without_stats_for_inference(installed):
    backend = installed("cudnn")
    inputs = draw_inputs(W)
    kernel = backend.prepare(inputs)
    library = import_module("cudnn")
    first = kernel(inputs.q, inputs.k, inputs.v)
    assert torch.equal(kernel(inputs.q, inputs.k, inputs.v), first)
    assert len(library.built) == 1
    turned = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernel(turned, inputs.k, inputs.v), first)
    assert [operation for operation, _ in library.built] == ["sdpa", "sdpa"]


def test_it_refuses_a_backward_pass_alone(installed):
    backend, one = installed("cudnn"), W.replace(q_len=1, kv_len=1)
    assert backend.unsupported_because(one, H200) == []
    assert backend.unsupported_because(one, H200, backward=True) == ["s_q = s_kv = 1 is not supported."]


def test_it_shares_the_known_defects_of_sdpas_cudnn():
    assert {CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE} < set(Registry()["cudnn"].known_defects)
    assert {CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE} < set(Registry()["sdpa_cudnn"].known_defects)
