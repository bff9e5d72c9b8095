"""Let a backend, or a function, compute the attention calls of a model in place of what it calls itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pytest_attn.backends.attention_args import AttentionArguments, UnreadableError
from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.backends.machine import Machine, current
from pytest_attn.backends.precision import Precision, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.correctness.contract import check_contract
from pytest_attn.correctness.reference import Reference
from pytest_attn.models.capture import AttentionCall, Computed, Recorder, Unread
from pytest_attn.models.interception import InterceptedCall
from pytest_attn.models.recognition import asks_the_same
from pytest_attn.workloads.functions import function_name
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


def replacement(
    target: Callable[..., Any] | Subject | str, registry: Registry | None = None, precision: str | Precision | None = None
) -> Subject:
    """Return what computes the calls: a backend as it is or by its name, or a function of (q, k, v, workload=...).

    precision: where a function says it rounds, "flash" by default; a backend says it itself. Raises ValueError for an unknown
    name, TypeError for a target that is none of the three.
    """
    subject = target if isinstance(target, Subject) else (registry or Registry()).subject(target)
    if subject.user_function is not None:
        return FunctionBackend(function_name(subject.user_function), subject.user_function, precision=precision or "flash")
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
        """Return what the subject makes of a call, as the model takes it."""
        needs_gradient = self._backward and any(t.requires_grad for t in (arguments.q, arguments.k, arguments.v))
        try:
            self._require_taken(inputs.workload, needs_gradient)
            out = self._called(arguments, inputs, needs_gradient)
            return Computed(arguments.to_result(out), self._subject.precision_on(inputs.device.type), self._subject)
        except UnreadableError as refusal:
            self.refused.append(Unread(intercepted.module, intercepted.function.shown, str(refusal)))
        return super().computed(intercepted, arguments, inputs)

    def _require_taken(self, workload: Workload, backward: bool) -> None:
        if reason := self._subject.obstacle(workload, self._machine, backward):
            raise UnreadableError(f"{reason} ({workload.id})")

    def _called(self, arguments: AttentionArguments, inputs: Inputs, backward: bool) -> Any:
        """Call the subject, and hold what it returns to its contract."""
        subject, workload = self._subject, inputs.workload
        with subject.calling(), current(inputs.device), self._casting(inputs.device):
            try:
                result = self._kernel(inputs, backward)(arguments.q, arguments.k, arguments.v)
            except Exception as error:
                if reason := subject.refusal_in(error):
                    raise UnreadableError(reason) from error
                raise
        names = ("out", "lse") if subject.returns_lse else ("out",)
        expected = Reference(inputs, precision_named(subject.precision_on(inputs.device.type)))
        return check_contract(result, names, expected, workload, "thd" if workload.is_packed else "bhsd")[0]

    def _casting(self, device: torch.device) -> AbstractContextManager[object]:
        """Return what turns autocast off around a backend, whose tensors are cast already; a function has the model's.

        Under autocast the products of float32 copies, as MATH makes them, would be cast again, and scores rounded.
        """
        is_function = isinstance(self._subject, FunctionBackend)
        return nullcontext() if is_function else torch.autocast(device.type, enabled=False)

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
    """What the model calls itself; nothing is put in its place."""

    name = "model"
    is_backend = False

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Raise TypeError: it computes nothing outside of its model."""
        raise TypeError("a model's own attention runs in the model only")
