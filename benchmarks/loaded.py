"""The bundled suite beside other work on all cores: time alone must never accuse a kernel.

    python benchmarks/loaded.py --runs 10

Starts loops of matrix products, four per core, runs `pytest --pyargs pytest_attn.suite` on the group smoke so often, prints
pytest's closing lines and how many tests failed, and exits with 1 if any did. The loops end with it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

LOOP = "import torch\ntorch.set_num_threads(1)\na = torch.randn(512, 512)\nwhile True:\n    a @ a\n"


def main() -> int:
    """Run the suite under load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--loops", type=int, default=4, help="per core")
    parser.add_argument("--tests", default="pytest_attn.suite", help="a module of it, such as pytest_attn.suite.test_latency")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(options.loops * cores)]
    failed = 0
    try:
        time.sleep(5)  # until they compute
        print(f"{options.loops} loops on each of {cores} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        for number in range(1, options.runs + 1):
            failed += _failures(number, options.tests)
    finally:
        for loop in loops:
            loop.kill()
    print(f"{options.runs} runs, {failed} failed tests")
    return 1 if failed else 0


def _failures(number: int, tests: str) -> int:
    """Run the suite once; return how many tests failed."""
    command = [sys.executable, "-m", "pytest", "--pyargs", tests, "--attn-backends=all", "--attn-workloads=smoke", "-q"]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    print(f"run {number}: {lines[-1] if lines else done.stderr[-500:]}", flush=True)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    found = re.search(r"(\d+) (?:failed|error)", lines[-1] if lines else "1 error")
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
