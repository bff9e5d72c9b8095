"""Attention that no function shows: a softmax between the product that gives its scores and the product with values.

Followed tensor by tensor, so that a softmax that is something else is not taken for it: experts that are chosen, classes,
gates, a pool over rows. Its scores are a product of two activations, or have more dimensions than others do, as where a layer
computes them from the queries alone; and what it gives is multiplied with other activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

ScoresShape = tuple[int, ...]


class Content(Enum):
    """Content of a tensor on the way to attention."""

    NOTHING = 0
    SCORES = 1
    PROBABILITIES = 2


class OperationKind(Enum):
    """Kinds of operations, by what they do to scores and probabilities. OTHER passes them on."""

    SOFTMAX = frozenset(["softmax", "_softmax", "special_softmax"])
    PRODUCT = frozenset(["matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"])
    TIMES = frozenset(["mul", "__mul__", "__rmul__", "multiply"])
    #: gives something new, which is neither, but where it only mixes heads
    END = frozenset(["linear", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm", "sum", "mean"])
    OTHER = frozenset(["other"])


class Operation(NamedTuple):
    """One operation. content: of what it is given; of: the shape of its scores, () where these have too few dimensions."""

    content: Content
    of: ScoresShape
    given: list[torch.Tensor]
    result: Any

    @property
    def multiplies_activations(self) -> bool:
        """True where two of its tensors are activations, not weights."""
        return len([t for t in self.given if t.dim() > 2 and not isinstance(t, torch.nn.Parameter)]) > 1


_KINDS = {name: kind for kind in OperationKind for name in kind.value}


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
        kind = _KINDS.get(name, OperationKind.OTHER)
        if kind is OperationKind.SOFTMAX:
            self._note_softmax()
            self._softmax(args, kwargs, result)
        elif kind is OperationKind.PRODUCT or self._known:
            given = list(_tensors((*args, *kwargs.values())))
            operation = Operation(*self._content_of(given), given, result)
            if step := _STEPS.get((operation.content, kind)):
                step(self, operation)

    def _softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_over_keys = not scores.is_nested and dim in (-1, scores.dim() - 1) and scores.shape[-1] > 1
        is_product = self._known.get(scores, ()) is None
        if is_over_keys and (scores.dim() > 3 or (scores.dim() == 3 and is_product)):
            self._known[result] = tuple(scores.shape)
            self._is_product[tuple(scores.shape)] = is_product

    def _content_of(self, given: list[torch.Tensor]) -> tuple[Content, ScoresShape]:
        known = [t for t in given if t in self._known]
        for tensor in known:
            if (of := self._known[tensor]) is not None:
                return Content.PROBABILITIES, of
        return (Content.SCORES if known else Content.NOTHING), next((tuple(t.shape) for t in known if t.dim() > 3), ())

    # -- what an operation does to a content ------------------------------------------------------------------------------

    def _begin(self, operation: Operation) -> None:
        if operation.multiplies_activations:
            self._known[operation.result] = None

    def _multiply(self, operation: Operation) -> None:
        # others are streams that are mixed, as by hyper-connections
        is_attention = len(operation.of) != 4 or self._is_product.get(operation.of, False)
        if is_attention and operation.multiplies_activations:
            self._found(operation.of)

    def _weigh(self, operation: Operation) -> None:
        if len(operation.of) > 3 and any(t.numel() > math.prod(operation.of) for t in operation.given):
            self._found(operation.of)
        else:
            self._keep(operation)

    def _keep(self, operation: Operation) -> None:
        for tensor in _tensors((operation.result,)):
            self._known[tensor] = operation.of if operation.content is Content.PROBABILITIES else None

    def _mix(self, operation: Operation) -> None:
        if operation.of and isinstance(operation.result, torch.Tensor) and operation.result.numel() == math.prod(operation.of):
            self._keep(operation)  # a projection may mix the heads


#: what an operation does, by the content of what it is given; nothing where it has no row
_STEPS: Mapping[tuple[Content, OperationKind], Callable[[WrittenOut, Operation], None]] = {
    (Content.NOTHING, OperationKind.PRODUCT): WrittenOut._begin,
    (Content.SCORES, OperationKind.PRODUCT): WrittenOut._begin,
    (Content.SCORES, OperationKind.TIMES): WrittenOut._keep,
    (Content.SCORES, OperationKind.END): WrittenOut._mix,
    (Content.SCORES, OperationKind.OTHER): WrittenOut._keep,
    (Content.PROBABILITIES, OperationKind.PRODUCT): WrittenOut._multiply,
    (Content.PROBABILITIES, OperationKind.TIMES): WrittenOut._weigh,
    (Content.PROBABILITIES, OperationKind.END): WrittenOut._mix,
    (Content.PROBABILITIES, OperationKind.OTHER): WrittenOut._keep,
}


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))
