"""--attn-save-failures: what a failing case leaves behind, and that it can be judged again."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pytest_attn
from pytest_attn import Workload
from pytest_attn.correctness import reference

WRONG = "attn.check(lambda q, k, v: v * 1.5)"
SAVE = "--attn-save-failures=out"
OWN_BACKEND = """
from pytest_attn.backends.eager import Int8Dynamic

class Own(Int8Dynamic):
    name = "own8"

    def prepare(self, inputs, backward=False):
        kernel = super().prepare(inputs, backward)
        return lambda q, k, v: kernel(q, k, v) * 1.1

def pytest_attn_backends(registry):
    registry.add(Own())
    registry.add_function("own", lambda q, k, v, workload: v * 1.5)
"""


@pytest.fixture
def saved(pytester):
    """Return the one folder that a run left in out/, read back."""

    def read():
        (folder,) = (pytester.path / "out").iterdir()
        return pytest_attn.load_failure(folder)

    return read


@pytest.fixture
def repro(pytester, capsys, monkeypatch):
    """Return a function that runs the script of a folder in this process, where nothing of the test is imported yet."""

    def forget():
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(pytester.path)):
                del sys.modules[name]

    def run_it(folder):
        capsys.readouterr()
        monkeypatch.setattr(sys, "path", list(sys.path))
        forget()
        try:
            runpy.run_path(str(folder / "repro.py"), run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code
        forget()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=said.out, stderr=said.err)

    return run_it


def diagnosis(text):
    """Return the lines of a mismatch, from whatever prints it."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines()]
    first = next(i for i, line in enumerate(lines) if "mismatch: " in line)
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("reproduce"))
    return [lines[first].partition("mismatch: ")[2], *lines[first + 1 : last + 1]]


def test_a_failing_case_says_where_it_is_saved(run, kernel_test, saved):
    body = "attn.check(lambda q, k, v: sdpa(q, k, v, is_causal=True))"
    kernel_test(body, marker='Workload(32, heads=2, head_dim=32), device="cpu", backward=True')
    result = run(SAVE, "--attn-seed=3")
    result.assert_outcomes(failed=1)
    failure = saved()
    shown = f"out/{failure.folder.name}"
    result.stdout.fnmatch_lines(
        ["E*  reproduce  pytest *", f"E*  saved      {shown}  (python {shown}/repro.py)", "mismatch      lambda*"]
    )
    assert sorted(path.name for path in failure.folder.iterdir()) == ["environment.json", "repro.py", "tensors.safetensors"]
    assert failure.workload == pytest_attn.Workload(32, heads=2, head_dim=32)
    names = {"q", "k", "v", "dout", "out", "dq", "dk", "dv", "reference.out", "reference.out.budget", "reference.dk"}
    assert names <= failure.tensors.keys()
    assert torch.equal(failure.tensors["out"][:, :, 0], failure.tensors["v"][:, :, 0])
    assert failure.tensors["reference.out"].dtype == torch.float64
    drawn = pytest_attn.draw_inputs(failure.workload, "structured", 3)
    assert torch.equal(failure.tensors["q"], drawn.q)


def test_the_environment_says_what_was_judged(run, kernel_test, saved):
    kernel_test(WRONG)
    result = run(SAVE, "--attn-seed=3")
    said = saved().environment
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", said["date"])
    assert said["case"].endswith("::test_kernel[h2-s32-d32]")
    assert said["verdict"] == "mismatch"
    assert said["workload"]["id"] == "h2-s32-d32"
    assert said["workload"]["fields"]["heads"] == 2
    assert said["question"]["seed"] == 3
    assert said["question"]["distribution"] == "structured"
    assert said["machine"]["device"] == "cpu"
    assert said["versions"]["torch"] == torch.__version__
    assert said["versions"]["python"] == sys.version.split()[0]
    assert said["levels"][0]["z_element"] > 8
    assert said["command"] in result.stdout.str()
    assert diagnosis(said["message"]) == diagnosis(result.stdout.str())


def test_a_run_without_failures_or_without_the_option_saves_nothing(run, kernel_test, pytester):
    kernel_test("attn.check(lambda q, k, v: sdpa(q, k, v))")
    run(SAVE).assert_outcomes(passed=1)
    assert list((pytester.path / "out").iterdir()) == []
    (pytester.path / "out").rmdir()
    kernel_test(WRONG)
    result = run()
    assert "  saved  " not in result.stdout.str()
    result.stdout.fnmatch_lines(["1 wrong; * judged; --lf --attn-save-failures=failures keeps the tensors"])
    assert not (pytester.path / "out").exists()


@pytest.mark.slow("starts processes")
def test_repro_knows_no_folder_of_this_machine(pytester, kernel_test, saved):
    pytester.makeconftest(OWN_BACKEND)
    for body, fixtures in (("attn.check(wrong)", "attn"), ("attn.check(attn_backend)", "attn, attn_backend"), (WRONG, "attn")):
        kernel_test(body, fixtures=fixtures, marker='"smoke-full"', before="def wrong(q, k, v):\n    return v * 1.5")
        pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE, "--attn-backends=own", "--attn-device=cpu")
        for script in pytester.path.rglob("repro.py"):
            assert str(pytester.path) not in script.read_text()


def test_repro_imports_from_the_folders_of_the_ini_value_pythonpath(pytester, kernel_test, saved, repro):
    pytester.makeini("[pytest]\npythonpath = lib\n")
    (pytester.mkdir("lib") / "factors.py").write_text("FACTOR = 1.5\n")
    kernel_test("attn.check(mine)", before="from factors import FACTOR\ndef mine(q, k, v):\n    return v * FACTOR")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE).assert_outcomes(failed=1)
    again = repro(saved().folder)
    assert (again.returncode, "out of mine:" in again.stderr) == (1, True)

    script = saved().folder / "repro.py"
    script.write_text(re.sub(r"(check\()mine", r'\1"math"', script.read_text()))
    again = repro(saved().folder)
    assert (again.returncode, again.stdout) == (0, "right now: math on h2-s32-d32\n")

    (pytester.path / "lib" / "factors.py").unlink()
    again = repro(saved().folder)
    assert (again.returncode, "No module named 'factors'" in again.stderr) == (2, True)


def test_for_a_lambda_repro_says_what_to_put_in_its_place(pytester, kernel_test, saved, repro):
    kernel_test(WRONG)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE)
    again = repro(saved().folder)
    assert again.returncode == 2
    assert re.search(
        r"in place of my_kernel = None, put the callable .* checked \(test_kernel\.lambda, .*\.py:\d+\)", again.stderr
    )
    script = saved().folder / "repro.py"
    script.write_text(script.read_text().replace("my_kernel = None", "my_kernel = lambda q, k, v: v * 1.5"))
    assert "out of lambda:" in repro(saved().folder).stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["own", "own8"])
def test_a_backend_of_a_conftest_is_judged_again_by_repro(pytester, kernel_test, saved, name, repro):
    pytester.makeconftest(OWN_BACKEND)
    kernel_test("attn.check(attn_backend)", marker='"smoke-full"', fixtures="attn, attn_backend")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE, f"--attn-backends={name}", "--attn-device=cpu")
    again = repro(saved().folder)
    assert again.returncode == 1
    assert diagnosis(again.stderr) == diagnosis(result.stdout.str())


def test_a_built_in_backend_is_judged_again_by_its_name(pytester, kernel_test, saved, monkeypatch):
    from pytest_attn.backends.sdpa import Math

    kernel_test('attn.check("math")')
    with monkeypatch.context() as patch:
        patch.setattr(Math, "prepare", lambda self, inputs, backward=False: lambda q, k, v: v * 1.5)
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE)
        assert '.check("math")' in (text := (saved().folder / "repro.py").read_text()).replace("'", '"'), text
        with pytest.raises(AssertionError) as wrong:
            saved().check("math")
    assert diagnosis(str(wrong.value)) == diagnosis(result.stdout.str())
    assert saved().environment["kernel"] == {"name": "math", "library": "torch", "version": torch.__version__}
    assert saved().check("math").passed
    assert saved().check("sdpa_flash").passed


def test_assert_attention_close_saves_as_well(run, kernel_test, saved, repro):
    kernel_test("assert_attention_close(qkv[2])", fixtures="qkv, assert_attention_close", marker="Workload(32), backward=True")
    run(SAVE).stdout.fnmatch_lines(["E*  saved      out/*"])
    assert "dout" not in saved().tensors
    assert torch.equal(saved().tensors["out"], saved().tensors["v"])
    assert saved().check("math").passed
    assert repro(saved().folder).returncode == 2


def test_measure_saves_what_its_check_finds(pytester, kernel_test, saved):
    kernel_test("attn.measure(lambda q, k, v: v)")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE).stdout.fnmatch_lines(["E*  saved      out/*"])
    assert saved().environment["verdict"] == "mismatch"


def test_broken_invariants_and_contracts_leave_the_inputs(pytester, kernel_test, saved, repro):
    forgetful = "def mine(q, k, v, calls=[]):\n    calls.append(0)\n    return sdpa(q, k, v) * (1 + len(calls) / 100)\n"
    kernel_test("attn.check_invariants(mine, only='rerun')", before=forgetful)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE).stdout.fnmatch_lines(["E*  saved        out/*"])
    assert saved().environment["verdict"] == "broken"
    assert saved().tensors.keys() == {"q", "k", "v"}
    again = repro(saved().folder)
    assert again.returncode == 1
    assert "1 invariant broken by mine" in again.stderr
    assert saved().check("math").passed

    kernel_test("attn.check(lambda q, k, v: q[..., :3])")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE).stdout.fnmatch_lines(
        ["E*out has shape*", "E*  saved      out/*"]
    )
    assert saved().check("math").passed
    with pytest.raises(AssertionError, match="out has shape"):
        saved().check(lambda q, k, v: q[..., :3])


def test_a_known_defect_and_a_mutant_are_not_saved(pytester, kernel_test):
    pytester.makeconftest("""
from pytest_attn import Backend, KnownDefect

class Broken(Backend):
    name = "broken"
    known_defects = (KnownDefect("lib#7", "out is off", lambda workload, machine: True, ("out",)),)

    def prepare(self, inputs, backward=False):
        return lambda q, k, v: v * 1.5

def pytest_attn_backends(registry):
    registry.add(Broken())
""")
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend", marker="Workload(8, head_dim=8)")
    options = ["-p", "no:cacheprovider", SAVE, "--attn-device=cpu"]
    result = pytester.runpytest_inprocess(*options, "--attn-backends=broken", "-rx")
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL * known defect lib#7: out is off*"])
    pytester.runpytest_inprocess(*options, "--attn-mutants", "-k", "honest or no-scale or scale")
    assert list((pytester.path / "out").iterdir()) == []


def test_an_older_folder_of_the_case_is_replaced(run, kernel_test, saved):
    kernel_test(WRONG)
    run(SAVE)
    first = saved()
    (first.folder / "mine.txt").touch()
    kernel_test(WRONG.replace("1.5", "2.0"))
    run(SAVE)
    assert saved().folder == first.folder
    assert not (first.folder / "mine.txt").exists()
    assert torch.equal(saved().tensors["out"], first.tensors["v"] * 2)


@pytest.mark.parametrize("missing", ["safetensors", "numpy"])
def test_what_saving_needs_is_a_usage_error_that_says_what_to_install(pytester, kernel_test, monkeypatch, missing):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else "there")
    kernel_test("raise SystemExit('ran')")
    result = pytester.runpytest_inprocess(SAVE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"needs {missing}, which is not installed" in result.stderr.str()
    assert 'pip install "pytest-attn[failures]"' in result.stderr.str()
    assert not (pytester.path / "out").exists()


def test_what_cannot_be_saved_hides_no_diagnosis(pytester, kernel_test, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("a fault\nof the writer")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    kernel_test(WRONG)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE)
    result.stdout.fnmatch_lines(["E*mismatch: *", "E*  not saved  RuntimeError: a fault of the writer"])
    result.stdout.fnmatch_lines(["not saved     1 failure: RuntimeError: a fault of the writer"])
    assert list((pytester.path / "out").iterdir()) == []


def test_neither_torch_nor_safetensors_is_imported_at_the_start(pytester):
    pytester.makepyfile("def test_nothing():\n    pass\n")
    code = (
        "import sys, pytest; pytest.main(['-q', '-p', 'no:cacheprovider', '--attn-save-failures=out'])\n"
        "print([name for name in ('torch', 'safetensors') if name in sys.modules])"
    )
    result = pytester.run(sys.executable, "-c", code)
    assert result.outlines[-1] == "[]"
    assert Path(pytester.path, "out").is_dir()


def test_environment_is_strict_json(pytester, kernel_test, saved):
    kernel_test("attn.check(lambda q, k, v: v * float('inf'))")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", SAVE)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    json.loads((saved().folder / "environment.json").read_text(), parse_constant=refuse)


def test_a_failure_that_drawn_rows_alone_show_names_them_in_its_command(pytester, kernel_test, monkeypatch):
    monkeypatch.setattr(reference, "_FULL_ELEMENTS", {"cpu": 1 << 10, "cuda": 1})
    monkeypatch.setattr(reference, "_SAMPLED_ROWS", 64)
    kernel_test(
        """
def wrong(q, k, v):
    out = sdpa(q, k, v).clone()
    out[:, :, ROWS] += 1
    return out
attn.check(wrong)
""",
        marker='Workload(600, heads=2, head_dim=32), device="cpu", precision="torch_cpu"',
        before="import os\nROWS = list(map(int, os.environ['ROWS'].split(',')))",
    )

    def run(*args, rows):
        monkeypatch.setenv("ROWS", ",".join(map(str, rows)))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *args).stdout.str()

    w = Workload(600, heads=2, head_dim=32)
    shown = run(rows=set(range(600)) - reference.always_sampled(w, 2, 600))
    assert re.search(
        r"where +rows \d+ of \d+ looked at, first \d+, last \d+, drawn or named by --attn-rows; all 2 heads", shown
    )
    command = shlex.split(re.search(r"reproduce +pytest (.*)", shown)[1])
    named = re.search(r"--attn-rows=([\d,]+)", " ".join(command))[1].split(",")
    assert len(named) == 4
    again = run(*command, rows=named[-1:])
    assert f"where      rows only {named[-1]} of " in again
    assert re.search(rf"reproduce .* --attn-rows={named[-1]}\n", again)
