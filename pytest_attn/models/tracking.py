"""Which module of a model runs: its qualified name at any time, and which of its kind ran without a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Tracker:
    """The modules that run at the moment, the outermost first, and all that ran."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._running: list[torch.nn.Module] = []
        self._ran: dict[str, torch.nn.Module] = {}
        self._callers: dict[str, torch.nn.Module] = {}
        self._with_softmax: dict[str, None] = {}
        #: where the functions are through which calls went, also within other calls
        self.functions: set[tuple[str, str]] = set()
        self._model = model
        if model is not None:
            self._name(model)

    def _name(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name.replace("_orig_mod.", "") or type(root).__name__)

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Follow which module runs, by hooks that are removed afterwards: of the model, or of any module without one."""
        from torch.nn.modules import module as every

        hooks = []
        try:
            if self._model is None:
                hooks.append(every.register_module_forward_pre_hook(self._enter))
                hooks.append(every.register_module_forward_hook(self._leave, always_call=True))
            for part in [] if self._model is None else self._model.modules():
                hooks.append(part.register_forward_pre_hook(self._enter))
                hooks.append(part.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running.clear()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if id(module) not in self._names:
            self._name(module)
        self._running.append(module)
        self._ran[self._names[id(module)]] = module

    def _leave(self, module: torch.nn.Module, _args: Any, _result: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass

    @property
    def current(self) -> str:
        """The qualified name of the module that runs; "" outside all."""
        return self._names[id(self._running[-1])] if self._running else ""

    def note_call(self) -> str:
        """Note an attention call of the module that runs, and return its name."""
        if self._running:
            self._callers[self.current] = self._running[-1]
        return self.current

    def note_softmax(self) -> None:
        """Note that the module that runs computes a softmax of its own."""
        if self._running:
            self._with_softmax[self.current] = None

    @property
    def silent(self) -> list[str]:
        """Modules that ran without an attention call, and are built like one that made some."""
        kinds = {_kind(module) for module in self._callers.values()}
        return [name for name, module in self._ran.items() if name not in self._callers and _kind(module) in kinds]

    @property
    def with_softmax(self) -> list[str]:
        """Modules that computed a softmax outside of every attention call."""
        return list(self._with_softmax)


def _kind(module: torch.nn.Module) -> tuple[object, ...]:
    """Return what modules have in common that are built alike: their class, and the names of all they hold."""
    return (
        type(module),
        tuple(name for name, _ in module.named_parameters()),
        tuple(name for name, _ in module.named_modules()),
    )
