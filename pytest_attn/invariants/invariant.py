"""Invariants: statements about every attention kernel that need no tolerance of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.gradients import gradients_of
from pytest_attn.backends.machine import current, machine_of, wait
from pytest_attn.backends.raised import EndsTestError, message_of
from pytest_attn.backends.subject import AttentionFn, RefusedError, Subject, compilation_of
from pytest_attn.correctness.call import HeldResults, is_cuda_error, late_refusals_of, seeded, set_among
from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.contract import ContractError, EmptyRows, check_contract, plain
from pytest_attn.correctness.judge import apart, compare_all, may_round_dp, with_autograd
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.invariants.report import Finding
from pytest_attn.reports.lines import told_apart, z_figure
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.workload import Workload

#: out, lse, dq, dk and dv by name, in the workload's native layout
Results: TypeAlias = "Mapping[str, Tensor]"


def first_difference(found: Results, expected: Results) -> str:
    """Say where `found` first differs from `expected`, bit for bit but for the sign of zeros; "" where it does not."""
    unequal = set_among({name: (found[name] != was).any() for name, was in expected.items()})  # or NaN in both
    texts = (difference(name, found[name], expected[name]) for name in unequal)
    return next(filter(None, texts), "")


def difference(name: str, found: Tensor, expected: Tensor, where: Tensor | None = None) -> str:
    """Say where one tensor differs; `where`, boolean and broadcastable, restricts the question."""
    unequal = (found != expected) & ~(found.isnan() & expected.isnan())
    if where is not None:
        unequal = unequal & where
    if not bool(unequal.any()):
        return ""
    share = f"{int(unequal.sum()):,} of {unequal.numel():,} elements differ"
    now, was = (float(tensor[unequal][0]) for tensor in (found, expected))
    if now == was or (math.isnan(now) and math.isnan(was)):
        raise OwnDefectError(
            f"pytest-attn compared {name} while it still changed ({share}, and the first of them is {now:.9g} in both), so"
            " nothing is known of the kernel. This is a defect of pytest-attn: please report it with this text"
        )
    texts = told_apart(now, was)
    return f"{name}[{_first(unequal)}] = {texts[0]}, was {texts[1]} ({share})"


def at_first(name: str, tensor: Tensor, where: Tensor) -> str:
    """Write the first element of a tensor where `where` is True: "out[0, 1, 7, 0] = 0.5"."""
    return f"{name}[{_first(where)}] = {float(tensor[where][0]):.6g}"


def _first(where: Tensor) -> str:
    return ", ".join(str(int(i)) for i in where.nonzero()[0])


def prefixed(words: str, evidence: str) -> str:
    """Return evidence with what the kernel was asked in front of it, "" for none."""
    return evidence and f"{words}: {evidence}"


@dataclass(frozen=True)
class Tensors:
    """q, k, v and dout as a kernel is handed them: in its own layout, with whatever strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Tensors:
        """Return all four, changed."""
        return Tensors(*(change(getattr(self, name)) for name in ("q", "k", "v", "dout")))


class StartedCall:
    """A call whose forward pass is done: `finish` runs the backward pass, where there is one, and returns the results."""

    def __init__(self, probe: Probe, leaves: list[Tensor], handed_out: dict[str, Tensor], dout: Tensor) -> None:
        """leaves: q, k and v as the kernel has them. handed_out: out and lse as it returned them."""
        self._probe, self._leaves, self.handed_out, self._dout = probe, leaves, handed_out, dout

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Copies of out and lse, in native layout, as they are now."""
        return self._results({}, {name: t.detach().clone() for name, t in self.handed_out.items()})

    def finish(self) -> dict[str, Tensor]:
        """Return out, lse and gradients, in native layout."""
        __tracebackhide__ = True
        if self._needing and self._probe.backward:
            return self.gradients(("out",), (self._dout,))
        return self._results({})

    def gradients(
        self, of: tuple[str, ...], flowing: tuple[Tensor, ...], parameters: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the results, with the gradients that arise where `flowing` arrives at the outputs `of`."""
        __tracebackhide__ = True
        outputs = [self.handed_out[name] for name in of]
        if not all(output.requires_grad for output in outputs):
            raise ContractError("out carries no gradient; backward=True needs a callable that autograd can follow")
        return self._with_gradients(self._needing, parameters or {}, outputs, flowing)

    def some_gradients(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of those of q, k and v that need one, and of parameters, where dout arrives at out."""
        __tracebackhide__ = True
        needing = self._needing
        out = self.handed_out["out"]
        if not out.requires_grad:
            raise ContractError(f"out carries no gradient where nothing but {', '.join({**needing, **parameters})} needs one")
        found = self._with_gradients(needing, parameters, [out], (self._dout,))
        return {f"d{name}": found[f"d{name}"] for name in (*needing, *parameters)}

    @property
    def _needing(self) -> dict[str, Tensor]:
        return {name: leaf for name, leaf in zip("qkv", self._leaves, strict=True) if leaf.requires_grad}

    def _with_gradients(
        self,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        outputs: list[Tensor],
        flowing: tuple[Tensor, ...],
    ) -> dict[str, Tensor]:
        """Return the results with the gradients of some of q, k and v, in native layout, and of parameters."""
        __tracebackhide__ = True
        leaves = {**inputs, **parameters}
        with self._probe.calling():
            grads = gradients_of(outputs, list(leaves.values()), flowing)
        pairs = ((f"d{name}", leaf, grad) for (name, leaf), grad in zip(leaves.items(), grads, strict=True))
        found = {name: leaf.new_zeros(leaf.shape) if grad is None else plain(name, grad) for name, leaf, grad in pairs}
        of_parameters = {f"d{name}": found.pop(f"d{name}") for name in parameters}
        return {**self._results(found), **of_parameters}

    def _results(self, gradients: dict[str, Tensor], outputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return results in native layout. outputs: copies, while a backward pass may still need what was handed out."""
        probe = self._probe
        wait(probe.device)
        both = {**(outputs or self.handed_out), **gradients}
        native = {name: (t if name == "lse" else probe.spec.in_layout(t)).detach() for name, t in both.items()}
        return probe.empty_rows.forget(native)


#: Scores above which exact attention on further inputs takes too long to ask for.
_LONG = {"cpu": 1 << 27, "cuda": 1 << 32}
_KEPT_REFERENCES = 2
#: Limits count this much more: they were calibrated on the distributions of `check`, and invariants look for what is gross.
_SLACK = 2.0


@dataclass
class Count:
    """Calls of one kernel, by all probes of it, and results of the last ones."""

    calls: int = 0
    results: HeldResults = field(default_factory=HeldResults)


#: asks an invariant, by its name, in a new process with some environment variables
Elsewhere: TypeAlias = Callable[[str, Mapping[str, str]], Finding]


class Probe:
    """One kernel on one workload and one draw of inputs.

    `base` is its plain answer, which the others are compared with. `thorough` asks for more repetitions. `note` is what is to
    be told of an invariant that holds. `is_backend`: the kernel can run other workloads. `is_approximate`: it quantizes its
    inputs.
    """

    def __init__(
        self,
        subject: Subject,
        spec: CheckSpec,
        inputs: Inputs,
        deadline: Callable[[], AbstractContextManager[object]] = nullcontext,
        thorough: bool = False,
        count: Count | None = None,
    ) -> None:
        self.empty_rows = EmptyRows(inputs, spec.declared.empty_rows)
        self.subject, self.spec, self.inputs = subject, spec, inputs
        self.workload, self.device, self.backward = inputs.workload, spec.device, spec.backward
        self.is_backend, self.is_approximate = subject.is_backend, subject.is_approximate
        self.deadline, self.thorough = deadline, thorough
        self.count = count or Count()
        self._current = spec.device
        self.note = ""
        self.elsewhere: Elsewhere | None = None
        #: exact attention on `inputs`, which a check may have computed before
        self.shared: Callable[[], Reference] | None = None
        self._references: list[tuple[Inputs, Reference]] = []
        self._keep: Tensor | None = None
        self._may_round_dp = False

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def is_short(self) -> bool:
        """True where exact attention on further inputs is quick."""
        return score_elements(self.workload) <= _LONG["cuda" if self.device.type == "cuda" else "cpu"]

    @property
    def is_compiled(self) -> bool:
        """True where other strides or options cost another compilation, of seconds."""
        return compilation_of(self.kernel) is not None

    @property
    def compiles_options(self) -> bool:
        """True where other options cost another compilation, be it that other strides do not."""
        return self.is_compiled or self.subject.compiles

    # -- calling -------------------------------------------------------------------------------------------------------

    @cached_property
    def base(self) -> dict[str, Tensor]:
        """The results on the inputs as they are, in contiguous tensors."""
        __tracebackhide__ = True
        return self.run(self.inputs)

    @cached_property
    def kernel(self) -> AttentionFn:
        """The callable, prepared for the workload where a backend makes it."""
        __tracebackhide__ = True
        with self.calling():
            return self.subject.prepare(self.inputs, self.spec.backward)

    def calling(self) -> AbstractContextManager[object]:
        """Surround a call as the case wants it, silencing a library's warnings."""
        stack = ExitStack()
        stack.enter_context(self.deadline())
        stack.enter_context(current(self._current))
        stack.enter_context(self.subject.calling())
        stack.enter_context(late_refusals_of(self.subject))
        return stack

    def handed(self, inputs: Inputs | None = None) -> Tensors:
        """Return copies of q, k, v and dout, contiguous in the kernel's layout."""
        given = inputs or self.inputs
        dout = self.empty_rows.blanked(given.dout)
        return Tensors(*self.spec.handed(given), self.spec.in_layout(dout).clone())

    def run(self, inputs: Inputs) -> dict[str, Tensor]:
        """Call the kernel on other values of q, k, v and dout."""
        __tracebackhide__ = True
        return self.call(self.handed(inputs))

    def call(self, tensors: Tensors) -> dict[str, Tensor]:
        """Call the kernel, forward and where asked backward, on tensors in its own layout."""
        __tracebackhide__ = True
        return self.begin(tensors).finish()

    def begin(self, tensors: Tensors, needing: Collection[str] | None = None) -> StartedCall:
        """Call the kernel forward. needing: what needs a gradient, by default all of which any is asked.

        Raises ContractError for what cannot be compared.
        """
        __tracebackhide__ = True
        kernel, spec = self.kernel, self.spec
        needing = spec.leaves if needing is None else needing
        v = tensors.k[..., : self.workload.v_head_dim] if self.workload.v_in_k else tensors.v
        given = dict(zip("qkv", (tensors.q, tensors.k, v), strict=True))
        leaves = [t.detach().requires_grad_(spec.backward and name in needing) for name, t in given.items()]
        self.count.calls += 1
        seed = seeded(spec) if spec.workload.dropout else nullcontext()
        without = nullcontext() if spec.backward else torch.no_grad()
        with self.calling(), seed, without, KeptSwitches(self.device.type):
            result = kernel(*leaves)
        names = spec.results
        empty = Reference(self.inputs, spec.profile)
        handed_out = check_contract(result, names, empty, self.workload, spec.layout)
        if "keep" in names:
            self._keep = handed_out[names.index("keep")].clone()
        by_name = {name: t for name, t in zip(names, handed_out, strict=True) if name in ("out", "lse")}
        self._may_round_dp = self._may_round_dp or may_round_dp(by_name["out"], spec, self.subject)
        self.count.results.add(by_name["out"])
        return StartedCall(self, leaves, by_name, tensors.dout)

    # -- other workloads -----------------------------------------------------------------------------------------------

    def on(self, other: Inputs | Workload) -> Probe | None:
        """Return a probe of the same backend on another workload, None where it refuses it or is known to be wrong there."""
        workload = other if isinstance(other, Workload) else other.workload
        if not self.is_backend:
            return None
        machine = machine_of(self.device)
        if self.subject.obstacle(workload, machine, self.backward):
            return None
        if any(not defect.invariants for defect in self.subject.defects_on(workload, machine, self.backward)):
            return None  # those that name invariants show in these alone, not in plain calls
        spec = dataclasses.replace(self.spec, workload=workload)
        inputs = other if isinstance(other, Inputs) else draw_inputs(other, spec.inputs[0], spec.seed, self.device)
        return self._beside(spec, inputs)

    def on_device(self, device: torch.device) -> Probe:
        """Return a probe of the same kernel on tensors of another device, in whose calls this one's stays the current one."""
        given = {field.name: getattr(self.inputs, field.name) for field in dataclasses.fields(self.inputs)}
        moved = {name: value.to(device) for name, value in given.items() if hasattr(value, "to")}
        inputs = dataclasses.replace(self.inputs, device=device, **moved)
        spec = dataclasses.replace(self.spec, device=device)
        there = self._beside(spec, inputs)
        there._current = self._current
        return there

    def with_kernel(self, kernel: AttentionFn) -> Probe:
        """Return a probe of a callable that stands for the kernel."""
        probe = self._beside(self.spec, self.inputs)
        probe.kernel = kernel
        return probe

    def _beside(self, spec: CheckSpec, inputs: Inputs) -> Probe:
        """Return a probe of the same subject, whose calls count with these."""
        return Probe(self.subject, spec, inputs, self.deadline, self.thorough, self.count)

    # -- judging -------------------------------------------------------------------------------------------------------

    def reference(self, inputs: Inputs) -> Reference:
        """Return exact attention on `inputs`, as the kernel quantizes them where it does. The last two are kept."""
        if self.shared is not None and inputs is self.inputs and self._keep is None:
            return self.shared()
        for known, reference in self._references:
            if known is inputs:
                return reference
        with quiet():
            given = self.subject.dequantized(inputs)
            if self._keep is not None:
                given = dataclasses.replace(given, keep=self._keep)
            reference = compute_reference(given, self.spec.profile, self.backward, parameters=tuple(self.spec.parameters))
        self._references = [(inputs, reference), *self._references][:_KEPT_REFERENCES]
        return reference

    def misfit(self, results: Results, inputs: Inputs | None = None) -> str:
        """Say where results leave the budget of exact attention on `inputs`, "" where they do not."""
        found = self._misfit(results, inputs or self.inputs)
        if found and self._may_round_dp:  # as in a check, once it is wrong without
            self.spec, self._may_round_dp, self.shared, self._references = with_autograd(self.spec), False, None, []
            found = self._misfit(results, inputs or self.inputs)
        return found

    def _misfit(self, results: Results, inputs: Inputs) -> str:
        for row in self._rows(results, inputs):
            if row.excess > _SLACK:
                at = ", ".join(map(str, row.worst))
                rounding = f"{z_figure(row.excess)} times what rounding explains"
                over = "not finite where exact is" if row.wrong_positions else rounding
                found, exact = told_apart(row.found, row.exact)
                return f"{row.name}[{at}] = {found}, exact {exact} ({over})"
        return ""

    def change(self, found: Results, expected: Results | None = None, inputs: Inputs | None = None) -> str:
        """Say where results differ from those expected, by default the base, by more than rounding in another order.

        Equal bits need no further spec. Otherwise both must lie within the budget of exact attention. A fault-free kernel
        may take another path for other strides, or add up in the order in which its blocks come.
        """
        expected = self.base if expected is None else expected
        unequal = first_difference(found, expected)
        too_far = (self.misfit(found, inputs) or self.misfit(expected, inputs)) if unequal else ""
        return f"{unequal}; {too_far}" if too_far else ""

    def moved(self, found: Results, expected: Results | None = None, inputs: Inputs | None = None) -> str:
        """Say as `change` does where results differ from those expected, by more than those of two paths that round much."""
        expected, inputs = self.base if expected is None else expected, inputs or self.inputs
        changed = self.change(found, expected, inputs)
        if not changed:
            return ""
        reference = self.reference(inputs)
        pairs = ((row, found[row.name], expected[row.name]) for row in self._rows(found, inputs))
        return changed if any(apart(*pair, reference, inputs.workload)[1] for pair in pairs) else ""

    def _rows(self, results: Results, inputs: Inputs) -> list[TensorComparison]:
        of_out, of_gradients = limits_named(self.spec.limits)
        limits = of_out.without_slope, of_gradients.without_slope  # in tensors of invariants a single row may have all weight
        return compare_all(self.spec.inputs[0], results, self.reference(inputs), inputs.workload, limits)


# -- what an invariant is ----------------------------------------------------------------------------------------------------


class NotApplicable(Exception):  # noqa: N818 - it is an outcome, not an error
    """An invariant that says nothing about this kernel after all; the text is the reason."""


class OwnDefectError(Exception):
    """A comparison that contradicts itself: no kernel explains it. It ends the test, and breaks no invariant."""


class KernelRaised(Exception):  # noqa: N818 - a finding, whose text is the evidence
    """A kernel raised an error that does not refuse; the text says on what, and what it raised."""


@contextmanager
def on(words: str) -> Iterator[None]:
    """Say of what a kernel raises on what it did. words: how its tensors lie, or what they hold."""
    try:
        yield
    except (ContractError, NotApplicable, OwnDefectError, RefusedError):
        raise
    except Exception as error:
        raise KernelRaised(f"{words}: {what_was_raised(error)}") from error


def what_was_raised(error: Exception) -> str:
    """Return an exception in words, without CUDA's advice to debug it."""
    text = message_of(error)
    if isinstance(error, EndsTestError):
        return text
    said = text.splitlines()[0] if is_cuda_error(error) else text
    return f"the kernel raised {type(error).__name__}: {said}".removesuffix(": ")


class Need(NamedTuple):
    """Condition of a workload and its kernel without which an invariant says nothing; otherwise: why it says nothing."""

    is_met: Callable[[Probe], bool]
    otherwise: str


BACKEND = Need(lambda probe: probe.is_backend, "options of a callable are closed over; a backend can be run with others")
BACKWARD = Need(lambda probe: probe.backward, "the case has no backward pass")
CUDA = Need(lambda probe: probe.device.type == "cuda", "needs a CUDA device")
UNQUANTIZED = Need(
    lambda probe: not probe.is_approximate, "a kernel that quantizes its inputs mixes keys, and rounds in other places"
)
SHORT = Need(lambda probe: probe.is_short, "exact attention on further inputs would take too long")
FEW_PAIRS = Need(lambda probe: probe.is_short, "too many rows and keys to look at every pair")
ANY_STRIDES = Need(
    lambda probe: not probe.spec.declared.contiguous, "the marker says that the kernel takes contiguous tensors only"
)


#: what torch.library knows: opcheck calls it again and again
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)


@dataclass(frozen=True)
class Invariant:
    """A statement that every right kernel fulfils.

    run: returns the smallest evidence that a kernel breaks it, "" where it holds; raises NotApplicable where only a call could
    tell. needs: what must hold before it is run; the first that does not is the reason that reports give.
    """

    name: str  # what users select
    summary: str  # the statement
    calls: int  # the most calls of the kernel that it makes by default
    run: Callable[[Probe], str]
    needs: tuple[Need, ...] = ()
    thorough: bool = False  # whether it is left out unless asked for
    may_end_cuda: bool = False  # whether it asks for what ends some kernels with the CUDA context of their process

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Say why the invariant says nothing about this workload or kernel, None where it does. Calls nothing."""
        return next((need.otherwise for need in self.needs if not need.is_met(probe)), None)


def invariant(name: str, summary: str, calls: int, **more: Any) -> Callable[[Callable[[Probe], str]], Invariant]:
    """Make a function what runs an invariant. more: as `Invariant` has it."""
    return lambda run: Invariant(name, summary, calls, run, **more)
