"""One call of a kernel as invariants make it: the tensors that it is handed, and its results, gradients at any later time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.empty_rows import EmptyRows
from pytest_attn.correctness.spec import CheckSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tensors:
    """q, k, v and dout as a kernel is handed them: in its own layout, with whatever strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Tensors:
        """Return all four, changed."""
        return Tensors(*(change(getattr(self, name)) for name in ("q", "k", "v", "dout")))


class StartedCall:
    """A call whose forward pass is done: `finish` runs the backward pass, where there is one, and returns the results."""

    def __init__(
        self,
        spec: CheckSpec,
        calling: Callable[[], AbstractContextManager[object]],
        leaves: list[Tensor],
        handed_out: dict[str, Tensor],
        dout: Tensor,
        empty_rows: EmptyRows,
    ) -> None:
        """calling: makes the context of each call."""
        self._spec, self._calling, self._empty_rows = spec, calling, empty_rows
        self._leaves, self.handed_out, self._dout = leaves, handed_out, dout

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Copies of out and lse, in native layout, as they are now."""
        return self._results({}, {name: t.detach().clone() for name, t in self.handed_out.items()})

    def finish(self) -> dict[str, Tensor]:
        """Return out, lse and gradients, in native layout."""
        __tracebackhide__ = True
        if self._spec.backward:
            return self.gradients(("out",), (self._dout,))
        return self._results({})

    def gradients(self, of: tuple[str, ...], flowing: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the results, with the gradients that arise where `flowing` arrives at the outputs `of`."""
        __tracebackhide__ = True
        import torch

        outputs = [self.handed_out[name] for name in of]
        if not all(output.requires_grad for output in outputs):
            raise ContractError("out carries no gradient; backward=True needs a callable that autograd can follow")
        with self._calling():
            grads = torch.autograd.grad(outputs, self._leaves, flowing, allow_unused=True)
        zeros = (leaf.new_zeros(leaf.shape) if grad is None else grad for leaf, grad in zip(self._leaves, grads, strict=True))
        return self._results(dict(zip(("dq", "dk", "dv"), zeros, strict=True)))

    def _results(self, gradients: dict[str, Tensor], outputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return results in native layout. outputs: copies, while a backward pass may still need what was handed out."""
        spec = self._spec
        if spec.device.type == "cuda":
            import torch

            torch.cuda.synchronize(spec.device)
        both = {**(outputs or self.handed_out), **gradients}
        return self._empty_rows.forget(
            {name: (t if name == "lse" else spec.in_layout(t)).detach() for name, t in both.items()}
        )
