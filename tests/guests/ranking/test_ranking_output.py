"""What a ranking says on the terminal, and writes: JSON, and a module of tables."""

import ast
import json

import pytest
from fakes.ranked import H200, PROCESSES, RECORDED, TUNED, checked, right, tables, text, timed
from fakes.records import run_of
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATED, mutated, read_or_refused

from pytest_attn.__main__ import main
from pytest_attn.guests.ranking.ranking import rank
from pytest_attn.guests.ranking.ranking_output import WIDTH, rank_summary, to_json, to_python
from pytest_attn.reports.records import RecordWriter, read_line, read_records, to_line


def test_one_line_says_it_all():
    records = (
        right("a", 1.0e-3) + right("b", 1.002e-3) + right("c", 1.5e-3, error=1e-4) + [checked("d", "mismatch", reason="z 9")]
    )
    header, row, excluded, *closing = text(records)
    assert header.split() == ["workload", "fastest", "p50", "+-", "ahead", "ties", "front"]
    assert row.split() == ["flux-L512", "fwd", "a", "1.0000", "ms", "0.1%", "x1.50", "b", "c"]
    assert excluded == "wrong         d: z 9"
    assert closing[0] == "rank: 1 workload and direction ranked; fastest: a 1"
    assert closing[1] == "rank: ties do not differ from the fastest (95 %); -v shows every time and error"


def test_lines_fit_eighty_columns():
    many = [
        r
        for n in range(30)
        for r in right(f"a_backend_with_a_long_name_{n}", 1e-3, workload="b2-h32-kv8-q4096-k8192-d128-causal")
    ]
    many += [
        checked(f"refused_{n}", "skipped", reason="because " * 20, workload="b2-h32-kv8-q4096-k8192-d128-causal") for n in "ab"
    ]
    lines = text(many)
    assert max(map(len, lines)) <= WIDTH
    assert any("+29" in line for line in lines)
    assert any("refused_a, refused_b" in line for line in lines)


def test_verbose_shows_every_candidate():
    records = right("a", 1e-3) + right("b", 2e-3, error=1e-4) + [checked("c", "skipped", reason="needs sm90")]
    shown = text(records, verbose=True)
    assert shown[0] == "flux-L512 forward (cold)"
    assert shown[2].split() == ["fastest", "a", "1.0000", "ms", "0.1%", "-", "1.0e-03", "1.0", "MiB", "front"]
    assert shown[3].split() == ["slower", "b", "2.0000", "ms", "0.1%", "x2.00", "1.0e-04", "1.0", "MiB", "front"]
    assert shown[4] == "  skipped: c: needs sm90"


def test_nothing_timed_says_what_to_type():
    assert text([checked("a")]) == [
        "rank: nothing was timed; call attn.measure(attn_backend) in a test, or type"
        " pytest --pyargs pytest_attn.suite.test_latency --attn-rank"
    ]
    assert text([checked("a"), timed("a", 0, "untimed", reason="2 workers share cpu")])[0] == (
        "rank: nothing was timed: 2 workers share cpu"
    )


def test_nothing_to_rank_says_why():
    lines = text(right("a", 1e-3, latency={"disturbances": ["hot"]}))
    assert lines == ["rank: nothing can be ranked: 1 inconclusive", "inconclusive  a: disturbed: hot"]


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


def test_the_command_prints_the_rank_of_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    records = run_of(60)
    for name, part in (("one.jsonl", records[:30]), ("two.jsonl", records[30:])):
        RecordWriter(name).write(part)
    assert main(["rank", "one.jsonl", "two.jsonl"]) == 0
    lines = [words for words, _ in rank_summary(rank(read_records("one.jsonl", "two.jsonl")), verbose=False)]
    assert len(lines) > 3
    assert capsys.readouterr().out.splitlines() == lines
    with pytest.raises(SystemExit, match="2"):
        main(["rank", "nowhere.jsonl"])
    assert "rank: error: there is no nowhere.jsonl" in capsys.readouterr().err


KNOWN = [*right("slow", 2e-6), *right("quick", 1e-6)]


@MUTATED
@given(st.data())
def test_a_mutated_line_is_ranked_or_refused(data):
    text = data.draw(mutated(to_line(data.draw(st.sampled_from(KNOWN)), with_samples=True)))
    record, _ = read_or_refused(read_line, text, "run.jsonl, line 1")
    if record is not None:
        list(rank_summary(rank([record, *KNOWN]), verbose=True, width=80))
