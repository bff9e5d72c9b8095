"""Who may look at whom: the masks of attention, as plain descriptions that turn into a FlexAttention mask_mod.

A mask is a frozen description without tensors. `bind` gives it lengths and a device and returns a predicate
`(b, h, q_idx, kv_idx) -> bool tensor` in FlexAttention's signature. The predicate is elementwise in its four index
tensors, so that it serves the reference (by broadcasting), FlexAttention (by vmap) and dense masks alike.
"""

from __future__ import annotations

import functools
import inspect
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

MaskMod: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"
ScoreMod: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"
Lengths: TypeAlias = "int | torch.Tensor"


@dataclass(frozen=True)
class Causal:
    """Query i sees keys up to i (top-left) or up to i + kv_len - q_len (bottom-right)."""

    bottom_right: bool = False

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return "causal-br" if self.bottom_right else "causal"


@dataclass(frozen=True)
class Window:
    """A sliding window: query i stands at key p = i + kv_len - q_len and sees keys p - left .. p + right, ends included.

    `None` leaves that side open. The alignment is bottom-right, as in flash-attention, so `Window(None, 0)` equals
    "causal-bottom-right" and, for q_len == kv_len, "causal".
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for side, value in (("left", self.left), ("right", self.right)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"Window: {side} must be a number of keys >= 0 or None (open), got {value!r}")

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"window{'inf' if self.left is None else self.left}.{'inf' if self.right is None else self.right}"


@dataclass(frozen=True)
class Document:
    """Documents laid one after the other in one sequence: a token sees its own document only (and, causal, its past)."""

    lengths: tuple[int, ...]
    causal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", as_tuple("Document: lengths", self.lengths))
        if not self.lengths or any(not isinstance(n, int) or n < 1 for n in self.lengths):
            raise ValueError(f"Document: lengths must be whole numbers >= 1, got {self.lengths!r}")

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"documents{'-causal' if self.causal else ''}-{short_lengths(self.lengths)}"


@dataclass(frozen=True)
class Neighborhood:
    """Neighbourhood attention over a 1-, 2- or 3-D token layout with NATTEN's meaning of its four parameters.

    A query sees the `kernel` nearest tokens of its dilation group; at a border the window shifts inwards. With a stride,
    all queries of a stride group share the window of their leader (the centre, or the last one where causal).
    Source: NATTEN 0.21, the mask of its flex backend.
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] | int = 1
    dilation: tuple[int, ...] | int = 1
    causal: tuple[bool, ...] | bool = False

    def __post_init__(self) -> None:
        shape = as_tuple("Neighborhood: shape", self.shape)
        object.__setattr__(self, "shape", shape)
        for name in ("kernel", "stride", "dilation", "causal"):
            value = getattr(self, name)
            values = (value,) * len(shape) if isinstance(value, int) else tuple(value)
            if not all(isinstance(v, int) for v in values):
                raise ValueError(f"Neighborhood: {name} must be whole numbers, got {value!r}")
            if len(values) != len(shape):
                raise ValueError(f"Neighborhood: {name} must have {len(shape)} entries as shape {shape}, got {value!r}")
            object.__setattr__(self, name, values)
        for size, kernel, stride, dilation in zip(shape, *self._triple, strict=True):
            if kernel < 1 or dilation < 1 or kernel * dilation > size:
                raise ValueError(
                    f"Neighborhood: kernel {kernel} with dilation {dilation} does not fit into {size} tokens"
                    " (kernel * dilation must not exceed the size)"
                )
            if not 1 <= stride <= kernel:
                raise ValueError(f"Neighborhood: stride must be between 1 and the kernel size {kernel}, got {stride}")

    @property
    def _triple(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        assert isinstance(self.stride, tuple)
        assert isinstance(self.dilation, tuple)
        return self.kernel, self.stride, self.dilation

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""

        def times(values: object) -> str:
            return "x".join(str(int(v)) for v in values)  # type: ignore[attr-defined]

        parts = [f"na{times(self.shape)}", f"k{times(self.kernel)}"]
        if any(s != 1 for s in self._triple[1]):
            parts.append(f"s{times(self.stride)}")
        if any(d != 1 for d in self._triple[2]):
            parts.append(f"dil{times(self.dilation)}")
        if any(self.causal):  # type: ignore[arg-type]
            parts.append(f"c{times(self.causal)}")
        return "-".join(parts)


@dataclass(frozen=True)
class BooleanMask:
    """A mask given as a tensor, True = visible: `factory(batch, heads, q_len, kv_len, device)` makes it.

    The tensor must be boolean and broadcast to (batch, heads, q_len, kv_len). The factory must give the same values on
    every call, as each backend and the reference call it.
    """

    factory: Callable[[int, int, int, int, torch.device], torch.Tensor]

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ValueError(f"BooleanMask: factory must be a function, got {self.factory!r}")
        require_parameters("BooleanMask", self.factory, ("batch", "heads", "q_len", "kv_len", "device"))

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"mask-{function_label(self.factory)}"


@dataclass(frozen=True)
class MaskModMask:
    """A mask given as a FlexAttention mask_mod: `fn(b, h, q_idx, kv_idx) -> bool tensor`."""

    fn: MaskMod

    @property
    def label(self) -> str:
        """The mask's part of a workload's id."""
        return f"mask-{function_label(self.fn)}"


Mask: TypeAlias = "Causal | Window | Document | Neighborhood | BooleanMask | MaskModMask"


def as_mask(mask: object) -> Mask | None:
    """Turn what a user writes as `mask=` into a mask; raise ValueError for anything else."""
    if mask is None or isinstance(mask, Causal | Window | Document | Neighborhood | BooleanMask | MaskModMask):
        return mask
    if isinstance(mask, str) and mask in ("causal", "causal-bottom-right"):
        return Causal(bottom_right=mask != "causal")
    if callable(mask):
        require_parameters("mask", mask, ("b", "h", "q_idx", "kv_idx"))
        return MaskModMask(mask)
    raise ValueError(
        f"Workload: mask must be None, 'causal', 'causal-bottom-right', Window, Document, Neighborhood, BooleanMask"
        f" or a mask_mod(b, h, q_idx, kv_idx), got {mask!r}"
    )


def bind(mask: Mask, batch: int, heads: int, q_len: int, kv_len: int, kv_lens: Lengths, device: torch.device) -> MaskMod:
    """Return the predicate of `mask` for sequences of q_len queries and kv_lens keys (an int, or one per batch entry)."""
    import torch

    if isinstance(mask, Causal | Window):
        return _bind_band(mask, q_len, kv_lens)
    if isinstance(mask, Document):
        ids = torch.repeat_interleave(torch.tensor(mask.lengths)).to(device)

        def same_document(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            same: torch.Tensor = ids[q] == ids[kv]
            return same & (kv <= q) if mask.causal else same

        return same_document
    if isinstance(mask, Neighborhood):
        return _bind_neighborhood(mask)
    if isinstance(mask, BooleanMask):
        dense = _dense_from_factory(mask, batch, heads, q_len, kv_len, device)

        def looked_up(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return dense[b, h, q, kv]

        return looked_up
    return mask.fn


def _bind_band(mask: Causal | Window, q_len: int, kv_lens: Lengths) -> MaskMod:
    import torch

    left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
    top_left = isinstance(mask, Causal) and not mask.bottom_right

    def inside(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        keys = kv_lens[b] if isinstance(kv_lens, torch.Tensor) else kv_lens
        position = q if top_left else q + (keys - q_len)
        visible = kv >= 0
        if right is not None:
            visible = visible & (kv <= position + right)
        if left is not None:
            visible = visible & (kv >= position - left)
        return visible

    return inside


def _bind_neighborhood(mask: Neighborhood) -> MaskMod:
    import torch

    kernels, strides, dilations = mask._triple
    causals = mask.causal
    assert isinstance(causals, tuple)

    def near(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        visible = kv >= 0
        for size, kernel, stride, dilation, causal in reversed(
            list(zip(mask.shape, kernels, strides, dilations, causals, strict=True))
        ):
            q_at, kv_at = q % size, kv % size
            q, kv = q // size, kv // size
            group = q_at % dilation
            q_pos, kv_pos = q_at // dilation, kv_at // dilation
            last = (size - 1 - group) // dilation  # last position of this dilation group
            if causal:
                leader = torch.minimum(q_pos // stride * stride + stride - 1, last)
                here = (kv_pos <= q_pos) & (leader - kv_pos < kernel)
            else:
                leader = torch.minimum(q_pos // stride * stride + stride // 2, last)
                start = torch.minimum(torch.clamp(leader - kernel // 2, min=0), last + 1 - kernel)
                here = (kv_pos >= start) & (kv_pos < start + kernel)
            visible = visible & here & (kv_at % dilation == group)
        return visible

    return near


def _dense_from_factory(
    mask: BooleanMask, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> torch.Tensor:
    import torch

    shape = (batch, heads, q_len, kv_len)
    made = mask.factory(batch, heads, q_len, kv_len, device)
    name = function_label(mask.factory)
    if not isinstance(made, torch.Tensor) or made.dtype != torch.bool:
        raise ValueError(f"BooleanMask: {name} must return a boolean tensor (True = visible), got {describe(made)}")
    try:
        return made.to(device).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"BooleanMask: {name} must return a tensor that broadcasts to {shape}, got {describe(made)}"
        ) from None


def interval(mask: Mask | None, row: int, q_len: int, kv_len: int) -> tuple[int, int] | None:
    """Return the first and one past the last key that query `row` sees, or None where these do not describe the mask."""
    if mask is None:
        return 0, kv_len
    if isinstance(mask, Causal | Window):
        left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
        top_left = isinstance(mask, Causal) and not mask.bottom_right
        position = row if top_left else row + kv_len - q_len
        start = 0 if left is None else max(0, position - left)
        end = kv_len if right is None else min(kv_len, position + right + 1)
        return min(start, kv_len), max(min(start, kv_len), end)
    if isinstance(mask, Document):
        start = 0
        for length in mask.lengths:
            if row < start + length:
                return start, row + 1 if mask.causal else start + length
            start += length
    return None


def visible_pairs(mask: Mask | None, q_len: int, kv_len: int) -> int:
    """Count the (query, key) pairs that `mask` leaves visible in one head; a mask given by a function counts as full."""
    if mask is None or isinstance(mask, BooleanMask | MaskModMask):
        return q_len * kv_len
    if isinstance(mask, Document):
        return sum(n * (n + 1) // 2 if mask.causal else n * n for n in mask.lengths)
    if isinstance(mask, Neighborhood):
        return _neighborhood_pairs(mask)
    total = 0
    for row in range(q_len):
        span = interval(mask, row, q_len, kv_len)
        assert span is not None
        total += span[1] - span[0]
    return total


def _neighborhood_pairs(mask: Neighborhood) -> int:
    total = 1
    for size, kernel, stride, dilation, causal in zip(mask.shape, *mask._triple, mask.causal, strict=True):  # type: ignore[arg-type]
        if not causal:
            total *= size * kernel
            continue
        pairs = 0
        for at in range(size):
            position, last = at // dilation, (size - 1 - at % dilation) // dilation
            leader = min(position // stride * stride + stride - 1, last)
            pairs += position - max(0, leader - kernel + 1) + 1
        total *= pairs
    return total


def as_tuple(field: str, values: object) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple; raise ValueError naming the field for anything else."""
    if not isinstance(values, list | tuple) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{field} must be a tuple of whole numbers, got {values!r}")
    return tuple(values)


def function_name(fn: object) -> str:
    """Name a callable as its author does: "f", "f[block=64]" for a partial, "Kernel.forward", "lambda"."""
    if isinstance(fn, functools.partial):
        given = [*map(str, filter(_is_plain, fn.args)), *(f"{k}={v}" for k, v in fn.keywords.items() if _is_plain(v))]
        return function_name(fn.func) + (f"[{','.join(given)}]" if given else "")
    name = str(getattr(fn, "__name__", type(fn).__name__)).replace("<lambda>", "lambda")
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return name
    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"


def function_label(fn: object) -> str:
    """Name a function for an id: the same in every process, different for different closures and lambdas."""
    written = function_name(fn)
    name, is_partial, _ = written.partition("[")
    code = getattr(fn, "__code__", None)
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    plain = [value for value in (*cells, *(getattr(fn, "__defaults__", None) or ())) if _is_plain(value)]
    if is_partial:
        plain = [written]
    if name == "lambda" or plain:
        where = (getattr(fn, "__module__", ""), getattr(code, "co_firstlineno", 0), plain)
        name += f"-{zlib.crc32(repr(where).encode()) & 0xFFFF:04x}"
    return name


def _is_plain(value: object) -> bool:
    """Whether a value is written the same in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def require_parameters(field: str, fn: Callable[..., object], names: tuple[str, ...]) -> None:
    """Raise ValueError unless `fn` can be called with as many positional arguments as there are names."""
    try:
        inspect.signature(fn).bind(*names)
    except TypeError:
        raise ValueError(
            f"Workload: {field} must be a function of ({', '.join(names)}), got {function_label(fn)}{inspect.signature(fn)}"
        ) from None
    except ValueError:  # a builtin without a signature: the call itself will tell
        return


def short_lengths(lengths: tuple[int, ...]) -> str:
    """Write lengths for an id: in full up to four, else their number and a checksum."""
    if len(lengths) <= 4:
        return ".".join(map(str, lengths))
    return f"{len(lengths)}x{zlib.crc32(repr(lengths).encode()) & 0xFFFF:04x}"


def describe(value: object) -> str:
    """Say what a value is, in the words of an error message."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return f"{type(value).__name__}"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(shape)}"
