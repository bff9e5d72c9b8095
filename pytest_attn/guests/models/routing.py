"""Experts that each token of a model goes to: noted in one run, and held in others where nothing but rounding decides it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: operators that a router can choose with
_CHOOSING = {_aten.topk.default, _aten.max.dim, _aten.argmax.default, _aten.sort.default, _aten.sort.stable}


class _Choice:
    """The choice of one router in the first run: scores (tokens, experts), and the chosen (tokens, experts per token)."""

    def __init__(self, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        self.scores, self.chosen = scores.clone(), chosen.clone()
        #: how far honest rounding moves a score at most, as far as was seen
        self.moved = 0.0


class Routing:
    """The choices of a model's routers, token by token.

    In the first run they are noted, in those of `measuring` held, so that the scores' own rounding is seen. After these a
    token keeps its experts where another choice is within `room` times that rounding of a tie. Any other choice stays: that is
    none of rounding's.
    """

    def __init__(self, tokens: int, room: float) -> None:
        self._room, self._choices = room, list[_Choice]()
        self.is_measuring = False
        #: which tokens would have gone to other experts by rounding
        self._near = torch.zeros(tokens, dtype=torch.bool)

    def __bool__(self) -> bool:
        return bool(self._choices)

    @property
    def note(self) -> str:
        """Say how many tokens were held, "" for none."""
        many = int(self._near.sum())
        return (
            f"{many} of {len(self._near)} tokens kept their experts, because only rounding decided between them"
            if many
            else ""
        )

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Note the choices of a run of all tokens."""

        def note(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            self._choices.append(_Choice(scores, chosen))
            return chosen

        with _Choosing(len(self._near), note):
            yield

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold every choice of the runs within, and see how far scores move."""
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False

    def held(self, places: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        """Hold the choices of one run. places: of each of its tokens, which one of the first run it is, -1 for none."""
        if not self:
            return contextlib.nullcontext()
        flat, waiting = places.flatten(), iter(self._choices)

        def hold(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            before = next(waiting, None)
            if before is None or (before.scores.shape[1], before.chosen.shape[1]) != (scores.shape[1], chosen.shape[1]):
                return chosen
            at = flat.to(scores.device)
            wanted, is_known = before.chosen[at.clamp(min=0)], at >= 0
            if self.is_measuring:
                moved = (scores - before.scores[at.clamp(min=0)]).abs()[is_known]
                before.moved = max(before.moved, float(moved.nan_to_num(0.0, 0.0, 0.0).amax() if len(moved) else 0.0))
            else:
                one, other = (scores.gather(1, those).sort(1).values for those in (chosen, wanted))
                gap = torch.where(one == other, 0.0, (one - other).abs()).amax(1)
                is_known = is_known & (gap <= self._room * before.moved)
                differs = (chosen.sort(1).values != wanted.sort(1).values).any(1) & is_known
                self._near[at[differs].cpu()] = True
            return torch.where(is_known[:, None], wanted, chosen)

        return _Choosing(len(flat), hold)


class _Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each choice among experts that is made for so many tokens to a function, which returns the choice that holds."""

    def __init__(self, tokens: int, decide: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self._decide = tokens, decide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _CHOOSING:
            return found
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        scores, dim = args[0], given.get("dim", None if func is _aten.argmax.default else -1)
        is_of_tokens = scores.dim() > 1 and scores.is_floating_point() and scores.shape[:-1].numel() == self._tokens
        if not is_of_tokens or dim not in (-1, scores.dim() - 1) or scores.shape[-1] < 2:
            return found
        indices = found if isinstance(found, torch.Tensor) else found[1]
        flat = scores.reshape(self._tokens, -1)
        held = self._decide(flat, indices.reshape(self._tokens, -1))
        if isinstance(found, torch.Tensor):
            return held.reshape(indices.shape)
        return flat.gather(1, held).reshape(indices.shape), held.reshape(indices.shape)
