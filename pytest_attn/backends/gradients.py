"""Gradients of what a kernel returns, taken as its graph allows."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor


class Gradients:
    """Takes gradients of one kernel's results; the first call decides how, so that a timed one need not look.

    Reentrant checkpointing refuses `autograd.grad`: it gets a backward pass, and the .grad of every leaf stays what it was.
    """

    def __init__(self) -> None:
        self._is_refused: bool | None = None
        self._reached: list[ref[Tensor]] | None = None  # leaves at which the first backward pass has arrived

    def __call__(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], arriving: Sequence[Tensor], retain_graph: bool = False
    ) -> Sequence[Tensor | None]:
        """Return the gradient of each leaf where `arriving` arrives at outputs, None where these do not depend on it."""
        if self._is_refused is None:
            self._is_refused = any(_refuses_grad(node) for out in outputs for node in nodes_behind(out))
        if not self._is_refused:
            return torch.autograd.grad(outputs, leaves, arriving, retain_graph=retain_graph, allow_unused=True)
        return self._by_backward(outputs, leaves, arriving, retain_graph)

    def _by_backward(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], arriving: Sequence[Tensor], retain_graph: bool
    ) -> list[Tensor | None]:
        kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        go_back = torch.autograd.backward

        def keep(reached: Iterable[Tensor]) -> None:
            for leaf in reached:
                if id(leaf) not in kept:
                    kept[id(leaf)] = leaf, leaf.grad
                    leaf.grad = None

        def go_back_and_keep(tensors: Any, *args: Any, **keywords: Any) -> None:
            several = tensors if isinstance(tensors, list | tuple) else (tensors,)
            nodes = (node for one in several for node in nodes_behind(one))
            keep(leaf for node in nodes if isinstance(leaf := getattr(node, "variable", None), Tensor))
            go_back(tensors, *args, **keywords)

        keep(leaves)
        try:
            if self._reached is None:  # what a checkpoint computes again is in no graph before
                torch.autograd.backward = go_back_and_keep
                go_back_and_keep(outputs, arriving, retain_graph)
                self._reached = [ref(leaf) for leaf, _ in kept.values()]
            else:
                keep(leaf for one in self._reached if (leaf := one()) is not None)
                go_back(outputs, arriving, retain_graph)
            return [leaf.grad for leaf in leaves]
        finally:
            torch.autograd.backward = go_back
            for leaf, gradient in kept.values():
                leaf.grad = gradient


def gradients_of(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], arriving: Sequence[Tensor], retain_graph: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients as `Gradients` does, of results that no earlier call tells about."""
    return Gradients()(outputs, leaves, arriving, retain_graph)


def _refuses_grad(node: Any) -> bool:
    """Return whether a Function goes back under `.backward()` only, as the checkpoints of torch, Megatron and TE do."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    code = getattr(backward and inspect.unwrap(backward), "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names


def nodes_behind(out: Tensor, ends: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of autograd's graph at which a backward pass from out arrives; nothing is followed behind `ends`."""
    ahead: list[Any] = [getattr(out, "grad_fn", None)]
    seen: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions] if node not in ends else []


def casts_weights(out: Tensor) -> bool:
    """Return whether autograd's graph of out shows P.to(dtype), of all keys or of a block of them: dP is rounded there.

    Such a cast is behind a product, which the last one of out is not, and it is not of an input.
    """
    last: set[Any] = set()
    node = getattr(out, "grad_fn", None)
    while node is not None:
        last.add(node)
        following = [one for one, _ in node.next_functions if one is not None]
        node = following[0] if len(following) == 1 else None
    for node in nodes_behind(out):
        if node.name() == "ToCopyBackward0" and node not in last and node._input_metadata[0].dtype == out.dtype:
            behind = node.next_functions[0][0]
            if behind is not None and behind.name() != "torch::autograd::AccumulateGrad":
                return True
    return False


def hides_casts(out: Tensor) -> bool:
    """Return whether autograd's graph of out leaves open what is cast.

    It is compiled, a checkpoint computes it again, or a node stands for another process, and says so by `hides_casts`.
    """
    return any(
        node.name() == "CompiledFunctionBackward" or _refuses_grad(node) or getattr(node, "hides_casts", False)
        for node in nodes_behind(out)
    )
