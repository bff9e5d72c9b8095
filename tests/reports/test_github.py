"""What GitHub Actions gets: annotations that cannot be broken out of, and a summary in Markdown."""

from pytest_attn.reports.markdown import markdown_summary, workflow_commands
from pytest_attn.reports.records import new_record

MACHINE = {"name": "NVIDIA H200", "device": "cuda:0", "torch": "2.11.0"}


def record(verdict="mismatch", **fields):
    facts = {
        "test": "tests/test_mine.py::test_right[flux-L512-mine]",
        "line": 7,
        "question": "check",
        "verdict": verdict,
        "reason": "out z 21,825 in one element, limit 8",
        "workload": "flux-L512",
        "name": "flux-L512",
        "subject": "mine",
        "direction": "forward",
        "backward": False,
        "is_approximate": False,
        "tensor": "out",
        "z_element": 2.0,
        "latency": None,
        "machine": MACHINE,
        "command": "pytest 'tests/test_mine.py::test_right[flux-L512-mine]'",
    }
    return new_record(**{**facts, **fields})


def timed(verdict, change, **fields):
    decision = {"verdict": verdict, "change": change}
    return record(verdict, question="latency", latency={"p50": 4e-4, "direction": "forward", "decision": decision}, **fields)


def test_a_mismatch_is_an_error_at_its_line():
    (command,) = workflow_commands([record(), record("passed")])
    assert command == (
        "::error file=tests/test_mine.py,line=7,title=mismatch%3A mine on flux-L512::out z 21,825 in one element, limit 8"
        "%0Apytest 'tests/test_mine.py::test_right[flux-L512-mine]'"
    )


def test_each_verdict_has_its_level():
    levels = {
        verdict: next(iter(workflow_commands([record(verdict)])), "").partition(" ")[0]
        for verdict in ("broken", "raised", "regressed", "inconclusive", "known defect", "passed", "skipped", "held")
    }
    assert levels == {
        "broken": "::error",
        "raised": "::error",
        "regressed": "::error",
        "inconclusive": "::warning",
        "known defect": "::notice",
        "passed": "",
        "skipped": "",
        "held": "",
    }


def test_texts_of_tests_cannot_end_a_command():
    (command,) = workflow_commands([record(reason="100%\n::error::mine", subject="a,b:c\r")])
    assert command.count("\n") == command.count("\r") == 0
    assert "title=mismatch%3A a%2Cb%3Ac\\r on" in command
    assert "100%25%0A\\x3a:error::mine" in command


def test_github_shows_ten_and_the_last_counts_the_rest():
    commands = list(workflow_commands([record() for _ in range(25)]))
    assert len(commands) == 10
    assert commands[-1] == "::error title=pytest-attn::16 more; the job's summary lists them"


def test_the_summary_has_what_is_wrong_first_and_the_command():
    text = markdown_summary([record("passed"), record(), timed("regressed", 0.12), timed("passed", 0.001)])
    assert text.index("### Wrong") < text.index("<details><summary>Latencies")
    assert "1 right, 1 wrong" in text
    assert "| mismatch | `mine` | `flux-L512` | forward |" in text
    assert "`pytest 'tests/test_mine.py::test_right[flux-L512-mine]'`" in text
    assert text.index("+12.0%") < text.index("+0.1%")
    assert "NVIDIA H200 (cuda:0), torch 2.11.0" in text


def test_texts_of_tests_cannot_break_the_table_or_become_html():
    text = markdown_summary([record(reason="a | b <img src=x onerror=alert(1)>\n# heading", subject="we`ird|name")])
    (row,) = (line for line in text.splitlines() if line.startswith("| mismatch"))
    assert "<img" not in row.replace("\\<img", "")
    assert "a \\| b" in row
    assert "``we`ird\\|name``" in row.replace("`` we`ird", "``we`ird").replace("name ``", "name``")


def test_a_summary_of_many_failures_stays_below_what_github_takes():
    text = markdown_summary([record(reason="x" * 2000) for _ in range(5000)])
    assert "and 4800 more" in text
    assert len(text.encode()) < 1 << 20


def test_a_summary_of_nothing_says_so():
    assert "No attention test ran." in markdown_summary([])
