"""`python -m pytest_attn durations`: how long each test took, as a file whose name says what is in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from pytest_attn.reports.parts import stable_id
from pytest_attn.reports.records import Record

#: the field of the file that has them
SECONDS = "seconds"


def durations_file(records: Sequence[Record]) -> tuple[str, str]:
    """Return the end of the file's name, and its text: the longest time of each test, one per line, in order."""
    seconds: dict[str, float] = {}
    for record in records:
        name = stable_id(record["test"])
        seconds[name] = max(record["seconds"], seconds.get(name, 0.0))
    text = json.dumps({"schema": 1, SECONDS: dict(sorted(seconds.items()))}, indent=0, ensure_ascii=False) + "\n"
    return f"-{digest_of_text(text)}.json", text


def digest_of_text(text: str) -> str:
    """Return twelve digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
