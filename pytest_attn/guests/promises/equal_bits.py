"""Equal bits of one sequence: in any batch, in pieces, token by token, behind a cache, and again."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.comparison import looked_at
from pytest_attn.guests.promises.promises_guest import ASKED
from pytest_attn.invariants.invariant import (
    UNQUANTIZED,
    Invariant,
    KernelRaised,
    Need,
    NotApplicable,
    OwnDefectError,
    Probe,
    Results,
    difference,
    first_difference,
    on,
    what_was_raised,
)
from pytest_attn.invariants.rerun import beside_other_work, forget_configurations
from pytest_attn.invariants.variations import one_sequence
from pytest_attn.reports.lines import z_figure
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Causal
from pytest_attn.workloads.workload import Workload, sequence_lengths

#: q, k, v and dout of one sequence: (heads, rows, dim)
Parts: TypeAlias = "Mapping[str, Tensor]"
#: lengths beside which released kernels change their tiles and splits
EDGES = (64, 128, 256, 512, 1024, 2048)
#: keys whose values cancel each other, for rows that see no more keys
_CANCELLING, _TINY = (8, 16, 32, *EDGES), 2.0**-16
#: rows of a piece; none is asked that makes more pieces than that
_PIECES, _MOST_PIECES = (1, 5, 16, 48, 64, 100, 128, 256), 24
#: sequences of a batch, and the scores of one above which no larger one is asked; twice as many where it has few
_BATCHES, _FEW = (2, 3, 5, 8, 17, 64), 8
_MOST_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}
_RERUNS, _MOST_CALLS = 20, 150
#: new processes, after this one: of two configurations each draws either
_PROCESSES = (2, 3, 4)
#: calls with which the place is looked for at which bits first change
_MOST_STEPS = 8
#: tells a new process the file of the first one's bits; where compilers keep what they have compiled
_KEPT = "PYTEST_ATTN_KEPT_BITS"
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "CUTE_DSL_CACHE_DIR", "TILELANG_CACHE_DIR")
_OF_KEYS = ("k", "v", "dk", "dv")


# -- a sequence of a batch: dense, padded, packed or in pages ----------------------------------------------------------------


def _place(inputs: Inputs, name: str, entry: int) -> tuple[Any, ...]:
    """Return the index at which a tensor has a sequence; `_is_by_token` says how its dimensions lie there."""
    w, of_keys = inputs.workload, name in _OF_KEYS
    lengths = [pair[of_keys] for pair in sequence_lengths(w)]
    rows = slice(0, lengths[entry])
    if of_keys and w.kv_pages is not None and inputs.page_table is not None:
        pages = inputs.page_table[entry].long()[:, None] * w.kv_pages.size
        slots = (pages + torch.arange(w.kv_pages.size, device=pages.device)).flatten()[rows]
        return slots // w.kv_pages.size, slots % w.kv_pages.size
    if not w.is_packed:
        return entry, slice(None), rows
    start = sum(lengths[:entry])
    rows = slice(start, start + lengths[entry])
    return (slice(None), rows) if name == "lse" else (rows,)


def _is_by_token(w: Workload, name: str) -> bool:
    """Return whether tensors are (tokens, heads, dim), not (heads, tokens, dim)."""
    return (w.is_packed and name != "lse") or (w.kv_pages is not None and name in _OF_KEYS)


def _taken(inputs: Inputs, tensors: Results, entry: int) -> dict[str, Tensor]:
    """Return one sequence of some tensors by their names, (heads, rows, dim)."""
    found = {name: tensor[_place(inputs, name, entry)] for name, tensor in tensors.items()}
    return {name: t.transpose(0, 1) if _is_by_token(inputs.workload, name) else t for name, t in found.items()}


def _composed(inputs: Inputs, sequences: Sequence[Parts], mask: object) -> Inputs:
    """Return a batch of these sequences in the form that `inputs` have."""
    w = inputs.workload
    q_lens, kv_lens = (tuple(one[name].shape[1] for one in sequences) for name in "qk")
    changed = w.replace(
        batch=len(sequences),
        q_len=max(q_lens),
        kv_len=max(kv_lens),
        q_lens=q_lens if w.q_lens else None,
        kv_lens=kv_lens if w.kv_lens else None,
        kv_pages=w.kv_pages and dataclasses.replace(w.kv_pages, pool=None),
        mask=mask,
        name=None,
    )
    drawn = draw_inputs(changed, "flat", 0, inputs.device)
    for entry, one in enumerate(sequences):
        _put(drawn, entry, one)
    return dataclasses.replace(drawn, sinks=inputs.sinks, alibi_slopes=inputs.alibi_slopes)


def _put(inputs: Inputs, entry: int, sequence: Parts) -> None:
    for name, part in sequence.items():
        by_token = _is_by_token(inputs.workload, name)
        getattr(inputs, name)[_place(inputs, name, entry)] = part.transpose(0, 1) if by_token else part


def _telling(parts: Parts, w: Workload) -> Parts:
    """Let values cancel where a row weighs all keys alike: the rounding that is left shows the order of their sums.

    Else sums in float32 hardly ever differ by so much that a result in 16 bits is another one. Every second value cancels
    over all keys, so that no part of a sum is small before its end, and sums of dq cancel as well; the others within parts
    of several sizes, as causal rows see the first keys only. Most are tiny: sums of numbers of one size are exact.
    """
    keys = parts["k"].shape[1]
    q, v, dout = (parts[name].clone() for name in ("q", "v", "dout"))
    k = _mirrored(parts["k"], keys, 1)
    q[::2, ::2] = q[1::2, 1::2] = 0
    if w.v_in_k:
        v = k[..., : w.v_head_dim]
        q[..., : w.v_head_dim] = 0
    scale = 256 if v.dtype == torch.float16 else 1  # else what is left is less than its smallest number
    v *= torch.where(v.abs() > 1, scale, scale * _TINY)
    sizes = [size for size in _CANCELLING if size < keys] or [keys]
    v[..., ::2] = _mirrored(v[..., ::2], keys, -1)
    for nth, size in enumerate(sizes):
        some = (..., slice(1 + 2 * nth, None, 2 * len(sizes)))
        v[some] = _mirrored(v[some], size, -1)
    dout[..., 1::2] = 0
    return {**parts, "q": q, "k": k, "v": v, "dout": dout}


def _mirrored(tensor: Tensor, size: int, sign: int) -> Tensor:
    """Return (heads, keys, dim) in which the second half of every `size` keys is the first, mirrored, times `sign`."""
    at = torch.arange(tensor.shape[1], device=tensor.device)
    start = at - at % size
    mirror = start + (start + size).clamp(max=len(at)) - 1 - at
    factor = (mirror > at).to(tensor.dtype) + sign * (mirror < at)
    return tensor[:, torch.minimum(at, mirror)] * factor.unsqueeze(-1)


def _largest(w: Workload) -> int:
    return max(range(w.batch), key=lambda entry: math.prod(sequence_lengths(w)[entry]))


class Whole:
    """The sequence of a workload that has most scores, asked alone: what all others are compared with."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.workload = probe, probe.workload
        self._lengths = sequence_lengths(self.workload)
        self._largest = _largest(self.workload)
        self.q_len, self.kv_len = self._lengths[self._largest]
        self.before = self.kv_len - self.q_len  # keys that the first row follows
        self._pieces: dict[tuple[int, int], dict[str, Tensor]] = {}

    @cached_property
    def parts(self) -> Parts:
        """The sequence itself."""
        return self._telling(draw_inputs(self.workload, "randn", self.probe.spec.seed, self.probe.device), self._largest)

    def _telling(self, drawn: Inputs, entry: int) -> Parts:
        given = {name: getattr(drawn, name) for name in ("q", "k", "v", "dout")}
        return _telling(_taken(drawn, given, entry), self.workload)

    @cached_property
    def alone(self) -> Probe:
        """The kernel on this sequence alone."""
        return self.asked([self.parts], self.workload.mask)

    @cached_property
    def own(self) -> Probe:
        """The kernel on the workload as it is, whatever a callable closes over; with telling values where they can be."""
        probe = self.probe
        if not _is_divisible(probe):
            return probe
        if self.workload.batch == 1 and not self.workload.kv_lens:
            return self.alone
        own = dataclasses.replace(probe.inputs, **{n: getattr(probe.inputs, n).clone() for n in ("q", "k", "v", "dout")})
        for entry in range(len(self._lengths)):
            _put(own, entry, self._telling(probe.inputs, entry))
        return Probe(probe.subject, probe.spec, own, probe.deadline, probe.thorough, probe.count)

    @cached_property
    def results(self) -> dict[str, Tensor]:
        """Its results alone."""
        return _taken(self.alone.inputs, self.alone.base, 0)

    def asked(self, sequences: Sequence[Parts], mask: object) -> Probe:
        """Return the kernel on a batch of sequences. Raises NotApplicable where it takes no such batch."""
        probe, inputs = self.probe, _composed(self.probe.inputs, sequences, mask)
        w = inputs.workload
        if probe.is_backend:
            other = probe.on(inputs)
            if other is None:
                raise NotApplicable(f"the backend refuses {w.id}")
            return other
        if reason := probe.spec.declared.unfit_for(w):
            raise NotApplicable(reason)
        spec = dataclasses.replace(probe.spec, workload=w)
        return Probe(probe.subject, spec, inputs, probe.deadline, probe.thorough, probe.count)

    def piece(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the results of some rows that are asked alone, with the keys up to the last of them."""
        if (start, stop) in self._pieces:
            return self._pieces[start, stop]
        rows, keys = slice(start, stop), slice(0, self.before + stop)
        parts = {name: part[:, keys if name in "kv" else rows].contiguous() for name, part in self.parts.items()}
        band = self.workload.band
        mask = Causal(bottom_right=True) if band is not None and band.top_left else self.workload.mask
        other = self.asked([parts], mask)
        found = self._pieces[start, stop] = _taken(other.inputs, other.begin(other.handed()).outputs, 0)
        return found

    def change_of_rows(self, found: Results, start: int) -> str:
        """Say where the results of rows from `start` on, asked alone, differ; "" where they do not."""
        stop = start + found["out"].shape[1]
        expected = {name: self.results[name] for name in found}
        whole = {name: tensor.clone() for name, tensor in expected.items()}
        for name, tensor in whole.items():
            tensor[:, start:stop] = found[name]
        return unlike(self.alone, whole, expected)

    @cached_property
    def shorter(self) -> Parts:
        """Its beginning, as far as many values cancel."""
        return self.cut(max((size for size in _CANCELLING if size < self.kv_len), default=1))

    @cached_property
    def shorter_alone(self) -> Probe:
        """The kernel on that alone."""
        return self.asked([self.shorter], self.workload.mask)

    def cut(self, keys: int) -> Parts:
        """Return its first keys, and of packed tensors first rows."""
        is_packed = self.workload.is_packed
        keys = keys if is_packed else max(keys, self.q_len)
        return {name: t[:, :keys] if is_packed or name in "kv" else t for name, t in self.parts.items()}


def unlike(alone: Probe, found: Results, expected: Results | None = None) -> str:
    """Say where results differ from those of a sequence alone, how far, and whether both are right; "" where they do not."""
    expected = expected or _taken(alone.inputs, alone.base, 0)
    one, other = ({name: t[None] for name, t in some.items()} for some in (found, expected))
    return changed(alone, one, other, one_sequence(alone.inputs, 0))


def changed(probe: Probe, found: Results, expected: Results, inputs: Inputs) -> str:
    """Say where results on inputs differ from others on the same; "" where they do not."""
    name = next((name for name, was in expected.items() if first_difference({name: found[name]}, {name: was})), "")
    if not name:
        return ""
    reference = probe.reference(inputs)
    exact = reference.tensors[name]
    one, other = (looked_at(name, tensor, exact, inputs.workload).double() for tensor in (found[name], expected[name]))
    tau = exact.tau.to(one.device).double()
    z = float(((one - other).abs() / tau)[tau.expand_as(one) > 0].nan_to_num().max()) if bool((tau > 0).any()) else 0.0
    far = f"; z {z_figure(z)} apart" if z else ""
    misfits = {"this": probe.misfit(found, inputs), "what it was": probe.misfit(expected, inputs)}
    wrong = "; ".join(f"{which} is wrong: {misfit}" for which, misfit in misfits.items() if misfit)
    return f"{difference(name, found[name], expected[name])}{far}; {wrong or 'both are right'}"


# -- the promises ------------------------------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """A change of the call under which bits are kept. unit: of its sizes. change: says what differs at one, "" for nothing."""

    summary: str
    unit: str
    sizes: Callable[[Whole], list[int]]
    change: Callable[[Whole, int], str]
    needs: tuple[Need, ...] = ()


def _batches(whole: Whole) -> list[int]:
    most = _MOST_SCORES["cuda" if whole.probe.device.type == "cuda" else "cpu"]
    scores = whole.workload.heads * whole.q_len * whole.kv_len
    return [size for size in _BATCHES if size * scores <= most * (2 if size <= _FEW else 1)] or [2]


def _in_batch(whole: Whole, size: int) -> str:
    """Ask for the sequence at every place of a batch, then in ones of longer and shorter ones, for a shorter one as well."""
    itself, w = whole.parts, whole.workload
    alone = {id(itself): whole.alone}
    among = [[itself] * size]
    if w.kv_lens:
        times = 1 + -(-max(w.kv_lens) // whole.kv_len)  # longer than any of the workload's
        longer = {name: t.repeat(1, times, 1) if name in "kv" else t for name, t in itself.items()}
        shortest = whole.cut(1)  # as of the places of a CUDA graph that no request has
        beside = list(islice(cycle((longer, whole.shorter, shortest)), size - 1))
        among += [[itself, *beside], [*beside, itself]]
        alone[id(whole.shorter)] = whole.shorter_alone
    for sequences in among:
        other = whole.asked(sequences, w.mask)
        for place, probe in enumerate(alone.get(id(one)) for one in sequences):
            if probe and (text := unlike(probe, _taken(other.inputs, other.base, place))):
                return f"at place {place}{'' if sequences is among[0] else ', beside longer and shorter ones'}: {text}"
    return ""


def _pieces(whole: Whole) -> list[int]:
    sizes = sorted({size for size in _PIECES if size < whole.q_len} | {whole.q_len // 2 + 1})
    return [size for size in sizes if whole.q_len / size <= _MOST_PIECES]


def _in_pieces(whole: Whole, size: int) -> str:
    starts = range(0, whole.q_len, size)
    for start in starts[-1:] if whole.probe.compiles_options else starts:
        if text := whole.change_of_rows(whole.piece(start, min(start + size, whole.q_len)), start):
            return f"in the piece that begins after {whole.before + start} keys: {text}"
    return ""


def _lengths(whole: Whole) -> list[int]:
    """Return numbers of keys beside the edges, with those of the first row and the last."""
    near = {edge + more for edge in EDGES for more in (-1, 0, 1)} | {whole.before + 1, whole.kv_len}
    return sorted(length for length in near if whole.before < length <= whole.kv_len)


def _decoded(whole: Whole, length: int) -> str:
    row = length - whole.before - 1
    return whole.change_of_rows(whole.piece(row, row + 1), row)


def _prefixes(whole: Whole) -> list[int]:
    if whole.probe.compiles_options and whole.q_len > 1:  # for the last piece it is compiled anyway
        return [whole.before + range(0, whole.q_len, _pieces(whole)[-1])[-1]]
    half = whole.before + (whole.q_len + 1) // 2
    return sorted({half, *(length for length in _lengths(whole) if length < whole.kv_len)})


def _behind_prefix(whole: Whole, cached: int) -> str:
    row = cached - whole.before
    return whole.change_of_rows(whole.piece(row, whole.q_len), row)


def _again(whole: Whole, number: int) -> str:
    """Call again on the same tensors, later ones beside other work; in between, what tunes itself tunes itself anew."""
    own = whole.own
    own.base  # noqa: B018 - called before any other
    if number == _RERUNS // 2:
        forget_configurations()
    is_busy = own.device.type == "cuda" and number > _RERUNS // 2
    found = beside_other_work(own, own.handed()) if is_busy else own.run(own.inputs)
    return changed(own, found, own.base, own.inputs)


def _processes(whole: Whole) -> list[int]:
    """Return one new process of what compiles, and of a new process itself, which asks no further one."""
    return [*(_PROCESSES[:1] if whole.probe.compiles_options or _KEPT in os.environ else _PROCESSES)]


def _in_new_process(whole: Whole, number: int) -> str:
    """Ask the test once more in a new process, whose compilers find nothing; there, compare with the bits of the first."""
    own = whole.own
    if kept := os.environ.get(_KEPT):
        return changed(own, own.base, torch.load(kept, own.device, weights_only=True), own.inputs)
    if whole.probe.elsewhere is None:
        raise NotApplicable("needs a test of pytest, which is repeated")
    with TemporaryDirectory() as folder:
        kept = str(Path(folder, "bits"))
        torch.save(own.base, kept)
        environment = {_KEPT: kept, **{name: str(Path(folder, name)) for name in _CACHES}}
        finding = whole.probe.elsewhere(f"{ASKED}process", environment)
    if finding.outcome == "not applicable":
        raise NotApplicable(finding.evidence)
    return finding.evidence.partition(f"not at process {_PROCESSES[0]}: ")[2] if finding.outcome == "broken" else ""


def _is_causal(probe: Probe) -> bool:
    """Return whether rows see the keys up to their own, the last row the last key."""
    w, band = probe.workload, probe.workload.band
    square = all(q_len == kv_len for q_len, kv_len in sequence_lengths(w))
    return band is not None and band.right == 0 and (not band.top_left or (square and probe.is_backend))


def _is_divisible(probe: Probe) -> bool:
    w = probe.workload
    tied = w.bias or w.score_mod is not None or w.alibi == "batch" or w.is_quantized or w.dropout or w.cached
    return not tied and w.band is not None and w.pad == "right" and not (w.kv_pages and w.kv_pages.shared)


_IN_OTHER_CALLS = (
    UNQUANTIZED,
    Need(_is_divisible, "an option belongs to the sequences of this very batch"),
    Need(
        lambda probe: probe.is_backend or probe.subject.named is not None or probe.workload.kv_lens is None,
        'the callable closes over lengths; hand over a backend, or the function by its name, "module:function"',
    ),
)
_CAUSAL = (
    *_IN_OTHER_CALLS,
    Need(lambda probe: sequence_lengths(probe.workload)[_largest(probe.workload)][0] > 1, "one row"),
    Need(lambda probe: all(rows <= keys for rows, keys in sequence_lengths(probe.workload)), "rows before the first key"),
    Need(
        _is_causal,
        "needs a mask that is causal from the last key on; of a callable say mask='causal-bottom-right'",
    ),
)
_PROMISES = {
    "batch": Promise("alone and at every place of any batch", "batch", _batches, _in_batch, _IN_OTHER_CALLS),
    "chunks": Promise("a prefill in pieces as in one", "chunk", _pieces, _in_pieces, _CAUSAL),
    "decode": Promise("token by token as in a prefill", "kv_len", _lengths, _decoded, _CAUSAL),
    "prefix": Promise("behind cached keys as computed anew", "prefix", _prefixes, _behind_prefix, _CAUSAL),
    "rerun": Promise("again, gradients too", "rerun", lambda whole: list(range(1, _RERUNS + 1)), _again),
    "process": Promise("in a new process", "process", _processes, _in_new_process),
}


def invariant_named(name: str) -> Invariant:
    """Return the invariant that asks for a promise, or that looks at what was not promised."""
    promise = _PROMISES[name.partition("-")[2]]
    run = partial(_held if name.startswith(ASKED) else _seen, promise)
    return Invariant(name, f"equal bits {promise.summary}", _MOST_CALLS, run, promise.needs)


def _held(promise: Promise, probe: Probe) -> str:
    """Return where bits change from size to size; the note says up to which they do not."""
    whole: Whole = vars(probe).get("whole") or Whole(probe)
    vars(probe)["whole"] = whole  # its results serve all promises
    sizes, kept, refused, text = promise.sizes(whole), [], "", ""
    for size in sizes[-1:] if probe.compiles_options else sizes:  # each compiles anew
        try:
            with on(f"in other batches and lengths, for {promise.unit} {size:,}"):
                text = promise.change(whole, size)
        except (NotApplicable, RefusedError) as reason:
            refused = str(reason)
            continue
        if text:
            break
        kept.append(size)
    if not text and not kept:
        raise NotApplicable(refused)
    if not text:
        probe.note = f"keeps its bits, {promise.unit} {_listed(kept)}"
        return ""
    size, text = _first_unequal(partial(promise.change, whole), kept, size, text)
    upto = f"equal up to {promise.unit} {kept[-1]:,}, " if kept else ""
    return f"changes its bits: {upto}not at {promise.unit} {size:,}: {text}"


def _first_unequal(change: Callable[[int], str], kept: list[int], size: int, text: str) -> tuple[int, str]:
    """Return the smallest size known at which bits change, with what differs there; add to `kept` where they do not."""
    for _ in range(_MOST_STEPS):
        if not kept or size - kept[-1] <= 1:
            break
        between = (kept[-1] + size) // 2
        if found := change(between):
            size, text = between, found
        else:
            kept.append(between)
    return size, text


def _seen(promise: Promise, probe: Probe) -> str:
    """Look at what was not promised; no kernel breaks it, be it that it raises."""
    try:
        probe.note = _held(promise, probe) or probe.note
    except (NotApplicable, OwnDefectError, RefusedError):
        raise
    except KernelRaised as error:
        raise NotApplicable(str(error)) from error
    except Exception as error:
        raise NotApplicable(what_was_raised(error)) from error
    return ""


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) < 8 else f"{sizes[0]} to {sizes[-1]}"
