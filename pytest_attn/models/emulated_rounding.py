"""Run a step with other roundings than its own: results moved by what another order does, or none between operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_attn.models.autograd_graph import in_backward_pass
from pytest_attn.workloads.dtypes import DTYPES

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
    from torch.utils._python_dispatch import TorchDispatchMode

    class Perturbing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.generators: dict[str, torch.Generator] = {}

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if not _computes(func, args):
                return result
            if isinstance(result, tuple | list):
                return type(result)(self._moved(one) for one in result)
            return self._moved(result)

        def _moved(self, result: Any) -> Any:
            name = str(getattr(result, "dtype", "")).removeprefix("torch.")
            if name not in _ULPS or not isinstance(result, torch.Tensor):
                return result
            device = str(result.device)
            if device not in self.generators:
                self.generators[device] = torch.Generator(result.device).manual_seed(seed)
            x = result.double()
            noise = torch.rand(x.shape, generator=self.generators[device], device=x.device, dtype=torch.float64) * 2 - 1
            of_dtype = torch.finfo(result.dtype)
            _, exponent = torch.frexp(x.abs().clamp_(min=of_dtype.smallest_normal))  # below it steps do not shrink
            unit = torch.ldexp(torch.full_like(x, of_dtype.eps), exponent - 1)
            vanishes = name == "float16" and in_backward_pass()  # gradients that are small: zero is a rounding as well
            still = ~x.isfinite() if vanishes else ~x.isfinite() | (x == 0)
            return torch.where(still, x, x + noise * _ULPS[name] * unit).to(result.dtype).view_as(result)

    return Perturbing()


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator rounds, and returns tensors of its own."""
    schema = func._schema
    if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
        return False
    return func.overloadpacket.__name__ not in _MOVES


# -- a compiler that fuses all -----------------------------------------------------------------------------------------------


_HALF = ("torch.bfloat16", "torch.float16")
_FLOATS = (*_HALF, "torch.float32")


@contextmanager
def emulate_fusion() -> Iterator[None]:
    """Have operators take and return float32 in place of half precision, forward and backward, for a while.

    Parameters, buffers, views and what is written in place keep their dtype.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func._schema.is_mutable:
                return func(*_in_dtype_of_first(args), **kwargs)
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
    """Whether a tensor's dtype, or the one that keyword arguments ask for, is one of some."""
    return str(value.get("dtype") if isinstance(value, dict) else getattr(value, "dtype", "")) in dtypes


def _each(arguments: Any, dtypes: tuple[str, ...], into: Any) -> Any:
    """Return arguments with each tensor of some dtypes in another one."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: t.to(into) if isinstance(t, torch.Tensor) and _has_dtype(dtypes, t) else t, arguments)


def _in_dtype_of_first(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operator that writes into the first, those that are floats in its dtype."""
    return args if not args or not _has_dtype(_FLOATS, args[0]) else (args[0], *_each(args[1:], _FLOATS, args[0].dtype))
