"""--attn-output FILE: the suffix says what is written, as one of four options with a name of its own would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: the longest suffix first -> the field of `Settings` that names such a file
SUFFIXES = {".support.md": "support", ".jsonl": "json", ".html": "report", ".md": "summary"}


def kind_of(path: str) -> str:
    """Return which output a file is. Raises ValueError for another suffix."""
    for suffix, name in SUFFIXES.items():
        if path.endswith(suffix):
            return name
    raise ValueError(f"must end in {', '.join(list(SUFFIXES)[1:])} or {next(iter(SUFFIXES))}, got {path!r}")


def by_kind(paths: Sequence[str], named: Mapping[str, object]) -> dict[str, str]:
    """Return the files of --attn-output by the field that each stands for.

    named: the values of these fields so far. Raises ValueError where a kind of output is asked for twice.
    """
    found: dict[str, str] = {}
    for path in paths:
        name = kind_of(path)
        other = found.get(name) or named.get(name)
        if other:
            raise ValueError(f"{path!r} and {other!r} are the same kind of output; name one file of each suffix")
        found[name] = path
    return found
