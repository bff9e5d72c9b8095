"""The work of a timed call: its sets of tensors, what is staged before it, and what is made of its results."""

import math
import random
import time
import weakref

import pytest
import torch
from judging import SMALL, attention, timed

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.registry import Registry
from pytest_attn.latency import fresh_data, timer
from pytest_attn.latency.timer import HostTimer, Item
from pytest_attn.latency.work import StaleError, called, verified


def test_all_calls_of_a_sample_are_staged_before_the_first_is_made():
    log = []
    timer.repeated(lambda: log.append("stage") or (lambda: log.append("call")), 3)()()
    assert log == ["stage"] * 3 + ["call"] * 3


def test_sets_of_tensors_are_apart_and_have_new_data_before_each_call(device):
    work = timed(attention, SMALL, device, "forward")
    work.rotate_over(3)
    assert len({t.data_ptr() for tensors in work.sets for t in tensors}) == 9
    seen = []
    for _ in range(6):
        call = work.stage()
        assert call.tensors is work.sets[call.at]
        seen += [t.clone() for t in call.tensors]
        work.verify_call("called", call, call())
    assert len({float(t.double().sum()) for t in seen}) > 14, "hardly any has been there before"


def test_without_sets_each_call_has_other_data_in_the_same_memory():
    work = timed(attention, SMALL, torch.device("cpu"), "forward")
    calls = [work.stage() for _ in range(20)]
    assert len({call.tensors[0].untyped_storage().data_ptr() for call in calls}) == 1
    assert len({float(call.tensors[0].double().sum()) for call in calls}) > 15
    for call in calls:
        work.verify_call("called", call, call())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_moves_is_the_same_elsewhere(device, direction):
    work = timed(attention, SMALL, device, direction)
    work.rotate_over(3)
    before = [tensor for tensors in work.sets for tensor in (*tensors, work.dout)]
    work.move()
    moved = [tensor for tensors in work.sets for tensor in (*tensors, work.dout)]
    assert not {tensor.data_ptr() for tensor in moved} & {tensor.data_ptr() for tensor in before}
    assert all(torch.equal(tensor, was) for tensor, was in zip(moved, before, strict=True))
    assert [tensor.requires_grad for tensor in moved] == [tensor.requires_grad for tensor in before]
    call = work.stage()
    work.verify_call("moved", call, call())


@pytest.mark.parametrize(
    ("fault", "words"), [(math.nan, "NaN: memory"), (-1.0, "differs from exact attention by 2 of"), (0.0, "zero everywhere")]
)
def test_a_result_that_is_not_right_is_refused(fault, words):
    work = timed(attention, SMALL, torch.device("cpu"), "forward")
    call = work.stage()
    right = call()
    work.verify_call("right", call, right)
    with pytest.raises(
        StaleError, match=f"wrong, without gradients: its result is not that of the data it was given .*{words}"
    ):
        work.verify_call("wrong", call, right * fault)
    work.keep(call, right * fault)
    with pytest.raises(StaleError, match=f"^timed, without gradients: .*{words}"):
        work.verify_kept()
    work.verify_kept()


@pytest.mark.parametrize("sets", [0, 2])
def test_no_sample_has_elements_of_q_k_or_v_that_were_there_before(device, sets):
    work = timed(attention, SMALL, device, "forward")
    work.rotate_over(sets)
    seen, repeated = {name: set() for name in "qkv"}, 0
    for _ in range(20):
        call = work.stage()
        for name, one in zip("qkv", call.tensors, strict=True):
            now = set(one.flatten().abs().tolist())
            repeated += len(now & seen[name]) > len(now) / 20
            seen[name] |= now
        work.keep(call, call())
    assert repeated < 2, "of 60, by chance"


def test_dout_is_written_after_the_forward_passes_of_all_calls_of_a_sample(monkeypatch):
    written = []

    def kernel(q, k, v):
        written.append("forward")
        return attention(q, k, v)

    work = timed(kernel, SMALL, torch.device("cpu"), "backward")
    work.stage_several(2)
    del written[:]
    write = fresh_data.RandomPool._write
    monkeypatch.setattr(fresh_data.RandomPool, "_write", lambda *args: written.append("dout") or write(*args))
    first, second = work.stage_several(2)
    assert written == ["forward", "forward", "dout"]
    work.verify_call("first", first, first())
    work.verify_call("second", second, second())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_what_is_noted_of_a_set_is_what_lies_in_it(device, monkeypatch, dtype):
    """Alone and with its neighbors, in blocks that are shorter and that are longer."""
    monkeypatch.setattr(fresh_data, "_PERIODS", (101, 67))
    drawn = (torch.randn(2, 3, 5, 7, device=device) * (30 if dtype is torch.int8 else 1) for _ in range(3))
    pool = fresh_data.RandomPool([one.to(dtype) for one in drawn], random.Random(0))
    sets = fresh_data.WholeSets(pool, 70)
    for renewed in ([3], [3], [5, 4, 3, 3], [*range(60, 70), *range(4)], range(70), *[[at] for at in range(8)] * 8):
        sets.renew(renewed)
        for at in (0, 3, 4, 63, 64, 69):
            assert all(map(torch.equal, sets.tensors[at], pool.at(sets.places(at))))
    assert 0.7 < float(torch.stack([t.double() for t in sets.tensors[0]]).std()) / (30 if dtype is torch.int8 else 1) < 1.4


def test_strides_survive_the_copies():
    latent = Workload(64, heads=2, kv_heads=1, head_dim=48, v_head_dim=32, v_in_k=True)
    work = timed("eager", latent, torch.device("cpu"))
    work.rotate_over(2)
    work.move()
    _, k, v = work.sets[1]
    assert k.stride() == v.stride(), "v is a part of k"
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_the_host_s_clock_counts_the_calls_of_a_sample(monkeypatch):
    timer = HostTimer(torch.device("cpu"))
    now, calls = [0], []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def call():
        calls.append(now[0])
        now[0] += 2_000_000

    (seconds,) = timer.block([Item("op", lambda: lambda: [call() for _ in range(5)], 5)])
    assert len(calls) == 5
    assert seconds == pytest.approx(0.002)


def test_a_call_that_was_looked_at_leaves_no_graph_of_autograd_behind(device):
    outs = []

    def kernel(q, k, v):
        out = attention(q, k, v)
        outs.append(weakref.ref(out))
        return out

    work = timed(kernel, SMALL, device, "backward")
    kept = [verified(work), called(work)]
    assert [out() for out in outs] == [None, None]
    assert all(one.done > 0 for one in kept)


@pytest.mark.slow("times in many processes")
def test_a_known_defect_of_what_is_timed_is_not_refused():
    class Off(type(Registry()["sdpa"])):
        known = ()

        def prepare_timed(self, inputs, backward=False):
            kernel = super().prepare_timed(inputs, backward)
            return lambda *tensors: kernel(*tensors) * 1.01

        def defects_on(self, workload, machine, backward):
            return list(self.known)

    off = Off()
    with pytest.raises(StaleError, match=r"out differs from exact attention by 0\.01 of its norm"):
        pytest_attn.measure(off, SMALL, device="cpu")
    off.known = (KnownDefect("a link", "it is off by 1 %", lambda workload, machine: True, ("out",)),)
    assert pytest_attn.measure(off, SMALL, device="cpu").p50 > 0
