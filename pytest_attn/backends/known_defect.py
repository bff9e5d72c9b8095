"""A defect of a library that is known and reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.workload import Workload


@dataclass(frozen=True)
class KnownDefect:
    """A defect of a library that is known and reported: it turns exactly this failure into an expected one.

    Args:
        issue: where it was reported.
        summary: what is wrong, in one line.
        applies: whether a workload and machine are in the defect's reach.
        tensors: which results are wrong; empty where only invariants show it, in any.
        only_nan: it shows as NaN or infinity, not as a value that is off.
        inputs: the input distribution that shows it; None for any.
        changes_input: inputs ("q", "k", "v") that it changes in place.
        shows: whether a failed `TensorComparison` looks like it; by default every failure of these tensors does.
        invariants: names of those that it may break; empty where it may break any.
        kernel: a word of the kernel that has it, where a backend leaves the choice to a library; empty for any.
        evidence: a regular expression that is found in what shows such an invariant broken.
        ends_cuda: these invariants would end the process's CUDA context, and are not asked.
    """

    issue: str
    summary: str
    applies: Callable[[Workload, Machine], bool]
    tensors: tuple[str, ...]
    only_nan: bool = False
    inputs: str | None = None
    changes_input: tuple[str, ...] = ()
    shows: Callable[[Any, Workload], bool] = lambda comparison, workload: True
    invariants: tuple[str, ...] = ()
    kernel: str = ""
    evidence: str = ""
    ends_cuda: bool = False

    def spoils(self, workload: Workload, machine: Machine, backward: bool) -> bool:
        """Whether a workload is in its reach: one of gradients only is in a backward pass."""
        is_of_gradients = bool(self.tensors) and not self.changes_input and all(name.startswith("d") for name in self.tensors)
        return (backward or not is_of_gradients) and self.applies(workload, machine)

    def breaks(self, invariant: str, evidence: str) -> bool:
        """Whether a broken invariant looks like it."""
        return (not self.invariants or invariant in self.invariants) and re.search(self.evidence, evidence) is not None

    def explains(self, comparison: Any, workload: Workload) -> bool:
        """Whether everything that failed in a `Comparison` is what the defect spoils, and looks like it."""
        failed = [t for t in comparison.tensors if not t.passed]
        unchanged = set(comparison.changed) <= set(self.changes_input)
        return unchanged and all(
            t.name in self.tensors and (t.wrong_positions or not self.only_nan) and self.shows(t, workload) for t in failed
        )
