"""The two lines that a run with --attn-shard adds to its file of records: what part it is, and how that part ended."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from pytest_attn.reports.records import PART, SCHEMA


class PartFacts(TypedDict, total=False):
    """What a line of a part says: `number` to `python` when the run begins, all of them when it ends."""

    state: Annotated[str, "begun or ended: the first and the last line of a part"]
    number: Annotated[int, "which part, from 1 on"]
    parts: Annotated[int, "of how many"]
    commit: Annotated[str, "of the repository, with a mark of what is not committed; empty where git has none"]
    options: Annotated[str, "the options that differ from their defaults, without outputs and device"]
    pytest_attn: Annotated[str, "its version"]
    python: Annotated[str, "its version"]
    collection: Annotated[str, "digest of the ids of all tests that were divided, after -k and -m"]
    split: Annotated[str, "digest of which part each of them is in"]
    total: Annotated[int, "how many tests were divided"]
    tests: Annotated[int, "how many of them this part runs"]
    ran: Annotated[int, "how many of these have run to their end"]
    device: Annotated[
        str, "name of the GPU that tests run on where they name no device, or cpu; empty without attention tests"
    ]
    uncollected: Annotated[int, "files that could not be collected"]
    exit: Annotated[int, "pytest's exit code"]


def to_part_line(facts: PartFacts) -> str:
    """Return the line of a part."""
    return json.dumps({"schema": SCHEMA, PART: facts}, ensure_ascii=False, separators=(",", ":"))


def facts_of_line(line: str, where: str) -> Mapping[str, Any] | None:
    """Return what the line of a part says, None for a record. Raises ValueError for one without its numbers."""
    if not line.startswith('{"schema":') or f'"{PART}":' not in line[:30]:
        return None
    try:
        facts = json.loads(line)[PART]
        ends = facts["state"] == "ended"
        wanted = ("number", "parts", *(("total", "tests", "ran") if ends else ()))
        is_whole = all(type(facts[name]) is int for name in wanted) and 1 <= facts["number"] <= facts["parts"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: is not the line of a part ({error!r})") from None
    if not is_whole:
        raise ValueError(f"{where}: is not the line of a part: part {facts['number']} of {facts['parts']}")
    return dict(facts)


def stable_id(nodeid: str) -> str:
    """Return a test's id as every host writes it: without xdist's group, and without where an installed suite lies."""
    path, colons, name = nodeid.partition("::")
    inside = re.search(r".*(?:site|dist)-packages/(.+)", path)
    group = name.find("@", name.rfind("]") + 1)
    return f"{inside[1] if inside else path}{colons}{name if group < 0 else name[:group]}"
