"""Outputs of records with names that nobody has made printable, as of another tool, or of an older version."""

import pytest
from hostile import NAMES, unsafe

from pytest_attn.reports.html.page import report_page
from pytest_attn.reports.markdown import markdown_summary, support_page, workflow_commands
from pytest_attn.reports.records import new_record
from pytest_attn.reports.terminal import summary
from pytest_attn.session.output import print_section


def hostile_record(name):
    text = {"label": "where", "text": name}
    known = {"question": "check", "verdict": "mismatch", "direction": "forward", "tensor": "out", "z_element": 9.0}
    return new_record(
        **{**known, "subject": name, "workload": name, "reason": name, "test": name, "command": f"pytest {name}"},
        explanation=[text, {"label": "", "text": name}],
        machine={"name": name, "device": "cpu", "torch": "2.13"},
    )


class Reporter:
    def __init__(self):
        self.text = ""

    def write_sep(self, *_):
        pass

    def write_line(self, line, **_):
        self.text += f"{line}\n"


def terminal(records):
    reporter = Reporter()
    print_section(reporter, summary(records, verbose=True, width=80))
    return reporter.text


def annotations(records):
    lines = list(workflow_commands(records))
    assert all(line.startswith("::error file=") and "\n" not in line for line in lines)
    return "\n".join(line.replace("%0A", "\n  ") for line in lines)


def page(records):
    data = report_page(records).partition('<script type="application/json"')[2].partition("</script>")[0]
    assert "<script" not in data
    return data


WRITERS = {
    "terminal": terminal,
    "annotations": annotations,
    "summary": markdown_summary,
    "support": lambda records: support_page(records, {}, "today"),
    "page": page,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_writer_leaves_nothing_that_is_run_or_hidden(writer, name):
    assert unsafe(WRITERS[writer]([hostile_record(NAMES[name])]), longest=10**6) == []
