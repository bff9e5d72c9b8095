"""`python tests/prose [PATH ...]`: print FILE:LINE: what to change, and exit with 1 if there is anything to change.

Without paths: README.md, CONTRIBUTING.md, the pages of docs/, and the strings, docstrings and comments of the package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from prose.passages import passages_of
from prose.rules import Configuration

ROOT = Path(__file__).parents[2]
EVERYTHING = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "pytest_attn/**/*.py")
#: faulty kernels are named after what real ones did, and show it in code only
LEFT_OUT = ("_build", "mutants")


def findings(path: Path, configuration: Configuration, root: Path = ROOT) -> Iterator[str]:
    """Yield the findings of one file, which is named as it is below `root`."""
    relative = path.resolve().relative_to(root).as_posix()
    for passage in passages_of(path):
        for rule in configuration.rules_of(relative + passage.part):
            yield from (f"{relative}:{passage.line}: {said} [{rule.name}]" for said in rule.findings(passage))


def main(arguments: list[str]) -> int:
    """Lint files, or everything; return the exit status."""
    named = [Path(argument) for argument in arguments]
    paths = named or sorted(path for pattern in EVERYTHING for path in ROOT.glob(pattern) if not {*path.parts} & {*LEFT_OUT})
    configuration = Configuration(ROOT / ".vale.ini")
    found = [line for path in paths for line in findings(path, configuration)]
    print(*found, f"prose: {len(found)} findings in {len(paths)} files", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
