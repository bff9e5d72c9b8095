"""A callable or backend over ranks, as what is tested: it is handed whole tensors, and whole tensors come back.

So it is judged by all that judges a callable of one process: distributions, odd strides, equal calls, invariants.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, CallableSubject, Subject
from pytest_attn.correctness.contract import ContractError, native_shape
from pytest_attn.guests.ranks.over_ranks import RankBackend, profile_over
from pytest_attn.guests.ranks.rank_group import RankGroup, Tensors
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.guests.ranks.shards import join
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import canonical
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class RankedSubject(Subject):
    """A subject that is called on every rank of a team with its shards."""

    needs_all_gradients = True
    is_contained = False
    team: RankGroup
    sharding: Sharding
    _numbers: count[int]

    def declares(self, asked: Declaration, kind: str) -> Declaration:
        """Return what is declared, with a rounding of each rank's part."""
        declared = super().declares(asked, kind)
        return dataclasses.replace(declared, precision=profile_over(declared.profile, self.sharding.ranks))

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        import torch

        layout = "thd" if self.sharding.workload.is_packed else self.layout
        gathered = partial(_gathered, inputs)

        class OverRanks(torch.autograd.Function):
            """One call of the callable on all ranks, and its backward pass."""

            @staticmethod
            def forward(ctx: Any, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
                ctx.number = number
                out, *lse = self._forward(number, {"q": q, "k": k, "v": v}, layout, backward=True)
                ctx.mark_non_differentiable(*lse)
                return (out, *lse) if self.returns_lse else out

            @staticmethod
            def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> Any:
                shards = self.team.backward(ctx.number, dout)
                return None, *(self._joined(shards, f"d{name}", layout, dout.device) for name in "qkv")

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            number, (k, v) = next(self._numbers), gathered(k, v)
            if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
                return OverRanks.apply(number, q, k, v)  # type: ignore[no-untyped-call]
            results = self._forward(number, {"q": q, "k": k, "v": v}, layout, backward=False)
            return tuple(results) if self.returns_lse else results[0]

        return kernel

    def _forward(self, number: int, tensors: Tensors, layout: str, backward: bool) -> list[torch.Tensor]:
        shards = self.team.forward(number, tensors, backward)
        names = ("out", "lse") if self.returns_lse else ("out",)
        return [self._joined(shards, name, layout, tensors["q"].device) for name in names]

    def _joined(self, shards: list[Tensors], name: str, layout: str, device: torch.device) -> torch.Tensor:
        for rank, one in enumerate(shards):
            if name not in one:
                raise ContractError(f"rank {rank}: {name} is missing")
        shape = native_shape(name, self.sharding.workload)
        if layout == "bshd" and name != "lse":
            shape = (shape[0], shape[2], shape[1], *shape[3:])
        return join([one[name] for one in shards], name, shape, self.sharding, layout).to(device)


class RankedCallable(RankedSubject, CallableSubject):
    """A user's callable over ranks."""

    def __init__(self, callable_: CallableSubject, team: RankGroup, sharding: Sharding) -> None:
        super().__init__(callable_.user_function, callable_.name, callable_.declared)
        self.given_name = callable_.given_name
        self.team, self.sharding, self._numbers = team, sharding, count(1)


#: what it says, and is asked, as the backend
_OF_THE_BACKEND = (
    *("name", "library", "capabilities", "known_defects", "version", "precision_on", "unavailable_because"),
    "broken_because",
)


class RankedBackend(RankedSubject):
    """A backend over ranks, which computes one workload, split in one way. team: None where it is only asked what it takes."""

    def __init__(self, backend: RankBackend, team: RankGroup | None, sharding: Sharding) -> None:
        for said in _OF_THE_BACKEND:
            setattr(self, said, getattr(backend, said))
        self.backend, self.sharding, self._numbers = backend, sharding, count(1)
        if team is not None:
            self.team = team

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Ask the backend about its workload and split; other workloads would need other shards."""
        if workload != self.sharding.workload:
            return ["is asked about one workload over ranks"]
        return self.backend.refusals_over(self.sharding, machine, backward)

    def defects_on(self, workload: Workload, machine: Machine, backward: bool) -> list[KnownDefect]:
        return self.backend.defects_over(self.sharding, machine, backward) if workload == self.sharding.workload else []


def _gathered(inputs: Inputs, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values out of their pages, (batch, kv_heads, kv_len, dim): each rank puts its own into other pages."""
    if not inputs.workload.kv_pages:
        return k, v
    k, v = canonical(inputs.workload, k, v)
    return dataclasses.replace(inputs, k=k, v=v).gathered()
