"""A measurement, what was recorded of it, and new processes, as plain data: what a decision over a latency needs."""

import random
from dataclasses import replace
from pathlib import Path

from pytest_attn.latency.baseline_file import Baseline, BaselineFile, Identity, case_key
from pytest_attn.latency.gate import POLICIES, shared_prior
from pytest_attn.latency.protocol import protocol_of
from pytest_attn.latency.regression import DeviceBaselines, Measured, SharedCpu, judge_latency
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Run, median_interval

KEY = case_key("tiny", "mine of test_mine.py::test_mine[tiny]", "forward", "warm", threads=1)
FOLDER = Path("baselines")
ANCHORS = {"compute": 1e-3, "memory": 2e-3}
CPU, H200 = Identity("cpu", "EPYC", 2), Identity("cuda", "NVIDIA H200", 132, 140)
CONDITIONS = {"torch": "2.13.0"}
GPU = "48f07d55"
AT_100_US = [1e-4 * (1 + number / 1000) for number in range(10)]
#: a kernel that takes anything from 50 to 200 us
SCATTERED = [1e-4 * random.Random(seed).uniform(0.5, 2) for seed in range(10)]


def case(p50=AT_100_US, kind="cpu", **changes):
    """What was recorded: ten processes at about 100 us."""
    values = {
        "shape": "h2-s32-d32",
        "mode": "host" if kind == "cpu" else "events",
        "p50": tuple(p50),
        "launch": (0.0 if kind == "cpu" else 3e-5,) * len(p50),
        "anchors": {name: (time,) * len(p50) for name, time in ANCHORS.items()},
        "flops": 10**6,
        "nbytes": 10**6,
        "date": "2026-11-21",
        "reason": "first recording",
        "protocol": protocol_of(kind),
        "memory": 1000,
        "z": (0.1, 0.05, 0.01),
        "check": "structured seed 0",
        "conditions": CONDITIONS,
        "gpu": "" if kind == "cpu" else GPU,
    }
    return Baseline(**values | changes)


def recorded(kind="cpu", key=KEY, **changes):
    """The baselines of a device on which one case was recorded."""
    one = case(kind=kind, **changes)
    file = BaselineFile(FOLDER / "machine.json", CPU, {}, {key: one})
    return DeviceBaselines(file, {key: one.fit()}, shared_prior([one.fit()], kind))


def measured(p50=1e-4, kind="cpu", anchor=1.0, latency=None, **changes):
    """A measurement that agrees with the baseline in all but its time; anchor: how much slower the machine is."""
    anchors = {name: anchor * time for name, time in ANCHORS.items()}
    mode, launch = ("host", p50) if kind == "cpu" else ("events", 3e-5)
    taken = Latency(
        *("tiny", "mine", "forward", p50, median_interval([p50] * 6), (p50,) * 6, 6, mode, 1, "warm", launch, anchors, 1000)
    )
    values = {
        "key": KEY,
        "shape": "h2-s32-d32",
        "version": "",
        "check": "structured seed 0",
        "z": (0.1, 0.05, 0.01),
        "conditions": CONDITIONS,
        "gpu": "" if kind == "cpu" else GPU,
        "kind": kind,
        "folder": FOLDER,
    }
    return Measured(replace(taken, **latency or {}), **values | changes)


class Fresh:
    """New processes that take these times, or cannot: knows how often they were asked."""

    def __init__(self, *p50, error=None, anchor=1.0, launch=0.0):
        self.runs = [Run(time, {name: anchor * beside for name, beside in ANCHORS.items()}, launch) for time in p50]
        self.error, self.asked = error, 0

    def __call__(self):
        self.asked += 1
        if self.error:
            raise self.error
        return self.runs


def judged(one, fresh=None, baselines=None, crowd=None, cases=1, **policy):
    """Return the decision. Without `fresh`, nobody may be asked; policy: what differs from that of the device."""
    fresh = fresh or Fresh(error=AssertionError("new processes were asked"))
    wanted = replace(POLICIES[one.kind], **{"pause": 0.0, **policy})
    return judge_latency(one, baselines or recorded(one.kind), wanted, cases, fresh, crowd or SharedCpu())
