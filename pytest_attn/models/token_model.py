"""A model of token ids, called the same way whatever library it is of: ids in, one row of numbers per token out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_attn.models.recognition import DropoutError
from pytest_attn.models.step import named_tensors

if TYPE_CHECKING:
    import torch

#: stochastic roundings that honest scatter is the root mean square of, and by how many units in the last place they move
_RUNS, _ULPS = 4, {"bfloat16": 1.0, "float16": 1.0, "float32": 4.0, "float64": 4.0}
#: how far honest arithmetic may move a row of the output, in units of the typical row's scatter: the largest of many rows,
#: whose sums ran in another order in every layer
LIMIT = 4.0


class TokenModel:
    """A model whose forward pass takes token ids. ids: (batch, tokens), cut to the shortest sequence of the batch."""

    def __init__(self, model: torch.nn.Module, batch: Any) -> None:
        given = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        ids = given.pop("input_ids", None)
        if ids is None or not hasattr(ids, "dim") or ids.dim() != 2 or ids.is_floating_point():
            raise TypeError(
                "check_invariants: batch must be a tensor of token ids (batch, tokens), or a mapping with input_ids"
            )
        self.model = model
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        self.takes_anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._parameters = frozenset(parameters)
        mask = given.pop("attention_mask", None)
        given.pop("position_ids", None)
        given.pop("labels", None)
        self._given = given
        lengths = [ids.shape[1]] * len(ids) if mask is None else [int(row.sum()) for row in mask]
        self.ids = ids[:, : min(lengths)]
        if self.ids.shape[1] < 8:
            raise ValueError(f"check_invariants: sequences of {self.ids.shape[1]} tokens say little; give at least 8")

    @property
    def config(self) -> Any:
        """The configuration of its text part, None where it has none."""
        config = getattr(self.model, "config", None)
        get = getattr(config, "get_text_config", None)
        return get() if callable(get) else config

    def takes(self, name: str) -> bool:
        """Whether the forward pass names an argument."""
        return name in self._parameters

    def rows(self, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return the logits, or the last hidden state, (batch, tokens, features)."""
        return self.called(ids, **more)[0]

    def called(self, ids: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
        """Return the rows, and all that the model returned."""
        import torch

        if self.takes("use_cache"):
            more.setdefault("use_cache", False)
        with torch.no_grad():
            returned = self.model(input_ids=ids, **self._given, **more) if self.takes("input_ids") else self.model(ids, **more)
        outputs = named_tensors(returned).outputs
        rows = next((t for t in outputs.values() if t.dim() == 3 and t.shape[:2] == ids.shape), None)
        if rows is None:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in outputs.items())
            raise TypeError(f"check_invariants: the model returned {shapes}; expected a tensor (batch, tokens, features)")
        return rows, returned

    def refuse_dropout(self) -> None:
        """Raise DropoutError where two runs on the same tokens differ by more than the order of sums explains."""
        import torch

        torch.manual_seed(0)
        one = self.rows(self.ids)
        torch.manual_seed(1)
        other = self.rows(self.ids)
        if not torch.equal(one, other) and float((one.double() - other.double()).norm() / one.double().norm()) > 1e-3:
            raise DropoutError("the model gives something else each time it runs: set dropout to 0, or call model.eval()")

    def scatter(self) -> float:
        """Return the typical distance of a row from itself under honest rounding.

        The root mean square over rows and runs. In each run the output of every innermost module moves at random by up to a
        unit in the last place. Another order of sums, or another kernel, would move it so.
        """
        exact = self.rows(self.ids).double()
        total = 0.0
        for seed in range(_RUNS):
            with _rounded_otherwise(self.model, seed):
                total += float((self.rows(self.ids).double() - exact).square().sum(-1).mean())
        return float((total / _RUNS) ** 0.5)


@contextlib.contextmanager
def _rounded_otherwise(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Move every floating-point output of the model's innermost modules by random fractions of a unit in the last place."""
    import torch

    def moved(_module: Any, _args: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        ulp = torch.finfo(out.dtype).eps * _ULPS.get(str(out.dtype).removeprefix("torch."), 1.0)
        noise = torch.rand(out.shape, generator=generator(out.device), device=out.device, dtype=torch.float32) * 2 - 1
        return (out.double() * (1 + ulp * noise.double())).to(out.dtype)

    made: dict[str, torch.Generator] = {}

    def generator(device: torch.device) -> torch.Generator:
        if str(device) not in made:
            made[str(device)] = torch.Generator(device).manual_seed(seed)
        return made[str(device)]

    hooks = [part.register_forward_hook(moved) for part in model.modules() if not any(True for _ in part.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
