"""Run a step as a compiler that fuses everything would: nothing is rounded to half precision between operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_attn.models.graph import in_backward_pass

_HALF = ("torch.bfloat16", "torch.float16")
_FLOATS = (*_HALF, "torch.float32")


@contextmanager
def fused() -> Iterator[None]:
    """Have operators take and return float32 in place of half precision, forward and backward, for a while.

    Parameters, buffers, views and what is written in place keep their dtype.
    """
    import torch
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
                asks_for_half = _is(_HALF, kwargs) and _is(_FLOATS, args[0])
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
                if not any(_is(_HALF, one) for one in tree_leaves((args, kwargs))):
                    raise
                return function(*wide[0], **wide[1])

    with Functions(), Operators():  # type: ignore[no-untyped-call]
        yield


def _is(dtypes: tuple[str, ...], value: Any) -> bool:
    """Whether a tensor's dtype, or the one that keyword arguments ask for, is one of some."""
    return str(value.get("dtype") if isinstance(value, dict) else getattr(value, "dtype", "")) in dtypes


def _each(arguments: Any, dtypes: tuple[str, ...], into: Any) -> Any:
    """Return arguments with each tensor of some dtypes in another one."""
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: t.to(into) if isinstance(t, torch.Tensor) and _is(dtypes, t) else t, arguments)


def _in_dtype_of_first(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operator that writes into the first, those that are floats in its dtype."""
    return args if not args or not _is(_FLOATS, args[0]) else (args[0], *_each(args[1:], _FLOATS, args[0].dtype))
