"""What a contributor finds: recipes that run, workflows that fit their schema, a version with its changes."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_attn import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = {
    ".github/workflows/*.yml": "vendor.github-workflows",
    "docs/examples/*/.github/workflows/*.yml": "vendor.github-workflows",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".github/dependabot.yml": "vendor.dependabot",
    ".readthedocs.yaml": "vendor.readthedocs",
    "CITATION.cff": "vendor.citation-file-format",
}


def test_every_recipe_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", CONTRIBUTING, re.M | re.S)
    assert len(blocks) == 4
    names = {"__name__": "contributing"}
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)


def test_what_the_recipes_name_is_there():
    for path in re.findall(r"`((?:pytest_attn|tests|docs|\.github)/[\w./-]+|[A-Z]+\.md|pyproject\.toml)`", CONTRIBUTING):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`([A-Z]+)` in `([\w/.]+)`", CONTRIBUTING):
        assert re.search(rf"^{name} = ", (ROOT / path).read_text(), re.M), f"{name} is not in {path}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([\w-]+)", CONTRIBUTING)) <= set(targets)


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_workflows_and_forms_fit_their_schema(pattern):
    schema = pytest.importorskip("check_jsonschema")
    files = sorted(map(str, ROOT.glob(pattern)))
    assert files
    with pytest.raises(SystemExit) as ended:
        schema.main(["--builtin-schema", SCHEMAS[pattern], *files])
    assert ended.value.code == 0


def test_actions_are_pinned_to_commits():
    examples = ROOT.glob("docs/examples/*/.github/workflows/*.yml")
    for path in [ROOT / "action.yml", *ROOT.glob(".github/workflows/*.yml"), *examples, *ROOT.glob("docs/howto/*.md")]:
        for action in re.findall(r"^ *(?:- )?uses: (?!OWNER/)(.+)", path.read_text(), re.MULTILINE):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), f"{path.name}: {action}"


def test_every_job_of_a_page_or_an_example_ends():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    files = [path for pattern in SCHEMAS if "workflows" in pattern for path in ROOT.glob(pattern)]
    written = re.findall(r"^```yaml\n(.*?)^```", pages, re.M | re.S) + [path.read_text() for path in files]
    jobs = [job for text in written for job in (yaml.safe_load(text) or {}).get("jobs", {}).items()]
    assert len(jobs) > 10
    assert [name for name, job in jobs if "timeout-minutes" not in job] == []


def test_a_release_goes_to_the_index_after_its_example_ran_and_the_test_index_took_it():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [jobs[name]["needs"] for name in ("first-verdict", "rehearse", "publish")] == [
        "build",
        ["build", "first-verdict"],
        "rehearse",
    ]
    assert jobs["first-verdict"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    for name in ("rehearse", "publish"):
        assert jobs[name]["permissions"] == {"id-token": "write"}
        assert jobs[name]["steps"][-1]["with"]["attestations"] is True


def test_a_release_is_not_built_while_a_page_says_that_there_is_none(tmp_path):
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    (step,) = (step for step in steps if "not on PyPI" in step.get("run", ""))
    (tmp_path / "docs").mkdir()
    for said, code in (("pip install pytest-attn", 0), ("pytest-attn is not on PyPI yet.", 1)):
        for name in ("README.md", "docs/page"):
            (tmp_path / name).write_text(f"# Install\n\n{said}\n")
        assert subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, capture_output=True, check=False).returncode == code


def test_the_matrix_of_several_hosts_fits_its_schema_and_runs_every_part():
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    matrix = ROOT / "docs/examples/parts.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", matrix]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    job = yaml.safe_load(matrix.read_text())["jobs"]["part"]
    assert job["strategy"]["matrix"]["part"] == [*range(1, 1 + len(job["strategy"]["matrix"]["part"]))]
    assert job["strategy"]["fail-fast"] is False
    assert job["env"] == {"PART": "${{ matrix.part }}", "PARTS": "${{ strategy.job-total }}"}


def test_the_matrix_has_every_python_and_the_oldest_torch():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]["include"]
    listed = [one.rpartition(" :: ")[2] for one in PROJECT["classifiers"]]
    assert [one["python"] for one in matrix] == [one for one in listed if re.fullmatch(r"3\.\d+", one)]
    oldest = PROJECT["optional-dependencies"]["torch"][0].partition(">=")[2]
    assert {f"torch=={oldest}.*", "torch"} <= {one["torch"] for one in matrix}


def test_what_a_workflow_names_of_the_repository_is_there():
    for path in ROOT.glob(".github/workflows/*.yml"):
        named = re.findall(r"(?<![\w./-])(?:\.ci|docs|tests)/[\w./-]+", path.read_text())
        assert [one for one in named if not (ROOT / one).exists()] == [], path.name


def test_the_version_has_its_changes():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", headings[1])
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
