"""The driver is asked for a graph in the device's memory, and what it answers is heard. On a GPU: test_timer.py."""

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pytest_attn.latency import captures, resident
from pytest_attn.latency.resident import ResidencyError, ResidentGraph
from pytest_attn.latency.work import work_of
from tests.test_timer import SMALL, attention

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
        monkeypatch.setattr(resident, "_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
        return driver

    return plant


def graph():
    return SimpleNamespace(raw_cuda_graph=lambda: CAPTURED)


def test_a_graph_is_instantiated_for_the_device_uploaded_launched_and_destroyed(driver_of):
    driver = driver_of(Driver())
    made = ResidentGraph(graph(), torch.device("cpu"))
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
    with pytest.raises(ResidencyError, match=f"{name}: CUDA error 801"):
        ResidentGraph(graph(), torch.device("cpu")).replay()


def test_a_driver_that_is_too_old_is_told(driver_of):
    driver_of(object())
    with pytest.raises(ResidencyError, match="cuGraphInstantiateWithFlags: this driver has no such function"):
        ResidentGraph(graph(), torch.device("cpu"))


def test_a_machine_without_the_driver_has_no_such_graphs(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    resident._driver.cache_clear()
    with pytest.raises(ResidencyError, match=r"no driver: .*cannot open"):
        ResidentGraph(graph(), torch.device("cpu"))


def test_an_older_torch_keeps_no_graph(monkeypatch):
    def old():
        return object()

    with pytest.raises(ResidencyError, match=r"torch 2\.\d+.* keeps no graph"):
        captured(monkeypatch, old)


def test_what_a_driver_refuses_is_told_from_what_cannot_be_captured(monkeypatch):
    def refuse(graph, device):
        raise ResidencyError("CUDA error 801")

    monkeypatch.setattr(captures, "ResidentGraph", refuse)
    with pytest.raises(ResidencyError, match="801"):
        captured(monkeypatch, lambda keep_graph: object())


def test_what_cannot_be_captured_is_no_graph(monkeypatch):
    def refuse(graph, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    assert captured(monkeypatch, lambda keep_graph: object(), refuse) == []


@pytest.mark.parametrize(("seconds", "number"), [(0.0, 6), (0.02, 6), (0.035, 4), (0.05, 3), (1.0, 3)])
def test_a_host_that_is_slow_to_capture_captures_fewer_graphs(monkeypatch, seconds, number):
    made = []
    monkeypatch.setattr(captures, "_captured", lambda *_: made.append(1) or print)
    monkeypatch.setattr(captures, "time", SimpleNamespace(perf_counter=lambda: len(made) * seconds))
    assert captured(monkeypatch, None) == [print] * number


def captured(monkeypatch, make_graph, capturing=lambda graph, stream: nullcontext()):
    """Capture a kernel on a CPU, with stand-ins for what CUDA does."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make_graph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    for name, answer in {"Stream": stream, "current_stream": stream, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(captures, "capturing", capturing)
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    return captures.graphs_of(work, 4, 6, are_resident=True)
