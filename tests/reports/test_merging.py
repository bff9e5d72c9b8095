"""`python -m pytest_attn merge`: parts of one run as one file, and in plain words why they are not."""

import json
import os
import time

import pytest
from fakes.parts import lines_of_part, write, write_parts

from pytest_attn.__main__ import main
from pytest_attn.reports.html.page import report_page
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.merging import numbers
from pytest_attn.reports.records import changed, read_records, to_line

PARTS = 8


class Parts:
    """Eight files of ten cases each."""

    def __init__(self, folder):
        self.folder, self.records = folder, write_parts(folder, PARTS, 10)

    def rewrite(self, number, records=None, **how):
        write(
            self.folder, number, lines_of_part(number, PARTS, self.records[number - 1] if records is None else records, **how)
        )

    def text(self, number):
        return (self.folder / f"part-{number}.jsonl").read_text()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Parts(tmp_path)


@pytest.fixture
def merge(capsys):
    """Merge files, by default all; return the exit code and the lines that were printed."""

    def run(*files, out="all.jsonl", options=()):
        code = main(["merge", out, *(files or [f"part-{number}.jsonl" for number in range(1, PARTS + 1)]), *options])
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


def test_all_parts_are_one_file_with_every_record(parts, merge):
    assert merge() == (0, ["8 parts, 80 tests, 80 records: written to all.jsonl"])
    every = [record for records in parts.records for record in records]
    assert [to_line(one) for one in read_records("all.jsonl")] == [to_line(one) for one in every]
    assert len((parts.folder / "all.jsonl").read_text().splitlines()) == 80


def test_the_order_of_files_does_not_matter(parts, merge):
    merge()
    first = (parts.folder / "all.jsonl").read_bytes()
    assert merge(*(f"part-{number}.jsonl" for number in (5, 3, 8, 1, 2, 7, 6, 4)))[0] == 0
    assert (parts.folder / "all.jsonl").read_bytes() == first


def test_files_put_behind_one_another_are_their_parts(parts, merge):
    (parts.folder / "part-some.jsonl").write_text("".join(map(parts.text, (1, 2, 3, 4, 5))))
    assert merge("part-some.jsonl", "part-6.jsonl", "part-7.jsonl", "part-8.jsonl")[0] == 0
    assert len(read_records("all.jsonl")) == 80


def test_a_page_and_a_summary_are_of_all_records(parts, merge):
    records = [record for records in parts.records for record in records]
    assert merge(out="all.md")[0] == 0
    assert (parts.folder / "all.md").read_text() == markdown_summary(records)
    assert merge(out="all.html")[0] == 0
    assert (parts.folder / "all.html").read_text() == report_page(read_records(*(f"part-{n}.jsonl" for n in range(1, 9))))


def test_a_part_without_attention_tests_is_a_part(parts, merge):
    parts.rewrite(4, records=[], tests=7)
    assert merge() == (0, ["8 parts, 77 tests, 70 records: written to all.jsonl"])


def test_a_missing_part(parts, merge):
    files = [f"part-{number}.jsonl" for number in range(1, PARTS + 1) if number != 3]
    assert refused(merge, *files) == [
        "part 3 of 8 is missing; run it with pytest --attn-shard=3/8 and the options of the others, or name the file"
    ]
    (said,) = refused(merge, "part-1.jsonl", "part-6.jsonl")
    assert said.startswith("parts 2 to 5, 7 and 8 of 8 are missing; run them with pytest --attn-shard=2/8 and ")


def test_a_part_that_is_there_twice(parts, merge):
    (parts.folder / "part-old.jsonl").write_text(parts.text(2))
    files = [f"part-{number}.jsonl" for number in range(1, PARTS + 1)]
    assert refused(merge, *files, "part-old.jsonl") == [
        "part 2 is there 2 times (part-2.jsonl, part-old.jsonl); leave out all but one"
    ]


def test_a_doubled_case(parts, merge):
    parts.rewrite(5, [*parts.records[4], changed(parts.records[1][3], seconds=9.0)])
    test = "test_kernel.py::test_it[part2-case3]"
    assert refused(merge) == [
        f"{test} is both in part 2 (part-2.jsonl) and in part 5 (part-5.jsonl);"
        " run both parts again, with the same tests and options"
    ]


def test_doubled_cases_are_counted_also_where_ids_were_written_otherwise(parts, merge):
    doubled = [changed(one, test=f"{one['test']}@group") for one in parts.records[1]]
    parts.rewrite(5, [*parts.records[4], *doubled])
    (said,) = refused(merge)
    assert "test_kernel.py::test_it[part2-case0] and 9 more are both in part 2 (part-2.jsonl) and in part 5" in said


def test_several_judgments_of_one_test_are_no_double(parts, merge):
    parts.rewrite(5, [*parts.records[4], *parts.records[4]])
    assert merge()[0] == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"version": "0.2.0"}, "pytest-attn's version differs: 0.1.0 in parts 1, 2 and 4 to 8; 0.1.0 and 0.2.0 in part 3"),
        ({"commit": "f" * 40}, "the commit differs: 0123456789 in parts 1, 2 and 4 to 8; ffffffffff in part 3"),
        ({"commit": "0123456789abcdef0123456789abcdef01234567+12ab34cd"}, "the commit differs: 0123456789 in parts 1, 2 and"),
        ({"commit": ""}, "the commit differs: 0123456789 in parts 1, 2 and 4 to 8; none in part 3"),
        (
            {"options": "--attn-seed=1"},
            "the choice of options differs: none in parts 1, 2 and 4 to 8; --attn-seed=1 in part 3",
        ),
        ({"python": "3.13.0"}, "Python's version differs: 3.12 in parts 1, 2 and 4 to 8; 3.13 in part 3"),
        (
            {"ended": {"collection": "d" * 12, "total": 3990}},
            "the parts are of different tests, so some may be in two parts or in none: 4,000 tests (cccccccccccc) in parts 1,"
            " 2 and 4 to 8; 3,990 tests (dddddddddddd) in part 3; the same -k, -m, backends",
        ),
        (
            {"ended": {"split": "6" * 12}},
            "the same tests were divided in different ways, so some are in two parts or in none: 555555555555 in parts 1, 2"
            " and 4 to 8; 666666666666 in part 3; give all parts the same --attn-shard-durations",
        ),
        ({"ended": {"device": "cpu"}}, "the device differs: NVIDIA H200 in parts 1, 2 and 4 to 8; cpu in part 3"),
        (
            {"ended": {"ran": 9}},
            "part 3 (part-3.jsonl) ran 9 of its 10 tests; was it stopped, or run with -x or --lf?; run it",
        ),
        ({"ended": {"ran": 9, "exit": 2}}, "part 3 (part-3.jsonl) ran 9 of its 10 tests; run it again"),
        ({"ended": {"exit": 3}}, "part 3 (part-3.jsonl) ended with pytest's exit code 3; its output says why"),
        ({"ended": {"uncollected": 1}}, "part 3 (part-3.jsonl) could not collect 1 file, so tests are missing"),
    ],
)
def test_a_part_of_another_run_or_not_whole(parts, merge, how, said):
    parts.rewrite(3, **how)
    assert refused(merge)[0].startswith(said)


def test_a_part_that_differs_in_many_ways_is_said_in_full(parts, merge):
    parts.rewrite(3, version="0.2.0", commit="f" * 40, ended={"ran": 9, "exit": 2})
    assert len(refused(merge)) == 4


def test_another_number_of_parts(parts, merge):
    write(parts.folder, 3, lines_of_part(3, 4, parts.records[2]))
    (said,) = refused(merge)[:1]
    assert said == (
        "these are parts of runs with different N: N = 8 in parts 1, 2 and 4 to 8; N = 4 in part 3;"
        " run all parts with the same"
    )


def test_a_part_that_collected_nothing(parts, merge):
    lines = lines_of_part(3, PARTS, [], ended={"total": 0, "uncollected": 1, "exit": 2})
    ended = json.loads(lines[-1])
    for name in ("collection", "split"):
        del ended["part"][name]
    write(parts.folder, 3, [lines[0], json.dumps(ended, separators=(",", ":"))])
    assert [said.partition("; ")[0] for said in refused(merge)] == [
        "part 3 (part-3.jsonl) ended with pytest's exit code 2",
        "part 3 (part-3.jsonl) could not collect 1 file, so tests are missing",
    ]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("torch", "2.99.0", "torch's version differs: "),
        ("name", "NVIDIA A100", "the GPU of some tests differs: NVIDIA H200 in parts 1, 2 and 4 to 8; NVIDIA A100"),
    ],
)
def test_another_torch_or_device(parts, merge, field, value, said):
    for number, records in enumerate(parts.records, 1):
        machine = {
            "name": "NVIDIA H200",
            "device": f"cuda:{number}",
            "kind": "cuda",
            "torch": "2.11.0",
            "pytest_attn": "0.1.0",
        }
        parts.rewrite(number, [changed(one, machine=machine | ({field: value} if number == 3 else {})) for one in records])
    (found,) = refused(merge)
    assert found.startswith(said)
    assert found.endswith(f"{value} in part 3")


def test_cpus_of_hosted_runners_may_be_of_several_models(parts, merge):
    for number, records in enumerate(parts.records, 1):
        machine = {"name": f"AMD EPYC {number}", "device": "cpu", "kind": "cpu", "torch": "2.11.0", "pytest_attn": "0.1.0"}
        parts.rewrite(number, [changed(one, machine=machine) for one in records])
    assert merge()[0] == 0


def test_another_library_of_a_backend(parts, merge):
    for number, records in enumerate(parts.records, 1):
        version = "2.8.0" if number == 3 else "2.7.4"
        known = [changed(one, version=version, tags={"backend": "flash2"}) for one in records]
        parts.rewrite(number, known)
    assert refused(merge) == ["the library of flash2 differs: 2.7.4 in parts 1, 2 and 4 to 8; 2.8.0 in part 3"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"{'schema': 1}", "part-3.jsonl, line 5: is not JSON ("),
        (b'{"schema":1,"question":"check"}', 'part-3.jsonl, line 5: has no "verdict", expected string'),
        (b'{"schema":99}', "part-3.jsonl, line 5: is of schema 99, this pytest-attn reads 1; install a newer one"),
        (b"\xff\xfe\x00", "part-3.jsonl, line 5: is not UTF-8"),
        (b"[1]", 'part-3.jsonl, line 5: has no "schema"'),
        (b'{"schema":1,"part":{"state":"ended"}}', "part-3.jsonl, line 5: is not the line of a part (KeyError('number'))"),
    ],
)
def test_a_damaged_line(parts, merge, damage, said):
    path = parts.folder / "part-3.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:4], damage, *lines[5:]]) + b"\n")
    (found,) = refused(merge)
    assert found.startswith(said)
    assert found.endswith("; run this part again")


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.999])
def test_a_part_that_was_killed(parts, merge, keep):
    text = parts.text(3)
    (parts.folder / "part-3.jsonl").write_text(text[: int(len(text) * keep)])
    found = refused(merge)
    assert any(said.startswith("part 3 (part-3.jsonl) did not end: it has records of ") for said in found)


def test_a_part_that_only_began_and_a_file_without_a_part(parts, merge):
    write(parts.folder, 3, lines_of_part(3, PARTS, [])[:1])
    write(parts.folder, 4, map(to_line, parts.records[3]))
    (parts.folder / "part-5.jsonl").write_text("")
    said = refused(merge)
    assert said[:2] == [
        f"part-{number}.jsonl does not say which part it is; pytest --attn-shard=I/N --attn-output=FILE.jsonl does"
        for number in (4, 5)
    ]
    assert said[2].startswith("parts 4 and 5 of 8 are missing; run them with pytest --attn-shard=4/8 and the options of the")
    assert said[3].startswith(
        "part 3 (part-3.jsonl) did not end: it has records of 0 tests, and no closing line; run it again"
    )


def test_an_end_without_its_beginning(parts, merge):
    (parts.folder / "part-3.jsonl").write_text(parts.text(3).partition("\n")[2])
    assert any("part 3 of 8 ends without having begun" in said for said in refused(merge))


def test_force_writes_what_there_is_and_still_exits_with_1(parts, merge):
    (parts.folder / "part-5.jsonl").write_text(parts.text(5) + "damaged\n")
    code, lines = merge(*(f"part-{number}.jsonl" for number in range(1, PARTS)), options=("--force",))
    assert code == 1
    assert lines[0] == "not whole: 7 parts, 70 tests, 70 records: written to all.jsonl"
    assert len(read_records("all.jsonl")) == 70


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("all.txt", "part-1.jsonl"), "OUT must end in .jsonl, .html or .md (not .support.md), got 'all.txt'"),
        (("all.support.md", "part-1.jsonl"), "OUT must end in .jsonl, .html or .md (not .support.md)"),
        (
            ("part-1.jsonl", "part-1.jsonl"),
            "part-1.jsonl is one of the input files: refusing to overwrite it; choose another OUT",
        ),
        (("all.jsonl", "part-1.jsonl", "./part-1.jsonl"), "part-1.jsonl is named more than once"),
        (("all.jsonl", "nowhere.jsonl"), "there is no nowhere.jsonl; pytest --attn-output=nowhere.jsonl writes it"),
        (("all.jsonl",), "the following arguments are required: FILE.jsonl"),
    ],
)
def test_what_cannot_be_merged_is_a_usage_error(parts, capsys, arguments, text):
    before = sorted(os.listdir())
    with pytest.raises(SystemExit) as exited:
        main(["merge", *arguments])
    assert exited.value.code == 2
    assert text in capsys.readouterr().err
    assert sorted(os.listdir()) == before


def test_a_file_that_cannot_be_written_is_left_as_it_was(parts, capsys):
    (parts.folder / "all.jsonl").mkdir()
    with pytest.raises(SystemExit) as exited:
        main(["merge", "all.jsonl", *(f"part-{number}.jsonl" for number in range(1, 9))])
    assert exited.value.code == 2
    assert "cannot write all.jsonl: is not a plain file" in capsys.readouterr().err


def test_records_are_read_without_the_lines_of_parts(parts):
    assert len(read_records("part-1.jsonl", "part-2.jsonl")) == 20


def test_8_files_of_500_cases_merge_in_5_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_parts(tmp_path, 8, 500)
    begun = time.process_time()  # of this process alone: others may keep the machine busy
    assert main(["merge", "all.jsonl", *(f"part-{number}.jsonl" for number in range(1, 9))]) == 0
    assert time.process_time() - begun < 5
    assert capsys.readouterr().out == "8 parts, 4,000 tests, 4,000 records: written to all.jsonl\n"


@pytest.mark.parametrize(
    ("found", "said"),
    [([3], "part 3"), ([1, 2], "parts 1 and 2"), ([1, 2, 3, 5], "parts 1 to 3 and 5"), ([9, 1, 4], "parts 1, 4 and 9")],
)
def test_numbers_in_words(found, said):
    assert numbers(found) == said
