"""The clocks of a GPU are locked while it is timed, and released whatever happens, on GPUs of the tests."""

import atexit

import pytest
import torch

from pytest_attn.latency.nvml import ClockError, locked_clocks

CUDA = torch.device("cuda:0")


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
    expected = "the clocks of cpu cannot be locked: cpu is not an NVIDIA GPU; leave out --attn-lock-clocks"
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
