"""`python -m pytest_attn history`: runs over time on one page, what differs between neighbours, and nothing else, marked."""

import random
import re

import pytest
from fakes.records import GPU, HOSTILE, record, timing, workloads
from fakes.runs import lines_of_run

from pytest_attn.__main__ import main

ON = next(workloads(1))
BACKEND = ("mine", 1.0, "torch", "2.11")


def timed(p50, day, runs=True, machine=GPU, driver="570.1", **more):
    one = timing("no baseline", ON, BACKEND, "forward", random.Random(0), machine=machine)
    draw = random.Random(day)
    decision = {"change": 0.0, "runs": [p50 * draw.gauss(1, 0.001) for _ in range(8)], "detectable": 0.01}
    latency = {"p50": p50, "interval": [p50 * 0.99, p50 * 1.01, 0.95], "decision": decision, "anchors": {}}
    latency |= {"disturbances": [], "conditions": {"driver": driver}}
    return {**one, "date": f"2026-11-{day:02}T02:00:00+00:00", "latency": {**one["latency"], **latency}, **more}


def checked(day, verdict="passed", z=2.0, **more):
    one = record("check", verdict, ON, BACKEND, "forward", z_element=z, z_row=1.0, z_head=0.5)
    return {**one, "date": f"2026-11-{day:02}T02:00:00+00:00", **more}


@pytest.fixture
def page(tmp_path, monkeypatch, capsys):
    """Return a function of nights, each some records, that returns the page and what is said."""
    monkeypatch.chdir(tmp_path)

    def written(*nights):
        names = [f"{9 - number}.jsonl" for number in range(len(nights))]
        for name, found in zip(names, nights, strict=True):
            lines = lines_of_run(found, [one["test"] for one in found], commit=f"{name[0]}" * 40)
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        assert main(["history", *names, "-o", "page.html"]) == 0
        return (tmp_path / "page.html").read_text(encoding="utf-8"), capsys.readouterr().out

    return written


def marks(text):
    """Return the colors of the points of a chart."""
    return re.findall(r"<circle[^>]*var\(--(\w+)\)", text)


def test_unchanged_nights_are_marked_nowhere(page):
    text, said = page(*[[checked(day), timed(1e-3, day)] for day in range(1, 8)])
    assert said == "7 runs, 2 cases, 0 differences between neighbours: written to page.html\n"
    assert marks(text) == ["plain"] * 7
    assert len(re.findall(r" ms \(\+\d+\.\d% would show\)<", text)) == 6
    assert "<script" not in text
    assert "stroke-dasharray" not in text
    assert re.findall(r"(?:src|href)=\"(?!data:)", text) == []


def test_a_slower_and_a_faster_night_are_marked_where_they_begin(page):
    text, said = page(*[[timed(p50, day)] for day, p50 in enumerate((1e-3, 1e-3, 1.1e-3, 1.1e-3, 1e-3), 1)])
    assert marks(text) == ["plain", "plain", "bad", "plain", "good"]
    assert "2 differences" in said


def test_machines_by_turns_hide_no_difference(page):
    other = {**GPU, "name": "NVIDIA B200"}
    text, _ = page([timed(1e-3, 1)], [timed(5e-4, 2, machine=other)], [timed(1.1e-3, 3)], [timed(5e-4, 4, machine=other)])
    assert marks(text) == ["plain", "plain", "bad", "plain"]


def test_a_night_without_the_case_hides_no_difference(page):
    text, _ = page([timed(1e-3, 1)], [checked(2)], [timed(1.1e-3, 3)])
    assert marks(text) == ["plain", "bad"]


def test_versions_drivers_and_verdicts_are_marked_where_they_change(page):
    newer = {**GPU, "torch": "2.12.0"}
    text, _ = page(
        [checked(1), timed(1e-3, 1)],
        [checked(2, "mismatch", 33.0), timed(1e-3, 2, driver="580.2")],
        [checked(3, machine=newer), timed(1e-3, 3, machine=newer, driver="580.2")],
    )
    assert text.count("stroke-dasharray") == 2
    assert "driver 570.1 -&gt; 580.2" in text
    assert "torch 2.11.0+cu130 -&gt; 2.12.0" in text
    assert '<td class="">verdict</td>' in text
    assert re.search(r'<td class="bad">. \w+ z 33.00 \*</td>', text)


def test_nights_are_in_the_order_of_their_dates_with_their_commits(page):
    text, _ = page([checked(2)], [checked(1)])
    assert text.index("2026-11-01 02:00 8888888888") < text.index("2026-11-02 02:00 9999999999")


def test_no_text_of_a_record_becomes_part_of_the_page(page):
    text, _ = page(*[[timed(1e-3, day, subject=HOSTILE, workload=HOSTILE)] for day in (1, 2)])
    assert "<img" not in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["gone.jsonl"], "there is no gone.jsonl"),
        (["empty.jsonl"], "empty.jsonl has no judgments; "),
        (["empty.jsonl", "-o", "empty.jsonl"], "-o must end in .html and be none of the input files, got 'empty.jsonl'"),
    ],
)
def test_what_is_no_run_is_refused_in_a_line(tmp_path, monkeypatch, capsys, files, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        main(["history", *files])
    assert ended.value.code == 2
    assert f"history: error: {said}" in capsys.readouterr().err
