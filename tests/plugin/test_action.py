"""The action for GitHub: its steps, run as a runner's shell does, with a gh that keeps what it is told."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ACTION = Path(__file__).parents[2] / "action.yml"
STEPS = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
TESTS = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention("smoke-full", device="cpu")
def test_mine(attn):
    attn.check(lambda q, k, v: FACTOR * sdpa(q, k, v))
"""
#: answers what comments there are, and keeps each request with its body
GH = """#!/bin/bash
case "$*" in
  *--jq*) cat comments ;;
  *) echo "$*" >> requests; echo 7 > comments; cp attention/comment.md "body-$(wc -l < requests)" ;;
esac
"""


@pytest.fixture
def runs_step(tmp_path):
    """Return what runs a step of the action in a folder with tests, and returns its exit status."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "comments").touch()
    gh = tmp_path / "bin" / "gh"
    gh.write_text(GH)
    gh.chmod(0o755)

    def run(step, **told):
        environment = {**os.environ, "PATH": f"{gh.parent}:{os.environ['PATH']}", "COMMENTS": "repos/me/mine/issues", **told}
        return subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=tmp_path, env=environment).returncode

    return run


def test_its_steps_judge_and_leave_one_comment(runs_step, tmp_path):
    judge, _, comment = STEPS
    assert comment["continue-on-error"], "a pull request of a fork may not comment, and has not failed"
    told = {"TESTS": "test_mine.py", "AGAINST": "", "OPTIONS": "--attn-diagnosis-timeout=0.1", "PYTHON": sys.executable}
    for factor, status in ((1, 0), (2, 1)):
        (tmp_path / "test_mine.py").write_text(TESTS.replace("FACTOR", str(factor)))
        assert runs_step(judge, **told) == status
        assert runs_step(comment, NUMBER="12") == 0
    first, second = (tmp_path / "requests").read_text().splitlines()
    assert first.startswith("api repos/me/mine/issues/12/comments -F body=@")
    assert second.startswith("api -X PATCH repos/me/mine/issues/comments/7 -F")
    assert "1 right" in (tmp_path / "body-1").read_text()
    assert "test_mine" in (tmp_path / "body-2").read_text()
    assert len((tmp_path / "attention" / "run.jsonl").read_text().splitlines()) == 2
    assert runs_step(judge, **{**told, "AGAINST": "nowhere"}) == 4
    assert runs_step(comment, NUMBER="12") == 0
    assert "pytest has written no summary" in (tmp_path / "body-3").read_text()


@pytest.mark.parametrize("summary", [None, "x" * 300_000])
def test_its_comment_is_written_without_a_summary_and_with_a_long_one(runs_step, tmp_path, summary):
    (tmp_path / "attention").mkdir()
    if summary:
        (tmp_path / "attention" / "run.md").write_text(summary)
    assert runs_step(STEPS[-1], NUMBER="12") == 0
    body = (tmp_path / "body-1").read_text()
    assert body.startswith("<!-- pytest-attn -->\n")
    assert 50 < len(body) < 65_536


def test_another_version_is_one_option_whatever_it_is_called(runs_step, tmp_path):
    python = tmp_path / "bin" / "python-that-says"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > said\n')
    python.chmod(0o755)
    assert runs_step(STEPS[0], TESTS="tests", AGAINST="a b; touch here", OPTIONS="-x -q", PYTHON=str(python)) == 0
    assert (tmp_path / "said").read_text().splitlines()[-3:] == ["--attn-against=a b; touch here", "-x", "-q"]
    assert not (tmp_path / "here").exists()


def test_it_fits_its_schema():
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", ACTION]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
