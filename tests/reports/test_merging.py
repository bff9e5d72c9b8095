"""`python -m pytest_attn merge`: files of one run as one, and in plain words why they are not."""

import json
import os

import pytest
from fakes.runs import lines_of_run, write, write_runs

from pytest_attn.__main__ import main
from pytest_attn.reports.html.page import report_page
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.records import changed, read_records, to_line
from pytest_attn.reports.runs import grouped, stable_id

COUNT = 8
FILES = [f"part-{number}.jsonl" for number in range(1, COUNT + 1)]
OTHERS = ", ".join(file for file in FILES if file != "part-3.jsonl")


class Parts:
    """Eight files of ten cases each."""

    def __init__(self, folder):
        self.folder, self.records = folder, write_runs(folder, COUNT, 10)
        self.every = [record["test"] for records in self.records for record in records]

    def rewrite(self, number, found=None, **how):
        found = self.records[number - 1] if found is None else found
        write(self.folder, number, lines_of_run(found, self.every, **{"group": f"{number}/{COUNT}", **how}))

    def text(self, number):
        return (self.folder / f"part-{number}.jsonl").read_text()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Parts(tmp_path)


@pytest.fixture
def merge(capsys):
    def run(*files, out="all.jsonl", options=()):
        code = main(["merge", out, *(files or FILES), *options])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run


NOT_WRITTEN = "merge: not one whole run, so all.jsonl was not written; --force writes it all the same"


def refused(merge, *files):
    """Merge what must not be; return what is said, without the last line, and see that nothing is left."""
    code, lines = merge(*files)
    assert (code, lines[-1]) == (1, NOT_WRITTEN), lines
    assert [name for name in os.listdir() if not name.startswith("part-")] == []
    return [line.removeprefix("merge: ") for line in lines[:-1]]


def test_all_files_are_one_with_every_line(parts, merge):
    assert merge() == (0, ["8 runs, 80 tests, 80 records: written to all.jsonl"])
    every = [record for records in parts.records for record in records]
    assert [to_line(one) for one in read_records("all.jsonl")] == [to_line(one) for one in every]
    assert (parts.folder / "all.jsonl").read_text() == "".join(parts.text(number) for number in range(1, COUNT + 1))


@pytest.mark.slow("reads thousands of records")
def test_a_page_and_a_summary_are_of_all_records(parts, merge):
    assert merge(out="all.md")[0] == 0
    assert (parts.folder / "all.md").read_text() == markdown_summary([one for records in parts.records for one in records])
    assert merge(out="all.html")[0] == 0
    assert (parts.folder / "all.html").read_text() == report_page(read_records(*FILES))


def test_a_run_without_attention_tests_is_one(parts, merge):
    tests = [record["test"] for record in parts.records[3]]
    parts.rewrite(4, [], tests=tests)
    assert merge() == (0, ["8 runs, 80 tests, 70 records: written to all.jsonl"])


def test_missing_groups(parts, merge):
    (said,) = refused(merge, *(file for file in FILES if file != "part-3.jsonl"))
    assert said == (
        "10 tests of 80 that were collected ran in none of these files; pytest-split's group 3 of 8 is missing, so run"
        " --splits=8 --group=3 with the options of the others, or name the file. Not run:"
        " test_kernel.py::test_it[part3-case0], test_kernel.py::test_it[part3-case1],"
        " test_kernel.py::test_it[part3-case2] and 7 more"
    )
    (said,) = refused(merge, "part-1.jsonl", "part-6.jsonl")
    assert "; pytest-split's groups 2, 3, 4, 5, 7, 8 of 8 are missing, so run --splits=8 --group=2 with" in said


def test_a_test_that_nobody_ran_is_no_missing_group_where_runs_are_of_different_numbers_of_groups(parts, merge):
    parts.rewrite(3, group="3/9")
    parts.rewrite(4, parts.records[3][1:])
    (said,) = refused(merge)
    assert said == (
        "1 test of 80 that were collected ran in none of these files; run them with the options of the others, or name"
        " the files of their runs. Not run: test_kernel.py::test_it[part4-case0]"
    )


def test_tests_that_ran_twice(parts, merge):
    parts.rewrite(5, [*parts.records[4], *parts.records[1][:2]])
    assert refused(merge) == [
        "2 tests ran both in part-2.jsonl and in part-5.jsonl: test_kernel.py::test_it[part2-case0],"
        " test_kernel.py::test_it[part2-case1]; leave out one of these files, or run both again with the same tests and"
        " options",
        "pytest-split divided the same tests in different ways; give all groups the same --durations-path and"
        " --splitting-algorithm",
    ]


def test_what_all_runs_chose_not_to_run_need_not_run(parts, merge):
    left = {"unchosen": ["a.py::left"], "choice": "-k it", "collected": 81}
    for number in range(1, COUNT + 1):
        parts.rewrite(number, **left)
    assert merge(out="part-all.jsonl")[0] == 0
    parts.rewrite(3, **{**left, "choice": "-k it2"})
    missing, chosen = refused(merge)
    assert missing.startswith("1 test of 81 that were collected ran in none of these files; run them with ")
    assert missing.endswith("Not run: a.py::left")
    assert chosen == f"the runs chose in different ways: -k it in {OTHERS}; -k it2 in part-3.jsonl"


AGAIN = "run it again: pytest --group=3"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"pytest_attn": "9.2.0"}, "pytest-attn's version differs: "),
        ({"commit": "f" * 40}, f"the commit differs: 0123456789 in {OTHERS}; ffffffffff in part-3.jsonl"),
        ({"commit": f"{'0123456789' * 4}+12ab34cd"}, f"the commit differs: 0123456789 in {OTHERS}; 0123456789+12ab34cd in"),
        ({"commit": ""}, f"the commit differs: 0123456789 in {OTHERS}; none in part-3.jsonl"),
        ({"options": "--attn-seed=1"}, f"the choice of options differs: none in {OTHERS}; --attn-seed=1 in part-3.jsonl"),
        ({"python": "3.13.0"}, f"Python's version differs: 3.12 in {OTHERS}; 3.13 in part-3.jsonl"),
        ({"device": "cpu"}, f"the device differs: NVIDIA H200 in {OTHERS}; cpu in part-3.jsonl"),
        ({"exit": 3}, "part-3.jsonl ended with pytest's exit code 3; its output says why"),
        ({"exit": 2, "uncollected": 1}, "part-3.jsonl could not collect 1 file, so tests are missing; its output says why"),
        ({"records": 11}, f"part-3.jsonl has 10 records, and its run wrote 11; {AGAIN}"),
        ({"collected": 0}, f"part-3.jsonl does not know which tests it collected, as its workers crashed; {AGAIN}"),
        (
            {"choice": "--lf"},
            "part-3.jsonl is of --lf, which collects only what failed before; run it without: pytest --group=3",
        ),
    ],
)
def test_a_run_that_differs_or_is_not_whole(parts, merge, how, said):
    parts.rewrite(3, **how)
    (found,) = refused(merge)
    assert found.startswith(said)


def test_a_run_that_did_not_finish(parts, merge):
    unfinished = [parts.records[2][9]["test"]]
    parts.rewrite(3, parts.records[2][:9], unfinished=unfinished)
    assert refused(merge) == [
        "part-3.jsonl ran 9 of its 10 tests, and not test_kernel.py::test_it[part3-case9]; was it stopped, or run with -x or"
        " --lf? Run it again: pytest --group=3"
    ]


def test_a_run_that_collected_nothing(parts, merge):
    write(parts.folder, 3, lines_of_run([], [], exit=5, group=""))
    said = refused(merge)
    assert said[0] == "part-3.jsonl collected no tests; its command was: pytest --group="
    assert said[1].startswith("10 tests of 80 that were collected ran in none of these files; ")
    assert said[2].startswith(f"the runs collected different tests: 80 tests in {OTHERS}; 0 tests in part-3.jsonl; the same")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("torch", "2.99.0", "torch's version differs: 2.11.0 in "), ("name", "NVIDIA A100", "the GPU of some tests differs: ")],
)
def test_another_torch_or_device(parts, merge, field, value, said):
    machine = {"name": "NVIDIA H200", "kind": "cuda", "torch": "2.11.0", "pytest_attn": "0.1.0"}
    for number, records in enumerate(parts.records, 1):
        own = {**machine, "device": f"cuda:{number}", **({field: value} if number == 3 else {})}
        parts.rewrite(number, [changed(one, machine=own) for one in records])
    (found,) = refused(merge)
    assert found.startswith(said)
    assert found.endswith(f"{value} in part-3.jsonl")


def test_cpus_of_hosted_runners_may_be_of_several_models(parts, merge):
    for number, records in enumerate(parts.records, 1):
        machine = {"name": f"AMD EPYC {number}", "device": "cpu", "kind": "cpu", "torch": "2.11.0", "pytest_attn": "0.1.0"}
        parts.rewrite(number, [changed(one, machine=machine) for one in records])
    assert merge()[0] == 0


def test_another_library_of_a_backend(parts, merge):
    for number, records in enumerate(parts.records, 1):
        version = "2.8.0" if number == 3 else "2.7.4"
        parts.rewrite(number, [changed(one, version=version, tags={"backend": "flash2"}) for one in records])
    assert refused(merge) == [f"the library of flash2 differs: 2.7.4 in {OTHERS}; 2.8.0 in part-3.jsonl"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"{'schema': 1}", "part-3.jsonl, line 5: is not JSON ("),
        (b'{"schema":1,"question":"check"}', "part-3.jsonl, line 5: verdict: found nothing, expected string"),
        (b'{"schema":99}', "part-3.jsonl, line 5: is of schema 99, this pytest-attn reads 1; install a newer one"),
        (b"\xff\xfe\x00", "part-3.jsonl, line 5: is not UTF-8"),
        (b"[1]", 'part-3.jsonl, line 5: has no "schema"'),
        (b'{"schema":1,"run":{"command":1}}', "part-3.jsonl, line 5: run.choice: found nothing, expected string"),
        (b'{"schema":1,"run":[]}', "part-3.jsonl, line 5: run: found an array, expected object"),
    ],
)
def test_a_damaged_line(parts, merge, damage, said):
    path = parts.folder / "part-3.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:4], damage, *lines[5:]]) + b"\n")
    (found,) = refused(merge)
    assert found.startswith(said)
    assert found.endswith(f"; {AGAIN}")


@pytest.mark.parametrize("keep", [0, 0.3, 0.6, 0.999])
def test_a_run_that_was_killed(parts, merge, keep):
    text = parts.text(3)
    (parts.folder / "part-3.jsonl").write_text(text[: int(len(text) * keep)])
    found = refused(merge)
    assert any(
        " and no closing line: its run was killed, is not over, or used an older pytest-attn; run it" in s for s in found
    )


def test_force_writes_what_there_is_and_it_is_never_taken_for_whole(parts, merge):
    text = parts.text(5)
    (parts.folder / "part-5.jsonl").write_text(f"damaged{text[8:]}")
    code, lines = merge(*FILES[:-1], options=("--force",))
    assert code == 1
    assert lines[0] == "not whole: 7 runs, 70 tests, 69 records: written to all.jsonl"
    assert len(read_records("all.jsonl")) == 69
    assert merge("all.jsonl", "part-8.jsonl", out="more.jsonl") == (
        1,
        [
            "merge: all.jsonl has 9 records, and its run wrote 10; run it again: pytest --group=5",
            NOT_WRITTEN.replace("all.jsonl", "more.jsonl"),
        ],
    )


ENDINGS = "OUT must end in .jsonl, .html or .md (not .support.md), got"
OVERWRITES = "part-1.jsonl is one of the input files: refusing to overwrite it; choose another OUT"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("all.txt", "part-1.jsonl"), f"{ENDINGS} 'all.txt'"),
        (("all.support.md", "part-1.jsonl"), f"{ENDINGS} 'all.support.md'"),
        (("part-1.jsonl", "part-1.jsonl"), OVERWRITES),
        (("all.jsonl", "part-1.jsonl", "./part-1.jsonl"), "part-1.jsonl is named more than once"),
        (("all.jsonl", "nowhere.jsonl"), "there is no nowhere.jsonl; pytest --attn-output=nowhere.jsonl writes it"),
        (("all.jsonl",), "the following arguments are required: FILE.jsonl"),
        (("dir.jsonl", *FILES), "cannot write dir.jsonl: is not a plain file"),
    ],
)
def test_what_cannot_be_merged_is_a_usage_error(parts, capsys, arguments, text):
    (parts.folder / "dir.jsonl").mkdir()
    before = sorted(os.listdir())
    with pytest.raises(SystemExit) as exited:
        main(["merge", *arguments])
    assert exited.value.code == 2
    assert text in capsys.readouterr().err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("nodeid", "found"),
    [
        ("a/test_b.py::Test::test_c[x-[1]]@group", "a/test_b.py::Test::test_c[x-[1]]"),
        ("a/test_b.py::test_c[mail@home]", "a/test_b.py::test_c[mail@home]"),
        ("../lib/python3.11/site-packages/pytest_attn/suite/test_d.py::test_e", "pytest_attn/suite/test_d.py::test_e"),
    ],
)
def test_a_test_has_one_id_on_every_host(nodeid, found):
    assert stable_id(nodeid) == found
    ((name, (rest,)),) = json.loads(json.dumps(grouped([found]))).items()
    assert name + rest == found
