"""Where two results of a kernel differ, in the words of evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

#: out, lse, dq, dk and dv by name, in the workload's native layout
Results: TypeAlias = "Mapping[str, Tensor]"


def first_difference(found: Results, expected: Results, before: str = "was") -> str:
    """Say where `found` first differs from `expected`, bit for bit but for the sign of zeros; "" where it does not."""
    for name in expected:
        text = difference(name, found[name], expected[name], before)
        if text:
            return text
    return ""


def difference(name: str, found: Tensor, expected: Tensor, before: str = "was", where: Tensor | None = None) -> str:
    """Say where one tensor differs; `where`, boolean and broadcastable, restricts the question."""
    unequal = (found != expected) & ~(found.isnan() & expected.isnan())
    if where is not None:
        unequal = unequal & where
    if not bool(unequal.any()):
        return ""
    return f"{at_first(name, found, unequal)}, {before} {_value(expected, unequal)} ({_share(unequal)})"


def at_first(name: str, tensor: Tensor, where: Tensor) -> str:
    """Write the first element of a tensor where `where` is True: "out[0, 1, 7, 0] = 0.5"."""
    index = ", ".join(str(int(i)) for i in where.nonzero()[0])
    return f"{name}[{index}] = {_value(tensor, where)}"


def _value(tensor: Tensor, where: Tensor) -> str:
    return f"{float(tensor[where][0]):.6g}"


def _share(unequal: Tensor) -> str:
    return f"{int(unequal.sum()):,} of {unequal.numel():,} elements differ"
