"""`attn` of a test with ranks: in the process that judges, and on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pytest

from pytest_attn.backends.builtin import OVER_RANKS
from pytest_attn.backends.over_ranks import RankBackend
from pytest_attn.backends.subject import CallableSubject, Dequantizer
from pytest_attn.cases.case import AttentionCase
from pytest_attn.cases.ranked_run import RankedRun
from pytest_attn.session.items import RankedParameter, name_for_processes
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession
from pytest_attn.verdict import Verdict
from pytest_attn.workloads.sharding import Sharding

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.correctness.comparison import Comparison
    from pytest_attn.invariants.report import InvariantReport
    from pytest_attn.latency.result import Latency
    from pytest_attn.ranks.pool import Pool
    from pytest_attn.ranks.subject import RankedSubject
    from pytest_attn.ranks.team import Team

_Judged = TypeVar("_Judged")


def make_ranked_case(
    request: pytest.FixtureRequest, parameter: RankedParameter, mark: AttentionMark, session: AttentionSession
) -> Any:
    """Make the case of a test with ranks: the judge's, or the rank's; skips the test where ranks cannot run here."""
    from pytest_attn.cases.on_rank import RankCase
    from pytest_attn.ranks.worker import rank_of

    if rank := rank_of(request.config):
        return RankCase(rank, parameter, mark, session)
    case = RankedCase(request, parameter, mark, session)
    if reason := case.skipped_because():
        case._run.outcome.skip(None, reason)
    case._run.skip_unless_runnable(case._run.backend)
    request.addfinalizer(case.finish)
    return case


class RankedCase(AttentionCase):
    """One workload, computed by several ranks; the test runs in this process as well, which judges what they return."""

    def __init__(
        self, request: pytest.FixtureRequest, parameter: RankedParameter, mark: AttentionMark, session: AttentionSession
    ) -> None:
        super().__init__(request, parameter, mark, session)
        self._sharding = Sharding(parameter.workload, mark.shard, parameter.ranks)
        self._run = RankedRun(request, parameter, mark, session, self._sharding)
        self._pool: Pool | None = None

    @property
    def rank(self) -> int:
        """The rank's number; 0 in the process that judges."""
        return 0

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._sharding.ranks

    @property
    def group(self) -> None:
        """The process group of all ranks; None in the process that judges, where no callable is called."""

    @property
    def mesh(self) -> None:
        """The ranks as a DeviceMesh of one dimension; None in the process that judges."""

    @property
    def shards(self) -> list[torch.Tensor]:
        """For each rank the positions of its query rows; int64, on the CPU."""
        return self._sharding.rows

    @property
    def kv_shards(self) -> list[torch.Tensor]:
        """For each rank the positions of its keys."""
        return self._sharding.keys

    def check(
        self, fn: Callable[..., Any] | Backend | str, name: str | None = None, dequantized: Dequantizer | None = None
    ) -> Comparison:
        """Hold `fn` against exact attention, called on every rank with its shards; arguments as those of `AttentionCase`.

        Raises ValueError where dequantized is given: kernels that quantize inside are judged in one process.
        """
        __tracebackhide__ = True
        _refuse_dequantized(dequantized)

        def judged(subject: RankedSubject) -> Comparison:
            __tracebackhide__ = True
            return self._check_over_ranks(subject, self._mark.backward)

        self._comparison = self._over_ranks(fn, name, judged)
        return self._comparison

    def check_invariants(
        self,
        fn: Callable[..., Any] | Backend | str,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
        name: str | None = None,
        dequantized: Dequantizer | None = None,
    ) -> InvariantReport:
        """Ask `fn`, called on every rank, what needs no tolerance; arguments as those of `check` and of `AttentionCase`."""
        __tracebackhide__ = True
        _refuse_dequantized(dequantized)
        from pytest_attn.cases.checking import check_invariants

        def judged(subject: RankedSubject) -> InvariantReport:
            __tracebackhide__ = True
            return check_invariants(self._run, subject, self._spec, only, skip)

        return self._over_ranks(fn, name, judged)

    def measure(
        self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False, name: str | None = None
    ) -> Latency:
        """Check `fn`, time it on all ranks at once, and compare the p50 of the slowest with the baseline.

        Arguments, results and errors are those of `AttentionCase`. A baseline is one of so many ranks, of their shards, and of
        what connects their devices.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.measuring import Measuring
        from pytest_attn.latency.work import direction_of
        from pytest_attn.timing.ranked_measurement import RankedMeasurement

        direction, needs_gradients = direction_of(backward), self._mark.backward or bool(backward)
        measuring = self._measuring = self._measuring or Measuring(self._run)
        measuring.expect(self._spec.device)

        def judged(subject: RankedSubject) -> Latency:
            __tracebackhide__ = True
            if measuring.timekeeper.checks_first and not self._is_checked(subject, needs_gradients):
                self._comparison = self._check_over_ranks(subject, needs_gradients)
            run, pool = self._run, self._pool
            assert pool is not None
            known = (run.session, run.item, self._spec, subject, direction, self._comparison)
            measurement = RankedMeasurement(*known, number=1, pool=pool, sharding=self._sharding)
            return measuring.measure(measuring.number(measurement))

        return self._over_ranks(fn, name, judged)

    def assert_close(self, out: torch.Tensor) -> None:
        """Refused: one process alone cannot compute a result of several ranks."""
        raise ValueError("a test with ranks compares with attn.check(fn); leave out ranks to compare an output of one process")

    def skipped_because(self) -> str:
        """Say why ranks cannot run the case here, "" where they can."""
        import torch.distributed as dist

        device = self.device
        if device.type not in ("cpu", "cuda"):
            return f"ranks run on cpu and cuda, not on {device.type}"
        if not dist.is_available() or not (dist.is_gloo_available() if device.type == "cpu" else dist.is_nccl_available()):
            return f"this torch has no {'gloo' if device.type == 'cpu' else 'NCCL'}, which ranks on {device.type} need"
        return self._too_few_gpus() or self._sharding.refused_because()

    def finish(self) -> None:
        """End the case on the ranks; fail the test where that of a rank has failed after its last judgment."""
        __tracebackhide__ = True
        if self._pool is not None and (wrong := self._pool.finish()):
            pytest.fail(wrong, pytrace=False)

    # -- details -------------------------------------------------------------------------------------------------------

    def _too_few_gpus(self) -> str:
        """Say that there are fewer GPUs than ranks, which may or can not share one, "" where that is not so."""
        from pytest_attn.ranks.shared_gpu import nccl_refuses_because
        from pytest_attn.session.requirements import too_few_gpus_because

        machine, share = self._run.machine, self._session.settings.ranks_share_gpu
        is_shared_by_nccl = share == "nccl" and self.device.type == "cuda" and machine.device_count < self.ranks
        return nccl_refuses_because() if is_shared_by_nccl else too_few_gpus_because(self.ranks, machine, share)

    def _check_over_ranks(self, subject: RankedSubject, backward: bool) -> Comparison:
        """Compare what the ranks compute, with or without gradients."""
        __tracebackhide__ = True
        from pytest_attn.cases.checking import check, spec_with
        from pytest_attn.ranks.located import located

        self._checked, self._comparison = subject, None
        return check(self._run, subject, spec_with(self._spec, backward), partial(located, sharding=self._sharding))

    def _over_ranks(
        self, fn: Callable[..., Any] | Backend | str, name: str | None, judge: Callable[[RankedSubject], _Judged]
    ) -> _Judged:
        """Return what `judge` makes of `fn` on the ranks; what these do wrong fails the test with its text alone."""
        __tracebackhide__ = True
        from pytest_attn.ranks.team import RankRaisedError, RanksLostError

        inner = self._run.subject(fn, name, self._spec)
        if not isinstance(inner, CallableSubject | RankBackend):
            raise ValueError(
                f"{inner.name} computes in one process; with ranks, attn.check takes a callable of (q, k, v),"
                f" or one of {', '.join(OVER_RANKS)}"
            )
        self._run.asked = inner
        try:
            pool = self._ready_pool()
            verdict = judge(_over(pool, inner, self._sharding))
            pool.leave(verdict)
            return verdict
        except (RankRaisedError, RanksLostError) as error:
            broken = str(error)
            if isinstance(error, RanksLostError):
                reason = broken.splitlines()[0].rstrip(":")
                self._run.outcome.record(inner, Verdict.NO_RESULT, reason=reason)
        self._run.outcome.fail(broken)

    def _ready_pool(self) -> Pool:
        """Return the pool, whose ranks have come to this judgment."""
        from pytest_attn.ranks.pools import Pools

        run = self._run
        if self._pool is None:
            with run.session.progress.during(f"starting {self.ranks} ranks", run.workload.id):
                limits = run.session.settings.rank_timeout, run.session.settings.ranks_share_gpu
                self._pool = Pools.of(run.item.config).pool(self.ranks, self.device.type, *limits)
            self._pool.run(name_for_processes(run.item))
        self._pool.await_callable()
        return self._pool


def _over(team: Team, inner: CallableSubject | RankBackend, sharding: Sharding) -> RankedSubject:
    """Return what is judged: a callable or a backend on the ranks of a team."""
    from pytest_attn.ranks.subject import RankedBackend, RankedCallable

    if isinstance(inner, RankBackend):
        return RankedBackend(inner, team, sharding)
    return RankedCallable(inner, team, sharding)


def _refuse_dequantized(dequantized: Dequantizer | None) -> None:
    if dequantized is not None:
        raise ValueError("ranks: a callable that quantizes inside is judged in one process; leave out dequantized= or ranks=")
