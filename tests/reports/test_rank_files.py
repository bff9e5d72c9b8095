"""A rank as files: a module that a model can load, and JSON."""

import ast
import json

import pytest
from fakes.ranked import H200, PROCESSES, RECORDED, TUNED, checked, right, tables

from pytest_attn.reports.rank import rank
from pytest_attn.reports.rank_files import to_json, to_python
from pytest_attn.reports.rank_lines import rank_summary


def test_the_module_has_a_table_per_direction():
    records = right("a", 1e-3) + right("b", 1e-4, direction="backward", names=("dq",))
    records += right("c", 1e-4, direction="forward+backward", names=("dq",)) + right("d", 1e-3, workload="vit")
    found = tables(records)
    assert (found["FORWARD"], found["BACKWARD"], found["TRAINING"]) == (
        {"flux-L512": "a", "vit": "d"},
        {"flux-L512": "b"},
        {"flux-L512": "c"},
    )
    assert found["MACHINE"]["name"] == "NVIDIA H200"
    assert found["MACHINE"]["date"] == "2026-11-21T00:00:00+00:00"


NASTY = "it's \"\"\" a \\ 'name'\n{x} \u2028 \ud800 é}"


def test_the_module_is_valid_whatever_ids_contain():
    source = to_python(rank(right(NASTY, 1e-3, workload=NASTY, machine={**H200, "name": NASTY})))
    source.encode("ascii")
    assert "import" not in {type(node).__name__.lower() for node in ast.walk(ast.parse(source))}
    assert tables(right(NASTY, 1e-3, workload=NASTY))["FORWARD"] == {NASTY: NASTY}


def test_one_id_of_two_shapes_is_named_by_its_shapes():
    records = right("a", 1e-3, shape="b1-s128") + right("b", 1e-3, shape="b2-s128") + right("c", 1e-3, workload="vit")
    assert tables(records)["FORWARD"] == {"b1-s128": "a", "b2-s128": "b", "vit": "c"}


def test_of_several_machines_the_gpu_comes_first():
    cpu = {**H200, "name": "EPYC", "device": "cpu", "kind": "cpu"}
    found = tables(right("a", 1e-3, machine=cpu) + right("b", 1e-3))
    assert found["FORWARD"] == {"flux-L512": "b"}
    assert found["OTHER_MACHINES"][("EPYC", "cpu", "2.11.0")]["FORWARD"] == {"flux-L512": "a"}


def test_the_json_holds_everything():
    records = right("a", 1e-3, error=2e-3, **RECORDED) + right("b", 2e-3) + [checked("c", "skipped", reason="needs sm90")]
    content = json.loads(to_json(rank(records)))
    assert (content["schema"], content["kind"], content["date"]) == (1, "rank", "2026-11-21T00:00:00+00:00")
    assert content["machines"] == [H200]
    assert content["versions"] == {"a": "1.0", "b": "1.0", "c": "1.0"}
    (line,) = content["lines"]
    assert line["exact"]["chosen"] == "a"
    assert line["exact"]["ahead"] == pytest.approx(2)
    assert [one["name"] for one in line["exact"]["ranked"]] == ["a", "b"]
    assert line["exact"]["ranked"][0]["processes"] == PROCESSES
    assert line["excluded"] == [{"name": "c", "why": "skipped", "reason": "needs sm90"}]
    assert json.loads(to_json(rank(TUNED, "mine")))["lines"][0]["exact"]["gain"] == pytest.approx(2)


def test_a_rival_whose_time_was_disturbed_is_named():
    ranking = rank([*right("slow", 2e-6), *right("quick", 1e-6, latency={"disturbances": ["hot"]})])
    said = [text for text, _ in rank_summary(ranking, verbose=False)]
    assert "rank: 1 line leaves out what may be faster, as its time was disturbed: quick; run again" in said
    assert "forward: not compared, as disturbed: quick" in to_python(ranking)
    hostile = rank([*right("slow", 2e-6), *right("a\nimport os", 1e-6, latency={"disturbances": ["hot"]})])
    assert not [node for node in ast.walk(ast.parse(to_python(hostile))) if isinstance(node, ast.Import)]
    settled = rank([*right("slow", 2e-6), *right("quick", 1e-6)])
    assert not [text for text, _ in rank_summary(settled, verbose=False) if "disturbed" in text]
    assert "disturbed" not in to_python(settled)
