"""Which configurations kernels that tune themselves have chosen so far."""

from __future__ import annotations

import gc
import sys


def configurations() -> dict[str, str]:
    """Return the configuration in use of each of Triton's autotuned kernels, by the kernel's name; {} without Triton."""
    autotuner = sys.modules.get("triton.runtime.autotuner")
    if autotuner is None:
        return {}
    # by their types: some objects run code of their own when their class is looked up
    kernels = [one for one in gc.get_objects() if issubclass(type(one), autotuner.Autotuner)]
    return {_name(kernel): str(kernel.best_config) for kernel in kernels if hasattr(kernel, "best_config")}


def changes(before: dict[str, str]) -> str:
    """Say which configurations are others now, "" where none is known to be."""
    now = configurations()
    found = (f"{name}: {before.get(name, 'none')}, now {config}" for name, config in now.items() if before.get(name) != config)
    return "; ".join(found)


def _name(kernel: object) -> str:
    function = getattr(kernel, "base_fn", None) or getattr(kernel, "fn", kernel)
    return str(getattr(function, "__name__", type(function).__name__))
