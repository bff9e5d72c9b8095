"""What a backend is: a subject that is registered under a name, of torch, of an optional library, or a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import Options
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import Subject
from pytest_attn.backends.versions import installed_version
from pytest_attn.workloads.dtypes import element_bytes
from pytest_attn.workloads.workload import Workload


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
    #: what it needs, in a few words, for the table of docs/reference/backends.md
    needs: str = ""
    #: the options that its configurations may set (backends/configured.py); None where it takes any
    tunable: frozenset[str] | None = frozenset()
    #: those that this one is run with; empty for the backend as it is
    configuration: Options = MappingProxyType({})

    def version(self) -> str:
        """Return the library's version; called only where the backend is available."""
        return installed_version(self.library) or "?"

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """List the options worth trying on a workload that the backend claims, besides its default; --attn-tune times them.

        backward: whether the case asks for gradients. `configuration` holds the options when `prepare` is called.
        """
        del workload, machine, backward
        return ()

    def variant(self, name: str) -> Backend | None:
        """Return this backend's own "compile" or "max_autotune" variant; None where compiling its callable will do."""
        del name
        return None

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
        """The distribution's version."""
        return self.source.version()

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where the library or the device is missing, or the device is of another architecture."""
        return self.source.missing_because() or needs_cuda(machine, *self.capability_range)

    def pads_by_mask(self, workload: Workload) -> bool:
        """Most libraries get the lengths."""
        del workload
        return False

    def broken_because(self) -> str | None:
        """Import the library."""
        return self.source.broken_because()

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what the interface cannot say, then what the library refuses by itself."""
        reasons = self.capabilities.refusals(workload, backward)
        return reasons or self.native_refusals(workload, machine, backward)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Ask the library, in its own words."""
        del workload, machine, backward
        return []


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
