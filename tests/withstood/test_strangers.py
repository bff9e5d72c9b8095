"""What a stranger gives to each command: files that are damaged, and names that say more than a name."""

import gzip
import os
import re

import pytest
from fakes.runs import write_runs

from pytest_attn.__main__ import main
from pytest_attn.seam import guests

#: what becomes of the file of a run
DAMAGES = {
    "BOM": lambda good: b"\xef\xbb\xbf" + good,
    "gzip": gzip.compress,
    "UTF-16": lambda good: good.decode().encode("utf-16"),
    "cut within a character": lambda good: good[:-1] + b"\xe2\x82",
    "NUL": lambda good: good.replace(b"passed", b"pa\0ssed"),
    "100,000 brackets": lambda good: b"[" * 100_000 + b"\n" + good,
    "100,000 objects": lambda good: b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n" + good,
    "deep within": lambda good: re.sub(rb'"verdict":"\w+"', b'"verdict":' + b"[" * 50_000 + b"]" * 50_000, good),
    "5,000 digits": lambda good: re.sub(rb'"schema":\d+', b'"schema":' + b"9" * 5000, good),
    "1e999": lambda good: re.sub(rb'"seconds":[\d.e-]+', b'"seconds":1e999', good),
    "NaN": lambda good: re.sub(rb'"seconds":[\d.e-]+', b'"seconds":NaN', good),
    "-0": lambda good: re.sub(rb'"schema":\d+', b'"schema":-0', good),
    "true": lambda good: re.sub(rb'"schema":\d+', b'"schema":true', good),
    "a verdict twice": lambda good: good.replace(b'"verdict"', b'"verdict":"mismatch","verdict"'),
    "commas": lambda good: good.replace(b"}\n", b"},\n"),
    "one array": lambda good: b"[" + good.replace(b"\n", b",").rstrip(b",") + b"]\n",
    "a list": lambda good: b"[1, 2]\n" + good,
    "null": lambda good: b"null\n" + good,
    "2 MB on a line": lambda good: b'{"a": "' + b"x" * 2_000_000 + b'"}\n' + good,
}
OF_GUESTS = ["compare X good.jsonl", "compare --md good.jsonl X", "history X", "verify X --no-collect", "certify X -o kept"]
COMMANDS = [
    *(OF_GUESTS if guests() else ()),
    "merge out.jsonl X",
    "merge --force out.md good.jsonl X",
    "report X -o out.md",
    "summary X",
]
NAMES = {
    "ANSI": "a\x1b[31mb",
    "bidirectional": "a\u202eb",
    "::error::": "a\n::error::x",
    "::warning::": "\r::warning::x",
    "a surrogate": "\udc80",
    "10,000 characters": "x" * 10_000,
    "nothing": "",
    "/dev/null": "/dev/null",
    "the root": "/",
    "$(id)": "$(id)",
    "an option": "--output=x",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return what a run has written."""
    folder = tmp_path_factory.mktemp("run")
    write_runs(folder, 1, 4)
    return (folder / "part-1.jsonl").read_bytes()


@pytest.fixture
def tell(good, tmp_path, monkeypatch, capsys):
    """Run a command in a folder with that file; return its status and what it said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_bytes(good)

    def told(*words):
        try:
            status = main(words)
        except SystemExit as left:
            status = left.code
        out, err = capsys.readouterr()
        return status, out + err

    return told


def are_plain(said):
    """Return whether no line is a command for a terminal, or for the log of a job."""
    return all(line.isprintable() and not line.startswith("::") for line in said.split("\n"))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(good, tell, tmp_path, damage, withstood):
    damaged = DAMAGES[damage](good)
    assert damaged != good
    (tmp_path / "X").write_bytes(damaged)
    for command in COMMANDS:
        status, said = tell(*command.split())
        assert status in (1, 2), (command, said)
        assert re.search(r"\bX\b.*(line 1|expected|is not|cut short)", said), (command, said)
        assert are_plain(said)
        assert (tmp_path / "out.jsonl").exists() is (tmp_path / "kept").exists() is False
        withstood("a stranger's file", f"{len(DAMAGES)} damages", "commands", "refused in one line")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_name(tell, tmp_path, name, withstood):
    given = NAMES[name]
    for command in (*COMMANDS, "capture X", "verify good.jsonl --at X", "verify good.jsonl --device X", "--device X"):
        words = [given if word == "X" else word for word in command.split()]
        status, said = tell(*words)
        assert status in (1, 2) or given == os.devnull, (command, said)
        assert are_plain(said), (command, said)
        withstood("a stranger's name", f"{len(NAMES)} kinds", "commands", "refused in printable lines")
    assert {path.name for path in tmp_path.iterdir()} <= {"good.jsonl", "out.md"}
