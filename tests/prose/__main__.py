"""`python tests/prose [PATH ...]`: print FILE:LINE: what to change, and exit with 1 if there is anything to change.

It reads .vale.ini and the rules in vale's format (https://vale.sh/docs/styles), and needs nothing but PyYAML. Without paths it
reads README.md, CONTRIBUTING.md, the pages of docs/, and the strings, docstrings and comments of the package.
"""

from __future__ import annotations

import ast
import configparser
import fnmatch
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
EVERYTHING = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "pytest_attn/**/*.py")
#: faulty kernels are named after what real ones did, and show it in code only
LEFT_OUT = ("_build", "mutants")
#: a string of fewer words is a name, a unit or a piece of a table
FEWEST_WORDS = 3


def passages_of(path: Path) -> list[tuple[int, str]]:
    """Return line and text of each paragraph and cell of a page (.md), or of each string and comment of a module (.py)."""
    text = path.read_text()
    found = _of_page(text) if path.suffix == ".md" else [*_strings(text), *_comments(text)]
    return [(line, re.sub(r"`[^`]+`", "CODE", passage)) for line, passage in found]


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    # blocks, and what is generated: that is a string of a module
    code = r"<!-- generated: .*?<!-- end -->|<!--.*?-->|^ *(`{3,}|~{3,}).*?^ *\1"
    text = re.sub(code, lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    start, lines = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if lines and (not line.strip() or re.match(r"\s*([-*]|\d+\.|#+)\s|\s*\|", line)):
            joined = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "CODE", " ".join(lines)))
            for cell in joined.strip("|").split("|") if joined.startswith("|") else [joined]:
                yield start, re.sub(r"^(?:[-*]|\d+\.|#+)\s+", "", cell.strip()).replace("*", "")
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(line.strip())


def _strings(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values).split()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            words = re.sub(r"::\n\n(?:(?: {4}.*)?(?:\n|$))+", "", inspect.cleandoc(node.value)).split()  # without examples
        else:
            continue
        if len(words) >= FEWEST_WORDS:
            yield node.lineno, " ".join(words)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment, of which lines that follow each other are one; directives to tools are left out."""
    start, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (noqa|type:|ruff:|mypy:|pragma)", token.string):
            continue
        if lines and token.start[0] != start + len(lines):
            yield start, " ".join(lines)
            lines = []
        start = start if lines else token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield start, " ".join(lines)


def sentences(text: str) -> list[str]:
    """Split a passage: a full stop, question or exclamation mark, then space and a capital, a code span, or the end."""
    return [part for part in re.split(r"(?<=[.!?])[\")']*\s+(?=[A-Z*\[(\"'])", text) if part]


def said_by(rule: dict[str, Any], text: str) -> Iterator[str]:
    """Yield what a rule objects to in a passage."""
    if rule["extends"] == "occurrence":
        for sentence in sentences(text):
            found = len(re.findall(rule["token"], sentence))
            if found > rule["max"]:
                yield f"{rule['message']} ({found}: {sentence[:60]}...)"
    elif rule["extends"] == "substitution":
        for banned, preferred in rule["swap"].items():
            for match in re.finditer(rf"\b(?:{banned})\b", text, re.IGNORECASE):
                yield rule["message"] % (preferred, match[0])
    else:
        raise ValueError(f"extends {rule['extends']!r}; this reader knows occurrence, substitution")


def rules_of(path: str) -> dict[str, dict[str, Any]]:
    """Return the rules of a path that is relative to the repository; the last section of .vale.ini that matches wins."""
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(f"[top]\n{(ROOT / '.vale.ini').read_text()}")
    chosen: dict[str, bool] = {}
    for section in parser.sections()[1:]:
        if fnmatch.fnmatch(path, section):
            options = dict(parser[section])
            styles = options.pop("BasedOnStyles", "").split()
            files = [file for style in styles for file in sorted((ROOT / parser["top"]["StylesPath"] / style).glob("*.yml"))]
            chosen |= {f"{file.parent.name}.{file.stem}": True for file in files}
            chosen |= {name: value.upper() != "NO" for name, value in options.items()}
    folder = ROOT / parser["top"]["StylesPath"]
    return {name: yaml.safe_load((folder / f"{name.replace('.', '/')}.yml").read_text()) for name in chosen if chosen[name]}


def findings(path: Path, name: str) -> Iterator[str]:
    for rule, declared in rules_of(name).items():
        yield from (f"{name}:{line}: {said} [{rule}]" for line, text in passages_of(path) for said in said_by(declared, text))


def main(arguments: list[str]) -> int:
    """Lint files, or everything; return the exit status."""
    named = [Path(argument) for argument in arguments]
    paths = named or sorted(path for pattern in EVERYTHING for path in ROOT.glob(pattern) if not {*path.parts} & {*LEFT_OUT})
    found = [line for path in paths for line in findings(path, path.resolve().relative_to(ROOT).as_posix())]
    print(*found, f"prose: {len(found)} findings in {len(paths)} files", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
