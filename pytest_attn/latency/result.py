"""Result of a measurement."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_attn.latency.gate import Decision
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import LatencyDirection
from pytest_attn.reports.verdict import Verdict
from pytest_attn.seam import added

#: fields that records have under another name
_NAMES_IN_RECORDS = {"launch": "host"}


@dataclass(frozen=True)
class Latency:
    """Time that one direction of a kernel takes.

    Args:
        workload: its id.
        subject: what reports call the kernel.
        direction: "forward", "backward" or "forward+backward".
        p50: seconds, the median of block medians.
        interval: in which the median of blocks lies with 95 %; its `confidence` says where there were too few.
        samples: seconds of one call, block by block.
        blocks: how many there are.
        mode: how calls shared a pair of events (latency/timer.py).
        calls: how many did.
        l2: "cold" or "warm".
        launch: seconds of launching one.
        anchors: medians of the anchor operations, in seconds.
        memory: bytes that a call asks for at its peak; None on a CPU.
        threads: of a CPU; None on a GPU.
        disturbances: of blocks that stayed disturbed when repeated, of a CPU's core that others shared, or a recorded
            graph that is lost. Such a time is never compared with a baseline.
        notes: what else is worth knowing.
        conditions: clocks, temperature and the like while it was taken.
        spent: seconds of wall time that it took.
        cupti: the device's seconds by torch's profiler, where asked for.
        more: what a guest adds, by its name, which is an attribute, too; None there in a latency without it.
        decision: what the comparison with a baseline gave; None where nobody did.
    """

    workload: str
    subject: str
    direction: LatencyDirection
    p50: float
    interval: Interval
    samples: tuple[float, ...]
    blocks: int
    mode: Mode
    calls: int
    l2: str
    launch: float
    anchors: Mapping[str, float]
    memory: int | None = None
    threads: int | None = None
    disturbances: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    spent: float = 0.0
    cupti: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    decision: Decision | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what a guest adds."""
        if name not in added("latency"):
            raise AttributeError(f"a latency has no {name!r}")
        return self.more.get(name)

    @property
    def verdict(self) -> Verdict:
        """The gate's (reports/verdict.py), "measured" where none was asked."""
        return self.decision.verdict if self.decision else Verdict.MEASURED

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types, by their names in records."""
        fields = {_NAMES_IN_RECORDS.get(name, name): value for name, value in asdict(self).items()}
        more = fields.pop("more")
        decision = self.decision.to_dict() if self.decision else None
        fields |= dict.fromkeys(added("latency")) | more
        return {**fields, "interval": list(self.interval), "decision": decision, "verdict": self.verdict.value}
