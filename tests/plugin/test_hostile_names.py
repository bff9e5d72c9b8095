"""Names that are none: each becomes one printable line, and no output runs them."""

import ast
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import markdown_it
from hostile import NAMES, unsafe
from left_out import one_in

from pytest_attn.reports.records import read_records

ASKED = one_in(2, NAMES.values())
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


def test_no_output_of_a_run_has_what_a_name_would_run_or_hide(pytester, monkeypatch):
    for name, value in {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "step.md", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(test_names=KERNELS.format(names=ASKED))
    written = [f"--attn-output={one}" for one in ("run.jsonl", "run.md", "run.support.md")]
    result = pytester.runpytest_inprocess(
        *("-v", "-p", "no:cacheprovider", "--tb=no", "--junitxml=junit.xml", "--color=no", "--attn-save-failures=saved"),
        *("--attn-diagnosis-timeout=0.01", *written),
    )
    require_records_of_one_printable_line(read_records(pytester.path / "run.jsonl"))
    require_no_control_characters_and_no_commands(f"{result.stdout}\n{result.stderr}")
    for output in ("run.md", "step.md", "run.support.md"):
        require_markdown_of_printable_lines((pytester.path / output).read_text())
    junit = ET.parse(pytester.path / "junit.xml").getroot()
    assert int(junit[0].get("tests")) >= 6 * len(ASKED)
    require_saved_scripts_without_code_of_a_name([*(pytester.path / "saved").iterdir()])
    assert not [*pytester.path.rglob("pwned")]


def require_records_of_one_printable_line(records):
    assert len(records) >= 6 * len(ASKED)
    for record in records:
        for name in ("test", "workload", "name", "subject", "model", "reason"):
            assert "\n" not in record[name]
            assert unsafe(record[name], 1_100) == [], name


def require_no_control_characters_and_no_commands(text):
    assert "INTERNALERROR" not in text
    own = text.partition("short test summary info")[0]  # where pytest says what a kernel's own exception says
    assert unsafe(own, longest=2_000) == []
    summary = "\n".join(line for line in text.splitlines() if line.startswith("FAILED") and "::test_error" not in line)
    assert unsafe(summary) == []


def require_markdown_of_printable_lines(text):
    assert unsafe(text, longest=2_000) == []
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    html = [one.content for token in tokens for one in (token, *(token.children or ())) if one.type.startswith("html")]
    assert all(re.fullmatch(r"\s*</?(details|summary)>.*", one) for one in html)
    assert text.count("<details>") <= 1


def require_saved_scripts_without_code_of_a_name(folders):
    assert len(folders) == 5 * len(ASKED) - 1  # a name that is given has no |
    for folder in folders:
        text = (folder / "repro.py").read_text()
        assert unsafe(text) == []
        tree = ast.parse(text)
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert calls <= {
            *("Path", "Path(__file__).resolve", "sys.path.insert", "str", "(HERE / '../..').resolve", "print", "sys.exit"),
            *("pytest_attn.load_failure(HERE).check", "pytest_attn.load_failure", "isinstance", "traceback.print_exc"),
        }
        json.loads((folder / "environment.json").read_text())
    written = next(one for one in folders if "os.mkdir" in (one / "repro.py").read_text())
    done = subprocess.run([sys.executable, str(written / "repro.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "first\\nimport os" in done.stderr
