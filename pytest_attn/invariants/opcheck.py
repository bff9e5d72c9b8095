"""What torch.library asks of a registered operator."""

from __future__ import annotations

from typing import Any

from pytest_attn.invariants.invariant import Invariant
from pytest_attn.invariants.probe import Probe


class Opcheck(Invariant):
    """A registered operator has a right schema, fake tensors, and autograd that tracing can follow."""

    name = "opcheck"
    summary = "torch.library.opcheck passes, where the callable is a registered operator"
    calls = 4

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Operators only."""
        return None if _is_operator(probe.subject.user_function) else "the kernel is not a registered operator"

    def run(self, probe: Probe) -> str:
        """Run torch's own checks."""
        import torch

        tensors = probe.handed()
        given = tuple(t.requires_grad_(probe.backward) for t in (tensors.q, tensors.k, tensors.v))
        operator: Any = probe.subject.user_function
        probe.count.calls += self.calls
        with probe.calling():
            said = torch.library.opcheck(operator, given, raise_exception=False)
        failed = {name: words for name, words in said.items() if words != "SUCCESS"}
        return "; ".join(f"{name}: {str(words).splitlines()[0]}" for name, words in failed.items())


def _is_operator(subject: object) -> bool:
    import torch

    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)
    return isinstance(subject, kinds)
