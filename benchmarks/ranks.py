"""Attention over ranks: fault-free kernels over shards, numbers of ranks and workloads, and every planted fault.

`python benchmarks/ranks.py [--real]` prints a line for each kernel, shard and number of ranks with the largest z of all
workloads, forward and backward, then which faults were found and named. Ranks are threads; with --real fault-free kernels also
run in processes over gloo, through pytest. Takes one minute on two cores, with --real two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from faulty_rings import FAULTY, judged_over_ranks  # noqa: E402
from rings import HONEST  # noqa: E402

from pytest_attn import Document, Window, Workload  # noqa: E402
from pytest_attn.correctness.spec import ReferenceCache  # noqa: E402
from pytest_attn.guests.ranks.sharding import SHARDS  # noqa: E402

PLAIN = Workload(64, heads=4, kv_heads=2, head_dim=32)
WORKLOADS = [
    PLAIN,
    PLAIN.replace(mask="causal"),
    PLAIN.replace(q_len=67, kv_len=67, mask="causal", dtype="float16"),
    PLAIN.replace(kv_heads=1, mask=Window(20, 0)),
    PLAIN.replace(mask=Document((40, 24))),
    PLAIN.replace(q_len=48, kv_len=96, mask="causal-bottom-right"),
    PLAIN.replace(dtype="float32", softcap=20.0),
    Workload(64, heads=4, head_dim=32, bias="hqk"),
    Workload(64, batch=2, heads=4, head_dim=32, kv_lens=(40, 64)),
    Workload(q_lens=(40, 17, 9), heads=4, kv_heads=2, head_dim=32, mask="causal"),
    Workload(256, heads=4, kv_heads=2, mask="causal"),
]
REAL = """
import pytest
from exchanges import GlooExchange
from rings import HONEST, Problem
from pytest_attn import Workload
from pytest_attn.guests.ranks.sharding import SHARDS, Sharding

WORKLOADS = [
    Workload(67, heads=4, kv_heads=2, head_dim=32, mask="causal"),
    Workload(64, heads=4, kv_heads=1, head_dim=32),
    Workload(q_lens=(40, 17, 9), heads=4, kv_heads=2, head_dim=32, mask="causal"),
]

def over(shard):
    @pytest.mark.attention(WORKLOADS, ranks=(2, 4), shard=shard, backward=True)
    @pytest.mark.parametrize("cls", HONEST)
    def test_honest(attn, cls):
        problem = Problem.of(Sharding(attn.workload, shard, attn.ranks))
        attn.check(lambda q, k, v: cls(GlooExchange(attn.rank, attn.ranks, attn.group), problem)(q, k, v))
    return test_honest

test_contiguous, test_head_tail, test_striped = map(over, SHARDS)
"""


def honest(references: ReferenceCache) -> int:
    """Judge the fault-free kernels; return how many false alarms there were."""
    alarms = 0
    for kernel in HONEST:
        for shard in SHARDS:
            for ranks in (2, 4):
                worst, seconds = [0.0, 0.0, 0.0], time.perf_counter()
                for workload in WORKLOADS:
                    comparison = judged_over_ranks(kernel, workload, ranks, shard, "", references, returns_lse=True)
                    alarms += not comparison.passed
                    for row in (row for row in comparison.tensors if row.name != "lse"):
                        worst = [max(pair) for pair in zip(worst, (row.z_element, row.z_row, row.z_head), strict=True)]
                z = " ".join(f"{one:.2f}" for one in worst)
                print(f"{kernel.__name__:10} {shard:11} {ranks} ranks: largest z {z}, {time.perf_counter() - seconds:.1f} s")
    return alarms


def faults(references: ReferenceCache) -> int:
    """Judge the faulty kernels; return how many were not found."""
    missed = 0
    for kernel, fault, named, workload, ranks, shard in FAULTY:
        comparison = judged_over_ranks(kernel, workload, ranks, shard, fault, references)
        told = "missed" if comparison.passed else "named" if named in comparison.faults else "found"
        missed += comparison.passed
        print(f"{told:7} {kernel.__name__}: {fault}")
    return missed


def real() -> int:
    """Run the fault-free kernels over gloo; return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_real.py").write_text(REAL)
        paths = f"{TESTS}:{TESTS.parent}"
        command = [sys.executable, "-m", "pytest", "-q", "--durations=3", "test_real.py"]
        return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def main() -> None:
    """Print the matrix, and exit with 1 where a kernel was misjudged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="also over gloo")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    references = ReferenceCache()
    alarms, missed = honest(references), faults(references)
    print(f"{alarms} false alarms; {len(FAULTY) - missed} of {len(FAULTY)} faults found")
    sys.exit(bool(alarms or missed or (asked.real and real())))


if __name__ == "__main__":
    main()
