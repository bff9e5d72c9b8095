"""Attention that no function shows: a softmax between the product that gives its scores and the product with values.

Followed tensor by tensor, so that a softmax that is something else is not taken for it: experts that are chosen, classes,
gates, a pool over rows. Its scores are a product of two activations, or have more dimensions than others do, as where a layer
computes them from the queries alone; and what it gives is multiplied with other activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_PRODUCTS = frozenset(["matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"])
_TIMES = frozenset(["mul", "__mul__", "__rmul__", "multiply"])
#: what gives something new, which is neither scores nor probabilities
_ENDS = frozenset(["linear", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm", "sum", "mean"])
_SOFTMAX = frozenset(["softmax", "_softmax", "special_softmax"])


class WrittenOut:
    """Is shown every operation, and calls `found` with the shape of the scores where one completes attention.

    note_softmax: is called at each softmax, whatever it is.
    """

    def __init__(self, found: Callable[[tuple[int, ...]], None], note_softmax: Callable[[], None]) -> None:
        self._found, self._note_softmax = found, note_softmax
        self._scores: Any = WeakTensorKeyDictionary()
        #: the shape of the scores that they are of
        self._probabilities: Any = WeakTensorKeyDictionary()
        #: whether the last scores of a shape were a product of two activations
        self._is_product: dict[tuple[int, ...], bool] = {}

    def see(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take note of one operation."""
        if function is torch.nn.functional.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                query, key, heads = args[0], args[1], args[4]
                self._found((*query.shape[1:-1], heads, query.shape[0], key.shape[0]))
            return
        name = getattr(function, "__name__", "").partition(".")[0]  # of an exported model's operators: "softmax.int"
        if name in _SOFTMAX:
            self._note_softmax()
            self._softmax(args, kwargs, result)
        elif name in _PRODUCTS or self._scores or self._probabilities:
            self._other(name, list(_tensors((*args, *kwargs.values()))), result)

    def _softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_over_keys = not scores.is_nested and dim in (-1, scores.dim() - 1) and scores.shape[-1] > 1
        is_product = scores in self._scores
        if is_over_keys and (scores.dim() > 3 or (scores.dim() == 3 and is_product)):
            self._probabilities[result] = tuple(scores.shape)
            self._is_product[tuple(scores.shape)] = is_product

    def _other(self, name: str, given: list[torch.Tensor], result: Any) -> None:
        of = next((self._probabilities[t] for t in given if t in self._probabilities), None)
        if name in _PRODUCTS:
            activations = [t for t in given if t.dim() > 2 and not isinstance(t, torch.nn.Parameter)]
            if of is not None and len(activations) > 1:
                if len(of) != 4 or self._is_product.get(of, False):  # else streams that are mixed, as by hyper-connections
                    self._found(of)
            elif of is None and len(activations) > 1:
                self._scores[result] = True
        elif of is not None and len(of) > 3 and name in _TIMES and any(t.numel() > _size(of) for t in given):
            self._found(of)
        elif name not in _ENDS or (isinstance(result, torch.Tensor) and result.numel() == _whole(of, given, self._scores)):
            is_scored = of is None and any(t in self._scores for t in given)
            for tensor in _tensors((result,)) if of is not None or is_scored else ():
                if of is not None:
                    self._probabilities[tensor] = of
                else:
                    self._scores[tensor] = True


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))


def _whole(of: tuple[int, ...] | None, given: list[torch.Tensor], scores: Any) -> int:
    """Return the size of probabilities or scores, of which a projection may mix the heads; 0 where there are none."""
    return _size(of) if of is not None else next((t.numel() for t in given if t in scores and t.dim() > 3), 0)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
