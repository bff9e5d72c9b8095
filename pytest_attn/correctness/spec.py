"""Specification of one check, beside the kernel: the workload, its inputs, and how results are judged."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import AttentionFn, CallableSubject, Dequantizer, Subject, compilation_of
from pytest_attn.correctness.contract import AdaptedCallable, ContractError
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import EXTRA, Reference, compute_reference, with_drawn_rows
from pytest_attn.workloads.distributions import DEFAULT_DISTRIBUTIONS, distribution_names
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.kv_layout import handed_over
from pytest_attn.workloads.positions import has_long_sequences
from pytest_attn.workloads.workload import Workload


@dataclass(frozen=True)
class CheckSpec:
    """All that a judgment depends on, beside the kernel. Raises ValueError for a value that is not one of the known.

    workload, device, seed: what is computed, where, and on which draw. backward: gradients, too. inputs: names of
    distributions. declared: what the kernel says of itself. limits: a name in `limits.LIMITS`. leaves: of which of q, k
    and v gradients are compared, where any are; the others need none. parameters: what the kernel closes over, by name
    ("sinks", "bias", "alibi"), whose gradients are compared as well: the leaves, or their values, by which these are found.
    """

    workload: Workload
    device: torch.device
    backward: bool = False
    inputs: tuple[str, ...] = ("structured", "flat")
    declared: Declaration = Declaration()
    seed: int = 0
    limits: str = "default"
    leaves: tuple[str, ...] = ("q", "k", "v")
    parameters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "declared", self.declared.on(self.device.type))
        limits_named(self.limits)
        if distribution_names(self.inputs) == DEFAULT_DISTRIBUTIONS and self.declared.skips is not None:
            object.__setattr__(self, "inputs", (*DEFAULT_DISTRIBUTIONS, "stepped"))
        if not isinstance(self.workload, Workload):
            raise ValueError(f"workload must be a name or a Workload, got {self.workload!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number >= 0, got {self.seed!r}")
        if unfit := self.declared.unfit_for(self.workload):
            raise ValueError(unfit)
        if self.backward and (reason := self.workload.has_no_gradient_because):
            raise ValueError(f"{self.workload.id}: {reason}; leave out backward=True")

    @cached_property
    def layout(self) -> str:
        """The layout in which tensors are judged: the kernel's, with a batch dimension; "thd" where packed."""
        return "thd" if self.workload.is_packed else self.declared.inner_layout

    @cached_property
    def profile(self) -> Precision:
        """The precision profile that the kernel declares."""
        return self.declared.profile

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of the results that are compared, gradients aside."""
        return self.declared.results

    @cached_property
    def extra(self) -> tuple[str, ...]:
        """The results that are compared beside out and lse."""
        return tuple(name for name in self.results if name in EXTRA)

    def for_subject(self, subject: Subject) -> CheckSpec:
        """Return the spec with what a subject declares itself. Raises ValueError where that is none of the known."""
        try:
            declared = subject.declares(self.declared, self.device.type)
        except ValueError as error:
            raise ValueError(f"backend {subject.name!r}: {error}") from None
        return self if declared == self.declared else dataclasses.replace(self, declared=declared)

    @cached_property
    def drops_unseen(self) -> bool:
        """True where probabilities are dropped, and the callable does not say which."""
        return bool(self.workload.dropout) and "keep" not in self.results

    def subject(
        self,
        registry: Registry,
        target: Callable[..., Any] | Backend | str,
        name: str | None = None,
        within: str = "",
        dequantized: Dequantizer | None = None,
    ) -> Subject:
        """Return what is tested; a callable declares what the spec says. Raises as `Registry.subject` does."""
        return self.adapted(registry.subject(target, name, self.declared, within, dequantized))

    def adapted(self, subject: Subject) -> Subject:
        """Return a subject as this spec calls it. Raises ValueError for a callable that drops what it does not name."""
        if not isinstance(subject, CallableSubject):
            return subject
        if self.drops_unseen:
            raise ValueError(
                f"{self.workload.id} has dropout: let the callable return which weights it kept, a boolean"
                " (batch, heads, q_len, kv_len), and say returns=('out', 'keep')"
            )
        return subject if self.declared.is_plain else AdaptedCallable(subject)

    def untouched(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v as a kernel is given them, to compare them with these: the inputs' own memory if that can be."""
        if self.workload.kv_pages is not None or self.workload.pad == "left":
            return self.handed(inputs)
        return self.in_layout(inputs.q), self.in_layout(inputs.k), self.in_layout(inputs.v)

    def handed(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return copies of q, k and v as the kernel is given them; page pools have a layout of their own."""
        k, v = handed_over(self.workload, inputs.k, inputs.v)
        if self.workload.kv_pages is None:
            k, v = self.in_layout(k), self.in_layout(v)
        if self.workload.v_in_k:
            v = k[..., : self.workload.v_head_dim]
        return self.in_layout(inputs.q).clone(), k, v

    def in_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Swap rows and heads for "bshd", there and back."""
        if self.layout != "bshd":
            return tensor
        return tensor.transpose(1, 2).contiguous()


DEFAULT_CACHE_BYTES = 4 << 30


#: callables that torch compiled which are kept, forward and backward, and bytes of the largest workload of theirs
_KEPT_COMPILED, _SMALL = 2, 1 << 28


class ReferenceCache:
    """References shared by all kernels of a run; those unused for longest go when `limit` bytes are full.

    And what torch compiled last, which the tests of one workload share. rows: positions of long workloads that are looked at
    in any case.
    """

    def __init__(self, limit: int = DEFAULT_CACHE_BYTES, rows: tuple[int, ...] = ()) -> None:
        self.limit, self.rows = limit, rows
        self.computed = 0
        self._kept: OrderedDict[tuple[object, ...], Reference] = OrderedDict()
        self._bytes = 0  # of all that are kept
        self._compiled: OrderedDict[tuple[object, ...], AttentionFn] = OrderedDict()

    def prepared(self, subject: Subject, spec: CheckSpec, distribution: str, inputs: Inputs) -> AttentionFn:
        """Return a subject's callable for the spec's inputs of one distribution: where torch compiled it last, the same again.

        That of a backend of this package: another may keep what its next test does not expect.
        """
        if not (subject.is_backend and subject.is_contained):
            return subject.prepare(inputs, spec.backward)
        of = subject, spec.workload, spec.backward, distribution, spec.seed, str(spec.device)
        if (kept := self._compiled.get(of)) and (compilation := compilation_of(kept)):
            compilation.seconds = 0.0  # of the test before
            return kept
        kernel = subject.prepare(inputs, spec.backward)
        if compilation_of(kernel) and spec.workload.bytes() < _SMALL:
            self._compiled[of] = kernel
            if len(self._compiled) > _KEPT_COMPILED:
                self._compiled.popitem(last=False)
        return kernel

    def inputs_of(self, spec: CheckSpec, distribution: str) -> Inputs:
        """Return the inputs of one distribution."""
        return draw_inputs(spec.workload, distribution, spec.seed, spec.device)

    def reference_of(self, spec: CheckSpec, distribution: str | None = None, subject: Subject | None = None) -> Reference:
        """Return the reference of one distribution, by default the first.

        For a subject that quantizes its inputs, or makes its bias of q, it is exact attention on these, for this one only.
        """
        distribution = distribution or spec.inputs[0]
        if subject is None or not subject.has_own_inputs:
            return self._shared(spec, distribution)
        with quiet():  # the arithmetic is ours, its warnings are not the test's
            given = self.inputs_of(spec, distribution)
            asked: dict[str, Any] = {"parameters": tuple(spec.parameters), "extra": spec.extra, "positions": self.rows}
            reference = compute_reference(quantized_by(subject, given), spec.profile, spec.backward, **asked)
            reference.given = given
            return reference

    def _shared(self, spec: CheckSpec, distribution: str) -> Reference:
        """Return the reference of all kernels that do not quantize; one with gradients also serves without."""
        w, backward, parameters, extra = spec.workload, spec.backward, tuple(spec.parameters), spec.extra
        of = w, distribution, spec.seed, str(spec.device), spec.profile, parameters, extra
        for with_gradients in (True,) if backward else (False, True):
            if (of, with_gradients) in self._kept:
                self._kept.move_to_end((of, with_gradients))
                return self._kept[of, with_gradients]
        draw = partial(draw_inputs, w, distribution, spec.seed, spec.device)
        asked: dict[str, Any] = {"parameters": parameters, "extra": extra, "positions": self.rows}
        with quiet():
            reference = compute_reference(_lean(draw, w, backward), spec.profile, backward, **asked)
        if reference.is_sampled or has_long_sequences(w):
            reference.redraw = partial(_lean, draw, w, backward)
        self.computed += 1
        if reference.nbytes > self.limit:
            self._kept.clear()
            self._bytes = 0
            return reference
        self._kept[of, backward] = reference
        self._bytes += reference.nbytes
        while self._bytes > self.limit:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return reference

    def after_call(self, reference: Reference, rows: torch.Tensor | None = None) -> Reference:
        """Return the reference of a result: that of a long workload gets rows that are drawn only now, for this call.

        rows: which it gets as well.
        """
        if reference.rows is None:
            return reference
        with quiet():
            return with_drawn_rows(reference, (*self.rows, *([] if rows is None else rows.tolist())))


def _lean(draw: Callable[..., Inputs], workload: Workload, backward: bool) -> Inputs:
    """Draw inputs; those of a long workload without dout where no gradient is asked for."""
    if backward or not has_long_sequences(workload):
        return draw()
    return draw(with_dout=False)


def quantized_by(subject: Subject, given: Inputs) -> Inputs:
    """Return what a subject makes of its inputs; raise ContractError where that has other shapes."""
    made = subject.dequantized(given)
    for name in "qkv":
        shape = getattr(getattr(made, name, None), "shape", None)
        if shape != getattr(given, name).shape:
            found = type(made).__name__ if shape is None else f"{name} of shape {tuple(shape)}"
            raise ContractError(f"{subject.name}.dequantized returned {found}; expected {tuple(getattr(given, name).shape)}")
    return made
