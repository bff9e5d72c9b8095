"""Compiled models of the suite beside exact attention: how far each is off, in units of honest rounding, and what ran.

    python benchmarks/compiled_models.py [--device cuda] [--modes default,max-autotune] [--dtypes ...] [vit llama ...]

A model of timm, transformers or diffusers is named as in the suite (`llama` is torch's own, `transformers-llama` the
library's). A line per tensor size that has a limit: the largest ratio, and the limit. Nothing is begun after --seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current, machine_of, resolve_device
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.compiled import LIMITS, CompiledRun
from pytest_attn.suite.models import library_model, torch_model

MODELS = ["vit", "llama", "mistral", "transformers-llama", "transformers-siglip"]
DTYPES = ["bfloat16", "float16", "float32"]


def case(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], Any]]:
    """Return a model of the suite and its step."""
    library, _, of_library = name.partition("-")
    return library_model(of_library, device, dtype) if of_library else torch_model(library, device, dtype)


def report(name: str, mode: str, dtype: str, device: torch.device) -> str:
    """Compile a model, hold it against exact attention, and say what was found."""
    model, step = case(name, device, getattr(torch, dtype))
    model.compile(mode=mode)
    begun = time.perf_counter()
    found = judge_model(model, step, scatter=0)
    seconds = time.perf_counter() - begun
    if found.compiled is None or found.compiled.unknown:
        return f"not compared: {found.compiled.unknown if found.compiled else 'it was not compiled'}"
    run = found.compiled
    verdict = "right" if found.passed else "WRONG"
    told = f"{verdict} in {seconds:.1f} s; {run.graphs} graphs, {run.breaks} graph breaks, {run.recompiled} recompiled"
    lines = [told, *largest(run), *(f"kernel {kernel:.120}" for kernel in run.kernels)]
    return "\n  ".join(lines if found.passed else [*lines, *found.message.splitlines()[:6]])


def largest(run: CompiledRun) -> list[str]:
    """Return the largest ratio under each limit."""
    under = {limit: [n for n, asked in run.limits.items() if asked == limit] for _, limit in LIMITS}
    worst = {limit: max(names, key=lambda n: run.ratios[n]) for limit, names in under.items() if names}
    return [f"{run.ratios[name]:.2f} of {limit}: {name}" for limit, name in worst.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--modes", default="default,max-autotune")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--seconds", type=float, default=300)
    chosen = parser.parse_args()
    device = resolve_device(chosen.device)
    end = time.monotonic() + chosen.seconds
    print(f"{machine_of(device).name}, torch {torch.__version__}", flush=True)
    for mode in chosen.modes.split(","):
        for dtype in chosen.dtypes.split(","):
            for name in chosen.models:
                if time.monotonic() > end:
                    found = "left out, the time is over"
                else:
                    try:
                        with quiet(), current(device):
                            found = report(name, mode, dtype, device)
                    except (Exception, pytest.skip.Exception) as error:
                        found = f"raised {type(error).__name__}: {error!s:.200}"
                    torch._dynamo.reset()
                print(f"{name}, {mode}, {dtype}: {found}", flush=True)


if __name__ == "__main__":
    main()
