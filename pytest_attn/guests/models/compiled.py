"""The compiled run of a model, which no one can look into: what it returns, and its gradients, against exact attention.

The calls are judged in the eager run. Of the compiled run each output, the loss and each parameter's gradient is compared with
an eager run with exact attention, in units of what honest rounding does: the larger of two distances. One is of runs in which
exact attention is rounded at random where kernels round, and every other operator's result is moved by what another order of
arithmetic may. The other is of a run in which attention is rounded to nearest and nothing else is, as where a compiler fuses
all, times the square root of 2; it is larger where roundings all go the same way, as of gradients that vanish in float16.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pytest_attn.guests.models.exact_attention import SeededGenerators
from pytest_attn.guests.models.interception import in_backward_pass, uncompiled
from pytest_attn.guests.models.ratios import RepeatableStep, at_random, distances, scatter_of, to_nearest
from pytest_attn.guests.models.step import device_of
from pytest_attn.latency.profiler import launches_of
from pytest_attn.workloads.dtypes import DTYPES

#: how many units a tensor may be off, by how many elements it has at least; fewer are not judged. Honest compiled runs stayed
#: below 0.7 on a CPU, small tensors below 1: the unit counts what eager rounding adds, which a compiled run leaves out
LIMITS = ((4096, 1.25), (256, 1.75), (32, 3.0))
#: runs whose root mean square is the unit
RUNS = 4
#: how large the unit of a tensor of half precision may be, for the tensor's size, in eps of the dtype
_MOST_ROUNDING = 32
#: of the unit, in runs that round at random, how much the run may have in which nothing else is rounded
_MOST_FUSED = 4.0
#: how far apart, for its size, a tensor of two exact runs may be where nothing is drawn at random: a sum in another order
_RANDOM = 0.01


@dataclass(frozen=True)
class CompiledRun:
    """Facts about the compiled run.

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

    def not_compared(self, reason: str) -> CompiledRun:
        """Return what is known, but for the comparison."""
        return replace(self, ratios={}, limits={}, unknown=reason)

    def to_dict(self) -> dict[str, Any]:
        """Return builtin types only, for reports."""
        return {**vars(self), "ratios": dict(self.ratios), "limits": dict(self.limits), "kernels": list(self.kernels)}


def judge_compiled(repeatable: RepeatableStep) -> CompiledRun:
    """Run a compiled step twice, and compare the second with exact attention."""
    before = compilations()
    repeatable.as_it_is()
    first = compilations() - before
    found: dict[str, torch.Tensor] = {}

    def second() -> None:
        found.update({name: t.clone() for name, t in repeatable.as_it_is().items()})

    compiled = compilations()
    launched = launches_of(second, device_of(repeatable.model))
    recompiled = (compilations() - compiled)["graphs"]
    kernels = tuple(dict.fromkeys(one.symbol for one in launched if "attention" in one.words or "attention" in one.symbol))
    graphs, breaks = first["graphs"], first["breaks"]
    run = CompiledRun(graphs=graphs, breaks=breaks, recompiled=recompiled, kernels=kernels)
    return _compared(run, found, repeatable)


def _compared(run: CompiledRun, found: dict[str, torch.Tensor], repeatable: RepeatableStep) -> CompiledRun:
    """Return a compiled run with how far what it gave is from exact attention."""
    kinds, modules = torch.nn.modules.dropout._DropoutNd, repeatable.model.named_modules()
    if name := next((name for name, m in modules if isinstance(m, kinds) and m.training and m.p > 0), ""):
        return run.not_compared(f"{name} drops at random, and a compiled model draws other numbers; call model.eval()")
    dtypes: list[torch.dtype] = []
    exact = repeatable.exact(is_whole=True, dtypes=dtypes)
    redrawn = distances(repeatable.exact(_drawing_otherwise(), is_whole=True), exact)
    if any(distance > _RANDOM * float(exact[name].double().norm()) for name, distance in redrawn.items()):
        return run.not_compared("the step draws random numbers, and a compiled one draws others; call model.eval()")
    unit = _unit(exact, repeatable, dtypes)
    far = distances(found, exact)  # infinitely where it is missing, or not finite and should be
    ratios = {name: far.get(name, math.inf) / unit[name] for name in exact if unit[name] > 0}
    half = [torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize == 2]
    most = _MOST_ROUNDING * max(half) if half else math.inf
    limits = {}
    for name in ratios:
        limit = next((limit for least, limit in LIMITS if exact[name].numel() >= least), None)
        is_meaningful = unit[name] <= most * float(exact[name].double().norm())  # not what cancels, or vanishes in float16
        if limit is not None and is_meaningful:
            limits[name] = limit
    unknown = "" if limits else "every output and gradient has fewer than 32 elements, or is mostly rounding error"
    return replace(run, ratios=ratios, limits=limits, unknown=unknown)


@contextmanager
def _drawing_otherwise() -> Iterator[None]:
    """Have random numbers of every device be others than they would be; whoever keeps the model restores them."""
    torch.manual_seed(torch.initial_seed() + 1)
    yield


def _unit(exact: dict[str, torch.Tensor], repeatable: RepeatableStep, dtypes: list[torch.dtype]) -> dict[str, float]:
    """Return by how much honest rounding moves each tensor. dtypes: in which each call is given its tensors."""
    runs = (repeatable.exact(perturb_rounding(seed), is_whole=True, rounding=at_random(seed)) for seed in range(RUNS))
    scatter = scatter_of(runs, exact)
    try:
        fused = repeatable.exact(emulate_fusion(), is_whole=True, rounding=to_nearest, into=iter(dtypes))
    except Exception:  # an operator, or the model's own code, that takes no other dtype than the model's
        fused = {}
    apart = {
        name: math.sqrt(2) * far for name, far in distances(fused, exact).items()
    }  # of two runs that round, each otherwise
    return {name: max(least, min(apart.get(name, 0.0), _MOST_FUSED * least)) for name, least in scatter.items()}


def compilations() -> Counter[str]:
    """Count graphs that dynamo has compiled up to now, and breaks between them; nothing where it was never imported."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Counter()
    return Counter(graphs=utils.counters["stats"]["unique_graphs"], breaks=sum(utils.counters["graph_break"].values()))


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether torch.compile made the model, or a part of it."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in model.modules()
    )


def runs_compiled(model: torch.nn.Module, step: Callable[[], Any]) -> bool:
    """Return whether a step runs what torch.compile made: the step itself, the model, or what the step closes over."""
    if uncompiled(step) is not None or is_compiled(model):
        return True
    function = inspect.unwrap(getattr(step, "func", step))
    try:
        held = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a function of Python
        return False
    values = (*held.nonlocals.values(), *held.globals.values())
    objects = (value for value in values if not isinstance(value, ModuleType))
    return any(hasattr(value, "_orig_mod") or uncompiled(value) is not None for value in objects)


# -- the same step with other roundings --------------------------------------------------------------------------------------


#: operators whose results no order of arithmetic changes
# fmt: off
_MOVES = frozenset(
    (
        # rearrange
        "alias", "cat", "clone", "constant_pad_nd", "embedding", "flip", "gather", "index", "index_put",
        "index_select", "lift", "masked_fill", "repeat", "roll", "scatter", "select_backward", "slice_backward",
        "sort", "stack", "topk", "tril", "triu", "unfold_backward", "where",
        # make
        "arange", "empty", "empty_like", "empty_strided", "full", "full_like", "new_empty", "new_empty_strided",
        "new_ones", "new_zeros", "ones", "ones_like", "rand", "randint", "randn", "scalar_tensor", "zeros",
        "zeros_like",
        # choose, or change a sign
        "abs", "amax", "amin", "clamp", "max", "maximum", "min", "minimum", "neg", "relu", "sign",
    )
)
# fmt: on
#: by how many units in the last place at most; below 0.5 nothing moves. 0.6 moves one value of six, as different as two
#: nearest roundings are; sums in float32 differ by more, as their order does
_ULPS = {name: 0.6 if one.is_low_precision else 4.0 for name, one in DTYPES.items()}


def perturb_rounding(seed: int) -> Any:
    """Return a mode under which operators' results are moved at random, forward and backward."""
    generators = SeededGenerators(seed)

    class Perturbing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            makes_views = any(one.alias_info is not None for one in func._schema.returns)
            if func._schema.is_mutable or makes_views or func.overloadpacket.__name__ in _MOVES:
                return result
            if isinstance(result, tuple | list):
                return type(result)(self._moved(one) for one in result)
            return self._moved(result)

        def _moved(self, result: Any) -> Any:
            name = str(getattr(result, "dtype", "")).removeprefix("torch.")
            if name not in _ULPS or not isinstance(result, torch.Tensor):
                return result
            x = result.double()
            noise = torch.rand(x.shape, generator=generators[x.device], device=x.device, dtype=torch.float64) * 2 - 1
            of_dtype = torch.finfo(result.dtype)
            _, exponent = torch.frexp(x.abs().clamp_(min=of_dtype.smallest_normal))  # below it steps do not shrink
            unit = torch.ldexp(torch.full_like(x, of_dtype.eps), exponent - 1)
            vanishes = name == "float16" and in_backward_pass()  # gradients that are small: zero is a rounding as well
            still = ~x.isfinite() if vanishes else ~x.isfinite() | (x == 0)
            return torch.where(still, x, x + noise * _ULPS[name] * unit).to(result.dtype).view_as(result)

    return Perturbing()  # type: ignore[no-untyped-call]


_HALF = ("torch.bfloat16", "torch.float16")
_FLOATS = (*_HALF, "torch.float32")


@contextmanager
def emulate_fusion() -> Iterator[None]:
    """Have operators take and return float32 in place of half precision, forward and backward, for a while.

    Parameters, buffers, views and what is written in place keep their dtype.
    """

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func._schema.is_mutable:  # it writes into the first, in whose dtype all floats are given
                if args and _has_dtype(_FLOATS, args[0]):
                    args = (args[0], *_each(args[1:], _FLOATS, args[0].dtype))
                return func(*args, **kwargs)
            if any(one.alias_info is not None for one in func._schema.returns):
                return func(*args, **kwargs)
            if func is torch.ops.aten._to_copy.default:
                asks_for_half = _has_dtype(_HALF, kwargs) and _has_dtype(_FLOATS, args[0])
                is_gradient = in_backward_pass()  # autograd gives a parameter one of its dtype
                return func(*args, **({**kwargs, "dtype": torch.float32} if asks_for_half and not is_gradient else kwargs))
            return func(*_each(args, _HALF, torch.float32), **_each(kwargs, _HALF, torch.float32))

    class Functions(TorchFunctionMode):
        """Some functions look at dtypes before they call operators, and refuse mixed ones."""

        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                wide = _each((args, kwargs), _HALF, torch.float32)
                if not any(_has_dtype(_HALF, one) for one in tree_leaves((args, kwargs))):
                    raise
                return function(*wide[0], **wide[1])

    with Functions(), Operators():  # type: ignore[no-untyped-call]
        yield


def _has_dtype(dtypes: tuple[str, ...], value: Any) -> bool:
    """Return whether a tensor's dtype, or the one that keyword arguments ask for, is one of some."""
    return str(value.get("dtype") if isinstance(value, dict) else getattr(value, "dtype", "")) in dtypes


def _each(arguments: Any, dtypes: tuple[str, ...], into: Any) -> Any:
    return tree_map(lambda t: t.to(into) if isinstance(t, torch.Tensor) and _has_dtype(dtypes, t) else t, arguments)
