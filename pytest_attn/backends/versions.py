"""Versions: of what is installed, and how two of them compare."""

from __future__ import annotations

import operator
from importlib import metadata

from packaging.version import InvalidVersion, Version

_COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt}


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None where it is not installed."""
    try:
        found = metadata.metadata(distribution)
    except metadata.PackageNotFoundError:
        return None
    versions: list[str] = found.get_all("Version") or []
    return versions[0] if versions else None  # a folder that an uninstallation left has none


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version before any suffix ("2.11.0a1+cu130": 2, 11, 0); none where it cannot be read."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def satisfies(version: str, comparison: str, wanted: str) -> bool:
    """Whether a version is ">=", "<=", "==", "<" or ">" another, as far as that is written: 2.7.4 is "==" 2.7."""
    theirs = release(wanted)
    mine = (*release(version), *(0 for _ in theirs))[: len(theirs)]
    return bool(_COMPARISONS[comparison](mine, theirs))
