"""What was recorded for one case, and the key by which it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median
from typing import Any

from pytest_attn.latency.fit import Fit, Run, expected_sensitivity, fit


@dataclass(frozen=True)
class Baseline:
    """What was recorded for one case.

    shape: the workload's, in full: another shape under the same name is another case. version: of the library. p50, anchors,
    launch (of one call): seconds, one per new process. z: largest element, row and head of the check, which
    `check` describes. memory: bytes. conditions: the soft keys. gpu: which of those of its name, by the first digits of its
    UUID; "" where nobody knows. history: (date, median p50 in seconds, reason) of every recording, the oldest first.
    """

    shape: str
    mode: str
    p50: tuple[float, ...]
    launch: tuple[float, ...]
    anchors: Mapping[str, tuple[float, ...]]
    flops: int
    nbytes: int
    date: str
    reason: str
    protocol: int
    version: str = ""
    memory: int | None = None
    z: tuple[float, float, float] | None = None
    check: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    history: tuple[tuple[str, float, str], ...] = ()

    @property
    def runs(self) -> list[Run]:
        """One per process."""
        return [
            Run(p50, {name: times[i] for name, times in self.anchors.items()}, launch)
            for i, (p50, launch) in enumerate(zip(self.p50, self.launch, strict=True))
        ]

    def fit(self) -> Fit:
        """Fit the recorded runs."""
        return fit(self.runs, expected_sensitivity(self.flops, self.nbytes, median(self.p50)))

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows, of builtin types."""
        return {
            "p50": list(self.p50),
            "date": self.date,
            "reason": self.reason,
            "history": [list(one) for one in self.history],
        }

    def after(self, older: Baseline | None) -> Baseline:
        """Return this baseline with the history of the one it replaces."""
        what = attrgetter("shape", "protocol", "mode")
        kept = older.history if older and what(older) == what(self) else ()
        return replace(self, history=(*kept, (self.date, median(self.p50), self.reason)))


def case_key(workload: str, subject: str, direction: str, l2: str, layout: str = "bhsd", threads: int | None = None) -> str:
    """Return the key of a case: what distinguishes its time from that of any other."""
    parts = [workload, subject, direction, l2]
    parts += [layout] if layout == "bshd" else []
    parts += [f"{threads} thread{'s' if threads != 1 else ''}"] if threads else []
    return " | ".join(parts)


def recorded_otherwise(key: str, keys: Iterable[str]) -> str:
    """Say with which L2 state, layout and threads the case was recorded, and with which it is timed; "" where with none."""
    case, mine = _parts(key)
    others = [otherwise for same, otherwise in map(_parts, keys) if same == case]
    return f"recorded {' and '.join(others)}, this is {mine}" if others else ""


def _parts(key: str) -> tuple[tuple[str, ...], str]:
    """Return the workload, the subject and the direction of a key, and the rest of it."""
    parts = key.split(" | ")
    return tuple(parts[:3]), ", ".join(parts[3:])
