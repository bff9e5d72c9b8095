"""Runs that are killed: each file is the old or the new one, what was recorded is there, and nothing is left behind."""

import os
import random
import shutil
import signal
import time
from xml.etree import ElementTree

import attempts
import pytest
from fakes.timed import CLOCK, FORKED, KERNEL

import pytest_attn
from pytest_attn.latency.baseline_file import read
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.records import read_records
from pytest_attn.reports.runs import read_runs

KILLS = {"SIGKILL": (9,), "SIGTERM": (15,), "SIGINT": (2,), "SIGINT twice": (2, 2)}
#: names each test of a run that has ended, once all plugins have been told
NOTES = """
import os
import pytest
@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
        with open("ended", "a") as file: file.write(report.nodeid + "\\n")
"""
KERNELS = """
import pytest
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")
@pytest.mark.parametrize("factor", [1, 1.01, 1.0])
def test_kernel(attn, factor):
    attn.check(lambda q, k, v: sdpa(q, k, v) * factor)
"""
RECORDED = ("--attn-output=run.jsonl",)
#: what each run is asked to write, its conftest and tests, and at how many moments each signal meets it
RUNS = {
    "while it writes .jsonl, .md, .xml, failures": (
        (*RECORDED, "--attn-output=run.md", "--junitxml=run.xml", "--attn-save-failures=saved"),
        {"conftest.py": NOTES, "test_it.py": KERNELS},
        50,
    ),
    "while it draws .html": (("--attn-output=run.html", *RECORDED), {"conftest.py": NOTES, "test_it.py": KERNELS}, 13),
    "while two workers judge": (
        ("-n", "2", *RECORDED, "--attn-output=run.md"),
        {"conftest.py": NOTES, "test_it.py": KERNELS},
        13,
    ),
    "while it records": (
        ("--attn-update-baselines=again", "-o", "attn_fresh=forked", *RECORDED),
        {"conftest.py": NOTES + CLOCK + FORKED, "test_it.py": KERNEL},
        13,
    ),
}
SLOW = pytest.mark.slow("imports torch in other processes, or goes by the clock")
MOMENTS = [
    pytest.param(name, kill, seed, marks=[] if name == next(iter(RUNS)) and seed % 2 else SLOW)
    for name, (*_, moments) in RUNS.items()
    for kill in KILLS
    for seed in range(moments)
]


@pytest.fixture(scope="module")
def finished(runs):
    """Return the folder of a run that nobody has killed, how long it took, and how often it changed a file."""
    made = {}
    with attempts.own_folder() as base:

        def of(name):
            if name not in made:
                folder = base / f"{len(made)}"
                folder.mkdir()
                options, files, _ = RUNS[name]
                for file, text in files.items():
                    (folder / file).write_text(text)
                began = time.monotonic()
                runs.status(runs.start(folder, *options))
                took = time.monotonic() - began
                made[name] = folder, took, int((folder / "changes").read_text())
            return made[name]

        yield of


def broken(folder, old):
    """Yield what of the files of a run is neither that of an earlier one nor whole."""
    records = read_records(folder / "run.jsonl") if (folder / "run.jsonl").exists() else []
    [*read_runs(str(folder / "run.jsonl"))] if records else None
    ended = (folder / "ended").read_text().split("\n")[:-1] if (folder / "ended").exists() else []
    if unrecorded := set(ended) - {one["test"] for one in records}:
        yield f"no record of {unrecorded}"
    are_new = {
        "run.md": lambda text: text == markdown_summary(records),
        "run.html": lambda text: text.endswith("</html>\n"),
        "run.xml": ElementTree.fromstring,
    }
    for name, is_new in are_new.items():
        if (old / name).exists() and (folder / name).read_text() != (old / name).read_text():
            try:
                is_whole = is_new((folder / name).read_text()) is not False
            except (OSError, ElementTree.ParseError):
                is_whole = False
            if not is_whole:
                yield f"{name} is neither the old nor the new one"
    for path in (folder / "saved").glob("[!.]*"):
        pytest_attn.load_failure(path)
    for path in (folder / "baselines").glob("*.json"):
        (case,) = read(path).cases.values()
        told = (folder / "output").read_text()
        is_said = f"1 of 1 cases recorded in {path}" in told
        if "recorded: interrupted" in told and len(case.history) != 1 + is_said:
            yield f"{path.name} has {len(case.history)} recordings, which is not what was said"
    if (old / "baselines").exists() and not [*(folder / "baselines").glob("*.json")]:
        yield "no baselines"


@pytest.mark.one_in(33)
@pytest.mark.parametrize(("name", "kill", "seed"), MOMENTS)
def test_killed(runs, finished, name, kill, seed, withstood):
    old, took, changes = finished(name)
    options, *_ = RUNS[name]
    draw = random.Random(f"{name} {kill} {seed}")
    with attempts.own_folder() as base:
        folder = base / "run"
        shutil.copytree(old, folder, ignore=shutil.ignore_patterns("tmp", "output", "ended", "changes"))
        numbers = KILLS[kill]
        if seed % 2:  # before a change of a file
            at = sorted(draw.sample(range(1, changes + 1), len(numbers)))
            run = runs.start(folder, *options, signals=[*zip(numbers, at, strict=True)])
        else:
            run = runs.start(folder, *options, signals=[(0, 0)])
            for number in numbers:
                time.sleep(draw.uniform(0.05, 1) * took / len(numbers))
                (os.killpg if number == signal.SIGINT else os.kill)(run, number)
        status = runs.status(run)
        left = attempts.left_by_processes(folder)
        said = (folder / "output").read_text()
        is_over = " passed in " in said and "KeyboardInterrupt" not in said  # before the signal came
        assert [status != 0 or is_over, left, [*broken(folder, old)]] == [True, [], []], said
        if attempts.left_in(folder):
            runs.status(runs.start(folder, *options))  # which clears what could not be
        assert attempts.left_in(folder) == []
    withstood(f"killed {name}", kill, "drawn moments", "files whole, old or new")
