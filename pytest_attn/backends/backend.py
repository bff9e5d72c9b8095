"""Backends: subjects registered under a name, of torch, of an optional library, or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import Declared, Options, expanded, out_of_resources
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine, installed_version
from pytest_attn.backends.named import NamedFunction
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.raised import declined_because
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.workloads.dtypes import element_bytes
from pytest_attn.workloads.functions import printable
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


class Backend(Subject):
    """Something that computes attention, registered under a name."""

    #: the distribution it comes from, for reports
    library: str = "torch"
    #: which variants make sense: a part of ("compile", "max_autotune", "graph")
    variants: tuple[str, ...] = ()
    #: words that the kernels it launches on a CUDA device answer to, as `attn.assert_launched` takes them; empty where any may
    launches: tuple[str, ...] = ()
    #: whether torch.compile follows its callables without a break; where not, breaks are counted and reported
    full_graph: bool = True
    #: the backend whose compiled kernels, or plans, it runs, "" for its own
    runs_kernels_of: str = ""
    #: what it needs, in a few words, for the table of --attn-list
    needs: str = ""
    #: a guest's argument of the marker attention: tests that give it take this backend; "" for tests that give none
    argument: str = ""
    #: the options that its configurations may set (backends/configured.py); None where it takes any
    tunable: frozenset[str] | None = frozenset()
    #: those that this one is run with; empty for the backend as it is
    configuration: Options = MappingProxyType({})

    @property
    def __name__(self) -> str:
        """The name, of which pytest makes that of a test."""
        return printable(self.name)

    def version(self) -> str:
        """Return the library's version; called only where the backend is available."""
        return installed_version(self.library) or "?"

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what the interface cannot say, then what a library refuses by itself."""
        reasons = super().unsupported_because(workload, machine, backward)
        return reasons or self.native_refusals(workload, machine, backward)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Ask the library about what the declaration lets through, in its own words."""
        return []

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """List the options worth trying on a workload that the backend claims, besides its default; --attn-tune times them.

        backward: whether the case asks for gradients. `configuration` holds the options when `prepare` is called.
        """
        return ()

    def variant(self, name: str) -> Backend | None:
        """Return this backend's own "compile" or "max_autotune" variant; None where compiling its callable will do."""
        return None

    def compiled_for(self, workload: Workload) -> Hashable:
        """Return what it compiles a kernel for, where it compiles: workloads for which that is equal share one."""
        return workload.id

    @property
    def refuses_itself(self) -> bool:
        """True where its own code says what it refuses beside `capabilities`."""
        return type(self).unsupported_because is not Backend.unsupported_because

    @property
    def says_what_it_takes(self) -> bool:
        """True where it says before a call what it takes."""
        return self.capabilities is not None or self.refuses_itself

    @property
    def is_slow(self) -> bool:
        """True where a case takes seconds, as where it compiles."""
        return self.compiles

    @property
    def is_contained(self) -> bool:
        """True where it is one of this package, which calls an installed library."""
        return type(self).__module__.startswith("pytest_attn.")

    def __repr__(self) -> str:
        return f"<backend {self.name}>"


class LibraryBackend(Backend):
    """A backend of an optional library: found without importing it, imported when a case needs it.

    Subclasses name the `source`, declare `capabilities`, and implement `prepare`; `native_refusals` asks the library
    itself about what the declaration lets through.
    """

    source: Library
    #: compute capabilities that its kernels are built for, both ends included
    capability_range: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (12, 1))
    capabilities: Capabilities

    @property
    def library(self) -> str:  # type: ignore[override]
        """The distribution."""
        return self.source.name

    def version(self) -> str:
        return self.source.version()

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where the library or the device is missing, or the device is of another architecture."""
        return self.source.missing_because() or needs_cuda(machine, *self.capability_range)

    def pads_by_mask(self, workload: Workload) -> bool:
        """Most libraries get the lengths."""
        return False

    def broken_because(self) -> str | None:
        return self.source.broken_because()


def needs_cuda(machine: Machine, lowest: tuple[int, int], highest: tuple[int, int]) -> str | None:
    """Refuse a device that is not a CUDA device of a compute capability between two, both included."""
    if machine.kind != "cuda":
        return "needs a CUDA device"
    if machine.capability is None or lowest <= machine.capability <= highest:
        return None
    first, last = (f"sm{major}{minor}" for major, minor in (lowest, highest))
    wanted = first if first == last else f"{first} to {last}"
    return f"needs {wanted}, this device is {machine.architecture}"


def half_precision_only(workload: Workload) -> list[str]:
    """Refuse float32, as kernels on tensor cores do."""
    return [] if element_bytes(workload.out_dtype) == 2 else [f"takes float16 and bfloat16 only, not {workload.dtype}"]


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
        precision: str | Precision | None = None,
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

    @property
    def named(self) -> NamedFunction | None:
        return self._function if isinstance(self._function, NamedFunction) else None

    @property
    def is_contained(self) -> bool:
        return self.named is not None and self.named.is_isolated

    @property
    def says_what_it_takes(self) -> bool:
        return self._reasons is not None

    def version(self) -> str:
        return "-"

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        reasons = self._reasons(workload) if self._reasons else ()
        if not isinstance(reasons, str | Sequence):
            raise TypeError(
                f"backend {self.name!r}: unsupported_because returned {reasons!r} for {workload.id};"
                " expected a list of reasons, [] where it is supported"
            )
        cache = ["is handed no cache: a function of (q, k, v) has no attn.split_cache"] if workload.cached else []
        return [*([reasons] if isinstance(reasons, str) else reasons), *cache]

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        return expanded(self._declared(workload) if callable(self._declared) else self._declared)

    def refusal_in(self, error: Exception) -> str | None:
        """Refuse what the function declines, and a configuration whose tiles do not fit the device."""
        return declined_because(error) or (out_of_resources(error) if self.configuration else None)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        swap = self._is_bshd and not inputs.workload.is_packed
        named = self.named
        function = named.on(inputs) if named else partial(self._function, workload=inputs.workload)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            __tracebackhide__ = True
            if not swap:
                return function(q, k, v, **self.configuration)
            keys = (k, v) if inputs.workload.kv_pages else (k.transpose(1, 2), v.transpose(1, 2))
            out = function(q.transpose(1, 2), *keys, **self.configuration)
            return out.transpose(1, 2) if hasattr(out, "transpose") else out  # the check refuses anything but a tensor

        return call
