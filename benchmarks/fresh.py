"""New processes that a server forks, beside wholly fresh ones: what each costs, and whether their times are alike.

    python benchmarks/fresh.py [--device cuda|cpu] [--processes 20] [--per-server 5] [--stories] [--out FILE.json]

Wholly fresh and forked pytests take turns to time the same four cases, each forked one prepared as in a run; after every few
of them a new server takes over.
Prints, of one run: seconds per process and their ratio; for each case the p50s' median, relative standard deviation and range,
of both, and the difference of the medians. F: the variance between servers over that among the processes of one. If the
addresses or the hash seed that they share were part of their times, it would be larger than that behind it, of the wholly
fresh ones that ran beside each server and share nothing but the hour. --stories then times whole runs of pytest with both: a
recording of the four cases, and what a suspect adds to a run. All of it on a GPU:

    python benchmarks/fresh.py --device cuda --processes 30 --per-server 5 --stories --out fresh.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pytest_attn.processes.fork_server import Command, modules_ahead
from pytest_attn.session.worker_pool import WorkerPool

SUITE = """
import os, pytest
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v):
    out = sdpa(q, k, v)
    return sdpa(q, k, v) if os.environ.get("SLOWED") else out

@pytest.mark.attention({workloads}, device="{device}")
def test_mine(attn):
    attn.measure(mine)
"""
WORKLOADS = {
    "cuda": {
        "flux-L512": "4608, heads=24, head_dim=128",
        "s1024": "1024, heads=24, head_dim=128",
        "s128": "128, heads=24, head_dim=128",
        "vit-196": "196, batch=8, heads=12",
    },
    "cpu": {"s128": "128, heads=2", "s256": "256, heads=4", "s512": "512, heads=2", "s384": "384, heads=4"},
}
#: told to the suite's conftest by a variable: to list what a process has imported
CONFTEST = """
import os, sys
from pathlib import Path

def pytest_unconfigure():
    if "MODULES" in os.environ:
        Path(os.environ["MODULES"]).write_text("\\n".join(sys.modules))

from pytest_attn.session import worker_pool

worker_pool._FORKED_ON = frozenset(("cuda", "cpu"))
"""
_SECONDS = 600


class Suite:
    """Tests of four cases in a folder, and the processes that time them."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._names = folder, list(WORKLOADS[device])
        workloads = ", ".join(f'Workload({shape}, name="{name}")' for name, shape in WORKLOADS[device].items())
        (folder / "test_fresh.py").write_text(SUITE.format(workloads=workloads, device=device))
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        self._arguments = ["-p", "no:cacheprovider", *(["--attn-threads=1"] if device == "cpu" else [])]
        self.time_all(0, WorkerPool(), False, MODULES=str(folder / "modules"))  # compiles what is compiled once, too
        for name in modules_ahead((folder / "modules").read_text().splitlines()):
            with suppress(Exception):  # as in the process that starts a server
                importlib.import_module(name)

    def command(self, number: int, **environment: str) -> Command:
        """Return the command of a process that times all cases, in an order of its own."""
        order = random.Random(number).sample(self._names, len(self._names))
        told = {"tests": [f"test_fresh.py::test_mine[{name}]" for name in order], "options": {}, "waiting": [os.getpid()]}
        arguments = [*self._arguments, "-p", "pytest_attn.processes.worker"]
        return Command(arguments, {**os.environ, **environment}, self._folder, self._folder / "output", told)

    def time_all(self, number: int, pool: WorkerPool, is_forked: bool, **environment: str) -> dict[str, Any]:
        """Time every case once, in a forked process that was prepared, or in a wholly fresh one."""
        command = self.command(number, **environment)
        begun = time.perf_counter()
        if is_forked:
            pool.prepare([command])
        ended = pool.run(command, _SECONDS, is_forked)
        if is_forked and not pool.launcher.can_fork:
            sys.exit(f"not forked:\n{ended.output}")
        seconds = time.perf_counter() - begun
        if ended.returncode != 0 or len(ended.messages) < len(self._names):
            sys.exit(f"a process ended with {ended.returncode}:\n{ended.output}")
        return {
            "process": number,
            "seconds": seconds,
            "cases": {run["key"].partition(" | ")[0]: run for run in ended.messages},
        }

    def run(self, *arguments: str, **environment: str) -> tuple[float, str]:
        """Return the seconds of a whole run of pytest, which may fail, and its last line."""
        begun = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", *self._arguments, *arguments]
        done = subprocess.run(command, cwd=self._folder, env={**os.environ, **environment}, capture_output=True, text=True)
        return time.perf_counter() - begun, (done.stdout.splitlines() or ["it said nothing"])[-1]


def take_turns(suite: Suite, processes: int, per_server: int) -> dict[str, list[dict[str, Any]]]:
    """Time in wholly fresh and in forked processes in turn; no server starts while anything is timed."""
    found: dict[str, list[dict[str, Any]]] = {"fresh": [], "forked": []}
    pool = WorkerPool()
    try:
        for number in range(processes):
            if number % per_server == 0:
                pool.close()
                pool.run(suite.command(number), _SECONDS)  # starts the server
            for kind in ("fresh", "forked") if number % 2 else ("forked", "fresh"):
                run = suite.time_all(number, pool, kind == "forked")
                found[kind].append({**run, "server": number // per_server})
    finally:
        pool.close()
    return found


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print what a process costs, and how far the p50s of each kind agree."""
    fresh, forked = (statistics.median(run["seconds"] for run in found[kind]) for kind in ("fresh", "forked"))
    print(f"seconds per process: wholly fresh {fresh:.2f}, forked {forked:.2f}, ratio {forked / fresh:.2f}")
    heads = " ".join(f"{kind:>9} {'spread':>7} {'range':>7} {'n':>3}" for kind in ("fresh us", "forked us"))
    print(f"{'case':12} {heads} {'differ':>7} {'F':>5} {'fresh':>5}")
    for case in found["fresh"][0]["cases"]:
        kinds = {kind: undisturbed(found[kind], case) for kind in ("fresh", "forked")}
        if min(len(runs) for runs in kinds.values()) < 3:
            print(f"{case:12} disturbed in too many processes")
            continue
        p50s = {kind: [run["cases"][case]["p50"] for run in runs] for kind, runs in kinds.items()}
        medians = {kind: statistics.median(one) for kind, one in p50s.items()}
        cells = [
            f"{medians[kind] * 1e6:9.2f} {spread(one):7.2%} {extent(one):7.2%} {len(one):3}" for kind, one in p50s.items()
        ]
        ratios = [between_over_within(runs, case) for runs in (kinds["forked"], kinds["fresh"])]
        differ = medians["forked"] / medians["fresh"] - 1
        print(f"{case:12} {cells[0]} {cells[1]} {differ:+7.2%} {ratios[0]:5.2f} {ratios[1]:5.2f}")


def undisturbed(runs: Sequence[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [run for run in runs if not run["cases"][case]["disturbances"]]


def spread(found: Sequence[float]) -> float:
    return statistics.stdev(found) / statistics.mean(found)


def extent(found: Sequence[float]) -> float:
    return (max(found) - min(found)) / statistics.median(found)


def between_over_within(runs: Sequence[dict[str, Any]], case: str) -> float:
    """Return the F of a one-way analysis of variance, by server; NaN where there are too few values."""
    groups: dict[int, list[float]] = {}
    for run in runs:
        groups.setdefault(run["server"], []).append(run["cases"][case]["p50"])
    if len(groups) < 2 or len(runs) <= len(groups):
        return math.nan
    mean = statistics.mean(one for group in groups.values() for one in group)
    between = sum(len(group) * (statistics.mean(group) - mean) ** 2 for group in groups.values()) / (len(groups) - 1)
    within = sum((one - statistics.mean(group)) ** 2 for group in groups.values() for one in group)
    return between / within * (len(runs) - len(groups))


def tell_stories(suite: Suite, name: str) -> None:
    """Print what a recording of the four cases takes, and what a suspect adds to a run of one, with both kinds."""
    for kind, how in (("forked", "-oattn_fresh=forked"), ("wholly fresh", "-oattn_fresh=started")):
        recording, recorded = suite.run("--attn-update-baselines=benchmark", how)
        passing, passed = suite.run("-k", name, how)
        failing, failed = suite.run("-k", name, how, SLOWED="1")
        print(f"{kind}: a recording of four cases {recording:.1f} s; a suspect {failing - passing:.1f} s")
        print(f"  recording: {recorded}\n  as fast: {passed}\n  slower, which must fail: {failed}")


def main() -> None:
    """Take turns, report, and tell stories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--per-server", type=int, default=5)
    parser.add_argument("--stories", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(Path(folder), options.device)
        print(f"{options.device}, torch {torch.__version__}, {options.processes} processes of each kind, in turn")
        if options.processes:
            found = take_turns(suite, options.processes, options.per_server)
            if options.out:
                options.out.write_text(json.dumps(found))
            report(found)
        if options.stories:
            tell_stories(suite, list(WORKLOADS[options.device])[1])


if __name__ == "__main__":
    main()
