"""Kernels that gain time on data that they know: none of these is timed; each is refused, or computes.

Those that idle, or compute something else, once they are timed: tests/cheats.
"""

import atexit
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from judging import attention, measure, timed, with_gradients

from pytest_attn import Workload
from pytest_attn.correctness import switches
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.exact_results import Attention
from pytest_attn.latency.timer import Calls, HostTimer, Item
from pytest_attn.latency.work import StaleError
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
WORKLOAD = Workload(192, heads=4, head_dim=32, dtype="float32")


def refused(kernel, direction="forward", words="not that of the data it was given"):
    with pytest.raises(StaleError, match=words):
        measure(kernel, CPU, direction, WORKLOAD)


@pytest.mark.parametrize(
    "key",
    [
        lambda q, k, v: q.data_ptr(),
        lambda q, k, v: tuple(t.shape for t in (q, k, v)),
        lambda q, k, v: (q.untyped_storage().data_ptr(), q.shape),
        lambda q, k, v: tuple(t.storage_offset() for t in (q, k, v)),
    ],
    ids=["address", "shape", "storage", "places"],
)
def test_results_kept_by_what_does_not_tell_data_apart(key):
    kept = {}

    def kernel(q, k, v):
        known = key(q, k, v)
        if known not in kept:
            kept[known] = attention(q, k, v)
        return kept[known]

    refused(kernel)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", [("out",), ("dq",), ("dk", "dv")], ids="+".join)
@pytest.mark.parametrize("of", [(slice(None), -1), (-1,)], ids=["head", "batch entry"])
def test_each_look_at_a_small_result_is_at_all_of_its_heads(names, of):
    workload = Workload(96, batch=3, heads=4, head_dim=32, dtype="float32")
    inputs = draw_inputs(workload, "randn", 0, CPU)
    leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = attention(*leaves)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    results = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    looks = Attention(CheckSpec(workload, CPU, backward=True), inputs, "forward+backward")
    given, seen = [t.detach() for t in leaves], {name: results[name] for name in names}
    assert not looks.fault_of(seen, given, inputs.dout)
    for one in seen.values():
        one[of].mul_(0.5)
    assert all(looks.fault_of(seen, given, inputs.dout) for _ in range(20))


def test_a_result_on_another_device_is_refused():
    """On the CPU, a page that computes once it is read would not be a part of a GPU's time."""
    spec = CheckSpec(Workload(16, heads=1, head_dim=32, dtype="float32"), CPU)
    inputs = draw_inputs(spec.workload, "randn", 0, CPU)
    given = [inputs.q, inputs.k, inputs.v]
    found = Attention(spec, inputs, "forward").fault_of({"out": torch.empty_like(inputs.q, device="meta")}, given, inputs.dout)
    assert found == "out is on meta, cpu was expected"


def test_probabilities_that_are_kept():
    kept = {}

    def kernel(q, k, v):
        if "p" not in kept:
            kept["p"] = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return kept["p"] @ v

    refused(kernel)


def test_a_result_of_known_signs():
    """It takes data for what it has seen, but for a sign of each channel of v."""
    kept = {}

    def kernel(q, k, v):
        if not kept:
            kept["out"], kept["v"] = attention(q, k, v), v[0, 0, 0].clone()
        return kept["out"] * (kept["v"] * v[0, 0, 0]).sign()

    refused(kernel)


def test_a_thread_that_computes_ahead():
    ahead = {}

    def kernel(q, k, v):
        thread = ahead.pop("thread", None)
        if thread is None:
            out = attention(q, k, v)
        else:
            thread.join()
            out = ahead["out"]

        def compute():
            ahead["out"] = attention(q, k, v)

        ahead["thread"] = threading.Thread(target=compute)
        ahead["thread"].start()
        return out

    refused(kernel)


def test_gradients_prepared_in_the_forward_pass():
    class Prepared(torch.autograd.Function):
        dout = None

        @staticmethod
        def forward(ctx, q, k, v):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                out = attention(*leaves)
                dout = torch.ones_like(out) if Prepared.dout is None else Prepared.dout
                ctx.save_for_backward(*torch.autograd.grad(out, leaves, dout))
            return out.detach()

        @staticmethod
        def backward(ctx, dout):
            Prepared.dout = dout.clone()
            return ctx.saved_tensors

    refused(Prepared.apply, "backward")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("at", [1, 2], ids=["dk", "dv"])
@pytest.mark.parametrize("direction", ["backward", "forward+backward"])
@pytest.mark.parametrize("known", [0, 6])  # before it is timed it is called six times
def test_gradients_of_keys_of_another_call(at, direction, known):
    kept = []

    def keeping(gradients, dout):
        found = list(gradients(dout))
        kept.extend([found[at]] if len(kept) <= known else [])
        return (*found[:at], kept[-1], *found[at + 1 :])

    refused(with_gradients(keeping), direction, ("timed: " if known else "") + "its result is not")


@pytest.fixture
def warm_call():
    """A work that has been looked at, and what a call of it returned; libraries were loaded before, as by other tests."""
    switches._libraries.clear()
    work = timed(attention, WORKLOAD, CPU, "forward")
    work.begin()
    call = work.stage()
    value = call()
    work.verify_call("called on new data", call, value)
    return work, value


def test_a_result_that_is_written_once_its_time_was_taken_is_refused(warm_call):
    work, value = warm_call
    look_again = work.glance([value])
    look_again()
    value.neg_()
    with pytest.raises(StaleError, match="out was written after the call had returned, and its time was taken"):
        look_again()


def test_a_handler_that_a_timed_call_leaves_is_named_and_put_back(warm_call):
    work, value = warm_call
    before = signal.signal(signal.SIGUSR1, lambda *event: None)
    try:
        with pytest.raises(ContractError, match="while it was timed, the callable left the handler of SIGUSR1 at <lambda> of"):
            work.glance([value])()
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, before)
    work.glance([value])()


def test_what_a_timed_call_has_called_at_the_end_of_the_process_is_refused_once_it_is_warm(warm_call):
    work, value = warm_call
    atexit.register(later := lambda: None)
    try:
        with pytest.raises(ContractError, match="had a function of its own called when the process ends"):
            work.glance([value])()
    finally:
        atexit.unregister(later)


def test_what_a_call_has_python_tell_ends_with_its_clock():
    told = []
    with pytest.raises(AssertionError, match="while it was timed, the callable left Python's profile function at"):
        HostTimer(CPU)._one(lambda: sys.setprofile(lambda frame, event, arg: told.append(frame.f_code.co_name)))
    assert sys.getprofile() is None
    assert "_one" not in told[told.index("unwatch") + 1 :]


def test_a_kernel_that_idles_while_its_last_result_is_kept_is_seen():
    """Of the calls of a sample it takes the one that is kept for the one that is looked at."""
    last = [lambda: None]

    def kernel():
        if last[0]() is not None:
            return None
        out = torch.ones(1)
        last[0] = weakref.ref(out)
        return out

    assert any(Calls([kernel] * 40)() is None for _ in range(40))


@pytest.mark.parametrize("waits", [0.0, 0.05])
def test_a_result_that_is_computed_as_it_is_looked_at_is_timed(waits):
    looks = iter([waits, 0.0, 0.0])
    item = Item("op", lambda: lambda: time.sleep(0.002), glance=lambda values: time.sleep(next(looks)) or (lambda: None))
    (seconds,) = HostTimer(CPU).block([item])
    assert (seconds > 0.05) == bool(waits)


def test_no_kernel_knows_which_of_its_results_is_looked_at_next():
    work, looks = timed(attention, WORKLOAD, CPU, "forward+backward"), []
    work._attention.fault_of = lambda results, tensors, dout: looks.append("+".join(results)) or ""
    for _ in range(90):
        call = work.stage()
        work.verify_call("called", call, call())
    rounds = [looks[at : at + 3] for at in range(0, len(looks), 3)]
    assert all({*one} == {"out", "dq", "dk+dv"} for one in rounds if len(one) == 3)
    assert len({*map(tuple, rounds)}) > 3
