"""What torch.compile did to a model: whether it did, and how many graphs and graph breaks there were up to now."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Compilations(NamedTuple):
    """Graphs that were compiled, and breaks between them, in this process."""

    graphs: int = 0
    breaks: int = 0

    def since(self, before: Compilations) -> Compilations:
        """Return what came after another moment."""
        return Compilations(self.graphs - before.graphs, self.breaks - before.breaks)


def compilations() -> Compilations:
    """Count what dynamo has compiled up to now; nothing where it was never imported."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Compilations()
    return Compilations(utils.counters["stats"]["unique_graphs"], sum(utils.counters["graph_break"].values()))


def uncompiled(function: object) -> object | None:
    """Return the function that torch.compile made this one of; None where it did not make it."""
    try:
        made_of: object = vars(function).get("_torchdynamo_orig_callable")
    except Exception:  # has no fields, or stands for something that is not there
        return None
    return made_of


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile made the model, or a part of it."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in model.modules()
    )
