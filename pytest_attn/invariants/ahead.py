"""The process that compiles for cases before their turn comes (session/ahead.py)."""

import gc
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from pytest_attn.backends import library
from pytest_attn.backends.attention_args import first_of
from pytest_attn.backends.compilers import BEGUN, COMPILED
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.processes.lifetime import die_with
from pytest_attn.workloads.catalog import builtin_catalog

#: new objects after which garbage is collected: compilers make many that stay for a while
_OBJECTS = 50_000


def main() -> None:
    """Compile what standard input says, as long as the worker lives that has written it."""
    told = json.load(sys.stdin)
    die_with(told["parent"])
    library.is_expendable = True
    device, groups = torch.device(told["device"]), told["groups"]
    for group, (first, *others) in groups:
        if _compile_unless_begun(device, first):
            for case in others:
                _compile_unless_begun(device, case)
            library.note_in_a_run(f"{group}{COMPILED}")
    for _, cases in groups:  # what is left workers have come to, who begin with the first
        for case in reversed(cases):
            _compile_unless_begun(device, case)


def _compile_unless_begun(device: torch.device, case: Sequence[Any]) -> bool:
    """Compile for a case that no worker and no other process has begun; return whether it did."""
    if not library.note_in_a_run(f"{json.dumps(case)}{BEGUN}"):
        return False
    with suppress(Exception):
        compile_case(device, *case)
    if not gc.isenabled():  # the first has imported the compilers, whose objects need not be looked through
        gc.freeze()
        gc.set_threshold(_OBJECTS)
        gc.enable()
    return True


def compile_case(device: torch.device, name: str, workload: str, backward: bool, invariants: Sequence[str]) -> None:
    """Call a backend on a bundled workload as `check` does; with names of invariants, ask these instead."""
    backend, (w,) = Registry()[name], builtin_catalog().select(workload)
    if backend.obstacle(w, machine_of(device), backward):
        return
    spec, references = CheckSpec(w, device, backward).for_subject(backend), ReferenceCache()
    if invariants:
        judge_invariants(backend, spec, references, invariants)
    else:
        inputs = references.inputs_of(spec, spec.inputs[0])
        with backend.calling(), nullcontext() if backward else torch.no_grad():
            given = [tensor.requires_grad_(backward) for tensor in spec.handed(inputs)]
            out = first_of(backend.prepare(inputs, backward)(*given))
            if backward:
                torch.autograd.grad(out, given, spec.in_layout(inputs.dout))
    torch.cuda.empty_cache()
