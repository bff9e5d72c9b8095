"""Mutants: a faulty kernel each, named after the defect of a real library that it models, and how a diagnosis names it."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from pytest_attn.diagnosis.faults import FAULTS
from pytest_attn.guests.mutants import reach
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend, SplitKernel
from pytest_attn.workloads.workload import Workload

AnyKernel = TypeVar("AnyKernel", bound=type[Kernel])
AnyStep = TypeVar("AnyStep", bound=Callable[..., Any])

#: What it takes to see a mutant, beside a workload where it applies.
Condition: TypeAlias = Literal[
    "call",  # nothing: one call with the default inputs shows it
    "magnitude",  # inputs with large scores, such as the distributions outlier and large
    "poison",  # NaN in padding and in unused parts of pages
    "layout",  # tensors with other strides than contiguous ones
    "strides",  # tensors with strides, or at addresses, that no model passes
    "layouts",  # calls whose tensors have different strides, with one kernel
    "calls",  # calls with different values, with one kernel
    "workloads",  # calls with workloads that differ in one option or length, with one kernel
    "held",  # a result, or a graph not yet run backward, that is held across another call
    "repeats",  # many calls
    "lse-gradient",  # a gradient with respect to lse
]

#: what a workload has wherever it runs a step, by the step's name
_OF_STEPS = {
    **dict.fromkeys(("in_band", "first_key", "last_key", "diagonal"), reach.is_band),
    **dict.fromkeys(("in_custom_mask", "mask_mod"), reach.is_custom),
    **dict.fromkeys(("pages", "gather_pages"), reach.is_paged),
    **dict.fromkeys(("softcap", "capped", "softcap_slope"), reach.has_softcap),
    **dict.fromkeys(("alibi", "alibi_slopes", "distance"), reach.has_alibi),
    "bias": reach.has_bias,
    "sinks": reach.has_sinks,
    "score_mod_slope": reach.has_score_mod,
    "document_of": reach.is_document,
    "summed_over_group": reach.is_grouped,
}


@dataclass(frozen=True)
class Mutant:
    """One faulty kernel.

    name: after the defect, in kebab-case. kind: the class of defects. summary: the defect in one sentence.
    references: issues, pull requests ("FA#1133") and commits ("FA@a4f148b6") of the defects that it models; FA is
    Dao-AILab/flash-attention, FI flashinfer-ai/flashinfer, PT pytorch/pytorch, TE NVIDIA/TransformerEngine, xf
    facebookresearch/xformers. reaches: whether a workload reaches the faulty step, at the default tile size. in_backward: that
    is one of the backward pass alone. condition: what else it takes to see it. faults: the identities by which a diagnosis may
    name its fault; none where it has no name.
    """

    name: str
    kind: str
    summary: str
    references: tuple[str, ...]
    kernel: type[Kernel]
    reaches: reach.Applies
    in_backward: bool = False
    condition: Condition = "call"
    faults: tuple[str, ...] = ()

    def applies(self, workload: Workload, backward: bool) -> bool:
        """Return whether a workload, called with or without backward, reaches its faulty step."""
        return (backward or not self.in_backward) and self.reaches(workload)

    def is_reached_by(self, workload: Workload, backward: bool) -> bool:
        """Return whether a workload runs its faulty step: none drops, dequantizes, has v in k, or has gradients of pages."""
        is_refused = workload.dropout or workload.is_quantized or workload.v_in_k
        no_gradient = backward and workload.has_no_gradient_because
        return not (is_refused or no_gradient) and self.applies(workload, backward)

    def backend(self) -> KernelBackend:
        """Return a new backend, whose kernel has kept nothing yet."""
        return KernelBackend(self.name, self.kernel())


class Defects:
    """The mutants of one class of defects, in the order in which they are declared. backward: all are of that pass."""

    def __init__(self, kind: str, backward: bool = False) -> None:
        self.kind, self.backward = kind, backward
        self._mutants: list[Mutant] = []

    def __iter__(self) -> Iterator[Mutant]:
        return iter(self._mutants)

    def __call__(
        self, step: Callable[..., Any], references: str, *, applies: reach.Applies = reach.always, **declared: Any
    ) -> Callable[[AnyStep], AnyStep]:
        """Declare a mutant of which one step is the decorated function. step: the honest one, as `Kernel.scaled`.

        references: with commas between. applies: beside what the step itself asks for. declared: further fields of `Mutant`;
        where these name no fault, it is that of the mutant's name, if there is one. The docstring is the summary.
        """

        def declare(faulty: AnyStep) -> AnyStep:
            whole = Kernel if getattr(Kernel, step.__name__, None) is step else SplitKernel
            made = type(faulty.__name__, (whole,), {step.__name__: faulty, "__doc__": faulty.__doc__})
            reaches = reach.all_of(_OF_STEPS.get(step.__name__, reach.always), applies)
            self.kernel(references, applies=reaches, **declared)(made)
            return faulty

        return declare

    def kernel(
        self,
        references: str,
        *,
        applies: reach.Applies = reach.always,
        backward: bool = False,
        condition: Condition = "call",
        faults: tuple[str, ...] | str = "",
    ) -> Callable[[AnyKernel], AnyKernel]:
        """Declare a whole kernel a mutant, as where several steps are faulty; its name is that of the class in kebab-case."""

        def declare(kernel: AnyKernel) -> AnyKernel:
            summary = " ".join((inspect.getdoc(kernel) or "").split())
            words = re.sub(r"(?<!^)(?=[A-Z])|(?<=[a-z])(?=[0-9])|_", "-", kernel.__name__.lstrip("_")).lower()
            name = re.sub(r"(float|fp|tf|log)-(?=[0-9])", r"\1", words)  # float16 is one word
            reached = kernel, applies, backward or self.backward
            faults_of = faults or (name if name in FAULTS else ())
            named = (faults_of,) if isinstance(faults_of, str) else faults_of
            self._mutants.append(Mutant(name, self.kind, summary, tuple(references.split(", ")), *reached, condition, named))
            return kernel

        return declare
