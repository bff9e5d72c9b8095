"""The lines of --attn-json: strict JSON, one per judgement, read back as they were."""

import json
import math

import pytest

from pytest_attn.reports.records import FIELDS, SCHEMA, RecordWriter, read_records, to_line

RECORD = {
    "date": "2026-11-21T20:00:00+00:00",
    "test": "tests/test_mine.py::test_right[flux-L512-mine]",
    "line": 7,
    "question": "check",
    "verdict": "mismatch",
    "reason": "NaN",
    "workload": "flux-L512",
    "subject": "mine",
    "z_element": math.inf,
    "z_row": math.nan,
    "z_head": 1.25,
    "latency": None,
}
TIMED = {**RECORD, "question": "latency", "verdict": "passed", "latency": {"p50": 4e-4, "samples": [4e-4, -math.inf]}}


def written(tmp_path, *records, **options):
    path = tmp_path / "run.jsonl"
    writer = RecordWriter(str(path), **options)
    for record in records:
        writer.write([record])
    writer.close()
    return path


def test_a_line_is_strict_json_in_the_order_of_the_schema():
    line = to_line(RECORD)
    parsed = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert parsed["schema"] == SCHEMA
    assert parsed["z_element"] == "Infinity"
    assert list(parsed) == [name for name, _, _ in FIELDS if name in parsed]
    assert "\n" not in to_line({**RECORD, "reason": "two\nlines"})


def test_records_come_back_as_they_were(tmp_path):
    (record,) = read_records(written(tmp_path, RECORD))
    assert math.isnan(record.pop("z_row"))
    assert record == {"schema": SCHEMA, **{k: v for k, v in RECORD.items() if k != "z_row"}}
    assert record["reason"] == "NaN"  # a text stays one


def test_samples_are_written_on_request(tmp_path):
    assert "samples" not in read_records(written(tmp_path, TIMED))[0]["latency"]
    assert read_records(written(tmp_path, TIMED, with_samples=True))[0]["latency"]["samples"] == [4e-4, -math.inf]


def test_lines_are_there_before_the_run_ends(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("an earlier run\n")
    writer = RecordWriter(str(path))
    assert path.read_text() == "an earlier run\n"  # until there is something to put in its place
    writer.write([RECORD, TIMED])
    assert len(read_records(path)) == 2
    writer.close()


def test_a_run_without_records_leaves_an_empty_file(tmp_path):
    assert read_records(written(tmp_path)) == []


def test_a_line_that_was_cut_short_is_left_out_and_any_other_is_named(tmp_path):
    path = written(tmp_path, RECORD)
    with path.open("a") as file:
        file.write(to_line(RECORD)[:40])
    assert len(read_records(path)) == 1
    path.write_text(to_line(RECORD)[:40] + "\n" + to_line(RECORD) + "\n")
    with pytest.raises(ValueError, match=r"run.jsonl, line 1: is not JSON"):
        read_records(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"a": 1}', 'has no "schema"'), ("[]", 'has no "schema"'), (f'{{"schema": {SCHEMA + 1}}}', "install a newer one")],
)
def test_what_is_no_record_is_named_with_its_place(tmp_path, line, words):
    path = tmp_path / "other.jsonl"
    path.write_text(f"{to_line(RECORD)}\n{line}\n")
    with pytest.raises(ValueError, match=words) as error:
        read_records(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


def test_files_of_several_runs_are_read_one_after_the_other(tmp_path):
    path = written(tmp_path, RECORD, TIMED)
    assert [r["question"] for r in read_records(path, path)] == ["check", "latency"] * 2
