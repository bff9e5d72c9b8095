"""Which cheats each judgment refuses, in its own process and where another one computes, and at which time the others pass.

    python benchmarks/cheats.py [NAME ...] [--isolated] [--device cpu|cuda] [--length 256] [--out FILE.json]

The kernels of tests/cheats/table.py, with --isolated those of own_process.py as well, are asked by `attn.check`,
`attn.check_invariants` and `attn.measure` in real runs of pytest, one after the other; those that end their process or leave
it changed in a process each, followed by a kernel that is wrong and says nothing, which must fail. Prints a line for each,
with its p50 as a share of torch's attention in the same run, then how many are refused of those that a judge can stop.
--isolated: the tests name kernels, and run with --attn-isolated.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cheats.own_process import OWN_PROCESS  # noqa: E402
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


class Asking:
    """Asks kernels in runs of pytest, each in a folder of its own. honest: p50s of torch's attention, by how it was asked."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._honest: dict[tuple[str, str], float | None] = {}

    def ask(self, cheats: Sequence[Cheat], alone: bool) -> Iterator[Row]:
        """Ask kernels in one process; yield what became of each. alone: it is one that may leave its process changed."""
        for how in dict.fromkeys((cheat.marker, cheat.measure) for cheat in cheats):
            if how not in self._honest:
                self._honest[how] = self._of_honest(*how)
        asked = [cheat.asked_by(*JUDGMENTS) for cheat in cheats]
        files = {cheat.name: cheat.text for cheat in cheats}
        if alone:
            asked.append(Asked("following", judgments=("check",)))
            files["following"] = _WRONG
        code, ends, times = self._run(asked, files, again=any(cheat.again for cheat in cheats))
        for cheat in cheats:
            own = {one: ends[name] for one in JUDGMENTS if (name := f"test_{cheat.name}_attention_{one}") in ends}
            is_green = code == 0 if alone else not {"failed", "error"} & {*own.values()}
            own |= {"next": ends["test_following_attention_check"]} if "test_following_attention_check" in ends else {}
            honest = self._honest[cheat.marker, cheat.measure]
            yield Row(cheat.name, cheat.kind, cheat.stopped, own, is_green, times.get(cheat.name), honest)

    def _of_honest(self, marker: str, measure: str) -> float | None:
        asked = Asked("honest", marker=marker, judgments=("measure",), measure=measure)
        return self._run([asked], {"honest": _HONEST})[2].get("honest")

    def _sized(self, asked: Asked) -> Asked:
        return replace(asked, marker=asked.marker.replace("Workload(64,", f"Workload({self._options.length},"))

    def _run(
        self, asked: Sequence[Asked], files: Mapping[str, str], again: bool = False
    ) -> tuple[int, dict[str, str], dict[str, float]]:
        """Run pytest, twice if again; return the last status, how each test ended, and p50s by module."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            source = source_of([*map(self._sized, asked)], self._options.isolated, self._options.device)
            for name, text in {**files, "test_kernels": source}.items():
                (place / f"{name}.py").write_text(text)
            found = self._run_in(place)
            return self._run_in(place) if again else found

    def _run_in(self, place: Path) -> tuple[int, dict[str, str], dict[str, float]]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-v",
            "--tb=line",
            "--attn-output=run.jsonl",
            "--attn-declines=fail",
        ]
        command += ["--attn-isolated"] if self._options.isolated else []
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "300"}
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
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pytest", nargs="*", default=[], help="further arguments of pytest")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    asked = [*CHEATS, *(OWN_PROCESS if options.isolated else ())]
    chosen = [
        c for c in asked if (c.name in options.names or not options.names) and (not c.needs_cuda or options.device == "cuda")
    ]
    rows: list[Row] = []
    print("cheat | kind | stopped by | check | invariants | measure | next | verdict | share", flush=True)
    asking = Asking(options)
    for group in groups(chosen):
        for row in asking.ask(group, alone=group[0].ends):
            rows.append(row)
            print(row, flush=True)
            if options.out:
                options.out.write_text(json.dumps([{**asdict(one), "verdict": one.verdict} for one in rows], indent=1))
    for stopped in ("judge", "isolation", "sandbox", "nothing"):
        counted = Counter(row.verdict for row in rows if row.stopped == stopped)
        print(f"{stopped}: {counted['refused']} of {counted.total()} refused", dict(counted))


if __name__ == "__main__":
    main()
