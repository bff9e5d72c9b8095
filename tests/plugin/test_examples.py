"""The folders of docs/examples/, each copied whole as a stranger does, and the steps of its workflow typed in it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from fakes import planted, put
from fakes.timed import CLOCK, TURNS, committed

ROOT = Path(__file__).parents[2]
#: of each example, how many tests pass and how many are skipped on a CPU: declined, or not timed
EXAMPLES = {"compare_revisions": (0, 2), "model": (3, 0), "torch_extension": (3, 0), "triton_kernel": (2, 2)}
#: of each example for another project: the fake of its library, and how many cases pass
FOR_OTHERS = {"flash_attention_cute": ("flash4", 3), "flashinfer": ("flashinfer", 2)}
#: faults of these fakes, each with the case that finds it, as -k names it
FAULTS = [
    ("flash_attention_cute", '"softcap": softcap', '"softcap": 0.0', "softcap"),
    ("flash_attention_cute", '"scale": softmax_scale', '"scale": None', "scale"),
    ("flash_attention_cute", '"window": window_size', '"window": (window_size[0] + 1, window_size[1])', "window"),
    ("flash_attention_cute", '"sink": learnable_sink', '"sink": None', "sinks"),
    ("flash_attention_cute", "attention(*tensors, ", "attention(tensors[0], tensors[1].detach(), tensors[2], ", "softcap"),
    ("flash_attention_cute", "out, lse if return_lse", "out, lse / 0.6931 if return_lse", "softcap"),
    ("flash_attention_cute", "packed(q, k, v, cu_seqlens_q, ", "packed(q, k.flip(1), v.flip(1), cu_seqlens_q, ", "packed"),
    ("flash_attention_cute", '"bottom-right" if causal', '"top-left" if causal', "packed"),
    ("flashinfer", '"bottom-right" if causal', '"top-left" if causal', "causal"),
    ("flashinfer", "sm_scale is None", "sm_scale", "causal"),
    ("flashinfer", "lse[0].T / math.log(2)", "lse[0].T", "causal"),
    ("flashinfer", "(window_left, -1),\n            ", "(window_left - 1, -1),\n            ", "window"),
    ("flashinfer", '"softcap": soft_cap or 0.0', '"softcap": 0.0', "softcap"),
    ("flashinfer", "v[starts[b] : starts[b + 1]]", "v[starts[b] : starts[b + 1]].flip(1)", "causal"),
]


def steps(example, workflow, job):
    """Return what follows `pytest` in each step of a job."""
    text = (ROOT / "docs/examples" / example / ".github/workflows" / workflow).read_text()
    commands = [step.get("run", "").partition(" #")[0] for step in yaml.safe_load(text)["jobs"][job]["steps"]]
    return [command.partition("pytest ")[2] for command in commands if re.match(r"(cd \w+ && )?pytest ", command)]


@pytest.fixture
def typed(pytester, monkeypatch, clock_of_a_conftest):
    """Return a function that types a step in a folder, with times as a clock says."""

    def type_it(folder, step, conftest=CLOCK, **environment):
        monkeypatch.chdir(pytester.path / folder)
        (pytester.path / folder / "conftest.py").write_text(conftest)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            for name, value in ({"RUNNER_TEMP": str(pytester.path)} | environment).items():
                step = step.replace(f"${name}", value)
            start = pytester.runpytest_subprocess if "against" in step else pytester.runpytest_inprocess  # it looks at modules
            return start("-p", "no:cacheprovider", "--attn-device=cpu", *shlex.split(step))

    return type_it


def test_each_is_named_here():
    assert sorted(path.parent.name for path in ROOT.glob("docs/examples/*/pyproject.toml")) == sorted(EXAMPLES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("example", EXAMPLES)
def test_it_runs_where_it_is_copied_to(example, pytester, monkeypatch):
    shutil.copytree(ROOT / "docs/examples" / example, pytester.path / example)
    monkeypatch.chdir(pytester.path / example)
    passed, skipped = EXAMPLES[example]
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu", "--attn-latency=off", "-rs")
    result.assert_outcomes(passed=passed, skipped=skipped)
    result.stdout.fnmatch_lines(["*right*"])


@pytest.fixture
def in_their_tree(pytester, monkeypatch):
    """Return a function that runs the tests of an example for another project beside a fake of its library."""

    def run(example, *arguments, **changed):
        shutil.copytree(ROOT / "docs/examples" / example, pytester.path / example)
        put(monkeypatch, pytester.mkdir("site"), FOR_OTHERS[example][0], **changed)
        monkeypatch.chdir(pytester.path / example)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu", *arguments)

    return run


@pytest.mark.parametrize("example", FOR_OTHERS)
def test_another_project_adds_one_short_file_and_one_line(example, in_their_tree):
    in_their_tree(example).assert_outcomes(passed=FOR_OTHERS[example][1])
    (file,) = Path("tests").rglob("*.py")
    assert len(file.read_text().splitlines()) <= 20
    (line,) = re.findall(r"^\+(?!\+)(.*)", Path("requirements.patch").read_text(), re.M)
    assert line.strip(' ",') == "pytest-attn"


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("example", "right", "wrong", "case"), FAULTS)
def test_a_fault_of_another_projects_kernel_is_found(example, right, wrong, case, in_their_tree):
    result = in_their_tree(example, "-k", case, **planted(f"{FOR_OTHERS[example][0]}.py", right, wrong))
    result.assert_outcomes(failed=1, deselected=FOR_OTHERS[example][1] - 1)


def test_a_fault_of_the_kernel_to_a_gate_is_found(pytester, monkeypatch):
    shutil.copytree(ROOT / "docs/examples/triton_kernel", pytester.path / "mine")
    kernel = pytester.path / "mine/example_triton_kernel.py"
    kernel.write_text(kernel.read_text().replace("is_causal=causal", "is_causal=False"))
    monkeypatch.chdir(kernel.parent)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu", "--attn-latency=off")
    result.assert_outcomes(failed=2, passed=1, skipped=1)


@pytest.mark.parametrize(("gate", "failed"), [("torch.sigmoid(gate)", 0), ("torch.sigmoid(gate * 0.9)", 2)])
def test_a_gate_on_the_output_is_judged(pytester, gate, failed):
    text = (ROOT / "docs/examples/test_gated.py").read_text()
    product = "scaled_dot_product_attention(q, k, v) * "
    pytester.makepyfile(test_gated=text.replace(f"{product}torch.sigmoid(gate)", product + gate))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu")
    result.assert_outcomes(passed=3 - failed, failed=failed)


@pytest.mark.slow("times in many processes")
def test_the_gate_of_a_kernel_holds_what_its_workflow_recorded(pytester, typed):
    shutil.copytree(ROOT / "docs/examples/triton_kernel", pytester.path / "mine")
    (fast,), (record,) = (steps("triton_kernel", "gpu.yml", job) for job in ("fast", "record"))
    typed("mine", fast).assert_outcomes(passed=2, failed=1, skipped=1)  # no baseline
    typed("mine", record, REASON="first").assert_outcomes(passed=3, skipped=1)
    assert list((pytester.path / "mine/baselines").glob("*.json"))
    typed("mine", fast).assert_outcomes(passed=3, skipped=1)
    typed("mine", fast, TIMES="150").assert_outcomes(passed=2, failed=1, skipped=1)
    assert (pytester.path / "mine/run.html").exists()


@pytest.mark.slow("starts a pytest of the other side")
def test_a_revision_is_compared_with_the_one_before_it(pytester, typed):
    folder = pytester.path / "mine"
    shutil.copytree(ROOT / "docs/examples/compare_revisions", folder)
    committed(folder)
    (step,) = steps("compare_revisions", "compare.yml", "compare")
    step = step.replace("origin/$GITHUB_BASE_REF", "HEAD")
    typed("mine", step, conftest=CLOCK + TURNS).assert_outcomes(passed=2)
    result = typed("mine", step, conftest=CLOCK + TURNS, SLOWER="0.5")
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["slower: attention on prefill*(+49.?%*", "latency: 2 slower"])
    assert not (folder / "baselines").exists()


def test_the_page_on_ci_shows_a_workflow_of_the_examples():
    (shown,) = re.findall(
        r"^```yaml\n# \.github/workflows/tests\.yml\n(.*?)^```", (ROOT / "docs/howto/ci.md").read_text(), re.M | re.S
    )
    assert shown == (ROOT / "docs/examples/model/.github/workflows/tests.yml").read_text()
