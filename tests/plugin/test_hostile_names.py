"""Names that are none: each becomes one printable line, and no output runs them."""

import ast
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import markdown_it
import pytest
from hostile import NAMES, unsafe

from pytest_attn.reports.records import read_records

KERNELS = """
import pytest
import torch
from pytest_attn import Backend, Capabilities, Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

NAMES = {names!r}
W = Workload(32, heads=2, head_dim=32)

def named(name):
    def kernel(q, k, v):
        return v.abs() * 1.5
    kernel.__name__ = kernel.__qualname__ = name
    return kernel

@pytest.mark.attention(W, device="cpu")
@pytest.mark.parametrize("at", range(len(NAMES)))
class TestNames:
    def test_function(self, attn, at):
        attn.check(named(NAMES[at]))

    def test_given(self, attn, at):
        attn.check(named("f"), name=NAMES[at])

    def test_invariants(self, attn, at):
        attn.check_invariants(named(NAMES[at]), only="algebra")

    def test_backend(self, attn, at):
        class Mine(Backend):
            name, library, capabilities = NAMES[at], "torch", Capabilities()
            def prepare(self, inputs, backward=False):
                return named("f")
        attn.check(Mine())

    def test_error(self, attn, at):
        def kernel(q, k, v):
            raise type("E", (ValueError,), {{}})(NAMES[at])
        attn.check(kernel)

@pytest.mark.attention(*(Workload(32, heads=2, head_dim=32, name=name) for name in NAMES), device="cpu")
def test_workload(attn):
    attn.check(named("f"))

@pytest.mark.attention_model(device="cpu", backward=False)
@pytest.mark.parametrize("at", range(len(NAMES)))
def test_model(attn_model, at):
    class_name = NAMES[at].replace("\\0", "").encode("utf-8", "replace").decode()
    inner = type(class_name, (torch.nn.Module,), {{"forward": lambda self, x: sdpa(x, x, x)}})
    model = torch.nn.Sequential()
    model.add_module(NAMES[at].replace(".", ""), inner())
    attn_model.check(model, lambda: model(torch.randn(1, 2, 16, 32)), lambda q, k, v, workload: v * 1.5)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the folder of a run with hostile names of every kind, which has written every output."""
    folder = tmp_path_factory.mktemp("hostile")
    names = [*NAMES.values()]
    (folder / "test_names.py").write_text(KERNELS.format(names=names))
    more = ["run.jsonl", "run.md", "run.support.md"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=no", "--junitxml=junit.xml", "--color=no"]
        + [f"--attn-output={one}" for one in more]
        + ["--attn-save-failures=saved", "--attn-diagnosis-timeout=0.01"],
        cwd=folder,
        capture_output=True,
        env={**os.environ, "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "step.md", "COLUMNS": "100"},
    )
    (folder / "terminal.txt").write_bytes(done.stdout + done.stderr)
    return folder


def test_each_kind_of_name_has_a_record_of_one_printable_line(outputs):
    records = read_records(outputs / "run.jsonl")
    assert len(records) >= 6 * len(NAMES)
    for record in records:
        for name in ("test", "workload", "name", "subject", "model", "reason"):
            assert "\n" not in record[name]
            assert unsafe(record[name], 1_100) == [], name


def test_a_terminal_and_a_log_get_no_control_characters_and_no_commands(outputs):
    text = (outputs / "terminal.txt").read_text()
    assert "INTERNALERROR" not in text
    own = text.partition("short test summary info")[0]  # where pytest says what a kernel's own exception says
    assert unsafe(own, longest=2_000) == []
    summary = "\n".join(line for line in text.splitlines() if line.startswith("FAILED") and "::test_error" not in line)
    assert unsafe(summary) == []


@pytest.mark.parametrize("output", ["run.md", "step.md", "run.support.md"])
def test_markdown_has_printable_lines(outputs, output):
    text = (outputs / output).read_text()
    assert unsafe(text, longest=2_000) == []
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    html = [one.content for token in tokens for one in (token, *(token.children or ())) if one.type.startswith("html")]
    assert all(re.fullmatch(r"\s*</?(details|summary)>.*", one) for one in html)
    assert text.count("<details>") <= 1


def test_junit_is_well_formed(outputs):
    root = ET.parse(outputs / "junit.xml").getroot()
    assert int(root[0].get("tests")) >= 6 * len(NAMES)


def test_every_saved_script_is_no_code_of_a_name(outputs):
    folders = [*(outputs / "saved").iterdir()]
    assert len(folders) == 5 * len(NAMES) - 1  # a name that is given has no |
    for folder in folders:
        text = (folder / "repro.py").read_text()
        assert unsafe(text) == []
        tree = ast.parse(text)
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert calls <= {
            *("Path", "Path(__file__).resolve", "sys.path.insert", "str", "(HERE / '../..').resolve", "print", "sys.exit"),
            *("pytest_attn.load_failure(HERE).check", "pytest_attn.load_failure"),
        }
        json.loads((folder / "environment.json").read_text())


def test_a_saved_script_runs_and_prints_its_name(outputs):
    written = next(one for one in (outputs / "saved").iterdir() if "os.mkdir" in (one / "repro.py").read_text())
    done = subprocess.run([sys.executable, str(written / "repro.py")], cwd=outputs, capture_output=True, text=True)
    assert done.returncode == 2
    assert "first\\nimport os" in done.stderr
    assert not [*outputs.rglob("pwned")]
