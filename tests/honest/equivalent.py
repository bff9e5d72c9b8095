"""Faults that no result shows, with the proof: they are no mutants, and a check that calls them wrong is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.mutants.kernel import Kernel, KernelBackend, Sequence, Softmax

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Equivalent:
    """A kernel that was taken for faulty: what it does, where, and why nothing follows from it."""

    name: str
    kernel: type[Kernel]
    does: str
    references: tuple[str, ...]
    proof: str

    def backend(self) -> KernelBackend:
        """Return a new backend."""
        return KernelBackend(self.name, self.kernel())


class _SinkAsGate(Kernel):
    def with_sinks(self, seq: Sequence, state: Softmax) -> Softmax:
        sinks = self.sinks(seq)
        if sinks is None:
            return state
        out, lse = self.finish(state)
        gate = (lse - sinks[:, None]).sigmoid()
        return Softmax(lse.logaddexp(sinks[:, None]), gate * 0 + 1, out * gate[..., None])


class _SignOfP(Kernel):
    def dscores(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        delta = delta[..., None]
        return p * (dp - delta).where(p >= 0, delta)


class _FirstTileNotRescaled(Kernel):
    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        return super().rescale(old, new).masked_fill(old == -float("inf"), 1)


EQUIVALENT = (
    Equivalent(
        "sink-as-gate",
        _SinkAsGate,
        "A sink does not enter the denominator: out is multiplied by sigmoid(lse - sink).",
        ("torchtitan#2211",),
        "sigmoid(lse - sink) = exp(lse) / (exp(lse) + exp(sink)), which is the share of the denominator that the keys have.",
    ),
    Equivalent(
        "sign-of-p",
        _SignOfP,
        "dS is P delta in place of P (dP - delta) where P is negative.",
        ("HKUSTDial/flash-sparse-attention#109",),
        "P is an exponential and never negative.",
    ),
    Equivalent(
        "first-tile-not-rescaled",
        _FirstTileNotRescaled,
        "Sums are not multiplied by exp(-inf - top) = 0 when the first keys are seen.",
        ("FA#991",),
        "A row whose maximum is still -inf has seen no key, so its sums are 0, and 0 times any number is 0.",
    ),
)
