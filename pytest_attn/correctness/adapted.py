"""A user's callable as it is declared, adapted to what every judgment takes and returns.

Checks, invariants, timing and profiles call what is made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_attn.backends.declaration import IGNORED, Declaration, turned
from pytest_attn.backends.subject import AttentionFn, CallableSubject
from pytest_attn.backends.variants import Compilation, compilation_of
from pytest_attn.correctness.contract import ContractError, EmptyRows, check_tensor, is_poison, native_shape, poisoned
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs


class AdaptedCallable(CallableSubject):
    """A user's callable that takes or returns something else than every judgment does, and so declares it."""

    def __init__(self, plain: CallableSubject) -> None:
        """plain: the callable as it is."""
        super().__init__(plain.user_function, plain.name, plain.declared)
        self.given_name, self._dequantizer, self.is_approximate = plain.given_name, plain._dequantizer, plain.is_approximate

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return the callable, adapted."""
        return AdaptedKernel(self.user_function, self.declared, inputs)

    def prepare_timed(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return the callable with nothing of ours beside it but views: what is timed is the user's."""
        return TimedKernel(self.user_function, self.declared, inputs)


class TimedKernel:
    """A callable of (q, k, v) in its `inner_layout` that returns the out of a user's function, in that layout."""

    def __init__(self, fn: AttentionFn, declared: Declaration, inputs: Inputs) -> None:
        self.fn, self.declared, self.inputs = fn, declared, inputs
        self._shapes = {name: declared_shape(name, declared, inputs) for name in declared.results}

    @property
    def _out_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.inputs.workload.out_dtype)
        return dtype

    @property
    def compilation(self) -> Compilation | None:
        """What compiling the user's function took."""
        return compilation_of(self.fn)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Call the function."""
        __tracebackhide__ = True
        out = q.new_empty(self._shapes["out"], dtype=self._out_dtype) if self.declared.takes_out else None
        result = self._called(q, k, v, out)
        if out is None:
            names = self.declared.names
            out = result if len(names) == 1 else result[names.index("out")]
        return self.declared.undeclared("out", out, self.inputs.workload.is_packed)

    def _called(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Any:
        __tracebackhide__ = True
        declared, w = self.declared, self.inputs.workload
        q, k, v = declared.given(q, w), declared.given(k, w, is_kv=True), declared.given(v, w, is_kv=True)
        return self.fn(q, k, v) if out is None else self.fn(q, k, v, out=out)  # type: ignore[call-arg]


class AdaptedKernel(TimedKernel):
    """The same with all that is compared, in the order of its results; a tuple unless that is out alone.

    Raises ContractError, in the words of the declaration, for results that cannot be compared.
    """

    def __init__(self, fn: AttentionFn, declared: Declaration, inputs: Inputs) -> None:
        super().__init__(fn, declared, inputs)
        self._rows = EmptyRows(inputs, declared.empty_rows) if declared.takes_out else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Call the function, and turn what it returns."""
        __tracebackhide__ = True
        declared = self.declared
        given = poisoned(self._shapes["out"], self._out_dtype, q.device) if declared.takes_out else None
        named = self._by_name(self._called(q, k, v, given), given)
        for name, tensor in named.items():
            words = declared.words_on(name, self.inputs.workload.is_packed)
            check_tensor(name, tensor, self._shapes[name], self.inputs, f" ({words})")
        if given is not None:
            self._require_written(named["out"], given)
        results = [self._turned(name, named[name]) for name in declared.results]
        return results[0] if len(results) == 1 else tuple(results)

    def _by_name(self, result: object, given: Tensor | None) -> dict[str, Any]:
        """Return the results by their names."""
        names = self.declared.names
        if given is not None and (result is None or "out" not in names):
            if result is None and set(names) - {"out", IGNORED}:
                raise ContractError(f"the callable returned nothing (None); expected {_words(names)}")
            rest = names if "out" not in names else ()
            return {"out": given, **(_split(result, rest) if rest else {})}
        return _split(result, names)

    def _require_written(self, out: Tensor, given: Tensor) -> None:
        """Raise ContractError where a callable returns another tensor than out=, or does not write all of it."""
        unwritten = is_poison(given.detach())
        if self._rows is not None:  # rows without keys may belong to the caller
            native = "thd" if self.inputs.workload.is_packed else "bhsd"
            _, letters = self.declared.letters("out", self.inputs.workload.is_packed)
            unwritten = turned(self._rows.blanked(turned(unwritten, letters, native)), native, letters)
        count = int(unwritten.sum())
        part = f"{count:,} of {unwritten.numel():,} elements"
        if out.data_ptr() != given.data_ptr() or out.stride() != given.stride():
            left = "wrote all of out=, too" if not count else f"left {part} of out= unwritten"
            raise ContractError(f"the callable returned another tensor than the out= that it was given (it {left})")
        if count:
            first = unwritten.nonzero()[0].tolist()
            raise ContractError(f"the callable left {part} of the out= that it was given unwritten, the first at {first}")

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        is_packed = self.inputs.workload.is_packed
        inner, users = self.declared.letters(name, is_packed)
        if name == "out" and inner != users and tensor.requires_grad:
            tensor.register_hook(lambda grad: _as_contiguous_as(turned(grad, users, inner), grad))  # type: ignore[no-untyped-call]
        return self.declared.undeclared(name, tensor, is_packed)


def as_out(out: object, declared: Declaration, inputs: Inputs) -> Any:
    """Return what a test computed itself, in the layout that it declares, as the judgment takes it."""
    is_packed = inputs.workload.is_packed
    words = declared.words_on("out", is_packed)
    check_tensor("out", out, declared_shape("out", declared, inputs), inputs, f" ({words})")
    return declared.undeclared("out", out, is_packed)  # type: ignore[arg-type] # it is a tensor now


def declared_shape(name: str, declared: Declaration, inputs: Inputs) -> tuple[int, ...]:
    """Return the shape in which a callable returns a result."""
    w = inputs.workload
    _, users = declared.letters(name, w.is_packed)
    of_rows, of_out = ("hs", "thd") if w.is_packed else ("bhs", "bhsd")
    native = {"out": of_out, "weights": "bhsk", "keep": "bhsk"}.get(name, of_rows)
    sizes = dict(zip(native, native_shape(name, w), strict=True))
    return tuple(sizes[dim] for dim in users)


def _split(result: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the results that are compared by their names; raise ContractError for another number of results."""
    if len(names) == 1:
        if isinstance(result, tuple | list) or result is None:
            raise ContractError(f"the callable returned {_counted(result)}; expected {_words(names)}")
        return {names[0]: result} if names[0] != IGNORED else {}
    if not (isinstance(result, tuple | list) and len(result) == len(names)):
        raise ContractError(f"the callable returned {_counted(result)}; expected {_words(names)}, as returns={names!r} says")
    return {name: tensor for name, tensor in zip(names, result, strict=True) if name != IGNORED}


def _words(names: tuple[str, ...]) -> str:
    return f"a tensor {names[0]}" if len(names) == 1 else f"a tuple ({', '.join(names)})"


def _counted(result: object) -> str:
    if result is None:
        return "nothing (None)"
    return f"a {type(result).__name__} of {len(result)}" if isinstance(result, tuple | list) else describe(result)


def _as_contiguous_as(other: Tensor, grad: Tensor) -> Tensor:
    """Return dout as contiguous in the callable's layout as the judgment has handed it over in its own."""
    return grad.contiguous() if other.is_contiguous() else grad
