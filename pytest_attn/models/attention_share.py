"""What attention costs of a step: the step is timed with and without it, in turn.

Without: each call hands back, at no cost, what it gave in a first run, forward and backward. Everything else, and all values,
stay as they are. So the difference is what a kernel that takes no time would gain, whatever overlaps with what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_attn.latency.statistics import median_interval
from pytest_attn.latency.work import LatencyDirection
from pytest_attn.models.recognition import DropoutError
from pytest_attn.models.step_work import StepWork, seconds_of
from pytest_attn.models.swapping import CostlessPlan, Planned, Swap, SwapError, plan_step

if TYPE_CHECKING:
    import torch

#: pairs of steps, with attention and without
_PAIRS = 12
_WARM_UP = 2


@dataclass(frozen=True)
class AttentionShare:
    """seconds: of a step that attention takes, the median of pairs; low, high: in which that median lies with 95 %.

    step: the median step of these pairs. calls: attention calls of a step.
    """

    seconds: float
    low: float
    high: float
    step: float
    calls: int

    @property
    def share(self) -> float:
        """Of the step, from 0 to 1."""
        return min(1.0, max(0.0, self.seconds / self.step))

    @property
    def ceiling(self) -> float:
        """By how much the step gets faster at most, whatever kernel computes attention: Amdahl's law."""
        return self.step / max(self.step - self.seconds, 1e-12) if self.seconds > 0 else 1.0

    @property
    def is_seen(self) -> bool:
        """Whether it is more than the scatter of the step."""
        return self.low > 0

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types, as in a record."""
        fields = {name: getattr(self, name) for name in ("seconds", "share", "ceiling", "calls", "is_seen")}
        return {**fields, "interval": [self.low, self.high]}


def attention_share(
    model: torch.nn.Module,
    step: Callable[[], Any],
    direction: LatencyDirection,
    functions: Iterable[Callable[..., Any] | str] = (),
    optimizer: torch.optim.Optimizer | None = None,
    by: Sequence[Planned] | None = None,
    pairs: int = _PAIRS,
) -> AttentionShare | str:
    """Return what attention takes of a step of a model that runs eagerly, or why that cannot be told.

    by: what computes its calls; None for the model itself.
    """
    functions = tuple(functions)
    try:
        first = StepWork(model, step, direction)
        with first.context():
            costless = plan_step(CostlessPlan(), first.stage(), model, functions)
        swap = Swap(costless, by)
        with swap.applied(model, functions):
            work = StepWork(model, step, direction, optimizer, swap.begin)
            with work.context():
                swap.require_complete(work.stage())
                return _share_of(work, swap, len(costless), pairs)
    except (SwapError, DropoutError) as error:
        return str(error)


def _share_of(work: StepWork, swap: Swap, calls: int, pairs: int) -> AttentionShare:
    whole, differences = [], []
    for number in range(pairs + _WARM_UP):
        seconds = {}
        for chosen in (0, 1) if number % 2 else (1, 0):  # whichever comes first has the caches of the other
            swap.choose(chosen)
            seconds[chosen] = seconds_of(work)
        if number >= _WARM_UP:
            whole.append(seconds[1])
            differences.append(seconds[1] - seconds[0])
    low, high, _ = median_interval(differences)
    return AttentionShare(median(differences), low, high, median(whole), calls)
