"""What a backend is: a name, what it refuses and why, and how it makes a callable for one workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import Options, expanded, out_of_resources
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine, current
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import DTYPES, Workload

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.configured import Declared

Kernel: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]"


@dataclass(frozen=True)
class KnownDefect:
    """A defect of a library that is known and reported: it turns exactly this failure into an expected one.

    applies: whether a workload and machine are in the defect's reach. tensors: which results are wrong. only_nan:
    the defect shows as NaN or infinity, not as a value that is off. inputs: the input distribution that shows it.
    changes_input: inputs ("q", "k", "v") that it changes in place. shows: whether a failed `TensorComparison` looks like it;
    without, every failure of these tensors does. invariants: names of those that it may break, empty where it may break any;
    tensors are empty where only invariants show it.
    """

    issue: str
    summary: str
    applies: Callable[[Workload, Machine], bool]
    tensors: tuple[str, ...]
    only_nan: bool = False
    inputs: str | None = None
    changes_input: tuple[str, ...] = ()
    shows: Callable[[Any, Workload], bool] = lambda comparison, workload: True
    invariants: tuple[str, ...] = ()

    def spoils(self, workload: Workload, machine: Machine, backward: bool) -> bool:
        """Whether a workload is in its reach: one of gradients only is in a backward pass."""
        is_of_gradients = bool(self.tensors) and not self.changes_input and all(name.startswith("d") for name in self.tensors)
        return (backward or not is_of_gradients) and self.applies(workload, machine)

    def explains(self, comparison: Any, workload: Workload) -> bool:
        """Whether everything that failed in a `Comparison` is what the defect spoils, and looks like it."""
        failed = [t for t in comparison.tensors if not t.passed]
        unchanged = set(comparison.changed) <= set(self.changes_input)
        return unchanged and all(
            t.name in self.tensors and (t.wrong_positions or not self.only_nan) and self.shows(t, workload) for t in failed
        )


class RefusedError(Exception):
    """A backend refused a workload that it had claimed, when it compiled; the text is its reason."""


class Backend(ABC):
    """Something that computes attention.

    Three outcomes are kept apart: `unavailable_because` and `unsupported_because` say why a case is skipped; once both
    are silent, the backend has claimed the case, and an exception or a wrong value is a failure.
    """

    #: what users type
    name: str
    #: the distribution it comes from, for reports
    library: str = "torch"
    #: the precision profile that it declares (correctness/precision.py)
    precision: str = "flash"
    #: whether its callables return (out, lse)
    returns_lse: bool = False
    #: which variants make sense: a part of ("compile", "max_autotune", "graph")
    variants: tuple[str, ...] = ()
    #: whether it quantises its inputs; then `dequantised` says to what
    is_approximate: bool = False
    #: words that the kernels it launches on a CUDA device answer to, as `attn.assert_launched` takes them; empty where any may
    launches: tuple[str, ...] = ()
    #: whether torch.compile follows its callables without a break; where not, breaks are counted and reported
    full_graph: bool = True
    #: what its interface can say, for the table of docs/backends.md; None where it depends on a user's function
    capabilities: Capabilities | None = None
    #: what it needs, in a few words, for the same table
    needs: str = ""
    known_defects: tuple[KnownDefect, ...] = ()
    #: the options that its configurations may set (backends/configured.py); None where it takes any
    tunable: frozenset[str] | None = frozenset()
    #: those that this one is run with; empty for the backend as it is
    configuration: Options = MappingProxyType({})

    def version(self) -> str:
        """Return the library's version; called only where the backend is available."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(self.library)
        except PackageNotFoundError:
            return "?"

    def pads_by_mask(self, workload: Workload) -> bool:
        """Whether it hides padded keys behind a mask: 0 * NaN is NaN by the rules of arithmetic, so padding must be finite."""
        del workload
        return True

    def unavailable_because(self, machine: Machine) -> str | None:
        """Say why the backend cannot run on this machine at all, or None. Imports no optional library."""
        del machine
        return None

    def broken_because(self) -> str | None:
        """Import what the backend needs, and say in the library's own words why that failed, or None."""
        return None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """List the reasons why the backend refuses this workload; empty where it claims it."""
        del machine
        return self.capabilities.refusals(workload, backward) if self.capabilities else []

    def defects_on(self, workload: Workload, machine: Machine, backward: bool) -> list[KnownDefect]:
        """List the known defects that have a workload in their reach."""
        return [defect for defect in self.known_defects if defect.spoils(workload, machine, backward)]

    def dequantised(self, inputs: Inputs) -> Inputs:
        """Return what an approximate backend makes of q, k and v when it quantises them, as float32 tensors.

        It is held against exact attention on these values: what quantisation itself loses is its design, what goes wrong
        after it is not.
        """
        return inputs

    def refusal_in(self, error: Exception) -> str | None:
        """Return the library's reason where an exception of the callable is a refusal that only its compiler knew."""
        del error
        return None

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """Estimate the bytes that a call needs beyond inputs, outputs and gradients."""
        del workload, backward
        return 0

    def precision_on(self, kind: str) -> str:
        """Return the profile on a type of device ("cpu", "cuda", ...)."""
        del kind
        return self.precision

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

    @abstractmethod
    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Return a callable of (q, k, v) in the native layout of `inputs`; its first call ends the set-up."""

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
        """Most libraries are told the lengths."""
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
        precision: str = "flash",
        unsupported_because: Callable[[Workload], Sequence[str]] | None = None,
        configurations: Declared = (),
    ) -> None:
        self.name, self.fn, self.layout, self.precision = name, fn, layout, precision
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
        return [reasons] if isinstance(reasons, str) else list(reasons)

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Those given at registration."""
        return expanded(self._declared(workload) if callable(self._declared) else self._declared)

    def refusal_in(self, error: Exception) -> str | None:
        """A configuration whose tiles do not fit the device is refused, not wrong."""
        return out_of_resources(error) if self.configuration else None

    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Close over the workload and turn the layout."""
        swap = self.layout == "bshd" and not inputs.workload.is_packed

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            __tracebackhide__ = True
            if not swap:
                return self.fn(q, k, v, workload=inputs.workload, **self.configuration)
            out = self.fn(*(t.transpose(1, 2) for t in (q, k, v)), workload=inputs.workload, **self.configuration)
            return out.transpose(1, 2) if hasattr(out, "transpose") else out  # what is no tensor is refused by the check

        return call


def scores_bytes(workload: Workload, backward: bool, copies: int = 2) -> int:
    """Estimate the bytes of an attention that writes out its scores in float32, `copies` times."""
    scores = workload.batch * workload.heads * workload.q_len * workload.kv_len
    return scores * 4 * copies * (2 if backward else 1)


def tensor_bytes(workload: Workload, backward: bool) -> int:
    """Count the bytes of inputs, outputs and gradients, kept twice: once pristine, once for the kernel."""
    return 2 * (workload.bytes("backward") if backward else workload.bytes())


def half_precision_only(workload: Workload) -> list[str]:
    """Refuse float32, as kernels on tensor cores do."""
    return [] if DTYPES[workload.dtype][1] == 2 else [f"takes float16 and bfloat16 only, not {workload.dtype}"]


def obstacle(backend: Backend | None, workload: Workload, machine: Machine, backward: bool) -> str | None:
    """Say why a case cannot run: backend unavailable, device too small, workload refused; None where it is claimed."""
    if backward and workload.kv_pages:
        return "paged keys have no gradient"
    if backend is not None and (reason := backend.unavailable_because(machine)):
        return reason
    needed = tensor_bytes(workload, backward) + (backend.workspace(workload, backward) if backend else 0)
    if needed > machine.memory:
        there = machine.memory / 2**30
        return f"{workload.id} needs about {needed / 2**30:,.0f} GiB, {machine.name} has {there:,.0f} GiB"
    if backend is None:
        return None
    with quiet(), current(machine.device):
        reasons = backend.broken_because() or backend.unsupported_because(workload, machine, backward) or ()
    return reasons if isinstance(reasons, str) else "; ".join(reasons) or None
