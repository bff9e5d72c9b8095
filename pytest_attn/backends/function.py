"""A user's own function as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.configured import Declared, Options, expanded, out_of_resources
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn, declined_because
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class FunctionBackend(Backend):
    """A user's own function `fn(q, k, v, workload=workload)` as a backend; see `Registry.add_function`."""

    library = "own"
    variants = ("compile", "max_autotune", "graph")
    full_graph = False

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        layout: str = "bhsd",
        precision: str | Precision = "flash",
        unsupported_because: Callable[[Workload], Sequence[str]] | None = None,
        configurations: Declared = (),
    ) -> None:
        self.name, self.precision = name, precision
        self._function, self._is_bshd = fn, layout == "bshd"
        self._reasons, self._declared = unsupported_because, configurations
        if callable(configurations):
            self.tunable = None
        else:
            self.tunable = frozenset(option for options in expanded(configurations) for option in options)

    def version(self) -> str:
        """Functions have none."""
        return "-"

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Ask the function given at registration."""
        reasons = self._reasons(workload) if self._reasons else ()
        cache = ["is handed no cache: a function of (q, k, v) has no attn.split_cache"] if workload.cached else []
        return [*([reasons] if isinstance(reasons, str) else reasons), *cache]

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Those given at registration."""
        return expanded(self._declared(workload) if callable(self._declared) else self._declared)

    def refusal_in(self, error: Exception) -> str | None:
        """What the function declines is refused; so is a configuration whose tiles do not fit the device."""
        return declined_because(error) or (out_of_resources(error) if self.configuration else None)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Close over the workload and turn the layout."""
        swap = self._is_bshd and not inputs.workload.is_packed

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            __tracebackhide__ = True
            if not swap:
                return self._function(q, k, v, workload=inputs.workload, **self.configuration)
            keys = (k, v) if inputs.workload.kv_pages else (k.transpose(1, 2), v.transpose(1, 2))
            out = self._function(q.transpose(1, 2), *keys, workload=inputs.workload, **self.configuration)
            return out.transpose(1, 2) if hasattr(out, "transpose") else out  # the check refuses anything but a tensor

        return call
