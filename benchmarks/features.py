"""The group `features` of the catalog: a covering set of pairs of options, and which of them each kernel is given.

    python benchmarks/features.py            prints the lines of pytest_attn/workloads/features.jsonl
    python benchmarks/features.py --kernels  prints how many pairs each kernel can take, and how many it is given

What an option is, `options_of` of pytest_attn/workloads/traits.py says; OPTIONS says how each is asked for. What excludes
what is not written down: `Workload` is asked. A kernel is what a backend's capabilities say, whether or not its library is
there, or the emulated one of guests/mutants. Every pair that one of KERNELS can take is in a workload that it takes.
The lines of the catalog that were written by hand come first; the others are added greedily, the same in each run. Lengths and
values go round, so that tiles of 32, 64 and 128 tokens, and splits of 256 keys, end everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations, islice
from typing import Any, TypeAlias

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.catalog import (
    _diagonal_blocks,
    _pairs,
    _steeper_with_each_head,
    _wider_with_each_head,
    builtin_catalog,
)
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.masks import BooleanMask, Document, Neighborhood, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.source import encode_workload, needed_fields
from pytest_attn.workloads.traits import options_of as words_of
from pytest_attn.workloads.workload import Workload

Fields: TypeAlias = dict[str, Any]
Words: TypeAlias = frozenset[str]
#: a kernel, and two options that it is given at once
Target: TypeAlias = tuple[str, str, str]
Kernel: TypeAlias = Callable[[Workload], bool]

#: options of one of them at most: with more, fewer kernels take it
MOST = 9
#: of each that is added, unless an option says otherwise
USUAL = {"heads": 2, "head_dim": 32}
#: of how many uncovered pairs each tries to grow, to keep the best
SEEDS = 6


# -- how each option is asked for ---------------------------------------------------------------------------------------------


def _documents(n: int) -> list[Fields]:
    parts = (n // 4, n // 2, n - n // 4 - n // 2)
    return [{"mask": Document(parts, causal=True)}, {"mask": Document(parts)}]


def _neighborhood(n: int) -> list[Fields]:
    return [{"mask": Neighborhood((8, n // 8), (3, 5)) if n % 8 == 0 else Neighborhood((n,), (7,))}]


#: factor -> option -> its fields, one entry after the other where there are several, or a function of q_len that returns them.
#: A workload has one option of each factor at most. Those without fields say how `_laid_out` lays out sequences
OPTIONS: dict[str, dict[str, list[Fields] | Callable[[int], list[Fields]]]] = {
    "mask": {
        "causal": [{"mask": "causal"}],
        "causal-bottom-right": [{"mask": "causal-bottom-right"}],
        "window": [{"mask": Window(31, 0)}, {"mask": Window(20, 3)}],
        "documents": _documents,
        "neighborhood": _neighborhood,
        "boolean": [{"mask": BooleanMask(_diagonal_blocks)}],
        "mask_mod": [{"mask": _wider_with_each_head}],
    },
    "lengths": {"q < k": [{}], "q > k": [{}], "one query": [{}]},
    "layout": {layout: [{}] for layout in ("padded", "left-padded", "packed", "paged", "packed pages")},
    "sequences": {"empty sequences": [{}], "one sequence": [{}]},
    "prefix": {"cached": [{}]},
    "page size": {"page size": [{"size": 64}, {"size": 1}, {"size": 32}, {"size": 128}]},
    "page layout": {"page layouts": [{"fused": True}, {"sliced": True}, {"layout": "HND", "fused": True}, {"layout": "HND"}]},
    "softcap": {"softcap": [{"softcap": 5.0}]},
    "scale": {"scale": [{"scale": 0.3}, {"scale": 0.08}]},
    "bias": {
        "bias": [{"bias": dimensions} for dimensions in ("hqk", "bhqk", "bk", "hq", "k")],
        "bias before softcap": [{"bias": "hqk", "bias_before_softcap": True}],
    },
    "alibi": {"alibi": [{"alibi": True}], "ALiBi per batch entry": [{"alibi": "batch"}]},
    "sinks": {"sinks": [{"sinks": True}], "sinks of another dtype": [{"sinks": "float32"}, {"sinks": "bfloat16"}]},
    "score_mod": {"score_mod": [{"score_mod": _steeper_with_each_head}]},
    "dropout": {"dropout": [{"dropout": 0.2}]},
    "dtype": {"float16": [{"dtype": "float16"}], "float32": [{"dtype": "float32"}]},
    "quantization": {
        "quantized": [
            {"dtype": "float8_e4m3fn", "descales": "head"},
            {"kv_dtype": "int8", "descales": "token"},
            {"dtype": "float8_e4m3fn"},
            {"kv_dtype": "float8_e4m3fn", "descales": "head"},
            {"kv_dtype": "int8", "descales": "head"},
        ]
    },
    "heads": {
        "grouped heads": [{"heads": 4, "kv_heads": 2}, {"heads": 3, "kv_heads": 1}],
        "interleaved heads": [{"heads": 4, "kv_heads": 2, "head_groups": "interleaved"}],
    },
    "v": {
        "v_head_dim": [{"v_head_dim": 16}, {"v_head_dim": 48}],
        "v in k": [{"head_dim": 48, "v_head_dim": 32, "v_in_k": True}],
    },
}
FACTOR_OF = {word: factor for factor, options in OPTIONS.items() for word in options}
LENGTHS = {
    "q = k": [(n, n) for n in (33, 64, 65, 32, 63, 31, 48, 129, 64, 33, 128, 40, 96, 127)],
    "q < k": [(17, 65), (31, 64), (33, 127), (5, 129), (16, 63), (3, 33), (2, 257), (40, 128)],
    "q > k": [(65, 33), (64, 31), (63, 17), (129, 32), (33, 5)],
    "one query": [(1, n) for n in (257, 513, 256, 255, 512, 201, 384)],
}


@cache
def fields_of(words: Words, turns: frozenset[tuple[str, int]] = frozenset()) -> Fields | None:
    """Return the fields of a workload with these options, each at its turn, by default its first; None where none is legal."""
    of = {FACTOR_OF[word]: word for word in words}
    if len(of) < len(words):
        return None
    turn = dict(turns)
    lengths = LENGTHS[of.get("lengths", "q = k")]
    q_len, kv_len = lengths[turn.get(of.get("lengths", "q = k"), 0) % len(lengths)]
    # what one value of an option excludes, another may take
    tried = (_fields(of, q_len, kv_len, {word: turn.get(word, 0) + later for word in words}) for later in range(5))
    return next((fields for fields in tried if fields and words <= words_of(Workload(**fields))), None)


def _fields(of: Mapping[str, str], q_len: int, kv_len: int, turn: Mapping[str, int]) -> Fields | None:
    """Return the fields of an option for each factor, None where they exclude each other."""
    fields: Fields = {**USUAL, **_laid_out(of, q_len, kv_len)}
    pages: Fields = {"size": 16}
    try:
        for factor, word in of.items():
            entries = OPTIONS[factor][word]
            entries = entries(q_len) if callable(entries) else entries
            (pages if factor.startswith("page ") else fields).update(entries[turn[word] % len(entries)])
        if of.get("layout") in ("paged", "packed pages"):
            fields["kv_pages"] = Pages(**pages)
        Workload(**fields)
    except ValueError:
        return None
    return fields


def _laid_out(of: Mapping[str, str], q_len: int, kv_len: int) -> Fields:
    """Return the lengths: those of a shorter sequence, of a longest one, and of empty ones where that is said.

    The longest is not the first: a kernel that takes its rows and keys for those of the whole batch is wrong there. With ALiBi
    or a score_mod that shows only where packed sequences have as many rows before them as keys in none.
    """
    layout = of.get("layout", "")
    q_lens: tuple[int, ...] = (max(1, q_len // 3), q_len)
    shorter = kv_len // (2 if layout == "packed" and {"alibi", "score_mod"} & set(of) else 3)
    kv_lens: tuple[int, ...] = (max(1, shorter), kv_len)
    if of.get("sequences") == "empty sequences":
        q_lens, kv_lens = (q_lens[0], 0, q_len, q_lens[0]), (kv_lens[0], kv_lens[0], kv_len, 0)
    if of.get("sequences") == "one sequence":
        q_lens, kv_lens = (q_len,), (kv_len,)
    rows: Fields = {"q_lens": q_lens} if "packed" in layout else {"q_len": q_len}
    if layout in ("paged", "packed pages"):
        rows["head_dim"] = 64
    if "prefix" in of:
        longest = kv_len - q_len or 47
        return {**rows, "batch": len(q_lens), "cached": tuple(longest // (1 + longest % 2 * n) for n in range(len(q_lens)))}
    if layout in ("", "left-padded", "padded", "paged"):
        rows["kv_len"] = kv_len
    if not layout:
        return {**rows, "batch": len(q_lens)}
    return {**rows, "kv_lens": kv_lens, **({"pad": "left"} if layout == "left-padded" else {})}


# -- kernels ------------------------------------------------------------------------------------------------------------------


@cache
def kernels() -> dict[str, Kernel]:
    """Return which workloads each takes, by name."""
    registry = Registry()
    everywhere = (name for name in registry.names if not registry.argument_of(name))
    backends = {name: partial(_takes, registry[name].capabilities) for name in everywhere}
    return {**backends, "emulated": lambda w: not (w.is_quantized or w.dropout)}


def _takes(capabilities: Capabilities | None, w: Workload) -> bool:
    return not w.dropout and capabilities is not None and not capabilities.refusals(w)


#: those that are given every pair they can take: flash-attention's interface, as most others are like it; what ours take of
#: quantized tensors; and all options but these and dropout. The one with the fewest options comes first
KERNELS: dict[str, Kernel] = {
    "flash2": lambda w: kernels()["flash2"](w),
    "dequantizing": lambda w: w.is_quantized and kernels()["eager"](w),
    "emulated": lambda w: kernels()["emulated"](w),
}


@cache
def targets_of(w: Workload) -> frozenset[Target]:
    """Return the pairs of options of a workload, for each kernel that takes it; of one packed sequence not that it is packed.

    What a kernel gets wrong of packed sequences shows behind the first.
    """
    words = words_of(w)
    hidden = {"packed", "packed pages"} if "one sequence" in words else set()
    pairs = [pair for pair in combinations(sorted(words), 2) if "one sequence" in pair or not hidden.intersection(pair)]
    return frozenset((name, *pair) for name, takes in KERNELS.items() if takes(w) for pair in pairs)


@cache
def rows_with_a_pair() -> list[tuple[tuple[str, str], Words]]:
    """Return every pair of options with those that it needs beside it, the fewest first."""
    alone = {word: frozenset((word,)) for word in FACTOR_OF}
    needs = {
        word: [frozenset[str]()] if fields_of(one) else [other for other in alone.values() if fields_of(one | other)]
        for word, one in alone.items()
    }
    pairs = combinations(sorted(FACTOR_OF), 2)
    found = {
        ((one, other), alone[one] | alone[other] | a | b) for one, other in pairs for a in needs[one] for b in needs[other]
    }
    return sorted((one for one in found if fields_of(one[1])), key=lambda one: (one[0], len(one[1]), sorted(one[1])))


def smallest(takes: Kernel) -> dict[tuple[str, str], Words]:
    """Return every pair that a kernel can take, with the fewest options that it needs for it."""
    found: dict[tuple[str, str], Words] = {}
    for pair, words in rows_with_a_pair():
        if pair not in found and takes(Workload(**(fields_of(words) or {}))):
            found[pair] = words
    return found


# -- the covering set ---------------------------------------------------------------------------------------------------------


def generated(covered: set[Target]) -> list[Workload]:
    """Return workloads that have all pairs but these."""
    left = {(name, *pair): words for name, takes in KERNELS.items() for pair, words in smallest(takes).items()}
    for target in covered & set(left):
        del left[target]
    rows: list[Workload] = []
    used: Counter[str] = Counter()
    while left:
        best = max((grown(target, used, left) for target in islice(left, SEEDS)), key=lambda w: _new(w, left))
        rows.append(best.replace(name=f"features-{name_of(best)}"))
        used.update([*words_of(best), *({"q = k"} if best.q_len == best.kv_len else ())])
        for target in targets_of(best):
            left.pop(target, None)
    return without_needless(rows, covered)


def grown(target: Target, used: Mapping[str, int], left: Mapping[Target, Words]) -> Workload:
    """Return a workload with a pair, to which options were added as long as more pairs come with them.

    What torch's own kernels take costs four times on a CPU: it gets one option more, where that spares them.
    """

    def made(words: Words) -> Workload | None:
        turns = frozenset((word, used[word]) for word in (*words, "q = k"))
        for at in (turns, frozenset[tuple[str, int]]()):  # the first values, where those whose turn it is are refused
            fields = fields_of(words, at)
            if fields and target in targets_of(w := Workload(**fields)):
                return w
        return None

    def gain(words: Words) -> int:
        w = made(words)
        return _new(w, left) if w else 0

    words = left[target]
    while len(words) < MOST:
        wider = max((words | {word} for word in FACTOR_OF if word not in words), key=gain)
        if gain(wider) <= gain(words):
            break
        words = wider
    best = made(words)
    assert best is not None
    others = (made(words | {word}) for word in FACTOR_OF if kernels()["sdpa"](best))
    return next((w for w in others if w and _new(w, left) >= _new(best, left) and not kernels()["sdpa"](w)), best)


def _new(w: Workload, left: Mapping[Target, Words]) -> int:
    return sum(target in left for target in targets_of(w))


def without_needless(rows: Sequence[Workload], covered: set[Target]) -> list[Workload]:
    """Leave out each whose pairs the others have, the one with the fewest options first."""
    kept = list(rows)
    for one in sorted(rows, key=lambda w: len(words_of(w))):
        others = covered.union(*(targets_of(w) for w in kept if w is not one))
        if targets_of(one) <= others:
            kept.remove(one)
    return kept


_SHORT = {
    "causal-bottom-right": "br",
    "mask_mod": "maskmod",
    "q < k": "cross",
    "q > k": "fewkeys",
    "one query": "decode",
    "left-padded": "left",
    "packed pages": "packedpages",
    "empty sequences": "empty",
    "one sequence": "single",
    "bias before softcap": "biasfirst",
    "ALiBi per batch entry": "alibis",
    "sinks of another dtype": "sinksdtype",
    "score_mod": "mod",
    "grouped heads": "gqa",
    "interleaved heads": "interleaved",
    "v_head_dim": "dv",
    "v in k": "vink",
}


def name_of(w: Workload) -> str:
    """Return a name that says which options it has; the id adds the dtype."""
    said = words_of(w) - {*DTYPES, "page layouts"}
    for special, general in (("left-padded", "padded"), ("packed pages", "paged"), ("cached", "padded")):
        said -= {general} if special in said else set()
    short = _SHORT | {"page size": f"page{w.kv_pages.size}" if w.kv_pages else ""}
    words = [short.get(word, word) for word in FACTOR_OF if word in said]
    pages = w.kv_pages or Pages(16)
    words += [
        word for word, is_so in (("hnd", pages.layout == "HND"), ("fused", pages.fused), ("sliced", pages.sliced)) if is_so
    ]
    return "-".join(words)


def own() -> list[Workload]:
    """Return the lines of the catalog that were not generated."""
    added = _pairs()
    return [w for w in builtin_catalog().select("features") if w not in added]


def line_of(w: Workload) -> str:
    """Write a workload as a line of the file, without the fields that follow from others."""
    needed, encoded = needed_fields(w.replace(name=None)), encode_workload(w)
    return json.dumps({"name": f"features-{name_of(w)}", **{name: encoded[name] for name in needed}})


def main() -> None:
    """Print the lines, or the table of kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true")
    if not parser.parse_args().kernels:
        print(*map(line_of, generated(set().union(*map(targets_of, own())))), sep="\n")
        return
    workloads = builtin_catalog().select("features")
    print(f"{len(workloads)} workloads")
    for name, takes in kernels().items():
        able, taken = set(smallest(takes)), [w for w in workloads if takes(w)]
        given = able.intersection(*[set().union(*(combinations(sorted(words_of(w)), 2) for w in taken))])
        print(f"{name:18} takes {len(taken):3}, given {len(given):4} of {len(able):4} pairs")


if __name__ == "__main__":
    main()
