"""A subject of one type: a user's callable, or a backend. `Registry.subject` makes it where it is handed over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pytest_attn.backends.capabilities import Capabilities, dropout_refusal
from pytest_attn.backends.contexts import judged_code, quiet
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.machine import Machine, current
from pytest_attn.backends.named import NamedFunction
from pytest_attn.backends.precision import Precision, default_on
from pytest_attn.backends.raised import declined_because, refused_by_torch
from pytest_attn.workloads.catalog import is_for_gpu
from pytest_attn.workloads.functions import describe, function_name, printable
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.positions import has_long_sequences
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: how many times the tensors of a kernel the check of a long workload may take
LONG_CHECK = 3


def scores_bytes(workload: Workload, backward: bool, copies: int = 2) -> int:
    """Estimate the bytes of an attention that writes out its scores in float32, `copies` times."""
    scores = workload.batch * workload.heads * workload.q_len * workload.kv_len
    return scores * 4 * copies * (2 if backward else 1)


#: says what a kernel that quantizes makes of (q, k, v), in the layout of its callable: float tensors of the same shapes
Dequantizer: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]"
#: what computes attention on tensors of one workload: returns out, or (out, lse)
AttentionFn: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]"


@dataclasses.dataclass
class Compilation:
    """The cost of compiling one callable: seconds of its first call in a test, never part of a latency, and graph breaks."""

    seconds: float = 0.0
    graph_breaks: int = 0


def compilation_of(kernel: AttentionFn) -> Compilation | None:
    """Return what compiling `kernel` took, None where it was not compiled."""
    found = getattr(kernel, "compilation", None)
    return found if isinstance(found, Compilation) else None  # a mock has any attribute that it is asked for


class RefusedError(Exception):
    """A backend refused a workload that it had claimed, when it compiled, or a function declined one; the text says why."""


class Subject(ABC):
    """A subject: its name, how it takes tensors, where it rounds, and what it can and cannot do.

    Three outcomes are kept apart: `unavailable_because` and `unsupported_because` say why a case is skipped. If both
    are silent, the subject has claimed the case: an exception or a wrong value is a failure.
    """

    #: what users type, and what reports call it
    name: str
    #: the distribution it comes from, for reports; "" for a callable
    library: str = ""
    #: "bhsd" or "bshd", in which a callable takes and returns tensors; of packed workloads it is "thd", of a backend "bhsd"
    layout: str = "bhsd"
    #: the precision profile that it declares (backends/precision.py), None for the one that holds where none is declared
    precision: str | Precision | None = None
    #: whether its kernels return (out, lse)
    returns_lse: bool = False
    #: whether it quantizes its inputs; then `dequantized` says to what
    is_approximate: bool = False
    #: makes the bias of q, (batch, heads, q_len, head_dim) in float64, where the kernel does; None where it is given one
    bias_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    #: whether it compiles a kernel for each workload, which takes seconds; where compilers.py says so, the registry sets it
    compiles: bool = False
    #: whether its library makes a plan for other strides and options, which takes a part of a second
    makes_plans: bool = False
    #: what its interface can say; None where it depends on a user's function
    capabilities: Capabilities | None = None
    known_defects: tuple[KnownDefect, ...] = ()
    #: whether it can be asked about any workload; a user's callable closes over the options of one
    is_backend: ClassVar[bool] = True
    #: whether q, k and v all need a gradient where it is called, whatever is asked for
    needs_all_gradients: ClassVar[bool] = False
    #: returns the tensors of its test that it may close over, by the names of the parameters that they are
    closed_over: Callable[[], Mapping[str, torch.Tensor]] = dict
    #: the user's own function, None for a backend
    user_function: Callable[..., Any] | None = None
    #: the name that a test gave its callable, "" where it gave none
    given_name: str = ""

    @property
    def named(self) -> NamedFunction | None:
        """The function that it calls where it was given as "module:function"; None for any other."""
        return self.user_function if isinstance(self.user_function, NamedFunction) else None

    @property
    def is_contained(self) -> bool:
        """True where none of its author's code runs in this process, unless that is this package's, or a library's."""
        return False

    @abstractmethod
    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return a callable of (q, k, v) for the workload of `inputs`; its first call ends the set-up."""

    def prepare_timed(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return what is timed: the same callable, without anything that only a judgment needs; out is its first result."""
        return self.prepare(inputs, backward)

    def version(self) -> str:
        """Return the version of its library; "" where it has none."""
        return ""

    def precision_on(self, kind: str) -> str | Precision:
        """Return its precision profile on a type of device ("cpu", "cuda", ...)."""
        return self.precision or default_on(kind)

    def declares(self, asked: Declaration, kind: str) -> Declaration:
        """Return what it takes and returns on a type of device. asked: what its test declares.

        Raises ValueError for a precision that is none.
        """
        return asked.of_backend(self.precision_on(kind), self.returns_lse)

    def calling(self) -> AbstractContextManager[object]:
        """Return what its code runs in: a library's warnings must not fail a test, those of a user's own function may."""
        return judged_code(self.name, is_quiet=True)

    def baseline_name(self, test: str) -> str:
        """Return what its baselines are filed under. test: where it was handed over."""
        return self.name

    def origin(self) -> dict[str, str]:
        """Return where it comes from, for who finds a failure of it later."""
        return {"library": self.library, "version": self.version()}

    # -- what it takes -------------------------------------------------------------------------------------------------

    def unavailable_because(self, machine: Machine) -> str | None:
        """Say why it cannot run on this machine at all, or None. Imports no optional library."""
        return None

    def broken_because(self) -> str | None:
        """Import what it needs, and say in the library's own words why that failed, or None."""
        return None

    def declared_refusals(self, workload: Workload, backward: bool = False) -> list[str]:
        """List the reasons for which it declares to refuse this workload, on any machine; no library is asked."""
        return self.capabilities.refusals(workload, backward) if self.capabilities else []

    def claims(self, workload: Workload, backward: bool = False) -> bool:
        """Return whether it declares that it takes a workload, or declares nothing; no library is asked."""
        if (workload.dropout and self.is_backend) or _no_gradient(workload, backward):
            return False
        return not self.declared_refusals(workload, backward)

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """List the reasons why it refuses this workload; empty where it claims it."""
        return self.declared_refusals(workload, backward)

    def refusal_in(self, error: Exception) -> str | None:
        """Return the library's reason where an exception of a kernel is a refusal that only its compiler, or torch, knew."""
        return refused_by_torch(error)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """Estimate the bytes that a call needs beyond inputs, outputs and gradients."""
        return 0

    def obstacle(self, workload: Workload, machine: Machine, backward: bool) -> str | None:
        """Say why a case cannot run: no gradient, unavailable, device too small, workload refused; None if it is claimed."""
        if reason := _no_gradient(workload, backward) or self.unavailable_because(machine):
            return reason
        if reason := _too_small(machine, workload, backward, self.workspace(workload, backward)):
            return reason
        if not self.claims(workload, backward) and (reason := self.declines(workload, machine, backward)):
            return reason  # no library is imported for that, which may take many seconds
        with quiet(), current(machine.device):
            reason = self.broken_because()
        return reason or self.declines(workload, machine, backward)

    def declines(self, workload: Workload, machine: Machine, backward: bool) -> str | None:
        """Say why it refuses a workload where it can run at all; None if it claims it."""
        if workload.dropout and self.is_backend:
            return dropout_refusal(workload)
        with quiet(), current(machine.device):
            reasons = (
                (self.capabilities or Capabilities()).quantized_refusals(workload)  # nobody else reads descales
                or self.unsupported_because(workload, machine, backward)
                or ()
            )
        return reasons if isinstance(reasons, str) else "; ".join(reasons) or None

    @property
    def has_own_inputs(self) -> bool:
        """True where it quantizes its inputs, or makes one of them, so that exact results are of those that it has."""
        return self.is_approximate or self.bias_of is not None

    # -- what is known of it -------------------------------------------------------------------------------------------

    def dequantized(self, inputs: Inputs) -> Inputs:
        """Return what an approximate kernel makes of q, k and v when it quantizes them, as float32 tensors.

        It is compared with exact attention on these values: what quantization itself loses is its design, what goes wrong
        after it is not.
        """
        return inputs

    def pads_by_mask(self, workload: Workload) -> bool:
        """Whether it hides padded keys behind a mask: 0 * NaN is NaN by the rules of arithmetic, so padding must be finite."""
        return True

    def defects_on(self, workload: Workload, machine: Machine, backward: bool) -> list[KnownDefect]:
        """List the known defects that have a workload in their reach."""
        return [defect for defect in self.known_defects if defect.spoils(workload, machine, backward)]

    @property
    def known_to_change(self) -> frozenset[str]:
        """The inputs that a known defect of it changes in place; values are judged all the same."""
        return frozenset(name for defect in self.known_defects for name in defect.changes_input)


class CallableSubject(Subject):
    """A user's callable of (q, k, v), whose options are closed over; what it declares is what its test says of it.

    name: what reports call it; by default its qualified name with what it closes over. within: the qualified name of its test.
    """

    is_backend = False
    user_function: Callable[..., Any]
    _dequantizer: Dequantizer | None = None

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, declared: Declaration = Declaration(), within: str = ""
    ) -> None:
        self.user_function, self.declared = fn, declared
        self.given_name = printable(name or "")
        self.name = self.given_name or called_name(fn, within)
        self.layout, self.precision, self.returns_lse = declared.inner_layout, declared.precision, declared.has_lse
        self.bias_of = inspect.getattr_static(fn, "bias_of", None)  # a mock has any that is asked for
        self.compiles = "_torchdynamo_orig_callable" in getattr(fn, "__dict__", ())  # torch.compile has made it

    def declares(self, asked: Declaration, kind: str) -> Declaration:
        return self.declared.on(kind)

    def quantizing(self, dequantizer: Dequantizer) -> CallableSubject:
        """Have the callable compared with exact attention on the q, k and v that `dequantizer` returns.

        Raises TypeError for what cannot be called.
        """
        if not callable(dequantizer):
            raise TypeError(f"dequantized must be a function of (q, k, v), got {describe(dequantizer)}")
        self._dequantizer, self.is_approximate = dequantizer, True
        return self

    def dequantized(self, inputs: Inputs) -> Inputs:
        """Return what the test says that the callable makes of q, k and v, and of q its bias.

        Raises ValueError for other than three tensors, and for a bias of another shape than the workload's.
        """
        if self.bias_of is not None:
            bias = self.bias_of(inputs.q.detach().double()).detach()
            if bias.shape != (shape := PARAMETERS["bias"].shape(inputs.workload)):
                found = f"{tuple(bias.shape)} of q {tuple(inputs.q.shape)}; the bias of {inputs.workload.id} is {shape}"
                raise ValueError(f"{self.name} makes a bias of shape {found}")
            inputs = dataclasses.replace(inputs, bias=bias, bias_of=self.bias_of)
        if self._dequantizer is None:
            return inputs
        w, declared = inputs.workload, self.declared
        given = [declared.given(self._swapped(getattr(inputs, name), name, w).contiguous(), w, name != "q") for name in "qkv"]
        with self.calling():
            made = self._dequantizer(*given)
        if not isinstance(made, tuple | list) or [hasattr(t, "shape") for t in made] != [True] * 3:
            raise ValueError(f"dequantized must return three tensors (q, k, v), it returned {describe(made)}")
        whole = (declared.taken(t.detach(), w, name != "q") for name, t in zip("qkv", made, strict=True))
        q, k, v = (self._swapped(t, name, w) for name, t in zip("qkv", whole, strict=True))
        return dataclasses.replace(inputs, q=q, k=k, v=v, descales=None)

    def _swapped(self, tensor: torch.Tensor, name: str, w: Workload) -> torch.Tensor:
        """Swap rows and heads of q, k or v for "bshd", there and back; pools stay as they are."""
        is_as_it_is = self.layout != "bshd" or w.is_packed or (name != "q" and w.kv_pages is not None)
        return tensor if is_as_it_is else tensor.transpose(1, 2)

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same callable, declared the same."""
        return isinstance(other, CallableSubject) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        return *identity_of(self.user_function), self.name, self.declared

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        return self.function_on(inputs)

    def function_on(self, inputs: Inputs) -> Callable[..., Any]:
        """Return the user's function for some inputs."""
        return self.named.on(inputs) if self.named else self.user_function

    @property
    def is_contained(self) -> bool:
        return self.named is not None and self.named.is_isolated

    def calling(self) -> AbstractContextManager[object]:
        """Leave its warnings to its test."""
        return judged_code(self.name, is_quiet=False)

    def baseline_name(self, test: str) -> str:
        """Return a name that does not change with the line that the callable stands on; it belongs to its test."""
        return f"{self.given_name or function_name(self.user_function)} of {test}"

    def refusal_in(self, error: Exception) -> str | None:
        """Return why the function declines the case, where it says so by a NotImplementedError with a text."""
        return declined_because(error)

    def origin(self) -> dict[str, str]:
        return {name: printable(str(getattr(self.user_function, f"__{name}__", ""))) for name in ("module", "qualname")}


def name_of(subject: Subject | str) -> str:
    """Return what reports call a subject, or what is judged in the place of one."""
    return subject if isinstance(subject, str) else subject.name


def identity_of(fn: Callable[..., Any]) -> tuple[int, int]:
    """Return what tells callables apart: each access makes another bound method of the same function and object."""
    owner = getattr(fn, "__self__", None)
    return id(fn if owner is None else getattr(fn, "__func__", fn)), id(owner)


def obstacle_of_any(workload: Workload, machine: Machine, backward: bool) -> str | None:
    """Say why no kernel at all can run a case here, or None."""
    return _no_gradient(workload, backward) or _too_small(machine, workload, backward, 0)


def _no_gradient(workload: Workload, backward: bool) -> str | None:
    return workload.has_no_gradient_because if backward else None


def _too_small(machine: Machine, workload: Workload, backward: bool, workspace: int) -> str | None:
    # inputs, outputs and gradients, kept twice: once pristine, once for the kernel; of a long workload what its check may take
    # at its peak, with results of other calls and the reference's chunks
    times = LONG_CHECK if has_long_sequences(workload) else 2
    needed = times * (workload.bytes("backward") if backward else workload.bytes()) + workspace
    if is_for_gpu(workload) and machine.kind == "cpu":
        return f"{workload.id} is for a GPU, with {needed / 2**30:,.1f} GiB ({needed:,} bytes): a CPU takes too long"
    if needed <= machine.memory:
        return None
    there = machine.memory / 2**30
    return f"{workload.id} needs about {needed / 2**30:,.0f} GiB, {machine.name} has {there:,.0f} GiB"


# -- what reports call a callable --------------------------------------------------------------------------------------------

#: characters of what a callable closes over, beyond which a name says no more
_LONGEST = 60


def called_name(fn: Callable[..., Any], within: str = "") -> str:
    """Return the name that a callable's author knows: qualified, and with what it closes over in brackets.

    within: the qualified name of the test that hands it over, which goes without saying.
    Examples: "my_attention", "Attention.forward", "my_attention[causal=True]" of a partial, "make.fn[window=128]" of a local
    function, "lambda[my_attention]" of a lambda that calls it, "test_mine.lambda" of one that calls nothing.
    """
    with contextlib.suppress(ValueError):  # of a circle
        fn = inspect.unwrap(fn)  # of what decorators that say so were put around, as torch.compile is around a function
    if not isinstance(fn, types.FunctionType):
        return function_name(fn)
    name = fn.__qualname__.replace(".<locals>", "").replace("<lambda>", "lambda")
    inside = list(_closed_over(fn))
    if fn.__name__ == "<lambda>" and (called := _first_called(fn)):
        inside.insert(0, called)
    if kept := ",".join(inside):
        name = f"{name}[{kept if len(kept) <= _LONGEST else f'{kept[:_LONGEST]}...'}]"
    shorter = name.removeprefix(f"{within}.") if within else name
    return printable(name if shorter == "lambda" else shorter)


def _closed_over(fn: types.FunctionType) -> Iterator[str]:
    """Yield what a function keeps beside its code: closed-over variables and defaults, where they can be written."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        yield from _setting(name, value)
    code, defaults, keywords = fn.__code__, fn.__defaults__ or (), fn.__kwdefaults__ or {}
    positional = code.co_varnames[: code.co_argcount]
    with_defaults = [*zip(positional[len(positional) - len(defaults) :], defaults, strict=True), *keywords.items()]
    for name, value in with_defaults:
        yield from _setting(name, value)


def _setting(name: str, value: object) -> Iterator[str]:
    if value is None or isinstance(value, bool | int | float | str):
        yield f"{name}={value}"
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | functools.partial):
        yield f"{name}={function_name(value)}"


def _first_called(fn: types.FunctionType) -> str:
    """Return the first callable of its module that a function names, "" where it names none."""
    names = iter(fn.__code__.co_names)
    for name in names:
        value, path = fn.__globals__.get(name), name
        while isinstance(value, types.ModuleType) and (attribute := next(names, None)):
            value, path = getattr(value, attribute, None), attribute
        if callable(value):
            return path
    return ""
