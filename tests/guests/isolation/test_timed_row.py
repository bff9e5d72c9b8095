"""Calls in a row of an isolated function: no data are known before, digests tell all bytes, and a time is held to them."""

from types import SimpleNamespace

import pytest
import torch
from cheats.own_process import OWN_PROCESS
from cheats.runs import outcomes, source_of
from left_out import one_in

from pytest_attn.guests.isolation import isolated_executor
from pytest_attn.guests.isolation.isolated_executor import _held_to, _RowTime
from pytest_attn.guests.isolation.timed_row import RowData, digest, seconds_beside
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.work import StaleError
from pytest_attn.reports.verdict import Verdict

pytestmark = pytest.mark.usefixtures("no_worker")
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64)


def given_of(dtype=torch.float32):
    return [torch.randn(1, 2, length, 33).to(dtype).transpose(1, 2)[:, 1:] for length in (5, 9, 9)]


def rows_of(tensors):
    return {tuple(row) for one in tensors for row in one.double().reshape(-1, one.shape[-1]).tolist()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_are_the_same_numbers_under_other_signs_in_each_call(dtype):
    given = given_of(dtype)
    both = [RowData(given, [given[0]], "forward", seed=7) for _ in range(2)]
    seen = rows_of(given)
    for before in (None, torch.tensor([3, 5]), torch.tensor([3, 7])):
        (tensors, douts), (others, _) = (data.after(before) for data in both)
        assert all(torch.equal(one.double(), other.double()) for one, other in zip(tensors, others, strict=True))
        assert [(one.shape, one.stride(), one.dtype) for one in tensors] == [(o.shape, o.stride(), o.dtype) for o in given]
        assert all(torch.equal(one.double().abs(), other.double().abs()) for one, other in zip(tensors, given, strict=True))
        assert torch.equal(douts[0].double(), tensors[0].double())  # which share their memory
        assert not seen & rows_of(tensors)
        seen |= rows_of(tensors)
    assert not seen & rows_of(RowData(given, [], "forward", seed=8).after(None)[0])


def test_a_backward_pass_alone_keeps_its_leaves_and_gets_another_dout():
    given, dout = [one.requires_grad_() for one in given_of()], torch.randn(4, 4)
    tensors, (found, nothing) = RowData(given, [dout, None], "backward", seed=1).after(None)
    assert (tensors, nothing) == (given, None)
    assert not torch.equal(found, dout)
    tensors, _ = RowData(given, [dout, None], "forward+backward", seed=1).after(None)
    assert all(one.is_leaf and one.requires_grad for one in tensors)


def test_numbers_that_are_no_floats_stay():
    pages = torch.arange(8, dtype=torch.int8).view(1, 8)
    assert torch.equal(RowData([torch.randn(1, 8), pages, pages], [], "forward", seed=1).after(None)[0][1], pages)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_a_digest_tells_each_bit(dtype):
    result = torch.ones(3, 47).to(dtype)[:, 1:]
    before, dense = digest([result, torch.ones(5)]), result.contiguous()
    words = dense.view(-1).view(torch.uint8)
    for at in (0, 1, 63, len(words) - 1):
        words[at] ^= 1
        assert not torch.equal(digest([dense, torch.ones(5)]), before)
        words[at] ^= 1
    assert torch.equal(digest([dense, torch.ones(5)]), before)
    assert len(digest([])) == 0


def test_what_a_row_does_beside_its_calls_takes_time():
    given = [torch.randn(1, 2, 256, 64) for _ in range(3)]
    assert 0 < seconds_beside(given, [], "forward", [given[0]], calls=4) < 1


def latency_of(p50, mode="host", launch=0.0):
    interval = Interval(p50, p50, 0.95)
    return Latency("w", "mine", "forward", p50, interval, (p50,), 1, mode, 1, "warm", launch=launch, anchors={})


def row_of(seconds, unwaited):
    """Return a row that takes so many seconds a call, and so many without those for which it waits."""
    return SimpleNamespace(
        recorded=SimpleNamespace(given=[torch.ones(1)]),
        direction="forward",
        time=lambda calls: _RowTime(calls * seconds, calls * unwaited),
        seconds_beside=lambda calls: calls * 1e-4,
    )


@pytest.mark.parametrize(("seconds", "unwaited", "verdict"), [(1.5e-3, 1.5e-3, None), (9e-3, 1e-3, Verdict.INCONCLUSIVE)])
def test_a_time_is_verified_or_inconclusive_however_long_its_thread_waited(seconds, unwaited, verdict):
    found = _held_to(latency_of(1e-3), row_of(seconds, unwaited))
    assert found.p50 == 1e-3
    assert (found.decision and found.decision.verdict) == verdict
    assert len(found.disturbances) == (verdict is not None)


def test_a_launch_that_is_claimed_explains_no_work():
    """As of events that tell a tenth of 27 us, for which the host may well have needed 40 us to launch."""
    found = _held_to(latency_of(2.7e-6, "graph", launch=40e-6), row_of(127e-6, 127e-6))
    assert found.decision.verdict is Verdict.INCONCLUSIVE


def test_one_that_no_wait_explains_is_refused():
    with pytest.raises(StaleError, match="says that a call takes 1000 us, but 50 calls in a row took at least 3900 us each"):
        _held_to(latency_of(1e-3), row_of(9e-3, 4e-3))


CLAIMED = {
    "p50": 1e-3,
    "interval": (9e-4, 2e-3, 0.95),
    "mode": "host",
    "blocks": 6,
    "calls": 4,
    "launch": 0.0,
    "spent": 0.1,
    "memory": None,
    "threads": 1,
    "l2": "warm",
    "samples": [1e-3],
    "anchors": {},
    "conditions": {},
    "disturbances": [],
    "notes": [],
}


@pytest.mark.parametrize(
    "changed",
    [{"p50": "short"}, {"p50": 0}, {"p50": -1e-3}, {"p50": 1e9}, {"interval": [0, 1]}, {"mode": "events"}, {"calls": None}],
    ids=str,
)
def test_what_is_no_time_on_a_cpu_is_garbage(changed):
    assert isolated_executor.latency_of(CLAIMED, "w", "mine", "forward", "cpu").p50 == 1e-3
    with pytest.raises((TypeError, ValueError)):
        isolated_executor.latency_of(CLAIMED | changed, "w", "mine", "forward", "cpu")


def asked(pytester, cheats):
    for cheat in cheats:
        pytester.makepyfile(**{cheat.name: cheat.text})
    pytester.makepyfile(test_it=source_of([cheat.asked_by("measure") for cheat in cheats], isolated=True))
    return outcomes(pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", "--attn-isolated").outlines)


QUICK = [cheat for cheat in OWN_PROCESS if "thread" not in cheat.does]


@pytest.mark.slow("starts processes")
def test_no_process_that_answers_for_itself_has_a_time(pytester):
    found = asked(pytester, one_in(4, QUICK))
    assert {*found.values()} == {"failed"}


@pytest.mark.slow("waits for its own threads")
def test_no_process_that_waits_for_itself_has_a_time(pytester):
    assert not {"passed", "error"} & {*asked(pytester, [cheat for cheat in OWN_PROCESS if cheat not in QUICK]).values()}
