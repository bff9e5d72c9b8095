"""Which cheats each judgment refuses, in its own process and where another one computes, and at which time the others pass.

    python benchmarks/cheats.py [NAME ...] [--isolated] [--device cpu|cuda] [--length 512] [--out FILE.json]

The kernels of tests/cheats/table.py are asked by `attn.check`, `attn.check_invariants` and `attn.measure` in real runs of
pytest, one after the other; those that end their process or leave it changed in a process each, followed by a kernel that is
wrong and says nothing, which must fail. Prints a line for each, with its p50 as a share of torch's attention in the same run,
then how many are refused of those that a judge can stop. --isolated: the tests name kernels, and run with --attn-isolated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cheats.runs import JUDGMENTS, Asked, outcomes, source_of  # noqa: E402
from cheats.table import CHEATS, Cheat  # noqa: E402

#: kernels asked in one process, and the seconds that such a process may take
GROUP, SECONDS = 12, 600
_HONEST = "import torch\nattention = torch.nn.functional.scaled_dot_product_attention\n"
_WRONG = "def attention(q, k, v):\n    return v * 0.25\n"


@dataclass(frozen=True)
class Row:
    """What became of one kernel: how each judgment ended, and the test after it; `is_green`: whether its process ended so.

    seconds: its p50, None where none was taken.
    """

    name: str
    kind: str
    stopped: str
    ends: dict[str, str]
    is_green: bool
    seconds: float | None
    honest: float | None

    @property
    def verdict(self) -> str:
        """What a user takes for the result."""
        failed = [judgment for judgment in JUDGMENTS if self.ends.get(judgment) in ("failed", "error")]
        if failed and not self.is_green:
            return "refused"
        if all(self.ends.get(judgment) == "passed" for judgment in JUDGMENTS):
            return "passes"
        return "green, not judged" if self.is_green else "stopped"

    @property
    def share(self) -> str:
        """Its time, as a share of the honest one."""
        return f"{self.seconds / self.honest:.3g}" if self.seconds and self.honest else ""

    def __str__(self) -> str:
        cells = [self.name, self.kind, self.stopped, *(self.ends.get(one, "-") for one in (*JUDGMENTS, "next"))]
        return " | ".join([*cells, self.verdict, self.share])


class Folder:
    """A folder in which pytest runs on kernels."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def ask(self, cheats: Sequence[Cheat]) -> Iterator[Row]:
        """Ask kernels in one process; yield what became of each."""
        with tempfile.TemporaryDirectory() as folder:
            place, alone = Path(folder), len(cheats) == 1 and cheats[0].ends
            honest = [
                self._sized(Asked(f"honest_{i}", marker=m, judgments=("measure",), measure=a))
                for i, (m, a) in enumerate(dict.fromkeys((c.marker, c.measure) for c in cheats))
            ]
            asked = [*honest, *(self._sized(cheat.asked_by(*JUDGMENTS)) for cheat in cheats)]
            asked += [self._sized(Asked("following", judgments=("check",)))] if alone else []
            for one in honest:
                (place / f"{one.module}.py").write_text(_HONEST)
            (place / "following.py").write_text(_WRONG)
            for cheat in cheats:
                (place / f"{cheat.name}.py").write_text(cheat.text)
            for _ in range(1 + any(cheat.again for cheat in cheats)):
                if not (place / "test_kernels.py").exists():
                    (place / "test_kernels.py").write_text(source_of(asked, self._options.isolated, self._options.device))
                code, ends, times = self._run(place)
            of_honest = {
                (cheat.marker, cheat.measure): one.module
                for cheat in cheats
                for one in honest
                if (one.marker, one.measure) == (self._sized(cheat.asked_by(*JUDGMENTS)).marker, cheat.measure)
            }
            for cheat in cheats:
                own = {
                    j: ends[f"test_{cheat.name}_attention_{j}"]
                    for j in JUDGMENTS
                    if f"test_{cheat.name}_attention_{j}" in ends
                }
                if alone and "test_following_attention_check" in ends:
                    own["next"] = ends["test_following_attention_check"]
                yield Row(
                    cheat.name,
                    cheat.kind,
                    cheat.stopped,
                    own,
                    code == 0 if alone else not {*own.values()} & {"failed", "error"},
                    times.get(cheat.name),
                    times.get(of_honest[cheat.marker, cheat.measure]),
                )

    def _sized(self, asked: Asked) -> Asked:
        return replace(asked, marker=asked.marker.replace("Workload(64,", f"Workload({self._options.length},"))

    def _run(self, place: Path) -> tuple[int, dict[str, str], dict[str, float]]:
        """Run pytest there; return its status, the outcome of each test, and p50s by module."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=line", "--attn-output=run.jsonl"]
        command += ["--attn-isolated"] if self._options.isolated else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
        try:
            done = subprocess.run(
                [*command, *self._options.pytest], cwd=place, env=environment, timeout=SECONDS, capture_output=True, text=True
            )
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, output = -1, str(error.stdout)
        if self._options.verbose:
            print(output)
        times = {}
        if (records := place / "run.jsonl").exists():
            for line in records.read_text().splitlines():
                record = json.loads(line)
                if record.get("question") == "latency" and (p50 := (record.get("latency") or {}).get("p50")):
                    found = re.search(r"::test_(.+)_attention_measure", record["test"])
                    times |= {found[1]: p50} if found else {}
        return code, outcomes(output.splitlines()), times


def groups(cheats: Sequence[Cheat]) -> Iterator[list[Cheat]]:
    """Yield cheats that are asked in one process."""
    together = [cheat for cheat in cheats if not cheat.ends]
    yield from (together[start : start + GROUP] for start in range(0, len(together), GROUP))
    yield from ([cheat] for cheat in cheats if cheat.ends)


def main() -> None:
    """Ask all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--isolated", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pytest", nargs="*", default=[], help="further arguments of pytest")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    chosen = [
        c for c in CHEATS if (c.name in options.names or not options.names) and (not c.needs_cuda or options.device == "cuda")
    ]
    rows: list[Row] = []
    print("cheat | kind | stopped by | check | invariants | measure | next | verdict | share", flush=True)
    for group in groups(chosen):
        for row in Folder(options).ask(group):
            rows.append(row)
            print(row, flush=True)
            if options.out:
                options.out.write_text(json.dumps([{**asdict(one), "verdict": one.verdict} for one in rows], indent=1))
    for stopped in ("judge", "isolation", "sandbox", "nothing"):
        counted = Counter(row.verdict for row in rows if row.stopped == stopped)
        print(f"{stopped}: {counted['refused']} of {counted.total()} refused", dict(counted))


if __name__ == "__main__":
    main()
