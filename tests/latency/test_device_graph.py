"""The driver is asked for a graph in the device's memory, and what it answers is heard. On a GPU: test_timer.py."""

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from judging import SMALL, attention, timed

from pytest_attn.latency import cuda_timer
from pytest_attn.latency.cuda_timer import DeviceGraph, DeviceGraphError
from pytest_attn.latency.work import StaleError

CAPTURED, EXECUTABLE, STREAM = 11, 22, 33


class Driver:
    """A stand-in for libcuda, which gives each call its answer, 0 where none is given."""

    def __init__(self, **answers):
        self.answers, self.asked, self.capture_mode = answers, [], 1

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuGraphInstantiateWithFlags":
                room, captured, flags = arguments
                room._obj.value = EXECUTABLE
                self.asked.append((name, captured.value, flags.value))
            elif name == "cuThreadExchangeStreamCaptureMode":
                self.asked.append((name, arguments[0]._obj.value))
                arguments[0]._obj.value, self.capture_mode = self.capture_mode, arguments[0]._obj.value
            else:
                self.asked.append((name, *(argument.value for argument in arguments)))
            return self.answers.get(name, 0)

        return call


@pytest.fixture
def driver_of(monkeypatch):
    def plant(driver):
        monkeypatch.setattr(cuda_timer, "_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
        return driver

    return plant


def graph():
    return SimpleNamespace(raw_cuda_graph=lambda: CAPTURED)


def test_a_graph_is_instantiated_for_the_device_uploaded_launched_and_destroyed(driver_of):
    driver = driver_of(Driver())
    made = DeviceGraph(graph(), torch.device("cpu"))
    made.replay()
    del made
    gc.collect()
    assert driver.asked == [
        ("cuGraphInstantiateWithFlags", CAPTURED, 4),
        ("cuGraphUpload", EXECUTABLE, STREAM),
        ("cuGraphLaunch", EXECUTABLE, STREAM),
        ("cuThreadExchangeStreamCaptureMode", 2),
        ("cuGraphExecDestroy", EXECUTABLE),
        ("cuThreadExchangeStreamCaptureMode", 1),
    ]


@pytest.mark.parametrize("name", ["cuGraphInstantiateWithFlags", "cuGraphUpload", "cuGraphLaunch"])
def test_a_driver_that_refuses_is_named(driver_of, name):
    driver_of(Driver(**{name: 801}))
    with pytest.raises(DeviceGraphError, match=f"{name}: CUDA error 801"):
        DeviceGraph(graph(), torch.device("cpu")).replay()


def test_a_driver_that_is_too_old_is_told(driver_of):
    driver_of(object())
    with pytest.raises(DeviceGraphError, match="cuGraphInstantiateWithFlags: this driver has no such function"):
        DeviceGraph(graph(), torch.device("cpu"))


def test_a_machine_without_the_driver_has_no_such_graphs(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_timer._driver.cache_clear()
    with pytest.raises(DeviceGraphError, match=r"no driver: .*cannot open"):
        DeviceGraph(graph(), torch.device("cpu"))


def test_an_older_torch_keeps_no_graph(monkeypatch):
    def old():
        return object()

    with pytest.raises(DeviceGraphError, match=r"torch 2\.\d+.* keeps no graph"):
        captured(monkeypatch, old)


def test_what_a_driver_refuses_is_told_from_what_cannot_be_captured(monkeypatch):
    def refuse(graph, device):
        raise DeviceGraphError("CUDA error 801")

    monkeypatch.setattr(cuda_timer, "DeviceGraph", refuse)
    with pytest.raises(DeviceGraphError, match="801"):
        captured(monkeypatch, lambda keep_graph: object())


def test_what_cannot_be_captured_is_no_graph(monkeypatch):
    def refuse(graph, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    assert captured(monkeypatch, lambda keep_graph: object(), refuse) == []


@pytest.mark.parametrize(("seconds", "number"), [(0.0, 6), (0.02, 6), (0.035, 4), (0.05, 3), (1.0, 3)])
def test_a_host_that_is_slow_to_capture_cuda_graphs_fewer_graphs(monkeypatch, seconds, number):
    made = []
    monkeypatch.setattr(cuda_timer, "_captured", lambda *_: made.append(1) or print)
    monkeypatch.setattr(cuda_timer, "time", SimpleNamespace(perf_counter=lambda: len(made) * seconds))
    assert captured(monkeypatch, None) == [print] * number


class Replayed:
    """A stand-in for a graph of torch, which replays what a kernel is said to do again with each call that it saw."""

    def __init__(self, again):
        self.again, self.calls = again, []

    def kernel(self, *tensors):
        out = attention(*tensors)
        self.calls.append((tensors, out))
        return out

    def replay(self):
        for tensors, out in self.calls[-4:]:
            self.again(tensors, out)


def graph_of(monkeypatch, again):
    """Return graphs of four calls whose replays do `again` with the tensors and the output of each."""
    graph = Replayed(again)
    return captured(monkeypatch, lambda: graph, kernel=graph.kernel, on_device=False), graph


def test_each_replay_has_data_of_its_own_and_one_of_its_results_is_looked_at(monkeypatch):
    (*_, stage), graph = graph_of(monkeypatch, lambda tensors, out: out.copy_(attention(*tensors)))
    work, seen = stage.__self__._work, set()
    for _ in range(3):
        replay = stage()
        replay()
        seen |= {float(t.double().sum()) for tensors, _ in graph.calls[-4:] for t in tensors}
        work.verify_call("replayed", replay, None)
    assert len(seen) > 2 * 4 * 3  # of 36; some may be drawn twice
    replay = stage()
    with pytest.raises(StaleError, match="replayed"):  # before it is
        work.verify_call("replayed", replay, None)


def test_a_graph_that_replays_other_results_is_refused(monkeypatch):
    with pytest.raises(StaleError, match="replayed in a graph, without gradients: its result is not"):
        graph_of(monkeypatch, lambda tensors, out: out.fill_(0.5))


def test_a_graph_that_has_captured_nothing_is_none(monkeypatch):
    assert graph_of(monkeypatch, lambda tensors, out: None)[0] == []


def captured(monkeypatch, make_graph, capturing=lambda graph, stream: nullcontext(), kernel=attention, on_device=True):
    """Capture a kernel on a CPU, with stand-ins for what CUDA does."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make_graph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    for name, answer in {"Stream": stream, "current_stream": stream, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(cuda_timer, "capturing", capturing)
    work = timed(kernel, SMALL, torch.device("cpu"), "forward")
    work.rotate_over(24)
    return cuda_timer.graphs_of(work, 4, 6, on_device)
