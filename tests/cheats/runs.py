"""Runs of pytest on kernels that a file defines: in this process or in one of its own, on the kernel or on its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: what a kernel can be asked, in the order in which a user's file asks it
JUDGMENTS = ("check", "invariants", "measure")
#: a workload on which one is asked; it fits every kernel that says nothing else
MARKER = 'Workload(64, heads=2, head_dim=32, dtype="float32")'
_METHODS = {"check": "check", "invariants": "check_invariants", "measure": "measure"}


@dataclass(frozen=True)
class Asked:
    """A kernel of a module, the marker's arguments, and what is asked; measure: further arguments of `attn.measure`."""

    module: str
    kernel: str = "attention"
    marker: str = MARKER
    judgments: tuple[str, ...] = JUDGMENTS
    measure: str = ""


def source_of(asked: Sequence[Asked], isolated: bool = False, device: str = "cpu") -> str:
    """Return a file of tests that ask kernels. isolated: it names them, and does not import them."""
    lines = ["import pytest", "from pytest_attn import Workload, Window"]
    lines += [] if isolated else [f"import {name}" for name in dict.fromkeys(one.module for one in asked)]
    for one in asked:
        target = f'"{one.module}:{one.kernel}"' if isolated else f"{one.module}.{one.kernel}"
        for judgment in one.judgments:
            more = f", {one.measure}" if judgment == "measure" and one.measure else ""
            lines += [
                "",
                f'@pytest.mark.attention({one.marker}, device="{device}")',
                f"def test_{one.module}_{one.kernel}_{judgment}(attn):",
                f"    attn.{_METHODS[judgment]}({target}{more})",
            ]
    return "\n".join(lines) + "\n"


def has_cuda() -> bool:
    """Whether kernels of CUDA can be asked here."""
    return torch.cuda.is_available()


def outcomes(lines: Sequence[str]) -> dict[str, str]:
    """Return how each test of a run ended, by its name; lines: what was printed, with -v."""
    found = (re.search(r"::(test_\w+)\S* (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", line) for line in lines)
    return {one[1]: one[2].lower() for one in found if one}
