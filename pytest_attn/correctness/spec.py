"""What one check depends on, beside the kernel: the workload, its inputs, and how results are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.precision import Precision, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import CallableSubject, Dequantizer, Subject
from pytest_attn.correctness.empty_rows import EMPTY_ROWS
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import EXTRA
from pytest_attn.correctness.signature import Signature
from pytest_attn.correctness.signed import SignedSubject
from pytest_attn.workloads.arrangement import handed_over
from pytest_attn.workloads.distributions import distribution_names
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import LAYOUTS, Workload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckSpec:
    """All that a judgment depends on, beside the kernel. Raises ValueError for a value that is not one of the known.

    workload, device, seed: what is computed, where, and on which draw. backward: gradients, too. inputs: names of
    distributions. precision, layout, returns_lse, empty_rows, contiguous: what the kernel declares. limits: a name in
    `correctness.limits.LIMITS`. parameters: what the kernel closes over, by name ("sinks", "bias", "alibi"), whose
    gradients are compared as well. diagnosis_timeout: seconds in which what explains a fault is looked for, 0 for no end.
    signature: of a callable, where layout and returns_lse do not say all; it settles both.
    """

    workload: Workload
    device: torch.device
    backward: bool = False
    inputs: tuple[str, ...] = ("structured", "flat")
    precision: str | Precision = "flash"
    layout: str = "bhsd"
    returns_lse: bool = False
    seed: int = 0
    limits: str = "default"
    empty_rows: str = "zero"
    contiguous: bool = False
    signature: Signature | None = None
    diagnosis_timeout: float = dataclasses.field(default=60.0, compare=False)
    parameters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        precision_named(self.precision)
        limits_named(self.limits)
        distribution_names(self.inputs)
        if not isinstance(self.workload, Workload):
            raise ValueError(f"workload must be a name or a Workload, got {self.workload!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number >= 0, got {self.seed!r}")
        if self.empty_rows not in EMPTY_ROWS:
            raise ValueError(f"empty_rows must be one of {', '.join(EMPTY_ROWS)}, got {self.empty_rows!r}")
        if self.signature is not None:
            object.__setattr__(self, "layout", self.signature.inner_layout)
            object.__setattr__(self, "returns_lse", "lse" in self.signature.returns)
            if unfit := self.signature.unfit_for(self.workload):
                raise ValueError(unfit)
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        if (self.layout == "thd") != self.workload.is_packed:
            if self.layout == "thd":
                raise ValueError(f"layout 'thd' needs a packed workload (q_lens), {self.workload.id} is not one")
            object.__setattr__(self, "layout", "thd")
        if self.backward and (reason := self.workload.has_no_gradient_because):
            raise ValueError(f"{self.workload.id}: {reason}; leave out backward=True")

    @property
    def profile(self) -> Precision:
        """The precision profile that the kernel declares."""
        return precision_named(self.precision)

    @property
    def results(self) -> tuple[str, ...]:
        """What a call returns that is compared, gradients aside."""
        if self.signature is not None:
            return self.signature.results
        return ("out", "lse") if self.returns_lse else ("out",)

    @property
    def extra(self) -> tuple[str, ...]:
        """The results that are compared beside out and lse."""
        return tuple(name for name in self.results if name in EXTRA)

    def for_subject(self, subject: Subject) -> CheckSpec:
        """Return the spec with the layout, precision and lse that a subject declares. Raises ValueError for an unknown one."""
        precision = subject.precision_on(self.device.type)
        try:
            precision_named(precision)
        except ValueError as error:
            raise ValueError(f"backend {subject.name!r}: {error}") from None
        layout = "thd" if self.workload.is_packed else "bhsd" if subject.is_backend else subject.layout
        signature = None if subject.is_backend else self.signature
        return dataclasses.replace(
            self, precision=precision, returns_lse=subject.returns_lse, layout=layout, signature=signature
        )

    def subject(
        self,
        registry: Registry,
        target: Callable[..., Any] | Backend | str,
        name: str | None = None,
        within: str = "",
        dequantized: Dequantizer | None = None,
    ) -> Subject:
        """Return what is tested; a callable declares what the spec says. Raises as `Registry.subject` does."""
        subject = registry.subject(
            target,
            name,
            layout=self.layout,
            precision=self.precision,
            returns_lse=self.returns_lse,
            within=within,
            dequantized=dequantized,
        )
        is_callable = isinstance(subject, CallableSubject)
        if is_callable and self.workload.dropout and "keep" not in self.results:
            raise ValueError(
                f"{self.workload.id} drops probabilities: let the callable return which it kept, a boolean"
                " (batch, heads, q_len, kv_len), and say returns=('out', 'keep')"
            )
        if self.signature is None or not isinstance(subject, CallableSubject):
            return subject
        return SignedSubject(subject, self.signature, self.empty_rows)

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
