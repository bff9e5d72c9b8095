"""Which process may time on which device."""

import os
import subprocess
import sys
import types

import pytest
import torch

from pytest_attn.session.child import own_processes
from pytest_attn.session.devices import take_own_gpu, untimed_because

CUDA = torch.device("cuda", 0)


@pytest.fixture
def worker(monkeypatch):
    """Be worker gwNUMBER of COUNT, with a list of visible GPUs."""

    def be(number, count, visible=None):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(count))
        monkeypatch.delenv("PYTEST_ATTN_GPU_SHARERS", raising=False)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return types.SimpleNamespace(workerinput={"workerid": f"gw{number}", "workercount": count})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is restored
    monkeypatch.setenv("PYTEST_ATTN_GPU_SHARERS", "")
    return be


@pytest.mark.parametrize(
    ("number", "count", "visible", "own"),
    [(0, 2, "0,1", "0"), (1, 2, "0,1", "1"), (1, 2, "5,7", "7"), (2, 3, "GPU-a,GPU-b", "GPU-a"), (1, 2, "3", "3")],
)
def test_each_worker_sees_its_turn_of_the_caller_s_list(worker, number, count, visible, own):
    take_own_gpu(worker(number, count, visible))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_without_a_list_the_gpus_are_counted(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    take_own_gpu(worker(3, 4))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_no_gpu_is_a_usage_error(worker):
    for visible in ("", "-1"):
        with pytest.raises(pytest.UsageError, match="no GPU that this process may use; leave it out"):
            take_own_gpu(worker(0, 2, visible))


def test_the_controller_keeps_all_gpus(worker, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    take_own_gpu(types.SimpleNamespace())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_who_may_time(worker, monkeypatch):
    config = worker(0, 2, "0,1")
    take_own_gpu(config)
    assert untimed_because(True, CUDA) == ""
    assert untimed_because(False, CUDA) == (
        "2 workers share a GPU; latencies need -n 0, or --attn-gpu-per-worker with as many GPUs"
    )
    assert untimed_because(True, torch.device("cpu")) == "2 workers share the cpu; latencies need -n 0"
    take_own_gpu(worker(0, 3, "0,1"))
    assert untimed_because(True, CUDA) == "2 workers share a GPU; latencies need at most as many workers as GPUs"
    take_own_gpu(worker(1, 3, "0,1"))
    assert untimed_because(True, CUDA) == ""
    worker(0, 1)
    assert untimed_because(False, torch.device("cpu")) == ""
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert untimed_because(False, CUDA) == ""


def test_two_processes_do_not_time_on_one_device_at_a_time(tmp_path):
    """Both write when they begin and end; with the lock, no beginning lies between another's beginning and end."""
    script = f"""
import os, sys, time, torch
from pytest_attn.session.devices import device_lock
for _ in range(5):
    with device_lock(torch.device("cpu")):
        with open({str(tmp_path / "log")!r}, "a") as log:
            print("begin", file=log, flush=True)
            time.sleep(0.02)
            print("end", file=log, flush=True)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    children = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 10


def test_own_processes_are_this_one_and_those_that_wait(monkeypatch):
    monkeypatch.setenv("PYTEST_ATTN_OWN", "12,34")
    assert own_processes() == {os.getpid(), 12, 34}
