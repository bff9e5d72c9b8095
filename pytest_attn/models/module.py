"""One attention layer as a model of its own: hidden states are drawn for it, or the user's are handed over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.precision import Precision
from pytest_attn.models.check import Target, check_model
from pytest_attn.models.comparison import ModelComparison
from pytest_attn.workloads.generator import Draw

if TYPE_CHECKING:
    import torch

#: batch entries and tokens of drawn hidden states
_SHAPE = (2, 64)
#: hidden states are so large that freshly initialized projections give attention that is far from uniform
_SPREAD = 3.0


def check_module(
    module: torch.nn.Module,
    inputs: Any = None,
    backend: Target | None = None,
    backward: bool = True,
    *,
    functions: Iterable[Callable[..., Any] | str] = (),
    limits: str = "default",
    scatter: int = 4,
    precision: str | Precision | None = None,
) -> ModelComparison:
    """Call an attention layer, and judge what its attention core gets and returns by exact attention.

    Projections and rotary embeddings are the module's own.

    Args:
        module: the layer, such as torch.nn.MultiheadAttention or one of transformers or timm.
        inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments. By default hidden states are
            drawn for torch.nn.MultiheadAttention and its layers, and for a module whose forward takes them alone.
        backend: a backend, its name, or a function of (q, k, v, workload=...), in place of the layer's own attention.
        backward: gradients, too.
        functions: attention of your own, as for `capture`.
        limits: "default" or "strict".
        scatter: as for `check_model`.
        precision: as for `check_model`.

    Returns:
        The comparison of a layer that is right.

    Raises:
        AssertionError: a call is wrong, was not read, or was not replaced, or none was caught; the text has the calls.
        DropoutError: attention drops probabilities.
        ValueError: no inputs can be drawn for this module, or the backend is unknown.
    """
    __tracebackhide__ = True
    step = module_step(module, inputs)
    options: Any = {"functions": functions, "limits": limits, "scatter": scatter, "precision": precision}
    return check_model(module, step, backend, backward, **options)


def module_step(module: torch.nn.Module, inputs: Any = None, shape: tuple[int, int] = _SHAPE) -> Callable[[], Any]:
    """Return a step that calls the module. shape: batch entries and tokens of hidden states that are drawn."""
    import torch

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if inputs is None:
        args, kwargs = _drawn(module, shape)
    elif isinstance(inputs, Mapping):
        kwargs = inputs
    elif isinstance(inputs, torch.Tensor):
        args = (inputs,)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    else:
        raise ValueError(f"inputs must be a tensor, a tuple or a mapping of arguments, got {type(inputs).__name__}")
    return lambda: module(*args, **kwargs)


def _drawn(module: torch.nn.Module, shape: tuple[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a module that takes hidden states, as far as it says how wide they are."""
    import torch

    if isinstance(module, torch.nn.MultiheadAttention):
        query, key, value = (
            _hidden(module, name, shape, width, module.batch_first)
            for name, width in (("query", module.embed_dim), ("key", module.kdim), ("value", module.vdim))
        )
        is_self = module.kdim == module.vdim == module.embed_dim
        return (query, query, query) if is_self else (query, key, value), {"need_weights": False}
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        attention = module.self_attn
        return (_hidden(module, "src", shape, attention.embed_dim, attention.batch_first),), {}
    taken = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    plain = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    projection = next((m for m in module.modules() if isinstance(m, torch.nn.Linear)), None)
    if len(plain) != 1 or projection is None:
        names = ", ".join(p.name for p in plain) or "nothing"
        raise ValueError(
            f"no inputs can be drawn for {type(module).__name__}, whose forward takes {names};"
            " say inputs=(hidden_states, ...) or inputs={'hidden_states': ...}"
        )
    return (_hidden(module, plain[0].name, shape, projection.in_features, True),), {}


def _hidden(module: torch.nn.Module, name: str, shape: tuple[int, int], width: int, is_batch_first: bool) -> torch.Tensor:
    """Draw hidden states in the dtype and on the device of the module's first parameter."""
    like = next(module.parameters())
    drawn = Draw(f"{type(module).__name__}/0", like.dtype, like.device).normal(name, (*shape, width), _SPREAD)
    return drawn if is_batch_first else drawn.transpose(0, 1)
