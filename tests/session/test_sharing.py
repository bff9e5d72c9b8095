"""Which process may time on which device."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import types

import execnet
import pytest
import torch

from pytest_attn import Workload
from pytest_attn.backends import machine
from pytest_attn.processes import worker as worker_module
from pytest_attn.processes.channel import Channel
from pytest_attn.processes.worker import Worker, own_processes
from pytest_attn.session import devices
from pytest_attn.session.devices import Machines, place_on_host, take_own_gpu, untimed_because
from pytest_attn.session.lost_cuda import CudaContext
from pytest_attn.session.session import AttentionSession

CUDA = torch.device("cuda", 0)


@pytest.fixture
def worker(monkeypatch):
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


def specs_of(*texts):
    """Specifications as xdist has them: with ids, in the order of its workers."""
    made = [execnet.XSpec(text) for text in texts]
    for number, spec in enumerate(made):
        spec.id = spec.id or f"gw{number}"
    return made


def own_gpus(monkeypatch, specs, gpus_of):
    """Let each worker take its GPU on a host with so many; return (host, GPU, how many share it) of each."""
    found = []
    for spec in specs:
        host = spec.ssh or "here"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus_of[host]))))
        told = {"workerid": spec.id, "workercount": len(specs), "attn_place": place_on_host(spec, specs)}
        take_own_gpu(types.SimpleNamespace(workerinput=told))
        found.append((host, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["PYTEST_ATTN_GPU_SHARERS"]))
    return found


@pytest.mark.parametrize("here", [1, 2, 3, 4])
@pytest.mark.parametrize("there", [1, 2, 3, 8])
def test_hosts_with_unequal_numbers_of_gpus_give_each_worker_one_of_its_own(worker, monkeypatch, here, there):
    specs = specs_of(*["popen"] * here, *["ssh=there"] * there)
    found = own_gpus(monkeypatch, specs, {"here": here, "there": there})
    assert len(set(found)) == here + there
    assert {sharers for _, _, sharers in found} == {"1"}


def test_workers_share_gpus_only_with_those_of_their_host(worker, monkeypatch):
    specs = specs_of(*["popen"] * 2, *["ssh=there"] * 3)
    assert own_gpus(monkeypatch, specs, {"here": 2, "there": 2}) == [
        *[("here", "0", "1"), ("here", "1", "1")],
        *[("there", "0", "2"), ("there", "1", "1"), ("there", "0", "2")],
    ]


def test_a_worker_that_is_started_again_keeps_its_gpu():
    specs = specs_of(*["popen"] * 4)
    before = place_on_host(specs[2], specs)
    specs[2].id = "gw4"
    assert place_on_host(specs[2], specs) == before == [2, 4]


@pytest.mark.parametrize(
    ("one", "other", "are_neighbors"),
    [
        ("popen", "ssh=localhost", True),
        ("popen", f"ssh={socket.gethostname()}", True),
        ("ssh=me@there", "ssh=-p 5000 there", True),
        ("ssh=there", "ssh=elsewhere", False),
        ("socket=there:8888", "socket=there:8889", True),
        ("socket=there:8888", "ssh=there", True),
        ("popen//via=proxy", "popen//via=proxy//python=python3", True),
        ("popen//via=proxy", "popen", False),
    ],
)
def test_which_workers_are_on_one_host(one, other, are_neighbors):
    first, second = specs_of(one, other)
    assert place_on_host(second, [first, second]) == ([1, 2] if are_neighbors else [0, 1])


def test_a_name_that_says_no_number_is_a_usage_error_where_the_controller_said_nothing(worker):
    config = worker(0, 2, "0,1")
    config.workerinput["workerid"] = "left"
    with pytest.raises(pytest.UsageError, match="nobody says which worker of its host 'left' is; leave it out, or start"):
        take_own_gpu(config)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Make a session of one of some workers on a GPU of 80 GiB, where torch keeps one; list what becomes of it."""
    said = []

    def session(sharers, length=8192):
        machine = types.SimpleNamespace(kind="cuda", memory=80 << 30, device="cuda:0")
        machines = types.SimpleNamespace(known_default=machine)
        progress = types.SimpleNamespace(during=lambda *_: contextlib.nullcontext())
        of = types.SimpleNamespace(machines=machines, sharers=sharers, cuda=CudaContext(), progress=progress)
        return AttentionSession.sharing_memory(of, Workload(length, heads=128, head_dim=128, dtype="bfloat16")), said, of

    monkeypatch.setattr(devices, "lock_name", lambda device: f"{device}-{tmp_path.name}")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("left"))
    return session


@pytest.mark.parametrize(
    ("sharers", "length", "waits", "is_left"),
    [(8, 8192, True, True), (8, 2048, False, True), (8, 64, False, True), (1, 8192, False, False)],
)
def test_of_two_workers_that_need_all_of_a_gpu_one_waits_and_leaves_what_it_used(
    gpu, sharers, length, waits, is_left, monkeypatch
):
    monkeypatch.setattr(devices, "PATIENCE", 0.2)
    first, said, _ = gpu(sharers, length)
    second, *_ = gpu(sharers, length)
    with first:
        begun = time.monotonic()
        with second:
            assert (time.monotonic() - begun >= 0.2) == waits
    assert bool(said) == is_left


def test_a_test_that_needs_more_waits_for_all_of_it_once(gpu, monkeypatch):
    monkeypatch.setattr(devices, "PATIENCE", 0.2)
    first, said, one = gpu(8, 64)
    second, *_ = gpu(8, 8192)
    with first:
        assert AttentionSession.take_whole_memory(one)
        assert said == ["left"]
        begun = time.monotonic()
        with second:
            assert time.monotonic() - begun >= 0.2
        assert not AttentionSession.take_whole_memory(one)


def test_what_a_lost_context_says_of_its_memory_is_no_error_of_the_next_test(gpu, monkeypatch):
    def empty_cache():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    first, _, one = gpu(8, 64)
    with first:
        assert AttentionSession.take_whole_memory(one)


OUT_OF_MEMORY = """
import pytest, torch
from pytest_attn import Workload
from pytest_attn.session.session import session_of

@pytest.mark.attention(Workload(2, heads=1))
def test_it(attn, request):
    assert session_of(request.config).references.limit == (2 << 30)

    def kernel(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory")

    attn.check(kernel)
"""


@pytest.mark.parametrize(("fails", "passed"), [(1, 1), (2, 0)])
def test_a_judgment_that_others_left_no_memory_is_made_once_more(pytester, monkeypatch, fails, passed):
    monkeypatch.setattr(AttentionSession, "take_whole_memory", lambda _, turns=[True, False]: turns.pop(0))
    pytester.makepyfile(f"""
        import pytest, torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        from pytest_attn import Workload

        CALLS = []

        @pytest.mark.attention(Workload(2, heads=1))
        def test_it(attn):
            def kernel(q, k, v):
                CALLS.append(q)
                if len(CALLS) <= {fails}:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return sdpa(q, k, v)

            attn.check(kernel)
        """)
    result = pytester.runpytest_inprocess("--attn-device=cpu", "--attn-output=run.jsonl")
    result.assert_outcomes(passed=passed, failed=1 - passed)
    assert len((pytester.path / "run.jsonl").read_text().splitlines()) == 2, "one record, and the line of the run"


def test_workers_share_the_memory_of_a_device_and_say_so_where_it_is_out(pytester, worker):
    worker(0, 2)
    pytester.makepyfile(OUT_OF_MEMORY)
    result = pytester.runpytest_inprocess("-oattn_memory=4GiB", "--attn-device=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*OutOfMemoryError: CUDA out of memory", "*2 workers share this device; fewer leave more*"])


def test_the_controller_keeps_all_gpus(worker, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    take_own_gpu(types.SimpleNamespace())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_who_may_time(worker, monkeypatch):
    config = worker(0, 2, "0,1")
    take_own_gpu(config)
    assert untimed_because(True, CUDA) is None
    assert untimed_because(False, CUDA) == (
        "2 workers share a GPU; latencies need -n 0, or --attn-gpu-per-worker with as many GPUs"
    )
    assert untimed_because(True, torch.device("cpu")) == "2 workers share the cpu; latencies need -n 0"
    take_own_gpu(worker(0, 3, "0,1"))
    assert untimed_because(True, CUDA) == "2 workers share a GPU; latencies need at most as many workers as GPUs"
    take_own_gpu(worker(1, 3, "0,1"))
    assert untimed_because(True, CUDA) is None
    worker(0, 1)
    assert untimed_because(False, torch.device("cpu")) is None
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert untimed_because(False, CUDA) is None


@pytest.mark.slow("starts processes")
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
    assert own_processes() == {os.getpid()}
    mine, theirs = Channel.pair()
    mine.send(waiting=[12, 34])
    monkeypatch.setattr(worker_module, "_this", Worker(theirs))
    assert own_processes() == {os.getpid(), os.getppid(), 12, 34}, "its parent may be a fork server"


# -- who waits for a GPU ------------------------------------------------------------------------------------------------------


def driver_of(asked):
    """Return CUDA's driver, which takes orders for the GPU that it calls 10 more than torch does."""
    return types.SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGet=lambda handle, ordinal: setattr(handle._obj, "value", 10 + ordinal) or 0,
        cuDevicePrimaryCtxSetFlags_v2=lambda handle, flags: asked.append((handle.value, flags)),
    )


@pytest.mark.parametrize(
    ("count", "sharers", "asked"),
    [(2, None, [(11, 4)]), (2, "2", [(11, 4)]), (2, "1", []), (1, None, [])],
    ids=["two share a GPU", "two share each GPU", "each has its own", "one worker"],
)
def test_only_workers_that_share_a_gpu_sleep_while_they_wait_for_it(monkeypatch, count, sharers, asked):
    orders = []
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver_of(orders))
    monkeypatch.setattr(machine, "resolve_device", lambda wanted: torch.device("cuda", 1))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(count))
    monkeypatch.delenv("PYTEST_ATTN_GPU_SHARERS", raising=False)
    if sharers:
        monkeypatch.setenv("PYTEST_ATTN_GPU_SHARERS", sharers)
    Machines("cuda:1").device()
    assert orders == asked


@pytest.mark.parametrize("fault", [OSError("no such file"), AttributeError("an old driver")])
def test_a_driver_that_cannot_let_a_process_sleep_is_no_fault(monkeypatch, fault):
    def missing(name):
        raise fault

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    machine.wait_asleep(CUDA)
