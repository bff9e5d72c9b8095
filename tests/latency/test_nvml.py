"""Which device NVML is asked about, what it says of it, and what nobody can ask; the stand-in says what the library says."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import HERE, install, uninstall
from fakes.driver import CUDA, ME
from fakes.gpus import UUID, torch_says

from pytest_attn.backends import library
from pytest_attn.latency.disturbance import DisturbanceMonitor


# which device
def test_a_cpu_is_no_gpu_and_needs_no_library():
    monitor = DisturbanceMonitor.of(torch.device("cpu"))
    assert monitor.absent_because == "cpu is not an NVIDIA GPU"
    monitor.begin()
    assert (monitor.disturbance(), monitor.conditions(), monitor.notes) == (None, {}, [])


def test_rocm_is_not_asked(nvml, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert DisturbanceMonitor.of(CUDA).absent_because == "cuda:0 is not an NVIDIA GPU"
    assert not nvml.CALLS


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(library, "_version_of", lambda distribution: None)
    monitor = DisturbanceMonitor.of(CUDA)
    assert monitor.absent_because == "nvidia-ml-py is not installed; pip install nvidia-ml-py"
    assert monitor.disturbance() is None


def test_a_library_that_cannot_be_imported_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", None)
    install(monkeypatch, tmp_path, {"pynvml.py": "raise OSError('no luck')\n"}, "nvidia-ml-py")
    try:
        assert DisturbanceMonitor.of(CUDA).absent_because == "pynvml is installed but cannot be imported: OSError: no luck"
    finally:
        uninstall(["pynvml.py"])


def test_importing_the_module_imports_neither_torch_nor_pynvml(nvml):
    show = "import sys, pytest_attn.latency.nvml; print(*{'torch', 'pynvml'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])}
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == ""


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("nvmlInit", 12, "NVML says nothing of cuda:0: NVML Shared Library Not Found"),
        ("nvmlInit", 9, "NVML says nothing of cuda:0: Driver Not Loaded"),
        ("nvmlDeviceGetHandleByUUID", 15, "NVML says nothing of cuda:0: GPU is lost"),
    ],
)
def test_what_nvml_says_at_the_start_is_quoted(nvml, function, code, words):
    nvml.FAULTS[function] = code
    if function != "nvmlInit":
        nvml.GPUS.clear()
    monitor = DisturbanceMonitor.of(CUDA)
    assert monitor.absent_because == words
    assert (monitor.disturbance(), monitor.conditions()) == (None, {})


def test_a_torch_without_a_driver_is_quoted(nvml, monkeypatch):
    def synchronize(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert DisturbanceMonitor.of(CUDA).absent_because == "NVML says nothing of cuda:0: Torch not compiled with CUDA enabled"


@pytest.mark.parametrize("strings", [str, bytes])
@pytest.mark.parametrize(
    ("properties", "visible"),
    [
        ({"uuid": UUID, "pci_domain_id": 0, "pci_bus_id": 0x18, "pci_device_id": 0}, "0"),
        ({"uuid": "unknown", "pci_domain_id": 1, "pci_bus_id": 0xDB, "pci_device_id": 0}, "0"),
        ({"pci_domain_id": 1, "pci_bus_id": 0xDB, "pci_device_id": 0}, "0"),
        ({"name": "GPU"}, "1"),
        ({"name": "GPU"}, " 1, 0"),
        ({"name": "GPU"}, f"GPU-{UUID}"),
    ],
)
def test_the_device_is_found_by_uuid_then_by_bus_then_among_the_visible(nvml, gpu, monkeypatch, properties, visible, strings):
    monkeypatch.setattr(nvml, "STRINGS", strings)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    torch_says(monkeypatch, **properties)
    monitor = DisturbanceMonitor.of(CUDA)
    assert monitor.absent_because is None
    gpu.reasons = nvml.nvmlClocksEventReasonHwThermalSlowdown
    assert monitor.disturbance() == "hardware thermal slowdown"


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_without_a_list_of_visible_devices_the_index_counts(nvml, monkeypatch, device, index):
    torch_says(monkeypatch, name="GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monitor = DisturbanceMonitor.of(torch.device(device))
    nvml.GPUS[index].reasons = nvml.nvmlClocksEventReasonHwSlowdown
    assert monitor.disturbance() == "hardware slowdown"


def test_a_mig_slice_has_its_own_processes_and_the_clocks_of_the_whole(nvml, gpu, monkeypatch):
    gpu.mig = [nvml.NVML_FEATURE_ENABLED, nvml.NVML_FEATURE_ENABLED]
    gpu.pids = [ME, 70]
    piece = nvml.Gpu("MIG-90443af0-2fe6-57fb-86fe-54186d5a6581", name="NVIDIA H200 MIG 1g.18gb", slice_of=gpu)
    piece.pids = [ME]
    nvml.GPUS.append(piece)
    torch_says(monkeypatch, uuid="90443af0-2fe6-57fb-86fe-54186d5a6581")
    monitor = DisturbanceMonitor.of(CUDA)
    found = monitor.conditions()
    assert (found["mig"], found["sm_clock_mhz"]) == ("NVIDIA H200 MIG 1g.18gb", 1515)
    gpu.pids.append(71)
    assert monitor.disturbance() is None
    piece.pids.append(72)
    assert monitor.disturbance() == "another process on this GPU (pid 72)"
    gpu.reasons = nvml.nvmlClocksEventReasonSwThermalSlowdown
    assert "software thermal slowdown" in monitor.disturbance()


# conditions
def test_conditions_carry_their_units(nvml, gpu):
    gpu.reasons = nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonSyncBoost
    assert DisturbanceMonitor.of(CUDA).conditions() == {
        "sm_clock_mhz": 1515,
        "memory_clock_mhz": 2619,
        "temperature_c": 41,
        "power_w": 440.3,
        "power_limit_w": 700.0,
        "driver": "570.86.15",
        "reasons": "software power cap, sync boost",
        "mig": "",
    }


def test_conditions_of_an_old_library_are_text_too(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "STRINGS", bytes)
    assert DisturbanceMonitor.of(CUDA).conditions()["driver"] == "570.86.15"


def test_a_whole_gpu_in_mig_mode_says_so(nvml, gpu):
    gpu.mig = [nvml.NVML_FEATURE_ENABLED, nvml.NVML_FEATURE_DISABLED]
    assert DisturbanceMonitor.of(CUDA).conditions()["mig"] == "on"


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_clock_mhz", "memory_clock_mhz"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit_w"}),
        ("nvmlDeviceGetMigMode", {"mig"}),
        ("nvmlSystemGetDriverVersion", {"driver"}),
    ],
)
def test_conditions_are_what_could_be_read(nvml, gpu, function, missing):
    monitor = DisturbanceMonitor.of(CUDA)
    whole = monitor.conditions()
    faults = nvml.FAULTS if "System" in function else gpu.faults
    faults[function] = nvml.NVML_ERROR_NOT_SUPPORTED
    assert set(whole) - set(monitor.conditions()) == missing


# the fake
def test_the_fake_says_what_the_real_library_says():
    real = pytest.importorskip("pynvml", reason="compares with nvidia-ml-py")
    spec = importlib.util.spec_from_file_location("fake_pynvml", Path(HERE, "nvml.py"))
    fake = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fake  # its error classes are made by name
    try:
        spec.loader.exec_module(fake)
    finally:
        del sys.modules[spec.name]
    names = [name for name in vars(fake) if name.lower().startswith(("nvml", "c_nvml")) and name != "nvmlFriendlyObject"]
    assert len(names) > 60
    for name in names:
        theirs, ours = getattr(real, name), getattr(fake, name)
        if isinstance(ours, int):
            assert ours == theirs, name
        elif inspect.isfunction(ours):
            assert str(inspect.signature(ours)) == str(inspect.signature(theirs)), name
        elif hasattr(ours, "_fields_"):
            assert [(field, kind.__name__) for field, kind in ours._fields_] == [
                (field, kind.__name__) for field, kind in theirs._fields_
            ], name
        else:
            assert [kind.__name__ for kind in ours.__mro__] == [kind.__name__ for kind in theirs.__mro__], name
    for value, kind in fake.NVMLError._valClassMapping.items():
        ours, theirs = fake.NVMLError(value), real.NVMLError(value)
        assert (type(ours).__name__, ours.value, str(ours)) == (type(theirs).__name__, theirs.value, str(theirs))
        assert isinstance(ours, kind)
    assert type(fake.NVMLError(0)).__name__ == type(real.NVMLError(0)).__name__ == "NVMLError"
