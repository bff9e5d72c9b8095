"""What a kernel turns of torch for itself, it turns back, or is told to."""

import bdb
import cProfile
import ctypes
import gc
import os
import signal
import socket
import sys
import types
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from judging import CAUSAL, SMALL, causal, failure, with_gradients
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

import pytest_attn
from pytest_attn import Workload
from pytest_attn.correctness import switches

#: whether this torch tells matrix products from convolutions
IS_FINE = hasattr(torch._C, "_get_fp32_precision_getter")


@pytest.fixture(autouse=True)
def no_library_excuses():
    """Have those be known that other tests have loaded."""
    switches._has_loaded_libraries()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def in_mode():
    return bool(_get_current_function_mode_stack())


#: of warnings, as they were before all were ignored
FILTERS = []
CORES, DESCRIPTOR = os.sched_getaffinity(0), os.open(os.devnull, os.O_NONBLOCK)


def print_nothing(*event):
    pass


def ignore_warnings():
    FILTERS[:] = [tuple(warnings.filters)]
    warnings.simplefilter("ignore")


#: of Python and of the process: how each is turned and turned back, and whether it is
OF_PROCESS = {
    "Python's thresholds of garbage collection": (
        lambda on: gc.set_threshold(*((0, 10, 10) if on else (700, 10, 10))),
        lambda: not gc.get_threshold()[0],
    ),
    "Python's interval between threads": (
        lambda on: sys.setswitchinterval(5 if on else 0.005),
        lambda: sys.getswitchinterval() == 5,
    ),
    "Python's filter 1 of warnings": (
        lambda on: ignore_warnings() if on else FILTERS and switches._set_filters(FILTERS.pop()),
        lambda: warnings.filters[0] == ("ignore", None, Warning, None, 0),
    ),
    "the mask of new files": (lambda on: os.umask(0o123 if on else 0o022), lambda: os.umask(os.umask(0o022)) == 0o123),
    "the timeout of new sockets": (lambda on: socket.setdefaulttimeout(9 if on else None), socket.getdefaulttimeout),
    "the handler of SIGTERM": (
        lambda on: signal.signal(signal.SIGTERM, signal.SIG_IGN if on else signal.SIG_DFL),
        lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
    ),
    **{
        f"the {name} timer": (
            lambda on, which=which: signal.setitimer(which, 3600 * on),
            lambda which=which: signal.getitimer(which)[0] > 0,
        )
        for name, which in (("interval", signal.ITIMER_REAL), ("virtual", signal.ITIMER_VIRTUAL))
    },
    "Python's callbacks of garbage collection": (
        lambda on: (
            gc.callbacks.append(print_nothing) if on else print_nothing in gc.callbacks and gc.callbacks.remove(print_nothing)
        ),
        lambda: print_nothing in gc.callbacks,
    ),
    "the descriptor that signals write to": (
        lambda on: signal.set_wakeup_fd(DESCRIPTOR if on else -1),
        lambda: signal.set_wakeup_fd(-1) != -1,
    ),
    "the scheduling class of the process": (
        lambda on: os.sched_setscheduler(0, os.SCHED_BATCH if on else os.SCHED_OTHER, os.sched_param(0)),
        lambda: os.sched_getscheduler(0) == os.SCHED_BATCH,
    ),
    "the signals that are blocked": (
        lambda on: signal.pthread_sigmask(signal.SIG_BLOCK if on else signal.SIG_UNBLOCK, {signal.SIGALRM}),
        lambda: signal.SIGALRM in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ),
    "the direction in which floats are rounded": (
        lambda on: ctypes.CDLL(None).fesetround(0x800 if on else 0),
        lambda: ctypes.CDLL(None).fegetround() == 0x800,
    ),
    "the cores of the process": (
        lambda on: os.sched_setaffinity(0, {min(CORES)} if on else CORES),
        lambda: os.sched_getaffinity(0) != CORES,
    ),
}
if len(CORES) == 1:
    del OF_PROCESS["the cores of the process"]
GUARDS, SAVED = [], torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone)
SWITCHES = {
    "autocast on cpu": (lambda on: torch.set_autocast_enabled("cpu", on), lambda: torch.is_autocast_enabled("cpu")),
    "oneDNN": (lambda on: torch._C._set_mkldnn_enabled(not on), lambda: not torch._C._get_mkldnn_enabled()),
    "default dtype": (
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        lambda: torch.get_default_dtype() == torch.float64,
    ),
    "default device": (
        lambda on: torch.set_default_device("meta" if on else None),
        lambda: torch.get_default_device().type == "meta",
    ),
    "cuDNN": (lambda on: torch._C._set_cudnn_enabled(not on), lambda: not torch._C._get_cudnn_enabled()),
    "threads of autograd": (
        lambda on: torch._C._set_multithreading_enabled(not on),
        lambda: not torch._C._is_multithreading_enabled(),
    ),
    "number of threads": (lambda on: torch.set_num_threads(2 if on else 1), lambda: torch.get_num_threads() == 2),
    "flushing of denormal numbers": (torch.set_flush_denormal, lambda: sys.float_info.min / 2 == 0),
    "deterministic algorithms": (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
    "flash SDPA": (
        lambda on: torch.backends.cuda.enable_flash_sdp(not on),
        lambda: not torch.backends.cuda.flash_sdp_enabled(),
    ),
    "garbage collection": (lambda on: gc.disable() if on else gc.enable(), lambda: not gc.isenabled()),
    "profile function": (
        lambda on: sys.setprofile((lambda *event: None) if on else None),
        lambda: sys.getprofile() is not None,
    ),
    "trace function": (lambda on: sys.settrace((lambda *event: None) if on else None), lambda: sys.gettrace() is not None),
    "inference mode": (
        lambda on: GUARDS.append(torch._C._InferenceMode(True)) if on else GUARDS.clear(),
        torch.is_inference_mode_enabled,
    ),
    "hooks of saved tensors": (
        lambda on: (
            SAVED.__enter__() if on else [SAVED.__exit__() for _ in filter(None, [_top_saved_tensors_default_hooks(True)])]
        ),
        lambda: _top_saved_tensors_default_hooks(True) is not None,
    ),
    "detection of anomalies": (torch.set_anomaly_enabled, torch.is_anomaly_enabled),
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda on: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", not on),
        lambda: not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    "modes": (lambda on: Mode().__enter__() if on else [_pop_mode() for _ in _get_current_function_mode_stack()], in_mode),
    f"float32 {'precision of cuda matmul' if IS_FINE else 'matmul precision'}": (
        lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
        lambda: torch.get_float32_matmul_precision() == "high",
    ),
    "sums of MATH SDPA in half precision": (
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    ),
    "grad mode": (lambda on: torch.set_grad_enabled(not on), lambda: not torch.is_grad_enabled()),
}


SWITCHES = {
    f"{'Python' if name in ('garbage collection', 'profile function', 'trace function') else 'torch'}'s {name}": one
    for name, one in SWITCHES.items()
} | OF_PROCESS


@contextmanager
def afterwards(call, *arguments):
    """Call a function when the block ends, however it does."""
    try:
        yield
    finally:
        call(*arguments)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_left_turned_is_named_and_turned_back(name):
    turn, is_on = SWITCHES[name]

    def leaves_it(q, k, v):
        out = causal(q, k, v)
        turn(True)
        return out

    with afterwards(turn, False):
        assert f"the callable left {name} at" in failure(leaves_it, CAUSAL, backward=name not in OF_PROCESS)
        assert not is_on()


def test_a_recursion_limit_may_be_raised_as_compilers_do():
    def raises_it(q, k, v):
        sys.setrecursionlimit(before + 1000)
        return causal(q, k, v)

    before = sys.getrecursionlimit()
    with afterwards(sys.setrecursionlimit, before):
        assert pytest_attn.check(raises_it, CAUSAL, precision="torch_cpu", device="cpu").passed
        assert sys.getrecursionlimit() == before + 1000


def test_a_recursion_limit_near_the_present_depth_is_named():
    def leaves_it(q, k, v):
        out = causal(q, k, v)
        for limit in range(20, before):
            with suppress(RecursionError):
                sys.setrecursionlimit(limit)
                return out

    before = sys.getrecursionlimit()
    with afterwards(sys.setrecursionlimit, before):
        assert "the callable left Python's recursion limit at " in failure(leaves_it, CAUSAL)
        assert sys.getrecursionlimit() == before


@pytest.mark.parametrize(
    "name", ["Python's filter 1 of warnings", "the handler of SIGTERM", "Python's callbacks of garbage collection"]
)
def test_what_a_library_turns_as_it_is_imported_is_no_fault_and_stays(name, monkeypatch):
    turn, is_on = SWITCHES[name]

    def imports_a_library(q, k, v):
        if "library" not in sys.modules:
            monkeypatch.setitem(sys.modules, "library", types.ModuleType("library"))
            turn(True)
        return causal(q, k, v)

    with afterwards(turn, False):
        assert pytest_attn.check(imports_a_library, CAUSAL, precision="torch_cpu", device="cpu").passed
        assert is_on()


def test_a_filter_of_one_message_may_be_a_librarys():
    def filters(q, k, v):
        warnings.filterwarnings("ignore", "of no kernel")
        return causal(q, k, v)

    with warnings.catch_warnings():
        assert pytest_attn.check(filters, CAUSAL, precision="torch_cpu", device="cpu").passed


def test_a_kernel_may_use_an_alarm_of_its_own():
    def waits_for_an_alarm(q, k, v):
        before = signal.signal(signal.SIGALRM, lambda *event: rung.append(event))
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        signal.sigtimedwait([], 0.01)
        signal.signal(signal.SIGALRM, before)
        return causal(q, k, v)

    rung = []
    assert pytest_attn.check(waits_for_an_alarm, CAUSAL, precision="torch_cpu", device="cpu").passed
    assert rung


def test_cprofile_goes_on_where_a_kernel_has_taken_its_place():
    def takes_it(q, k, v):
        sys.setprofile(lambda *event: None)
        return causal(q, k, v)

    def is_called_afterwards():
        pass

    profiler = cProfile.Profile()
    profiler.enable()
    try:
        said = failure(takes_it, CAUSAL)
        is_called_afterwards()
    finally:
        profiler.disable()
        sys.setprofile(None)
    assert "the callable left Python's profile function at" in said
    assert "is_called_afterwards" in {entry.code.co_name for entry in profiler.getstats() if hasattr(entry.code, "co_name")}


def test_a_debugger_that_a_person_starts_in_a_kernel_may_stay():
    def debugs(q, k, v):
        debugger.set_trace()
        return causal(q, k, v)

    debugger = bdb.Bdb()
    debugger.user_line = lambda frame: debugger.set_step()
    with afterwards(sys.settrace, sys.gettrace()):
        assert pytest_attn.check(debugs, CAUSAL, precision="torch_cpu", device="cpu").passed


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="needs Python 3.12")
def test_a_monitoring_tool_that_is_left_is_freed():
    def leaves_it(q, k, v):
        sys.monitoring.use_tool_id(4, "mine")
        return causal(q, k, v)

    with afterwards(sys.monitoring.free_tool_id, 4):
        assert "the callable left Python's monitoring tools at" in failure(leaves_it, CAUSAL)
        assert sys.monitoring.get_tool(4) is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("judged", ["check_invariants", "measure"])
def test_a_switch_is_turned_back_by_whatever_is_asked(judged):
    turn, is_on = SWITCHES["torch's flash SDPA"]
    calls = []

    def leaves_it(q, k, v):
        calls.append(1)
        turn(judged == "check_invariants" or len(calls) > 8)
        return causal(q, k, v)

    with afterwards(turn, False):
        with pytest.raises(AssertionError, match="the callable left torch's flash SDPA at False"):
            getattr(pytest_attn, judged)(leaves_it, Workload(16, heads=1, mask="causal"), precision="torch_cpu", device="cpu")
        assert not is_on()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_library_that_flushes_denormal_numbers_as_it_is_loaded_is_no_fault():
    """As one does that was compiled with -ffast-math."""
    loaded = []

    def loads_a_library(q, k, v):
        if not loaded:
            loaded.append(1)
            switches._libraries.clear()  # so that all are new
            torch.set_flush_denormal(True)
        return causal(q, k, v)

    assert pytest_attn.check(loads_a_library, CAUSAL, precision="torch_cpu", device="cpu").passed
    assert sys.float_info.min / 2 > 0


def test_a_switch_that_a_backward_pass_leaves_turned_is_named():
    def leaves_it(backward, dout):
        torch.set_num_threads(2)
        return backward(dout)

    with afterwards(torch.set_num_threads, 1):
        assert "the callable left torch's number of threads at 2" in failure(with_gradients(leaves_it), SMALL, backward=True)
        assert torch.get_num_threads() == 1


@pytest.mark.skipif(not IS_FINE, reason="needs torch 2.9")
def test_a_precision_that_is_put_back_in_the_older_way_is_what_it_was():
    def turns_it_back(q, k, v):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        torch.set_float32_matmul_precision(before)
        return causal(q, k, v)

    assert pytest_attn.check(turns_it_back, CAUSAL, precision="torch_cpu", device="cpu").passed


@pytest.mark.skipif(not IS_FINE, reason="needs torch 2.9")
@pytest.mark.parametrize("before", ["none", "tf32"])
def test_a_precision_that_is_turned_in_the_newer_way_is_turned_back(before):
    matmul = torch.backends.cuda.matmul

    def leaves_it(q, k, v):
        matmul.fp32_precision = "ieee" if before == "tf32" else "tf32"
        return causal(q, k, v)

    matmul.fp32_precision = before
    with afterwards(torch.set_float32_matmul_precision, "highest"):
        assert "the callable left torch's float32 precision of cuda matmul at" in failure(leaves_it, CAUSAL)
        assert (matmul.fp32_precision == "tf32") is (before == "tf32")
        if before == "none":
            assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_kernel_may_turn_what_it_turns_back(name):
    turn, _ = SWITCHES[name]

    def turns_it_back(q, k, v):
        turn(True)
        turn(False)
        return causal(q, k, v)

    assert pytest_attn.check(turns_it_back, CAUSAL, backward=True, precision="torch_cpu", device="cpu").passed


def test_a_switch_is_turned_back_where_the_kernel_raises():
    def raises(q, k, v):
        torch.set_default_dtype(torch.float64)
        raise KeyError("q")

    with pytest.raises(KeyError):
        pytest_attn.check(raises, CAUSAL, device="cpu")
    assert torch.get_default_dtype() == torch.float32


def test_deterministic_algorithms_that_only_warn_may_be_put_back_by_their_one_word():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with switches.KeptSwitches("cpu"):
            torch.use_deterministic_algorithms(True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
