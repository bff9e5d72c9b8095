"""Masks that a user's function shows: as tensors, and as FlexAttention's mask_mod."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.fields import suggests_fields
from pytest_attn.workloads.functions import (
    UnknownFunctionError,
    decode_function,
    describe,
    encode_function,
    function_label,
    require_parameters,
)
from pytest_attn.workloads.masks.mask import Choices, Mask, MaskMod, NearMiss, Sequences

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class FunctionMask(Mask):
    """A mask that a function of the user's shows."""

    capabilities = ("any",)
    words = "mask given as a tensor or function"
    is_positional = False

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        raise NotImplementedError

    @property
    def label(self) -> str:
        return f"mask-{function_label(self.function)}"

    def to_dict(self) -> dict[str, Any]:
        return {"function": encode_function(self.function)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], tensor: torch.Tensor | None = None) -> Mask:
        """Import the function; raise UnknownFunctionError where that cannot be done and there is no tensor for it."""
        try:
            return cls(decode_function(fields["function"]))  # type: ignore[call-arg]
        except UnknownFunctionError:
            if tensor is None:
                raise
            return BooleanMask(StoredMask(tensor, fields["function"]["label"]))

    def near_misses(self, over: Sequences) -> Iterator[NearMiss]:
        seen, key_heads = self.bind(over), over.key_heads
        inverted = "with the mask inverted: True taken for hidden"
        yield NearMiss("mask-inverted", inverted, lambda *index: ~seen(*index))
        if len(set(key_heads)) < over.heads:
            words = "with the mask of the key head, not of the query head"
            yield NearMiss("mask-of-key-head", words, lambda b, h, q, kv: seen(b, h.new_tensor(key_heads)[h], q, kv))


@suggests_fields
@dataclass(frozen=True)
class BooleanMask(FunctionMask):
    """A mask given as a tensor, True = visible.

    Args:
        factory: factory(batch, heads, q_len, kv_len, device) returns a boolean tensor that broadcasts to (batch, heads,
            q_len, kv_len), with the same values on every call.

    Raises:
        ValueError: the factory takes other arguments.
    """

    factory: Callable[[int, int, int, int, torch.device], torch.Tensor]

    kinds = ("boolean",)
    is_packable = False

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ValueError(f"BooleanMask: factory must be a function, got {self.factory!r}")
        require_parameters("BooleanMask", self.factory, ("batch", "heads", "q_len", "kv_len", "device"))

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        return self.factory

    def tensor(self, over: Sequences) -> torch.Tensor:
        return self.factory(over.batch, over.heads, over.q_len, over.kv_len, over.device)

    def bind(self, over: Sequences) -> MaskMod:
        """Look the tensor's values up; raise ValueError where it has another dtype or shape than it should."""
        import torch

        shape, made, name = (over.batch, over.heads, over.q_len, over.kv_len), self.tensor(over), function_label(self.factory)
        if not isinstance(made, torch.Tensor) or made.dtype != torch.bool:
            raise ValueError(f"BooleanMask: {name} must return a boolean tensor (True = visible), got {describe(made)}")
        try:
            made.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"BooleanMask: {name} must return a tensor that broadcasts to {shape}, got {describe(made)}"
            ) from None
        own = made.to(over.device).view((1,) * (4 - made.dim()) + made.shape)
        values, dims = own.squeeze(), [dim for dim, size in enumerate(own.shape) if size != 1]

        def looked_up(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            """Return the tensor's values where it has them: it is as narrow as its factory makes it."""
            place = b, h, q, kv  # flex counts the arguments
            return values[tuple(place[dim] for dim in dims)] if dims else values

        return looked_up

    def source(self, write_function: Callable[[Callable[..., Any]], str]) -> str:
        return f"BooleanMask({write_function(self.factory)})"

    def another(self) -> tuple[str, Mask]:
        return "a boolean mask that is lower triangular", BooleanMask(_triangle)

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        return cls(blocks_by_head)


class StoredMask:
    """A mask's tensor as the factory of a BooleanMask; the same for every call."""

    def __init__(self, visible: torch.Tensor, name: str = "captured") -> None:
        self.__name__, self.visible = name, visible

    def __call__(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Return the tensor."""
        return self.visible.to(device)


def blocks_by_head(batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """A factory of a boolean mask: blocks on the diagonal, larger for each head; rows beyond the keys see none."""
    import torch

    size = 8 * (1 + torch.arange(heads, device=device)[:, None, None])
    rows, keys = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)[None, :]
    return (rows // size == keys // size)[None]


def _triangle(batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril()


@dataclass(frozen=True)
class MaskModMask(FunctionMask):
    """A mask given as a FlexAttention mask_mod: `fn(b, h, q_idx, kv_idx) -> bool tensor`."""

    fn: MaskMod

    kinds = ("mask_mod",)
    spellings = ("a mask_mod(b, h, q_idx, kv_idx)",)

    @property
    def function(self) -> MaskMod:
        return self.fn

    def tensor(self, over: Sequences) -> torch.Tensor:
        return self.fn(*over.indices())

    def bind(self, over: Sequences) -> MaskMod:
        return self.fn

    @classmethod
    def read(cls, written: object) -> Self | None:
        """Read functions; raise ValueError for one of other parameters."""
        if not callable(written):
            return None
        require_parameters("mask", written, ("b", "h", "q_idx", "kv_idx"))
        return cls(written)

    def source(self, write_function: Callable[[Callable[..., Any]], str]) -> str:
        return write_function(self.fn)

    def another(self) -> tuple[str, Mask]:
        return "a mask function that hides every third key", MaskModMask(_two_of_three)

    @classmethod
    def draw(cls, kind: str, choices: Choices) -> Self:
        return cls(prefix_of_four)


def prefix_of_four(_b: object, _h: object, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A mask_mod: four keys that all see, causal after them."""
    return (kv_idx <= q_idx) | (kv_idx < 4)


def _two_of_three(_b: object, _h: object, _q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return kv_idx % 3 != 1
