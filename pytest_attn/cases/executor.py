"""Where a callable runs. What is judged, and how, is the same everywhere; over ranks: cases/on_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.judgment import Evaluator
from pytest_attn.timing.measurement import TimingPlace
from pytest_attn.workloads.sharding import Sharding
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: `CaseRun.conclude`
Conclude = Callable[[Evaluator[Any]], Any]


class Executor:
    """Runs a callable in this process.

    sharding: which rows and keys each rank has; here one has all.
    """

    #: the number of this process among the ranks; 0 where it judges what the others compute
    rank = 0
    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    #: whether this is the process that computes, so that an output of the test's own is that of the whole workload
    is_here = True
    #: whether what runs there may be lost without this process
    is_expendable = False
    #: whether calls there have a time limit of their own
    has_deadline = False
    #: why a saved failure cannot name the callable of a test; "" where it can
    unnamed_because = ""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding

    @classmethod
    def in_process(cls, workload: Workload) -> Executor:
        """Return the one of this process."""
        return cls(Sharding(workload, "contiguous", 1))

    @property
    def ranks(self) -> int:
        """How many processes compute the case together."""
        return self.sharding.ranks

    def skip_reason(self) -> str:
        """Say why nothing can run there, "" where it can."""
        return ""

    def asked(self, subject: Subject | None) -> Subject | None:
        """Return what is asked whether it takes the case there."""
        return subject

    def place(self, subject: Subject, conclude: Conclude) -> Subject:
        """Return what computes there what a subject computes. conclude: of the case, for what goes wrong meanwhile."""
        del conclude
        return subject

    def leave(self, result: object) -> None:
        """Let the test go on there, after a judgment that passed with this result."""

    def finish(self) -> None:
        """End the case there, once its test has ended here."""

    @property
    def timing(self) -> TimingPlace:
        """Where a subject is timed that was placed."""
        return TimingPlace()
