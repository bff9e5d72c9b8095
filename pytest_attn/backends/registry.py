"""Backends by name: the built-in ones, loaded when first asked for, those that users add, and their compiled variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_attn.backends.backend import Backend, FunctionBackend
from pytest_attn.backends.compiled import Compiled
from pytest_attn.workloads.workload import Workload

#: name -> (module, class); the order is the order of tables and of "all"
_BUILTIN = {
    "math": ("pytest_attn.backends.sdpa", "Math"),
    "eager": ("pytest_attn.backends.eager", "Eager"),
    "sdpa": ("pytest_attn.backends.sdpa", "Automatic"),
    "sdpa_flash": ("pytest_attn.backends.sdpa", "Flash"),
    "sdpa_efficient": ("pytest_attn.backends.sdpa", "Efficient"),
    "sdpa_cudnn": ("pytest_attn.backends.sdpa", "Cudnn"),
    "flex": ("pytest_attn.backends.flex", "Flex"),
    "flex_decode": ("pytest_attn.backends.flex", "FlexDecode"),
    "kv_cache": ("pytest_attn.backends.kv_cache", "KvCache"),
    "varlen": ("pytest_attn.backends.varlen", "Varlen"),
}
VARIANTS = ("compile", "max_autotune")


class Registry:
    """Backends by name. `names` lists them without importing any."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[[], Backend]] = {}
        self._loaded: dict[str, Backend] = {}
        for name, (module, cls) in _BUILTIN.items():
            self._loaders[name] = _loader(module, cls)

    @property
    def names(self) -> list[str]:
        """Every registered name, without the variants."""
        return list(self._loaders)

    def add(self, backend: Backend) -> None:
        """Register a backend of your own; raise ValueError where its name is taken or not a plain word."""
        self._require_free(backend.name)
        self._loaders[backend.name] = lambda: backend

    def add_function(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        layout: str = "bhsd",
        precision: str = "flash",
        unsupported_because: Callable[[Workload], Sequence[str]] | None = None,
    ) -> None:
        """Register `fn(q, k, v, workload=workload) -> out` under `name`.

        layout: "bhsd" or "bshd", in which fn takes and returns tensors. precision: the rounding that it declares.
        unsupported_because: a function of the workload that returns reasons to refuse it, none where fn claims it.
        """
        if layout not in ("bhsd", "bshd"):
            raise ValueError(f"backend {name!r}: layout must be 'bhsd' or 'bshd', got {layout!r}")
        self.add(FunctionBackend(name, fn, layout, precision, unsupported_because))

    def _require_free(self, name: str) -> None:
        if not name.replace("_", "").replace(":", "").replace("/", "").replace(".", "").isalnum():
            raise ValueError(f"backend name {name!r} must consist of letters, digits and underscores")
        if name in self._loaders:
            raise ValueError(f"two backends are named {name!r}; rename one")

    def __getitem__(self, name: str) -> Backend:
        """Return a backend or a variant ("sdpa+compile"); raise ValueError for an unknown one."""
        if name not in self._loaded:
            self.require(name)
            base, _, variant = name.partition("+")
            backend = self._loaders[base]()
            if variant:
                backend = backend.variant(variant) or Compiled(backend, variant)
            self._loaded[name] = backend
        return self._loaded[name]

    def require(self, name: str) -> None:
        """Raise ValueError unless `name` is registered, without loading it."""
        base, plus, variant = name.partition("+")
        if base not in self._loaders:
            raise ValueError(f"unknown backend {base!r}; known: {', '.join(self._loaders)}")
        if plus and variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r} of backend {base!r}; known: {', '.join(VARIANTS)}")


def _loader(module: str, cls: str) -> Callable[[], Backend]:
    def load() -> Backend:
        from importlib import import_module

        backend: Backend = getattr(import_module(module), cls)()
        return backend

    return load
