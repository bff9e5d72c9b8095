"""Draw the pictures of docs/pictures/ from real runs: `python docs/_ext/pictures.py [NAME ...]`, without names all of them.

terminal-failure.svg and terminal-backends.svg show what pytest prints, in a terminal's colors, for tests of the README and of
this file. report.svg is the top of the page that --attn-output=report.html writes, as Chromium draws it. gate.svg shows every
committed recording of some cases of baselines/nvidia-h200.json, as the repository's history has them. The groups `docs` and
`test` must be installed, and for report.svg Chromium on PATH.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 118
BASELINES = "baselines/nvidia-h200.json"
#: cases of which every recording is drawn, and what the gate fails on a GPU by default
CASES = ("flux-L512 | sdpa_flash | forward | cold", "flux-L512 | sdpa_cudnn | forward | cold")
LIMIT = 0.02
LEFT, TOP, WIDTH, HEIGHT, GAP = 70, 64, 640, 150, 74

BACKENDS = """
import pytest


@pytest.mark.attention("smoke-full", "smoke-causal-gqa", "smoke-paged", backward=True)
def test_every_backend(attn, attn_backend):
    attn.check(attn_backend)
"""

REPORT = """
import pytest
import torch
from pytest_attn import Workload

WORKLOADS = ("smoke-full", "smoke-causal-gqa", "smoke-window", Workload(64, 192, heads=4, mask="causal-bottom-right"))


def mine(q, k, v):  # wrong: aligned to the first key, not to the last
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.attention(*WORKLOADS, backward=True)
def test_backends(attn, attn_backend):
    attn.check(attn_backend)


@pytest.mark.attention(WORKLOADS[-1], backward=True)
def test_mine(attn):
    attn.check(mine)
"""
#: what is left out of the picture: scripts and their data, and everything below the first chart
SHOWN = """(() => {
  const after = [...document.querySelectorAll("#errors ~ *"), ...document.querySelectorAll("script, noscript, footer, .skip")];
  after.forEach(element => element.remove());
  document.querySelectorAll("style").forEach(style => document.body.prepend(style.cloneNode(true)));
  const height = Math.ceil(document.getElementById("errors").getBoundingClientRect().bottom + 60);
  return [height, new XMLSerializer().serializeToString(document.body)];
})()"""
PAGE_WIDTH = 1000


def first_test() -> str:
    """Return the first test of the README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]


def printed(source: str, *options: str) -> str:
    """Run pytest on one file in an empty folder and return what it prints, colors included."""
    with tempfile.TemporaryDirectory() as folder:
        text = run(Path(folder), source, *options)
    of_the_machine = re.compile(r"platform |rootdir: |plugins: |benchmark: |hypothesis profile |cachedir: |attn = <")
    return "\n".join(line for line in text.splitlines() if not of_the_machine.match(line))


def run(folder: Path, source: str, *options: str) -> str:
    """Run pytest on one file in a folder and return all that it prints."""
    (folder / "test_first.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "test_first.py", "--color=yes", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def report() -> str:
    """Return the top of a run's report as an SVG that holds the page's own elements and style."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fakes.browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "report.html"
        run(page.parent, REPORT, "--attn-device=cpu", "--attn-backends=math,eager,sdpa", f"--attn-output={page.name}")
        height, body = browser.open(page, width=PAGE_WIDTH, height=1400)(SHOWN)
    size = f'width="{PAGE_WIDTH}" height="{height}"'
    # data-theme: the picture is light on every page
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {PAGE_WIDTH} {height}" data-theme="light" role="img">'
        f'<title>pytest-attn report</title><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<foreignObject width="100%" height="100%">{body}</foreignObject></svg>\n'
    )


def terminal(text: str, title: str) -> str:
    """Return text with a terminal's colors as an SVG that loads no font from elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=False)
    drawn = console.export_svg(title=title, unique_id=re.sub(r"\W+", "-", title))
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


class Recording(NamedTuple):
    """One recording of one case, as it was committed."""

    day: date
    p50_us: list[float]
    protocol: int


def recordings(case: str) -> list[Recording]:
    """Return every different recording of a case in the history of the baselines, the oldest first."""
    found: list[Recording] = []
    for line in _git("log", "--reverse", "--format=%H", "--", BASELINES).split():
        cases: dict[str, Any] = json.loads(_git("show", f"{line}:{BASELINES}"))["cases"]
        entry = cases.get(case)
        if entry and "p50_ns" in entry:
            times = [nanoseconds / 1e3 for nanoseconds in entry["p50_ns"]]
            if not found or found[-1].p50_us != times:
                found.append(Recording(date.fromisoformat(entry["date"]), times, entry.get("protocol", 1)))
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def gate() -> str:
    """Return the recordings of the cases as an SVG: ten processes each, their median, and what would fail against it."""
    height = TOP + len(CASES) * (HEIGHT + GAP)
    drawn = [line for number, case in enumerate(CASES) for line in _panel(case, TOP + number * (HEIGHT + GAP))]
    title = f"Committed recordings on an NVIDIA H200: ten new processes each, and the gate's limit of +{LIMIT:.0%}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 30} {height}" role="img"',
            f' font-family="system-ui, sans-serif" font-size="13" fill="#1b1f26"><title>{escape(title)}</title>',
            f'<rect width="100%" height="100%" fill="#ffffff"/><text x="16" y="28" font-size="15">{escape(title)}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(case: str, top: int) -> Iterator[str]:
    series = recordings(case)
    values = [value for recording in series for value in recording.p50_us]
    low, high = min(values) * 0.99, max(median(one.p50_us) for one in series) * (1 + LIMIT) * 1.005

    def y(value: float) -> float:
        return top + HEIGHT * (high - value) / (high - low)

    yield f'<text x="{LEFT}" y="{top - 8}">{escape(case)}, p50 in us</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#8a93a0"/>'
    step = WIDTH / len(series)
    for number, one in enumerate(series):
        x, middle = LEFT + step * number, median(one.p50_us)
        limit = y(middle * (1 + LIMIT))
        yield f'<rect x="{x:.1f}" y="{top}" width="{step:.1f}" height="{limit - top:.1f}" fill="#c62828" fill-opacity="0.12"/>'
        yield f'<path d="M{x:.1f} {limit:.1f}h{step:.1f}" stroke="#c62828" stroke-dasharray="4 3"/>'
        yield f'<path d="M{x + 8:.1f} {y(middle):.1f}h{step - 16:.1f}" stroke="#1565c0" stroke-width="2"/>'
        for place, value in enumerate(one.p50_us):
            across = x + step * (0.2 + 0.6 * place / max(1, len(one.p50_us) - 1))
            yield f'<circle cx="{across:.1f}" cy="{y(value):.1f}" r="2.5" fill="#1565c0" fill-opacity="0.6"/>'
        at = f'<text x="{x + step / 2:.1f}" text-anchor="middle"'
        yield f'{at} y="{top + HEIGHT + 18}">{one.day:%m-%d}, protocol {one.protocol}</text>'
        yield f'{at} y="{top + HEIGHT + 36}" fill="#1565c0">{middle:.1f} us</text>'


def main(names: list[str]) -> None:
    """Write the pictures of these names, or all."""
    PICTURES.mkdir(exist_ok=True)
    terminals = {
        "failure": (first_test(), "pytest test_first.py", ["--attn-device=cpu"]),
        "backends": (BACKENDS, "pytest -v -rs", ["-v", "-rs", "--attn-device=cpu", "--attn-backends=math,eager,sdpa"]),
    }
    drawn: dict[str, Callable[[], str]] = {"gate": gate, "report": report}
    for name, (source, title, options) in terminals.items():
        drawn[f"terminal-{name}"] = partial(_terminal_of, source, title, options)
    for name in names or drawn:
        (PICTURES / f"{name}.svg").write_text(drawn[name]())


def _terminal_of(source: str, title: str, options: list[str]) -> str:
    return terminal(printed(source, *options), title)


if __name__ == "__main__":
    main(sys.argv[1:])
