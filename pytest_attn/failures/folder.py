"""A folder per failed case: its name, and how it is written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

_LONGEST = 100  # characters of a name, beside its checksum: with any DIR, paths stay below Windows' 260
_ATTEMPTS = 5


class NoSpaceError(Exception):
    """The disk has less room than a failure takes."""


def safe_name(case: str) -> str:
    """Return a folder's name for a test's node id: safe on every file system, different for different ids.

    The checksum keeps ids apart that differ in nothing but case, length, or characters that file systems refuse.
    """
    readable = re.sub(r"\.py(?=::)", "", case)
    words = re.sub(r"[^A-Za-z0-9._+=]+", "-", readable).strip("-.")
    return f"{words[:_LONGEST].rstrip('-.')}-{hashlib.sha256(case.encode()).hexdigest()[:8]}"


def require_space(folder: Path, needed: int) -> None:
    """Raise NoSpaceError where the folder's disk has less than `needed` bytes, and a little for the small files."""
    free = shutil.disk_usage(folder).free
    if free < needed + (1 << 20):
        raise NoSpaceError(f"{_size(needed)} are needed in {folder}, {_size(free)} are free")


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `target`, then put it in the place of `target`, whole. Raises OSError."""
    unfinished = _beside(target)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        _put_in_place(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(unfinished: Path, target: Path) -> None:
    """Rename the new folder; where an older one is there, or another process puts one there, move that away first."""
    for attempt in range(_ATTEMPTS):
        older = _beside(target)
        with contextlib.suppress(FileNotFoundError):
            target.replace(older)
        try:
            unfinished.rename(target)
            return
        except OSError:
            if attempt + 1 == _ATTEMPTS or not target.exists():
                raise
        finally:
            shutil.rmtree(older, ignore_errors=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:,.1f} MiB"
