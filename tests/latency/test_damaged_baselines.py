"""Baselines of another hand: read with the same meaning, or refused in one line; and two writers that lose nothing."""

import json
import math
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latency.test_baseline import ANCHORS, H200, case, find
from mutations import MUTATED, mutated, require_one_judgment

from pytest_attn.latency.baseline_file import FILE, BaselineError, read
from pytest_attn.latency.regression import DeviceBaselines


@pytest.fixture
def file(tmp_path):
    found = find(tmp_path, H200, ANCHORS)
    found.write({"a | f | forward | cold": case(), "b": case(2e-3, z=None, memory=None)})
    return found.path


def one(field, value):
    """Return what puts a value into a field of the first case."""

    def change(data):
        data["cases"]["b"][field] = value
        return json.dumps(data)

    return change


def head(field, value):
    return lambda data: json.dumps({**data, field: value})


DAMAGES = {
    "half a file": (lambda data: json.dumps(data)[:99], ""),
    "no anchors": (one("anchors_ns", {}), "cases.b.anchors_ns: found none, expected compute, memory"),
    "an anchor too few": (
        one("anchors_ns", {"compute": [1.0] * 10}),
        "cases.b.anchors_ns: found compute, expected compute, mem",
    ),
    "NaN": (one("flops", math.nan), "has NaN, expected a finite number"),
    "infinite": (one("p50_ns", [math.inf] * 10), "has Infinity, expected a finite number"),
    "large": (lambda data: json.dumps(data).replace("1000000000000", "9" * 400), "has 9{40}, expected a finite number of at"),
    "1e999": (lambda data: json.dumps(data).replace("1000000000000", "1e999"), "has 1e999, expected a finite number"),
    "flops in words": (one("flops", "many"), 'cases.b.flops: found "many", expected integer from 0'),
    "host": (one("host_ns", [-1] * 10), r"cases.b.host_ns\[0\]: found -1, expected number from 0"),
    "host too few": (one("host_ns", [1] * 9), "cases.b.host_ns: found 9 times, expected 10"),
    "z": (one("z", "abc"), 'cases.b.z: found "abc", expected array or null'),
    "z of two": (one("z", [1, 2]), "cases.b.z: found an array, expected array or null of at least 3 of at most 3"),
    "history": (one("history", [[1, 2, 3]]), r"cases.b.history\[0\]\[0\]: found 1, expected a date"),
    "numbers of history": (one("history", [1]), r"cases.b.history\[0\]: found 1, expected array"),
    "true memory": (one("memory", True), "cases.b.memory: found true, expected integer or null"),
    "protocol 0": (one("protocol", 0), "cases.b.protocol: found 0, expected integer from 1"),
    "unknown field": (one("p95_ns", 1), "cases.b.p95_ns: found a field that is unknown"),
    "schema 0": (head("schema", 0), "schema: found 0, expected integer from 1 to 1"),
    "schema -1": (head("schema", -1), "schema: found -1"),
    "schema true": (head("schema", True), "schema: found true"),
    "schema in words": (head("schema", "1"), 'schema: found "1"'),
    "no machine": (head("machine", {}), "machine.kind: found nothing, expected string"),
    "no anchors at all": (head("anchors", {}), "anchors: found an object, expected object"),
    "deep": (lambda data: '{"schema": 1, "cases": ' + "[" * 100_000, "has more than 32 levels"),
    "rather deep": (lambda data: json.dumps({**data, "cases": json.loads("[" * 40 + "]" * 40)}), "has more than 32 levels"),
    "twice": (
        lambda data: json.dumps(data).replace('"gpu":', '"date": "2026-11-22", "gpu":'),
        'has "date" twice in one object',
    ),
    "a conflict": (
        lambda data: json.dumps(data, indent=1).replace(' "cases"', "<<<<<<< ours"),
        "line 20: has a merge conflict",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damage_is_told_in_one_line_with_its_place_and_what_was_expected(file, damage, words):
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(BaselineError, match=rf"nvidia-h200.json: is damaged \(.*{words}.*\); restore it") as refused:
        read(file)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700
    assert DeviceBaselines.read(file.parent, H200, "cuda").problem == str(refused.value)


SMALL = {"a": case(), "b": case(2e-3, z=None, memory=None)}


@MUTATED
@given(st.data())
def test_a_mutated_file_is_read_or_refused_in_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "mutated"
    path = folder / "nvidia-h200.json"
    path.unlink(missing_ok=True)
    find(folder, H200, ANCHORS).write(SMALL)
    text = data.draw(mutated(path.read_text()))
    require_one_judgment(text, FILE)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    before = path.read_bytes()
    found = DeviceBaselines.read(folder, H200, "cuda")
    assert "\n" not in found.problem
    if found.problem:
        assert str(folder) in found.problem
    else:  # whatever it says is finite, and what is written of it says the same
        for one_case in found.file.cases.values():
            fitted = one_case.fit()
            assert math.isfinite(fitted.variance)
            assert all(map(math.isfinite, fitted.sensitivity.values()))
        path.unlink()
        find(folder, H200, found.file.anchors).write({})
        found.file.write({})
        assert read(path).cases == found.file.cases
        return
    assert path.read_bytes() == before


def test_a_recording_is_not_lost_with_a_file_that_was_damaged_meanwhile(file):
    found = find(file.parent, H200, ANCHORS)
    file.write_text("<<<<<<< ours")
    with pytest.raises(BaselineError, match=r"merge conflict.*; what was recorded now is in .*recorded-.*json"):
        found.write({"c": case()})
    assert file.read_text() == "<<<<<<< ours"
    (kept,) = (path for path in file.parent.iterdir() if path != file)
    assert read(kept).cases.keys() == {"c"}


def test_what_could_not_be_read_again_is_not_written_and_all_else_is(file):
    found = find(file.parent, H200, ANCHORS)
    with pytest.raises(
        BaselineError, match=r"written but for what cannot be: cases.c.host_ns\[9\]: found NaN, expected number"
    ):
        found.write({"c": case(launch=(1e-5,) * 9 + (math.nan,)), "d": case()})
    with pytest.raises(BaselineError, match=r"cases.c.anchors_ns: found compute, expected compute, memory"):
        found.write({"c": case(anchors={"compute": (1e-4,) * 10})})
    assert set(read(file).cases) == {"a | f | forward | cold", "b", "d"}


def _write(folder, name):
    for number in range(40):
        find(folder, H200, ANCHORS).write({f"{name}{number}": case()})


def test_two_processes_that_write_at_once_lose_none_of_their_cases(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, name)) for name in "ab"]
    for one_writer in writers:
        one_writer.start()
    for one_writer in writers:
        one_writer.join()
        assert one_writer.exitcode == 0
    assert len(read(tmp_path / "nvidia-h200.json").cases) == 80
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-h200.json"]
