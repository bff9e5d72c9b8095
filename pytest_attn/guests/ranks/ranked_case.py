"""`attn` on a rank: its shards of the case's tensors, and the callables that it computes for the process that judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import current, machine_of
from pytest_attn.backends.named import is_name
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.cases.case import AttentionCase, case_of, make_case
from pytest_attn.cases.conclude import skip
from pytest_attn.cases.context import CaseContext, mark_of
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.tensors import CaseTensors
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.guests.ranks.over_ranks import Place, RankBackend
from pytest_attn.guests.ranks.rank_server import Rank, RankServer, rank_of
from pytest_attn.guests.ranks.ranked_executor import OnRanks
from pytest_attn.guests.ranks.ranked_items import RankedMark, RankedParameter
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.shards import RankCache, parts_of, whole_of
from pytest_attn.guests.ranks.worker_timing import RankTiming
from pytest_attn.invariants.report import InvariantReport
from pytest_attn.latency.protocol import threads
from pytest_attn.latency.result import Latency
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.workloads.inputs import Inputs, PageLists, draw_inputs, page_lists

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has
    from torch.distributed.device_mesh import DeviceMesh


def make_ranked_case(request: pytest.FixtureRequest, parameter: RankedParameter) -> AttentionCase | RankCase:
    """Make the case of a test over ranks: in the process that judges one whose callables run on them; on a rank its part.

    Skips the test where it cannot run.
    """
    __tracebackhide__ = True
    item: pytest.Item = request.node
    session = session_of(item.config)
    mark = mark_of(item, session)
    assert isinstance(mark, RankedMark)
    if rank := rank_of(request.config):
        return RankCase(rank, parameter, mark, session)
    if not (session.kernels.are_tested or session.kernels.judges_nothing):  # faulty kernels know of no rank
        return make_case(request, parameter)
    executor = OnRanks(item, Sharding(parameter.workload, mark.shard, parameter.ranks), mark.device, session)
    request.addfinalizer(executor.finish)
    context = CaseContext(request, parameter, mark, session, executor)
    if reason := executor.skip_reason():
        skip(context, None, reason)
    return case_of(context)


class RankCase(CaseTensors):
    """One rank's part of a workload. Tensors are its shards; `workload` is the whole.

    q, k and v are the rank's, and so are the query rows of mask and bias. Mask and bias have all keys, in their own order.
    cu_seqlens and kv_lens count what the rank holds.
    """

    is_judged = True  # which the other process finds out

    def __init__(self, rank: Rank, parameter: RankedParameter, mark: RankedMark, session: AttentionSession) -> None:
        self._sharding = Sharding(parameter.workload, mark.shard, parameter.ranks)
        super().__init__(parameter.workload, mark, session, Executor(parameter.workload))
        self._rank, self.rank, self.ranks = rank, rank.rank, parameter.ranks
        self._registry = session.registrations.registry
        self._backend = session.kernels.backend_named(parameter.backend) if parameter.backend else None

    @property
    def backend(self) -> Backend | None:
        """The backend of the case, None where the test takes none."""
        return self._backend

    @property
    def device(self) -> torch.device:
        return self._rank.device

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        return self._rank.group

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a DeviceMesh of one dimension, "ranks", made when it is first asked for."""
        return self._rank.mesh

    @property
    def shards(self) -> list[torch.Tensor]:
        """For each rank the positions of its query rows; int64, on the CPU."""
        return self._sharding.rows

    @property
    def kv_shards(self) -> list[torch.Tensor]:
        """For each rank the positions of its keys."""
        return self._sharding.keys

    @property
    def mask(self) -> torch.Tensor | None:
        """The rank's rows of the mask, (batch or 1, heads or 1, rows, kv_len), True = visible; None as for one process."""
        whole = super().mask
        return None if whole is None else whole[:, :, self._rows]

    @property
    def bias(self) -> torch.Tensor | None:
        """The rank's rows of the bias, where it has rows."""
        whole = self._inputs.bias
        return whole if whole is None or whole.shape[2] == 1 else whole[:, :, self._rows]

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Boundaries of the rank's part of packed query sequences, (batch + 1,), int32."""
        return self._boundaries(self._workload.q_lens)

    @property
    def cu_seqlens_kv(self) -> torch.Tensor | None:
        """Boundaries of the rank's part of packed key sequences, (batch + 1,), int32."""
        return None if self._cache is not None else self._boundaries(self._workload.kv_lens)

    @property
    def kv_lens(self) -> torch.Tensor | None:
        """Numbers of the rank's keys that batch entries see at most, (batch,), int32, where padded or in pages."""
        if self._cache is not None:
            return self._cache.kv_lens.to(self.device)
        lengths = self._inputs.kv_lens
        if lengths is None:
            return None
        keys = self._sharding.keys[self.rank].to(lengths.device)
        return (keys[None] < lengths[:, None]).sum(1, dtype=torch.int32)

    @property
    def page_table(self) -> torch.Tensor | None:
        """The rank's own pages of each batch entry, (batch, pages per sequence), int32."""
        return None if self._cache is None else self._cache.page_table.to(self.device)

    @property
    def reference(self) -> NoReturn:
        """Refused: exact attention is computed once, by the process that judges."""
        raise ValueError("a rank has no attn.reference; attn.check compares what all ranks return")

    def check(self, fn: Callable[..., Any] | Backend | str, name: str | None = None) -> Comparison:
        """Compute `fn` on this rank's shards as often as the process that judges asks for it; return its comparison."""
        comparison: Comparison = self._served(fn, name)
        return comparison

    def check_invariants(
        self,
        fn: Callable[..., Any] | Backend | str,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
        name: str | None = None,
    ) -> InvariantReport:
        """Check the invariants in the same way; return the report."""
        report: InvariantReport = self._served(fn, name)
        return report

    def measure(self, fn: Callable[..., Any] | Backend | str, backward: object = False, name: str | None = None) -> Latency:
        """Compute, and time, `fn` in step with the other ranks; return the latency that the process that judges found."""
        latency: Latency = self._served(fn, name)
        return latency

    # -- details -------------------------------------------------------------------------------------------------------

    def _served(self, fn: Callable[..., Any] | Backend | str, name: str | None) -> Any:
        if isinstance(fn, str) and is_name(fn):
            fn = self._registry.function_named(fn)
        spec, backend = self._spec, self._registry[fn] if isinstance(fn, str) else fn
        defects: list[KnownDefect] = []
        if isinstance(backend, RankBackend):
            fn, spec = self._prepared(backend), spec.for_subject(backend)
            defects = backend.defects_over(self._sharding, machine_of(self.device), spec.backward)
        assert callable(fn)
        server = RankServer(fn, self._sharding, self.rank, spec.layout, spec.declared.has_lse, self.device)
        timing = RankTiming(fn, spec, self._sharding, self._rank, defects)
        with threads(None):  # which a measurement may change
            return self._rank.serve(server, timing.step, name or "")

    def _prepared(self, backend: RankBackend) -> AttentionFn:
        """Return what calls a library on this rank, prepared when the judge first asks: it may form groups, and hang."""
        prepared: list[AttentionFn] = []

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            with quiet(), current(str(self.device)):
                if not prepared:
                    place = Place(self.rank, self.ranks, self._rank.group, self._rank.mesh, self.device)
                    prepared.append(backend.prepare_on_rank(self._inputs, self._sharding, place, self._mark.backward))
                return prepared[0](q, k, v)

        return call

    @property
    def _rows(self) -> torch.Tensor:
        return self._sharding.rows[self.rank].to(self.device)

    def _boundaries(self, lengths: tuple[int, ...] | None) -> torch.Tensor | None:
        if lengths is None or not self._workload.is_packed:
            return None
        if self._cache is not None:  # queries are whole on every rank
            return self._inputs.cu_seqlens
        mine = self._sharding.lengths_of(lengths, self.rank)
        return torch.tensor([0, *mine]).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def _inputs(self) -> Inputs:
        """The whole tensors, on the rank's device: they are the same in every process."""
        spec = self._declared
        return draw_inputs(self._workload, spec.inputs[0], spec.seed, self.device)

    @cached_property
    def _cache(self) -> RankCache | None:
        return RankCache(self._sharding, self.rank) if self._sharding.shares_pages else None

    @cached_property
    def _page_lists(self) -> PageLists | None:
        if self._cache is None:
            return None
        own = dataclasses.replace(self._inputs, page_table=self.page_table, kv_lens=self.kv_lens)
        return page_lists(own)

    @cached_property
    def _parts(self) -> dict[str, torch.Tensor]:
        spec = self._spec
        return parts_of(whole_of(self._inputs, spec), self._sharding, spec.layout, self.rank)

    @cached_property
    def _keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._parts["k"], self._parts["v"]

    def _in_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._parts["q"]  # of the tensor, which is the whole q
