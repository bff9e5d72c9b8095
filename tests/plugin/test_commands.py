"""`python -m pytest_attn report | summary`: what a run would have ended with, from its files."""

import os
import subprocess
import sys

import pytest
from fakes.records import run_of

from pytest_attn.__main__ import main
from pytest_attn.reports.markdown import markdown_summary
from pytest_attn.reports.records import RecordWriter, read_records


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files of --attn-output, in the current folder."""
    monkeypatch.chdir(tmp_path)
    records = run_of(60)
    for name, part in (("one.jsonl", records[:30]), ("two.jsonl", records[30:])):
        RecordWriter(name).write(part)
    return tmp_path


def test_a_summary_goes_where_it_is_sent(files, capsys):
    assert main(["summary", "one.jsonl", "two.jsonl"]) == 0
    page = markdown_summary(read_records("one.jsonl", "two.jsonl"))
    assert capsys.readouterr().out == page
    assert main(["report", "one.jsonl", "two.jsonl", "-o", "page.md"]) == 0
    assert (files / "page.md").read_text() == page


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(files, capsys):
    (files / "taken.html").mkdir()
    with pytest.raises(SystemExit) as exited:
        main(["report", "one.jsonl", "-o", "taken.html"])
    assert exited.value.code == 2
    assert "taken.html" in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == ["one.jsonl", "taken.html", "two.jsonl"]


def test_without_the_library_of_charts_it_says_what_to_install(files, capsys, monkeypatch):
    monkeypatch.setattr("pytest_attn.reports.merging.missing_libraries", lambda: ["altair"])
    with pytest.raises(SystemExit):
        main(["report", "one.jsonl"])
    assert 'needs altair; pip install "pytest-attn[report]"' in capsys.readouterr().err


def test_a_report_follows_a_link_and_replaces_neither_device_nor_input(files, capsys):
    (files / "target.html").write_text("old")
    (files / "link.html").symlink_to("target.html")
    os.mkfifo(files / "pipe.html")
    assert main(["report", "one.jsonl", "-o", "link.html"]) == 0
    assert (files / "link.html").is_symlink()
    assert (files / "target.html").read_text().startswith("<!DOCTYPE html>")
    for output, words in (
        ("pipe.html", "cannot write pipe.html: is not a plain file"),
        ("", "-o must end in .html or .md (not .support.md), got ''"),
        ("one.support.md", "-o must end in .html or .md (not .support.md), got 'one.support.md'"),
        ("one.jsonl", "one.jsonl is one of the input files: refusing to overwrite it"),
        ("there/is/none.html", "cannot write there/is/none.html: No such file or directory"),
    ):
        with pytest.raises(SystemExit):
            main(["report", "one.jsonl", "-o", output])
        assert words in capsys.readouterr().err
    assert (files / "pipe.html").is_fifo()


def test_a_reader_that_has_gone_is_no_error(files):
    command = f"{sys.executable} -m pytest_attn summary one.jsonl two.jsonl | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
