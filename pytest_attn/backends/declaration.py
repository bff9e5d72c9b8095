"""Declarations of a callable: how it takes and returns tensors, where it rounds, what it leaves to its caller.

`Declaration` is the one place of it. The marker `attention`, `pytest_attn.check`, `check_invariants` and `measure` take its
fields as keywords and show their documentation; checks, records and guests read it. A new property is a field here
(and its type in `Declared`), and the code that makes use of it.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from pytest_attn.backends.precision import Precision, Threshold, default_on, precision_named
from pytest_attn.workloads.workload import LAYOUTS, Workload

if TYPE_CHECKING:
    from torch import Tensor

#: what a callable may return: all but "ignored" are compared. "max": the largest scaled score of each row; "keep": which
#: probabilities dropout has left
RESULTS = ("out", "lse", "weights", "max", "keep")
IGNORED = "ignored"
#: layouts without a batch dimension, and the ones that they are a part of
WITHOUT_BATCH = {"hsd": "bhsd", "shd": "bshd"}
#: those of packed sequences: as they are, and with a batch dimension of 1, rows or heads first; and what is alike in others
OF_PACKED = {"thd": "shd", "bthd": "bshd", "bhtd": "bhsd"}
#: orders of lse's dimensions: batch, heads, rows
LSE_LAYOUTS = ("bhs", "bsh", "hs", "sh")
LSE_BASES = ("e", 2)
#: what a kernel returns in rows that see no key: out 0 and lse -inf (as FlashAttention), any finite numbers, anything
EMPTY_ROWS = ("zero", "finite", "any")

#: raises ValueError for the value of an argument, by its name
Check = Callable[[str, Any], object]


class Declared(TypedDict, total=False):
    """The fields of `Declaration` as keywords of a function, for type checkers."""

    layout: str
    returns_lse: bool
    returns: Sequence[str] | None
    out_layout: str | None
    lse_base: str | int
    lse_layout: str | None
    takes_out: bool
    precision: str | Precision | None
    empty_rows: str
    contiguous: bool
    skips: Threshold | None


# -- arguments that document themselves ------------------------------------------------------------------------------------


class Argument(NamedTuple):
    """One argument as pages and help show it. unset: what holds where it is not given, if its default does not say that."""

    name: str
    default: Any
    meaning: str
    unset: str


def argument(default: Any, meaning: str, check: Check | None = None, unset: str = "") -> Any:
    """Return a field of a dataclass that users fill in by keyword, with what is shown of it and what refuses a value."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "check": check, "unset": unset})


def arguments_of(cls: type) -> list[Argument]:
    """Return the arguments of a dataclass, in its order; those of a field that is a dataclass itself in its place."""
    found: list[Argument] = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default_factory):
            found += arguments_of(field.default_factory)
        elif "meaning" in field.metadata:
            found.append(Argument(field.name, field.default, field.metadata["meaning"], field.metadata["unset"]))
    return found


def described(arguments: Sequence[Argument], indent: str = "    ", width: int = 127) -> str:
    """Return a line "name: meaning." for each argument, wrapped to the width."""
    paragraphs = (f"{one.name}: {one.meaning}." for one in arguments)
    return "\n".join(
        textwrap.fill(text, width, initial_indent=indent, subsequent_indent=f"{indent}    ") for text in paragraphs
    )


def checked(made: Any) -> None:
    """Have each argument of a dataclass's instance checked; raises ValueError for the first value that is refused."""
    for field in dataclasses.fields(made):
        if check := field.metadata.get("check"):
            check(field.name, getattr(made, field.name))


def one_of(*known: object) -> Check:
    """Return a check that lets the known values pass."""

    def check(name: str, value: object) -> None:
        if isinstance(value, bool) != isinstance(known[0], bool) or value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")

    return check


def _unless_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _is_threshold(name: str, value: object) -> None:
    if not isinstance(value, Threshold):
        raise ValueError(f"{name} must be a pytest_attn.Threshold, as Threshold(1e-3, tile=(32, 128)), got {value!r}")


def _names_results(name: str, value: object) -> None:
    known = (*RESULTS, IGNORED)
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"{name} must be names of results, got {value!r}; known: {', '.join(known)}")
    for one in value:
        one_of(*known)(name, one)
    if twice := [one for one in RESULTS if value.count(one) > 1]:
        raise ValueError(f"{name} names {twice[0]!r} twice: {value!r}")


_is_layout = one_of(*LAYOUTS, *WITHOUT_BATCH, "bthd", "bhtd")


@dataclass(frozen=True)
class Declaration:
    """The properties that a callable declares of itself. Raises ValueError for an unknown value, and for a contradiction."""

    layout: str = argument(
        "bhsd",
        'in which fn takes and returns tensors: "bhsd" (torch) or "bshd" (flash-attn), "hsd" or "shd" without a batch'
        ' dimension; packed workloads are "thd" or, with a batch dimension of 1, "bthd" or "bhtd"',
        _is_layout,
    )
    returns_lse: bool = argument(
        False, "fn returns (out, lse), with lse (batch, heads, q_len), float32, as a natural logarithm", one_of(True, False)
    )
    returns: Sequence[str] | None = argument(
        None,
        'what fn returns, in order: "out", "lse", "weights" (the softmax matrix), "max" (the largest score of each row),'
        ' "keep" (which weights dropout has kept) and "ignored"',
        _unless_none(_names_results),
        unset='("out",)',
    )
    out_layout: str | None = argument(
        None, "the layout of out, if it differs from that of q, k and v", _unless_none(_is_layout), unset="as layout"
    )
    lse_base: str | int = argument("e", 'the base of lse and max: "e" or 2', one_of(*LSE_BASES))
    lse_layout: str | None = argument(
        None,
        'the order of the dimensions of lse and max: "bhs" or "bsh", or "hs" or "sh" without a batch dimension',
        _unless_none(one_of(*LSE_LAYOUTS)),
        unset='"bhs" or "hs"',
    )
    takes_out: bool = argument(
        False, "fn writes its result into its argument out=, which is filled with NaN before", one_of(True, False)
    )
    precision: str | Precision | None = argument(
        None,
        'where fn rounds: the name of a profile ("flash", "flash2", "eager", ...) or a pytest_attn.Precision; a backend'
        " declares its own",
        _unless_none(lambda name, value: precision_named(value)),
        unset='"flash", on a CPU "torch_cpu"',
    )
    empty_rows: str = argument(
        "zero",
        'what fn returns in rows that see no key: "zero", "finite" (any finite numbers) or "any"; the last two leave these'
        " rows and their dout out",
        one_of(*EMPTY_ROWS),
    )
    contiguous: bool = argument(False, "fn takes contiguous tensors only, as its documentation says", one_of(True, False))
    skips: Threshold | None = argument(
        None,
        "which tiles of keys fn leaves out by design, a pytest_attn.Threshold; it may leave out all of these, or none",
        _unless_none(_is_threshold),
    )

    def __post_init__(self) -> None:
        if isinstance(self.returns, str | list):
            object.__setattr__(self, "returns", (self.returns,) if isinstance(self.returns, str) else tuple(self.returns))
        checked(self)
        if (self.layout in OF_PACKED) != (self._out_layout in OF_PACKED):
            both = f"{self.layout!r} and {self._out_layout!r}"
            raise ValueError(
                f"layout and out_layout are of packed workloads both ({', '.join(OF_PACKED)}) or neither, got {both}"
            )
        if self.returns is not None and self.returns_lse and "lse" not in self.returns:
            raise ValueError(f"returns_lse=True and returns={self.returns!r} contradict each other; leave out returns_lse")
        if "out" not in self.names and not self.takes_out:
            raise ValueError(f"returns must name 'out', got {self.names!r}; say takes_out=True if it is written into out=")
        if not {"lse", "max"} & set(self.names) and (self.lse_base != "e" or self.lse_layout is not None):
            raise ValueError("lse_base and lse_layout say how lse is returned; name it: returns=('out', 'lse')")

    @cached_property
    def stated(self) -> dict[str, Any]:
        """The properties that are not the default, by name, as JSON can hold them."""
        said = {}
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) != field.default:
                said[field.name] = _as_json(value)
        return said

    @lru_cache(maxsize=256)  # noqa: B019 - tests of one kind declare the same
    def on(self, kind: str) -> Declaration:
        """Return it with the precision profile that holds on a type of device where it names none."""
        return self if self.precision is not None else dataclasses.replace(self, precision=default_on(kind))

    def of_backend(self, precision: str | Precision, returns_lse: bool) -> Declaration:
        """Return the declaration of a backend in a test that declares this: what it takes and returns, it says itself."""
        kept = {one.name: getattr(self, one.name) for one in arguments_of(Declaration) if one.name not in FORM}
        return Declaration(**{**kept, "precision": precision, "returns_lse": returns_lse})

    # -- what it means -------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of what it returns, in its order."""
        return tuple(self.returns) if self.returns is not None else ("out", "lse") if self.returns_lse else ("out",)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The results that are compared, gradients aside, in the order of RESULTS."""
        return tuple(name for name in RESULTS if name == "out" or name in self.names)

    @property
    def timed_results(self) -> tuple[str, ...]:
        """The results of a timed call that are looked at; the probabilities that it drops are for a check."""
        return tuple(name for name in self.results if name != "keep")

    @cached_property
    def has_lse(self) -> bool:
        """True where lse is among what it returns."""
        return "lse" in self.names

    @cached_property
    def inner_layout(self) -> str:
        """The layout of q, k and v with a batch dimension."""
        return "thd" if self.layout in OF_PACKED else WITHOUT_BATCH.get(self.layout, self.layout)

    @cached_property
    def has_batch(self) -> bool:
        """True where q, k and v have a batch dimension."""
        return self.layout not in WITHOUT_BATCH

    @cached_property
    def is_plain(self) -> bool:
        """True where layout and returns_lse say all: the callable takes and returns what every judgment does."""
        says_no_more = self.lse_base == "e" and self._lse_layout == "bhs" and not self.takes_out
        is_usual = self.names == (("out", "lse") if self.returns_lse else ("out",))
        return self.inner_layout == self._out_layout == self.layout and says_no_more and is_usual

    @cached_property
    def profile(self) -> Precision:
        """The precision profile that it declares; one that names none is asked `on` a device first."""
        assert self.precision is not None
        profile = precision_named(self.precision)
        return profile if self.skips is None else profile.skipping(self.skips)

    @cached_property
    def _out_layout(self) -> str:
        return self.layout if self.out_layout is None else self.out_layout

    @cached_property
    def _lse_layout(self) -> str:
        return ("bhs" if self.has_batch else "hs") if self.lse_layout is None else self.lse_layout

    def unfit_for(self, w: Workload) -> str:
        """Say why no callable can declare this on a workload, "" where one can."""
        without = [name for name in (self.layout, self._out_layout, self._lse_layout) if "b" not in name and name != "thd"]
        if without and w.batch > 1 and not w.is_packed:
            return f"layout {without[0]!r} has no batch dimension and needs batch=1; {w.id} has batch={w.batch}"
        if w.is_packed and "weights" in self.names:
            return f"weights cannot be compared where sequences are packed (q_lens), as in {w.id}; call them 'ignored'"
        if "keep" in self.names and not w.dropout:
            return f"returns names 'keep', the mask of dropout, and {w.id} has none; say Workload(dropout=...)"
        if self.layout in OF_PACKED and not w.is_packed:
            return (
                f"layout {self.layout!r} is for packed workloads (q_lens), {w.id} is not one; say {OF_PACKED[self.layout]!r}"
            )
        return ""

    def fitted(self, w: Workload) -> Workload:
        """Return a workload with one batch entry in place of several where only these are in the way."""
        alone = w.kv_lens is None and self.unfit_for(w) and w.batch > 1
        return w.replace(batch=1) if alone else w

    # -- tensors, as it has them and as a judgment has them ----------------------------------------------------------------

    def letters(self, name: str, is_packed: bool) -> tuple[str, str]:
        """Return the dimensions of a result: as the judgment takes it (out in `inner_layout`), and as it is returned."""
        if name == "out":
            return ("thd", self._packed(self._out_layout)) if is_packed else (self.inner_layout, self._out_layout)
        if name in ("weights", "keep"):
            return "bhsk", "bhsk" if self.has_batch else "hsk"
        order = self._lse_layout
        return ("hs", order if self._packed(self.layout) != "thd" else order.replace("b", "")) if is_packed else ("bhs", order)

    def _packed(self, layout: str) -> str:
        return layout if layout in OF_PACKED else "thd"

    def words_on(self, name: str, is_packed: bool) -> str:
        """Return the argument that says how a result is laid out, with its value."""
        if name == "out":
            return f"layout={self._packed(self._out_layout)!r}" if is_packed else f"out_layout={self._out_layout!r}"
        return f"layout={self.layout!r}" if name in ("weights", "keep") else f"lse_layout={self._lse_layout!r}"

    def given(self, tensor: Tensor, w: Workload, is_kv: bool = False) -> Tensor:
        """View q, k, v or one of their gradients, in `inner_layout`, as the callable takes it; pools stay as they are."""
        return turned(tensor, *self._letters_of(w, is_kv))

    def taken(self, tensor: Tensor, w: Workload, is_kv: bool = False) -> Tensor:
        """View q, k, v or one of their gradients, as the callable takes it, in `inner_layout`."""
        return turned(tensor, *reversed(self._letters_of(w, is_kv)))

    def _letters_of(self, w: Workload, is_kv: bool) -> tuple[str, str]:
        """Return the dimensions of q, k or v: in `inner_layout`, and as the callable takes it."""
        if is_kv and w.kv_pages:
            return "", ""
        return ("thd", self._packed(self.layout)) if w.is_packed else (self.inner_layout, self.layout)

    def declared(self, name: str, tensor: Tensor, is_packed: bool) -> Tensor:
        """Return a result as the callable returns it. tensor: as the judgment takes it."""
        if name in ("lse", "max") and self.lse_base == 2:
            tensor = tensor / math.log(2)
        return turned(tensor, *self.letters(name, is_packed))

    def undeclared(self, name: str, tensor: Tensor, is_packed: bool) -> Tensor:
        """Return a result as the judgment takes it. tensor: as the callable returns it."""
        if name in ("lse", "max") and self.lse_base == 2:
            tensor = tensor * math.log(2)
        return turned(tensor, *reversed(self.letters(name, is_packed)))


#: the properties that say in which form tensors come and go
FORM = frozenset(("layout", "returns_lse", "returns", "out_layout", "lse_base", "lse_layout", "takes_out"))


def turned(tensor: Tensor, have: str, want: str) -> Tensor:
    """View a tensor with dimensions `have` as one with dimensions `want`; a batch dimension "b" of one may come or go."""
    if "b" in have and "b" not in want:
        tensor, have = tensor[0], have[1:]
    if "b" in want and "b" not in have:
        tensor, have = tensor.unsqueeze(0), f"b{have}"
    return tensor if have == want else tensor.permute([have.index(dim) for dim in want])


def _as_json(value: Any) -> Any:
    if isinstance(value, Precision):
        return value.name
    if isinstance(value, Threshold):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value
