import atexit
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import HERE, install, uninstall

from pytest_attn.backends import library
from pytest_attn.latency import guard as guard_module
from pytest_attn.latency.guard import ClockError, Guard, locked_clocks

CUDA = torch.device("cuda:0")
ME = os.getpid()
UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
OTHER = "00000000-8ff3-c2dc-3b0d-fafd804516ae"
SECOND = 1_000_000
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
UTILIZATION = "nvmlDeviceGetProcessUtilization"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"


class Clock:
    """The wall clock, in microseconds, which stands still until a test moves it."""

    def __init__(self):
        self.now = 1_700_000_000 * SECOND

    def time_ns(self):
        return self.now * 1000

    def passes(self, seconds):
        self.now += int(seconds * SECOND)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(guard_module, "time", clock)
    return clock


@pytest.fixture
def nvml(monkeypatch, tmp_path, clock):
    """A machine with two GPUs, of which torch calls the second one cuda:0."""
    install(monkeypatch, tmp_path, {"pynvml.py": "nvml.py"}, "nvidia-ml-py", "13.615.71")
    import pynvml

    pynvml.GPUS[:] = [pynvml.Gpu(f"GPU-{OTHER}", "00000000:18:00.0"), pynvml.Gpu(f"GPU-{UUID}", "00000001:DB:00.0")]
    pynvml.GPUS[1].pids = [ME]
    torch_says(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield pynvml
    uninstall(["pynvml.py"])


@pytest.fixture
def gpu(nvml):
    return nvml.GPUS[1]


def torch_says(monkeypatch, **properties):
    properties = properties or {"uuid": UUID}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


# which device


def test_a_cpu_has_no_guard_and_needs_no_library():
    guard = Guard.of(torch.device("cpu"))
    assert guard.absent_because == "cpu is no NVIDIA GPU"
    guard.begin()
    assert (guard.disturbance(), guard.conditions(), guard.notes) == (None, {}, [])


def test_rocm_is_not_asked(nvml, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert Guard.of(CUDA).absent_because == "cuda:0 is no NVIDIA GPU"
    assert not nvml.CALLS


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(library, "_is_installed", lambda distribution: False)
    guard = Guard.of(CUDA)
    assert guard.absent_because == "nvidia-ml-py is not installed; pip install nvidia-ml-py"
    assert guard.disturbance() is None


def test_a_library_that_cannot_be_imported_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", None)
    install(monkeypatch, tmp_path, {"pynvml.py": "raise OSError('no luck')\n"}, "nvidia-ml-py")
    try:
        assert Guard.of(CUDA).absent_because == "pynvml is installed but cannot be imported: OSError: no luck"
    finally:
        uninstall(["pynvml.py"])


def test_importing_the_module_imports_neither_torch_nor_pynvml(nvml):
    show = "import sys, pytest_attn.latency.guard; print(*{'torch', 'pynvml'} & set(sys.modules))"
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
    guard = Guard.of(CUDA)
    assert guard.absent_because == words
    assert (guard.disturbance(), guard.conditions()) == (None, {})


def test_a_torch_without_a_driver_is_quoted(nvml, monkeypatch):
    def synchronize(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert Guard.of(CUDA).absent_because == "NVML says nothing of cuda:0: Torch not compiled with CUDA enabled"


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
    guard = Guard.of(CUDA)
    assert guard.absent_because is None
    gpu.reasons = nvml.nvmlClocksEventReasonHwThermalSlowdown
    assert guard.disturbance() == "hardware thermal slowdown"


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_without_a_list_of_visible_devices_the_index_counts(nvml, monkeypatch, device, index):
    torch_says(monkeypatch, name="GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    guard = Guard.of(torch.device(device))
    nvml.GPUS[index].reasons = nvml.nvmlClocksEventReasonHwSlowdown
    assert guard.disturbance() == "hardware slowdown"


def test_a_mig_slice_has_its_own_processes_and_the_clocks_of_the_whole(nvml, gpu, monkeypatch):
    gpu.mig = [nvml.NVML_FEATURE_ENABLED, nvml.NVML_FEATURE_ENABLED]
    gpu.pids = [ME, 70]
    piece = nvml.Gpu("MIG-90443af0-2fe6-57fb-86fe-54186d5a6581", name="NVIDIA H200 MIG 1g.18gb", slice_of=gpu)
    piece.pids = [ME]
    nvml.GPUS.append(piece)
    torch_says(monkeypatch, uuid="90443af0-2fe6-57fb-86fe-54186d5a6581")
    guard = Guard.of(CUDA)
    found = guard.conditions()
    assert (found["mig"], found["sm_clock_mhz"]) == ("NVIDIA H200 MIG 1g.18gb", 1515)
    gpu.pids.append(71)
    assert guard.disturbance() is None
    piece.pids.append(72)
    assert guard.disturbance() == "another process on this GPU (pid 72)"
    gpu.reasons = nvml.nvmlClocksEventReasonSwThermalSlowdown
    assert "software thermal slowdown" in guard.disturbance()


# reasons and counters


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x8, "hardware slowdown"),
        (0x20, "software thermal slowdown"),
        (0x40, "hardware thermal slowdown"),
        (0x80, "hardware power brake"),
        (0x48, "hardware thermal slowdown, hardware slowdown"),
        (0x1, None),
        (0x2, None),
        (0x4, None),
        (0x10, None),
        (0x100, None),
    ],
)
@pytest.mark.parametrize("names", ["both", "new library", "old library", "old driver"])
def test_some_reasons_disturb(nvml, gpu, monkeypatch, bits, words, names):
    if names == "new library":
        monkeypatch.delattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    if names == "old library":
        monkeypatch.delattr(nvml, REASONS)
        monkeypatch.delattr(nvml, "nvmlDeviceGetFieldValues")
    if names == "old driver":
        gpu.faults[REASONS] = gpu.faults["nvmlDeviceGetFieldValues"] = nvml.NVML_ERROR_FUNCTION_NOT_FOUND
    guard = Guard.of(CUDA)
    guard.begin()
    assert guard.disturbance() is None
    gpu.reasons = bits
    assert guard.disturbance() == words


def test_a_reason_that_ended_before_the_block_ended_is_gone(nvml, gpu):
    gpu.reasons = nvml.nvmlClocksEventReasonHwSlowdown
    guard = Guard.of(CUDA)
    guard.begin()
    gpu.reasons = nvml.nvmlClocksEventReasonGpuIdle
    assert guard.disturbance() is None


@pytest.mark.parametrize(
    ("counters", "key", "words"),
    [
        ("violations", 1, "thermal violation"),
        ("fields", 269, "software thermal slowdown"),
        ("fields", 270, "hardware thermal slowdown"),
        ("fields", 271, "hardware power brake"),
    ],
)
def test_a_counter_shows_what_no_reason_shows_any_more(nvml, gpu, counters, key, words):
    getattr(gpu, counters)[key] = 5_000
    guard = Guard.of(CUDA)
    assert guard.disturbance() is None
    getattr(gpu, counters)[key] += 1
    guard.begin()
    assert guard.disturbance() is None, "it grew before the block"
    getattr(gpu, counters)[key] += 1
    assert guard.disturbance() == words
    assert guard.disturbance() is None, "the next block began with it"


@pytest.mark.parametrize(
    ("function", "counters", "key", "others", "other", "words"),
    [
        ("nvmlDeviceGetViolationStatus", "violations", 1, "fields", 270, "hardware thermal slowdown"),
        ("nvmlDeviceGetFieldValues", "fields", 269, "violations", 1, "thermal violation"),
    ],
)
def test_counters_that_cannot_be_read_are_silent(nvml, gpu, function, counters, key, others, other, words):
    gpu.faults[function] = nvml.NVML_ERROR_NOT_SUPPORTED
    guard = Guard.of(CUDA)
    getattr(gpu, counters)[key] = 10**9
    assert guard.disturbance() is None
    getattr(gpu, others)[other] = 1
    assert guard.disturbance() == words, "the others are read on"
    gpu.faults.clear()
    assert guard.disturbance() is None, "the first reading of a counter is no increase"
    getattr(gpu, counters)[key] += 1
    assert guard.disturbance() is not None


def test_a_field_that_an_old_driver_does_not_know_hides_no_other(gpu):
    del gpu.fields[269]
    guard = Guard.of(CUDA)
    gpu.fields[270] += 1
    assert guard.disturbance() == "hardware thermal slowdown"


def test_a_field_without_a_value_is_no_counter(gpu):
    gpu.fields[269] = 5
    guard = Guard.of(CUDA)
    del gpu.fields[269]
    assert guard.disturbance() is None


def test_the_power_cap_is_noted_once_and_disturbs_nothing(nvml, gpu):
    guard = Guard.of(CUDA)
    assert guard.disturbance() is None
    assert guard.notes == []
    for _ in range(2):
        gpu.reasons = nvml.nvmlClocksEventReasonSwPowerCap
        assert guard.disturbance() is None
    assert guard.notes == ["software power cap"]


def test_the_power_cap_is_told_while_it_lasts(nvml, gpu, monkeypatch):
    guard = Guard.of(CUDA)
    assert not guard.is_capped()
    gpu.reasons = nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonGpuIdle
    assert guard.is_capped()
    gpu.reasons = nvml.nvmlClocksEventReasonGpuIdle
    assert not guard.is_capped()
    monkeypatch.setattr(guard._gpu, "reasons", lambda: None)
    assert not guard.is_capped()
    assert not Guard(None).is_capped()


def test_the_power_cap_is_noted_from_its_counter(nvml, gpu):
    guard = Guard.of(CUDA)
    gpu.violations[nvml.NVML_PERF_POLICY_POWER] += 1
    assert guard.disturbance() is None
    assert guard.notes == ["software power cap"]


# other processes


def computes(gpu, clock, *pids, percent=50, ago=0.0):
    """Add what NVML samples of processes, `ago` seconds before now."""
    gpu.samples += [(pid, clock.now - int(ago * SECOND), percent) for pid in pids]


def stranger(*pids):
    return f"another process on this GPU (pid {', '.join(map(str, pids))})"


def block(guard, clock):
    """Take a block of half a second."""
    guard.begin()
    clock.passes(0.5)


@pytest.mark.parametrize(
    ("listed", "computing", "own", "expected"),
    [
        ([ME], [ME], [], None),
        ([ME, 70], [ME], [], None),
        ([ME, 70], [ME, 70], [], stranger(70)),
        ([ME, 70], [70], [], stranger(70)),
        ([ME, 70, 71], [ME, 70, 71], [], stranger(70, 71)),
        ([ME, 70, 71], [ME, 70, 71], [70], stranger(71)),
        ([ME, 70], [ME, 70], [70], None),
        ([ME], [ME, 70], [], None),  # it is not listed: it draws, or has ended
        ([ME, 70], [], [], None),
        ([], [70], [], None),
    ],
)
@pytest.mark.parametrize("nobody", [0, 6])
def test_a_process_disturbs_when_it_is_not_ours_and_computes(nvml, gpu, clock, listed, computing, own, expected, nobody):
    gpu.nobody, gpu.pids = nobody, listed
    guard = Guard.of(CUDA, own=frozenset(own))
    block(guard, clock)
    computes(gpu, clock, *computing)
    assert guard.disturbance() == expected


@pytest.mark.parametrize("nobody", [0, 6])
def test_a_newcomer_that_does_not_compute_disturbs_nothing(gpu, clock, nobody):
    gpu.nobody = nobody
    guard = Guard.of(CUDA)
    block(guard, clock)
    gpu.pids.append(70)
    assert guard.disturbance() is None


def test_what_was_sampled_more_than_a_second_before_the_block_is_past(gpu, clock):
    gpu.pids = [ME, 70]
    guard = Guard.of(CUDA)
    block(guard, clock)
    computes(gpu, clock, 70, ago=0.5 + 1.0)
    assert guard.disturbance() is None
    computes(gpu, clock, 70)
    assert guard.disturbance() == stranger(70)


def test_a_block_shorter_than_a_sample_is_judged_by_the_last_one(gpu, clock):
    gpu.pids = [ME, 70]
    guard = Guard.of(CUDA)
    guard.begin()
    clock.passes(0.005)
    computes(gpu, clock, 70, ago=0.4)
    assert guard.disturbance() == stranger(70)


@pytest.mark.parametrize("percent", [0, 4_294_967_295])
def test_a_sample_of_nothing_or_of_nonsense_is_no_computing(gpu, clock, percent):
    gpu.pids = [ME, 70]
    guard = Guard.of(CUDA)
    block(guard, clock)
    computes(gpu, clock, 70, percent=percent)
    gpu.unfilled = [(70, 0, 50)]
    assert guard.disturbance() is None
    computes(gpu, clock, 70, percent=100)
    assert guard.disturbance() == stranger(70)


@pytest.mark.parametrize("code", [3, 13, 15])
def test_where_nvml_does_not_tell_who_computes_a_newcomer_disturbs(gpu, clock, code):
    gpu.faults[UTILIZATION] = code
    gpu.pids = [ME, 70]
    guard = Guard.of(CUDA, own=frozenset({72}))
    assert guard.disturbance() is None
    gpu.pids += [71, 72]
    assert guard.disturbance() == stranger(71)
    assert guard.disturbance() == stranger(71), "it is still there"
    gpu.pids = [ME]
    assert guard.disturbance() is None


def test_where_the_lists_name_pids_of_two_namespaces_a_newcomer_disturbs(gpu, clock):
    guard = Guard.of(CUDA)
    computes(gpu, clock, 64_540)
    assert guard.disturbance() is None
    gpu.pids.append(8)
    assert guard.disturbance() == stranger(8)


@pytest.mark.parametrize(
    ("there", "later", "computing", "own", "expected"),
    [
        ([5001], [5001], [5001], [], None),  # the sole one, which nobody knows, is ours
        ([5001], [5001, 5002], [5001, 5002], [], stranger(5002)),
        ([5001], [5001, 5002], [5002], [], stranger(5002)),
        ([5001, 5002], [5001, 5002], [5001], [], None),  # either may be ours
        ([5001, 5002], [5001, 5002], [5001, 5002], [], stranger(5001, 5002)),  # but not both
        ([5001, 5002], [5001, 5002], [5001, 5002], [ME + 1], None),
        ([5001], [5001, 5002], [5001, 5002], [ME + 1], None),
        ([5001], [5001, 5002, 5003], [5001, 5002, 5003], [ME + 1], stranger(5002, 5003)),
        ([], [5001], [5001], [], None),
        ([], [], [5001], [], None),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_in_a_container_our_processes_may_bear_pids_that_we_do_not_know(
    gpu, clock, there, later, computing, own, expected, told
):
    if not told:
        gpu.faults[UTILIZATION] = 3
        expected = expected if there == [5001] else None  # nobody came after the start
    gpu.pids = there
    guard = Guard.of(CUDA, own=frozenset(own))
    block(guard, clock)
    gpu.pids = later
    computes(gpu, clock, *computing)
    assert guard.disturbance() == expected


def test_the_context_is_made_before_the_processes_are_listed(nvml, gpu, clock, monkeypatch):
    gpu.pids = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.pids.append(5001))
    guard = Guard.of(CUDA)
    gpu.pids.append(5002)
    computes(gpu, clock, 5002)
    assert guard.disturbance() == stranger(5002)


def test_a_driver_older_than_the_library_lists_processes_by_the_older_call(nvml, gpu, clock):
    gpu.faults[PROCESSES] = nvml.NVML_ERROR_FUNCTION_NOT_FOUND
    gpu.pids = [ME, 70]
    guard = Guard.of(CUDA)
    computes(gpu, clock, 70)
    assert guard.disturbance() == stranger(70)


def test_a_gpu_that_did_not_list_processes_at_the_start_is_not_asked_for_strangers(nvml, gpu, clock):
    gpu.faults |= dict.fromkeys([PROCESSES, PROCESSES.replace("v3", "v2")], nvml.NVML_ERROR_NOT_SUPPORTED)
    guard = Guard.of(CUDA)
    gpu.faults.clear()
    gpu.pids = [5001, 5002]
    computes(gpu, clock, 5001, 5002)
    assert guard.disturbance() is None


def test_several_disturbances_are_all_named(nvml, gpu, clock):
    gpu.pids = [ME, 70]
    guard = Guard.of(CUDA)
    gpu.reasons = nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonSwPowerCap
    gpu.violations[nvml.NVML_PERF_POLICY_THERMAL] += 1
    computes(gpu, clock, 70)
    assert guard.disturbance() == f"hardware power brake, thermal violation, {stranger(70)}"


# conditions


def test_conditions_carry_their_units(nvml, gpu):
    gpu.reasons = nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonSyncBoost
    assert Guard.of(CUDA).conditions() == {
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
    assert Guard.of(CUDA).conditions()["driver"] == "570.86.15"


def test_a_whole_gpu_in_mig_mode_says_so(nvml, gpu):
    gpu.mig = [nvml.NVML_FEATURE_ENABLED, nvml.NVML_FEATURE_DISABLED]
    assert Guard.of(CUDA).conditions()["mig"] == "on"


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
    guard = Guard.of(CUDA)
    whole = guard.conditions()
    faults = nvml.FAULTS if "System" in function else gpu.faults
    faults[function] = nvml.NVML_ERROR_NOT_SUPPORTED
    assert set(whole) - set(guard.conditions()) == missing


def test_a_gpu_that_is_lost_breaks_no_test(nvml, gpu, clock):
    guard = Guard.of(CUDA)
    functions = [name for name in vars(nvml) if name.startswith("nvmlDevice")]
    gpu.faults |= dict.fromkeys(functions, nvml.NVML_ERROR_GPU_IS_LOST)
    gpu.pids = [70]
    gpu.reasons = 0xFF
    block(guard, clock)
    assert guard.disturbance() is None
    assert guard.conditions() == {"driver": "570.86.15"}


# locked clocks


@pytest.fixture
def leaving(monkeypatch):
    """What is called when the process ends."""
    calls = []
    monkeypatch.setattr(atexit, "register", calls.append)
    monkeypatch.setattr(atexit, "unregister", calls.remove)
    return calls


def resets(nvml):
    return nvml.CALLS.count("nvmlDeviceResetGpuLockedClocks")


@pytest.mark.parametrize(("wanted", "expected"), [(1200, 1200), (None, 1980)])
def test_clocks_are_locked_for_the_block_only(nvml, gpu, leaving, wanted, expected):
    with locked_clocks(CUDA, wanted) as megahertz:
        assert megahertz == expected
        assert gpu.locked == (expected, expected)
        assert nvml.GPUS[0].locked is None
        assert len(leaving) == 1
    assert gpu.locked is None
    assert resets(nvml) == 1
    assert leaving == []


def test_the_highest_clock_is_the_maximum_where_no_list_is_given(nvml, gpu, leaving):
    gpu.faults["nvmlDeviceGetSupportedMemoryClocks"] = nvml.NVML_ERROR_NOT_SUPPORTED
    with locked_clocks(CUDA, None) as megahertz:
        assert megahertz == 1970


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_clocks_are_unlocked_whatever_ends_the_block(nvml, gpu, leaving, error):
    def fails():
        with locked_clocks(CUDA, 1200):
            raise error

    with pytest.raises(error):
        fails()
    assert gpu.locked is None
    assert resets(nvml) == 1
    assert leaving == []


def test_an_exit_inside_the_block_unlocks_once(nvml, gpu, leaving):
    with locked_clocks(CUDA, 1200):
        leaving[0]()
        assert gpu.locked is None
    assert resets(nvml) == 1


def test_an_interrupt_of_the_lock_itself_is_undone(nvml, gpu, leaving, monkeypatch):
    lock = nvml.nvmlDeviceSetGpuLockedClocks

    def interrupted(*arguments):
        lock(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(nvml, "nvmlDeviceSetGpuLockedClocks", interrupted)
    with pytest.raises(KeyboardInterrupt), locked_clocks(CUDA, 1200):
        pytest.fail("it was interrupted")
    assert gpu.locked is None


def test_an_interrupt_of_the_unlocking_leaves_it_to_the_exit(nvml, gpu, leaving, monkeypatch):
    unlock = nvml.nvmlDeviceResetGpuLockedClocks

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(nvml, "nvmlDeviceResetGpuLockedClocks", interrupted)
    with pytest.raises(KeyboardInterrupt), locked_clocks(CUDA, 1200):
        pass
    assert gpu.locked == (1200, 1200)
    monkeypatch.setattr(nvml, "nvmlDeviceResetGpuLockedClocks", unlock)
    leaving[0]()
    assert gpu.locked is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (4, "cannot be locked at 1200 MHz: Insufficient Permissions; run as root or leave out --attn-lock-clocks"),
        (3, "cannot be locked at 1200 MHz: Not Supported; leave out --attn-lock-clocks"),
    ],
)
def test_a_refusal_is_quoted_with_what_to_do(nvml, gpu, leaving, code, words):
    gpu.faults["nvmlDeviceSetGpuLockedClocks"] = code
    with pytest.raises(ClockError) as raised, locked_clocks(CUDA, 1200):
        pytest.fail("the block must not run unlocked")
    assert str(raised.value) == f"the clocks of cuda:0 {words}"
    assert resets(nvml) == 0, "what was not locked is not unlocked: it may be somebody else's"
    assert leaving == []


def test_a_device_without_nvml_cannot_be_locked(leaving):
    expected = "the clocks of cpu cannot be locked: cpu is no NVIDIA GPU; leave out --attn-lock-clocks"
    with pytest.raises(ClockError) as raised, locked_clocks(torch.device("cpu"), None):
        pytest.fail("the block must not run unlocked")
    assert str(raised.value) == expected


def test_a_device_that_names_no_clock_wants_one_named(nvml, gpu, leaving):
    gpu.clocks = {}
    gpu.faults["nvmlDeviceGetMaxClockInfo"] = nvml.NVML_ERROR_NOT_SUPPORTED
    with pytest.raises(ClockError, match="does not say which it supports; name one"), locked_clocks(CUDA, None):
        pytest.fail("the block must not run unlocked")
    assert resets(nvml) == 0


def test_a_refusal_to_unlock_is_logged_and_fails_no_test(nvml, gpu, leaving, caplog):
    with locked_clocks(CUDA, 1200):
        gpu.faults["nvmlDeviceResetGpuLockedClocks"] = nvml.NVML_ERROR_GPU_IS_LOST
    assert caplog.messages == ["cuda:0 keeps its locked clocks: GPU is lost; nvidia-smi --reset-gpu-clocks"]
    assert leaving == []


def test_a_process_that_exits_inside_the_block_unlocks_once(nvml, tmp_path):
    script = f"""
import sys, atexit, pynvml, torch
from types import SimpleNamespace
from pytest_attn.latency.guard import locked_clocks
pynvml.GPUS.append(pynvml.Gpu("GPU-{UUID}"))
atexit.register(lambda: print(pynvml.GPUS[0].locked, pynvml.CALLS.count("nvmlDeviceResetGpuLockedClocks")))
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="{UUID}")
torch.cuda.synchronize = lambda device: None
held = locked_clocks(torch.device("cuda:0"), 1200)
print(held.__enter__(), pynvml.GPUS[0].locked)
sys.exit()
"""
    paths = [str(tmp_path), str(HERE.parent.parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.stdout.splitlines() == ["1200 (1200, 1200)", "None 1"], run.stderr


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
