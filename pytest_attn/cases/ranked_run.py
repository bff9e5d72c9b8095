"""What a run knows of a case whose callable runs on ranks: their limits, refusals, and how a failure is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.over_ranks import RankBackend
from pytest_attn.cases.run import CaseRun
from pytest_attn.cases.saving import FailureSaver
from pytest_attn.failures.script import KernelSource
from pytest_attn.session.items import RankedParameter
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    from pytest_attn.backends.subject import Subject
    from pytest_attn.correctness.spec import CheckSpec


class RankedRun(CaseRun):
    """A case in a run whose callable runs on ranks, which have a time limit of their own."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        parameter: RankedParameter,
        mark: AttentionMark,
        session: AttentionSession,
        sharding: Sharding,
    ) -> None:
        super().__init__(request, parameter, mark, session)
        self.sharding = sharding

    @property
    def has_processes_to_lose(self) -> bool:
        """Not so: its ranks are processes of their own, and a pool that is lost is replaced."""
        return False

    def skip_unless_runnable(self, subject: Subject | None, backward: bool = False) -> None:
        """Ask a backend that computes over ranks about its shards, too."""
        from pytest_attn.ranks.subject import RankedBackend

        asked = RankedBackend(subject, None, self.sharding) if isinstance(subject, RankBackend) else subject
        super().skip_unless_runnable(asked, backward)

    def deadline(self, subject: Subject) -> Callable[[], AbstractContextManager[object]]:
        """Return no limit: the pool has one."""
        del subject
        return nullcontext

    def saver(self, subject: Subject | None, spec: CheckSpec) -> FailureSaver | None:
        """Return what saves a failure with whole tensors, None where failures are not saved."""
        plain = super().saver(subject, spec)
        return plain and RankedSaver(plain.folder, self.session, self.item, spec, subject, self.command)


class RankedSaver(FailureSaver):
    """Saves whole tensors; the script that judges them again is given a callable of one process."""

    def _kernel(self, folder: str) -> KernelSource:
        del folder
        return KernelSource("my_kernel", missing=f"a callable of (q, k, v) in one process; {self._case} ran on several ranks")
