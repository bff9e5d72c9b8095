"""`attn.through`: a layer that writes attention out between its projections, as a callable of (q, k, v)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch

from pytest_attn.cases.case import AttentionCase, context_of
from pytest_attn.reports.lines import some
from pytest_attn.workloads.functions import describe, type_name


def through(
    case: AttentionCase,
    module: torch.nn.Module,
    q: str = "to_q",
    k: str = "to_k",
    v: str = "to_v",
    out: str = "to_out",
    *,
    call: Callable[[torch.Tensor], Any] | None = None,
    bias: Callable[[torch.Tensor], torch.Tensor] | None = None,
    replace: Mapping[str, Callable[..., Any]] | None = None,
    **arguments: Any,
) -> Between:
    """Return what a layer computes between its projections, as a callable of (q, k, v).

    In a call the projections return q, k and v, (batch, tokens, heads * head_dim), and what reaches the output projection is
    returned. The layer gets hidden states of zeros, and is left as it was.

    Args:
        module: the layer.
        q, k, v: names of its projections, as "attn.to_q"; one that makes several, in this order, has its name for each.
        out: name of its output projection.
        call: calls the layer with hidden states (batch, tokens, features), where module(hidden, **arguments) does not.
        bias: what the layer's bias should be, of q (batch, heads, tokens, head_dim) in float64, as decomposed positions
            are; the workload says along which dimensions, bias="bhqk".
        replace: by names of other submodules or methods, what is called in their place: rotary embeddings that return what
            they get, a bias that is attn.bias, a gate of ones.
        arguments: of the layer's forward pass, beside hidden states.

    Raises:
        TypeError: the layer is none, or a projection is not given by its name.
        ValueError: the layer has no such part, or the workload has no bias.
    """
    context = context_of(case)
    if isinstance(module, type):
        raise TypeError(f"attn.through: needs a layer, got the class {module.__name__}; pass {module.__name__}(...)")
    for name, given in zip(("q", "k", "v", "out"), (q, k, v, out), strict=True):
        if not isinstance(given, str):
            raise TypeError(f"attn.through: {name} must be the name of a projection, as 'to_{name}', got {describe(given)}")
    if bias is not None and not context.workload.bias:
        raise ValueError(
            f"attn.through: bias= makes a bias, and {context.workload.id} has none; say Workload(..., bias='bhqk')"
        )
    has_rows_apart = not context.workload.is_packed and context.workload.kv_pages is None
    has_heads_first = context.mark.declared.inner_layout != "bshd"
    call = call or partial(module, **arguments)
    between = Between(module, (q, k, v), out, call, dict(replace or {}), has_rows_apart, has_heads_first, bias)
    try:
        attrgetter(q, k, v, out, *between.replaced)(module)
    except AttributeError as error:
        raise ValueError(f"attn.through: {error}; {between.projections}") from None
    return between


@dataclass(frozen=True)
class Between:
    """The attention of a layer between its projections, q, k and v, and the one called `out`."""

    module: torch.nn.Module
    inputs: tuple[str, str, str]
    out: str
    call: Callable[[torch.Tensor], Any]
    replaced: Mapping[str, Callable[..., Any]]
    has_rows_apart: bool
    has_heads_first: bool
    bias_of: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def __name__(self) -> str:
        """The name of the layer's class."""
        return type_name(self.module)

    @property
    def projections(self) -> str:
        """The names of what may be its projections, in words."""
        parts = [name for name, part in self.module.named_modules() if getattr(getattr(part, "weight", 0), "ndim", 0) == 2]
        return f"its projections are {some(parts, 12)}: name those of q, k, v and out" if parts else "it has no projections"

    def __call__(self, *qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention of q, k and v, as they lie; declines what these projections do not make."""
        if not self.has_rows_apart or qkv[0].dim() != 4:
            raise NotImplementedError(
                f"{self.__name__} is called between projections, which make no packed sequences or pages"
            )
        q, k, v = map(self._swapped, qkv)
        projected: dict[str, torch.Tensor] = {}
        for name, tensor in zip(self.inputs, (q, k, v), strict=True):
            rows = tensor.flatten(2).contiguous()  # as projections return them
            projected[name] = torch.cat([projected[name], rows], -1) if name in projected else rows
        for name, rows in projected.items():
            features = getattr(attrgetter(name)(self.module), "out_features", rows.shape[-1])
            if features != rows.shape[-1]:
                asked = f"the workload's heads * head_dim are {rows.shape[-1]}"
                raise NotImplementedError(f"{name} of {self.__name__} makes {features} features; {asked}")
        width = getattr(attrgetter(self.inputs[0])(self.module), "in_features", q.shape[2] * q.shape[3])
        written = self._written(projected, q.new_zeros(*q.shape[:2], width))
        batch, tokens, heads, dim = *q.shape[:3], v.shape[3]
        if written.numel() != batch * tokens * heads * dim or (written.shape[0], written.shape[-1]) != (batch, heads * dim):
            raise ValueError(
                f"attn.through: {self.__name__} hands {tuple(written.shape)} to {self.out}; expected (batch, tokens, heads *"
                f" head_dim) = {(batch, tokens, heads * dim)}: out= names the projection of what attention returns"
            )
        return self._swapped(written.reshape(batch, tokens, heads, dim))

    def _swapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Swap heads and tokens where heads are first, which projections have last; there and back."""
        return tensor.transpose(1, 2) if self.has_heads_first else tensor

    def _written(self, projected: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer with what is projected, and return what it hands to its output projection."""
        seen: dict[str, torch.Tensor] = {}
        project = attrgetter(self.out)(self.module).forward

        def returned(name: str, *_: Any, **__: Any) -> torch.Tensor:
            return seen.setdefault(name, projected[name])

        def read(attention: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen[self.out] = attention
            return project(attention, *args, **kwargs)

        parts = {**self.replaced, **{name: partial(returned, name) for name in projected}, self.out: read}
        with ExitStack() as stack:
            for name, function in parts.items():
                part, (owner, _, last) = attrgetter(name)(self.module), name.rpartition(".")
                where = (part, "forward") if isinstance(part, torch.nn.Module) else (self.module.get_submodule(owner), last)
                stack.enter_context(patch.object(*where, function))
            self.call(hidden)
        if unused := [name for name in (*projected, self.out) if name not in seen]:
            raise ValueError(f"attn.through: {self.__name__} never called {some(unused)}; {self.projections}")
        return seen[self.out]
