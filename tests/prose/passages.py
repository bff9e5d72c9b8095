"""The prose of a file as passages: paragraphs of a Markdown page; strings, docstrings and comments of a Python module."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: a string of fewer words is a name, a unit or a piece of a table
FEWEST_WORDS = 3


class Passage(NamedTuple):
    """A paragraph, a list item, a cell of a table, a string or a comment, with the line on which it begins.

    part: of a module, "::docstring", "::public" for the docstring of what has a public name, or "::comment"; else "".
    """

    line: int
    text: str
    part: str = ""


def passages_of(path: Path) -> list[Passage]:
    """Return the passages of a page (.md) or of a module (.py)."""
    text = path.read_text()
    return list(_of_page(text)) if path.suffix == ".md" else [*_of_module(text), *_of_docstrings(text), *_of_comments(text)]


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


def _of_docstrings(source: str) -> Iterator[Passage]:
    """Yield the paragraphs and the entries of every docstring; what is in backticks is code."""
    for node, is_public in _documented(ast.parse(source), True):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            part = "::public" if is_public else "::docstring"
            for offset, text in _paragraphs(inspect.cleandoc(first.value.value)):
                yield Passage(first.lineno + offset, text, part)


def _documented(node: ast.AST, is_public: bool) -> Iterator[tuple[ast.Module | ast.ClassDef | ast.FunctionDef, bool]]:
    """Yield what may have a docstring, and whether its name, and the name of what it is in, are public."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        is_public &= not getattr(node, "name", "").startswith("_")
        yield node, is_public and not isinstance(node, ast.Module)
        is_public &= not isinstance(node, ast.FunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from _documented(child, is_public)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs with the number of their first line; entries of a section are apart, and indented blocks are code."""
    start, lines = 0, []
    text = re.sub(r"(?<=\n\n)(?:(?: {4}.*)?\n)+", lambda block: "\n" * block[0].count("\n"), f"{text}\n")
    for number, line in enumerate([*re.sub(r"`[^`]+`", "CODE", text).splitlines(), ""]):
        begins_anew = re.match(r"\s*([-*]|\d+\.|>>>|[A-Z]\w+:$)|\s*(\*|\w)[\w.*]*: ", line)
        if lines and (not line.strip() or begins_anew):
            entries = re.split(r"(?<=[.;]) (?=[\w*]+(?:, [\w*]+)*: )", " ".join(lines))
            yield from ((start, entry) for entry in entries)
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(line.strip())


def _of_comments(source: str) -> Iterator[Passage]:
    """Yield each comment, of which lines that follow each other are one; directives to tools are left out."""
    start, lines, last = 0, [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (noqa|type:|ruff:|mypy:|pragma)", token.string):
            continue
        line, said = token.start[0], re.sub(r"`[^`]+`", "CODE", token.string.lstrip("#: "))
        if lines and line != last + 1:
            yield Passage(start, " ".join(lines), "::comment")
            lines = []
        start, last = start if lines else line, line
        lines.append(said)
    if lines:
        yield Passage(start, " ".join(lines), "::comment")


def sentences(text: str) -> list[str]:
    """Split a passage: a full stop, question or exclamation mark, then space and a capital, a code span, or the end."""
    return [part for part in re.split(r"(?<=[.!?])[\")']*\s+(?=[A-Z*\[(\"'])", text) if part]
