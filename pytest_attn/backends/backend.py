"""What a backend is: a name, what it refuses and why, and how it makes a callable for one workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import DTYPES, Workload

if TYPE_CHECKING:
    import torch

Kernel: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]"


@dataclass(frozen=True)
class KnownDefect:
    """A defect of a library that is known and reported: it turns exactly this failure into an expected one.

    applies: whether a workload and machine are in the defect's reach. tensors: which results are wrong. only_nan:
    the defect shows as NaN or infinity, not as a value that is off. inputs: the input distribution that shows it.
    """

    issue: str
    summary: str
    applies: Callable[[Workload, Machine], bool]
    tensors: tuple[str, ...]
    only_nan: bool = False
    inputs: str | None = None

    def explains(self, comparison: Any) -> bool:
        """Whether everything that failed in a `Comparison` is what the defect spoils."""
        failed = [t for t in comparison.tensors if not t.passed]
        return all(t.name in self.tensors and (t.wrong_positions or not self.only_nan) for t in failed)


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
    #: which torch.compile variants make sense: a part of ("compile", "max_autotune")
    variants: tuple[str, ...] = ()
    known_defects: tuple[KnownDefect, ...] = ()

    def version(self) -> str:
        """Return the library's version; called only where the backend is available."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(self.library)
        except PackageNotFoundError:
            return "?"

    def unavailable_because(self, machine: Machine) -> str | None:
        """Say why the backend cannot run on this machine at all, or None."""
        del machine
        return None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """List the reasons why the backend refuses this workload; empty where it claims it."""
        del workload, machine, backward
        return []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """Estimate the bytes that a call needs beyond inputs, outputs and gradients."""
        del workload, backward
        return 0

    def precision_on(self, kind: str) -> str:
        """Return the profile on a type of device ("cpu", "cuda", ...)."""
        del kind
        return self.precision

    def variant(self, name: str) -> Backend | None:
        """Return this backend's own "compile" or "max_autotune" variant; None where compiling its callable will do."""
        del name
        return None

    @abstractmethod
    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Return a callable of (q, k, v) in the native layout of `inputs`; its first call ends the set-up."""

    def __repr__(self) -> str:
        return f"<backend {self.name}>"


class FunctionBackend(Backend):
    """A user's own function `fn(q, k, v, workload=workload)` as a backend; see `Registry.add_function`."""

    library = "own"

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        layout: str = "bhsd",
        precision: str = "flash",
        unsupported_because: Callable[[Workload], Sequence[str]] | None = None,
    ) -> None:
        self.name, self.fn, self.layout, self.precision = name, fn, layout, precision
        self._reasons = unsupported_because

    def version(self) -> str:
        """Functions have none."""
        return "-"

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Ask the function given at registration."""
        return list(self._reasons(workload)) if self._reasons else []

    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Close over the workload and turn the layout."""
        swap = self.layout == "bshd" and not inputs.workload.is_packed

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if not swap:
                return self.fn(q, k, v, workload=inputs.workload)
            out = self.fn(*(t.transpose(1, 2) for t in (q, k, v)), workload=inputs.workload)
            return out.transpose(1, 2)

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
    return "; ".join(backend.unsupported_because(workload, machine, backward)) or None if backend else None
