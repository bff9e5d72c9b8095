"""Tolerances at work: which line asked with which tolerance, and how much of it the values used."""

from __future__ import annotations

import ast
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

try:
    import numpy as np
except ImportError:  # torch runs without it
    np = None  # type: ignore[assignment]

#: arguments of what compares values, but for these
_OPTIONS = {
    "rtol",
    "atol",
    "equal_nan",
    "msg",
    "err_msg",
    "verbose",
    "check_dtype",
    "check_device",
    "check_stride",
    "check_layout",
}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PACKAGE = str(Path(__file__).parents[2])


def _comparing() -> Iterator[tuple[Any, str, tuple[float, float] | None]]:
    """Yield what compares with a tolerance, where it is held, and its rtol and atol; None where these depend on the dtype."""
    yield torch.testing, "assert_close", None
    yield from ((owner, "allclose", (1e-5, 1e-8)) for owner in (torch, torch.Tensor))
    if np is not None:
        yield from ((np, "allclose", (1e-5, 1e-8)), (np.testing, "assert_allclose", (1e-7, 0.0)))


class Line(NamedTuple):
    """One line that asks with a tolerance. rtol, atol: None of an assertion, whose bound is in its text."""

    place: str
    text: str
    rtol: float | None = None
    atol: float | None = None

    def left_at(self, share: float) -> str:
        """Say what a share of the tolerance is."""
        both = [f"{name}={value * share:.2g}" for name, value in (("rtol", self.rtol), ("atol", self.atol)) if value]
        return ", ".join(both) or f"{share:.2g} of its bound"


class Tolerances:
    """Reads tolerances while it is spread. used: by line, the largest share of its tolerance since that was last emptied."""

    def __init__(self, root: Path) -> None:
        self.test_file = Path()
        self.used: dict[Line, float] = {}
        self._root, self._is_inside = root, False

    @contextmanager
    def spread(self) -> Iterator[None]:
        """Wrap what compares with a tolerance, for who imports it from now on."""
        with ExitStack() as stack:
            for owner, name, defaults in _comparing():
                stack.enter_context(patch.object(owner, name, self._wrapped(getattr(owner, name), defaults)))
            yield

    def _wrapped(self, original: Callable[..., Any], defaults: tuple[float, float] | None) -> Callable[..., Any]:
        @functools.wraps(original)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                values = [*args[:2], *(value for name, value in kwargs.items() if name not in _OPTIONS)]
                given = {**dict(zip(("rtol", "atol"), args[2:4] if defaults else (), strict=False)), **kwargs}
                for actual, expected in _pairs(*values[:2]):
                    both = defaults or torch.testing._comparison.default_tolerances(actual, expected)
                    rtol, atol = (
                        float(default if given.get(name) is None else given[name])
                        for name, default in zip(("rtol", "atol"), both, strict=True)
                    )
                    text = f"{original.__name__}(rtol={rtol:g}, atol={atol:g})"
                    self._note(Line(self._place(), text, rtol, atol), _share(actual, expected, rtol, atol))
                return original(*args, **kwargs)
            finally:
                self._is_inside = False

        return compared

    def see_assertion(self, text: str, explanation: str) -> None:
        """Read an assertion that held, as "0.2 <= (2 * 0.3)"; one that does not bound a number is left out."""
        try:
            share = _share_of_bound(ast.parse(explanation.partition("\n")[0], mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
            return
        self._note(Line(self._place(), f"assert {' '.join(text.split())}"), share)

    def _note(self, line: Line, share: float) -> None:
        self.used[line] = max(self.used.get(line, 0.0), share)

    def _place(self) -> str:
        """Return file:line of who asks: in the file of the test where it is on the way, else the nearest of the repository."""
        frame, places = sys._getframe(1), list[tuple[Path, int]]()
        while frame.f_back is not None:
            frame = frame.f_back
            name = frame.f_code.co_filename
            if not (name.startswith(("<", _PACKAGE)) or "site-packages" in name):
                places.append((Path(name), frame.f_lineno))
        path, number = next((one for one in places if one[0] == self.test_file), places[0])
        return f"{path.relative_to(self._root) if path.is_relative_to(self._root) else path}:{number}"


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors that are compared, of sequences those within; none of what holds no numbers."""
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        for one, other in zip(actual, expected, strict=False):
            yield from _pairs(one, other)
        return
    try:
        yield torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
    except (TypeError, ValueError, RuntimeError):
        return


def _share(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> float:
    """Return the largest share of atol + rtol |expected| that a difference is, infinite where a NaN or infinity differs."""
    a, b = actual.cpu().double(), expected.cpu().double()
    try:
        distance = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    except RuntimeError:  # shapes that do not fit
        return math.inf
    share = torch.where(distance == 0, 0.0, distance / (atol + rtol * b.abs()))
    return float(share.nan_to_num(nan=math.inf).max()) if share.numel() else 0.0


def _share_of_bound(shown: ast.expr) -> float:
    """Return which share of its bound a number used, that of a cosine counted from 1. Raises ValueError for none."""
    match shown:
        case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()], comparators=[right]):
            number, bound = _number(left), _number(right)
        case ast.Compare(left=left, ops=[ast.Gt() | ast.GtE()], comparators=[right]) if 0.5 < _number(right) < 1:
            number, bound = 1 - _number(left), 1 - _number(right)
        case _:
            raise ValueError("no bound")
    return max(number, 0.0) / bound


def _number(node: ast.expr) -> float:
    """Evaluate arithmetic of numbers, and one that a type is called with, as tensor(0.1). Raises ValueError for else."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
        case ast.Call(args=[argument, *_]):
            return _number(argument)
    raise ValueError("no number")
