"""How long one waits for a run of pytest, with nothing compiled before and once more, and where the time goes.

    python benchmarks/wait.py [--rows NAME,...] [--workers 8] [--before FOLDER] [--budget SECONDS] [--out FILE.json]
        [--pytest ARGUMENT ...]

Runs pytest for each row of ROWS, those of a GPU where there is one and those of two CPU cores elsewhere: `cold` with the
caches of all compilers in an empty folder, `again` with what the first left there. FOLDER is another checkout, whose package
runs beside this one, each with caches of its own; ratios are this one's time over its. Prints for each run its seconds, those
that are asked, what pytest counted, and the seconds of its tests by backend and by file of the suite, with what was skipped
and what was compiled by itself. No run is begun after --budget; the one that is running then is interrupted, and reports what
it has. --out is written after each run. On a GPU host without an installed plugin:

    PYTHONPATH=. python3 benchmarks/wait.py --workers 8 --budget 590 --out wait.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
#: where each compiler keeps what it compiled, and what switches its cache on
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUTE_DSL_CACHE_DIR": "cute",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash4",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "others",
}
#: seconds that an interrupted pytest has to report what it found
_TO_END = 20


@dataclass(frozen=True)
class Row:
    """A run of pytest, and the seconds that are asked with nothing compiled and once more; None: it is not run so."""

    name: str
    arguments: tuple[str, ...]
    cold: float | None
    again: float | None = None
    on_gpu: bool = True

    @property
    def limits(self) -> dict[str, float]:
        """Seconds by when it runs: cold, again."""
        return {when: limit for when in ("cold", "again") if (limit := getattr(self, when)) is not None}


SUITE = "pytest_attn/suite"
ROWS = (
    Row("jit", (SUITE, "--attn-backends=flex,flex_flash,flash4", "--attn-workloads=smoke"), 70, 25),
    Row("features", (SUITE, "--attn-backends=all", "--attn-workloads=smoke,features"), 150, 75),
    Row("default", (SUITE, "--attn-backends=all"), 300),
    Row("suite", (SUITE, "--attn-backends=all"), 90, 35, on_gpu=False),
    Row("test", ("tests", "--dist=worksteal"), None, 240, on_gpu=False),
)


@dataclass
class Run:
    """What one run of pytest took. spent: seconds of its tests by backend, then by file of the suite or other kind."""

    row: str
    when: str
    package: str
    limit: float
    seconds: float
    summary: str
    interrupted: bool
    compiled: float = 0.0
    spent: dict[str, dict[str, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        cells = (self.row, self.when, self.package, f"{self.seconds:.0f} s", f"<= {self.limit:.0f} s", self.summary)
        return " | ".join(cells)


class Waiting:
    """Runs pytest in checkouts of the package, each with caches of its own in a folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder, self._begun = options, folder, time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._options.budget - (time.monotonic() - self._begun)

    def run(self, row: Row, when: str, package: str, root: Path) -> Run:
        """Run it once; with `again`, after a run with the same caches."""
        kept = self._folder / row.name / package
        records = kept / f"{when}.jsonl"
        records.parent.mkdir(parents=True, exist_ok=True)
        workers = self._options.workers if row.on_gpu else 2
        command = [sys.executable, "-m", "pytest", *row.arguments, *self._options.pytest, "-q", "-rN", "--tb=no"]
        command += ["-n", str(workers), "-o", f"cache_dir={kept / 'pytest'}"]
        if not any(point.value == "pytest_attn.plugin" for point in entry_points(group="pytest11")):
            command += ["-p", "pytest_attn.plugin"]
        if row.arguments[0] == SUITE:
            command += ["--dist=loadgroup", "--no-loadscope-reorder", f"--attn-output={records}"]
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=root,
            env=self._environment(row, kept, root),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=None if row.on_gpu else lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
        )
        output, interrupted = self._wait(process)
        seconds = time.monotonic() - begun
        lines = [line for line in output.splitlines() if line.strip()] or ["it said nothing"]
        counted = next((line for line in reversed(lines) if re.search(r" in [\d.]+s", line)), lines[-1])
        summary = f"interrupted: {counted}" if interrupted else counted
        found = Run(row.name, when, package, row.limits[when], seconds, summary, interrupted)
        if records.exists():
            found.spent, found.compiled = spent_in(records)
        return found

    def _wait(self, process: subprocess.Popen[str]) -> tuple[str, bool]:
        """Return what it said, and whether the budget ended it."""
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=max(self.left, 0))[0], False
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_TO_END)[0], True
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], True

    def _environment(self, row: Row, kept: Path, root: Path) -> dict[str, str]:
        told = {name: str(kept / folder) for name, folder in CACHES.items()}
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT]
        hidden = {} if row.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as the Makefile
        return {**own, **told, **hidden, "PYTHONPATH": os.pathsep.join((str(root), *others)), "COLUMNS": "200"}


def spent_in(records: Path) -> tuple[dict[str, dict[str, float]], float]:
    """Return the seconds of tests, by backend and kind, and those of compiling, of records that --attn-output wrote."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    compiled, seen = 0.0, set()
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if "test" not in record or record["test"] in seen:  # without one: the line of the whole run
            continue
        seen.add(record["test"])
        compiled += record["compile_seconds"] or 0
        ended = {"skipped": "skipped", "known defect": "known defects"}.get(record["verdict"])
        kind = ended or Path(record["test"].partition("::")[0]).stem.removeprefix("test_")
        spent[record["subject"]][kind] += record["seconds"]
    return {backend: dict(kinds) for backend, kinds in spent.items()}, compiled


def where(run: Run) -> Iterator[str]:
    """Yield where the time of one run went, in lines: all of it by kind, then each backend that took more than a fiftieth."""
    kinds: dict[str, float] = defaultdict(float)
    for by_kind in run.spent.values():
        for kind, seconds in by_kind.items():
            kinds[kind] += seconds
    if not kinds:
        return
    total = sum(kinds.values())
    yield f"  tests {total:.0f} s: {listed(kinds)}; of these compiling {run.compiled:.0f} s"
    for backend, by_kind in sorted(run.spent.items(), key=lambda one: -sum(one[1].values())):
        if sum(by_kind.values()) > total / 50:
            yield f"  {backend} {sum(by_kind.values()):.0f} s: {listed(by_kind)}"


def listed(seconds: dict[str, float]) -> str:
    return ", ".join(f"{kind} {spent:.1f}" for kind, spent in sorted(seconds.items(), key=lambda one: -one[1]))


def ratios(runs: Sequence[Run]) -> Iterator[str]:
    """Yield each row's seconds with both packages, and this one's share of the other's."""
    now = {(run.row, run.when): run for run in runs if run.package == "now"}
    for run in runs:
        if run.package == "before" and (mine := now.get((run.row, run.when))):
            is_whole = not (run.interrupted or mine.interrupted)
            ratio = f"{mine.seconds / run.seconds:.2f}" if is_whole else "not known: interrupted"
            yield f"{run.row} | {run.when} | {run.seconds:.0f} s | {mine.seconds:.0f} s | {ratio}"


def main() -> None:
    """Run each row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    own = [row.name for row in ROWS if row.on_gpu == on_gpu]
    parser.add_argument("--rows", default=",".join(own), help=f"of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--workers", type=int, default=8, help="on a GPU; two elsewhere")
    parser.add_argument("--before", type=Path, help="another checkout of the package")
    parser.add_argument("--budget", type=float, default=3600)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="further arguments of pytest, last")
    options = parser.parse_args()
    packages = {"now": ROOT, **({"before": options.before.resolve()} if options.before else {})}
    machine = torch.cuda.get_device_name() if on_gpu else f"{len(os.sched_getaffinity(0))} CPU cores"
    print(f"{machine}, torch {torch.__version__}\nrow | when | package | took | asked | pytest", flush=True)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        waiting = Waiting(options, Path(folder))
        for row in (row for row in ROWS if row.name in options.rows.split(",")):
            for when in row.limits:
                for package, root in packages.items():
                    if waiting.left <= 0:
                        print(f"{row.name} | {when} | {package} | not begun: the budget of {options.budget:.0f} s is spent")
                        continue
                    runs.append(waiting.run(row, when, package, root))
                    print(runs[-1], *where(runs[-1]), sep="\n", flush=True)
                    if options.out:
                        told = {"machine": machine, "torch": torch.__version__, "runs": [asdict(run) for run in runs]}
                        options.out.write_text(json.dumps(told, indent=1))
    if options.before:
        print("row | when | before | now | ratio", *ratios(runs), sep="\n")


if __name__ == "__main__":
    main()
