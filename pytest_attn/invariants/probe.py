"""What an invariant may do with a kernel: call it, forward and backward, and ask it about other inputs and workloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, obstacle
from pytest_attn.backends.compiled import compilation_of
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current, machine_of
from pytest_attn.correctness.compare import ContractError, check_contract, compare_tensor, limits_named
from pytest_attn.correctness.judge import late_refusals_of
from pytest_attn.correctness.precision import precision_named
from pytest_attn.correctness.question import Question, in_layout
from pytest_attn.correctness.reference import Reference, compute_reference, score_elements
from pytest_attn.invariants.difference import Results, first_difference
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Scores above which exact attention on further inputs takes too long to ask for.
_LONG = {"cpu": 1 << 27, "cuda": 1 << 32}
_KEPT_REFERENCES = 2
#: Limits count this much more: they were calibrated on the distributions of `check`, and invariants look for what is gross.
_SLACK = 2.0


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


@dataclass
class Count:
    """Calls of one kernel, by all probes of it."""

    calls: int = 0


class Pending:
    """A call whose forward pass is done: `finish` runs the backward pass, where there is one, and returns the results."""

    def __init__(self, probe: Probe, leaves: list[Tensor], handed_out: dict[str, Tensor], dout: Tensor) -> None:
        self.probe, self.leaves, self.handed_out, self.dout = probe, leaves, handed_out, dout

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Copies of out and lse, in native layout, as they are now."""
        return {name: t.clone() for name, t in self._results({}).items()}

    def finish(self) -> dict[str, Tensor]:
        """Return out, lse and gradients, in native layout."""
        __tracebackhide__ = True
        if self.probe.backward:
            return self.gradients(("out",), (self.dout,))
        return self._results({})

    def gradients(self, of: tuple[str, ...], flowing: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the results, with the gradients that arise where `flowing` arrives at the outputs `of`."""
        __tracebackhide__ = True
        import torch

        outputs = [self.handed_out[name] for name in of]
        if not all(output.requires_grad for output in outputs):
            raise ContractError("out carries no gradient; backward=True needs a callable that autograd can follow")
        with self.probe.calling():
            grads = torch.autograd.grad(outputs, self.leaves, flowing, allow_unused=True)
        zeros = (leaf.new_zeros(leaf.shape) if grad is None else grad for leaf, grad in zip(self.leaves, grads, strict=True))
        return self._results(dict(zip(("dq", "dk", "dv"), zeros, strict=True)))

    def _results(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        question = self.probe.question
        if question.device.type == "cuda":
            import torch

            torch.cuda.synchronize(question.device)
        both = {**self.handed_out, **gradients}
        return {name: (t if name == "lse" else in_layout(t, question)).detach() for name, t in both.items()}


class Probe:
    """One kernel on one workload and one draw of inputs.

    `base` is its plain answer, which the others are held against. `thorough` asks for more repetitions.
    """

    def __init__(
        self,
        subject: Callable[..., Any] | Backend,
        question: Question,
        inputs: Inputs,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        thorough: bool = False,
        count: Count | None = None,
    ) -> None:
        self.subject, self.question, self.inputs = subject, question, inputs
        self.guard, self.thorough = guard, thorough
        self.count = count or Count()
        self._current = question.device
        self._kernel: Callable[..., Any] | None = None
        self._base: dict[str, Tensor] | None = None
        self._references: list[tuple[Inputs, Reference]] = []

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return self.inputs.workload

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.question.device

    @property
    def backward(self) -> bool:
        """Whether gradients are asked for."""
        return self.question.backward

    @property
    def calls(self) -> int:
        """Calls of the kernel so far, on any workload."""
        return self.count.calls

    @property
    def is_backend(self) -> bool:
        """Whether the kernel can be asked about other workloads."""
        return isinstance(self.subject, Backend)

    @property
    def is_approximate(self) -> bool:
        """Whether the kernel quantises its inputs."""
        return isinstance(self.subject, Backend) and self.subject.is_approximate

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

    @property
    def kernel(self) -> Callable[..., Any]:
        """The callable, prepared for the workload where a backend makes it."""
        __tracebackhide__ = True
        if self._kernel is None:
            is_backend = isinstance(self.subject, Backend)
            with self.calling():
                self._kernel = self.subject.prepare(self.inputs, self.backward) if is_backend else self.subject  # type: ignore[union-attr, assignment]
        assert self._kernel is not None
        return self._kernel

    def calling(self) -> AbstractContextManager[object]:
        """Surround a call as the case wants it, silencing a library's warnings."""
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(self.guard())
        stack.enter_context(current(self._current))
        stack.enter_context(quiet() if self.is_backend else nullcontext())
        stack.enter_context(late_refusals_of(self.subject))
        return stack

    def handed(self, inputs: Inputs | None = None) -> Tensors:
        """Return copies of q, k, v and dout, contiguous in the kernel's layout."""
        given = inputs or self.inputs
        tensors = (given.q, False), (given.k, True), (given.v, True), (given.dout, False)
        return Tensors(*(in_layout(t, self.question, is_kv).clone() for t, is_kv in tensors))

    def run(self, inputs: Inputs) -> dict[str, Tensor]:
        """Call the kernel on other values of q, k, v and dout."""
        __tracebackhide__ = True
        return self.call(self.handed(inputs))

    def call(self, tensors: Tensors) -> dict[str, Tensor]:
        """Call the kernel, forward and where asked backward, on tensors in its own layout."""
        __tracebackhide__ = True
        return self.begin(tensors).finish()

    def begin(self, tensors: Tensors) -> Pending:
        """Call the kernel forward. Raises ContractError for a result that cannot be compared."""
        __tracebackhide__ = True
        import torch

        kernel, question = self.kernel, self.question
        leaves = [t.detach().requires_grad_(self.backward) for t in (tensors.q, tensors.k, tensors.v)]
        self.count.calls += 1
        with self.calling(), nullcontext() if self.backward else torch.no_grad():
            result = kernel(*leaves)
        names = ("out", "lse") if question.returns_lse else ("out",)
        empty = Reference(self.inputs, precision_named(question.precision))
        handed_out = check_contract(result, names, empty, self.workload, question.layout)
        return Pending(self, leaves, dict(zip(names, handed_out, strict=True)), tensors.dout)

    # -- other workloads -----------------------------------------------------------------------------------------------

    def on(self, other: Inputs | Workload) -> Probe | None:
        """Return a probe of the same backend on another workload, None where it refuses it or is known to be wrong there."""
        workload = other if isinstance(other, Workload) else other.workload
        if not isinstance(self.subject, Backend):
            return None
        machine = machine_of(self.device)
        if obstacle(self.subject, workload, machine, self.backward):
            return None
        if any(not defect.invariants for defect in self.subject.defects_on(workload, machine, self.backward)):
            return None  # those that name invariants show in these alone, not in plain calls
        layout = "thd" if workload.is_packed else "bhsd"
        question = dataclasses.replace(self.question, workload=workload, layout=layout)
        inputs = other if isinstance(other, Inputs) else draw_inputs(other, question.inputs[0], question.seed, self.device)
        return self._beside(question, inputs)

    def on_device(self, device: torch.device) -> Probe:
        """Return a probe of the same kernel on tensors of another device, in whose calls this one's stays the current one."""
        given = {field.name: getattr(self.inputs, field.name) for field in dataclasses.fields(self.inputs)}
        moved = {name: value.to(device) for name, value in given.items() if hasattr(value, "to")}
        inputs = dataclasses.replace(self.inputs, device=device, **moved)
        question = dataclasses.replace(self.question, device=device)
        there = self._beside(question, inputs)
        there._current = self._current
        return there

    def with_kernel(self, kernel: Callable[..., Any]) -> Probe:
        """Return a probe of a callable that stands for the kernel."""
        probe = self._beside(self.question, self.inputs)
        probe._kernel = kernel
        return probe

    def _beside(self, question: Question, inputs: Inputs) -> Probe:
        """Return a probe of the same subject, whose calls count with these."""
        return Probe(self.subject, question, inputs, self.guard, self.thorough, self.count)

    # -- judging -------------------------------------------------------------------------------------------------------

    def reference(self, inputs: Inputs) -> Reference:
        """Return exact attention on `inputs`, as the kernel quantises them where it does. The last two are kept."""
        for known, reference in self._references:
            if known is inputs:
                return reference
        given = self.subject.dequantised(inputs) if isinstance(self.subject, Backend) and self.is_approximate else inputs
        with quiet():
            reference = compute_reference(given, precision_named(self.question.precision), self.backward)
        self._references = [(inputs, reference), *self._references][:_KEPT_REFERENCES]
        return reference

    def misfit(self, results: Results, inputs: Inputs | None = None) -> str:
        """Say where results leave the budget of exact attention on `inputs`, "" where they do not."""
        inputs = inputs or self.inputs
        reference = self.reference(inputs)
        of_out, of_gradients = limits_named(self.question.limits)
        for name, tensor in results.items():
            limits = of_gradients if name.startswith("d") else of_out
            row = compare_tensor(name, self.question.inputs[0], tensor, reference, inputs.workload, limits)
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

        Equal bits need no further question. Otherwise both must lie within the budget of exact attention: an honest kernel
        may take another path for other strides, or add up in the order in which its blocks come.
        """
        expected = self.base if expected is None else expected
        unequal = first_difference(found, expected)
        too_far = (self.misfit(found, inputs) or self.misfit(expected, inputs)) if unequal else ""
        return f"{unequal}; {too_far}" if too_far else ""
