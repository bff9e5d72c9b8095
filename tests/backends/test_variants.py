"""NAME+compile, NAME+max_autotune and NAME+graph: the same judgment, around the same backend."""

import contextlib
import functools

import pytest
import torch
from fakes.judged import H200, judged

from pytest_attn import Backend, Machine, Workload, draw_inputs
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.streams import capturing
from pytest_attn.backends.variants import Compiled, Graphed, compile_kernel
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.workloads.catalog import builtin_catalog

W = Workload(32, heads=2, head_dim=32)


class Own(Backend):
    """SDPA written into a tensor that stays where it is, as a kernel under a CUDA graph writes."""

    name, variants, full_graph, needs = "own", ("compile", "graph"), False, "nothing"
    launches, is_approximate = ("flash",), False
    capabilities = Capabilities(head_dim=64)
    broken = None

    def broken_because(self):
        return self.broken

    def prepare(self, inputs, backward=False):
        def call(q, k, v):
            out = torch.empty_like(q)

            def write():
                out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v))

            write()
            self.launched = write
            return out

        return call


def test_a_variant_says_what_its_backend_says():
    for variant in (Compiled(Own(), "compile"), Graphed(Own())):
        inner = variant.inner
        assert variant.name in ("own+compile", "own+graph")
        for field in ("precision", "known_defects", "capabilities", "needs", "full_graph", "launches", "is_approximate"):
            assert getattr(variant, field) is getattr(inner, field), field
        assert variant.unsupported_because(W.replace(head_dim=128), H200) == [
            "takes a head_dim of at most 64, not head_dim 128"
        ]
        inner.broken = "it is broken"
        assert variant.broken_because() == "it is broken"
    assert Compiled(Own(), "max_autotune").unavailable_because(H200) == "own has no variant +max_autotune"
    assert Graphed(Own()).unavailable_because(H200) is None
    assert Graphed(Own()).unsupported_because(W, H200, backward=True) == ["replays the forward pass only"]
    assert (
        Registry()["eager+graph"].unavailable_because(Machine("cpu", "", None, "cpu", 1, 0, "2.13")) == "needs a CUDA device"
    )


def test_what_must_be_one_graph_raises_at_a_break():
    def kernel(q, k, v):
        torch._dynamo.graph_break()
        return q

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_kernel(kernel)(*[torch.ones(2)] * 3)


@pytest.fixture
def graphs(monkeypatch):
    """Stand in for CUDA graphs: a capture runs the kernel once, a replay what the kernel launched."""

    class Graph:
        replays = True

        def replay(self):
            if Graph.replays:
                backend.launched()

    class Stream:
        def wait_stream(self, other):
            pass

    backend = Own()
    for name, value in (
        ("CUDAGraph", Graph),
        ("Stream", lambda device: Stream()),
        ("current_stream", lambda *_: Stream()),
        ("stream", lambda stream: contextlib.nullcontext()),
        ("graph", lambda graph, stream=None: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return backend, Graph


def test_a_capture_that_fails_leaves_the_stream_as_it_was(graphs, monkeypatch):
    """torch leaves its own behind."""
    streams = ["mine"]

    @contextlib.contextmanager
    def stream(other):
        before = streams[-1]
        streams.append(other)
        try:
            yield
        finally:
            streams.append(before)

    @contextlib.contextmanager
    def graph(graph, stream):
        streams.append(stream)
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(RuntimeError, match="previous error"), capturing(object(), "side"):
        assert streams[-1] == "side"
    assert streams[-1] == "mine"


def test_a_graph_is_replayed_on_the_data_of_each_call(graphs):
    backend, _ = graphs
    comparison = judged(Graphed(backend), W)
    assert comparison.passed, describe(comparison)
    kernel = Graphed(backend).prepare(draw_inputs(W))
    first = kernel(*(torch.randn(1, 2, 32, 32) for _ in range(3)))
    kept = first.clone()
    kernel(*(torch.randn(1, 2, 32, 32) for _ in range(3)))
    assert torch.equal(first, kept), "an earlier result must not change under a later replay"


def test_a_replay_that_writes_nothing_shows_as_nan(graphs):
    backend, graph = graphs
    graph.replays = False
    comparison = judged(Graphed(backend), W)
    assert not comparison.passed
    assert "NaN" in describe(comparison)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["smoke-causal-gqa", "smoke-padded", "smoke-packed", "smoke-softcap"])
def test_flex_compiles_a_workload_once_however_often_it_is_prepared(monkeypatch, name):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    (workload,) = builtin_catalog().select(name)
    compiled = []
    with torch.no_grad():
        for distribution, seed in (("structured", 0), ("flat", 0), ("structured", 1)):
            inputs = draw_inputs(workload, distribution, seed)
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            Registry()["flex"].prepare(inputs)(inputs.q, inputs.k, inputs.v)
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert compiled[1:] == [0, 0]  # the first may have been compiled by another test
