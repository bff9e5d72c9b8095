"""What a wrong tensor shows of its fault where no other attention explains it: zeros, and places where offsets wrap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.correctness.comparison import Suggestion

if TYPE_CHECKING:
    import torch

#: the least offset that counts as one that wraps
_LEAST = 1 << 15


def traces_of(got: torch.Tensor, bad: torch.Tensor, name: str, sampled: torch.Tensor | None) -> list[Suggestion]:
    """Return what the wrong rows (batch, heads, rows) of a tensor, heads-first, have in common."""
    if name == "lse":
        return []
    found = [] if bool(got[bad].any()) else [Suggestion("zeros there", {"tensor": name})]
    if sampled is None and got.dim() == 4 and (reach := _reach(got, bad)):
        found.append(Suggestion("beyond a power of two", {"tensor": name, "reach": reach, "bits": reach.bit_length() - 1}))
    return found


def _reach(got: torch.Tensor, bad: torch.Tensor) -> int:
    """Return the power of two, 2 ** 15 or more, from which offset on all rows are wrong and none before; else 0.

    Offsets are those of contiguous memory. Where a head or a batch entry begins there, that may be the reason as well.
    """
    _, _, rows, dim = got.shape
    wrong = bad.flatten().nonzero().flatten()
    if not len(wrong) or len(wrong) != bad.numel() - int(wrong[0]):
        return 0
    first = int(wrong[0])
    last = (first + 1) * dim - 1
    power = 1 << max(last.bit_length() - 1, 0)
    return power if power >= _LEAST and power >= first * dim and first % rows else 0
