"""The driver is asked for a graph in the device's memory, and what it answers is heard. On a GPU: test_timer.py."""

import ctypes
import gc
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
        self.answers, self.asked = answers, []

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuGraphInstantiateWithFlags":
                room, captured, flags = arguments
                room._obj.value = EXECUTABLE
                self.asked.append((name, captured.value, flags.value))
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
        ("cuGraphExecDestroy", EXECUTABLE),
    ]


@pytest.mark.parametrize("name", ["cuGraphInstantiateWithFlags", "cuGraphUpload", "cuGraphLaunch"])
def test_a_driver_that_refuses_is_named(driver_of, name):
    driver_of(Driver(**{name: 801}))
    with pytest.raises(ResidencyError, match=f"{name}: CUDA error 801"):
        ResidentGraph(graph(), torch.device("cpu")).replay()


def test_a_machine_without_the_driver_has_no_such_graphs(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    resident._driver.cache_clear()
    with pytest.raises(ResidencyError, match=r"no driver: .*cannot open"):
        ResidentGraph(graph(), torch.device("cpu"))


@pytest.mark.parametrize("fault", [TypeError("unexpected keyword argument 'keep_graph'"), ResidencyError("CUDA error 801")])
def test_what_cannot_be_resident_is_no_graph(monkeypatch, fault):
    """An older torch does not keep the graph; a driver may refuse it."""

    def refuse(keep_graph=False):
        raise fault

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    work = work_of(attention, SMALL, torch.device("cpu"), "forward")
    assert captures.graphs_of(work, 4, 6, are_resident=True) == []
