"""Contract of a callable: type, shape, dtype, device, all of it written, and turned as its declaration says."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_attn.backends.declaration import IGNORED, Declaration, turned
from pytest_attn.backends.dense import index_tensors
from pytest_attn.backends.subject import AttentionFn, CallableSubject, Compilation, compilation_of
from pytest_attn.correctness.reference import Reference, compute_reference, own_dims
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod, Sequences
from pytest_attn.workloads.workload import Workload, sequence_lengths

# -- poison ------------------------------------------------------------------------------------------------------------


#: bits of quiet NaNs, by dtype
_BITS = {name: one.poison for name, one in DTYPES.items() if one.poison is not None}


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor full of NaN, of the largest number of an integer dtype, or of True."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    bits = _BITS.get(_name(dtype))
    if bits is not None:
        tensor.view(_whole(tensor)).fill_(bits)
    elif dtype.is_floating_point or dtype.is_complex:
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
    return tensor


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor of a workload's dtype still holds what `poisoned` put there."""
    poison: torch.Tensor = tensor.view(_whole(tensor)) == _BITS[_name(tensor.dtype)]
    return poison


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(tensor: torch.Tensor) -> torch.dtype:
    """Return the integer dtype of as many bytes per element."""
    return torch.int16 if tensor.element_size() == 2 else torch.int32


# -- rows that see no key ----------------------------------------------------------------------------------------------


#: (query, key) pairs that are looked at together
_PAIRS = 1 << 26
_EXACT = {"out": 0.0, "lse": -math.inf, "dq": 0.0, "weights": 0.0, "max": -math.inf}


class EmptyRows:
    """The rows of some inputs that see no key and belong to the caller: neither what they hold nor their dout counts.

    empty_rows: "zero", where all rows count; "finite", where such a row holds finite numbers; "any".
    """

    def __init__(self, inputs: Inputs, empty_rows: str) -> None:
        self._accepted = empty_rows
        self._rows = None if empty_rows == "zero" or inputs.workload.sinks else rows_without_keys(inputs)
        if self._rows is not None and not bool(self._rows.any()):
            self._rows = None

    @property
    def rows(self) -> Tensor | None:
        """Mask of these rows, (batch, heads, q_len), packed (heads, all rows); None where there is none."""
        return self._rows

    @property
    def are_there(self) -> bool:
        """True where there are such rows."""
        return self._rows is not None

    def blanked(self, tensor: Tensor) -> Tensor:
        """Return out, dq or dout, in native layout, with 0 in these rows: no loss depends on them, so their dout is 0."""
        return tensor if self._rows is None else tensor.masked_fill(self._of(tensor), 0)

    def forget(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the exact values in these rows of out, lse and dq, in native layout, where the kernel may leave others there.

        It is done in place: results are watched for later changes.
        """
        if self._rows is not None:
            for name in _EXACT.keys() & results.keys():
                results[name] = self._forgotten(name, results[name])
        return results

    def _forgotten(self, name: str, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        accepted = self._of(own)
        if self._accepted == "finite":
            accepted = accepted & (~own.isnan() if name in ("lse", "max") else own.isfinite())
        if 0 in own.stride():  # elements that share memory cannot be written one by one
            return own.masked_fill(accepted, _EXACT[name])
        return own.masked_fill_(accepted, _EXACT[name])

    def forget_some(self, name: str, some: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return some rows of a result with the exact values in these. of: cuts the same rows of `rows`."""
        if self._rows is None or name not in _EXACT:
            return some
        accepted = of(self._rows)
        return some.masked_fill(accepted if some.dim() == accepted.dim() else accepted.unsqueeze(-1), _EXACT[name])

    def _of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor: (batch, heads, rows, 1), packed (rows, heads, 1), of lse without the last."""
        assert self._rows is not None
        is_lse = tensor.dim() == self._rows.dim()
        if self._rows.dim() == 2:  # packed
            return self._rows if is_lse else self._rows.transpose(0, 1).unsqueeze(-1)
        return self._rows if is_lse else self._rows.unsqueeze(-1)


def rows_without_keys(inputs: Inputs, among: MaskMod | None = None) -> Tensor:
    """Return True where a row sees no key: (batch, heads, q_len), packed (heads, all rows). among: which keys count."""
    w, device = inputs.workload, inputs.device
    if not w.is_packed:
        return _rows_without_keys((inputs.mask_mod(), among), (w.batch, w.heads, w.q_len, w.kv_len), device)
    parts = []
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        mask_mod = w.plain_mask.bind(Sequences(1, w.heads, q_len, kv_len, device)) if w.plain_mask else None
        parts.append(_rows_without_keys((mask_mod, among), (1, w.heads, q_len, kv_len), device, batch)[0])
    return torch.cat(parts, -1)


def _rows_without_keys(
    masks: Iterable[MaskMod | None], sizes: tuple[int, int, int, int], device: torch.device, first_batch: int = 0
) -> Tensor:
    """Return True where a row of (batch, heads, q_len) sees none of kv_len keys. first_batch: the first entry's."""
    batch, heads, q_len, kv_len = sizes
    empty = torch.full(sizes[:3], kv_len == 0, device=device)
    given = [mask_mod for mask_mod in masks if mask_mod is not None]
    if not given or kv_len == 0:
        return empty
    b, h, rows, keys = (torch.arange(size, device=device) for size in sizes)
    step = max(1, _PAIRS // (batch * heads * kv_len))
    for start in range(0, q_len, step):
        some = rows[None, None, start : start + step, None]
        index = b[:, None, None, None] + first_batch, h[None, :, None, None], some, keys[None, None, None]
        seen = functools.reduce(torch.logical_and, (mask_mod(*index) for mask_mod in given))
        empty[:, :, start : start + step] = ~seen.any(-1)
    return empty


# -- the contract ------------------------------------------------------------------------------------------------------


class ContractError(AssertionError):
    """A callable broke its contract: type, shape, dtype or device of a result, changed inputs, or replaced functions.

    where: the kernel, the workload and the inputs, "" where nobody said yet. fault: its identity, "" where it has none.
    """

    def __init__(self, words: str, where: str = "", fault: str = "") -> None:
        super().__init__(words)
        self.where, self.fault = where, fault


def check_contract(
    result: object, names: tuple[str, ...], reference: Reference, workload: Workload, layout: str = "bhsd"
) -> list[Any]:
    """Return the tensors of a callable's result, still in its layout; raise ContractError naming what is off.

    `names` begins with "out", "lse".
    """
    advice = ". Say returns_lse=True in the marker if it returns (out, lse), else return its first element"
    tensors = _results_named(result, names, *(("", "") if result is None else (advice, " (returns_lse=True)")))
    for number, name in enumerate(names):
        shape = native_shape(name, workload)
        if layout == "bshd" and name == "out":
            shape = (shape[0], shape[2], shape[1], *shape[3:])
        tensor = tensors[number] = plain(name, tensors[number])
        check_tensor(name, tensor, shape, reference.inputs, _layout_hint(tensor, shape, layout))
    return tensors


def _results_named(result: object, names: tuple[str, ...], if_one: str, if_several: str) -> list[Any]:
    """Return what a callable returned under each name; raise ContractError for another number of results.

    if_one, if_several: what is said behind that, where one result was expected, or several.
    """
    several = elements(result)
    if len(names) == 1 and several is None and result is not None:
        return [result]
    if len(names) > 1 and several is not None and len(several) == len(names):
        return several
    advice = if_one if len(names) == 1 else if_several
    raise ContractError(f"the callable returned {_counted(result)}; expected {_words(names)}{advice}")


def check_tensor(name: str, tensor: Any, shape: tuple[int, ...], inputs: Inputs, hint: str = "") -> None:
    """Raise ContractError unless a result is a dense tensor of this shape, and of the dtype and device that it should have.

    tensor: as `plain` returns it. hint: what is said behind another shape.
    """
    if not _is_tensor(tensor):
        kind = f"a {type(tensor).__module__}.{type(tensor).__name__}" if hasattr(tensor, "shape") else describe(tensor)
        raise ContractError(f"{name} is {kind}; expected a torch.Tensor")
    require_dense(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ContractError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}{hint}")
    own, wide = getattr(torch, inputs.workload.out_dtype), (torch.float32, torch.float64)
    dtypes = {"out": (own,), "weights": (own, *wide), "keep": (torch.bool,)}.get(name, wide)
    if tensor.dtype not in dtypes:
        raise ContractError(f"{name} has dtype {tensor.dtype}; expected {dtypes[0]}")
    if tensor.device != inputs.q.device:
        raise ContractError(f"{name} is on {tensor.device}; expected {inputs.q.device}")


def require_dense(name: str, tensor: Tensor) -> None:
    """Raise ContractError for a tensor that is sparse or nested, naming its layout."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ContractError(f"{name} is a {kind} tensor; expected a dense one, say .to_dense()")


def elements(result: object) -> list[Any] | None:
    """Return what a tuple or list holds, read by their own code and not by that of a subclass; None for anything else."""
    for kind in (tuple, list):
        if issubclass(type(result), kind):
            return list(kind.__iter__(result))  # type: ignore[arg-type]
    return None


def plain(name: str, tensor: Any) -> Any:
    """Return a tensor that only torch's own code reads; anything else is returned as it is.

    What torch itself puts around a tensor is taken off: of a DTensor it is the local part, and a collective is waited for.
    Raises ContractError for other subclasses, and for attributes in the place of torch's methods.
    """
    if (kind := type(tensor)) in _PLAIN:
        own = [key for key in vars(tensor) if callable(getattr(torch.Tensor, key, None))]
        if own:
            found = f"has attributes of its own in place of torch.Tensor's ({', '.join(own)})"
            raise ContractError(f"{name} {found}; return a tensor without them")
    elif kind is _known("torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        plain(name, tensor.elem)
        return plain(name, kind.wait(tensor))
    elif kind is _known("torch.distributed.tensor", "DTensor"):
        plain(name, tensor._local_tensor)
        is_partial = any(one.is_partial() for one in tensor.placements)
        return plain(name, kind.full_tensor(tensor) if is_partial else kind.to_local(tensor))
    elif _is_tensor(tensor):
        found = f"is of type {kind.__name__}, a subclass of torch.Tensor, whose own code would run wherever it is read"
        raise ContractError(f"{name} {found}; return a plain tensor: {name}.as_subclass(torch.Tensor)")
    return tensor


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _known(module: str, name: str) -> Any:
    """Return a class of torch, None where nobody has imported its module."""
    return getattr(sys.modules.get(module), name, None)


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), torch.Tensor)  # isinstance asks the value itself


def native_shape(name: str, w: Workload) -> tuple[int, ...]:
    """Return the shape of a tensor in the workload's native layout ("bhsd", or "thd" where packed)."""
    is_of_keys = name in ("k", "v", "dk", "dv")
    heads, own = w.kv_heads if is_of_keys else w.heads, own_dims(name, w, w.kv_len)
    if w.q_lens is not None and w.kv_lens is not None:
        total = sum(w.kv_lens if is_of_keys else w.q_lens)
        return (total, heads, *own) if own else (heads, total)
    return (w.batch, heads, w.kv_len if is_of_keys else w.q_len, *own)


def _layout_hint(tensor: Any, shape: tuple[int, ...], layout: str) -> str:
    if not _is_tensor(tensor) or tensor.is_nested or tensor.ndim != 4 or len(shape) != 4:
        return ""
    if tuple(tensor.transpose(1, 2).shape) == shape:
        other = "bshd" if layout == "bhsd" else "bhsd"
        return f" (heads and rows are swapped: does it return layout {other!r}? say layout={other!r} in the marker)"
    return ""


class AdaptedCallable(CallableSubject):
    """A user's callable that takes or returns something else than every judgment does, and so declares it."""

    def __init__(self, plain: CallableSubject) -> None:
        """plain: the callable as it is."""
        super().__init__(plain.user_function, plain.name, plain.declared)
        self.given_name, self._dequantizer, self.is_approximate = plain.given_name, plain._dequantizer, plain.is_approximate

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        return AdaptedKernel(self.function_on(inputs), self.declared, inputs)

    def prepare_timed(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Return the callable with nothing of ours beside it but views: what is timed is the user's."""
        return TimedKernel(self.function_on(inputs), self.declared, inputs)


class TimedKernel:
    """A callable of (q, k, v) in its `inner_layout` that returns the out of a user's function, in that layout.

    Of several results, it returns those that can be looked at, beside out as the function returns them.
    """

    def __init__(self, fn: AttentionFn, declared: Declaration, inputs: Inputs) -> None:
        self.fn, self.declared, self.inputs = fn, declared, inputs
        self._shapes = {name: declared_shape(name, declared, inputs) for name in declared.results}

    @property
    def _out_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.inputs.workload.out_dtype)
        return dtype

    @property
    def compilation(self) -> Compilation | None:
        """Figures of compiling the user's function."""
        return compilation_of(self.fn)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Call the function."""
        __tracebackhide__ = True
        out = q.new_empty(self._shapes["out"], dtype=self._out_dtype) if self.declared.takes_out else None
        result = self._called(q, k, v, out)
        timed = self.declared.timed_results
        if timed != ("out",):
            named = self._by_name(result, out)
            out, others = named["out"], [named[name] for name in timed[1:]]
        elif out is None:
            names = self.declared.names
            out = result if len(names) == 1 else (elements(result) or ())[names.index("out")]
        out = self.declared.undeclared("out", out, self.inputs.workload.is_packed)
        return out if timed == ("out",) else (out, *others)

    def _called(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Any:
        __tracebackhide__ = True
        declared, w = self.declared, self.inputs.workload
        q, k, v = declared.given(q, w), declared.given(k, w, is_kv=True), declared.given(v, w, is_kv=True)
        return self.fn(q, k, v) if out is None else self.fn(q, k, v, out=out)  # type: ignore[call-arg]

    def _by_name(self, result: object, given: Tensor | None) -> dict[str, Any]:
        """Return the results by their names."""
        names = self.declared.names
        if given is not None and (result is None or "out" not in names):
            if result is None and set(names) - {"out", IGNORED}:
                raise ContractError(f"the callable returned nothing (None); expected {_words(names)}")
            rest = names if "out" not in names else ()
            return {"out": given, **(_split(result, rest) if rest else {})}
        return _split(result, names)


class AdaptedKernel(TimedKernel):
    """The same with all that is compared, in the order of its results; a tuple unless that is out alone.

    Raises ContractError, in the words of the declaration, for results that cannot be compared.
    """

    def __init__(self, fn: AttentionFn, declared: Declaration, inputs: Inputs) -> None:
        super().__init__(fn, declared, inputs)
        self._rows = EmptyRows(inputs, declared.empty_rows) if declared.takes_out else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        __tracebackhide__ = True
        declared = self.declared
        given = poisoned(self._shapes["out"], self._out_dtype, q.device) if declared.takes_out else None
        named = self._by_name(self._called(q, k, v, given), given)
        for name, returned in named.items():
            words = declared.words_on(name, self.inputs.workload.is_packed)
            tensor = named[name] = plain(name, returned)
            check_tensor(name, tensor, self._shapes[name], self.inputs, f" ({words})")
        if given is not None:
            self._require_written(named["out"], given)
        results = [self._turned(name, named[name]) for name in declared.results]
        return results[0] if len(results) == 1 else tuple(results)

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
            raise ContractError(f"the callable returned a tensor other than the out= that it was given (it {left})")
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
    words, tensor = declared.words_on("out", is_packed), plain("out", out)
    check_tensor("out", tensor, declared_shape("out", declared, inputs), inputs, f" ({words})")
    return declared.undeclared("out", tensor, is_packed)


def declared_shape(name: str, declared: Declaration, inputs: Inputs) -> tuple[int, ...]:
    """Return the shape in which a callable returns a result."""
    w = inputs.workload
    _, users = declared.letters(name, w.is_packed)
    of_rows, of_out = ("hs", "thd") if w.is_packed else ("bhs", "bhsd")
    native = {"out": of_out, "weights": "bhsk", "keep": "bhsk"}.get(name, of_rows)
    sizes = {"b": 1, **dict(zip(native, native_shape(name, w), strict=True))}
    return tuple(sizes[dim] for dim in users)


def _split(result: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the results that are compared by their names; raise ContractError for another number of results."""
    several = _results_named(result, names, "", f", as returns={names!r} says")
    return {name: tensor for name, tensor in zip(names, several, strict=True) if name != IGNORED}


def _words(names: tuple[str, ...]) -> str:
    return f"a tensor {names[0]}" if len(names) == 1 else f"a tuple ({', '.join(names)})"


def _counted(result: object) -> str:
    if result is None:
        return "nothing (None)"
    several = elements(result)
    return describe(result) if several is None else f"a {type(result).__name__} of {len(several)}"


def _as_contiguous_as(other: Tensor, grad: Tensor) -> Tensor:
    """Return dout as contiguous in the callable's layout as the judgment has handed it over in its own."""
    return grad.contiguous() if other.is_contiguous() else grad


#: The chance that a fair mask is refused is below this. Of n coins, a rate whose Kullback-Leibler divergence from the declared
#: one is d has a chance of at most 2 exp(-n d) (Chernoff's bound; Hoeffding 1963, theorem 1). Two slices of m fair coins agree
#: with chance (p^2 + (1 - p)^2)^m. The rate may be off by 1/256, as some kernels draw bytes.
CHANCE = 1e-9
#: by how much the rate of a kernel that draws bytes may be off
_STEP = 1 / 256
_DRAW = "let the callable draw from torch's generator, or take a seed that was drawn there: int(torch.randint(2**31, ()))"
#: coins per slice that are compared, and slices
_COINS, _SLICES = 4096, 2048
_AXES = ("batch entries", "heads", "rows", "keys")


def with_mask(reference: Reference, keep: Tensor, backward: bool) -> Reference:
    """Return exact attention with this mask (batch, heads, q_len, kv_len), True = kept; that of `reference` if it has it."""
    own = reference.inputs.keep
    if own is not None and torch.equal(own, keep):
        return reference
    made = compute_reference(
        replace(reference.inputs, keep=keep),
        reference.precision,
        backward,
        parameters=reference.parameters,
        extra=reference.extra,
    )
    made.given = reference.given and replace(reference.given, keep=keep)
    return made


def require_same(keep: Tensor, before: Tensor | None) -> None:
    """Raise ContractError where two calls under one seed of torch's drop different probabilities."""
    if before is None:
        return
    moved = int((keep != before).sum())
    if moved:
        raise ContractError(
            f"two calls after torch.manual_seed with the same seed drop other probabilities ({moved:,} of {keep.numel():,});"
            f" {_DRAW}"
        )


def require_unlike(keep: Tensor, under_another_seed: Tensor, inputs: Inputs) -> None:
    """Raise ContractError where a call under another seed of torch's drops the same probabilities, and not by chance."""
    seen, p = _visible(inputs), inputs.workload.dropout
    coins = int(seen.sum())
    if coins * math.log(p**2 + (1 - p) ** 2) < math.log(CHANCE) and not bool(((keep != under_another_seed) & seen).any()):
        raise ContractError(
            f"two calls after torch.manual_seed with different seeds drop the same of {coins:,} probabilities, so every step"
            f" of a training run would; {_DRAW}"
        )


def require_fair(keep: Tensor, inputs: Inputs) -> None:
    """Raise ContractError where a mask is not drawn fairly for each visible probability; hidden ones may be anything."""
    seen = _visible(inputs)
    _require_rate(keep, seen, inputs.workload.dropout)
    for axis, name in enumerate(_AXES):
        _require_unlike(keep, seen, axis, name, inputs.workload.dropout)
    keep, seen = keep.flatten(0, 1), seen.flatten(0, 1)
    _require_unlike(keep, seen, 0, "heads of all batch entries", inputs.workload.dropout)


def _visible(inputs: Inputs) -> Tensor:
    """Return which probabilities are not 0 by the mask, (batch, heads, q_len, kv_len)."""
    w, mask_mod = inputs.workload, inputs.mask_mod()
    sizes = (w.batch, w.heads, w.q_len, w.kv_len)
    if mask_mod is None:
        return torch.ones(sizes, dtype=torch.bool, device=inputs.device)
    return mask_mod(*index_tensors(w, inputs.device)).expand(sizes)


def _require_rate(keep: Tensor, seen: Tensor, dropout: float) -> None:
    n = int(seen.sum())
    kept = int((keep & seen).sum())
    if not n:
        return
    rate = kept / n
    nearest = min(max(rate, 1 - dropout - _STEP), 1 - dropout + _STEP)
    if n * _divergence(rate, nearest) > math.log(2 / CHANCE):
        raise ContractError(
            f"the keep mask keeps {rate:.2%} of {n:,} visible probabilities, where dropout={dropout:g} keeps {1 - dropout:.2%}"
            f" (the chance of that is below {CHANCE:g})"
        )


def _divergence(rate: float, expected: float) -> float:
    """Return the Kullback-Leibler divergence of two coins; infinite where what happened could not."""
    total = 0.0
    for one, other in ((rate, expected), (1 - rate, 1 - expected)):
        if one > 0:
            total += one * math.log(one / other) if other > 0 else math.inf
    return total


def _require_unlike(keep: Tensor, seen: Tensor, axis: int, name: str, dropout: float) -> None:
    """Raise ContractError where two slices along an axis, say two heads, have the same mask, and not by chance."""
    slices = min(keep.shape[axis], _SLICES)
    if slices < 2:
        return
    signs = torch.where(keep, 1.0, -1.0) * seen
    signs = signs.movedim(axis, 0).flatten(1)[:slices]
    step = max(1, signs.shape[1] // _COINS)
    signs = signs[:, ::step]
    agreeing, shared = signs @ signs.T, signs.abs() @ signs.abs().T
    pairs = slices * (slices - 1) / 2
    enough = math.log(CHANCE / pairs) / math.log(dropout**2 + (1 - dropout) ** 2)
    same = ((agreeing == shared) & (shared >= enough)).triu(1)
    if bool(same.any()):
        one, other = same.nonzero()[0].tolist()
        raise ContractError(
            f"the keep mask repeats: {name} {one} and {other} drop the same of {int(shared[one, other]):,} probabilities"
            f" ({int(same.sum()):,} of {pairs:,.0f} pairs of {name} do)"
        )
