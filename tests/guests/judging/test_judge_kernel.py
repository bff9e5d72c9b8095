"""`pytest_attn.judge` says as data what a kernel does, and runs nothing of it here."""

import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from judged_kernels import KERNELS, as_described
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pytest_attn import Workload, judge
from pytest_attn.guests.isolation.isolated_executor import launcher_of_process
from pytest_attn.guests.judging import judge_kernel
from pytest_attn.latency.gate import Decision
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.work import WrongResultError
from pytest_attn.reports.verdict import Verdict

SMALL = Workload(40, heads=2, head_dim=32, dtype="float32")


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Return a function that judges one of the kernels, and returns the judgment and what it is as JSON."""
    path = tmp_path_factory.mktemp("judged") / "by-hand.py"
    path.write_text(KERNELS)

    def run(name, workloads=SMALL, **options):
        found = judge(f"{path}:{name}", workloads, device="cpu", **options)
        return found, as_described(found.as_dict(options.get("feedback", "full")))

    return run


ANSWERS = {
    "right": (True, "passed", ""),
    "printing": (True, "passed", ""),
    "wrong": (False, "mismatch", "causal"),
    "other_shape": (False, "mismatch", "shape"),
    "on_meta": (False, "mismatch", "out is on meta; expected a device that holds its elements"),
    "sparse": (False, "mismatch", "out is a sparse_coo tensor; expected a dense one"),
    "same_buffer": (False, "mismatch", "changed the out of an earlier call"),
    "knows_addresses": (False, "broken", "the same tensors with other values in them"),
    "drifts": (False, "broken", "rerun 1 of 1"),
    "exits": (False, "raised", "SystemExit"),
    "exits_at_once": (False, "raised", "called os._exit(0)"),
    "aborts": (False, "no result", "was killed by SIGABRT"),
    "raises": (False, "raised", "no luck"),
    "raises_much": (False, "raised", "raises_much raised RuntimeError: \xe9\xe9"),
    "declines": (None, "skipped", "not today"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_kernel_does_is_said(judged, name):
    found, answer = judged(name)
    right, verdict, said = ANSWERS[name]
    assert found.right is right
    (one,) = answer["workloads"]
    assert one["verdict"] == verdict
    assert said in one["said"] + one["text"] + str(one["not_judged"])
    assert found.exit_code == {True: 0, False: 1, None: 2}[right]


def test_nothing_of_it_runs_here(judged, tmp_path):
    before = {*sys.modules}
    text = "import json, os\ndef attention(q, k, v): raise RuntimeError(json.dumps(os.getpid()))"
    (tmp_path / "json.py").write_text(text)
    found = judge(f"{tmp_path}/json.py", SMALL, device="cpu")
    assert int(re.search(r"RuntimeError: (\d+)", found.workloads[0].said)[1]) != os.getpid()
    assert not [name for name in {*sys.modules} - before if "json" in name]


def test_what_hangs_is_not_known_and_ends_with_the_budget(judged):
    begun = time.monotonic()
    found, answer = judged("sleeps", [SMALL, "smoke-full"], budget_s=1.0)
    assert time.monotonic() - begun < 4
    assert found.right is None
    assert [one["not_judged"][0]["why"].split(";")[0] for one in answer["workloads"]] == [
        "by_hand:sleeps: no time is left of the budget, while it was called",
        "no time is left of the budget",
    ]


def test_a_budget_that_ends_before_its_process_has_started_is_said(judged):
    found, answer = judged("right", budget_s=1e-3)
    assert (found.exit_code, answer["subject"]) == (2, "by_hand:right")
    assert found.unjudged == "by_hand:right: no time is left of the budget, while it started"


@pytest.mark.parametrize(
    ("text", "right", "said"),
    [
        ("def attention(q, k, v):\n    return (q @ k.mT / 32**0.5).softmax(-1) @ v\n", True, ""),
        ("import no_such_library\n", None, "No module named 'no_such_library'"),
        ("x = 1\n", None, "candidate has no attention"),
        ("while True:\n    pass\n", None, "no time is left"),
        ("import os\nos._exit(0)\n", None, "has left the interpreter with exit code 0 while its module was imported"),
        ("import sys\nsys.exit(0)\n", None, "has left the interpreter with exit code 0 while its module was imported"),
    ],
)
def test_a_text_is_judged_too(text, right, said):
    found = judge(text, SMALL, device="cpu", budget_s=1.0 if "while" in text else 60.0)
    as_described(found.as_dict())
    assert found.right is right
    assert said in found.unjudged + "".join(one.said for one in found.workloads)


def test_threads_take_turns(judged):
    with ThreadPoolExecutor(3) as pool:
        found = [one.result()[0] for one in [pool.submit(judged, "right") for _ in range(3)]]
    assert [one.right for one in found] == [True] * 3, found


def test_what_another_thread_turns_is_not_laid_to_a_kernel_elsewhere(judged):
    judged_already = threading.Event()

    def turn():
        while not judged_already.wait(1e-4):
            torch.backends.cudnn.enabled ^= True

    with ThreadPoolExecutor(1) as pool:
        pool.submit(turn)
        found, _ = judged("right")
        judged_already.set()
    torch.backends.cudnn.enabled = True
    assert found.right, found
    assert judged("leaves_cudnn_off")[0].right is False, "its own process watches it"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_asks_a_server_of_its_own(judged):
    """As a pool of processes does, each of which judges."""
    assert judged("right")[0].right
    assert launcher_of_process.cache_info().currsize == 1
    if not (child := os.fork()):
        os._exit(launcher_of_process.cache_info().currsize)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("name", "right"), [("casts", True), ("casts_dq_too_large", False)])
def test_its_process_says_that_its_graph_casts(judged, name, right):
    found, answer = judged(name, Workload(130, heads=2, head_dim=64), backward=True, seed=1)
    assert found.right is right, answer


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("isolated", [True, False])
def test_who_judges_may_want_no_gradients(judged, within, isolated):
    with within():
        if isolated:
            found, _ = judged("right", backward=True)
        else:
            found = judge(sdpa, SMALL, device="cpu", backward=True, isolated=False)
    assert found.right, found


def test_no_number_of_exact_attention_is_given_back_but_in_full(judged):
    _, full = judged("wrong", seed=0)
    numbers = {f"{row[level]}" for row in full["workloads"][0]["outputs"] for level in ("z_element", "z_row", "z_head")}
    assert len(numbers) == 6
    _, cause = judged("wrong", seed=0, feedback="cause")
    assert cause["workloads"][0]["faults"] == full["workloads"][0]["faults"] != []
    _, verdict = judged("wrong", seed=0, feedback="verdict")
    assert {*verdict["workloads"][0]} == {"workload", "verdict", "times", "not_judged"}
    for limited in (cause, verdict):
        rest = json.dumps({**limited, "seconds": 0, "seed": 0})
        assert not re.search(r"\d\.\d|\[\d", rest), rest


def test_a_seed_is_drawn_and_said(judged):
    seeds = {judged("declines")[0].seed for _ in range(2)}
    assert len(seeds) == 2
    assert judged("declines", seed=7)[1]["seed"] == 7


def test_gradients_and_what_is_declared(tmp_path):
    (tmp_path / "rows.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def attention(*given):\n    return sdpa(*[one.transpose(1, 2) for one in given]).transpose(1, 2)\n"
    )
    found = judge(f"{tmp_path}/rows.py", SMALL, device="cpu", backward=True, layout="bshd")
    assert found.right
    assert {row.name for row in found.workloads[0].comparison.tensors} == {"out", "dq", "dk", "dv"}
    assert not [one for one in found.workloads[0].not_judged if one.what.startswith("dq")]


def test_one_workload_that_is_wrong_makes_the_kernel_wrong(judged):
    found, _ = judged("wrong", ["smoke-causal-gqa", Workload(1, 40, mask=None, dtype="float32")])
    assert [one.verdict.value for one in found.workloads] == ["raised", "mismatch"]
    assert found.right is False


def test_a_function_of_this_process_is_trusted_only_where_that_is_said():
    with pytest.raises(ValueError, match="isolated=False, which trusts it"):
        judge(sdpa, SMALL)
    assert judge(sdpa, SMALL, isolated=False, device="cpu").right
    found = judge(lambda q, k, v: 1 / 0, SMALL, isolated=False, device="cpu")
    assert (found.right, found.workloads[0].said) == (False, "ZeroDivisionError: division by zero")
    assert judge("sage", SMALL, isolated=False, device="cpu").right is None  # a backend that is not here


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"feedback": "all"}, "feedback must be verdict, cause or full, got 'all'"),
        ({"workload_or_group": 5}, "a workload is a name, a Workload, or an object of its fields, got 5"),
        ({"workload_or_group": []}, "no workload is given"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        judge("a:b", **{"workload_or_group": SMALL, **options})


def test_a_time_is_given_with_its_share_of_the_peak_or_not_at_all(judged, monkeypatch):
    doubt = Decision(Verdict.INCONCLUSIVE, "could not be verified")
    latencies = [latency_of("forward", 1e-3, doubt), latency_of("forward+backward", 0.25)]
    monkeypatch.setattr(judge_kernel, "time_isolated", lambda *given: latencies.pop(0))
    monkeypatch.setattr(judge_kernel, "ceilings_of", lambda *given: (1e9, 1e12))
    (one,) = judged("right", measure=True, backward=True)[1]["workloads"]
    (with_gradients,) = one["times"]
    flops = SMALL.flops("forward") + SMALL.flops("backward")
    assert with_gradients["share_of_peak"] == pytest.approx(flops / 1e9 / 0.25)
    assert {"what": "forward", "why": "could not be verified"} in one["not_judged"]


def latency_of(direction, p50, decision=None):
    interval = Interval(p50, p50, 0.95)
    return Latency("", "", direction, p50, interval, (p50,), 1, "host", 1, "warm", 0.0, {}, decision=decision)


def test_a_file_that_changes_within_a_second_is_judged_as_it_is(tmp_path):
    path = tmp_path / "mine.py"
    for factor, right in (("1.00", True), ("1.01", False)):
        path.write_text(
            "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
            f"def attention(q, k, v):\n    return sdpa(q, k, v) * {factor}\n"
        )
        os.utime(path, (1e9, 1e9))
        assert judge(str(path), SMALL, device="cpu", feedback="verdict").right is right


def test_nor_is_how_far_a_timed_result_is_off(judged, monkeypatch):
    def timed(*given):
        raise WrongResultError("timed: its result is not that of its data (out differs from exact attention by z 3.7)")

    monkeypatch.setattr(judge_kernel, "timed", timed)
    found, cause = judged("right", measure=True, feedback="cause")
    assert (found.right, cause["workloads"][0]["said"]) == (False, "timed: its result is not that of its data")
    assert "z 3.7" in found.as_dict("full")["workloads"][0]["text"]
