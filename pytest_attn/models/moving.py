"""Move what every operator of a run returns by what a rounding may, at random: what honest arithmetic of other order does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: operators that only move values, which no order of arithmetic changes
_MOVES = frozenset(
    (
        *("clone", "cat", "stack", "embedding", "index", "index_select", "gather", "where", "masked_fill", "relu", "neg"),
        *("constant_pad_nd", "select_backward", "slice_backward", "unfold_backward", "new_zeros", "zeros", "zeros_like"),
        *(
            "ones",
            "ones_like",
            "new_ones",
            "full",
            "full_like",
            "arange",
            "empty",
            "empty_like",
            "new_empty",
            "repeat",
            "roll",
        ),
        *(
            "empty_strided",
            "new_empty_strided",
            "scalar_tensor",
            "rand",
            "randn",
            "randint",
            "flip",
            "abs",
            "sign",
            "triu",
            "tril",
        ),
        *(
            "sort",
            "topk",
            "max",
            "min",
            "amax",
            "amin",
            "clamp",
            "maximum",
            "minimum",
            "index_put",
            "scatter",
            "alias",
            "lift",
        ),
    )
)
#: by how many units in the last place at most; below 0.5 nothing moves. 0.6 moves one value of six, as different as two
#: nearest roundings are; sums in float32 differ by more, as their order does
_ULPS = {"bfloat16": 0.6, "float16": 0.6, "float32": 4.0}


def moving(seed: int) -> Any:
    """Return a mode under which operators' results are moved at random, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Moving(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
            import torch

            name = str(getattr(result, "dtype", "")).removeprefix("torch.")
            if name not in _ULPS or not isinstance(result, torch.Tensor):
                return result
            device = str(result.device)
            if device not in self.generators:
                self.generators[device] = torch.Generator(result.device).manual_seed(seed)
            x = result.double()
            noise = torch.rand(x.shape, generator=self.generators[device], device=x.device, dtype=torch.float64) * 2 - 1
            _, exponent = torch.frexp(x)
            unit = torch.ldexp(torch.full_like(x, torch.finfo(result.dtype).eps * _ULPS[name]), exponent - 1)
            return torch.where(x.isfinite() & (x != 0), x + noise * unit, x).to(result.dtype).view_as(result)

    return Moving()


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator rounds, and returns tensors of its own."""
    schema = func._schema
    if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
        return False
    return func.overloadpacket.__name__ not in _MOVES
