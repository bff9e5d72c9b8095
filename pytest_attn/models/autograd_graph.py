"""Autograd's graph: whether a backward pass runs, what it arrives at, and whether a checkpoint computes anew for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def in_backward_pass() -> bool:
    """Whether autograd computes gradients at the moment, in this thread."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def in_checkpoint() -> bool:
    """Whether the model runs a part that it may compute again for the backward pass."""
    from torch.utils import checkpoint

    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def nodes_behind(out: torch.Tensor, nodes: list[Any]) -> set[Any]:
    """Return those of some nodes that a backward pass from out arrives at."""
    found: set[Any] = set()
    seen: set[Any] = {None}
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in nodes:
            found.add(node)
        elif node is not None:
            waiting += [before for before, _ in node.next_functions]
    return found
