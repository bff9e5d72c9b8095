"""The items of a test whose kernel promises bits, and the table of what kernels kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_attn.backends.declaration import argument
from pytest_attn.guests.promises.promises_guest import ASKED, PROMISES, SEEN
from pytest_attn.reports.terminal import Line, in_table, inapplicable
from pytest_attn.session.collection import KernelItems
from pytest_attn.session.marks import AttentionMark


@dataclass(frozen=True)
class PromisingMark(AttentionMark):
    """The marker of a test whose kernel promises bits."""

    bitwise: tuple[str, ...] = argument(
        (),
        "under which changes fn keeps its bits, as `check_invariants` then requires: {}".format(
            ", ".join(f'"{name}"' for name in PROMISES)
        ),
    )

    @classmethod
    def read_more(cls, values: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
        """Read the promises, and refuse what is none."""
        given = values["bitwise"]
        found = given if isinstance(given, tuple | list | set) else (given,)
        if any(name not in PROMISES for name in found):
            raise ValueError(f"bitwise must be names of promises, got {given!r}; known: {', '.join(PROMISES)}")
        return {"bitwise": tuple(name for name in PROMISES if name in found)}

    @property
    def invariants(self) -> tuple[str, ...]:
        unpromised = (name for name in PROMISES if name not in self.bitwise and name != "process")  # which takes long
        return (*(f"{ASKED}{name}" for name in self.bitwise), *(f"{SEEN}{name}" for name in unpromised))


class PromisedItems(KernelItems):
    """The items of such a test."""

    mark = PromisingMark


#: what a note of an invariant says of a promise that was not made
_NOTED = re.compile(rf"{SEEN}(\w+): (?:keeps|changes) its bits(?:: (?:equal up to \w+ [\d,]+, )?(not at \w+ [\d,]+))?")


def table_of_promises(records: Sequence[Mapping[str, Any]], width: int | None) -> Iterator[Line]:
    """Yield which promises were not judged; then, a row per kernel, where bits first changed that were not promised."""
    asked: Any = [
        {**r, "inapplicable": [one for one in r["inapplicable"] if one["invariant"].startswith(ASKED)]} for r in records
    ]
    yield from ((f"not judged    {line}", {"yellow": True}) for line in inapplicable(asked))
    found: dict[str, dict[str, list[str]]] = {}
    for r in records:
        if r["question"] == "invariants":
            for name, where in _NOTED.findall(r["reason"]):
                found.setdefault(r["subject"], {}).setdefault(name, []).append(where)
    if found:
        rows = [[subject, *(_cell(of.get(name, [])) for name in PROMISES)] for subject, of in found.items()]
        yield from in_table([["not promised", *PROMISES], *rows], width=width)


def _cell(places: Sequence[str]) -> str:
    changed = [place for place in places if place]
    if changed:
        first = min(changed, key=lambda place: int(place.split()[-1].replace(",", "")))
        return f"{first} ({len(changed)} of {len(places)})"
    return f"kept ({len(places)})" if places else "-"
