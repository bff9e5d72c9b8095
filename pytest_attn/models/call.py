"""One attention call of a model: what was asked, what came out, and what arrived in the backward pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.empty_rows import EmptyRows
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class AttentionCall:
    """One call, with copies of its tensors as they were when it was made.

    Args:
        module: the qualified name of the module that made it.
        number: which call of that module, from 1.
        function: what it went through.
        precision: the profile of where that rounds.
        inputs: the workload with its tensors; dout is the gradient that arrived.
        out: its output, in the layout of q: (batch, heads, rows, dim), or packed.
        subject: what computed it instead; None where the model did.
        gradients: those that arrived, by name, in the same layout.
        has_dout: whether a gradient of out arrived.
        is_again: it was computed once more for a backward pass, as checkpointing does.
        order: its index among all calls.
        empty_rows: those of out that see no key; None where nobody asked for them.
        kernel: what computed it, where that is known: "SDPA flash", or the name of a library's function.
        changes: those of q, k and v that it changed in place, and by how much at most.
        missing: gradients that it gives none of, though they are needed.
        is_detached: it gives no gradient at all, though one is needed.
    """

    module: str
    number: int
    function: str
    precision: str | Precision
    inputs: Inputs
    out: torch.Tensor
    subject: Subject | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    has_dout: bool = False
    is_again: bool = False
    order: int = 0
    empty_rows: EmptyRows | None = None
    kernel: str = ""
    changes: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    is_detached: bool = False

    @property
    def fills_empty_rows(self) -> bool:
        """Whether rows that see no key hold something else than 0."""
        if self.empty_rows is None or not self.empty_rows.are_there:
            return False
        out = self.out.to(self.inputs.device)
        return bool((out != self.empty_rows.blanked(out)).any())

    @property
    def workload(self) -> Workload:
        """The attention problem."""
        return self.inputs.workload

    @property
    def q(self) -> torch.Tensor:
        """Queries, (batch, heads, q_len, head_dim), or packed (tokens, heads, head_dim)."""
        return self.inputs.q

    @property
    def k(self) -> torch.Tensor:
        """Keys in the same layout, with kv_heads and kv_len."""
        return self.inputs.k

    @property
    def v(self) -> torch.Tensor:
        """Values in the same layout, with v_head_dim."""
        return self.inputs.v

    @property
    def dout(self) -> torch.Tensor | None:
        """The gradient of out that arrived, None where none did."""
        return self.inputs.dout if self.has_dout else None

    @property
    def bias(self) -> torch.Tensor | None:
        """The additive bias, broadcastable to (batch, heads, q_len, kv_len)."""
        return self.inputs.bias

    @property
    def sinks(self) -> torch.Tensor | None:
        """One logit per head, (heads,)."""
        return self.inputs.sinks

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask with padding, boolean, True = visible, broadcastable; None where all is visible, or packed."""
        from pytest_attn.backends.dense import boolean_mask

        return None if self.workload.is_packed else boolean_mask(self.inputs)

    @property
    def label(self) -> str:
        """What reports call it: its module, and which of its calls where it made more than one."""
        return f"{self.module or 'outside any module'}{f', call {self.number}' if self.number > 1 else ''}"

    def receive(self, name: str, gradient: torch.Tensor) -> None:
        """Keep a gradient that arrived: dout, dq, dk or dv."""
        if name == "dout":
            self.inputs, self.has_dout = dataclasses.replace(self.inputs, dout=gradient), True
        else:
            self.gradients[name] = gradient

    def complete_inputs(self) -> Inputs:
        """Return the inputs on their device, with zeros for a gradient that did not arrive."""
        import torch

        tensors: dict[str, Any] = {
            f.name: value.to(self.inputs.device)
            for f in dataclasses.fields(self.inputs)
            if isinstance(value := getattr(self.inputs, f.name), torch.Tensor)
        }
        if not self.has_dout:
            tensors["dout"] = torch.zeros_like(self.out, device=self.inputs.device)
        return dataclasses.replace(self.inputs, **tensors)
