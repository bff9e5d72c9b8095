"""Move what every operator of a run returns by what a rounding may, at random: what honest arithmetic of other order does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_attn.models.graph import in_backward_pass

if TYPE_CHECKING:
    import torch

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
            of_dtype = torch.finfo(result.dtype)
            _, exponent = torch.frexp(x.abs().clamp_(min=of_dtype.smallest_normal))  # below it steps do not shrink
            unit = torch.ldexp(torch.full_like(x, of_dtype.eps), exponent - 1)
            vanishes = name == "float16" and in_backward_pass()  # gradients that are small: zero is a rounding as well
            still = ~x.isfinite() if vanishes else ~x.isfinite() | (x == 0)
            return torch.where(still, x, x + noise * _ULPS[name] * unit).to(result.dtype).view_as(result)

    return Moving()


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator rounds, and returns tensors of its own."""
    schema = func._schema
    if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
        return False
    return func.overloadpacket.__name__ not in _MOVES
