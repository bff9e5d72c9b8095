"""Exact attention in float64, with the rounding error that a fault-free kernel may show on top, element by element.

Everything is computed in chunks of heads and query rows, so memory grows with the sequence, not with its square. Long
workloads are sampled: chosen query rows for out, lse and dq, chosen keys for dk and dv, each of them exact.

How a workload is cut, and the forward arithmetic, are in `arithmetic.py`; the gradients in `exact_gradients.py`; the budget's
formulas in `budget.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.arithmetic import (
    Block,
    Chunk,
    Segment,
    head_blocks,
    kept_share,
    left_out,
    modify,
    over_keys,
    row_chunks,
    scaled_scores,
    softmax,
)
from pytest_attn.correctness.budget import ForwardBudget, ForwardRows, Rounding, ScoreNoise, row_maxima, weights_variance
from pytest_attn.correctness.exact_gradients import (
    BackwardRows,
    Gradients,
    KeyGradients,
    ParameterGradients,
    Sums,
    rounded,
    sums_of,
)
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Sequences
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.positions import SAMPLED, drawn_positions, far_positions, sampled_positions
from pytest_attn.workloads.workload import Workload, grouped, grouped_order, is_interleaved, sequence_lengths, ungrouped

# -- what is expected --------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """Exact `value` (float64) of one tensor and its budget `tau` (float32), both (batch, heads, rows, dim).

    `rows` lists the sampled positions along the third dimension, None for all. The expected lse has no dim. Its tau is 0
    unless the profile makes the scores noisy, and comes on top of what float32 sums allow.
    """

    value: torch.Tensor
    tau: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.value.nbytes + self.tau.nbytes)


# -- one block ---------------------------------------------------------------------------------------------------------


#: what float32 loses where it compares a score with a threshold
_DECIDED = 2.0**-10


class _BlockPasses:
    """The block's part of every tensor: out, lse and, if `tensors` has them, dq, dk and dv, chunk by chunk.

    sums: of the gradients of parameters, which are added to.
    """

    def __init__(self, block: Block, precision: Precision, tensors: dict[str, Expected], sums: Sums) -> None:
        self.block, self.tensors = block, tensors
        self.place, self.key_place = (block.batches, block.heads), (block.batches, block.kv_heads, block.segment.kv_start)
        self.rounding = Rounding(precision, block.workload.out_dtype)
        self.budget = ForwardBudget(block, self.rounding)
        self.gradients = Gradients(block, self.rounding)
        self.parameters = ParameterGradients(block, self.gradients, sums) if sums else None
        self.key_gradients = KeyGradients(block, self.rounding) if "dk" in tensors else None

    def run(self) -> None:
        """Compute all chunks, then round the sums over them and put these in their place."""
        for rows in row_chunks(self.block):
            self._run_chunk(Chunk(self.block, rows))
        if self.parameters is not None:
            self.parameters.add_roundings()
        for name, value, variance in () if self.key_gradients is None else self.key_gradients.rounded():
            expected, (batches, kv_heads, start) = self.tensors[name], self.key_place
            place = (batches, kv_heads, slice(start, start + value.shape[2]))
            expected.value[place] = value
            expected.tau[place] = variance.sqrt_().float()

    def _run_chunk(self, chunk: Chunk) -> None:
        """Put the rows of a chunk in their place, add its share to the gradients of the keys."""
        scores = scaled_scores(chunk)
        noise = self.budget.scores.of_scaled(scores, chunk)
        scores, slope = modify(scores, chunk)
        if noise is not None:
            self.budget.scores.add_final_rounding(noise, scores, chunk)
        perhaps = None if self.rounding.precision.skips is None else self._leave_out(scores, noise, chunk)
        if "max" in self.tensors:
            top, top_var = row_maxima(scores, noise)
            self._put_rows("max", top[:, :, chunk.kept], top_var[:, :, chunk.kept], chunk)
        p, lse = softmax(scores, chunk)
        dropped = kept_share(chunk)
        used = p if dropped is None else p * dropped
        out = over_keys(used, chunk.v)
        row_noise = self.budget.of_rows(used, lse, chunk)
        lse_var = _sum(self.budget.of_lse(noise, p, lse), None if row_noise is None else row_noise.variance.squeeze(-1))
        p_noise_var = None if noise is None else self.budget.noise_of_p(noise, p, lse)
        if perhaps is not None:
            of_tiles = perhaps.mul_(p).mul_(p)
            p_noise_var, lse_var = _sum(p_noise_var, of_tiles), _sum(lse_var, of_tiles.sum(-1))
        self._put_rows("lse", lse[:, :, chunk.kept], None if lse_var is None else lse_var[:, :, chunk.kept], chunk)
        rows = ForwardRows(chunk.q, p, lse, out, p_noise_var, row_noise, dropped)
        if "weights" in self.tensors:
            self._put_weights(rows, chunk)
        p_rounding_var = self._put_forward(rows, chunk)
        if "dq" in self.tensors:
            slope_var = None if noise is None else noise.slope_var
            backward_rows = self.gradients.rows_of(rows, p_rounding_var, slope, slope_var, chunk)
            if self.parameters is not None:
                self.parameters.add(backward_rows, lse, lse_var, chunk)
            self._run_backward(backward_rows, chunk)

    def _leave_out(self, scores: torch.Tensor, noise: ScoreNoise | None, chunk: Chunk) -> torch.Tensor:
        """Set scores to -inf where the profile leaves them out; return the variance of P / P where rounding decides it.

        Both are (n, heads, rows, keys). One decision moves all keys of a tile together.
        """
        skips = self.rounding.precision.skips
        assert skips is not None
        off = _DECIDED
        if noise is not None and noise.variance.numel():
            off += 8 * float(noise.variance.masked_fill(scores == -math.inf, 0).max()) ** 0.5
        surely, perhaps = left_out(chunk, skips, off)
        scores.masked_fill_(surely, -math.inf)
        return perhaps.double() * skips.tile[1]

    def _put_forward(self, rows: ForwardRows, chunk: Chunk) -> torch.Tensor | None:
        """Put out and its budget in their place; return e_ij^2 if all rows are kept."""
        all_kept = len(chunk.places) == len(chunk.rows)
        if not len(chunk.places):
            return None
        kept = rows if all_kept else rows.at(chunk.kept)
        p_rounding_var = self.rounding.of_p(kept.p, self.block.segment.lengths[1])
        if kept.dropped is not None:  # an eager kernel rounds what dropout leaves once more
            p_rounding_var *= 2
        if "out" in self.tensors:
            self._put_rows("out", kept.out, self.budget.of_out(kept, p_rounding_var, chunk), chunk)
        return p_rounding_var if all_kept else None

    def _put_weights(self, rows: ForwardRows, chunk: Chunk) -> None:
        expected, heads = self.tensors["weights"], (*self.place, slice(None), chunk.keys)
        variance = weights_variance(rows, self.rounding, self.block.segment.lengths[1])
        for target, source in ((expected.value, rows.p), (expected.tau, variance.sqrt().float())):
            target[heads].index_copy_(2, chunk.places, source[:, :, chunk.kept])

    def _run_backward(self, rows: BackwardRows, chunk: Chunk) -> None:
        """Put dq in its place, and add to dk and dv where these are wanted."""
        sampled, all_keys, key_gradients = self.block.segment.keys, chunk.v.shape[2], self.key_gradients
        if sampled is None or key_gradients is None:
            scores = self.gradients.of_scores(rows, chunk.v, chunk.v_squared, all_keys)
            self._put_rows("dq", *self.gradients.of_queries(scores, chunk.k), chunk)
            if key_gradients is not None:
                key_gradients.add(rows, scores, chunk.keys)
            return
        if len(chunk.places):  # of sampled rows with all keys
            scores = self.gradients.of_scores(rows.at_rows(chunk.kept), chunk.v, chunk.v_squared, all_keys)
            self._put_rows("dq", *self.gradients.of_queries(scores, chunk.k), chunk)
            del scores  # each of its tensors is as large as the scores
        sampled, places = chunk.seen_among(sampled)
        if not len(sampled):
            return
        if len(sampled) < all_keys:
            rows = replace(rows, row_sum_var=self.gradients.row_sum_var_of_all_keys(rows, chunk))
        rows = rows.at_keys(sampled)  # of all rows with sampled keys
        scores = self.gradients.of_scores(rows, chunk.v[:, :, sampled], chunk.v_squared[:, :, sampled], all_keys)
        key_gradients.add(rows, scores, places)

    def _put_rows(self, name: str, value: torch.Tensor, variance: torch.Tensor | None, chunk: Chunk) -> None:
        """Put the rows of a chunk that are kept in their place; `variance` becomes their tau."""
        if name not in self.tensors:
            return
        expected, heads = self.tensors[name], self.place
        expected.value[heads].index_copy_(2, chunk.places, value)
        if variance is not None:
            expected.tau[heads].index_copy_(2, chunk.places, variance.sqrt().float())


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Add two variances, of which either may be none."""
    return other if one is None else one if other is None else one + other


# -- the reference -----------------------------------------------------------------------------------------------------


#: scores up to which one thread computes
_OF_ONE_THREAD = 1 << 20
#: Score elements (heads * q_len * kv_len) above which rows and keys are sampled.
_FULL_ELEMENTS = {"cpu": 1 << 28, "cuda": 1 << 33}
_SAMPLED_ROWS = SAMPLED
#: results that are compared beside out and lse where a kernel returns them
EXTRA = ("weights", "max")


class Reference:
    """Exact results of one workload and one draw of inputs: out, lse and, with gradients, dq, dk, dv.

    Tensors are heads-first, (batch, heads, rows, dim); packed sequences lie end to end in one batch entry. `given` are the
    inputs as the callable takes them, where a backend quantizes them, or where they are quantized and come with descales.
    `inputs` are then the values that they stand for. Elsewhere `given` is None. parameters: those whose gradients are there,
    as dsinks and so on. redraw: draws the inputs of a long workload
    again, which are freed between two calls.
    """

    def __init__(
        self,
        inputs: Inputs,
        precision: Precision,
        tensors: dict[str, Expected] | None = None,
        given: Inputs | None = None,
        parameters: tuple[str, ...] = (),
    ) -> None:
        self._inputs: Inputs | None = inputs
        self.workload = inputs.workload
        self.precision, self.given, self.parameters = precision, given, parameters
        self.tensors = {} if tensors is None else tensors
        self.redraw: Callable[[], Inputs] | None = None
        #: what dq has through a bias that is made of q
        self.path_of_bias: torch.Tensor | None = None
        #: option, and tensors that were judged -> whether they show it
        self.shown: dict[tuple[str, ...], bool] = {}

    @property
    def inputs(self) -> Inputs:
        """The values of which attention is exact; drawn again where they were freed."""
        if self._inputs is None:
            assert self.redraw is not None
            self._inputs = self.redraw()
        return self._inputs

    def free_inputs(self) -> None:
        """Free the inputs of a long workload until they are asked for."""
        if self.redraw is not None and self.given is None:
            self._inputs = None

    @property
    def called_with(self) -> Inputs:
        """The inputs that the callable is given."""
        return self.given or self.inputs

    @property
    def extra(self) -> tuple[str, ...]:
        """Names of those of "weights" and "max" that are there beside out and lse."""
        return tuple(name for name in EXTRA if name in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes held by the expected tensors, and by inputs that stay."""
        i = None if self.redraw is not None and self.given is None else self._inputs
        of_inputs = sum(t.nbytes for t in (i.q, i.k, i.v, i.dout)) if i is not None else 0
        return of_inputs + sum(expected.nbytes for expected in self.tensors.values())

    @property
    def rows(self) -> torch.Tensor | None:
        """The query rows that were computed, None for all."""
        return self.tensors["out"].rows

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys whose gradients were computed, None for all, or for none."""
        return self.tensors["dk"].rows if "dk" in self.tensors else None

    @property
    def sampled(self) -> dict[str, tuple[int, int]]:
        """Number of "rows" and "keys" that were computed, and of all, where only some were."""
        lengths = {"rows": (self.rows, self.workload.q_len), "keys": (self.keys, self.workload.kv_len)}
        return {name: (len(at), length) for name, (at, length) in lengths.items() if at is not None}

    @property
    def is_sampled(self) -> bool:
        """True where only chosen rows and keys were computed."""
        return any(expected.rows is not None for expected in self.tensors.values())


def heads_first(tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    """View a native q- or lse-like tensor as (batch, heads, rows, ...): "thd" becomes one long batch entry.

    Those like k are in the same layout but where packed queries have keys in pages.
    """
    if not workload.is_packed:
        return tensor
    if tensor.dim() == 2:  # lse (heads, rows)
        return tensor.unsqueeze(0)
    return tensor.transpose(0, 1).unsqueeze(0)


def as_compared(name: str, tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    """View a native result as it is compared: (batch, heads, rows, ...), or as the gradient of a parameter is."""
    return tensor.view(PARAMETERS[name[1:]].shape(workload)) if name[1:] in PARAMETERS else heads_first(tensor, workload)


def own_dims(name: str, w: Workload, kv_len: int) -> tuple[int, ...]:
    """Return the dimensions that a result has beside (batch, heads, rows)."""
    if name in ("lse", "max"):
        return ()
    if name in ("weights", "keep"):
        return (kv_len,)
    return (w.v_head_dim if name in ("out", "v", "dv") else w.head_dim,)


def _zeros(shape: tuple[int, ...], at: torch.Tensor | None, device: torch.device) -> Expected:
    """Return a result that is all 0. at: where its rows are, None for all."""
    value = torch.zeros(shape, dtype=torch.float64, device=device)
    return Expected(value, torch.zeros(shape, dtype=torch.float32, device=device), at)


@contextmanager
def few_threads(w: Workload) -> Iterator[None]:
    """Compute with one thread of a CPU meanwhile if a workload is small: on a busy one, several wait for one another."""
    threads = torch.get_num_threads()
    if threads == 1 or score_elements(w) > _OF_ONE_THREAD:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compute_reference(
    inputs: Inputs,
    precision: Precision,
    backward: bool = False,
    rows: torch.Tensor | None = None,
    workload: Workload | None = None,
    parameters: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
    positions: tuple[int, ...] = (),
    keys: torch.Tensor | None = None,
) -> Reference:
    """Compute exact attention and its budget for `inputs`. parameters: of which gradients are wanted as well.

    extra: "weights" and "max" where these are wanted beside out and lse.

    `rows` restricts the query rows, and `keys` those of dk and dv, to none by default; without `rows` long workloads choose
    their own sample, which has `positions` among its keys. `workload` replaces the semantics (mask, scale, ...) while the
    tensors stay: so a diagnosis asks what another attention would have given.
    """
    w, device = workload or inputs.workload, _device_of(inputs)
    precision, given = precision.of_inputs_in(w.dtype), inputs
    inputs = given.dequantized()
    reference = Reference(inputs, precision, given=None if inputs is given else given, parameters=parameters)
    rows, keys = _computed_positions(w, device, rows, keys, positions, backward)
    has_path = backward and inputs.bias_of is not None and w.bias is not None
    if has_path and rows is not None:
        raise ValueError(f"{w.id}: a bias that is made of q has exact gradients where all rows are computed; use fewer")
    with torch.no_grad(), few_threads(w):
        _allocate(reference, w, device, rows, keys, backward, extra)
        sums = sums_of((*parameters, *(["bias"] if has_path and "bias" not in parameters else [])), w, device)
        for segment in segments_of(inputs, w, device, rows, keys):
            for batches, kv_heads in head_blocks(segment):
                _BlockPasses(Block(segment, batches, kv_heads), precision, reference.tensors, sums).run()
        for name, value, variance in rounded(sums, precision, w):
            reference.tensors[name] = Expected(value, variance.sqrt_().float())
        if is_interleaved(w):
            _restore_order(reference.tensors, w)
        if has_path:
            _add_path_of_bias(reference, keeps="bias" in parameters)
    return reference


#: draws of signs by which the variance of a sum is estimated
_SIGNS = 16


def _add_path_of_bias(reference: Reference, keeps: bool) -> None:
    """Add to dq what comes through a bias that is made of q, with its variance. keeps: the gradient of the bias, too.

    Errors of one row of the bias are as likely independent as the same: of D, which moves all of its row.
    """
    inputs, dq = reference.inputs, reference.tensors["dq"]
    dbias = reference.tensors["dbias"] if keeps else reference.tensors.pop("dbias")
    assert inputs.bias_of is not None
    q = inputs.q.detach().to(dq.value.device).double().requires_grad_()
    with torch.enable_grad():
        bias = inputs.bias_of(q)
    if not bias.requires_grad:
        return

    def through(gradient: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(bias, q, gradient, retain_graph=True)[0]

    generator, tau = torch.Generator().manual_seed(0), dbias.tau.double()
    signs = (torch.randint(2, tau.shape, generator=generator).to(tau) * 2 - 1 for _ in range(_SIGNS))
    variance = sum((through(tau * sign).square_() for sign in signs), through(tau).square_() * _SIGNS) / _SIGNS
    reference.path_of_bias = through(dbias.value)
    dq.value += reference.path_of_bias
    dq.tau = variance.add_(dq.tau.double().square()).sqrt_().float()


def _device_of(inputs: Inputs) -> torch.device:
    """Return where exact attention is computed: beside the inputs, but for MPS, which has no float64."""
    return torch.device("cpu") if inputs.device.type == "mps" else inputs.device


def _computed_positions(
    w: Workload,
    device: torch.device,
    rows: torch.Tensor | None,
    keys: torch.Tensor | None,
    positions: tuple[int, ...],
    backward: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows, and the keys of gradients, that are computed, None for all: those asked for, or a long one's sample."""
    if rows is None:
        if w.is_packed or score_elements(w) <= _FULL_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]:
            return None, keys
        rows = torch.tensor(sorted(always_sampled(w, w.heads, w.q_len)))
        chosen = always_sampled(w, w.kv_heads, w.kv_len).union(positions, drawn_positions(w.kv_len))
        keys = torch.tensor(sorted(p for p in chosen if p < w.kv_len))
    rows = rows.to(device)
    if not backward:
        return rows, None
    return rows, rows.new_empty(0) if keys is None else keys.to(device)


def _restore_order(tensors: dict[str, Expected], w: Workload) -> None:
    """Put query heads, which were computed by key head, back into their own order."""
    for name, expected in tensors.items():
        if name not in ("dk", "dv") and expected.value.shape[1] == w.heads:
            expected.value, expected.tau = ungrouped(expected.value, w), ungrouped(expected.tau, w)


# -- some rows of it ---------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Part of a result that one of several processes has: query heads, in native order, and rows, with their places there."""

    heads: dict[int, int]
    rows: dict[int, int]


class ExactRows(NamedTuple):
    """Some rows of results, by name, exact: (batches, heads, rows, dim), and where these have them; those of dk are keys.

    batches: the entries, 0 where packed. heads: in their native order. rows: among all rows of the result; at: the same on the
    device.
    """

    expected: dict[str, Expected]
    batches: slice
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    at: torch.Tensor

    def of(self, tensor: torch.Tensor, workload: Workload, held: Held | None = None) -> torch.Tensor:
        """Return these rows of a native result. held: what it has of them; None for all."""
        whole, heads, at = heads_first(tensor, workload)[self.batches], self.heads, self.at.to(tensor.device)
        if held is not None:
            heads = tuple(held.heads[one] for one in heads)
            at = torch.tensor([held.rows[one] for one in self.rows], device=whole.device)
        follow_each_other = heads == tuple(range(heads[0], heads[-1] + 1))
        return whole[:, slice(heads[0], heads[-1] + 1) if follow_each_other else list(heads)][:, :, at]


def exact_rows(
    inputs: Inputs, precision: Precision, names: Sequence[str], most: int, chosen: random.Random, held: Held | None = None
) -> ExactRows | None:
    """Compute results at up to `most` rows, or keys, of one key head of one sequence, chosen at random; of more if cheap.

    names: "out", "lse", "max", "weights" or "dq"; or "dk", "dv" or both. held: which rows and heads can be chosen, None for
    all. None is returned where there is no row, and of the dq of a kernel that makes its bias of q.
    """
    if inputs.bias_of is not None and "dq" in names:
        return None
    with torch.no_grad():
        patch = _Patch.draw(inputs, not {"dk", "dv"}.isdisjoint(names), most, chosen, held)
        return None if patch is None else patch.placed(patch.computed(names, precision), held)


#: scores, and elements of k and v, that take little to compute exactly beside the rest of a look
_CHEAP = 1 << 18


@dataclass(frozen=True)
class _Patch:
    """Rows, or keys, of some key heads and sequences of a segment, each of which follow each other.

    positions: within the sequence, ascending; at: the same on the device.
    """

    segment: Segment
    is_of_keys: bool
    batches: range
    kv_heads: range
    positions: tuple[int, ...]
    at: torch.Tensor

    @classmethod
    def draw(cls, inputs: Inputs, is_of_keys: bool, most: int, chosen: random.Random, held: Held | None) -> _Patch | None:
        """Choose at random, as `exact_rows` says; return None where there is nothing to choose from."""
        w, device = inputs.workload, _device_of(inputs)
        segments = [(one, _rows_in(one, is_of_keys, held)) for one in segments_of(inputs.dequantized(), w, device)]
        segments = [(one, among) for one, among in segments if among and one.lengths[0]]
        heads = range(w.kv_heads)
        kv_heads = heads if held is None else [h for h in heads if not held.heads.keys().isdisjoint(_native(h, w, is_of_keys))]
        if not segments or not kv_heads:
            return None
        segment, among = chosen.choice(segments)
        positions = sorted(chosen.sample(among, min(most, len(among))))
        rows = (segment.lengths[0] if is_of_keys else len(positions)) * w.group
        cheap = _CHEAP // (segment.lengths[1] * (rows + w.head_dim + w.v_head_dim) or 1) if held is None else 1
        run_of_heads = _run_of(kv_heads, cheap, chosen)
        batches = _run_of(range(segment.k.shape[0]), cheap // w.kv_heads, chosen)
        at = torch.tensor(positions, device=device)
        return cls(segment, is_of_keys, batches, run_of_heads, tuple(positions), at)

    def computed(self, names: Sequence[str], precision: Precision) -> dict[str, Expected]:
        """Return results by name, (batches, heads, rows or keys, dim)."""
        w = self.segment.workload
        some = replace(self.segment, rows=self.at)
        if self.is_of_keys:  # of all rows, none is kept
            some = replace(self.segment, rows=self.at[:0], keys=self.at)
        tensors = {name: self._empty(name) for name in (("dq", "dk", "dv") if self.is_of_keys else names)}
        block = Block(some, _slice(self.batches), _slice(self.kv_heads))
        passes = _BlockPasses(block, precision.of_inputs_in(w.dtype), tensors, {})
        passes.place, passes.key_place = (slice(None), slice(None)), (slice(None), slice(None), 0)
        passes.run()
        return {name: tensors[name] for name in names}

    def _empty(self, name: str) -> Expected:
        heads = len(self.kv_heads) * (1 if name in ("dk", "dv") else self.segment.workload.group)
        rows = self.at[:0] if self.is_of_keys and name == "dq" else self.at
        own = own_dims(name, self.segment.workload, self.segment.lengths[1])
        return _zeros((len(self.batches), heads, len(rows), *own), rows, self.at.device)

    def placed(self, expected: dict[str, Expected], held: Held | None) -> ExactRows:
        """Say where a result has what was computed, without the heads that are not held."""
        segment, w = self.segment, self.segment.workload
        heads = [head for one in self.kv_heads for head in _native(one, w, self.is_of_keys)]
        there = [place for place, head in enumerate(heads) if held is None or head in held.heads]
        if len(there) < len(heads):
            expected = {name: Expected(one.value[:, there], one.tau[:, there], self.at) for name, one in expected.items()}
        first = segment.kv_start if self.is_of_keys else segment.q_start
        batches = slice(0, 1) if w.is_packed else _slice(self.batches)
        rows, at = tuple(one + first for one in self.positions), self.at + first if first else self.at
        return ExactRows(expected, batches, tuple(heads[place] for place in there), rows, at)


def _native(kv_head: int, w: Workload, is_of_keys: bool) -> Sequence[int]:
    """Return the heads of a result that one key head makes: itself, or the query heads that use it, in native order."""
    return (kv_head,) if is_of_keys else grouped_order(w)[kv_head * w.group : (kv_head + 1) * w.group]


def _run_of(several: Sequence[int], most: int, chosen: random.Random) -> range:
    """Return up to `most` that follow each other, at least one."""
    number = min(max(1, most), len(several))
    start = chosen.randrange(len(several) - number + 1)
    return range(several[start], several[start + number - 1] + 1)


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)


def _rows_in(segment: Segment, is_of_keys: bool, held: Held | None) -> Sequence[int]:
    """Return the rows, or keys, of a segment that can be chosen, counted from its own first."""
    length, first = (segment.lengths[1], segment.kv_start) if is_of_keys else (segment.lengths[0], segment.q_start)
    if held is None:
        return range(length)
    return [row - first for row in held.rows if 0 <= row - first < length]


def score_elements(w: Workload) -> int:
    """Count the scores of a workload: the elements that an attention which writes out its scores would hold."""
    return w.heads * sum(q_len * kv_len for q_len, kv_len in sequence_lengths(w))


def always_sampled(w: Workload, heads: int, length: int) -> set[int]:
    """Return the rows, or the keys, of a long workload that are computed exactly each time."""
    far = far_positions(w, heads, length, w.head_dim)
    return set(sampled_positions(length, _SAMPLED_ROWS, far))


def with_drawn_rows(reference: Reference, positions: tuple[int, ...] = ()) -> Reference:
    """Return the reference of a long workload with rows that are drawn now, when a kernel has returned; else as it is.

    positions: rows that are there in any case. Keys are drawn with the reference: a key's gradient takes all rows.
    """
    known, w = reference.rows, reference.workload
    if known is None:
        return reference
    drawn = drawn_positions(w.q_len).union(p for p in positions if p < w.q_len).difference(known.tolist())
    if not drawn:
        return reference
    rows, backward = torch.tensor(sorted(drawn)), "dq" in reference.tensors
    other = compute_reference(reference.inputs, reference.precision, backward, rows, extra=reference.extra)
    at, order = torch.cat([known, rows.to(known.device)]).sort()

    def joined(name: str, one: Expected) -> Expected:
        more = other.tensors[name]
        value, tau = torch.cat([one.value, more.value], 2), torch.cat([one.tau, more.tau], 2)
        return Expected(value[:, :, order], tau[:, :, order], at)

    made = copy.copy(reference)
    made.tensors = {name: joined(name, one) if one.rows is known else one for name, one in reference.tensors.items()}
    return made


def _allocate(
    reference: Reference,
    w: Workload,
    device: torch.device,
    rows: torch.Tensor | None,
    keys: torch.Tensor | None,
    backward: bool,
    extra: tuple[str, ...],
) -> None:
    batch = 1 if w.is_packed else w.batch
    q_total = sum(w.q_lens) if w.q_lens else w.q_len
    kv_total = sum(w.kv_lens) if w.q_lens and w.kv_lens else w.kv_len
    gradients = ("dq", "dk", "dv") if backward else ()
    for name in ("out", "lse", *gradients, *(one for one in ("max", "weights") if one in extra)):
        heads, length, at = (w.kv_heads, kv_total, keys) if name in ("dk", "dv") else (w.heads, q_total, rows)
        shape = (batch, heads, length if at is None else len(at), *own_dims(name, w, w.kv_len))
        reference.tensors[name] = _zeros(shape, at, device)


def segments_of(
    inputs: Inputs, w: Workload, device: torch.device, rows: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> Iterator[Segment]:
    """Yield the sequences of equal length: one segment, or as many as there are packed sequences."""
    k, v = inputs.gathered()
    if w.packs_keys:
        k, v = (heads_first(t, w) for t in (k, v))
    q, k, v, dout = (t.to(device) for t in (heads_first(inputs.q, w), k, v, heads_first(inputs.dout, w)))
    q, dout = grouped(q, w), grouped(dout, w)
    if w.is_packed and not w.packs_keys:
        yield from _segments_of_pages(_with_workload(inputs, w), q, k, v, dout)
        return
    if not w.is_packed:
        mask_mod = Inputs.mask_mod(_with_workload(inputs, w))
        yield Segment(w, inputs, q, k, v, dout, mask_mod, rows=rows, keys=keys)
        return
    q_start = kv_start = 0
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        q_part, kv_part = slice(q_start, q_start + q_len), slice(kv_start, kv_start + kv_len)
        yield Segment(
            w,
            inputs,
            q=q[:, :, q_part],
            k=k[:, :, kv_part],
            v=v[:, :, kv_part],
            dout=dout[:, :, q_part],
            mask_mod=w.plain_mask.bind(Sequences(1, w.heads, q_len, kv_len, device)) if w.plain_mask else None,
            first_batch=batch,
            q_start=q_start,
            kv_start=kv_start,
        )
        q_start, kv_start = q_start + q_len, kv_start + kv_len


def _segments_of_pages(
    inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Iterator[Segment]:
    """Yield packed queries (1, heads, tokens, d), each with its own batch entry of k and v, whose tails lengths hide."""
    w, start = inputs.workload, 0
    for batch, (q_len, _) in enumerate(sequence_lengths(w)):
        rows, own = slice(start, start + q_len), slice(batch, batch + 1)
        mask_mod = inputs.mask_mod(q_len)
        yield Segment(
            *(w, inputs, q[:, :, rows], k[own], v[own], dout[:, :, rows], mask_mod), first_batch=batch, q_start=start
        )
        start += q_len


def _with_workload(inputs: Inputs, workload: Workload) -> Inputs:
    return inputs if workload is inputs.workload else dataclasses.replace(inputs, workload=workload)
