"""The lines of a .jsonl file of --attn-output: strict JSON, one per judgment, read back as they were."""

import json
import math

import pytest

from pytest_attn.reports.records import (
    SCHEMA,
    Record,
    RecordWriter,
    changed,
    fields,
    latency_of,
    new_record,
    read_records,
    to_line,
    verdict_of,
)
from pytest_attn.reports.verdict import Cause, Verdict

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
TAKEN = {"interval": [4e-4, 4e-4, 0.95], "mode": "graph", "l2": "cold", "calls": 1}
TIMED = {**RECORD, "question": "latency", "verdict": "passed", "latency": {"p50": 4e-4, **TAKEN, "samples": [4e-4, -math.inf]}}


def written(tmp_path, *records, **options):
    path = tmp_path / "run.jsonl"
    writer = RecordWriter(str(path), **options)
    writer.write([])
    for record in records:
        writer.write([record])
    return path


def test_a_line_is_strict_json_in_the_order_of_the_schema():
    line = to_line(RECORD)
    parsed = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert parsed["schema"] == SCHEMA
    assert parsed["z_element"] == "Infinity"
    assert list(parsed) == [name for name in fields() if name in parsed]
    assert "\n" not in to_line({**RECORD, "reason": "two\nlines"})


def test_records_come_back_as_they_were(tmp_path):
    (record,) = read_records(written(tmp_path, RECORD))
    assert math.isnan(record.pop("z_row"))
    assert record == {k: v for k, v in new_record(**RECORD).items() if k != "z_row"}
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
    [
        ('{"a": 1}', 'has no "schema"'),
        ("[]", 'has no "schema"'),
        (f'{{"schema": {SCHEMA + 1}}}', "install a newer one"),
        ('{"schema": 1}', "question: found nothing, expected string"),
        ("[" * 200_000, "is not JSON"),
        ("\0" * 50, "is not JSON"),
    ],
    ids=["fields", "list", "newer", "bare", "nested", "zeros"],
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


# -- one definition ------------------------------------------------------------------------------------------------------


def test_the_table_of_fields_is_the_definition_of_a_record():
    own = list(Record.__annotations__)
    assert list(fields())[: len(own)] == own
    kinds = {name: field.kind for name, field in fields().items()}
    assert (kinds["schema"], kinds["z_row"], kinds["is_sampled"]) == ("integer", "number or null", "boolean")
    assert (kinds["aliases"], kinds["tensors"], kinds["latency"]) == ("array of strings", "array of objects", "object or null")
    assert all(field.meaning for field in fields().values())


def test_a_new_record_has_every_field_and_says_nothing():
    record = new_record()
    assert list(record) == list(fields())
    assert record.pop("schema") == SCHEMA
    assert not [name for name, value in record.items() if value]
    assert json.loads(to_line(record))["z_row"] is None


def test_a_new_record_is_read_back_as_it_was(tmp_path):
    record = {**new_record(**RECORD, tags={"family": "own"}), "z_row": 1.5, "z_element": 2.5}
    (read,) = read_records(written(tmp_path, record))
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()} == read


def test_records_share_nothing_that_one_of_them_could_change():
    first, second = new_record(), new_record()
    first["tags"]["family"] = "own"
    assert second["tags"] == new_record()["tags"] == {}


def test_a_field_that_there_is_not_is_refused():
    with pytest.raises(TypeError, match="a record has no field subjet, verdit"):
        new_record(verdit="passed", subjet="mine", test="a")
    with pytest.raises(TypeError, match="a record has no field verdit"):
        changed(new_record(), verdit="passed")


def test_a_changed_record_is_another():
    record = new_record(verdict="recorded", reason="")
    again = changed(record, verdict="unrecorded", reason="hot")
    assert (record["verdict"], again["verdict"], again["reason"]) == ("recorded", "unrecorded", "hot")


def test_a_record_of_a_check_says_nothing_of_a_time():
    assert latency_of(new_record(**RECORD)) == {}
    assert latency_of(new_record(**TIMED))["p50"] == 4e-4


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"verdict": "passed"}, Verdict.PASSED),
        ({"verdict": "passed", "is_approximate": True}, Verdict.APPROXIMATE),
        ({"verdict": "passed", "cause": Cause.DEFECT_NOT_SHOWN.value}, Verdict.UNEXPECTED),
        ({"verdict": "passed", "question": "latency", "is_approximate": True}, Verdict.FAST),
        ({"verdict": "mismatch", "is_approximate": True}, Verdict.MISMATCH),
        ({"verdict": "of tomorrow"}, None),
    ],
)
def test_what_json_calls_passed_is_told_apart(changes, verdict):
    assert verdict_of(new_record(**{"question": "check", **changes})) is verdict


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": 7}, "workload: found 7, expected string"),
        ({"tensors": "all"}, 'tensors: found "all", expected array'),
        ({"latency": []}, "latency: found an array, expected object or null"),
        ({"question": None}, "question: found null, expected string"),
        (
            {"latency": {"p50": -1.0, "interval": [1, 1, 1], "mode": "", "l2": "", "calls": 1}},
            "latency.p50: found -1.0, expected seconds, more than 0",
        ),
        (
            {"latency": {"decision": {"change": 0, "runs": [0], "detectable": 0}}},
            "latency.decision.runs[0]: found 0, expected",
        ),
        ({"latency": {"anchors": {"memory": -1}}}, "latency.anchors.memory: found -1, expected number from 0"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_place(tmp_path, changes, words):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"schema": SCHEMA, **json.loads(to_line(RECORD)), **changes}) + "\n")
    with pytest.raises(ValueError, match=r"is it a line of a \.jsonl file that --attn-output wrote") as error:
        read_records(path)
    assert f"{path}, line 1: {words}" in str(error.value)
