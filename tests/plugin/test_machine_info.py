"""What pytest-benchmark's files say of the machine: its GPUs, driver, CUDA and torch."""

import json
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from pytest_attn.cases import pytest_benchmark


class Nvml(ModuleType):
    """NVML of a machine with these GPUs; an old version of the package gives bytes, and the driver may not answer."""

    def __init__(self, *names, is_old=False, broken=""):
        super().__init__("pynvml")
        self.log = []
        text = (lambda value: value.encode()) if is_old else (lambda value: value)
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(names),
            "nvmlDeviceGetHandleByIndex": lambda index: SimpleNamespace(index=index),
            "nvmlDeviceGetName": lambda handle: text(names[handle.index]),
            "nvmlSystemGetDriverVersion": lambda: text("580.95.05"),
            "nvmlSystemGetCudaDriverVersion": lambda: 12090,
        }
        for name, answer in answers.items():
            setattr(self, name, self.fails if name == broken else self.logged(name, answer))

    def logged(self, name, answer):
        return lambda *args: [self.log.append(name), answer(*args)][1]

    def fails(self, *args):
        raise OSError("no answer")


@pytest.mark.parametrize("is_old", [False, True])
def test_machine_info_names_gpu_driver_cuda_and_torch(monkeypatch, is_old):
    nvml = Nvml("NVIDIA H200", "NVIDIA H200", "NVIDIA L4", is_old=is_old)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    info = {"node": "here"}
    pytest_benchmark.machine_info(None, info)
    gpu = {"gpu": "NVIDIA H200, NVIDIA L4", "driver": "580.95.05", "cuda": "12.9", "torch": metadata.version("torch")}
    assert info == {"node": "here", "attn": gpu}
    assert nvml.log[-1] == "nvmlShutdown"
    json.dumps(info)  # pytest-benchmark compares it without its encoder for other types


@pytest.mark.parametrize("nvml", [None, Nvml(), Nvml("x", broken="nvmlInit"), Nvml("x", broken="nvmlDeviceGetName")])
def test_machine_info_adds_nothing_without_a_gpu_that_answers(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    info = {"node": "here"}
    pytest_benchmark.machine_info(None, info)
    assert info == {"node": "here"}
    if nvml is not None and "nvmlInit" in nvml.log:
        assert nvml.log[-1] == "nvmlShutdown"


def test_machine_info_without_torch_says_none(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", version)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("NVIDIA H200"))
    pytest_benchmark.machine_info(None, info := {})
    assert info["attn"]["torch"] is None
