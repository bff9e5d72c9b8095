"""How often each key counts in a wrong result, and the pattern of those that count never or twice: fitted, then tried as any.

Where keys of weight P_ij count m_j times, row i of out is o_i = sum_j m_j P_ij v_j / sum_j m_j P_ij, so that sum_j m_j P_ij
(v_j - o_i) = 0: linear in m, with an equation for each element of out.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pytest_attn.correctness.arithmetic import weights_given
from pytest_attn.diagnosis.attention_faults import modified_by, seen_by
from pytest_attn.diagnosis.forward_faults import OnlineRows
from pytest_attn.diagnosis.hypothesis import AttentionFault, Other
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: keys above which only the end of those that are seen is fitted, and rows of heads by which that is
_MOST_KEYS, _ROWS = 1024, 4
#: squared ratio of a key's share to its noise, from which it is known how often it counts
_KNOWN = 25.0
#: by how much a count may be off a whole number, and for which part of the keys
_NEAR, _MOST = 0.35, 0.95
_LONGEST_PERIOD = 256


def faults_of_counts(w: Workload, seen: OnlineRows) -> Iterator[AttentionFault]:
    """Yield attention in which some keys count never, or twice, as what is seen has them; nothing where it has none."""
    p = weights_given(seen.scores.scores, seen.scores.scores.logsumexp(-1, keepdim=True))
    v = seen.scores.v.repeat_interleave(p.shape[1] // seen.scores.v.shape[1], 1)
    got, keys = seen.view.got.double(), p.shape[-1]
    if w.sinks or w.dropout or w.is_quantized or not bool(got.isfinite().all()):
        return
    if keys > _MOST_KEYS or got.numel() < 2 * keys:
        if 0 < (end := _end_of_seen(p, v, got, seen.view.bad)) < keys:
            yield _fault(w, "keys-beyond-unseen", f"without the keys from {end} on", 0, partial(_between, end, keys))
        return
    counts, known = _counts(p[0], v[0], got[0], float(seen.view.std.double().square().mean()))
    whole = counts.round()
    is_clear = (counts - whole).abs() <= _NEAR
    if len(known) and float(is_clear.double().mean()) >= _MOST:
        known, whole = known[is_clear], whole[is_clear]
        for count in (0, 2):
            if bool((whole == count).any()) and bool(((whole == count) | (whole == 1)).all()):
                yield from _patterns(w, known, whole == count, count, keys)


def _counts(p: torch.Tensor, v: torch.Tensor, out: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often keys count, in units of what most count, and which keys these are, of (heads, rows, keys or dim)."""
    crossed = p * (out @ v.mT)
    gram = (p.mT @ p) * (v @ v.mT) - crossed.mT @ p - p.mT @ crossed + (p * out.square().sum(-1, keepdim=True)).mT @ p
    gram = gram.sum(0) / max(noise, 1e-300)
    found = torch.linalg.solve(gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device), gram.new_ones(len(gram)))
    known = (gram.diagonal() > _KNOWN).nonzero().flatten()
    some = found[known]
    if not len(some):
        return some, known
    return some / some[some > 0.4 * some.max()].median(), known


def _patterns(w: Workload, known: torch.Tensor, differs: torch.Tensor, count: int, keys: int) -> Iterator[AttentionFault]:
    """Yield a span of keys that count so, or a period of them. known: keys, ascending; differs: whether they count so."""
    what = "without" if count == 0 else "that counts twice"
    those, others = known[differs], known[~differs]
    first, last = int(those[0]), int(those[-1])
    inside = others[(others > first) & (others < last)]
    if not len(inside):
        before, after = others[others < first], others[others > last]
        start = _rounded_down(int(before[-1]) + 1 if len(before) else 0, first)
        end = int(after[0]) if len(after) else keys
        end = end if end == keys else _rounded_down(last + 1, end)
        where = f"{start} to {end - 1}" if end < keys else f"from {start} on"
        fault = "keys-counted-twice" if count else "keys-beyond-unseen" if end == keys else "keys-unseen"
        yield _fault(w, fault, f"{what} the keys {where}", count, partial(_between, start, end))
        return
    for step in range(2, min(_LONGEST_PERIOD, keys // 2) + 1):
        phases = sorted(set((those % step).tolist()))
        if not bool(_at_phases(step, phases, others).any()):
            places = f"at {phases[0]}" + (f" to {phases[-1]}" if len(phases) > 1 else "")
            words = f"{what} {len(phases)} of each {step} keys ({places} modulo {step})"
            fault = "keys-counted-twice" if count else "keys-missing-with-a-period"
            yield _fault(w, fault, words, count, partial(_at_phases, step, phases))
            return


def _rounded_down(least: int, most: int) -> int:
    """Return the roundest number from `least` to `most`: what lies between is not known."""
    for power in (256, 128, 64, 32, 16, 8, 4, 2):
        if -(-least // power) * power <= most:
            return -(-least // power) * power
    return most


def _between(start: int, end: int, kv: torch.Tensor) -> torch.Tensor:
    return (kv >= start) & (kv < end)


def _at_phases(step: int, phases: list[int], kv: torch.Tensor) -> torch.Tensor:
    return torch.isin(kv % step, kv.new_tensor(phases))


def _fault(w: Workload, fault: str, words: str, count: int, differs: Callable[[torch.Tensor], torch.Tensor]) -> AttentionFault:
    def attention(inputs: Inputs) -> Other:
        if count:
            more = math.log(count)
            return inputs, w.replace(score_mod=modified_by(w, lambda s, b, h, q, kv: s + more * differs(kv)))
        visible = seen_by(inputs, w)

        def shown(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return visible(b, h, q, kv) & ~differs(kv)

        return inputs, w.replace(mask=shown)

    return AttentionFault(fault, words, attention)


def _end_of_seen(p: torch.Tensor, v: torch.Tensor, got: torch.Tensor, bad: torch.Tensor | None) -> int:
    """Return before which key those end that some wrong rows see, by what leaves least of them."""
    places = (got[..., 0] > -math.inf if bad is None else bad)[0].nonzero()[:_ROWS].tolist()
    left: torch.Tensor | float = 0.0
    for head, row in places:
        weights = p[0, head, row, :, None]
        partial_sums = (weights * v[0, head]).cumsum(0) / weights.cumsum(0).clamp(min=1e-300)
        left = left + (partial_sums - got[0, head, row]).square().sum(-1)
    return int(left.argmin()) + 1 if isinstance(left, torch.Tensor) else 0
