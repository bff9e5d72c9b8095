"""The compiled run of a model, which no one can look into: what it returns, and its gradients, against exact attention.

The calls are judged in the eager run. Of the compiled run each output, the loss and each parameter's gradient is compared with
an eager run with exact attention, in units of what honest rounding does: exact attention rounded at random as the kernels
round, and every other operator's result moved by what another order of arithmetic may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.precision import Precision
from pytest_attn.models.catching import catching
from pytest_attn.models.compiled import compilations
from pytest_attn.models.interfaces import is_of_transformers
from pytest_attn.models.moving import moving
from pytest_attn.models.ratios import Exact, distances, tensors_of
from pytest_attn.models.step import run_step
from pytest_attn.profiling.profiler import launches_of

if TYPE_CHECKING:
    import torch

#: how many units a tensor may be off, by how many elements it has at least; fewer are not judged. Honest compiled runs stayed
#: below 0.7 on a CPU, small tensors below 1: the unit counts what eager rounding adds, which a compiled run leaves out
LIMITS = ((4096, 1.25), (256, 1.75), (32, 3.0))
#: runs whose root mean square is the unit
RUNS = 4
#: how far apart, for its size, a tensor of two exact runs may be where nothing is drawn at random: a sum in another order
_RANDOM = 0.01


@dataclass(frozen=True)
class CompiledRun:
    """What is known of the compiled run.

    ratios: name of an output, the loss or a gradient -> its distance from exact attention in units of honest rounding;
    limits: of those that are judged. graphs, breaks: that torch.compile made in the first run; recompiled: graphs in the
    second, which asked the same. kernels: those of attention that it launched. unknown: why nothing was compared.
    """

    ratios: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    graphs: int = 0
    breaks: int = 0
    recompiled: int = 0
    kernels: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def wrong(self) -> list[str]:
        """The tensors that are further from exact attention than honest rounding explains, the furthest first."""
        over = [name for name, limit in self.limits.items() if not self.ratios[name] <= limit]
        return sorted(over, key=lambda name: -self.ratios[name])

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        return {**vars(self), "ratios": dict(self.ratios), "limits": dict(self.limits), "kernels": list(self.kernels)}


def judge_compiled(
    model: torch.nn.Module,
    step: Callable[[], Any],
    again: Callable[[], None],
    *,
    backward: bool,
    functions: Iterable[Callable[..., Any] | str] = (),
    precision: str | Precision | None = None,
) -> CompiledRun:
    """Run a compiled step twice, and hold the second against exact attention. again: makes the model what it was."""
    functions = tuple(functions)
    again()
    before = compilations()
    run_step(step, model, backward)
    graphs, breaks = compilations().since(before)
    again()
    found: dict[str, torch.Tensor] = {}

    def second() -> None:
        found.update({name: t.clone() for name, t in tensors_of(run_step(step, model, backward)).items()})

    compiled = compilations()
    launched = launches_of(second, _device_of(model))
    recompiled = compilations().since(compiled).graphs
    kernels = tuple(dict.fromkeys(one.symbol for one in launched if "attention" in one.words or "attention" in one.symbol))
    facts: dict[str, Any] = {"graphs": graphs, "breaks": breaks, "recompiled": recompiled, "kernels": kernels}
    if name := _drops(model):
        return CompiledRun(unknown=f"{name} drops at random, and a compiled model draws otherwise; call model.eval()", **facts)

    def exact(seed: int | None, draws_otherwise: bool = False) -> dict[str, torch.Tensor]:
        again()
        if draws_otherwise:
            _draw_otherwise()
        handler = Exact(None, seed, precision)
        with catching(handler, model, functions, replaces=is_of_transformers(model)):
            if seed is None:
                return tensors_of(run_step(step, model, backward))
            with moving(seed):
                return tensors_of(run_step(step, model, backward))

    unmoved = exact(None)
    if _differ(unmoved, exact(None, draws_otherwise=True)):
        return CompiledRun(
            unknown="the step draws random numbers, and a compiled one draws others; call model.eval()", **facts
        )
    ratios, limits = _compared(found, unmoved, [exact(seed) for seed in range(RUNS)])
    unknown = "" if limits else "no output, and no gradient, is large enough to be compared end to end"
    return CompiledRun(ratios, limits, unknown=unknown, **facts)


def _draw_otherwise() -> None:
    """Have random numbers of every device be others than they would be; whoever keeps the model restores them."""
    import torch

    torch.manual_seed(torch.initial_seed() + 1)


def _differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two exact runs differ by more than sums in another order do."""
    apart = distances(other, one)
    return any(distance > _RANDOM * float(one[name].double().norm()) for name, distance in apart.items())


def _compared(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], honest: list[dict[str, torch.Tensor]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the ratios, and the limits of those that are judged; what is not finite where it should be is infinitely far."""
    scatter = dict.fromkeys(exact, 0.0)
    for one in honest:
        for name, distance in distances(one, exact).items():
            scatter[name] += distance**2 / len(honest)
    far = distances(found, exact)
    ratios = {name: far.get(name, math.inf) / scatter[name] ** 0.5 for name in exact if scatter[name] > 0}
    limits = {name: limit for name in ratios if (limit := _limit(exact[name].numel())) is not None}
    return ratios, limits


def _limit(elements: int) -> float | None:
    return next((limit for least, limit in LIMITS if elements >= least), None)


def _device_of(model: torch.nn.Module) -> torch.device:
    import torch

    tensor = next((t for group in (model.parameters(), model.buffers()) for t in group), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _drops(model: torch.nn.Module) -> str:
    """Return the name of a module that drops at random, "" where none does."""
    import torch

    kinds = torch.nn.modules.dropout._DropoutNd
    return next((name for name, m in model.named_modules() if isinstance(m, kinds) and m.training and m.p > 0), "")
