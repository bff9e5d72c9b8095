"""How long `python -m pytest_attn merge` takes, as a process of its own, and how much memory.

    python benchmarks/merging.py [--files 8] [--cases 500] [--runs 5]

The files have records as a run on a GPU writes them, with a check and mostly a latency per case. Prints one line per OUT.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fakes.runs import write_runs  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_runs(Path(name), args.files, args.cases)
        files = [f"part-{number}.jsonl" for number in range(1, args.files + 1)]
        size = sum((Path(name) / file).stat().st_size for file in files)
        print(f"{args.files} files of {args.cases} cases, {size / 1e6:.1f} MB")
        for out in ("all.jsonl", "all.md", "all.html"):
            taken = []
            for _ in range(args.runs):
                begun = time.perf_counter()
                command = [sys.executable, "-m", "pytest_attn", "merge", out, *files]
                subprocess.run(command, cwd=name, stdout=subprocess.DEVNULL, check=True)
                taken.append(time.perf_counter() - begun)
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            times = f"median {statistics.median(taken):.2f} s, longest {max(taken):.2f} s"
            print(f"merge {out:10} {times}, memory so far {most:.0f} MiB")


if __name__ == "__main__":
    main()
