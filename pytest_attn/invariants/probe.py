"""What an invariant may do with a kernel: call it, forward and backward, and run it on other inputs and workloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current, machine_of
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.backends.variants import compilation_of
from pytest_attn.correctness.call import late_refusals_of, seeded
from pytest_attn.correctness.comparison import limits_named
from pytest_attn.correctness.contract import ContractError, EmptyRows, check_contract
from pytest_attn.correctness.judge import compare_tensor
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.workload import Workload

#: out, lse, dq, dk and dv by name, in the workload's native layout
Results: TypeAlias = "Mapping[str, Tensor]"


def first_difference(found: Results, expected: Results, before: str = "was") -> str:
    """Say where `found` first differs from `expected`, bit for bit but for the sign of zeros; "" where it does not."""
    for name in expected:
        text = difference(name, found[name], expected[name], before)
        if text:
            return text
    return ""


def difference(name: str, found: Tensor, expected: Tensor, before: str = "was", where: Tensor | None = None) -> str:
    """Say where one tensor differs; `where`, boolean and broadcastable, restricts the question."""
    unequal = (found != expected) & ~(found.isnan() & expected.isnan())
    if where is not None:
        unequal = unequal & where
    if not bool(unequal.any()):
        return ""
    return f"{at_first(name, found, unequal)}, {before} {_value(expected, unequal)} ({_share(unequal)})"


def at_first(name: str, tensor: Tensor, where: Tensor) -> str:
    """Write the first element of a tensor where `where` is True: "out[0, 1, 7, 0] = 0.5"."""
    index = ", ".join(str(int(i)) for i in where.nonzero()[0])
    return f"{name}[{index}] = {_value(tensor, where)}"


def _value(tensor: Tensor, where: Tensor) -> str:
    return f"{float(tensor[where][0]):.6g}"


def _share(unequal: Tensor) -> str:
    return f"{int(unequal.sum()):,} of {unequal.numel():,} elements differ"


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

    def __init__(
        self,
        spec: CheckSpec,
        calling: Callable[[], AbstractContextManager[object]],
        leaves: list[Tensor],
        handed_out: dict[str, Tensor],
        dout: Tensor,
        empty_rows: EmptyRows,
    ) -> None:
        """calling: makes the context of each call."""
        self._spec, self._calling, self._empty_rows = spec, calling, empty_rows
        self._leaves, self.handed_out, self._dout = leaves, handed_out, dout

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Copies of out and lse, in native layout, as they are now."""
        return self._results({}, {name: t.detach().clone() for name, t in self.handed_out.items()})

    def finish(self) -> dict[str, Tensor]:
        """Return out, lse and gradients, in native layout."""
        __tracebackhide__ = True
        if self._spec.backward:
            return self.gradients(("out",), (self._dout,))
        return self._results({})

    def gradients(self, of: tuple[str, ...], flowing: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the results, with the gradients that arise where `flowing` arrives at the outputs `of`."""
        __tracebackhide__ = True

        outputs = [self.handed_out[name] for name in of]
        if not all(output.requires_grad for output in outputs):
            raise ContractError("out carries no gradient; backward=True needs a callable that autograd can follow")
        with self._calling():
            grads = torch.autograd.grad(outputs, self._leaves, flowing, allow_unused=True)
        zeros = (leaf.new_zeros(leaf.shape) if grad is None else grad for leaf, grad in zip(self._leaves, grads, strict=True))
        return self._results(dict(zip(("dq", "dk", "dv"), zeros, strict=True)))

    def _results(self, gradients: dict[str, Tensor], outputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return results in native layout. outputs: copies, while a backward pass may still need what was handed out."""
        spec = self._spec
        if spec.device.type == "cuda":
            torch.cuda.synchronize(spec.device)
        both = {**(outputs or self.handed_out), **gradients}
        return self._empty_rows.forget(
            {name: (t if name == "lse" else spec.in_layout(t)).detach() for name, t in both.items()}
        )


#: Scores above which exact attention on further inputs takes too long to ask for.
_LONG = {"cpu": 1 << 27, "cuda": 1 << 32}
_KEPT_REFERENCES = 2
#: Limits count this much more: they were calibrated on the distributions of `check`, and invariants look for what is gross.
_SLACK = 2.0


@dataclass
class Count:
    """Calls of one kernel, by all probes of it."""

    calls: int = 0


class Probe:
    """One kernel on one workload and one draw of inputs.

    `base` is its plain answer, which the others are compared with. `thorough` asks for more repetitions. `note` is what is to
    be told of an invariant that holds.
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
        self.deadline, self.thorough = deadline, thorough
        self.count = count or Count()
        self._current = spec.device
        self._kernel: AttentionFn | None = None
        self._base: dict[str, Tensor] | None = None
        self.note = ""
        self._references: list[tuple[Inputs, Reference]] = []
        self._keep: Tensor | None = None

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return self.inputs.workload

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.spec.device

    @property
    def backward(self) -> bool:
        """Whether gradients are asked for."""
        return self.spec.backward

    @property
    def calls(self) -> int:
        """Calls of the kernel so far, on any workload."""
        return self.count.calls

    @property
    def is_backend(self) -> bool:
        """Whether the kernel can run other workloads."""
        return self.subject.is_backend

    @property
    def is_approximate(self) -> bool:
        """Whether the kernel quantizes its inputs."""
        return self.subject.is_approximate

    @property
    def is_short(self) -> bool:
        """Whether exact attention on further inputs is quick."""
        return score_elements(self.workload) <= _LONG["cuda" if self.device.type == "cuda" else "cpu"]

    @property
    def is_compiled(self) -> bool:
        """Whether other strides or options cost another compilation, of seconds."""
        return compilation_of(self.kernel) is not None

    # -- calling -------------------------------------------------------------------------------------------------------

    @property
    def base(self) -> dict[str, Tensor]:
        """The results on the inputs as they are, in contiguous tensors."""
        __tracebackhide__ = True
        if self._base is None:
            self._base = self.run(self.inputs)
        return self._base

    def settle(self, base: dict[str, Tensor], note: str) -> None:
        """Take another answer for the plain one, and say why."""
        self._base, self.note = base, note

    @property
    def kernel(self) -> AttentionFn:
        """The callable, prepared for the workload where a backend makes it."""
        __tracebackhide__ = True
        if self._kernel is None:
            with self.calling():
                self._kernel = self.subject.prepare(self.inputs, self.backward)
        return self._kernel

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

    def begin(self, tensors: Tensors) -> StartedCall:
        """Call the kernel forward. Raises ContractError for a result that cannot be compared."""
        __tracebackhide__ = True

        kernel, spec = self.kernel, self.spec
        v = tensors.k[..., : self.workload.v_head_dim] if self.workload.v_in_k else tensors.v
        leaves = [t.detach().requires_grad_(self.backward) for t in (tensors.q, tensors.k, v)]
        self.count.calls += 1
        with self.calling(), seeded(spec), nullcontext() if self.backward else torch.no_grad():
            result = kernel(*leaves)
        names = spec.results
        empty = Reference(self.inputs, spec.profile)
        handed_out = check_contract(result, names, empty, self.workload, spec.layout)
        if "keep" in names:
            self._keep = handed_out[names.index("keep")].clone()
        by_name = {name: t for name, t in zip(names, handed_out, strict=True) if name in ("out", "lse")}
        return StartedCall(spec, self.calling, leaves, by_name, tensors.dout, self.empty_rows)

    # -- other workloads -----------------------------------------------------------------------------------------------

    def on(self, other: Inputs | Workload) -> Probe | None:
        """Return a probe of the same backend on another workload, None where it refuses it or is known to be wrong there."""
        workload = other if isinstance(other, Workload) else other.workload
        if not self.subject.is_backend:
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
        probe._kernel = kernel
        return probe

    def _beside(self, spec: CheckSpec, inputs: Inputs) -> Probe:
        """Return a probe of the same subject, whose calls count with these."""
        return Probe(self.subject, spec, inputs, self.deadline, self.thorough, self.count)

    # -- judging -------------------------------------------------------------------------------------------------------

    def reference(self, inputs: Inputs) -> Reference:
        """Return exact attention on `inputs`, as the kernel quantizes them where it does. The last two are kept."""
        for known, reference in self._references:
            if known is inputs:
                return reference
        with quiet():
            given = self.subject.dequantized(inputs)
            given = given if self._keep is None else dataclasses.replace(given, keep=self._keep)
            reference = compute_reference(given, self.spec.profile, self.backward)
        self._references = [(inputs, reference), *self._references][:_KEPT_REFERENCES]
        return reference

    def misfit(self, results: Results, inputs: Inputs | None = None) -> str:
        """Say where results leave the budget of exact attention on `inputs`, "" where they do not."""
        inputs = inputs or self.inputs
        reference = self.reference(inputs)
        of_out, of_gradients = limits_named(self.spec.limits)
        for name, tensor in results.items():
            limits = of_gradients if name.startswith("d") else of_out
            row = compare_tensor(name, self.spec.inputs[0], tensor, reference, inputs.workload, limits)
            if row.excess > _SLACK:
                at = ", ".join(map(str, row.worst))
                over = (
                    f"{row.excess:.3g} times what rounding explains"
                    if not row.wrong_positions
                    else "not finite where exact is"
                )
                return f"{name}[{at}] = {row.found:.6g}, exact {row.exact:.6g} ({over})"
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
