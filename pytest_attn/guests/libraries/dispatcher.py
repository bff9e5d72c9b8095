"""Names of the dispatchers of diffusers and transformers, each with our own backend of the same kernel."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from pytest_attn.backends.backend import Backend, LibraryBackend
from pytest_attn.backends.capabilities import ANY_SIZE, Capabilities
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.workload import Workload

#: the variants of names that torch.compile follows
COMPILABLE = ("compile", "max_autotune")


def may_say(*words: str, masks: tuple[str, ...]) -> Capabilities:
    """Declare what a dispatched function may be told; dtypes and sizes are the matter of the kernel behind it."""
    features = frozenset(("scale", "grouped heads", *words))
    return replace(ANY_SIZE, masks=frozenset(masks), features=features, dtypes=tuple(DTYPES))


#: what can be told with a mask as a tensor
ANY_MASK = may_say("bias", "alibi", "padded", "backward", masks=("causal", "any"))


@dataclass(frozen=True)
class Dispatched:
    """A name of the library: our own backend of the same kernel, which knows its limits and rounding, and what it accepts.

    precision: the profile where it is not the kernel's. known_defects: those that the library adds to the kernel's.
    """

    kernel: str
    capabilities: Capabilities
    variants: tuple[str, ...] = ()
    precision: str | None = None
    known_defects: tuple[KnownDefect, ...] = ()


#: for names that `broken_because` refuses, which only the library can tell from unknown ones
_NOT_JUDGED = Dispatched("math", Capabilities())


class Dispatcher(LibraryBackend):
    """One name of a library that hands q, k and v on to the kernel of another: "LIBRARY:NAME".

    Where a kernel is there, what it needs and what it refuses, our own backend of it says. Subclasses list the names that
    are `judged`, and how the library is called.
    """

    needs = "what the kernel needs"
    judged: dict[str, Dispatched]
    #: what the library calls what it has names for
    noun: str
    #: why its other names are not judged
    others: str

    def __init__(self, name: str) -> None:
        self.name, self.dispatched = f"{self.library}:{name}", name
        self._entry = self.judged.get(name, _NOT_JUDGED)
        self.capabilities, self.variants = self._entry.capabilities, self._entry.variants
        self.precision, self.compiles = self._entry.precision or self._kernel.precision, self._kernel.compiles
        self.known_defects = (*self._kernel.known_defects, *self._entry.known_defects)

    @abstractmethod
    def names(self) -> list[str]:
        """Return all names that the imported library has, judged or not."""

    def pads_by_mask(self, workload: Workload) -> bool:
        return True

    def unavailable_because(self, machine: Machine) -> str | None:
        return self.source.missing_because() or self._kernel.unavailable_because(machine)

    def broken_because(self) -> str | None:
        """Import the library, and refuse a name that it does not have or that is not judged."""
        if reason := super().broken_because():
            return reason
        names = self.names()
        if self.dispatched not in names:
            return f"{self.library} has no {self.noun} {self.dispatched!r}; it has {', '.join(names)}"
        if self.dispatched not in self.judged:
            return f"{self.dispatched} {self.others}: not judged; judged are {', '.join(self.judged)}"
        return None

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        return self._kernel.unsupported_because(workload, machine, backward)

    def precision_on(self, kind: str) -> str | Precision:
        return self._entry.precision or self._kernel.precision_on(kind)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return self._kernel.workspace(workload, backward)

    @cached_property
    def _kernel(self) -> Backend:
        """Our own backend of the kernel behind the name."""
        from pytest_attn.backends.registry import Registry

        return Registry()[self._entry.kernel]
