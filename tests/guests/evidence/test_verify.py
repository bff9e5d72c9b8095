"""`python -m pytest_attn verify`: honest runs are accepted, and each change of a run or of its tree is refused in a line."""

import importlib
import json
import subprocess
import sys

import pytest
from fakes.records import run_of
from fakes.runs import lines_of_run

from pytest_attn.__main__ import main
from pytest_attn.reports.records import changed
from pytest_attn.session.repository import git, imported_of, own_digest, sources_at, sources_of

TESTS = """
import pytest
from mine import sdpa

@pytest.mark.attention("smoke-full", "smoke-half", device="cpu")
def test_it(attn):
    attn.check(sdpa)

def test_beside():
    pass

@pytest.mark.skipif("True")
@pytest.mark.attention("smoke-full", device="cpu")
def test_elsewhere(attn):
    attn.check(sdpa)
"""
MINE = """
def sdpa(q, k, v):
    from torch.nn.functional import scaled_dot_product_attention
    return scaled_dot_product_attention(q, k, v)
"""


def committed(folder, **files):
    """Write files, and commit all that is there; return the commit."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return git(folder, "rev-parse", "HEAD").decode().strip()


@pytest.fixture
def repository(pytester):
    (pytester.path / ".gitignore").write_text("*.jsonl\n__pycache__\n")
    return pytester.path, committed(pytester.path, test_it=TESTS, mine=MINE)


@pytest.fixture
def verify(capsys):
    """Return a function of arguments that returns the exit code and what is said."""

    def run(*arguments):
        capsys.readouterr()
        code = main(["verify", "run.jsonl", *arguments])
        said = capsys.readouterr()
        return code, (said.out + said.err).splitlines()

    return run


@pytest.fixture
def lines(repository):
    """Return a function that writes the lines of a run of three records, some facts of which are not its own."""
    folder, commit = repository
    records = [changed(one, test=f"test_it.py::test_it[{at}]", version="") for at, one in enumerate(run_of(100)[:3])]

    def write(records=records, **facts):
        every = [one["test"] for one in records]
        known = {"commit": commit, "sources": sources_at(folder, commit), "plugin": own_digest()}
        found = lines_of_run(records, every, **{**known, **facts})
        (folder / "run.jsonl").write_text("".join(f"{one}\n" for one in found))
        return found

    return write


def edited(change):
    """Return what changes the lines of a file, and writes them."""

    def edit(folder, lines):
        found = change(lines())
        (folder / "run.jsonl").write_text("".join(f"{one}\n" for one in found))

    return edit


def cut(folder, lines):
    lines()
    path = folder / "run.jsonl"
    path.write_text(path.read_text()[:-20])


def edited_tree(folder, lines):
    lines()
    (folder / "mine.py").write_text("sdpa = None\n")


def in_closing(name, value):
    """Return what changes one field of the closing line."""

    def change(lines):
        closing = json.loads(lines[-1])
        closing["run"][name] = value
        return [*lines[:-1], json.dumps(closing, separators=(",", ":"))]

    return edited(change)


CHANGED = "its lines are not those of which its closing line has the digest: they were changed"
TAMPERED = {
    "a dropped record": (edited(lambda found: found[1:]), "run.jsonl has 2 records, and its run wrote 3; "),
    "a record twice": (edited(lambda found: [found[0], *found]), "run.jsonl has 4 records, and its run wrote 3; "),
    "an edited verdict": (edited(lambda found: [one.replace('"verdict":"', '"verdict":"x') for one in found]), CHANGED),
    "another order": (edited(lambda found: [found[1], found[0], *found[2:]]), CHANGED),
    "an edited test": (in_closing("ran", {"test_it.py::test_it": ["[0]", "[1]", "[2]", "[3]"]}), "does not know which"),
    "an edited seed": (in_closing("seed", 7), CHANGED),
    "an edited exit": (in_closing("exit", 1), CHANGED),
    "a file cut short": (cut, "line 4: is cut short"),
    "no closing line": (edited(lambda found: found[:-1]), "has 3 records and no closing line"),
    "an empty file": (edited(lambda found: []), "has 0 records and no closing line"),
    "two runs of the same": (edited(lambda found: [*found, *found]), "run.jsonl and in run.jsonl"),
    "another schema": (
        edited(lambda found: [one.replace('"schema":1', '"schema":2') for one in found]),
        "line 1: is of schema 2, this pytest-attn reads 1",
    ),
    "another commit": (lambda folder, lines: lines(commit="f" * 40), "run.jsonl is of commit ffffffffff, expected "),
    "changes in its tree": (
        lambda folder, lines: lines(commit=f"{git(folder, 'rev-parse', 'HEAD').decode().strip()}+12ab34cd"),
        "with uncommitted changes, expected none",
    ),
    "changes in this tree": (edited_tree, "this tree has uncommitted changes, expected none"),
    "another kernel": (
        lambda folder, lines: lines(sources={**sources_at(folder, "HEAD"), "mine.py": "0" * 40}),
        " has: mine.py; commit",
    ),
    "a file that git has not": (
        lambda folder, lines: lines(sources={**sources_at(folder, "HEAD"), "conftest.py": "0" * 40}),
        " has: conftest.py; commit",
    ),
    "nothing of the tree": (lambda folder, lines: lines(sources={}), "run.jsonl has imported nothing of "),
    "nothing judged": (lambda folder, lines: lines(judged=0), "run.jsonl has judged nothing, expected judgments; "),
    "another GPU": (lambda folder, lines: lines(device="NVIDIA A100"), "run.jsonl ran on NVIDIA A100, expected NVIDIA H200; "),
    "another judge": (lambda folder, lines: lines(plugin="0" * 64), "other files than this one (0000000000, expected "),
    "another seed": (lambda folder, lines: lines(seed=5), "run.jsonl has seed 5, expected 0; "),
    "a test that did not run": (lambda folder, lines: lines(unfinished={"a::b"}, collected=4), "and not a::b; was it stopped"),
    "only what had failed": (lambda folder, lines: lines(choice="--lf"), "is of --lf, which collects only what failed"),
}


@pytest.mark.parametrize(("tamper", "said"), TAMPERED.values(), ids=TAMPERED)
def test_what_is_not_the_run_of_this_tree_is_refused(repository, lines, verify, tamper, said):
    lines()
    asked = ("--no-collect", "--seed=0", "--device=NVIDIA H200")
    assert verify(*asked)[0] == 0
    tamper(repository[0], lines)
    code, found = verify(*asked)
    assert code == 1
    assert any(said in one for one in found), found


def test_a_run_that_failed_without_a_judgment_says_its_exit_code(lines, verify):
    lines(exit=1)
    code, (line,) = verify("--no-collect")
    assert code == 0
    assert " 0 failed, exit code 1, seed " in line


def test_what_cannot_be_said(repository, lines, verify, monkeypatch):
    folder, commit = repository
    lines(commit="")
    assert verify("--no-collect")[0] == 2
    lines()
    with monkeypatch.context() as patch:
        patch.setattr("pytest_attn.guests.evidence.verify.__version__", "9.9")
        assert verify("--no-collect")[0] == 2
    assert "has no revision nowhere; " in verify("--at=nowhere")[1][0]
    later = committed(folder, mine="sdpa = None\n")
    assert verify("--no-collect")[0] == 1, "this tree is another one"
    assert verify("--no-collect", f"--at={commit}")[0] == 0
    assert verify(f"--at={commit}") == (
        2,
        [f"verify: cannot say: this tree is at {later[:10]}; git checkout {commit[:10]}, or leave it out: --no-collect"],
    )
    monkeypatch.chdir(folder.parent)
    (folder / "run.jsonl").rename(folder.parent / "run.jsonl")
    assert verify("--no-collect")[0] == 2


@pytest.mark.parametrize("options", [(), pytest.param(("-n2",), marks=pytest.mark.slow("starts workers"))], ids=str)
def test_an_honest_run_is_accepted_with_what_it_has_imported(repository, pytester, verify, options):
    folder, commit = repository
    pytester.runpytest_inprocess("--attn-output=run.jsonl", *options)
    code, (line,) = verify()
    counts = "4 tests, 2 judged, 1 skipped, 0 failed, seed 0, cpu"
    assert (code, line.partition(", pytest")[0]) == (0, f"run.jsonl is of {commit[:10]}, whole: {counts}")
    told = json.loads((folder / "run.jsonl").read_text().splitlines()[-1])["run"]
    assert told["sources"] == {name: one for name, one in sources_at(folder, commit).items() if name.endswith(".py")}
    assert (told["selected"], told["judged"], told["skipped"]) == (4, 2, 1)


@pytest.mark.parametrize(("ini", "names"), [("notes.txt", ()), ("tox.ini", ("test_it.py::test_it", "sub/test_here.py"))])
def test_where_it_is_typed_changes_neither_names_of_tests_nor_how_many_are_wanted(
    repository, pytester, monkeypatch, verify, ini, names
):
    (pytester.path / "sub").mkdir()
    (pytester.path / "sub" / "test_here.py").write_text("def test_here():\n    pass\n")
    (pytester.path / ini).write_text("[pytest]\n")
    committed(pytester.path)
    pytester.runpytest_inprocess("--attn-output=sub/run.jsonl", *names)
    monkeypatch.chdir("sub")
    code, said = verify()
    assert code == (1 if names else 0), said
    assert " has 3 of 5 tests " in said[0] or not names


@pytest.mark.slow("starts pytest five times")
def test_fewer_tests_and_other_options_than_asked_for_are_refused(repository, pytester, verify):
    pytester.runpytest_inprocess("--attn-output=run.jsonl", "-kfull", "--attn-limits=strict", "--attn-seed=3")
    code, (fewer, options) = verify()
    assert code == 1
    assert "run.jsonl has 2 of 4 tests that pytest collects here, not test_it.py::test_beside, " in fewer
    assert options.startswith("verify: run.jsonl has the options --attn-limits=strict, expected none; ")
    assert verify("--args=-k full --attn-limits=strict")[0] == 0
    assert "--nowhere" in verify("--args=--nowhere")[1][0]
    assert verify("--args=--nowhere")[0] == verify("--args=-k nothing")[0] == 2


@pytest.mark.slow("starts pytest three times")
def test_a_merged_file_is_accepted_and_a_part_of_it_is_not(repository, pytester, verify):
    for number in (1, 2):
        pytester.runpytest_inprocess(f"--attn-output=part{number}.jsonl", "--splits=2", f"--group={number}")
    assert main(["merge", "run.jsonl", "part1.jsonl", "part2.jsonl"]) == 0
    assert verify()[0] == 0
    (pytester.path / "part1.jsonl").replace("run.jsonl")
    assert verify("--no-collect")[0] == 1


def test_what_git_lacks_is_told_if_a_kernel_may_be_built_of_it(repository):
    folder, _ = repository
    (folder / ".git" / "info" / "exclude").write_text("hidden*\n")
    for name in ("mine.cu", "notes.txt", "other.py", "hidden.py", "hidden.h", "__pycache__/built.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    imported = {name: str(folder / name) for name in ("mine.py", "hidden.py", "__pycache__/built.py")}
    assert sources_of(folder, imported).keys() == {"mine.cu", "mine.py", "hidden.py"}


def test_an_installed_package_is_held_against_the_files_of_the_tree(repository, monkeypatch, tmp_path_factory):
    folder, commit = repository
    installed = tmp_path_factory.mktemp("installed")
    (folder / "src" / "ours").mkdir(parents=True)
    commit = committed(folder, **{"src/ours/__init__": "", "src/ours/kernel": "NEW = 1\n", "platform": ""})
    (installed / "ours").mkdir()
    (installed / "ours" / "__init__.py").touch()
    (installed / "ours" / "kernel.py").write_text("OLD = 1\n")
    (installed / "ours" / "version.py").write_text("BUILT = 1\n")
    monkeypatch.syspath_prepend(installed)
    for name in ("ours.kernel", "ours.version"):
        importlib.import_module(name)
    found, told = sources_of(folder, imported_of(folder)), sources_at(folder, commit)
    monkeypatch.undo()
    for name in ("ours.kernel", "ours.version", "ours"):
        del sys.modules[name]
    assert found.keys() == {"src/ours/__init__.py", "src/ours/kernel.py"}
    assert [name for name in found if found[name] != told[name]] == ["src/ours/kernel.py"]
