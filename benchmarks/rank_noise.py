"""How well fresh pools of ranks agree on a p50: the same code again and again, each time in new processes.

    python benchmarks/rank_noise.py [--device cpu|cuda] [--pools 20] [--ranks 2] [--json FILE]

Each pool is a pytest of its own with `attn.measure` over ranks: keys and values gathered, and sent round in a ring. Prints a
line per pool and kernel, then for each kernel the spread of the p50s ((largest - smallest) / median) and their standard
deviation, how many pools were disturbed, and the share of collectives. On a CPU it takes a minute per four pools.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from pytest_attn.reports.records import read_records

ROOT = Path(__file__).parents[1]
#: what is timed on each kind of device; tokens are of the whole sequence
WORKLOADS = {
    "cpu": 'Workload(1024, heads=4, head_dim=64, dtype="float32", name="s1024")',
    "cuda": 'Workload(16384, heads=32, kv_heads=8, head_dim=128, name="s16k"),'
    ' Workload(4096, heads=16, kv_heads=4, head_dim=128, name="s4k")',
}
TEST = """
import pytest, torch
import torch.distributed as dist
import torch.nn.functional as F
from pytest_attn import Workload

def gathered(tensor, group):
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group)
    return torch.cat(parts, 2)

def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

def with_lse(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v)) if group > 1 else (k, v)
    if q.device.type == "cuda":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)

def shifted(k, v, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    new_k, new_v = torch.empty_like(k), torch.empty_like(v)
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    moves = [(dist.isend, k, to), (dist.irecv, new_k, source), (dist.isend, v, to), (dist.irecv, new_v, source)]
    for work in dist.batch_isend_irecv([dist.P2POp(*move, group=group) for move in moves]):
        work.wait()
    return new_k, new_v

def ring(q, k, v, group):
    k, v, out, lse = k.contiguous(), v.contiguous(), None, None
    for step in range(dist.get_world_size(group)):
        one, one_lse = with_lse(q, k, v)
        one, one_lse = one.float(), one_lse.float()[..., None]
        if out is None:
            out, lse = one, one_lse
        else:
            out = out - torch.sigmoid(one_lse - lse) * (out - one)
            lse = torch.logaddexp(lse, one_lse)
        if step + 1 < dist.get_world_size(group):
            k, v = shifted(k, v, group)
    return out.to(q.dtype)

@pytest.mark.attention(WORKLOADS, ranks=RANKS, precision="PRECISION")
@pytest.mark.parametrize("kernel", ["all-gather", "ring"])
def test_noise(attn, kernel):
    def fn(q, k, v):
        if kernel == "ring":
            return ring(q, k, v, attn.group)
        return attention(q, gathered(k, attn.group), gathered(v, attn.group))
    attn.measure(fn, name=kernel)
"""


def one_pool(folder: Path, device: str) -> list[dict[str, Any]]:
    """Time all kernels in one fresh pool; return their records, and end with pytest's output where one is missing."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_noise.py", f"--attn-device={device}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--attn-output=run.jsonl"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    records = read_records(folder / "run.jsonl")
    timed = [record for record in records if record["question"] == "latency" and record["latency"].get("p50")]
    if done.returncode or not timed:
        sys.exit(done.stdout)
    return timed


def report(name: str, records: list[dict[str, Any]]) -> str:
    """Return a line on what all pools say of one kernel."""
    latencies = [record["latency"] for record in records]
    p50s = [latency["p50"] for latency in latencies]
    middle = statistics.median(p50s)
    spread, deviation = (max(p50s) - min(p50s)) / middle, statistics.stdev(p50s) / middle if len(p50s) > 1 else 0.0
    disturbed = sum(bool(latency["disturbances"]) for latency in latencies)
    shares = [share for latency in latencies for share in latency["ranks"]["communication"]]
    share = f"{statistics.median(shares):.0%} in collectives" if shares else "share of collectives unknown"
    return (
        f"{name:28} {len(p50s)} pools ({disturbed} disturbed): median {middle * 1e6:9.1f} us, spread {spread:.2%},"
        f" standard deviation {deviation:.2%}; {share}; {latencies[0]['ranks']['topology']}, {latencies[0]['mode']}"
    )


def main() -> None:
    """Start one pool after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where all records go")
    asked = parser.parse_args()
    precision = "torch_cpu" if asked.device == "cpu" else "flash"
    text = (
        TEST.replace("WORKLOADS", WORKLOADS[asked.device]).replace("RANKS", str(asked.ranks)).replace("PRECISION", precision)
    )
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_noise.py").write_text(text, encoding="utf-8")
        for number in range(1, asked.pools + 1):
            for record in one_pool(folder, asked.device):
                latency = record["latency"]
                found[f"{record['subject']} on {record['name'] or record['workload']}"].append(record)
                print(
                    f"pool {number}: {record['subject']:10} {record['workload']:24} {latency['p50'] * 1e6:9.1f} us", flush=True
                )
    for kernel, records in found.items():
        print(report(kernel, records))
    if asked.json:
        asked.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
