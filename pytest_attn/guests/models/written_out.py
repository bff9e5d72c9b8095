"""Attention that no function shows: a softmax between the product that gives its scores and the product with values.

Followed tensor by tensor, so that a softmax that is something else is not taken for it: experts that are chosen, classes,
gates, a pool over rows. Its scores are a product of two activations, or have more dimensions than others do, as where a layer
computes them from the queries alone; and what it gives is multiplied with other activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

ScoresShape = tuple[int, ...]


#: what operations do to scores and probabilities, by their names; others pass them on
_SOFTMAX = frozenset(["softmax", "_softmax", "special_softmax"])
_PRODUCT = frozenset(["matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"])
_TIMES = frozenset(["mul", "__mul__", "__rmul__", "multiply"])
#: give something new, which is neither, but where they only mix heads
_END = frozenset(["linear", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm", "sum", "mean"])


class WrittenOut:
    """Is shown every operation, and calls `found` with the shape of the scores where one completes attention.

    note_softmax: is called at each softmax, whatever it is.
    """

    def __init__(self, found: Callable[[ScoresShape], None], note_softmax: Callable[[], None]) -> None:
        self._found, self._note_softmax = found, note_softmax
        #: of probabilities the shape of the scores that they are of, None of scores
        self._known: Any = WeakTensorKeyDictionary()
        #: whether the last scores of a shape were a product of two activations
        self._is_product: dict[ScoresShape, bool] = {}

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
        elif name in _PRODUCT or self._known:
            self._follow(name, list(_tensors((*args, *kwargs.values()))), result)

    def _softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_over_keys = not scores.is_nested and dim in (-1, scores.dim() - 1) and scores.shape[-1] > 1
        is_product = self._known.get(scores, ()) is None
        if is_over_keys and (scores.dim() > 3 or (scores.dim() == 3 and is_product)):
            self._known[result] = tuple(scores.shape)
            self._is_product[tuple(scores.shape)] = is_product

    def _follow(self, name: str, given: list[torch.Tensor], result: Any) -> None:
        """See what an operation makes of the scores, or else of the probabilities, that it is given."""
        known = [t for t in given if t in self._known]
        activations = [t for t in given if t.dim() > 2 and not isinstance(t, torch.nn.Parameter)]
        for tensor in known:
            if (of := self._known[tensor]) is not None:
                self._weigh(name, of, given, len(activations) > 1, result)
                return
        if name in _PRODUCT:
            if len(activations) > 1:
                self._known[result] = None
        elif known and (name not in _END or _mixes_heads(next((t.shape for t in known if t.dim() > 3), ()), result)):
            self._keep(result, None)

    def _weigh(self, name: str, of: ScoresShape, given: list[torch.Tensor], is_of_activations: bool, result: Any) -> None:
        """See what an operation makes of probabilities. of: the shape of their scores."""
        if name in _PRODUCT:
            # others are streams that are mixed, as by hyper-connections
            if is_of_activations and (len(of) != 4 or self._is_product.get(of, False)):
                self._found(of)
        elif name in _TIMES and len(of) > 3 and any(t.numel() > math.prod(of) for t in given):
            self._found(of)
        elif name not in _END or _mixes_heads(of, result):
            self._keep(result, of)

    def _keep(self, result: Any, of: ScoresShape | None) -> None:
        for tensor in _tensors((result,)):
            self._known[tensor] = of


def _mixes_heads(of: ScoresShape, result: Any) -> bool:
    return bool(of) and isinstance(result, torch.Tensor) and result.numel() == math.prod(of)


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))
