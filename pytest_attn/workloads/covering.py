"""Covering sets: as few cases as reach each value, or each pair of values; and workloads that are generated for one.

Most workloads of the catalog combine options, so that a kernel which takes a bias alone, or decoding alone, takes few of them.
`within` makes a covering set of what a kernel says that it takes: each value, then pairs of values. `for_any_kernel` is for
one that says nothing until it is called: each value alone, and each common kind of call with lengths, batches and heads of its
own. A workload's name says what it is and nothing else, so that it stays the same whatever else is generated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.fields import DESCALES
from pytest_attn.workloads.masks import BooleanMask, Document, Neighborhood, Sequences, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.traits import kernels_of, options_of
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

Case = TypeVar("Case", bound=Hashable)
#: values alone, and pairs of them
Targets: TypeAlias = frozenset[tuple[str, ...]]


def values_of(workload: Workload) -> frozenset[str]:
    """Return what a workload reaches: its options, and a library's kernels by dtype, head dimensions, rows and keys."""
    return options_of(workload) | kernels_of(workload)


def targets_of(values: Collection[str], strength: int) -> Targets:
    """Return the values alone (strength 1), and their pairs (2)."""
    ordered = sorted(values)
    return frozenset(some for size in range(1, strength + 1) for some in combinations(ordered, size))


def covering(
    cases: Mapping[Case, Collection[str]],
    strength: int,
    runs: Callable[[Case], bool] = lambda case: True,
    cost: Callable[[Case], float] = lambda case: 0.0,
    reached: Targets = frozenset(),
) -> list[Case]:
    """Return the cases of a covering set, the one that adds most first; none where all is reached.

    Args:
        cases: those that a backend declares to take, each with its values.
        strength: 2 for each pair of values, 1 for each value, 0 for the one case that reaches most values.
        runs: whether a case is not refused after all; only of those that would be chosen.
        cost: of cases that add as much, the cheapest is chosen; of those that cost the same, the first.
        reached: what others reach.
    """
    left = {case: targets_of(values, max(strength, 1)) - reached for case, values in cases.items()}
    costs = {case: cost(case) for case in cases}
    chosen: list[Case] = []
    while left and not (chosen and strength == 0):
        best = max(left, key=lambda case: (len(left[case]), -costs[case]))
        added = left.pop(best)
        if not added:
            break
        if runs(best):
            chosen.append(best)
            left = {case: rest for case, targets in left.items() if (rest := targets - added)}
    return chosen


# -- what may be generated ----------------------------------------------------------------------------------------------------

#: the group of the catalog
GROUP = "covering"
#: cases that are enough of one kernel in one test: one that takes as many of the catalog gets none beside them
ENOUGH = 60
#: cases of a kernel below which a run says what it was not asked
FEW = 5

#: fields of `Workload`, and those that say how sequences lie: lengths (q_len, kv_len), layout, pages (fields of `Pages`)
Choice: TypeAlias = Mapping[str, Any]
Takes: TypeAlias = Callable[[Workload], bool]

#: floating-point operations of a forward pass, of one option alone and of several: a CPU runs them in milliseconds
_MOST_ALONE, _MOST_TOGETHER = 3e8, 2e7
#: how many combinations are tried for the pairs
_TRIED = 200
#: factors whose values need no workload of their own
_SIZED = ("batch", "heads", "head_dim", "dtype")


# -- values -------------------------------------------------------------------------------------------------------------------


def _thirds_by(name: str, steps: list[int]) -> Callable[[int, int, int, int, torch.device], torch.Tensor]:
    """Return a factory of masks that hide each third key but the first, another third by where it is seen from.

    steps: by how many keys the next batch entry, head and row move it. A list, so that ids show the name alone.
    """

    def visible(batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        sizes = [size if step else 1 for size, step in zip((batch, heads, q_len), steps, strict=True)]
        *places, keys = Sequences(sizes[0], sizes[1], sizes[2], kv_len, device).indices()
        moved = sum((step * place for step, place in zip(steps, places, strict=True)), keys)
        return (moved % 3 != 1) | (keys == 0)

    visible.__name__ = visible.__qualname__ = name
    return visible


_thirds = _thirds_by("_thirds", [0, 0, 1])
_thirds_by_entry = _thirds_by("_thirds_by_entry", [1, 0, 1])
_thirds_by_head = _thirds_by("_thirds_by_head", [0, 1, 1])
_thirds_by_entry_and_head = _thirds_by("_thirds_by_entry_and_head", [2, 1, 1])
_keys_by_entry = _thirds_by("_keys_by_entry", [1, 0, 0])


def _a_step_with_each_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return kv <= q + 5 * h


def _farther_is_less(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return score - (q - kv).abs() * (h + 1) / 32


_FP8, _INT8 = "float8_e4m3fn", "int8"
_DECODE: Choice = {"lengths": (1, 129)}
_CROSS_BR: Choice = {"lengths": (33, 97), "mask": "causal-bottom-right"}
_GROUPED = ((4, 2), (3, 1), (8, 1), (8, 2), (10, 2), (16, 1), (32, 1), (40, 2), (40, 8), (128, 1))
_GIVEN = {
    "given": _thirds,
    "given by entry": _thirds_by_entry,
    "given by head": _thirds_by_head,
    "given by entry and head": _thirds_by_entry_and_head,
    "given keys by entry": _keys_by_entry,
}


def _bias(dimensions: str) -> Choice:
    return {"bias": dimensions, **({"batch": 4} if "b" in dimensions else {})}


#: of the keys of a tile
_PLACES = 32
#: factor -> word -> what is chosen; a workload has one of each factor at most
VALUES: dict[str, dict[str, Choice]] = {
    "lengths": {
        **{f"{n} tokens": {"lengths": (n, n)} for n in (1, 63, 64, 65, 127, 128, 129, 200, 256, 257)},
        "1081 tokens": {"lengths": (1081, 1081), "heads": 1, "head_dim": 32, "v_head_dim": 32},
        **{f"{q} x {k}": {"lengths": (q, k)} for q, k in ((33, 97), (65, 193), (129, 257), (129, 33), (257, 129), (4, 200))},
        **{f"{q} on {k}": {"lengths": (q, k)} for q, k in ((1, 64), (1, 257), (1, 1024), (1, 1081), (2, 129), (8, 512))},
        **{f"{q} on {k}": {"lengths": (q, k)} for q, k in ((1, 2304), (4, 1081))},
    },
    "mask": {
        "causal": {"mask": "causal"},
        "causal-bottom-right": {"mask": "causal-bottom-right"},
        "window": {"mask": Window(31, 0)},
        "wide window": {"mask": Window(133, 0)},
        "window on both sides": {"mask": Window(20, 3)},
        "documents": {"mask": "documents"},
        "neighborhood": {"mask": "neighborhood"},
        "mask_mod": {"mask": _a_step_with_each_head},
        "given": {"mask": BooleanMask(_thirds)},
        **{word: {"mask": BooleanMask(made), "batch": 3} for word, made in _GIVEN.items() if word != "given"},
    },
    "batch": {f"batch {n}": {"batch": n} for n in (2, 3, 4, 5)},
    "heads": {
        **{f"{n} heads": {"heads": n, "kv_heads": n} for n in (1, 8, 33, 40)},
        **{f"{n} heads on {m}": {"heads": n, "kv_heads": m} for n, m in _GROUPED},
        "interleaved": {"heads": 6, "kv_heads": 2, "head_groups": "interleaved"},
    },
    "head_dim": {
        **{f"head_dim {d}": {"head_dim": d, "v_head_dim": d} for d in (8, 16, 32, 40, 80, 96, 128, 192, 256, 512)},
        "v_head_dim 32": {"head_dim": 64, "v_head_dim": 32},
        "v_head_dim 128": {"head_dim": 192, "v_head_dim": 128},
        "v_head_dim 96": {"head_dim": 64, "v_head_dim": 96},
        "v in k": {"head_dim": 96, "v_head_dim": 64, "v_in_k": True},
        "v in k, 576": {"head_dim": 576, "v_head_dim": 512, "v_in_k": True},
    },
    "dtype": {name: {"dtype": name} for name in DTYPES if name != "bfloat16"},
    "quantization": {
        "fp8": {"dtype": _FP8},
        "fp8 by head": {"dtype": _FP8, "descales": "head"},
        "fp8 by token": {"dtype": _FP8, "descales": "token"},
        **{f"kv {name} by {of}": {"kv_dtype": name, "descales": of} for name in (_FP8, _INT8) for of in DESCALES},
    },
    "layout": {name: {"layout": name} for name in ("padded", "left-padded", "packed", "paged", "packed pages", "cached")},
    "sequences": {
        "empty sequences": {"sequences": "empty"},
        "one sequence": {"sequences": "one"},
        "a sequence without keys": {"sequences": "keyless", "layout": "packed"},
        "a sequence without queries": {"sequences": "queryless", "layout": "packed"},
        "consecutive lengths": {"sequences": "consecutive"},
    },
    "pages": {
        **{f"pages of {n}": {"pages": {"size": n}} for n in (1, 32, 64, 128, 256)},
        "HND pages": {"pages": {"size": 16, "layout": "HND"}},
        "fused pages": {"pages": {"size": 16, "fused": True}},
        "sliced pages": {"pages": {"size": 16, "sliced": True}},
        "many pages": {"pages": {"size": 1, "pool": 140_000}, "heads": 1, "head_dim": 16, "v_head_dim": 16},
    },
    "bias": {f"bias {of}": _bias(of) for of in ("hqk", "bhqk", "qk", "hq", "hk", "k", "q", "bk", "bqk", "bhk", "bhq")},
    "alibi": {"alibi": {"alibi": True}, "ALiBi per batch entry": {"alibi": "batch", "batch": 3}},
    "sinks": {"sinks": {"sinks": True}, "sinks of another dtype": {"sinks": "float32"}},
    "softcap": {"softcap": {"softcap": 5.0}},
    "scale": {"scale 0.3": {"scale": 0.3}, "scale 0.05": {"scale": 0.05}},
    "score_mod": {"score_mod": {"score_mod": _farther_is_less}},
    "dropout": {"dropout": {"dropout": 0.2}, "dropout 0.5": {"dropout": 0.5}},
}
#: the least that a kernel may be asked: most take one of these, and a kernel for one kind of call takes no other
COMMON: tuple[Choice, ...] = (
    {},
    {"mask": "causal"},
    _CROSS_BR,
    _DECODE,
    {**_DECODE, "mask": "causal-bottom-right"},
    {**_DECODE, "layout": "padded"},
    {**_DECODE, "layout": "paged"},
    {"layout": "padded"},
    {"layout": "packed"},
    {"layout": "packed", "mask": "causal"},
    {**_CROSS_BR, "layout": "packed pages"},
    {**_CROSS_BR, "layout": "paged"},
    {"bias": "hqk"},
    {"mask": BooleanMask(_thirds)},
    {"mask": Window(31, 0)},
    {"sinks": True, "mask": Window(31, 0)},
    {**_DECODE, "sinks": True},
    {"dtype": _FP8},
    {**_DECODE, "kv_dtype": _INT8, "descales": "token"},
    {**_DECODE, "layout": "paged", "kv_dtype": _INT8, "descales": "token", "pages": {"size": 16, "sliced": True}},
    {**_DECODE, "heads": 8, "kv_heads": 1, "head_dim": 96, "v_head_dim": 64, "v_in_k": True},
)
RARE: tuple[Choice, ...] = (
    {**_DECODE, "heads": 4, "kv_heads": 2},
    {**_DECODE, "layout": "paged", "mask": "causal-bottom-right"},
    {"layout": "left-padded"},
    {"layout": "padded", "mask": "causal"},
    {**_CROSS_BR, "layout": "packed"},
    {"layout": "packed pages", "mask": "causal"},
    {**_CROSS_BR, "layout": "cached"},
    {**_CROSS_BR, "layout": "paged", "cached": True},
    {"bias": "hqk", "mask": "causal"},
    {**_DECODE, "bias": "hk"},
    {**_DECODE, "mask": BooleanMask(_keys_by_entry), "batch": 3},
    {"sinks": True, "mask": "causal"},
    {**_DECODE, "sinks": True, "mask": "causal-bottom-right"},
    {"alibi": True, "mask": "causal"},
    {"mask": "documents"},
    {"mask": "neighborhood", "lengths": (64, 64)},
    {"softcap": 5.0, "mask": "causal"},
    {"mask": "causal", "dropout": 0.2},
    {"kv_dtype": _INT8, "descales": "token"},
    {**_DECODE, "layout": "paged", "kv_dtype": _FP8},
    {"dtype": _FP8, "mask": "causal"},
    {**_DECODE, "heads": 8, "kv_heads": 1, "head_dim": 96, "v_head_dim": 64, "v_in_k": True, "layout": "paged"},
)
BASES = (*COMMON, *RARE)
#: sizes and dtypes that are tried in turn for a kernel that takes none of BASES as they are
_SIZES: tuple[Choice, ...] = (
    {},
    *({"head_dim": d, "v_head_dim": d} for d in (128, 512, 256, 32, 96, 80, 192, 16, 40, 8)),
    *({"head_dim": d, "v_head_dim": e} for d, e in ((192, 128), (64, 32), (576, 512))),
)
_HEADS: tuple[Choice, ...] = ({}, *({"heads": h, "kv_heads": m} for h, m in ((4, 2), (8, 1), (16, 1), (1, 1))))
_DTYPES: tuple[Choice, ...] = ({}, {"dtype": "float16"}, {"dtype": "float32"})


# -- from a choice to a workload ----------------------------------------------------------------------------------------------


def made(choice: Choice) -> Workload | None:
    """Return the workload of a choice, named after its fields; None where they exclude each other."""
    fields = {"heads": 2, **choice}
    q_len, kv_len = fields.pop("lengths", (65, 65))
    layout, sequences, pages, batch = (fields.pop(name, None) for name in ("layout", "sequences", "pages", "batch"))
    is_paged, is_cached = layout in ("paged", "packed pages"), fields.pop("cached", False) or layout == "cached"
    if (pages and not is_paged) or (sequences and layout in (None, "cached")) or (is_cached and q_len >= kv_len):
        return None
    try:
        if fields.get("mask") in _LAID_OVER:
            fields["mask"] = _LAID_OVER[fields["mask"]](q_len if q_len == kv_len else 0)
        if is_paged:
            fields["kv_pages"] = Pages(**(pages or {"size": 16}))
        w = Workload(**fields, **_lengths(layout, is_cached, q_len, kv_len, batch, sequences))
        return named(w)
    except ValueError:
        return None


#: masks that are made for a length of queries and keys; 0, which is too short for them, where these differ
_LAID_OVER: dict[Any, Callable[[int], Document | Neighborhood]] = {
    "documents": lambda n: Document((n // 4, n - n // 4), causal=True),
    "neighborhood": lambda n: Neighborhood((8, n // 8) if n % 8 == 0 else (n,), (3, 5) if n % 8 == 0 else (7,)),
}


def named(w: Workload) -> Workload:
    """Return a workload of the group, named after its fields."""
    return w.replace(name=f"{GROUP}-{w.shape_id}")


def _lengths(
    layout: str | None, is_cached: bool, q_len: int, kv_len: int, batch: int | None, sequences: str | None
) -> dict[str, Any]:
    """Return the fields of the lengths: the longest sequence is neither the first nor, where there are three, the last."""
    if layout is None:
        return {"q_len": q_len, "kv_len": kv_len, "batch": batch or 1}
    if is_cached:
        return {"q_len": q_len, "cached": kv_len - q_len if layout == "cached" else _several(kv_len - q_len, batch or 2, 1)}
    number = 1 if sequences == "one" else batch or 2
    least = 0 if sequences in ("empty", "keyless") else 1
    kv_lens = _consecutive(kv_len) if sequences == "consecutive" else _several(kv_len, number, least)
    if "packed" in layout:
        has_as_many = q_len == kv_len and sequences not in ("keyless", "queryless")
        q_lens = kv_lens if has_as_many else _several(q_len, number, 0 if sequences in ("empty", "queryless") else 1)
        return {"q_lens": q_lens, "kv_lens": kv_lens}
    sides = {"pad": "left"} if layout == "left-padded" else {}
    return {"q_len": q_len, "kv_len": kv_len, "kv_lens": kv_lens, **sides}


def _consecutive(longest: int) -> tuple[int, ...]:
    """Return as many lengths as a tile has places, so that what is counted from the last key begins at each of them."""
    return tuple(longest - (at + _PLACES // 2) % _PLACES for at in range(_PLACES))


def _several(longest: int, number: int, least: int) -> tuple[int, ...]:
    """Return the lengths of some sequences, of which the second is the longest; the first is the least where least is 0."""
    others = [max(1, longest // (2 + at)) for at in range(number - 1)]
    if least == 0 and others:
        others[0] = 0
    return (*others[:1], longest, *others[1:])


def _kept(choices: Iterable[Choice], takes: Takes, most: float) -> Iterator[Workload]:
    """Yield the workloads of choices that a kernel takes and that cost no more than that."""
    for choice in choices:
        w = made(choice)
        if w is not None and w.flops() <= most and takes(w):
            yield w


# -- for a kernel that says what it takes -------------------------------------------------------------------------------------


def within(takes: Takes, most: int = ENOUGH) -> list[Workload]:
    """Return a covering set of what a kernel takes: the least, each length and option alone, then pairs, sizes among them.

    takes: whether it takes a workload; some thousands are tried. most: how many are returned at most.
    """
    bases = _bases(takes)
    alone = dict.fromkeys(_kept(bases, takes, _MOST_ALONE))
    accepted: dict[str, dict[str, Choice]] = {}
    for factor, values in VALUES.items():
        for word, value in values.items():
            found = next(_kept(({**base, **value} for base in bases), takes, _MOST_ALONE), None)
            if found is not None:
                accepted.setdefault(factor, {})[word] = value
                alone |= {} if factor in _SIZED else {found: None}
    first = sorted(_with_own_ids(alone), key=Workload.flops)[: most * 2 // 3]
    return _with_own_ids([*first, *(_together(takes, bases, accepted) if bases else ())])[:most]


def _with_own_ids(workloads: Iterable[Workload]) -> list[Workload]:
    """Return the first of each id: one padded sequence without padding is called as a dense one is."""
    first: dict[str, Workload] = {}
    for w in workloads:
        first.setdefault(w.id, w)
    return list(first.values())


def _bases(takes: Takes) -> list[Choice]:
    """Return the BASES that it takes, in the first of the dtypes and sizes in which it takes one; else with one more value.

    A kernel may take nothing without a score_mod, or pages of 64 alone.
    """
    values = [value for words in VALUES.values() for value in words.values()]
    sizes = [{**size, **heads, **dtype} for dtype, size, heads in product(_DTYPES, _SIZES, _HEADS)]
    for more, tried in (([{}], sizes), (values, [_SIZES[0], _SIZES[1], _SIZES[-1]])):
        for size in tried:
            found: list[Choice] = [{**base, **size, **value} for base in BASES for value in more]
            if taken := [choice for choice in found if any(_kept([choice], takes, _MOST_ALONE))]:
                return taken
    return []


def _together(takes: Takes, bases: list[Choice], accepted: Mapping[str, Mapping[str, Choice]]) -> list[Workload]:
    """Return workloads of several values at once, as few as reach each pair of those that were tried."""
    tried: dict[Workload, frozenset[str]] = {}
    for number in range(_TRIED):
        choice, words = bases[_turn(number, "base") % len(bases)], {f"base {_turn(number, 'base') % len(bases)}"}
        for factor in sorted(accepted, key=partial(_turn, number)):
            words_of, turn = list(accepted[factor]), _turn(number, f"{factor} value")
            wider = {**choice, **accepted[factor][word := words_of[turn % len(words_of)]]}
            if turn % 2 and any(_kept([wider], takes, _MOST_TOGETHER)):
                choice, words = wider, words | {word}
        if len(words) > 2 and (w := made(choice)) is not None:
            tried[w] = frozenset(words)
    return covering(tried, 2, cost=Workload.flops)


def _turn(number: int, word: str) -> int:
    """Return a number that depends on these alone, so that another word changes no other's."""
    return zlib.crc32(f"{number} {word}".encode())


# -- for a kernel that says nothing -------------------------------------------------------------------------------------------

#: with what each of COMMON is varied, as it is prefill, of fewer queries than keys, or decoding
_OF_PREFILL: tuple[Choice, ...] = (
    {"lengths": (64, 64), "heads": 1},
    {"lengths": (129, 129), "batch": 4},
    {"lengths": (257, 257)},
    {"heads": 8, "kv_heads": 2},
    {"heads": 33, "kv_heads": 33},
    {"head_dim": 128, "v_head_dim": 128},
)
_OF_CROSS: tuple[Choice, ...] = (
    {"lengths": (4, 200)},
    {"lengths": (65, 193), "batch": 4},
    {"lengths": (17, 1081)},
    *_OF_PREFILL[3:],
)
_OF_DECODING: tuple[Choice, ...] = (
    {"lengths": (1, 257)},
    {"lengths": (1, 2304), "batch": 2},
    {"lengths": (1, 2304), "batch": 2, "heads": 4, "kv_heads": 2},
    {"lengths": (4, 1081), "batch": 3},
    {"batch": 3, "heads": 40, "kv_heads": 8},
    {"head_dim": 128, "v_head_dim": 128},
)
#: kernels that take one of these alone
_APART: tuple[Choice, ...] = (
    *({"head_dim": 512, "v_head_dim": 512, **base} for base in (*COMMON[:4], {"mask": "causal", "heads": 4, "kv_heads": 1})),
    *({"head_dim": 512, "v_head_dim": 512, **more} for more in ({"lengths": (64, 64)}, {"lengths": (129, 129)}, {"batch": 3})),
    *({**dtype, **base} for dtype in _DTYPES[1:] for base in (*COMMON[:4], {"lengths": (128, 128)}, {"batch": 3})),
    *({**dtype, "lengths": (1, 1024)} for dtype in _DTYPES[1:]),
    *({**_DECODE, "head_dim": 576, "v_head_dim": 512, "v_in_k": True, "heads": 16, "kv_heads": 1, **more}
      for more in ({}, {"lengths": (1, 257)}, {"layout": "paged", "pages": {"size": 64}}, {"batch": 3}, {"heads": 32},
                   {"heads": 128})),
    *({**_DECODE, "batch": 3, **heads, "mask": BooleanMask(given)}
      for heads in ({"heads": 8}, {"heads": 40}) for given in _GIVEN.values()),
    *({"sinks": True, "lengths": lengths, "mask": Window(left, 0)}
      for lengths in ((4, 200), (1, 200), (129, 129)) for left in (31, 133)),
    *({**_bias(of), "mask": "causal"} for of in ("bhqk", "qk", "hk", "hq")),
    *({"head_dim": d, "v_head_dim": e, "mask": "causal", **more}
      for d, e in ((64, 32), (192, 128)) for more in ({}, {"batch": 3}, {"lengths": (129, 129)}, _CROSS_BR)),
    *({**_DECODE, **_bias(of)} for of in ("bhk", "bk")),
    *({"head_dim": 128, "v_head_dim": 128, "heads": 8, "kv_heads": 2, "mask": "causal", **more}
      for more in ({}, {"lengths": (128, 128)}, {"lengths": (200, 200), "batch": 3})),
    *({"lengths": (4, 200), "mask": "causal-bottom-right", "layout": "paged", **more}
      for more in ({}, {"batch": 3}, {"heads": 8, "kv_heads": 1}, {"pages": {"size": 64}})),
    *({**_DECODE, "layout": "paged", **more}
      for more in ({"softcap": 5.0}, {"softcap": 5.0, "mask": Window(31, 0)}, {"sinks": True}, {"mask": Window(31, 0)})),
    *({**_DECODE, "layout": "paged", "mask": Window(31, 0), **more}
      for more in ({"sequences": "consecutive"}, {"batch": 3}, {"lengths": (1, 257)}, {"heads": 8, "kv_heads": 2})),
    {"softcap": 5.0, "layout": "packed", "mask": "causal"},
    {**_DECODE, "layout": "paged", "dtype": _FP8},
    {**_DECODE, "sinks": True, "kv_dtype": _INT8},
    {"lengths": (97, 33), "mask": "causal-bottom-right", "layout": "packed pages"},
    {"heads": 6, "kv_heads": 2, "head_groups": "interleaved", "layout": "packed", "mask": "causal"},
    *({"mask": "causal", "dropout": 0.2, "heads": 4, **more}
      for more in ({"batch": 2}, {"kv_heads": 2}, {"lengths": (129, 129)})),
)  # fmt: skip


#: what else is varied so
_VARIED: tuple[Choice, ...] = (
    {**_CROSS_BR, "layout": "packed"},
    {**_CROSS_BR, "layout": "cached"},
    {**_CROSS_BR, "layout": "paged", "cached": True},
    {**_CROSS_BR, "layout": "packed pages", "mask": _a_step_with_each_head},
    {"layout": "packed", "mask": "causal", "kv_dtype": _FP8},
    {"layout": "padded", "mask": "causal"},
    {"alibi": True, "mask": "causal"},
    {**_DECODE, "alibi": True, "mask": "causal-bottom-right"},
    {"score_mod": _farther_is_less, "mask": "causal"},
)


@cache
def for_any_kernel() -> tuple[Workload, ...]:
    """Return workloads of which a kernel declines what it does not take: each value alone, then those of each base."""
    lying: dict[str, Choice] = {"pages": {**_DECODE, "layout": "paged"}, "sequences": {"layout": "packed"}}
    alone = [{**lying.get(factor, {}), **value} for factor, values in VALUES.items() for value in values.values()]
    choices: list[Choice] = [*BASES, *alone, *_APART, *_VARIED]
    for base in (*COMMON, *_VARIED):
        q_len, kv_len = base.get("lengths", (65, 65))
        more = _OF_PREFILL if q_len == kv_len else _OF_DECODING if q_len == 1 else _OF_CROSS
        choices += [{**base, **value} for value in more]
    return tuple(_with_own_ids(_kept(choices, lambda w: True, _MOST_ALONE)))
