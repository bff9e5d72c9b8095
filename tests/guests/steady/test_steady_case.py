"""Kernels that compile, grow or forget in a running server are found, with the first shape; steady ones are not."""

import os
import subprocess
import sys
import tracemalloc
import types
import warnings
from collections import deque
from contextlib import nullcontext, suppress
from functools import lru_cache
from logging import getLogger

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity, record_function

from pytest_attn import Workload
from pytest_attn.cases.case_records import RECORDS
from pytest_attn.guests.steady import growth, steady_case
from pytest_attn.guests.steady.compilations import compilers_in, watching
from pytest_attn.guests.steady.steady_case import UnsteadyError, waiting_for_nothing
from pytest_attn.latency.work import PeakMemory

W = Workload(8, batch=2, heads=2, head_dim=16, dtype="float32")
DECODE = Workload(1, 100, batch=4, heads=4, kv_heads=2, head_dim=16)
#: of three shapes
TINY = W.replace(batch=1, q_len=3, kv_len=3)
on_tiny = pytest.mark.attention(TINY, device="cpu")
on_w = pytest.mark.attention(W, device="cpu")


@pytest.fixture
def few_rounds(monkeypatch):
    for module in (growth, steady_case):
        monkeypatch.setattr(module, "LOOKS", (2, 4, 8))
        monkeypatch.setattr(module, "TIMED_FROM", 2)
    monkeypatch.setattr(steady_case, "_ENOUGH_CALLS", 100)


def plain(q, k, v):
    return sdpa(q, k, v, enable_gqa=True)


def compiled(**options):
    """Compile without inductor, which takes seconds; torch asks the same guards."""
    torch._dynamo.reset()
    return torch.compile(lambda q, k, v: plain(q, k, v), backend="eager", **options)


# -- honest kernels --------------------------------------------------------------------------------------------------------


def with_bounded_caches():
    plan, last = lru_cache(maxsize=64)(lambda *shape: torch.empty(shape)), deque(maxlen=5000)

    def kernel(q, k, v):
        plan(*k.shape)
        last.append(float(len(last)))
        return plain(q, k, v)

    return kernel


def into_a_pool():
    pool = torch.empty(1 << 16)

    def kernel(q, k, v):
        out = plain(q, k, v)
        return pool[: out.numel()].view(out.shape).copy_(out)

    return kernel


def talking():
    def kernel(q, k, v):
        getLogger("kernel").warning("called with %s", [*q.shape])
        warnings.warn(f"deprecated for {q.shape}", DeprecationWarning, stacklevel=2)
        print("called with", *q.shape)
        return plain(q, k, v)

    return kernel


def counting():
    calls = {"made": 0}

    def kernel(q, k, v):
        calls["made"] += 1
        return plain(q, k, v)

    return kernel


def tracing_itself():
    def kernel(q, k, v):
        tracemalloc.start()
        out = plain(q, k, v)
        tracemalloc.stop()
        return out

    return kernel


@pytest.mark.filterwarnings("ignore:deprecated for")
@pytest.mark.parametrize("make", [with_bounded_caches, into_a_pool, talking, counting, tracing_itself])
@on_w
@pytest.mark.usefixtures("capsys")  # which keeps what is printed
def test_steady_kernels(attn, make):
    assert attn.check_steady(make()).compiled == ()


@on_w
def test_what_torch_keeps_of_each_call_is_not_the_kernel_s(attn):
    torch._dynamo.reset()
    attn.check_steady(lambda q, k, v: torch.compile(plain, backend="eager", dynamic=True)(q, k, v))


@pytest.mark.attention(DECODE, W.replace(mask="causal", q_len=3, kv_len=8), device="cpu")
def test_other_workloads(attn):
    assert attn.check_steady(plain).shapes >= 5


@on_tiny
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dynamic": False}])
def test_what_is_compiled_and_declared(attn, options):
    found = attn.check_steady(compiled(**options), variants=20 if options.get("dynamic") is False else 3)
    assert found.compiled
    assert found.calls in [rounds * 2 * found.shapes for rounds in growth.LOOKS[1:]]


@pytest.mark.attention(W.replace(heads=4, kv_heads=2), device="cpu", layout="bshd", backward=True)
def test_gradients_and_another_layout(attn):
    attn.check_steady(lambda q, k, v: plain(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).contiguous())


@pytest.mark.attention(DECODE, device="cpu", backends=["sdpa", "eager"])
def test_backends(attn, attn_backend):
    attn.check_steady(attn_backend)


# -- mutants ---------------------------------------------------------------------------------------------------------------


def plan_per_length():
    return compiled(dynamic=False)


def specialized_constant():
    inner = torch.compile(lambda q, k, v, tile: plain(q, k, v) * (tile != "none"), backend="eager", dynamic=True)
    return lambda q, k, v: inner(q, k, v, f"tile of {k.shape[2]}")


def cache_of_one_entry():
    made = {}

    def kernel(q, k, v):
        if q.shape not in made:
            made.clear()
            torch._dynamo.reset()
            made[q.shape] = torch.compile(plain, backend="eager", dynamic=False)
        return made[q.shape](q, k, v)

    return kernel


def leak_of_a_page():
    kept = []

    def kernel(q, k, v):
        kept.append(torch.empty(1024))
        return plain(q, k, v)

    return kernel


def tensor_that_grows_in_place():
    kept = torch.zeros(8)

    def kernel(q, k, v):
        kept.resize_(kept.numel() + 1024)
        return plain(q, k, v)

    return kernel


def growing_list():
    kept = []

    def kernel(q, k, v):
        kept.append(k.shape[2])
        return plain(q, k, v)

    return kernel


def list_that_was_long():
    """Append to a list that moves in the third round, where its bytes leap."""
    kept = [()] * 300

    def kernel(q, k, v):
        kept.append(k.shape)
        return plain(q, k, v)

    return kernel


def list_that_is_searched():
    kept = growing_list()
    seen = kept.__closure__[0].cell_contents

    def kernel(q, k, v):
        any(known == -1 for known in seen)
        return kept(q, k, v)

    return kernel


def work_that_grows():
    """Search what only code in C sees, and what takes no memory; with the square of the calls, as eight rounds are few."""
    calls = []

    def kernel(q, k, v):
        calls[:] = [sum(calls) + 1]
        sum(range(8 * calls[0] ** 2))
        return plain(q, k, v)

    return kernel


def work_that_grows_once_warm():
    """Work for longer in the first fifty calls than any growth shows by then."""
    calls = []

    def kernel(q, k, v):
        calls[:] = [sum(calls) + 1]
        sum(range(5_000 if calls[0] < 50 else calls[0] ** 2 // 10))
        return plain(q, k, v)

    return kernel


@on_w
def test_time_that_grows_after_a_warm_up_is_found(attn, monkeypatch):
    for module in (growth, steady_case):
        monkeypatch.setattr(module, "LOOKS", (2, 4, 8, 16, 32))
        monkeypatch.setattr(module, "TIMED_FROM", 8)
    monkeypatch.setattr(steady_case, "_ENOUGH_CALLS", 400)
    with pytest.raises(AssertionError, match=r"grows +microseconds of the host in a round, [\d,]+ after round 8 and"):
        attn.check_steady(work_that_grows_once_warm())


FIRST = "q_len 7, batch 1, round 1"
MUTANTS = {
    plan_per_length: f"compiled   {FIRST}: torch.compile of <lambda>, tensor 'k' size mismatch at index 0",
    specialized_constant: f"{FIRST}: torch.compile of <lambda>, tile == 'tile of 8'",
    cache_of_one_entry: f"{FIRST}: torch.compile of plain",
    leak_of_a_page: "grows      bytes of tensors",
    tensor_that_grows_in_place: "grows      bytes of tensors",
    growing_list: "test_steady_case.py:",
    list_that_was_long: "grows      objects made at tests",
    list_that_is_searched: "functions called in a round",
    work_that_grows: "microseconds of the host in a round",
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.attention(W, device="cpu", backward=True)
def test_a_mutant_is_found(attn, few_rounds, mutant):
    torch._dynamo.reset()
    with pytest.raises(AssertionError) as raised:
        attn.check_steady(mutant())
    print(raised.value)
    assert str(raised.value).startswith("not steady: ")
    assert MUTANTS[mutant] in str(raised.value)


@on_tiny
def test_what_is_forgotten_is_compiled_again(attn):
    with pytest.raises(AssertionError, match=r"compiled .*round 3: torch.compile of plain"):
        attn.check_steady(cache_of_one_entry(), variants=1000)


@on_w
def test_slow_growth_is_not_told_from_a_bound(attn, monkeypatch):
    monkeypatch.setattr(steady_case, "_ENOUGH", 0.0)
    attn.check_steady(growing_list())
    assert "whether it grows is not known" in last_record(attn)["reason"]


@on_w
def test_a_slow_leak_of_tensors_is_found(attn, monkeypatch):
    monkeypatch.setattr(steady_case, "_ENOUGH_CALLS", 1 << 20)
    monkeypatch.setattr(steady_case, "LOOKS", (2, 4, 8))
    monkeypatch.setattr(steady_case, "_FEWER_ROUNDS", 8)
    with pytest.raises(AssertionError, match=r"grows +bytes of tensors"):
        attn.check_steady(leak_of_a_page())


def last_record(attn):
    return attn._context.item.stash[RECORDS][-1]


@on_w
def test_what_is_recorded(attn):
    attn.check_steady(plain)
    assert [last_record(attn)[name] for name in ("question", "verdict", "compile_seconds")] == ["steady", "held", None]
    with pytest.raises(AssertionError):
        attn.check_steady(compiled(dynamic=False), variants=0)
    assert last_record(attn)["verdict"] == "broken"
    assert last_record(attn)["compile_seconds"] > 0


@on_w
def test_the_seconds_of_a_first_call_have_a_limit(attn):
    attn.check_steady(compiled(dynamic=True), first_call=1000)
    with pytest.raises(AssertionError, match=r"(?s)the first call takes .* s of CPU, more than first_call=0.001.*compiled"):
        attn.check_steady(compiled(dynamic=True), first_call=0.001)
    assert last_record(attn)["verdict"] == "broken"
    with pytest.raises(ValueError, match="first_call must be a number of seconds > 0, got True"):
        attn.check_steady(plain, first_call=True)


@on_w
def test_the_memory_of_a_first_call_has_a_limit(attn, monkeypatch):
    attn.check_steady(plain, first_memory=1000)
    assert list(last_record(attn)["untested"]) == ["first_memory: it is counted on CUDA only"]
    monkeypatch.setattr(PeakMemory, "bytes", property(lambda self: 2000, lambda self, value: None), raising=False)
    attn.check_steady(plain, first_memory=2000)
    with pytest.raises(AssertionError, match="the first call holds 2,000 bytes of the device, more than first_memory=1,000"):
        attn.check_steady(plain, first_memory=1000)
    assert [last_record(attn)[name] for name in ("verdict", "memory")] == ["broken", 2000]


def test_what_is_started_computes_too():
    work = "sum(range(10**7)); print('done', flush=True); input()"
    began = steady_case.cpu_seconds()
    shell = ["/bin/sh", "-c", f'{sys.executable} -c "{work}"; true']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        while_it_runs = steady_case.cpu_seconds() - began
        child.communicate("\n")
    assert 0.03 < while_it_runs <= steady_case.cpu_seconds() - began + 0.05


@pytest.mark.parametrize("waits", [0, 1])
def test_a_wait_within_a_call_is_found(monkeypatch, waits):
    """The profiler of a GPU shows such events; here they are made."""
    monkeypatch.setattr(steady_case, "_ACTIVITIES", [ProfilerActivity.CPU])
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *mode: 0)
    alarm = pytest.raises(UnsteadyError, match="cudaDeviceSynchronize, 1 time in 3 calls") if waits else nullcontext()
    with alarm, waiting_for_nothing():
        for _ in range(2):
            with record_function(steady_case._CALL):
                torch.ones(1)
        with record_function(steady_case._CALL) if waits else nullcontext(), record_function("cudaDeviceSynchronize"):
            torch.ones(1)


# -- other shapes ----------------------------------------------------------------------------------------------------------


@on_w
def test_what_raises_in_another_shape_says_so(attn):
    def one_shape(q, k, v):
        return plain(q, k, v) + torch.zeros(2, 2, 8, 16)

    with pytest.raises(RuntimeError) as raised:
        attn.check_steady(one_shape)
    assert "at q_len 7, batch 1, given layout bhsd" in "".join(raised.value.__notes__)


@on_w
def test_declined_shapes_are_left_out(attn):
    def even_only(q, k, v):
        if q.shape[2] % 2:
            raise NotImplementedError("an odd length")
        return plain(q, k, v)

    assert attn.check_steady(even_only).shapes < attn.check_steady(plain).shapes


@pytest.mark.parametrize(
    ("workload", "bound"), [(W.replace(bias="hqk"), "bias"), (Workload(8, heads=2, head_dim=16, kv_lens=(8,)), "lengths")]
)
def test_a_workload_of_one_shape(workload, bound, request):
    assert bound in steady_case._bound_because(workload)


@on_w
def test_bad_arguments(attn):
    attn.check_steady(plain)
    with pytest.raises(ValueError, match="variants must be a whole number >= 0, got -1"):
        attn.check_steady(plain, variants=-1)
    with pytest.raises(TypeError, match="takes a callable or a backend, got"):
        attn.check_steady(torch.zeros(1))


# -- compilers that are not here -------------------------------------------------------------------------------------------


def test_kernels_of_triton_are_told_with_what_is_new(monkeypatch):
    others = []
    runtime = types.SimpleNamespace(jit_post_compile_hook=lambda **told: others.append(told))
    before = runtime.jit_post_compile_hook
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(knobs=types.SimpleNamespace(runtime=runtime)))
    params = [types.SimpleNamespace(name=name) for name in ("q", "n", "BLOCK")]
    fn = types.SimpleNamespace(name="kernels._fwd", jit_function=types.SimpleNamespace(params=params))

    def compile_for(block, divisible):
        attributes = {(at,): [["tt.divisibility", 16]] for at in divisible}
        told = {
            "signature": {"q": "*fp16", "n": "i32", "BLOCK": "constexpr"},
            "constants": {(2,): block},
            "configs": [attributes],
        }
        runtime.jit_post_compile_hook(key="k", repr="r", fn=fn, compile=told, is_manual_warmup=False, already_compiled=False)
        return watch.taken()

    with watching() as watch:
        watch.renew()
        first = "q: *fp16 divisible by 16; n: i32 divisible by 16; BLOCK: the constant 64"
        assert compile_for(64, (0, 1)) == [f"Triton's _fwd, {first}"]
        assert compile_for(64, (0,)) == ["Triton's _fwd, n divisible by 16 no longer"]
        assert compile_for(32, (0,)) == ["Triton's _fwd, BLOCK is the constant 32, was the constant 64"]
        runtime.jit_post_compile_hook()  # a release that tells nothing
        assert watch.taken() == ["Triton's None, anew"]
    assert runtime.jit_post_compile_hook is before
    assert [told.get("fn") for told in others] == [fn, fn, fn, None]


def test_other_makers_and_programs(monkeypatch):
    class Compile:
        def __call__(self, fn):
            return fn

        def __getitem__(self, option):
            return self

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self, pool: (self, pool))
    cute = types.SimpleNamespace(compile=Compile())
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    with watching() as watch:
        watch.renew()
        assert cute.compile(1) == cute.compile["-O3"](1) == 1
        assert torch.cuda.CUDAGraph.capture_begin("graph", pool=1) == ("graph", 1)
        assert watch.taken() == ["CuTe DSL", "CUDA graph"]
        with suppress(OSError):
            subprocess.Popen(["/nowhere/nvcc", "a.cu"])
        with suppress(OSError):
            subprocess.Popen(["/nowhere/nvidia-smi"])
        assert watch.taken() == ["nvcc was started"]
        subprocess.run("true; /nowhere/nvcc -c a.cu 2>/dev/null", shell=True, check=False)
        os.system("cd / && /nowhere/ninja -v 2>/dev/null")
        with suppress(OSError):
            os.posix_spawn("/nowhere/g++-12", ["/nowhere/g++-12", "a.cc"], {})
        assert watch.taken() == ["nvcc was started", "ninja was started", "g++ was started"]
        subprocess.run("echo nvcc a.cu; command -v gcc", shell=True, check=False, capture_output=True)
        assert watch.taken() == []
    assert isinstance(cute.compile, Compile)


COMPILE = [
    "nvcc -o a a.cu",
    b"nvcc a.cu",
    "cd /tmp && /usr/local/cuda/bin/nvcc -c a.cu 2>&1 | tee log",
    "CUDA=1 nvcc a.cu",
    "(cd x; ninja)",
    "ls\nninja",
    "env A=1 g++-12 a.cc",
    "nice -n 5 ccache x86_64-linux-gnu-gcc-11 a.c",
    "if true; then nvcc a.cu; fi",
    "bash -lc 'ninja -v'",
    "echo $(nvcc a.cu)",
    ["/bin/sh", "-c", "nvcc a.cu"],
    ["bash", "-e", "-c", "cd b && ninja"],
    ["/usr/bin/env", "nvcc", "a.cu"],
    [b"/x/nvcc", b"a.cu"],
    "nvcc -t 4 a.cu > log 2>&1",
    "echo x | gcc -xc -",
    "ls <(ninja)",
    "timeout -s KILL 1m gcc a.c",
    "echo `gcc a.c`",
    "ls *.c | xargs -n 1 gcc -c",
    "ls | xargs -I {} nohup nvcc {}",
    "env -u CC taskset -c 0,1 gcc a.c",
    ["/usr/bin/timeout", "0.5", "nvcc", "a.cu"],
    "find . -name '*.cu' -exec nvcc {} +",
]
COMPILE_NOTHING = [
    "",
    [],
    "which nvcc",
    "echo 'nvcc x.cu; nvcc y.cu'",
    "nvcc --version",
    ["gcc", "-dumpversion"],
    ["g++", "-print-file-name=libstdc++.so"],
    "ls /usr/bin/gcc | grep -c gcc",
    "python cc.py gcc",
    "sh -c 'command -v ninja'",
    "test -x /usr/bin/nvcc && echo nvcc",
    "CC=gcc python setup.py",
    ["python", "-c", "import gcc"],
    ["git", "commit", "--message", "nvcc a.cu"],
    "gcc -v 2>&1 | tail -1",  # as torch.utils.cpp_extension asks
    ["nvcc", "--list-gpu-arch"],
    "gcc -Q --help=target",
    ["ninja", "-t", "targets"],
    "case $CC in gcc|clang) echo $CC;; esac",
    "git log > /tmp/ninja 2> gcc",
    "grep '' gcc x",
    "timeout 5 gcc --version",
    "timeout 5 python x.py gcc a.c",
    "echo `which gcc`; . gcc a.c",
    "ls | xargs grep gcc",
    "ls | xargs gcc --version",
    "find . -name gcc",
    "find . -exec grep gcc {} +",
    ["/usr/lib/gcc/x.py"],
]


@pytest.mark.parametrize("command", [*COMPILE, *COMPILE_NOTHING], ids=str)
def test_compilers_are_known_within_a_command(command):
    assert bool(compilers_in(command)) == (command in COMPILE)
