"""What torch.compile did to a model: whether it did, and how many graphs and graph breaks there were up to now."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
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


def runs_compiled(model: torch.nn.Module, step: Callable[[], Any]) -> bool:
    """Whether a step runs what torch.compile made: the step itself, the model, or what the step closes over."""
    if uncompiled(step) is not None or is_compiled(model):
        return True
    function = getattr(step, "func", step)
    try:
        held = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a function of Python
        return False
    values = (*held.nonlocals.values(), *held.globals.values())
    return any(hasattr(value, "_orig_mod") or uncompiled(value) is not None for value in values if not _is_module(value))


def _is_module(value: object) -> bool:
    return isinstance(value, ModuleType)
