"""Records of another hand: read, and every report made of them, or refused in one line that says where."""

import json
import random
from typing import get_type_hints

import pytest
from fakes.records import BACKENDS, check, profile_of, timing, workloads
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATED, mutated, read_or_refused, require_one_judgment

from pytest_attn.reports.html.page import payload
from pytest_attn.reports.latency_output import latency_summary
from pytest_attn.reports.markdown import markdown_summary, support_page, workflow_commands
from pytest_attn.reports.merging import problems
from pytest_attn.reports.records import fields, line_description, read_line, to_line
from pytest_attn.reports.runs import CLOSING_LINE, RunFacts, read_runs, to_run_line
from pytest_attn.reports.terminal import profile_tables, summary

DRAW, FLUX = random.Random(1), next(workloads(1))
PROFILE = profile_of(FLUX, BACKENDS[0], "forward")
CALL = {
    "module": "layer.1",
    "function": "sdpa",
    "kernel": None,
    "workload": "w",
    "passed": False,
    "tensor": "out",
    "z_element": 9.0,
    "z_row": 1.0,
    "z_head": 1.0,
}
#: of the fields that guests add, those that there are
OF_CALLS = {"calls": [CALL], "ratios": {"loss": 1.0, "out": 2.0}} if "calls" in fields() else {}
FATE = {"name": "m", "kind": "k", "summary": "s", "condition": "", "killed": False, "found_with": ""}
OF_MUTANTS = {"mutant": FATE} if "mutant" in fields() else {}
RECORDS = [
    check("mismatch", FLUX, BACKENDS[0], "forward+backward", DRAW, reason="off", profiles=[PROFILE],
          explanation=[{"label": "where", "text": "all"}], **OF_CALLS),
    check("passed", FLUX, BACKENDS[1], "forward", DRAW, sampled={"rows": [3, 40]}, is_sampled=True, untested=["softcap"],
          **OF_MUTANTS),
    timing("regressed", FLUX, BACKENDS[0], "forward", DRAW, slower=1.1, reason="slower", latency={"direction": "forward"}),
]  # fmt: skip


def reports(record):
    """Make everything that is made of records."""
    records = [record, *map(read_line, map(to_line, RECORDS), ["known"] * 3)]
    list(summary(records, verbose=True))
    list(latency_summary([r for r in records if r["latency"] is not None], True, 80))
    list(profile_tables(records, 80))
    list(workflow_commands(records))
    markdown_summary(records)
    support_page(records, {}, "today")
    json.dumps(payload(records), allow_nan=False)


def test_what_is_whole_makes_every_report():
    for record in RECORDS:
        reports(read_line(to_line(record), "whole"))


DAMAGES = {
    "machine": ({"machine": {"name": 3}}, "machine.name: found 3, expected string"),
    "explanation": ({"explanation": [{"label": "x"}]}, r"explanation\[0\].text: found nothing, expected string"),
    "tensors": ({"tensors": [{"name": "out"}]}, r"tensors\[0\].distribution: found nothing"),
    "z": ({"z_element": "many"}, 'z_element: found "many", expected a number'),
    "interval": (
        {"latency": {"p50": 1.0, "interval": [1, 2], "mode": "", "l2": "", "calls": 1}},
        "latency.interval: found an array, expected array of at least 3",
    ),
    "sampled": ({"sampled": {"rows": 3}}, "sampled.rows: found 3, expected array"),
}


@pytest.mark.parametrize(("changes", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_wrong_part_of_a_record_is_named_with_file_and_line(changes, words):
    line = json.dumps({**json.loads(to_line(RECORDS[0])), **changes})
    with pytest.raises(ValueError, match=rf"run.jsonl, line 3: {words}.*; is it a line") as refused:
        read_line(line, "run.jsonl, line 3")
    assert "\n" not in str(refused.value)


VALUES_OF = {int: 0, str: "x", frozenset[str]: frozenset(("a[b]", "c")), dict[str, str]: {"a.py": "0"}}
FACTS = {name: VALUES_OF[kind] for name, kind in get_type_hints(RunFacts).items()}


@MUTATED
@given(st.data())
def test_a_mutated_line_makes_every_report_or_is_refused_in_one_line(data):
    text = data.draw(mutated(to_line(data.draw(st.sampled_from(RECORDS)), with_samples=True)))
    require_one_judgment(text, line_description())
    record, refused = read_or_refused(read_line, text, "run.jsonl, line 1")
    assert not refused or refused.startswith("run.jsonl, line 1: ")
    if record is not None:
        reports(record)


@MUTATED
@given(st.data())
def test_a_mutated_closing_line_is_read_or_is_a_damage_of_its_run(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "run.jsonl"
    text = data.draw(mutated(to_run_line(FACTS)))
    require_one_judgment(text, CLOSING_LINE)
    path.write_text(f"{to_line(RECORDS[0])}\n{text}\n", encoding="utf-8", errors="surrogatepass")
    first, *others = read_runs(str(path))
    damaged = [damage for run in (first, *others) for damage in run.damaged]
    assert first.facts is not None or damaged
    for damage in damaged:
        assert damage.startswith(f"{path}, line ")
        assert "\n" not in damage
    assert problems([first, *others])
