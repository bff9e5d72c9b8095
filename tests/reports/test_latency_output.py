"""The terminal's words for latencies."""

import pytest

from pytest_attn.reports.latency_output import is_notable, latency_summary
from pytest_attn.reports.lines import duration_in_column
from pytest_attn.reports.records import new_record

RECORD = '--attn-update-baselines "first recording"'


def record(verdict="passed", reason="", subject="sdpa", p50=1e-3, decision=None, cause="", remedy="", **latency):
    decision = {"change": 0.01, "detectable": 0.021, "is_faster": False, **(decision or {})}
    timed = {"direction": "forward"}
    if p50:
        timed |= {"p50": p50, "interval": [p50 * 0.99, p50 * 1.01, 0.95], "mode": "events", "calls": 1, "l2": "cold"}
        timed |= {"decision": decision, **latency}
    return new_record(
        question="latency",
        verdict=verdict,
        reason=reason,
        cause=cause,
        remedy=remedy,
        subject=subject,
        workload="flux-L512",
        latency=timed,
    )


def lines(records, verbose=False):
    return [text for text, _ in latency_summary(records, verbose)]


def test_a_row_per_case_and_one_closing_sentence():
    header, row, closing = lines([record()])
    assert header.split() == ["p50", "+-", "change", "detects", "verdict", "backend", "workload", "direction", "mode"]
    assert row.split() == [
        "1.0000",
        "ms",
        "1.0%",
        "+1.0%",
        "2.1%",
        "passed",
        "sdpa",
        "flux-L512",
        "forward",
        "events,",
        "1",
        "call",
        "a",
        "sample,",
        "L2",
        "cold",
    ]
    assert closing == "latency: 1 as fast as recorded"


@pytest.mark.parametrize(("detectable", "shown"), [(0.021, "2.1%"), (3.0, "300.0%"), (729.0, ">x10")])
def test_a_slowdown_that_a_crowd_hides_is_no_long_number(detectable, shown):
    assert lines([record(decision={"detectable": detectable})])[1].split()[4] == shown


def test_of_many_rows_the_notable_are_shown():
    records = [*(record(subject=f"b{i}") for i in range(60)), record("regressed", "slower", subject="slow")]
    shown = lines(records)
    assert "slow" in shown[1]
    assert "... 21 more with -v" in shown
    assert len(lines(records, verbose=True)) == 63


def test_reasons_are_said_once_each():
    records = [record("no baseline", "none recorded", subject=f"b{i}", remedy=RECORD) for i in range(3)]
    assert "no baseline   3 cases: none recorded" in lines(records)
    assert lines(records)[-1] == 'latency: 3 without a baseline; record with --attn-update-baselines "first recording"'


def test_untimed_cases_have_no_row():
    assert lines([record("untimed", "2 workers share the cpu", p50=None)]) == [
        "untimed       sdpa on flux-L512: 2 workers share the cpu",
        "latency: 1 not timed",
    ]


def test_what_became_faster_is_to_be_kept():
    closing = lines([record(decision={"is_faster": True})])[-1]
    assert closing.endswith('; 1 faster, keep it with --attn-update-baselines "faster"')


def test_a_cpu_that_may_have_been_shared_is_told_what_decides_there():
    recorded = record("inconclusive", threads=1, baseline={"p50": [1e-3], "date": "", "reason": "", "history": []})
    assert lines([recorded])[-1].endswith("; compare with another revision, on this machine, here and now: --attn-against=REV")
    assert lines([record("inconclusive")])[-1] == "latency: 1 inconclusive"


def test_the_p50_is_that_of_the_processes_that_decided():
    _, row, _ = lines([record(decision={"runs": [1.5e-3, 1.4e-3, 1.6e-3]})])
    assert row.split()[:2] == ["1.5000", "ms"]


@pytest.mark.parametrize("remedy", ["", RECORD])
def test_recording_is_advised_where_it_mends(remedy):
    assert ("record with" in lines([record("no baseline", "why", remedy=remedy)])[-1]) is bool(remedy)


def test_cupti_has_a_column_where_it_was_asked():
    header, row, _ = lines([record(cupti=0.99e-3)])
    assert header.split()[-1] == "CUPTI"
    assert row.endswith("0.9900 ms")


def test_colors_follow_verdicts():
    found = list(latency_summary([record("regressed", "slower"), record()], verbose=False))
    assert found[1][1] == {"red": True}
    assert found[2][1] == {}
    assert found[-1][1] == {"red": True}


@pytest.mark.parametrize(("seconds", "text"), [(6.81e-6, "6.81 us"), (3.98e-4, "0.3980 ms"), (0.0149, "14.90 ms")])
def test_units(seconds, text):
    assert duration_in_column(seconds) == text


@pytest.mark.parametrize(
    ("width", "gone"), [(200, []), (80, ["mode"]), (72, ["mode", "detects"]), (40, ["mode", "detects", "direction", "+-"])]
)
def test_a_narrow_terminal_gets_the_columns_that_it_has_room_for(width, gone):
    header, row, _ = (text for text, _ in latency_summary([record(subject="sdpa_efficient")], False, width))
    everything = ["p50", "+-", "change", "detects", "verdict", "backend", "workload", "direction", "mode"]
    assert header.split() == [title for title in everything if title not in gone]
    assert len(row) <= width or len(gone) == 4
    assert row.lstrip().startswith("1.0000 ms")
    verbose, *_ = (text for text, _ in latency_summary([record()], True, width))
    assert verbose.split() == everything


@pytest.mark.parametrize(
    ("verdict", "cause", "expected"),
    [
        ("passed", "", False),
        ("no baseline", "none recorded", False),
        ("no baseline", "unusable file", True),
        ("no baseline", "another protocol", True),
        ("inconclusive", "", True),
        ("unconfirmed", "", True),
    ],
)
def test_what_is_shown_to_those_who_want_to_see_little(verdict, cause, expected):
    assert is_notable(record(verdict, "why", cause=cause)) is expected
