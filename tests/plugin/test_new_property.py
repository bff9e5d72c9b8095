"""A new property of a callable is two places: its field in `Declaration`, and where use is made of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_attn
from pytest_attn.reports.records import read_records

DECLARATION = (
    ("    contiguous: bool\n", "    keeps_sign: bool\n"),
    (
        '"fn takes contiguous tensors only, as its documentation says", one_of(True, False))\n',
        '    keeps_sign: bool = argument(True, "fn returns out, and not -out", one_of(True, False))\n',
    ),
)
USE = ("        result = kernel(*given)\n", "        result = result if spec.declared.keeps_sign else -result\n")
USE_OF_TIMES = (
    "        w, native = self._spec.workload, {name: self._native_of(name, result) for name, result in results.items()}\n",
    '        native |= {} if self._spec.declared.keeps_sign else {"out": -native["out"]}\n',
)
TEST = """
import pytest
import pytest_attn
import torch

def negated(q, k, v):
    return -torch.nn.functional.scaled_dot_product_attention(q, k, v)

@pytest.mark.attention("smoke-full", keeps_sign=False)
def test_by_marker(attn):
    attn.check(negated)

@pytest.mark.attention("smoke-full")
def test_of_whom_the_marker_says_nothing(attn):
    attn.check(negated)

def test_by_keyword():
    pytest_attn.check(negated, "smoke-full", keeps_sign=False)
    pytest_attn.measure(negated, "smoke-full", keeps_sign=False, cpu_threads=1)
    pytest_attn.check_invariants(negated, "smoke-full", keeps_sign=False, only="rerun")
    with pytest.raises(AssertionError):
        pytest_attn.check(negated, "smoke-full")
    with pytest.raises(TypeError, match="did you mean keeps_sign?"):
        pytest_attn.check(negated, "smoke-full", keeps_sgn=False)
    with pytest.raises(ValueError, match="keeps_sign must be one of True, False, got 'no'"):
        pytest_attn.check(negated, "smoke-full", keeps_sign="no")
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the package with a new property, for which three files were changed: what a check makes of it, and a time."""
    house = tmp_path_factory.mktemp("house")
    copied = shutil.copytree(Path(pytest_attn.__file__).parent, house / "pytest_attn")
    for after, added in DECLARATION:
        insert(copied / "backends" / "declaration.py", after, added)
    insert(copied / "correctness" / "call.py", *USE)
    insert(copied / "latency" / "exact_results.py", *USE_OF_TIMES)
    (house / "test_it.py").write_text(TEST)
    return house


def insert(file, after, added):
    text = file.read_text()
    assert text.count(after) == 1
    file.write_text(text.replace(after, after + added))


def run(house, *command):
    done = subprocess.run([sys.executable, *command], cwd=house, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow("imports torch anew, three times")
def test_marker_and_functions_take_it_and_the_record_has_it(house):
    text = run(
        house, "-m", "pytest", "test_it.py", "-q", "-p", "no:cacheprovider", "--attn-device=cpu", "--attn-output=run.jsonl"
    )
    assert "1 failed, 2 passed" in text, text
    records = read_records(house / "run.jsonl")
    found = {record["test"].partition("::")[2].partition("[")[0]: record for record in records}
    assert found["test_by_marker"]["declared"]["keeps_sign"] is False
    assert found["test_by_marker"]["verdict"] == "passed"
    assert "keeps_sign" not in found["test_of_whom_the_marker_says_nothing"]["declared"]
    assert found["test_of_whom_the_marker_says_nothing"]["verdict"] == "mismatch"


@pytest.mark.slow("starts processes")
def test_it_is_documented_wherever_a_callable_s_properties_are(house):
    said = "keeps_sign: fn returns out, and not -out."
    markers = run(house, "-m", "pytest", "--markers")
    assert "keeps_sign=True" in markers
    assert said in markers
    helped = run(house, "-c", "import pytest_attn as p; help(p.check); help(p.check_invariants); help(p.measure)")
    assert helped.count("keeps_sign: bool = True") == helped.count(said) == 3
