"""Paths, ids and reasons that are no UTF-8, and locales that are not: every test is judged, every output is written."""

import os
import subprocess
import sys
from functools import partial

import pytest

from pytest_attn.reports.records import read_records
from pytest_attn.reports.runs import read_runs

TEST = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa
from pytest_attn import Workload

@pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")
@pytest.mark.parametrize("wrong", [False, True], ids=["r\\u00e4cht", "\\udcff"])
def test_kernel(attn, wrong):
    attn.check((lambda q, k, v: v * 1.5) if wrong else sdpa, name="k\\u00e4rnel\\udcff" if wrong else None)

@pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")
def test_raises(attn):
    def kernel(q, k, v):
        raise ValueError("\\udcff \\u00e4")
    attn.check(kernel)

@pytest.mark.attention(Workload(32, heads=2, head_dim=32), device="cpu")
def test_declines(attn):
    def kernel(q, k, v):
        raise NotImplementedError("not \\udcff")
    attn.check(kernel)
"""
SLOW = pytest.mark.slow("starts processes")
OUTPUTS = ("run.jsonl", "run.md", "run.support.md")
LOCALES = {
    "utf-8": {"LC_ALL": "C.UTF-8"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "latin-1": {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize(
    ("locale", "name"),
    [
        ("C", b"test_\xff.py"),
        pytest.param("utf-8", b"test_\xff.py", marks=SLOW),
        pytest.param("C", b"test_\xc3\xa4.py", marks=SLOW),
        pytest.param("latin-1", b"test_\xff.py", marks=SLOW),
    ],
)
def test_a_run_ends_as_its_tests_do(tmp_path, locale, name):
    folder = os.path.join(os.fsencode(tmp_path), b"f\xc3\xb6lder\xfe")
    os.mkdir(folder)
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(TEST)
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "LC_", "LANG"))}
    run = partial(subprocess.run, cwd=folder, capture_output=True, env={**keep, **LOCALES[locale]})
    written = [f"--attn-output={name}" for name in OUTPUTS]
    quickly = "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--attn-diagnosis-timeout=0.01"
    done = run([sys.executable, "-m", "pytest", *quickly, *written, "--attn-save-failures=saved"])
    said = done.stdout.decode(errors="replace")
    assert b"INTERNALERROR" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr.decode(errors="replace")
    assert done.returncode == 1, said
    assert "2 failed, 1 passed, 1 skipped" in said
    there = {os.fsdecode(one) for one in os.listdir(folder)}
    assert {*OUTPUTS, "saved"} <= there
    path = os.path.join(os.fsdecode(folder), "run.jsonl")
    assert [one["verdict"] for one in read_records(path)] == ["passed", "mismatch", "raised", "skipped"]
    (closed,) = read_runs(path)
    assert (closed.damaged, closed.facts["exit"], len(closed.facts["ran"])) == ([], 1, 4)
    told = run([sys.executable, "-m", "pytest_attn", "summary", "run.jsonl"])
    assert (told.returncode, told.stderr) == (0, b"")


def test_an_option_that_is_no_utf8_is_told_as_pytest_tells_it(pytester):
    pytester.makepyfile(TEST)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", os.fsdecode(b"wr\xff("))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in result.stderr.str()
