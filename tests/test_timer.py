"""Kernels that cheat, each in its own way: timed right, or refused, never praised."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from pytest_attn import Workload
from pytest_attn.backends.graphed import capturing
from pytest_attn.backends.registry import Registry
from pytest_attn.latency import cuda_timer, timer
from pytest_attn.latency.anchors import Anchor
from pytest_attn.latency.cuda_timer import BacklogError, CudaTimer, _calls_per_sample
from pytest_attn.latency.protocol import Latency, Stopwatch, _anchor_item, stopwatch_of
from pytest_attn.latency.resident import ResidencyError, ResidentGraph
from pytest_attn.latency.timer import Call, HostTimer, Item, Plan
from pytest_attn.latency.work import StaleError, Work, work_of

SMALL = Workload(64, heads=2, head_dim=32, dtype="float32")
DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
keeps_graphs = pytest.mark.skipif(torch.__version__ < (2, 8), reason="needs a torch that keeps the graph it captured")


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    return request.param


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def with_gradients(gradients_of):
    """Return attention whose backward pass is what `gradients_of` returns for its plain gradients, a function of dout."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return attention(q, k, v)

        @staticmethod
        def backward(ctx, dout):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                return gradients_of(lambda dout: torch.autograd.grad(attention(*leaves), leaves, dout), dout)

    return Changed.apply


def measure(kernel, device, direction="forward", workload=SMALL, seconds=0.05, mode=None):
    work = work_of(kernel, workload, device, direction)
    return stopwatch_of(device).measure(work, workload.id, "kernel", mode, seconds)


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_every_direction_is_timed(device, direction):
    latency = measure(attention, device, direction)
    assert isinstance(latency, Latency)
    low, high, confidence = latency.interval
    assert 0 < low <= latency.p50 <= high
    assert latency.blocks >= 3
    assert confidence == pytest.approx(1 - 2 ** (1 - latency.blocks)) or latency.blocks > 7
    has_pace = device.type == "cpu" and torch.get_num_threads() == 1
    assert set(latency.anchors) == {"compute", "memory", *(["pace"] if has_pace else [])}
    assert latency.direction == direction
    assert latency.threads == (torch.get_num_threads() if device.type == "cpu" else None)


def test_both_directions_take_about_as_long_as_their_sum(device):
    both = measure(attention, device, "forward+backward", seconds=0.2).p50
    forward = measure(attention, device, seconds=0.2).p50
    backward = measure(attention, device, "backward", seconds=0.2).p50
    assert 0.3 * (forward + backward) < both < 3 * (forward + backward)


def test_a_kernel_that_sleeps_on_the_host_is_timed_with_its_sleep(device):
    def sleeping(q, k, v):
        time.sleep(0.004)
        return attention(q, k, v)

    latency = measure(sleeping, device)
    assert latency.mode == "host"
    assert latency.p50 >= 0.004


def test_a_kernel_that_keeps_its_first_result_is_refused(device):
    kept = {}

    def caching(q, k, v):
        return kept.setdefault(q.data_ptr(), attention(q, k, v))

    with pytest.raises(StaleError, match="not that of the data it was given"):
        measure(caching, device)


def test_a_kernel_that_keeps_the_results_of_data_that_it_knows_is_not_praised(device):
    """Right, whatever it is given; but timed calls are given the same data again."""
    workload, kept = Workload(256, heads=8, head_dim=64, dtype="float32"), {}

    def caching(q, k, v):
        key = tuple((t.data_ptr(), t._version) for t in (q, k, v))
        if key not in kept:
            kept[key] = attention(q, k, v)
        return kept[key]

    if device.type == "cpu":
        with pytest.raises(StaleError, match=r"takes \S+ us on the data of the call before, and \S+ us on changed data"):
            measure(caching, device, workload=workload)
    else:
        plain = measure(attention, device, workload=workload, seconds=0.2).p50
        assert measure(caching, device, workload=workload, seconds=0.2).p50 > 0.8 * plain


def test_a_call_that_is_late_once_keeps_nothing(monkeypatch):
    late = iter([1.0, 1.0, 1.0, 1e-6])
    monkeypatch.setattr(timer, "verified", lambda work: Call(None, 0.0, next(late)))
    timer.refuse_kept_results(None, 1e-6)
    assert next(late, None) is None


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


@pytest.mark.parametrize(
    ("microseconds", "mode", "calls"),
    [(3, "graph", 40), (33, "graph", 25), (260, "graph", 4), (3, "batched", 20), (33, "batched", 7), (33, "events", 1)],
)
def test_what_a_pair_of_events_adds_is_shared_by_the_calls_of_a_short_kernel(microseconds, mode, calls):
    assert _calls_per_sample(microseconds * 1e-6, mode) == calls


@pytest.mark.parametrize(
    ("asked", "instantiated", "mode"), [(None, True, "graph"), (None, False, "replay"), ("replay", True, "replay")]
)
def test_a_graph_that_the_driver_does_not_instantiate_in_the_device_s_memory_is_replayed_by_torch(
    monkeypatch, asked, instantiated, mode
):
    def graphs_of(*_, are_resident):
        if are_resident and not instantiated:
            raise ResidencyError("CUDA error 801")
        return [print]

    monkeypatch.setattr(cuda_timer, "graphs_of", graphs_of)
    assert planned(monkeypatch, asked).mode == mode


@pytest.mark.parametrize(("seconds", "calls", "replays"), [(99e-6, 9, 1), (101e-6, 8, 3), (160e-6, 5, 3), (245e-6, 4, 2)])
def test_a_sample_of_long_calls_in_graphs_is_several_replays(monkeypatch, seconds, calls, replays):
    asked, replayed = [], []
    graphs = [lambda number=number: replayed.append(number) for number in range(6)]
    monkeypatch.setattr(cuda_timer, "graphs_of", lambda work, calls, *_, are_resident: asked.append(calls) or graphs)
    plan = planned(monkeypatch, "graph", seconds)
    for _ in range(6):
        plan.stage()()
    assert asked == [calls]
    assert plan.calls == calls * replays
    assert replayed == [*range(6)] * replays


@pytest.mark.parametrize(("sets", "replays"), [(30, 3), (14, 2), (5, 1), (2, 1)])
def test_each_call_of_a_sample_has_its_own_tensors_or_shares_them_with_none_of_another_replay(sets, replays):
    assert cuda_timer._replays_per_sample(5, 160e-6, sets) == replays


def planned(monkeypatch, mode, seconds=1e-5):
    """Plan a kernel as on a GPU, all of whose answers are made up."""
    gpu = made_up(monkeypatch, seconds)
    return gpu.plan(work_of(attention, SMALL, gpu.device, "forward"), mode)


def made_up(monkeypatch, seconds=1e-5):
    """Return a timer of a GPU that is not there."""
    gpu = object.__new__(CudaTimer)
    gpu.device, gpu._backlogs, gpu.looked_behind = torch.device("cpu"), {}, 0
    gpu.host = HostTimer(gpu.device)
    monkeypatch.setattr(gpu, "_launching", lambda work: 1e-5)
    monkeypatch.setattr(gpu, "_estimate", lambda work, host, samples: seconds)
    monkeypatch.setattr(gpu, "_verify_behind_backlog", lambda work: setattr(gpu, "looked_behind", gpu.looked_behind + 1))
    monkeypatch.setattr(cuda_timer, "torch_free_memory", lambda device: 1 << 34)
    return gpu


@keeps_graphs
@needs_cuda
def test_a_graph_in_the_device_s_memory_replays_what_a_graph_of_torch_does():
    x = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph):
        x += 1
    resident = ResidentGraph(graph, x.device)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            resident.replay()
            stream.synchronize()
    assert x.tolist() == [2.0] * 3


@needs_cuda
def test_a_kernel_s_workspace_lies_elsewhere_in_each_call_of_a_graph():
    places = []

    def with_workspace(q, k, v):
        workspace = torch.empty(16, device=q.device)
        if torch.cuda.is_current_stream_capturing():
            places.append(workspace.data_ptr())
        return v * 2

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
def test_a_backward_pass_whose_replay_is_not_that_of_its_data_is_timed_in_batches():
    """Captured, it works on what dout was before the capture."""
    seen = []

    def staling(gradients, dout):
        if torch.cuda.is_current_stream_capturing():
            dout = seen[-1]
        seen.append(dout.clone())
        return gradients(dout)

    short = Workload(128, heads=4, head_dim=64)
    assert measure(with_gradients(staling), DEVICES[-1], "backward", workload=short).mode == "batched"


def test_a_backward_pass_can_be_replayed_on_changed_data():
    """What it starts from stays, and its result follows dout, as a replayed graph's must."""
    work = work_of(attention, SMALL, torch.device("cpu"), "backward")
    call = work.stage(replayed=True)
    before = [gradient.clone() for gradient in call()]
    work.refresh()
    assert all(torch.equal(gradient, -was) for gradient, was in zip(call(), before, strict=True))


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
    assert slow.host > 190e-6
    assert slow.p50 == pytest.approx(plain.p50, rel=0.1)


class Busy(CudaTimer):
    """A stand-in for a GPU: its blocks take 20 ms, of which 10 are the kernel's."""

    def __init__(self):
        self.blocks = []

    def block(self, items):
        begun = time.perf_counter()
        time.sleep(0.02)
        self.blocks.append(([item.name for item in items], begun, time.perf_counter()))
        return [0.01 / len(items)] * len(items)


@pytest.fixture
def busy():
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.timer = Busy()
    stopwatch.guard.disturbance = lambda: None  # whatever else this machine does
    return stopwatch


def plan_of(renew):
    return Plan("events", 1, 0.01, 0.0, lambda: lambda: None, renew)


def test_the_device_rests_between_blocks_from_its_work_and_not_during_its_renewal(busy):
    for _ in range(3):
        busy._block(busy.timer, [Item("op", None)], plan_of(lambda: time.sleep(0.005)))
    ends, begins = [end for _, _, end in busy.timer.blocks], [begun for _, begun, _ in busy.timer.blocks]
    assert all(begun - end >= 0.0145 for end, begun in zip(ends, begins[1:], strict=False))


def test_a_gpu_works_right_before_its_first_block(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.05)
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    busy._blocks(plan_of(lambda: None), busy.timer, work, seconds=0.0, compiled_at=0.0)
    kinds = ["op" in names for names, _, _ in busy.timer.blocks]
    assert kinds[:4] == [False, False, False, True]
    assert all(kinds[3:])


@pytest.mark.parametrize(("seconds", "first"), [(2.9e-3, 1), (3.1e-3, 0)])
def test_a_slow_kernel_on_a_gpu_warmed_up_while_it_was_planned(busy, monkeypatch, seconds, first):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.0)
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    plan = plan_of(lambda: None)._replace(seconds=seconds)
    blocks, _ = busy._blocks(plan, busy.timer, work, seconds=0.0, compiled_at=0.0)
    taken = sum("op" in names for names, _, _ in busy.timer.blocks)
    assert (len(blocks), taken) == (3, 3 + first)


@pytest.mark.parametrize(("first", "second", "is_slow"), [(4e-3, 3.2e-3, True), (4e-3, 2.8e-3, False), (2.8e-3, 1.0, False)])
def test_a_slow_kernel_is_called_less_often_before_it_is_timed(monkeypatch, first, second, is_slow):
    looks = [Call(None, 3e-6, first), Call(None, 2e-6, second)]
    asked = []
    gpu = made_up(monkeypatch, seconds=1e-3)
    monkeypatch.setattr(gpu, "_estimate", lambda work, host, samples: asked.append((host, samples)) or 1e-3)
    monkeypatch.setattr(cuda_timer, "verified", lambda work: looks.pop())
    gpu.plan(work_of(attention, SMALL, gpu.device, "forward"))
    assert asked == [(2e-6, 1) if is_slow else (1e-5, 3)]
    assert looks == [], "its result is looked at twice"
    assert gpu.looked_behind == 1


@pytest.mark.parametrize("samples", [1, 3])
def test_an_estimate_is_the_median_of_its_samples(monkeypatch, samples):
    gpu = made_up(monkeypatch)
    monkeypatch.setattr(gpu, "block", lambda items: [9.0, 1.0, 2.0][: len(items)])
    work = work_of(attention, SMALL, gpu.device, "forward")
    assert CudaTimer._estimate(gpu, work, 0.0, samples) == {1: 9.0, 3: 2.0}[samples]
    assert CudaTimer._estimate(gpu, work, 0.06, samples) is None, "no backlog holds for so long"
    monkeypatch.setattr(gpu, "block", raising(BacklogError("awake")))
    assert CudaTimer._estimate(gpu, work, 0.0, samples) is None


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(
    ("recorded", "host", "seconds", "mode"),
    [
        (None, 1.9e-3, 1e-5, "graph"),
        (None, 2.1e-3, 1e-5, "host"),
        (None, 3.9e-3, 1e-3, "events"),
        (None, 4.1e-3, 1e-3, "host"),
        ("graph", 3.9e-3, 1e-5, "graph"),
        ("graph", 4.1e-3, 1e-5, "host"),
        ("host", 0.9e-3, 1e-5, "graph"),
        ("host", 1.1e-3, 1e-5, "host"),
        (None, 1e-5, None, "host"),
        (None, 1e-5, 249e-6, "graph"),
        (None, 1e-5, 251e-6, "events"),
        ("batched", 1e-5, 1e-5, "batched"),
    ],
)
def test_the_mode_is_that_of_the_device_s_and_the_host_s_time(monkeypatch, recorded, host, seconds, mode):
    monkeypatch.setattr(cuda_timer, "graphs_of", lambda *_, are_resident: [print])
    gpu = made_up(monkeypatch, seconds)
    monkeypatch.setattr(gpu, "_launching", lambda work: host)
    plan = gpu.plan(work_of(attention, SMALL, gpu.device, "forward"), recorded)
    assert (plan.mode, plan.host) == (mode, host)


@pytest.mark.parametrize(("gigabytes", "sets", "moves"), [(16, 6, True), (0, 1, False)])
def test_where_memory_is_scarce_tensors_stay_where_they_are(monkeypatch, gigabytes, sets, moves):
    gpu = made_up(monkeypatch, seconds=1e-3)
    monkeypatch.setattr(cuda_timer, "torch_free_memory", lambda device: gigabytes << 30)
    work = work_of(attention, SMALL, gpu.device, "forward")
    plan = gpu.plan(work)
    assert len(work.sets) == sets
    assert (plan.renew != work.refresh) is moves


class Event:
    """A stand-in for a CUDA event on a device that is asleep until `Event.awake`; a sample takes a millisecond."""

    awake = 0.0
    log: list[str]

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.log.append("event")

    def query(self):
        self.log.append("look")
        return time.perf_counter() > Event.awake

    def elapsed_time(self, end):
        return 1.0


@pytest.fixture
def asleep(monkeypatch):
    """A timer of such a device."""

    def sleep(seconds):
        Event.log, Event.awake = ["sleep"], time.perf_counter() + seconds

    gpu = made_up(monkeypatch)
    monkeypatch.setattr(gpu, "_sleep", sleep)
    monkeypatch.setattr(gpu, "_flush", lambda: Event.log.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Event.log.append("wait"))
    return gpu


def test_a_block_is_launched_while_the_device_sleeps_each_sample_between_two_events(asleep, monkeypatch):
    def stage():
        Event.log.append("stage")
        return lambda: Event.log.append("call")

    monkeypatch.setattr(cuda_timer, "_SHORTEST_BACKLOG_SECONDS", 5.0)
    assert asleep.block([Item("op", stage, 4)] * 2) == [0.25e-3] * 2
    assert Event.log == ["sleep", *["stage", "flush", "event", "call", "event"] * 2, "look", "wait"]


def test_a_backlog_is_as_long_as_the_launches_of_the_block_before_took(asleep, monkeypatch):
    def stage():
        staged.append(1)
        time.sleep(next(pauses))
        return lambda: None

    monkeypatch.setattr(cuda_timer, "_BACKLOG_MARGIN", 10.0)  # however busy the machine
    pauses = itertools.chain([10e-3] * 4, itertools.repeat(10e-3, 4), itertools.repeat(0.0))
    taken = []
    for _ in range(5):
        staged = []
        asleep.block([Item("op", stage)] * 2)
        taken.append(len(staged))
    assert taken == [4, 2, 2, 2, 2]
    assert asleep._backlogs["op", "op"] < 50e-3, "it is short again"
    assert asleep._backlogs.get(("another",)) is None
    asleep.plan(work_of(attention, SMALL, asleep.device, "forward"), "batched")
    assert asleep._backlogs == {}


def test_a_device_that_cannot_be_kept_waiting_is_no_timer(asleep, monkeypatch):
    monkeypatch.setattr(cuda_timer, "_MOST_BACKLOG_SECONDS", 2e-3)
    with pytest.raises(BacklogError, match=r"launching 1 samples took 0\.\d+ s, longer than the device can be kept waiting"):
        asleep.block([Item("op", lambda: time.sleep(5e-3) or print)])
    assert asleep._backlogs["op",] == 2e-3


def test_launching_is_told_from_waiting(monkeypatch):
    log = []
    monkeypatch.setattr(timer, "wait", lambda device: log.append("wait") or time.sleep(20e-3))
    work = SimpleNamespace(device=None, stage=lambda: log.append("stage") or (lambda: log.append("call") or "out"))
    value, launched, done = timer.called(work)
    assert log == ["stage", "wait", "call", "wait"]
    assert value == "out"
    assert launched < 15e-3 < 19e-3 < done < 39e-3


def test_all_calls_of_a_sample_are_staged_before_the_first_is_made():
    log = []
    timer.repeated(lambda: log.append("stage") or (lambda: log.append("call")), 3)()()
    assert log == ["stage"] * 3 + ["call"] * 3


def test_a_gpu_whose_power_is_capped_does_light_work_until_it_has_its_clock_back(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.01)
    says = iter([True, True, False])
    monkeypatch.setattr(busy.guard, "is_capped", lambda: next(says))
    busy._warm()
    assert [set(names) for names, _, _ in busy.timer.blocks] == [{"compute", "memory"}, {"memory"}, {"memory"}]


def test_a_gpu_whose_power_is_capped_for_good_is_timed_as_it_is(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.0)
    busy._patience = 0.05
    monkeypatch.setattr(busy.guard, "is_capped", lambda: True)
    busy._warm()
    waited = len(busy.timer.blocks)
    assert 1 <= waited <= 3
    busy._warm()
    assert len(busy.timer.blocks) == waited
    monkeypatch.setattr(busy.guard, "is_capped", lambda: False)
    busy._warm()
    assert busy._patience > 0


@pytest.mark.parametrize(("seconds", "narrow"), [(99e-6, True), (101e-6, False)])
def test_short_kernels_need_not_be_known_as_well(busy, seconds, narrow):
    busy.device = torch.device("cuda")
    blocks = [{"op": [1.0 + share]} for share in (-0.003, -0.002, 0.0, 0.0, 0.002, 0.003)]
    assert busy._is_narrow(blocks, plan_of(None)._replace(seconds=seconds)) is narrow


def test_a_block_is_repeated_while_it_is_disturbed_and_kept_in_the_end(monkeypatch):
    stopwatch = Stopwatch(torch.device("cpu"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    said = iter(["hot", None, *["hot"] * 1000])
    monkeypatch.setattr(stopwatch.guard, "disturbance", lambda: next(said))
    latency = stopwatch.measure(work_of(attention, SMALL, torch.device("cpu"), "forward"), SMALL.id, "kernel", seconds=0.0)
    assert latency.disturbances == ("hot",)
    assert latency.blocks == 3


def test_a_time_in_batches_is_never_held_against_one_in_a_graph(monkeypatch):
    cpu = torch.device("cpu")
    stopwatch = Stopwatch(cpu)
    plan = stopwatch.timer.plan
    monkeypatch.setattr(stopwatch.timer, "plan", lambda work, mode: plan(work, mode)._replace(mode="batched"))
    for recorded, disturbances in (("batched", 0), ("graph", 1), ("replay", 1)):
        latency = stopwatch.measure(work_of(attention, SMALL, cpu, "forward"), SMALL.id, "kernel", recorded, seconds=0.0)
        assert sum("which cannot be captured now" in words for words in latency.disturbances) == disturbances
    monkeypatch.setattr(stopwatch.timer, "plan", lambda work, mode: plan(work, mode)._replace(mode="replay"))
    for recorded, disturbances in (("replay", 0), ("graph", 1)):
        latency = stopwatch.measure(work_of(attention, SMALL, cpu, "forward"), SMALL.id, "kernel", recorded, seconds=0.0)
        assert sum("in the device's memory" in words for words in latency.disturbances) == disturbances


@pytest.mark.parametrize(("spent", "left"), [(0.1, 0.3), (0.2, 0.25), (5.0, 0.1)])
def test_a_measurement_on_a_gpu_ends_within_half_a_second(busy, spent, left):
    assert busy._seconds_left(spent) == 0.8
    busy.device = torch.device("cuda")
    assert busy._seconds_left(spent) == pytest.approx(left)


def test_a_block_that_would_end_too_late_is_not_begun(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.0)
    monkeypatch.setattr(busy, "_now", lambda: 0.02 * sum("op" in names for names, _, _ in busy.timer.blocks))
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    blocks, _ = busy._blocks(plan_of(lambda: None), busy.timer, work, seconds=0.11, compiled_at=0.0)
    assert len(blocks) == 5


def test_a_block_that_was_repeated_tells_nothing_of_how_long_the_next_takes(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.0)
    ends = iter([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.9, 0.9, 1.0, 1.0, 1.1])  # of each block, behind when the first begins
    monkeypatch.setattr(busy, "_now", lambda: next(ends))
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    blocks, _ = busy._blocks(plan_of(lambda: None), busy.timer, work, seconds=1.05, compiled_at=0.0)
    assert len(blocks) == 4


def test_the_clock_of_a_measurement_stands_still_while_others_have_the_core(busy, monkeypatch):
    monkeypatch.setattr(busy.guard, "lost", lambda: 100.0)
    assert busy._now() == pytest.approx(time.perf_counter() - 100.0, abs=1.0)


def test_waiting_for_the_clock_takes_nothing_from_the_blocks(busy, monkeypatch):
    monkeypatch.setattr("pytest_attn.latency.protocol._WARMING_SECONDS", 0.0)
    says = iter([True, True, True, False])  # each is followed by a block of 20 ms
    monkeypatch.setattr(busy.guard, "is_capped", lambda: next(says))
    spent = []
    monkeypatch.setattr(busy, "_seconds_left", lambda seconds: spent.append(seconds) or 0.0)
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    busy._blocks(plan_of(lambda: None)._replace(seconds=1e-3), busy.timer, work, seconds=None, compiled_at=time.perf_counter())
    assert 0.019 < spent[0] < 0.04, "the one block that warms up takes 20 ms"


def test_an_anchor_s_sample_may_be_several_calls(device):
    calls = []
    item = _anchor_item("compute", Anchor("", lambda: calls.append(0), 3))
    item.stage()()
    assert len(calls) == item.calls == 3


def test_the_plugin_s_own_backends_can_be_timed(device):
    registry = Registry()
    for name in ("math", "eager", "sdpa"):
        assert measure(registry[name], device).p50 > 0


def test_sets_of_tensors_are_alike_and_apart(device):
    work = work_of(attention, SMALL, device, "forward")
    work.rotate_over(3)
    pointers = {t.data_ptr() for tensors in work.sets for t in tensors}
    assert len(pointers) == 9
    assert all(torch.equal(work.sets[0][0], tensors[0]) for tensors in work.sets)
    work.refresh()
    assert torch.equal(work.sets[0][2], work.sets[2][2])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_moves_is_the_same_elsewhere(device, direction):
    work = work_of(attention, SMALL, device, direction)
    work.rotate_over(3)
    work.verify("first", work.result(work.stage()()))
    before = [tensor for tensors in work.sets for tensor in (*tensors, work.dout)]
    work.move()
    moved = [tensor for tensors in work.sets for tensor in (*tensors, work.dout)]
    assert not {tensor.data_ptr() for tensor in moved} & {tensor.data_ptr() for tensor in before}
    assert all(torch.equal(tensor, was) for tensor, was in zip(moved, before, strict=True))
    assert [tensor.requires_grad for tensor in moved] == [tensor.requires_grad for tensor in before]
    work.refresh()
    work.verify("moved, with another sign", work.result(work.stage()()))


@pytest.mark.parametrize(("fault", "words"), [(float("nan"), "NaN: memory"), (-1.0, "200% of its norm")])
def test_one_result_of_many_that_is_not_right_is_seen(fault, words):
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    right = work.result(work.stage()())
    work.verify("alike", right, right)
    with pytest.raises(StaleError, match=words):
        work.verify("one is not", right, right * fault, right)


def test_strides_survive_the_copies():
    base = torch.randn(1, 64, 2, 32)
    work = Work(attention, [base.transpose(1, 2)] * 3, base.transpose(1, 2).contiguous(), "forward")
    work.rotate_over(2)
    work.move()
    assert work.sets[1][0].stride() == base.transpose(1, 2).stride()
    assert torch.equal(work.sets[1][0], base.transpose(1, 2))


def test_the_host_s_clock_counts_the_calls_of_a_sample():
    timer = HostTimer(torch.device("cpu"))
    calls = []

    def stage():
        return lambda: [calls.append(time.sleep(0.002)) for _ in range(5)]

    (seconds,) = timer.block([Item("op", stage, 5)])
    assert len(calls) == 5
    assert seconds == pytest.approx(0.002, rel=0.5)
