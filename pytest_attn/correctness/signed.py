"""A user's callable with a signature of its own, as one that takes and returns what every judgment does.

This is the one place where a signature is undone: checks, invariants, timing and profiles call what is made here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_attn.backends.compiled import Compilation, compilation_of
from pytest_attn.backends.subject import AttentionFn, CallableSubject
from pytest_attn.correctness.contract import ContractError, check_tensor, native_shape
from pytest_attn.correctness.empty_rows import EmptyRows
from pytest_attn.correctness.poison import is_poison, poisoned
from pytest_attn.correctness.signature import IGNORED, Signature, turned
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SignedSubject(CallableSubject):
    """A user's callable whose test declares a signature."""

    def __init__(self, plain: CallableSubject, signature: Signature, empty_rows: str) -> None:
        """plain: the callable without the signature."""
        super().__init__(plain.user_function, plain.name, plain.layout, plain.precision, "lse" in signature.returns)
        self.given_name, self.signature, self._empty_rows = plain.given_name, signature, empty_rows

    @property
    def _identity(self) -> tuple[object, ...]:
        return *super()._identity, self.signature

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return the callable behind its signature."""
        return SignedKernel(self.user_function, self.signature, inputs, self._empty_rows)

    def prepare_timed(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return the callable with nothing of ours beside it but views: what is timed is the user's."""
        return TimedKernel(self.user_function, self.signature, inputs)


class TimedKernel:
    """A callable of (q, k, v) in `signature.inner_layout` that returns the out of a user's function, in that layout."""

    def __init__(self, fn: AttentionFn, signature: Signature, inputs: Inputs) -> None:
        self.fn, self.signature, self.inputs = fn, signature, inputs
        self._shapes = {name: declared_shape(name, signature, inputs) for name in signature.results}

    @property
    def _out_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.inputs.workload.out_dtype)
        return dtype

    @property
    def compilation(self) -> Compilation | None:
        """What compiling the user's function took."""
        return compilation_of(self.fn)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Call the function."""
        __tracebackhide__ = True
        out = q.new_empty(self._shapes["out"], dtype=self._out_dtype) if self.signature.takes_out else None
        result = self._called(q, k, v, out)
        if out is None:
            names = self.signature.returns
            out = result if len(names) == 1 else result[names.index("out")]
        return self.signature.undeclared("out", out, self.inputs.workload.is_packed)

    def _called(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Any:
        __tracebackhide__ = True
        signature, w = self.signature, self.inputs.workload
        q, k, v = signature.given(q, w), signature.given(k, w, is_kv=True), signature.given(v, w, is_kv=True)
        return self.fn(q, k, v) if out is None else self.fn(q, k, v, out=out)  # type: ignore[call-arg]


class SignedKernel(TimedKernel):
    """The same with all that is compared, in the order of `signature.results`; a tuple unless that is out alone.

    Raises ContractError, in the words of the signature, for results that cannot be compared.
    """

    def __init__(self, fn: AttentionFn, signature: Signature, inputs: Inputs, empty_rows: str) -> None:
        super().__init__(fn, signature, inputs)
        self._rows = EmptyRows(inputs, empty_rows) if signature.takes_out else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Call the function, and turn what it returns."""
        __tracebackhide__ = True
        signature = self.signature
        given = poisoned(self._shapes["out"], self._out_dtype, q.device) if signature.takes_out else None
        named = self._by_name(self._called(q, k, v, given), given)
        for name, tensor in named.items():
            check_tensor(name, tensor, self._shapes[name], self.inputs, f" ({said_of(name, signature, self.inputs)})")
        if given is not None:
            self._require_written(named["out"], given)
        results = [self._turned(name, named[name]) for name in signature.results]
        return results[0] if len(results) == 1 else tuple(results)

    def _by_name(self, result: object, given: Tensor | None) -> dict[str, Any]:
        """Return the results by their names."""
        names = self.signature.returns
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
            letters = str(self.signature.out_layout) if native != "thd" else native
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
        inner, users = self.signature.letters(name, is_packed)
        if name == "out" and inner != users and tensor.requires_grad:
            tensor.register_hook(lambda grad: _as_contiguous_as(turned(grad, users, inner), grad))  # type: ignore[no-untyped-call]
        return self.signature.undeclared(name, tensor, is_packed)


def as_out(out: object, signature: Signature, inputs: Inputs) -> Any:
    """Return what a test computed itself, in the layout of its signature, as the judgment takes it."""
    check_tensor("out", out, declared_shape("out", signature, inputs), inputs, f" ({said_of('out', signature, inputs)})")
    return signature.undeclared("out", out, inputs.workload.is_packed)  # type: ignore[arg-type] # it is a tensor now


def said_of(name: str, signature: Signature, inputs: Inputs) -> str:
    """Return the words of a signature that say how a result is laid out."""
    if name == "out":
        return "layout='thd'" if inputs.workload.is_packed else f"out_layout={signature.out_layout!r}"
    return f"layout={signature.layout!r}" if name in ("weights", "keep") else f"lse_layout={signature.lse_layout!r}"


def declared_shape(name: str, signature: Signature, inputs: Inputs) -> tuple[int, ...]:
    """Return the shape in which a signature returns a result."""
    w = inputs.workload
    _, users = signature.letters(name, w.is_packed)
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
