"""Something else in the place of a model's attention calls: a subject that is checked, or one at next to no cost for timing.

For timing, every call is intercepted in a first run, and what computes it is prepared. From then on the n-th call of a step is
computed by the n-th substitute: no masks are recognized, nothing is copied, no mode of torch is entered.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.backends.layouts import first_of
from pytest_attn.backends.machine import Machine, current
from pytest_attn.backends.precision import Precision, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.correctness.contract import check_contract, plain
from pytest_attn.correctness.judge import compare_rows
from pytest_attn.correctness.limits import limits_named, limits_of
from pytest_attn.correctness.reference import Reference, exact_rows
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    asks_the_same,
    to_inputs,
)
from pytest_attn.guests.models.capture import AttentionCall, Computed, Recorder, Unread
from pytest_attn.guests.models.interception import (
    InterceptedCall,
    Named,
    intercept_attention,
    is_of_transformers,
    replaced,
    transformers_intercepted,
    wrappers_of,
)
from pytest_attn.workloads.functions import function_name
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


def replacement(
    target: Callable[..., Any] | Subject | str, registry: Registry | None = None, precision: str | Precision | None = None
) -> Subject:
    """Return what computes the calls: a backend as it is or by its name, or a function of (q, k, v, workload=...).

    precision: where a function says it rounds; a backend says it itself. Raises ValueError for an unknown
    name, TypeError for a target that is none of the three.
    """
    subject = target if isinstance(target, Subject) else (registry or Registry()).subject(target)
    if subject.user_function is not None:
        return FunctionBackend(function_name(subject.user_function), subject.user_function, precision=precision)
    return subject


class Replacer(Recorder):
    """Records calls that a subject computes; one that it refuses is computed as the model does, and noted as refused."""

    def __init__(
        self, subject: Subject, machine: Machine, done: Callable[[AttentionCall], None], backward: bool = True
    ) -> None:
        super().__init__(done, backward, judges=True)
        self.refused: list[Unread] = []
        self._subject, self._machine = subject, machine
        self._prepared: list[tuple[Workload, bool, AttentionFn]] = []

    def computed(self, intercepted: InterceptedCall, arguments: AttentionArguments, inputs: Inputs) -> Computed:
        needs_gradient = self._backward and any(t.requires_grad for t in (arguments.q, arguments.k, arguments.v))
        try:
            if reason := self._subject.obstacle(inputs.workload, self._machine, needs_gradient):
                raise UnreadableError(f"{reason} ({inputs.workload.id})")
            arguments.refuse_more()
            out = self._called(arguments, inputs, needs_gradient)
            return arguments.to_result(out), self._subject.precision_on(inputs.device.type), self._subject
        except UnreadableError as refusal:
            self.refused.append(Unread(intercepted.module, intercepted.function.shown, str(refusal)))
        return super().computed(intercepted, arguments, inputs)

    def _called(self, arguments: AttentionArguments, inputs: Inputs, backward: bool) -> Any:
        """Call the subject, and hold what it returns to its contract."""
        subject, workload = self._subject, inputs.workload
        # a backend's tensors are cast already: autocast would cast the products of float32 copies, as MATH makes them, again,
        # and round scores; a function has the model's
        is_function = isinstance(subject, FunctionBackend)
        casting = nullcontext() if is_function else torch.autocast(inputs.device.type, enabled=False)
        with subject.calling(), current(inputs.device), casting:
            try:
                result = self._kernel(inputs, backward)(arguments.q, arguments.k, arguments.v)
            except Exception as error:
                if reason := subject.refusal_in(error):
                    raise UnreadableError(reason) from error
                raise
        names = ("out", "lse") if subject.returns_lse else ("out",)
        expected = Reference(inputs, precision_named(subject.precision_on(inputs.device.type)))
        return check_contract(result, names, expected, workload, "thd" if workload.is_packed else "bhsd")[0]

    def _kernel(self, inputs: Inputs, backward: bool) -> AttentionFn:
        """Prepare the subject, once for all calls that ask the same: some compile for every one that they prepare."""
        w = inputs.workload
        if w.bias or w.sinks or w.alibi or w.is_packed:
            return self._subject.prepare(inputs, backward)
        for known, is_backward, kernel in self._prepared:
            if is_backward == backward and asks_the_same(known, w):
                return kernel
        self._prepared.append((w, backward, self._subject.prepare(inputs, backward)))
        return self._prepared[-1][-1]


class ModelAttention(Subject):
    """The model's own attention; nothing is put in its place."""

    name = "model"
    is_backend = False

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        raise TypeError("a model's own attention runs in the model only")


# -- at next to no cost, for timing ------------------------------------------------------------------------------------------


#: computes one call: of q, k and v as the model's function takes them, to what that returns
Substitute = Callable[..., Any]


class SubstitutionError(Exception):
    """A step's attention cannot be replaced for a timed run; the text says why."""


class Preparation:
    """Prepares what computes each call of a step, in the order of the calls."""

    def __init__(self) -> None:
        self.substitutes: list[Substitute] = []

    def unread(self, module: str, function: str, reason: str) -> None:
        """Refuse."""
        raise SubstitutionError(f"{module}: a call of {function}: {reason}")

    def look(self, is_last: bool = False) -> str:
        """Say how what a step has computed is not attention, "" where it is, or is not looked at. is_last: of all steps."""
        del is_last
        return ""


class KeptCall(NamedTuple):
    """A call of a timed step. inputs: with its own q, k and v. out: native. versions: of these four, as torch counts them."""

    inputs: Inputs
    out: torch.Tensor
    versions: list[int]

    @classmethod
    def of(cls, inputs: Inputs, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> KeptCall | None:
        """Return it, None for tensors of inference, whose changes nobody counts."""
        q, k, v = (t.detach() for t in tensors)
        if any(t.is_inference() for t in (q, k, v, out)):
            return None
        out = out.detach()
        given = dataclasses.replace(inputs, q=q, k=k, v=v, dout=out)  # of which only the shape counts
        return cls(given, out, [t._version for t in (q, k, v, out)])

    @property
    def is_as_it_was(self) -> bool:
        """True where the model has changed none of the tensors since."""
        return self.versions == [t._version for t in (self.inputs.q, self.inputs.k, self.inputs.v, self.out)]


#: rows that are looked at of one call; what is off by no more than such a share, and so many times its budget, may be rounding
_ROWS, _SHARE, _BUDGETS = 16, 0.05, 4.0
#: looks at least, and beyond them which share of the time they may take
_FEWEST_LOOKS, _SHARE_OF_LOOKS = 4, 0.04


class BackendSubstitute(Preparation):
    """Prepares a subject for every call of a step. backward: whether the step needs gradients.

    Of one call of each timed step it keeps what was computed, in no copy, for `look`.
    """

    def __init__(self, subject: Subject, backward: bool) -> None:
        super().__init__()
        self._subject, self._backward = subject, backward
        self._looked_at, self._chosen = -1, random.Random(os.urandom(16))
        self._kept: KeptCall | None = None
        self._looks, self._looking, self._begun = 0, 0.0, time.perf_counter()

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Prepare the subject for one call, and let it compute it."""
        arguments = intercepted.read()
        arguments.refuse_more()
        inputs = to_inputs(arguments)
        # a bias or sinks that are learned get no gradient: that of a later step would be of the run that prepared it
        held = {name: t.detach() for name, t in vars(inputs).items() if hasattr(t, "detach")}
        inputs = dataclasses.replace(inputs, **held)
        kernel, number = self._subject.prepare(inputs, self._backward), len(self.substitutes)

        def compute(*tensors: torch.Tensor) -> Any:
            native = [arguments.to_native(t) for t in tensors]
            out = first_of(kernel(*native))
            if not torch.compiler.is_compiling() and number == self._looked_at:
                self._kept = KeptCall.of(inputs, native, plain("out", out))
            return arguments.to_result(out)

        self.substitutes.append(compute)
        return compute(*intercepted.tensors)

    def look(self, is_last: bool = False) -> str:
        """Look at what was kept of the last step, and choose another call for the next ones.

        Where looking takes long, only now and then, and if it is the last time.
        """
        begun = time.perf_counter()
        if self._looks >= _FEWEST_LOOKS and self._looking > _SHARE_OF_LOOKS * (begun - self._begun) and not is_last:
            return ""
        kept, self._kept = self._kept, None
        self._looked_at = self._chosen.randrange(len(self.substitutes))
        if kept is None or not kept.is_as_it_was:
            return ""
        fault = self._fault_of(kept)
        self._looks += 1
        self._looking += time.perf_counter() - begun
        return fault

    def _fault_of(self, kept: KeptCall) -> str:
        subject, w = self._subject, kept.inputs.workload
        inputs = subject.dequantized(kept.inputs) if subject.is_approximate else kept.inputs
        precision = precision_named(subject.precision_on(inputs.device.type))
        found = exact_rows(inputs, precision, ["out"], _ROWS, self._chosen)
        if found is None:
            return ""
        expected = found.expected["out"]
        got = found.of(kept.out.to(expected.value.device), w)
        got = got.where(expected.value.any(-1, keepdim=True), 0)  # rows that see no key hold what libraries like
        row = compare_rows("out", "", got, expected, w, limits_of("out", limits_named("default")))
        if row.excess <= _BUDGETS or row.relative_l2 <= _SHARE:
            return ""
        return f"the out of {subject.name} is not attention on {w.id}: it differs from it by {row.relative_l2:.2g} of its norm"


class RecordedSubstitute(Preparation):
    """Records what every call returned, and the gradients that it gave, to return them at no cost; no value changes."""

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Compute one call, and keep what it gives forward and backward."""
        aliases: list[Any] = [t.view_as(t) for t in intercepted.tensors]
        result = intercepted.with_tensors(*aliases).compute()
        out, *others = result if isinstance(result, tuple) else (result,)
        kept: list[Any] = [None, None, None]

        def keeps(place: int) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                kept[place] = gradient.detach().clone()

            return hook

        for place, alias in enumerate(aliases):
            if alias.requires_grad:
                alias.register_hook(keeps(place))
        rest = [t.detach() if hasattr(t, "detach") else t for t in others]
        self.substitutes.append(_kept_result(out.detach().clone(), kept, rest if isinstance(result, tuple) else None))
        return result


def _kept_result(out: torch.Tensor, gradients: list[Any], others: list[Any] | None) -> Substitute:
    """Return what gives `out` without computing it, and `gradients` in the backward pass. others: further results."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            return out.detach()

        @staticmethod
        def backward(ctx: Any, *dout: Any) -> Any:
            return tuple(None if g is None else g.detach() for g in gradients)

    def compute(*tensors: torch.Tensor) -> Any:
        apply: Any = Kept.apply
        result = apply(*tensors)
        return result if others is None else (result, *others)

    return compute


def substitutes_of(
    prepare: BackendSubstitute | RecordedSubstitute,
    step: Callable[[], Any],
    model: torch.nn.Module,
    functions: Iterable[Named],
) -> list[Substitute]:
    """Run a step once, and return what computes each of its calls. Raises SubstitutionError where a call is not read."""
    replaces = isinstance(prepare, BackendSubstitute) and is_of_transformers(model)
    with intercept_attention(prepare, model, functions, replaces=replaces):
        step()
    if not prepare.substitutes:
        raise SubstitutionError("no attention call was caught")
    return prepare.substitutes


class Substitution:
    """The calls of a step, in their order, each computed by one of several substitutes; `reset` before every step.

    substitutes: of all calls of a step, each way; None stands for what the model calls itself. `choose` says which way counts;
    the first one does at the start.
    """

    def __init__(self, *substitutes: Sequence[Substitute] | None) -> None:
        self._ways = substitutes
        self._next, self._is_inside = 0, False
        self.choose(0)

    def choose(self, number: int) -> None:
        """Have calls computed in one of the ways from now on."""
        self._substitutes = self._ways[number]

    def reset(self) -> None:
        """Start with the first call again."""
        self._next = 0

    def require_complete(self, run: Callable[[], Any]) -> None:
        """Run a step as now chosen. Raises SubstitutionError where a call was made through no known name, and not replaced."""
        self.reset()
        run()
        count = len(self._substitutes or ())
        if self._substitutes is not None and self._next != count:
            raise SubstitutionError(
                f"{count - self._next} of {count} attention calls are made through no name that can be replaced for a"
                " timed run"
            )

    def wrap(self, function: AttentionFunction, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a function."""

        @functools.wraps(original)
        def substituted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self._substitutes is None:
                return original(*args, **kwargs)
            self._next += 1
            if self._next > len(self._substitutes):
                raise SubstitutionError(
                    f"the step made more than the {len(self._substitutes)} attention calls of its first run"
                )
            arguments = function.bind(args, kwargs)
            tensors = [arguments[name] for name in function.tensors]
            self._is_inside = True
            try:
                return self._substitutes[self._next - 1](*tensors)
            finally:
                self._is_inside = False

        return substituted

    @contextmanager
    def applied(self, model: torch.nn.Module, functions: Iterable[Named]) -> Iterator[Substitution]:
        """Have the model's calls computed by substitutes for a while."""
        with ExitStack() as stack:
            stack.enter_context(replaced(wrappers_of(self.wrap, functions), model))
            stack.enter_context(transformers_intercepted(self.wrap, model, replaces=False))
            yield self
