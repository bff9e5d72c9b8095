"""Runs that other plugins divide, pytest-split with and without xdist, and what a merge says of their files."""

import json
import subprocess

import pytest

from pytest_attn.__main__ import main
from pytest_attn.reports.records import read_records
from pytest_attn.session.repository import commit_of

TESTS = """
import pytest

@pytest.mark.attention("smoke-full", "smoke-half", "smoke-causal-gqa", device="cpu")
def test_kernel(attn, attn_backend):
    attn.check(attn_backend)

@pytest.mark.parametrize("number", range(7))
def test_plain(number):
    assert number != 3
"""
BACKENDS = "--attn-backends=math,sdpa"
CASES = 3 * 2 + 7


@pytest.fixture
def run(pytester):
    """Run the tests in this process and write a .jsonl file."""
    pytester.makepyfile(test_it=TESTS)

    def run_it(path, *arguments, backends=BACKENDS):
        return pytester.runpytest_inprocess(backends, f"--attn-output={path}", *arguments)

    return run_it


@pytest.fixture
def merge(capsys):
    """Merge files into all.jsonl; return the exit code, and what is said."""

    def merge_them(*files):
        capsys.readouterr()
        code = main(["merge", "all.jsonl", *files])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return merge_them


def group(number, splits=2):
    return "--splits", str(splits), "--group", str(number)


def closing(path):
    """Return what the last line of a file says of its run."""
    return json.loads(path.read_text().splitlines()[-1])["run"]


def test_the_groups_of_pytest_split_are_one_run(run, merge, pytester):
    results = [run(f"part-{number}.jsonl", *group(number, 3)) for number in (1, 2, 3)]
    assert sum(result.parseoutcomes().get("passed", 0) for result in results) == CASES - 1
    whole = (0, "3 runs, 13 tests, 6 records: written to all.jsonl\n")
    assert merge("part-1.jsonl", "part-2.jsonl", "part-3.jsonl") == whole
    assert len({record["test"] for record in read_records("all.jsonl")}) == 6
    code, said = merge("part-1.jsonl", "part-3.jsonl")
    assert (code, "; pytest-split's group 2 of 3 is missing, so run --splits=3 --group=2 with" in said) == (1, True)
    main(["merge", "some.jsonl", "part-1.jsonl", "part-3.jsonl", "--force"])
    assert merge("some.jsonl", "part-2.jsonl") == whole, "with what was left out before"


def test_what_k_and_m_leave_out_of_all_files_need_not_run(run, merge, pytester):
    pytester.makeconftest("""
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                if "sdpa" in item.name:
                    item.add_marker("slow")
        """)
    pytester.makeini("[pytest]\nmarkers = slow")
    choice = "-m", "not slow", "-k", "not gqa", "--deselect=test_it.py::test_plain[0]"
    for number in (1, 2):
        run(f"part-{number}.jsonl", *group(number), *choice)
    assert merge("part-1.jsonl", "part-2.jsonl") == (0, "2 runs, 8 tests, 2 records: written to all.jsonl\n")
    assert closing(pytester.path / "part-1.jsonl")["choice"] == (
        "-k 'not gqa' -m 'not slow' --deselect 'test_it.py::test_plain[0]'"
    )
    assert merge("part-1.jsonl")[0] == 1


def test_k_may_divide_a_run(run, merge):
    run("plain.jsonl", "-k", "plain")
    run("kernel.jsonl", "-k", "not plain")
    assert merge("plain.jsonl", "kernel.jsonl")[0] == 0


def test_a_run_of_what_failed_before_is_not_whole(run, merge):
    run("run.jsonl")
    run("again.jsonl", "--lf")
    assert merge("run.jsonl")[0] == 0
    code, said = merge("again.jsonl")
    assert code == 1
    assert "merge: again.jsonl is of --lf, which collects only what failed before; run it without: pytest --attn-" in said


def test_a_file_that_cannot_be_collected_on_one_host_is_seen(run, merge, pytester):
    pytester.makepyfile(test_other="def test_one(): pass\ndef test_two(): pass\n")
    run("part-1.jsonl", *group(1))
    pytester.makepyfile(test_other="import no_such_library\ndef test_one(): pass\ndef test_two(): pass\n")
    run("part-2.jsonl", *group(2), "--continue-on-collection-errors")
    code, said = merge("part-1.jsonl", "part-2.jsonl")
    assert code == 1
    assert "merge: part-2.jsonl could not collect 1 file, so tests are missing; its output says why" in said
    assert "Not run: test_other.py::test_one, test_other.py::test_two\n" in said


def test_one_skipped_test_stands_for_a_backend_that_is_not_here(run, merge):
    backends = "--attn-backends=math,natten"
    result = run("run.jsonl", "-k", "kernel", backends=backends)
    result.assert_outcomes(passed=3, skipped=1, deselected=7 + 2)
    assert merge("run.jsonl") == (0, "1 run, 6 tests, 4 records: written to all.jsonl\n")


def test_the_commit_has_a_mark_of_what_is_not_committed(tmp_path):
    assert commit_of(tmp_path / "nowhere") == ""

    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "-m", "one")
    clean = commit_of(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two\n")
    changed = commit_of(tmp_path)
    assert changed.startswith(f"{clean}+")
    (tmp_path / "file").write_text("three\n")
    assert commit_of(tmp_path) != changed
