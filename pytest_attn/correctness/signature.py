"""What a callable takes and returns where it is not (q, k, v) -> out: results, layouts, lse's base, an out= to write into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_attn.workloads.workload import LAYOUTS, Workload

if TYPE_CHECKING:
    from torch import Tensor

#: what a callable may return: all but "ignored" are compared. "max": the largest scaled score of each row; "keep": which
#: probabilities dropout has left
RESULTS = ("out", "lse", "weights", "max", "keep")
IGNORED = "ignored"
#: layouts without a batch dimension, and the ones that they are a part of
WITHOUT_BATCH = {"hsd": "bhsd", "shd": "bshd"}
#: orders of lse's dimensions: batch, heads, rows
LSE_LAYOUTS = ("bhs", "bsh", "hs", "sh")
LSE_BASES = ("e", 2)


@dataclass(frozen=True)
class Signature:
    """How a callable takes and returns tensors. Raises ValueError for a value that is not one of the known.

    layout: of q, k and v; out_layout: of out, by default the same. returns: names of the results, in their order.
    lse_base: "e" or 2, of lse and max. lse_layout: the order of their dimensions. takes_out: it writes into out=.
    """

    layout: str = "bhsd"
    out_layout: str | None = None
    returns: tuple[str, ...] = ("out",)
    lse_base: str | int = "e"
    lse_layout: str | None = None
    takes_out: bool = False

    def __post_init__(self) -> None:
        known = (*LAYOUTS, *WITHOUT_BATCH)
        if self.out_layout is None:
            object.__setattr__(self, "out_layout", self.layout)
        _one_of("layout", self.layout, known)
        _one_of("out_layout", self.out_layout, known)
        if (self.layout == "thd") != (self.out_layout == "thd"):
            raise ValueError(f"layout 'thd' goes with out_layout 'thd' only, got {self.layout!r} and {self.out_layout!r}")
        if self.lse_layout is None:
            object.__setattr__(self, "lse_layout", "hs" if self.layout in WITHOUT_BATCH else "bhs")
        _one_of("lse_layout", self.lse_layout, LSE_LAYOUTS)
        _one_of("lse_base", self.lse_base, LSE_BASES)
        _one_of("takes_out", self.takes_out, (True, False))
        self._settle_returns()

    def _settle_returns(self) -> None:
        names = (self.returns,) if isinstance(self.returns, str) else self.returns
        if not isinstance(names, list | tuple) or not names:
            known = ", ".join((*RESULTS, IGNORED))
            raise ValueError(f"returns must be names of results, got {self.returns!r}; known: {known}")
        for name in names:
            _one_of("returns", name, (*RESULTS, IGNORED))
        twice = [name for name in RESULTS if list(names).count(name) > 1]
        if twice:
            raise ValueError(f"returns names {twice[0]!r} twice: {names!r}")
        if "out" not in names and not self.takes_out:
            raise ValueError(f"returns must name 'out', got {names!r}; say takes_out=True if it is written into out=")
        object.__setattr__(self, "returns", tuple(names))

    # -- what it means -------------------------------------------------------------------------------------------------

    @property
    def inner_layout(self) -> str:
        """The layout of q, k and v with a batch dimension."""
        return WITHOUT_BATCH.get(self.layout, self.layout)

    @property
    def has_batch(self) -> bool:
        """Whether q, k and v have a batch dimension."""
        return self.layout not in WITHOUT_BATCH

    @property
    def results(self) -> tuple[str, ...]:
        """What is compared, in the order of RESULTS."""
        return tuple(name for name in RESULTS if name == "out" or name in self.returns)

    def unfit_for(self, w: Workload) -> str:
        """Say why no callable can have this signature on a workload, "" where one can."""
        without = [name for name in (self.layout, self.out_layout, self.lse_layout) if "b" not in str(name) and name != "thd"]
        if without and w.batch > 1 and not w.is_packed:
            return f"layout {without[0]!r} has no batch dimension and needs batch=1; {w.id} has batch={w.batch}"
        if w.is_packed and "weights" in self.returns:
            return f"weights cannot be compared where sequences are packed (q_lens), as in {w.id}; call them 'ignored'"
        if "keep" in self.returns and not w.dropout:
            return f"returns names 'keep', the mask of dropout, and {w.id} has none; say Workload(dropout=...)"
        if self.layout == "thd" and not w.is_packed:
            return f"layout 'thd' needs a packed workload (q_lens), {w.id} is not one"
        return ""

    def fitted(self, w: Workload) -> Workload:
        """Return a workload with one batch entry in place of several where only these are in the way."""
        alone = w.kv_lens is None and self.unfit_for(w) and w.batch > 1
        return w.replace(batch=1) if alone else w

    def letters(self, name: str, is_packed: bool) -> tuple[str, str]:
        """Return the dimensions of a result: as the judgment takes it (out in `inner_layout`), and as it is returned."""
        if name == "out":
            return ("thd", "thd") if is_packed else (self.inner_layout, str(self.out_layout))
        if name in ("weights", "keep"):
            return "bhsk", "bhsk" if self.has_batch else "hsk"
        order = str(self.lse_layout)
        return ("hs", order.replace("b", "")) if is_packed else ("bhs", order)

    def given(self, tensor: Tensor, w: Workload, is_kv: bool = False) -> Tensor:
        """View q, k, v or one of their gradients, in `inner_layout`, as the callable takes it; pools stay as they are."""
        return tensor if self.has_batch or w.is_packed or (is_kv and w.kv_pages) else tensor[0]

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


def signature_of(
    layout: str = "bhsd",
    returns_lse: bool = False,
    returns: Sequence[str] | None = None,
    out_layout: str | None = None,
    lse_base: str | int = "e",
    lse_layout: str | None = None,
    takes_out: bool = False,
) -> Signature | None:
    """Return the signature that a test declares, None where layout and returns_lse say all.

    returns_lse=True means returns=("out", "lse"). Raises ValueError for values that are unknown or contradict each other.
    """
    plain = ("out", "lse") if returns_lse else ("out",)
    if returns is not None and returns_lse and "lse" not in returns:
        raise ValueError(f"returns_lse=True and returns={returns!r} contradict each other; leave out returns_lse")
    wanted = plain if returns is None else tuple(returns) if isinstance(returns, list) else returns
    signature = Signature(layout, out_layout, wanted, lse_base, lse_layout, takes_out)  # type: ignore[arg-type]
    means_lse = {"lse", "max"} & set(signature.returns)
    if not means_lse and (lse_base != "e" or lse_layout is not None):
        raise ValueError("lse_base and lse_layout say how lse is returned; name it: returns=('out', 'lse')")
    is_plain = layout in LAYOUTS and signature == Signature(layout, returns=plain)
    return None if is_plain else signature


def turned(tensor: Tensor, have: str, want: str) -> Tensor:
    """View a tensor with dimensions `have` as one with dimensions `want`; a batch dimension "b" of one may come or go."""
    if "b" in have and "b" not in want:
        tensor, have = tensor[0], have[1:]
    if "b" in want and "b" not in have:
        tensor, have = tensor.unsqueeze(0), f"b{have}"
    return tensor if have == want else tensor.permute([have.index(dim) for dim in want])


def _one_of(field: str, value: object, known: tuple[object, ...]) -> None:
    if isinstance(value, bool) != isinstance(known[0], bool) or value not in known:
        raise ValueError(f"{field} must be one of {', '.join(map(str, known))}, got {value!r}")
