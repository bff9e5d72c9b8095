"""Where ranks have gone wrong: whose rows are wrong, and whose keys, rows or chunks explain that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pytest_attn.correctness.comparison import Comparison, Evidence, Hint, Mismatch
from pytest_attn.correctness.reference import score_elements
from pytest_attn.ranks.cache_mistakes import cache_mistakes_of
from pytest_attn.ranks.entry import Entry, owners
from pytest_attn.ranks.mistake import RankMistake
from pytest_attn.ranks.mistakes import mistakes_of
from pytest_attn.workloads.sharding import Sharding

#: scores of a workload above which no mistake is tried
_MOST_SCORES = 1 << 22
#: which part of the deviation, by its norm, an explanation may leave; of a page's, which is little, rounding leaves more
_LEFT, _LEFT_IN_PAGES = 0.1, 0.2
#: how many different mistakes of ranks are reported at most
_SHOWN = 4


def located(comparison: Comparison, sharding: Sharding) -> Comparison:
    """Return a failing comparison that says at which ranks it fails, and which mistake of ranks explains that."""
    mismatch = comparison.mismatch
    if mismatch is None or mismatch.evidence is None:
        return comparison
    if sharding.shares_pages:
        return _located_in_pages(comparison, mismatch, mismatch.evidence, sharding)
    name = mismatch.row.name
    ranks = _wrong_ranks(mismatch, sharding)
    found = explained(name, mismatch.evidence, sharding, ranks)
    is_certain = bool(found) and not any(mistake.is_factor for mistake in found.values())
    of_ranks = [Hint("", _whose_rows(mismatch, sharding, ranks), "ranks")]
    of_ranks += [Hint("", text) for text in _told(name, found, sharding.ranks)]
    return replace(comparison, mismatch=_with(mismatch, of_ranks, is_certain))


def _with(mismatch: Mismatch, of_ranks: Sequence[Hint], is_certain: bool) -> Mismatch:
    """Return a mismatch with hints of ranks as well, or, where these are certain, in place of what else is suggested."""
    others = [hint for hint in mismatch.hints if hint.label != "suggests"]
    suggested = () if is_certain else (hint for hint in mismatch.hints if hint.label == "suggests")
    return replace(mismatch, hints=(*suggested, *of_ranks, *others))


def _located_in_pages(comparison: Comparison, mismatch: Mismatch, evidence: Evidence, sharding: Sharding) -> Comparison:
    """Return a failing comparison of ranks that share a paged cache: what they merge is one result, whose out tells most."""
    found = explained("out", evidence, sharding, [0])
    of_ranks = [Hint("", f"out is {mistake.text}") for mistake in found.values()]
    return replace(comparison, mismatch=_with(mismatch, of_ranks, bool(found)))


def explained(name: str, evidence: Evidence, sharding: Sharding, ranks: Sequence[int]) -> dict[int, RankMistake]:
    """Return for each wrong rank the mistake that explains a tensor there best; nothing unless all can be explained."""
    w, reference = sharding.workload, evidence.failed.reference
    if name == "lse" or reference.is_sampled or w.sinks or score_elements(w) > _MOST_SCORES:
        return {}
    got = evidence.failed.tensors[name]
    if reference.given is not None or not bool(got.isfinite().all()):
        return {}
    with torch.device(got.device):
        return _explained(name, evidence, sharding, ranks)


def _explained(name: str, evidence: Evidence, sharding: Sharding, ranks: Sequence[int]) -> dict[int, RankMistake]:
    """Return the mistakes, where nothing speaks against looking for them; all that they make is on one device."""
    w, reference = sharding.workload, evidence.failed.reference
    entries = [Entry(reference, sharding, batch) for batch in range(w.batch)]
    got = [entry.mine(name, evidence.failed.tensors[name]) for entry in entries]
    exact = [entry.of_whole(name, reference.tensors[name].value) for entry in entries]
    most = _LEFT_IN_PAGES if sharding.shares_pages else _LEFT
    fits: dict[int, dict[str, tuple[float, RankMistake]]] = {}
    for rank in ranks:
        deviation = _distance(name, rank, entries, got, exact)
        if deviation == 0:
            return {}
        fits[rank] = {}
        tried = cache_mistakes_of(sharding) if sharding.shares_pages else mistakes_of(name, sharding, rank)
        for mistake in tried:
            left = _distance(name, rank, entries, got, [mistake.made(entry) for entry in entries]) / deviation
            if left <= most:  # mistakes may amount to the same: what is left is rounded
                fits[rank][mistake.text] = (round(left, 3), mistake)
    return _chosen(fits)


def _chosen(fits: dict[int, dict[str, tuple[float, RankMistake]]]) -> dict[int, RankMistake]:
    """Return one mistake for each rank: the same for all if there is one, else each rank's best; none unless all have one."""
    if not fits or not all(fits.values()):
        return {}
    shared = [text for text in next(iter(fits.values())) if all(text in of_rank for of_rank in fits.values())]
    if shared:
        text = min(shared, key=lambda text: sum(of_rank[text][0] for of_rank in fits.values()))
        return {rank: of_rank[text][1] for rank, of_rank in fits.items()}
    return {rank: min(of_rank.values(), key=lambda fit: fit[0])[1] for rank, of_rank in fits.items()}


def _distance(name: str, rank: int, entries: list[Entry], one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the norm of the difference in a rank's rows."""
    squares = 0.0
    for entry, a, b in zip(entries, one, other, strict=True):
        mine = entry.owners(name) == rank
        squares += float((a - b)[:, mine].square().sum())
    return math.sqrt(squares)


def _wrong_ranks(mismatch: Mismatch, sharding: Sharding) -> list[int]:
    rank, _ = owners(sharding.of(mismatch.row.name))
    return sorted(set(rank[list(mismatch.location.rows.found)].tolist()))


def _whose_rows(mismatch: Mismatch, sharding: Sharding, ranks: list[int]) -> str:
    """Say how many rows of each rank are wrong, and which."""
    shards, wrong = sharding.of(mismatch.row.name), set(mismatch.location.rows.found)
    noun = "keys" if mismatch.row.name in ("dk", "dv") else "rows"
    if len(ranks) == sharding.ranks and len(ranks) > 1 and all(wrong >= set(one.tolist()) for one in shards):
        return f"all {noun} of all {len(ranks)} ranks"
    parts = []
    for rank in ranks:
        positions = shards[rank].tolist()
        mine = sorted(wrong & set(positions))
        share = f"all {len(mine)}" if len(mine) == len(positions) else f"{len(mine)} of {len(positions)}"
        parts.append(f"rank {rank} (of {sharding.ranks}): {share} {noun}, {_spans(mine)}")
    return "; ".join(parts[:4]) + ("; ..." if len(parts) > 4 else "")


def _spans(positions: list[int]) -> str:
    """Write positions as spans: "0 to 15, 48 to 63"."""
    spans: list[list[int]] = []
    for one in positions:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    told = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join(told) if len(told) <= 4 else f"first {positions[0]}, last {positions[-1]}"


def _told(name: str, found: dict[int, RankMistake], ranks: int) -> list[str]:
    """Say each mistake once, with the ranks that made it."""
    by_text: dict[str, list[int]] = {}
    for rank, mistake in found.items():
        by_text.setdefault(mistake.text, []).append(rank)
    told = []
    for text, at in by_text.items():
        whose = f"rank {at[0]}" if len(at) == 1 else "all ranks" if len(at) == ranks else f"ranks {', '.join(map(str, at))}"
        told.append(f"{name} of {whose} is {text}")
    return told if len(told) <= _SHOWN else [*told[:_SHOWN], f"and so on, on {len(found)} ranks"]
