"""Whether another version of the package measures the same p50s, and how long each takes: fresh processes in turn.

    python benchmarks/two_packages.py --old PATH [--processes 30] [--seconds S] [--device cuda|cpu] [--only CASE,...]
        [--out FILE.json]

PATH: the root of the other version, its `pytest_attn` within. Every process times all cases, in an order of its own, with one
of both packages; old and new take turns, and which is first changes. Prints, for each case and the mode that it was timed in,
the ratio of the medians of the p50s, new over old, with a 95 % interval of bootstrapped processes, the spread of each, and the
ratio of the seconds that a whole measurement takes, with its check (`pytest_attn.measure`), in the first five processes of
each. No process is begun after --seconds. On a GPU:

    python benchmarks/two_packages.py --old /path/to/the/old --processes 30 --device cuda --out two.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: workload, backend, direction, and the mode that is asked for: the last recorded, as it would be of a baseline
CASES: dict[str, dict[str, tuple[str, str, str, str | None]]] = {
    "cuda": {
        "events": ("4608, heads=24, head_dim=128", "sdpa_cudnn", "forward", None),
        "events backward": ("4608, heads=24, head_dim=128", "sdpa_cudnn", "backward", None),
        "events both": ("2048, heads=32, kv_heads=8, head_dim=128, mask='causal'", "sdpa_flash", "forward+backward", None),
        "batched": ("512, heads=24, head_dim=128", "sdpa_flash", "forward", "batched"),
        "batched backward": ("512, heads=24, head_dim=128", "sdpa_flash", "backward", "batched"),
        "graph": ("512, heads=24, head_dim=128", "sdpa_flash", "forward", None),
        "graph short": ("128, heads=24, head_dim=128", "sdpa_cudnn", "forward", None),
        "graph long": ("1024, heads=24, head_dim=128, mask='causal'", "sdpa_flash", "forward", None),
        "graph backward": ("196, batch=8, heads=12", "sdpa_flash", "backward", None),
        "graph both": ("257, heads=2", "sdpa_flash", "forward+backward", None),
        "replay": ("196, batch=8, heads=12", "sdpa_cudnn", "forward", "replay"),
        "decode": ("1, 8192, heads=32, kv_heads=8, head_dim=128, batch=8", "sdpa_flash", "forward", None),
        "host": ("256, heads=8", "eager", "forward", "host"),
    },
    "cpu": {
        "host": ("256, heads=4", "sdpa", "forward", None),
        "host backward": ("256, heads=4", "sdpa", "backward", None),
        "host both": ("256, heads=4, dtype='float32'", "sdpa", "forward+backward", None),
        "host short": ("64, heads=2, head_dim=32, dtype='float32'", "sdpa", "forward", None),
        "host long": ("1024, heads=8, dtype='float32'", "sdpa", "forward", None),
        "host decode": ("1, 4096, heads=8, kv_heads=2, batch=4", "sdpa", "forward", None),
    },
}
_SECONDS = 900
#: processes of each package that take whole measurements as well
_WHOLE = 5


def one_process(kind: str, number: int, only: str) -> dict[str, Any]:
    """Measure every case once, with the package that is imported here."""
    import torch

    import pytest_attn
    from pytest_attn import Workload
    from pytest_attn.backends.registry import Registry
    from pytest_attn.correctness.spec import CheckSpec
    from pytest_attn.latency.protocol import stopwatch_of

    try:
        from pytest_attn.latency.kernel_work import work_of
    except ImportError:  # of a version before it
        from pytest_attn.latency.work import work_of  # type: ignore[attr-defined,no-redef]

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cpu":
        torch.set_num_threads(1)
    registry, stopwatch = Registry(), stopwatch_of(device)
    names = only.split(",") if only else list(CASES[kind])
    found: dict[str, Any] = {}
    for name in random.Random(number).sample(names, len(names)):
        shape, backend, direction, mode = CASES[kind][name]
        workload = eval(f"Workload({shape})", {"Workload": Workload})
        work = work_of(registry[backend], CheckSpec(workload, device), direction)  # type: ignore[arg-type]
        latency = stopwatch.measure(work, workload.id, backend, mode)  # type: ignore[arg-type]
        kept = {one: getattr(latency, one) for one in ("p50", "mode", "calls", "blocks", "spent", "memory", "disturbances")}
        del work
        found[name] = kept
        if number < _WHOLE:
            begun = time.perf_counter()
            backward: Any = {"forward": False, "backward": True, "forward+backward": "both"}[direction]
            pytest_attn.measure(registry[backend], workload, backward=backward, device=str(device))
            kept["whole"] = time.perf_counter() - begun
    return {"process": number, "torch": torch.__version__, "cases": found}


Runs = dict[str, list[dict[str, Any]]]


def take_turns(paths: dict[str, Path], processes: int, seconds: float, kind: str, only: str) -> Runs:
    """Measure with each package in turn."""
    found: Runs = {name: [] for name in paths}
    end = time.monotonic() + seconds
    for number in range(processes):
        if time.monotonic() > end:
            break
        for name in list(paths) if number % 2 else list(paths)[::-1]:
            command = [sys.executable, __file__, "--child", str(number), "--device", kind, "--only", only]
            environment = {**os.environ, "PYTHONPATH": str(paths[name].resolve())}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                sys.exit(f"{name}, process {number}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def report(found: Runs) -> None:
    """Print what the two say of each case."""
    print(f"{'case':18} {'mode':12} {'old us':>10} {'new/old':>8} {'95 % interval':>18} {'spread':>14} {'measured in':>12} n")
    for case in found["old"][0]["cases"]:
        old, new = ([run["cases"][case] for run in found[name]] for name in ("old", "new"))
        modes = "/".join(sorted({f"{one['mode']}*{one['calls']}" for one in (*old, *new)}))
        p50s = [[one["p50"] for one in runs] for runs in (old, new)]
        low, high = interval(*p50s)
        spreads = " ".join(f"{statistics.stdev(one) / statistics.mean(one):6.2%}" if len(one) > 1 else "-" for one in p50s)
        took = ratio_of_medians(*([one["whole"] for one in runs if "whole" in one] for runs in (old, new)))
        quiet = sum(not one["disturbances"] for one in (*old, *new))
        print(
            f"{case:18} {modes[:24]:12} {statistics.median(p50s[0]) * 1e6:10.2f} {ratio_of_medians(*p50s):8.4f}"
            f" {low:8.4f} to {high:.4f} {spreads:>14} {took:12.3f} {quiet}/{len(old) + len(new)}"
        )


def ratio_of_medians(old: Sequence[float], new: Sequence[float]) -> float:
    """Return that of the new over that of the old."""
    return statistics.median(new) / statistics.median(old)


def interval(old: Sequence[float], new: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """Return where 95 % of the ratios lie, of processes drawn again."""
    chosen = random.Random(0)
    ratios = sorted(ratio_of_medians(chosen.choices(old, k=len(old)), chosen.choices(new, k=len(new))) for _ in range(draws))
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws) - 1]


def main() -> None:
    """Take turns and report, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--processes", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="names of cases; default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(one_process(options.device, options.child, options.only)))
        return
    if options.old is None or not (options.old / "pytest_attn").is_dir():
        parser.error("--old PATH: the root of another version, with its folder pytest_attn")
    paths = {"old": options.old, "new": Path(__file__).resolve().parent.parent}
    found = take_turns(paths, options.processes, options.seconds, options.device, options.only)
    if options.out:
        options.out.write_text(json.dumps(found))
    report(found)


if __name__ == "__main__":
    main()
