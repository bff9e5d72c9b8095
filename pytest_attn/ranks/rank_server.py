"""What a rank does with one call: cut its shards, call the callable, keep what a backward pass needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pytest_attn.correctness.call import fault_of_change
from pytest_attn.correctness.contract import ContractError
from pytest_attn.ranks.rank_group import Tensors
from pytest_attn.ranks.shards import cut, parts_of
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.sharding import Sharding

#: calls of which a backward pass may still follow
_KEPT = 4


class _Called(NamedTuple):
    """One call: its leaves, copies of them, and its result."""

    given: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]
    out: torch.Tensor


class RankServer:
    """Serves the calls of one callable on one rank. device: the rank's own."""

    def __init__(
        self,
        fn: Callable[..., Any],
        sharding: Sharding,
        rank: int,
        layout: str,
        returns_lse: bool,
        device: torch.device | None = None,
    ) -> None:
        self._fn, self._sharding, self._rank = fn, sharding, rank
        self._layout, self._returns_lse, self._device = layout, returns_lse, device
        self._calls: OrderedDict[int, _Called] = OrderedDict()
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, number: int, tensors: Tensors, backward: bool) -> dict[str, torch.Tensor]:
        """Return the rank's shards of out, and lse. Raises ContractError; what the callable raises passes through."""
        parts = parts_of(tensors, self._sharding, self._layout, self._rank, self._device)
        given = {name: part.detach().requires_grad_(backward) for name, part in parts.items()}
        kept = {name: shard.detach().clone() for name, shard in given.items()}
        with torch.set_grad_enabled(backward):
            results = self._named(self._fn(*given.values()))
        self._require_unchanged(given, kept)
        self._require_own_results()
        self._last = (results["out"].detach(), results["out"].detach().clone())
        if backward:
            if not results["out"].requires_grad:
                raise ContractError(
                    f"rank {self._rank}: out carries no gradient; backward=True needs a callable that autograd can follow"
                )
            self._calls[number] = _Called(given, kept, results["out"])
            while len(self._calls) > _KEPT:
                self._calls.popitem(last=False)
        return {name: self._handed_over(result) for name, result in results.items()}

    def backward(self, number: int, dout: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rank's shards of dq, dk and dv. Raises as `forward` does."""
        call = self._calls[number]
        found = torch.autograd.grad(
            call.out,
            list(call.given.values()),
            self._shard_of_dout(dout, call.out),
            allow_unused=True,
            retain_graph=True,
        )
        self._require_unchanged(call.given, call.kept)
        gradients: dict[str, torch.Tensor] = {}
        for (name, leaf), gradient in zip(call.given.items(), found, strict=True):
            if gradient is None:
                raise ContractError(
                    f"rank {self._rank}: d{name} is missing: out does not depend on {name}, as autograd sees it"
                )
            if gradient.dtype != leaf.dtype:
                raise ContractError(f"rank {self._rank}: d{name} has dtype {gradient.dtype}; expected {leaf.dtype}")
            gradients[f"d{name}"] = self._handed_over(gradient)
        return gradients

    # -- details -------------------------------------------------------------------------------------------------------

    def _shard_of_dout(self, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the rank's shard of dout; all of it where out is whole on every rank."""
        if out.shape == dout.shape:
            return dout.detach().clone().to(self._device or dout.device)
        return cut(dout.detach(), "dout", self._sharding, self._layout, self._rank, self._device)

    def _named(self, result: object) -> dict[str, torch.Tensor]:
        """Return the results by name; raise ContractError where these are other than expected."""
        results: list[Any] = list(result) if isinstance(result, tuple | list) else [result]
        names = ("out", "lse") if self._returns_lse else ("out",)
        if len(results) != len(names) or not all(isinstance(one, torch.Tensor) for one in results):
            found = "(" + ", ".join(map(describe, results)) + ")" if isinstance(result, tuple | list) else describe(result)
            wanted = "(out, lse), its shards" if self._returns_lse else "its shard of out"
            advice = "; say returns_lse=True in the marker if it returns (out, lse)" if len(results) == 2 else ""
            raise ContractError(f"rank {self._rank}: the callable returned {found}; expected {wanted}{advice}")
        return dict(zip(names, results, strict=True))

    def _require_unchanged(self, given: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
        """Raise ContractError where the callable has changed its inputs."""
        for name, shard in given.items():
            off = (shard.detach().double() - kept[name].double()).abs().nan_to_num(0.0)
            if bool((off > 0).any()):
                largest = float(off.max())
                raise ContractError(f"rank {self._rank}: {fault_of_change({name: largest})}")

    def _require_own_results(self) -> None:
        """Raise ContractError where this call has changed what the one before returned."""
        if self._last is not None and not bool(((self._last[0] == self._last[1]) | self._last[1].isnan()).all()):
            raise ContractError(f"rank {self._rank}: the callable changed the out of an earlier call, which is in use")

    def _handed_over(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()
