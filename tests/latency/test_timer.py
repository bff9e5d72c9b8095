"""Kernels that cheat, each in its own way: timed right, or refused, never praised."""

import threading
import time

import pytest
import torch
from judging import DEVICES, SMALL, attention, keeps_graphs, measure, needs_cuda, timed, with_gradients

from pytest_attn import Workload
from pytest_attn.backends.streams import capturing
from pytest_attn.latency.cuda_timer import DeviceGraph
from pytest_attn.latency.result import Latency
from pytest_attn.latency.timer import HostTimer, Item
from pytest_attn.latency.work import StaleError


@pytest.mark.one_in(3)
@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_every_direction_is_timed(device, direction):
    latency = measure(attention, device, direction)
    assert isinstance(latency, Latency)
    low, high, confidence = latency.interval
    assert 0 < low <= latency.p50 <= high
    assert latency.blocks >= 3
    assert confidence == pytest.approx(1 - 2 ** (1 - latency.blocks)) or latency.blocks > 7
    has_reference_loop = device.type == "cpu" and torch.get_num_threads() == 1
    of_a_cpu = ["attention"] * (device.type == "cpu") + ["pace"] * has_reference_loop
    assert set(latency.anchors) == {"compute", "memory", *of_a_cpu}
    assert latency.direction == direction
    assert latency.threads == (torch.get_num_threads() if device.type == "cpu" else None)


@pytest.mark.parametrize(
    ("direction", "staged", "called"),
    [("forward", [], ["forward"]), ("backward", ["forward"], ["backward"]), ("forward+backward", [], ["forward", "backward"])],
)
def test_what_is_timed_are_the_passes_of_the_direction(device, direction, staged, called):
    passes = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            passes.append("forward")
            return q.clone()

        @staticmethod
        def backward(ctx, dq):
            passes.append("backward")
            return dq

    work = timed(lambda q, k, v: attention(Counted.apply(q), k, v), SMALL, device, direction)
    with work.context():
        call = work.stage()
        assert passes == staged
        call()
    assert passes == [*staged, *called]


@needs_cuda
def test_both_directions_take_about_as_long_as_their_sum():
    device = DEVICES[-1]
    both = measure(attention, device, "forward+backward", seconds=0.2).p50
    forward = measure(attention, device, seconds=0.2).p50
    backward = measure(attention, device, "backward", seconds=0.2).p50
    assert 0.3 * (forward + backward) < both < 3 * (forward + backward)


def test_a_kernel_that_keeps_its_first_result_is_refused(device):
    kept = {}

    def caching(q, k, v):
        return kept.setdefault(q.data_ptr(), attention(q, k, v))

    with pytest.raises(StaleError, match="not that of the data it was given"):
        measure(caching, device)


def test_a_kernel_that_finishes_after_it_returned_is_refused(device):
    """The check sees the result in time, as it waits; whoever uses it at once does not."""

    def early(q, k, v):
        out = torch.zeros_like(q)

        def late():
            time.sleep(0.02)
            with torch.no_grad():
                out.copy_(attention(q, k, v))

        threading.Thread(target=late, daemon=True).start()
        return out

    with pytest.raises(StaleError):
        measure(early, device)
    time.sleep(0.1)  # the threads end


def test_a_backward_pass_that_keeps_its_first_result_is_refused(device):
    kept = []

    def keeping(gradients, dout):
        kept.append(gradients(dout))
        return kept[0]

    with pytest.raises(StaleError):
        measure(with_gradients(keeping), device, "backward")


@needs_cuda
def test_a_kernel_on_another_stream_is_refused():
    side = torch.cuda.Stream()

    def astray(q, k, v):
        with torch.cuda.stream(side):
            return attention(q, k, v)

    with pytest.raises(StaleError, match="another stream"):
        measure(astray, DEVICES[-1])


@needs_cuda
def test_a_kernel_whose_stream_is_not_joined_is_refused():
    side = torch.cuda.Stream()

    def unjoined(q, k, v):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return attention(q, k, v)

    with pytest.raises(StaleError, match="another stream"):
        measure(unjoined, DEVICES[-1], workload=Workload(2048, heads=8, head_dim=64))


@needs_cuda
def test_a_kernel_on_a_joined_stream_is_timed():
    side = torch.cuda.Stream()

    def joined(q, k, v):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = attention(q, k, v)
        torch.cuda.current_stream().wait_stream(side)
        out.record_stream(torch.cuda.current_stream())
        return out

    workload = Workload(2048, heads=8, head_dim=64)
    plain = measure(attention, DEVICES[-1], workload=workload, seconds=0.2).p50
    assert measure(joined, DEVICES[-1], workload=workload, seconds=0.2).p50 == pytest.approx(plain, rel=0.5)


@needs_cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_an_empty_graph_is_refused():
    out = {}

    def replayed(q, k, v):
        if not out:
            graph = torch.cuda.CUDAGraph()
            result = attention(q, k, v)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                pass
            out["graph"], out["result"] = graph, result
        out["graph"].replay()
        return out["result"]

    with pytest.raises(StaleError):
        measure(replayed, DEVICES[-1])


@needs_cuda
def test_a_kernel_that_waits_for_its_device_is_timed_by_the_host():
    def waiting(q, k, v):
        out = attention(q, k, v)
        torch.cuda.synchronize()
        return out

    latency = measure(waiting, DEVICES[-1])
    assert latency.mode == "host"
    assert latency.l2 == "warm"


@keeps_graphs
@needs_cuda
def test_short_kernels_share_a_graph_and_long_ones_have_events_of_their_own():
    short, long = Workload(128, heads=4, head_dim=64), Workload(4608, heads=24, head_dim=128)
    assert measure(attention, DEVICES[-1], workload=short).mode == "graph"
    assert measure(attention, DEVICES[-1], "backward", workload=short).mode == "graph"
    assert measure(attention, DEVICES[-1], "forward+backward", workload=short).mode == "graph"
    assert measure(attention, DEVICES[-1], workload=long).mode == "events"
    for direction in ("forward", "backward"):
        assert measure(attention, DEVICES[-1], direction, workload=short, mode="batched").mode == "batched"


@keeps_graphs
@needs_cuda
def test_a_graph_in_the_device_s_memory_replays_what_a_graph_of_torch_does():
    x = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph):
        x += 1
    on_device = DeviceGraph(graph, x.device)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            on_device.replay()
            stream.synchronize()
    assert x.tolist() == [2.0] * 3


@needs_cuda
def test_a_kernel_s_workspace_lies_elsewhere_in_each_call_of_a_graph():
    places = []

    def with_workspace(q, k, v):
        out = attention(q, k, v)
        workspace = torch.empty(16, device=q.device)  # freed last, as what attention takes for itself is free again
        if torch.cuda.is_current_stream_capturing():
            places.append(workspace.data_ptr())
        return out

    latency = measure(with_workspace, DEVICES[-1], workload=Workload(128, heads=4, head_dim=64))
    assert latency.mode in ("graph", "replay")
    assert len(set(places[: latency.calls])) == latency.calls


@needs_cuda
def test_a_capture_that_fails_leaves_the_kernel_to_be_timed_in_batches():
    def uncapturable(q, k, v):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not here")
        return attention(q, k, v)

    assert measure(uncapturable, DEVICES[-1], workload=Workload(128, heads=4, head_dim=64)).mode == "batched"


@needs_cuda
def test_a_backward_pass_whose_replay_is_not_that_of_its_data_is_refused():
    """Captured, it works on what dout was before the capture."""
    seen = []

    def staling(gradients, dout):
        if torch.cuda.is_current_stream_capturing():
            dout = seen[-1]
        seen.append(dout.clone())
        return gradients(dout)

    with pytest.raises(StaleError, match="replayed in a graph"):
        measure(with_gradients(staling), DEVICES[-1], "backward", workload=Workload(128, heads=4, head_dim=64))


def test_a_backward_pass_can_be_replayed_on_changed_data():
    """What it starts from stays, and its result follows dout, as a replayed graph's must."""
    work = timed(attention, SMALL, torch.device("cpu"), "backward")
    work.rotate_over(1)
    call = work.stage(replayed=True)
    before, given = call()[0], [t.clone() for t in work.sets[0]]
    work.stage_again([call])
    after = call()[0]
    assert all(torch.equal(now, was) for now, was in zip(work.sets[0], given, strict=True))
    assert not torch.allclose(after, before, atol=0.1)
    work.verify_call("replayed", call, after)


@needs_cuda
def test_the_backlog_hides_the_host(monkeypatch):
    """Launching takes longer than the kernel; the device's time must not show it."""

    def lingering(q, k, v):
        end = time.perf_counter() + 200e-6
        while time.perf_counter() < end:
            pass
        return attention(q, k, v)

    workload = Workload(1024, heads=16, head_dim=64)
    plain = measure(attention, DEVICES[-1], workload=workload, seconds=0.2, mode="batched")
    slow = measure(lingering, DEVICES[-1], workload=workload, seconds=0.2, mode="batched")
    assert slow.launch > 190e-6
    assert slow.p50 == pytest.approx(plain.p50, rel=0.1)


def test_a_sample_that_is_repeated_is_staged_after_the_one_before_was_kept():
    """Else it would be on the same data, of which the kernel may have kept something."""
    told = []

    class Twice:
        def undisturbed(self, name, stage, sample):
            sample(stage())
            return sample(stage())

    def stage():
        told.append("staged")
        return lambda: "result"

    HostTimer(torch.device("cpu"), Twice()).block([Item("mine", stage, keep=lambda call, value: told.append(value))])
    assert told == ["staged", "result", "staged", "result"]
