"""What a mutant is: a faulty kernel, named after the defect of a real library that it models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pytest_attn.mutants.kernel import Kernel, KernelBackend
from pytest_attn.workloads.workload import Workload

#: Whether a workload, called with or without backward, reaches the faulty step.
Applies: TypeAlias = Callable[[Workload, bool], bool]
AnyKernel = TypeVar("AnyKernel", bound=type[Kernel])

#: What it takes to see a mutant, beside a workload where it applies.
CONDITIONS = {
    "call": "nothing: one call with the default inputs shows it",
    "magnitude": "inputs with large scores, such as the distributions outlier and large",
    "poison": "NaN in padding and in unused parts of pages",
    "layout": "tensors with other strides than contiguous ones",
    "layouts": "calls whose tensors have different strides, with one kernel",
    "calls": "calls with different values, with one kernel",
    "workloads": "calls with workloads that differ in one option or length, with one kernel",
    "held": "a result, or a graph not yet run backward, that is held across another call",
    "repeats": "many calls",
    "lse-gradient": "a gradient with respect to lse",
}

#: The repositories behind the short names in references; others are written in full.
REPOSITORIES = {
    "FA": "Dao-AILab/flash-attention",
    "FI": "flashinfer-ai/flashinfer",
    "PT": "pytorch/pytorch",
    "TE": "NVIDIA/TransformerEngine",
    "xf": "facebookresearch/xformers",
    "ComfyUI": "comfyanonymous/ComfyUI",
    "FlagAttention": "flagos-ai/FlagAttention",
    "HipKittens": "HazyResearch/HipKittens",
    "KernelBench": "ScalingIntelligence/KernelBench",
    "NATTEN": "SHI-Labs/NATTEN",
    "SageAttention": "thu-ml/SageAttention",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "aiter": "ROCm/aiter",
    "cudnn-frontend": "NVIDIA/cudnn-frontend",
    "diffusers": "huggingface/diffusers",
    "executorch": "pytorch/executorch",
    "ffpa": "xlite-dev/ffpa-attn",
    "fla": "fla-org/flash-linear-attention",
    "jax": "jax-ml/jax",
    "llama.cpp": "ggml-org/llama.cpp",
    "onnxruntime": "microsoft/onnxruntime",
    "rocm-libraries": "ROCm/rocm-libraries",
    "sglang": "sgl-project/sglang",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "triton": "triton-lang/triton",
    "vllm": "vllm-project/vllm",
    "zml": "zml/zml",
}


@dataclass(frozen=True)
class Mutant:
    """One faulty kernel.

    name: after the defect, in kebab-case. kind: the class of defects. summary: the defect in one sentence.
    references: issues, pull requests ("FA#1133") and commits ("FA@a4f148b6") of the defects that it models.
    applies: which workloads reach the faulty step, at the default tile size. condition: what else it takes to see it, a key
    of CONDITIONS. is_deterministic: whether every call with the same arguments, in the same order, gives the same bits.
    """

    name: str
    kind: str
    summary: str
    references: tuple[str, ...]
    kernel: type[Kernel]
    applies: Applies
    condition: str = "call"
    is_deterministic: bool = True

    def backend(self, returns_lse: bool = True) -> KernelBackend:
        """Return a new backend, whose kernel has kept nothing yet."""
        return KernelBackend(self.name, self.kernel(), returns_lse=returns_lse)


class Defects:
    """The mutants of one class of defects, in the order in which they are declared."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._mutants: list[Mutant] = []

    def __iter__(self) -> Iterator[Mutant]:
        return iter(self._mutants)

    def __call__(
        self, name: str, *references: str, applies: Applies, condition: str = "call", deterministic: bool = True
    ) -> Callable[[AnyKernel], AnyKernel]:
        """Declare the decorated kernel a mutant; its docstring is the summary."""

        def declare(kernel: AnyKernel) -> AnyKernel:
            summary = " ".join((inspect.getdoc(kernel) or "").split())
            self._mutants.append(Mutant(name, self.kind, summary, references, kernel, applies, condition, deterministic))
            return kernel

        return declare
