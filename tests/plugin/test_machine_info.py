"""What pytest-benchmark's files say of the machine: its GPUs, driver, CUDA and torch."""

import json
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
from fakes.benchmark import CONFTEST, MEASURING

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


@pytest.mark.slow("imports torch anew")
def test_machine_info_reaches_the_json_without_torch_and_despite_a_deprecated_package(bench, pytester):
    deprecated = f"""
import warnings
warnings.warn("use nvidia-ml-py", FutureWarning)
{
        "".join(
            f"{name} = lambda *_: {value!r}" + chr(10)
            for name, value in [
                ("nvmlInit", None),
                ("nvmlShutdown", None),
                ("nvmlDeviceGetCount", 1),
                ("nvmlDeviceGetHandleByIndex", 0),
                ("nvmlDeviceGetName", "NVIDIA H200"),
                ("nvmlSystemGetDriverVersion", "580"),
                ("nvmlSystemGetCudaDriverVersion", 13000),
            ]
        )
    }"""
    pytester.makepyfile(pynvml=deprecated)
    loaded = "def pytest_unconfigure():\n    import sys\n    print('torch loaded:', 'torch' in sys.modules)\n"
    pytester.makeconftest(CONFTEST + loaded)
    pytester.syspathinsert()
    args = ("-s", "--benchmark-json=out.json")
    result = bench(*args, source=MEASURING.format(taken=True), in_process=False, passed=2)
    result.stdout.fnmatch_lines(["torch loaded: False"])
    found = json.loads((pytester.path / "out.json").read_text())["machine_info"]["attn"]
    assert found == {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": metadata.version("torch")}
