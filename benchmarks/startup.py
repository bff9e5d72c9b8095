"""What the plugin costs a pytest that has no attention test, and what collecting many cases costs.

    python benchmarks/startup.py [--cases 10000]

Whole processes, in turn: pytest with the plugin and with `-p no:attn`; then collecting as many items from a marked test
and from plain parametrize; then asking every backend whether it is installed. Prints medians and ratios of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARKED = """
import pytest
from pytest_attn import Workload

WORKLOADS = [Workload(n, heads=2) for n in range(1, 1 + {workloads})]

@pytest.mark.attention(WORKLOADS)
def test_case(attn, attn_backend):
    pass
"""
PLAIN = """
import pytest

@pytest.mark.parametrize("case", [f"case-{{n}}" for n in range({cases})])
def test_case(case):
    pass
"""


DETECTION = """
import sys, time, torch, torch.nn.attention.varlen
from pytest_attn.backends.machine import machine_of, resolve_device
from pytest_attn.backends.registry import Registry

machine, before = machine_of(resolve_device()), set(sys.modules)
started = time.perf_counter()
registry = Registry()
there = [name for name in registry.names if registry[name].unavailable_because(machine) is None]
taken = 1e3 * (time.perf_counter() - started)
imported = {name.partition(".")[0] for name in set(sys.modules) - before} - {"pytest_attn"} - set(sys.stdlib_module_names)
count = f"{len(registry.names)} backends, {len(there)} of them there"
print(f"detecting {count}: {taken:.1f} ms, imported: {imported or 'nothing'}")
"""


def seconds(folder: Path, *options: str) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - started


def in_turn(runs: int, *commands: tuple[Path, tuple[str, ...]]) -> list[list[float]]:
    taken: list[list[float]] = [[] for _ in commands]
    for _ in range(runs + 1):
        for times, (folder, options) in zip(taken, commands, strict=True):
            times.append(seconds(folder, *options))
    return [times[1:] for times in taken]  # the first warms the file cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    for _ in range(3):
        subprocess.run([sys.executable, "-c", DETECTION], check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})
    with tempfile.TemporaryDirectory() as name:
        empty, marked, plain = (Path(name) / folder for folder in ("empty", "marked", "plain"))
        for folder, text in (
            (empty, "def test_nothing():\n    pass\n"),
            (marked, MARKED.format(workloads=args.cases // 10)),
            (plain, PLAIN.format(cases=args.cases)),
        ):
            folder.mkdir()
            (folder / "test_it.py").write_text(text)
        with_plugin, without = in_turn(args.runs, (empty, ()), (empty, ("-p", "no:attn")))
        cost = statistics.median(1e3 * (a - b) for a, b in zip(with_plugin, without, strict=True))
        print(f"start without the plugin {1e3 * statistics.median(without):.0f} ms, the plugin adds {cost:.1f} ms")
        for factor in (1, 10):
            (marked / "test_it.py").write_text(MARKED.format(workloads=factor * args.cases // 10))
            (plain / "test_it.py").write_text(PLAIN.format(cases=factor * args.cases))
            ours, theirs = in_turn(
                3 if factor == 1 else 1,
                (marked, ("--collect-only", "-qq", "--attn-backends=all")),
                (plain, ("--collect-only", "-qq")),
            )
            mine, plainly = statistics.median(ours), statistics.median(theirs)
            print(f"collect {factor * args.cases:,}: {mine:.2f} s, plain {plainly:.2f} s, ratio {mine / plainly:.2f}")


if __name__ == "__main__":
    main()
