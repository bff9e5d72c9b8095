"""A test that times a kernel, and a conftest with a clock of its own: times are what a story says, and no GPU is asked."""

import subprocess

KERNEL = """
import os, pytest, torch
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v):
    return sdpa(q, k, v)

@pytest.mark.attention(Workload(32, heads=2, head_dim=32, name="tiny"), device="cpu")
def test_mine(attn):
    attn.measure(mine)
"""
#: TIMES: p50 in microseconds, here and (after a comma) in new processes; each a little off, as times are. MODES: likewise.
#: HOT: what disturbs each measurement. HOT_IN: the numbers of the new processes that are disturbed
CLOCK = """
import dataclasses, os
import pytest_attn.latency.gate as gate, pytest_attn.cases.latency as recording
from pytest_attn.latency.protocol import Stopwatch
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import median_interval
from pytest_attn.session.session import WorkerContext

recording.FEWEST_RUNS = 3
gate.POLICIES["cpu"] = dataclasses.replace(gate.POLICIES["cpu"], runs=2, pause=0.0)

def measure(self, work, workload, subject, mode=None, seconds=None):
    here, _, fresh = os.environ.get("TIMES", "100").partition(",")
    anchor = float(os.environ.get("ANCHOR", "1")) * 1e-3
    worker = WorkerContext.of_this_process()
    is_fresh, number = worker is not None, str(worker.number) if worker else "none"
    p50 = float(fresh or here if is_fresh else here) * 1e-6 * (1.001 + (int(number) + 1 if is_fresh else 0) % 7 / 1000)
    mode = mode or os.environ.get("MODES", "host,host").split(",")[is_fresh]
    return Latency(workload, subject, work.direction, p50, median_interval([p50] * 6), (p50,) * 6, 6, mode, 1, "warm",
                   p50, {"compute": anchor, "memory": 2 * anchor, "pace": anchor}, int(os.environ.get("MEMORY", "1000")), 1,
                   tuple(filter(None, [os.environ.get("HOT"), number in os.environ.get("HOT_IN", "") and "hot"])))

Stopwatch.measure = measure
Stopwatch.__init__ = lambda self, *options: setattr(self, "monitor", Silent())

class Silent:
    def conditions(self):
        return {}
"""
#: new processes are forked, which takes no import of torch
FORKED = """
from pytest_attn.session import worker_pool
worker_pool._FORKED_ON = frozenset(("cpu", "cuda"))
"""
#: SLOWER: by how much this side is; the processes of both are one in name only
TURNS = """
import os, pytest
import pytest_attn.guests.against.against_run as against_run

def fresh_runs(config, names, processes, progress, modes, lacking, more, is_forked, placed, pool_of):
    if "LOCKED" in os.environ:
        pytest.fail("another process has been timing")
    here, hot = 1 + float(os.environ.get("SLOWER", "0")), [*filter(None, [os.environ.get("HOT")])]
    return [{"key": key, "p50": 1e-4 * (here if number % 4 in (0, 3) else 1) * (1 + number % 3 / 1000), "launch": 0.0,
             "anchors": {"compute": 1e-3}, "disturbances": hot, "mode": "host", "process": number}
            for number in range(processes) for key in modes]

against_run.fresh_runs = fresh_runs
"""


def committed(folder):
    """Commit all files of a folder, whose repository is made where there is none."""
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*own, *words], cwd=folder, check=True)
