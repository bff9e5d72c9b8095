"""The prose of a file as passages: paragraphs of a Markdown page, string literals of a Python module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: a string of fewer words is a name, a unit or a piece of a table
FEWEST_WORDS = 3


class Passage(NamedTuple):
    """A paragraph, a list item, a cell of a table or a string, with the line on which it begins."""

    line: int
    text: str


def passages_of(path: Path) -> list[Passage]:
    """Return the passages of a page (.md) or of a module (.py)."""
    return list(_of_page(path.read_text()) if path.suffix == ".md" else _of_module(path.read_text()))


def _of_page(text: str) -> Iterator[Passage]:
    start, lines = 0, []
    for number, line in enumerate([*_without_code(text), ""], 1):
        begins_anew = re.match(r"\s*([-*]|\d+\.|#+|\|)\s", line) or line.lstrip().startswith("|")
        if lines and (not line.strip() or begins_anew):
            yield from _cells(start, " ".join(lines))
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(line.strip())


def _without_code(text: str) -> Iterator[str]:
    """Yield every line of a page; those of fenced blocks, comments and generated parts are empty.

    What is generated is checked where it is written: as a string of a module.
    """
    text = re.sub(
        r"<!-- generated: .*?<!-- end -->|<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S
    )
    fence = None
    for line in text.splitlines():
        found = re.match(r"\s*(`{3,}|~{3,})", line)
        if found and fence in (None, found[1]):
            fence = None if fence else found[1]
            yield ""
        else:
            yield "" if fence else line


def _cells(line: int, text: str) -> Iterator[Passage]:
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    if text.startswith("|"):
        for cell in text.strip("|").split("|"):
            yield Passage(line, cell.strip())
    else:
        yield Passage(line, re.sub(r"^(?:[-*]|\d+\.|#+)\s+", "", text).replace("*", ""))


def _of_module(source: str) -> Iterator[Passage]:
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in ast.walk(node)}
    left_out = docstrings | pieces
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "CODE" for part in node.values)
            text = "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            text = node.value
        else:
            continue
        if len(text.split()) >= FEWEST_WORDS:
            yield Passage(node.lineno, " ".join(text.split()))


def sentences(text: str) -> list[str]:
    """Split a passage: a full stop, question or exclamation mark, then space and a capital, a code span, or the end."""
    return [part for part in re.split(r"(?<=[.!?])[\")']*\s+(?=[A-Z*\[(\"'])", text) if part]
