"""Other workloads that say something about this one: an option changed, the same attention said otherwise, other shapes."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pytest_attn.invariants.invariant import BACKEND, SHORT, Need, NotApplicable, Probe, invariant, prefixed
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Causal, Window
from pytest_attn.workloads.workload import Workload, repeated, sequence_lengths


@dataclass(frozen=True)
class Variation:
    """Inputs of another workload, and what makes it other, in words."""

    words: str
    inputs: Inputs


def replaced(inputs: Inputs, words: str, **changes: object) -> Variation:
    """Return the same tensors under a workload with fields changed."""
    return Variation(words, replace(inputs, workload=inputs.workload.replace(**changes)))


#: the most workloads of one invariant that the thorough set asks for
_THOROUGHLY = 12


def _derived(probe: Probe, ways: Iterable[Callable[[Inputs], Iterator[Variation]]], at_most: int) -> str:
    """Hold a backend to exact attention on other workloads that the inputs give rise to, the most telling first."""
    variations = (variation for way in ways for variation in way(probe.inputs))
    return judge_variations(probe, variations, _THOROUGHLY if probe.thorough else at_most)


def judge_variations(probe: Probe, variations: Iterable[Variation], at_most: int) -> str:
    """Hold the kernel to exact attention on the first variations that the backend takes; return evidence.

    A kernel that is compiled anew for each is asked about one, unless the thorough set is asked for. Raises NotApplicable
    where the backend takes none.
    """
    tried = 0
    if probe.compiles_options and not probe.thorough:
        at_most = 1
    for variation in variations:
        other = probe.on(variation.inputs)
        if other is None:
            continue
        if tried == at_most:
            break
        tried += 1
        if misfit := other.misfit(other.base):
            return f"{variation.words}: {misfit}"
    if not tried:
        raise NotApplicable("the backend takes no workload that differs in this way")
    return ""


# -- an option changed -------------------------------------------------------------------------------------------------------


def _lengths(inputs: Inputs) -> Iterator[Variation]:
    """Rotate the lengths of padded, packed or paged sequences, which changes no shape."""
    w = inputs.workload
    if w.kv_lens is None or len(set(zip(w.q_lens or w.kv_lens, w.kv_lens, strict=True))) == 1:
        return
    kv_lens, q_lens = (*w.kv_lens[1:], w.kv_lens[0]), w.q_lens and (*w.q_lens[1:], w.q_lens[0])

    def cumulated(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor((0, *lengths)).cumsum(0).to(inputs.device, torch.int32)

    changes: dict[str, object] = {"workload": w.replace(kv_lens=kv_lens, q_lens=q_lens)}
    if inputs.kv_lens is not None:
        changes["kv_lens"] = torch.tensor(kv_lens, dtype=torch.int32, device=inputs.device)
    if q_lens is not None:
        changes["cu_seqlens"] = cumulated(q_lens)
    if inputs.cu_seqlens_kv is not None:
        changes["cu_seqlens_kv"] = cumulated(kv_lens)
    yield Variation(f"key lengths rotated to {kv_lens}", dataclasses.replace(inputs, **changes))  # type: ignore[arg-type]


def _pages(inputs: Inputs) -> Iterator[Variation]:
    pages = inputs.workload.kv_pages
    if pages is not None and inputs.page_table is not None and not pages.shared:  # else new keys would be put into them
        yield Variation("the page table turned round", dataclasses.replace(inputs, page_table=inputs.page_table.flip(0, 1)))


def _mask(inputs: Inputs) -> Iterator[Variation]:
    w = inputs.workload
    mask = w.plain_mask
    if mask is None:
        yield replaced(inputs, "causal", mask="causal-bottom-right")
        return
    if (other := mask.another()) is not None:
        words, changed = other
        yield replaced(inputs, words, mask=changed)
    yield replaced(inputs, "no mask", mask=None)
    if mask.band is not None and mask.is_causal:
        yield replaced(inputs, "a causal window of 8 keys", mask=Window(7, 0))


def _scale(inputs: Inputs) -> Iterator[Variation]:
    factor = 1.7  # no power of two
    yield replaced(inputs, f"a scale {factor} times as large", scale=factor * inputs.workload.softmax_scale)


def _softcap(inputs: Inputs) -> Iterator[Variation]:
    """Cap scores where it shows, then not at all."""
    if inputs.workload.softcap is not None:
        yield replaced(inputs, "a softcap of 1.5", softcap=1.5)
        yield replaced(inputs, "no softcap", softcap=None)


def _left_out(inputs: Inputs) -> Iterator[Variation]:
    w = inputs.workload
    if w.sinks:
        yield replaced(dataclasses.replace(inputs, sinks=None), "no sinks", sinks=False)
    if w.bias:
        yield replaced(dataclasses.replace(inputs, bias=None), "no bias", bias=None)
    if w.alibi:
        yield replaced(dataclasses.replace(inputs, alibi_slopes=None), "no ALiBi", alibi=False)


def _at_once(inputs: Inputs) -> Iterator[Variation]:
    """Change all that can be in one workload, which is compiled once."""
    words = []
    for way in (_lengths, _pages, _softcap, _mask, _scale):
        if variation := next(way(inputs), None):
            words.append(variation.words)
            inputs = variation.inputs
    yield Variation(", ".join(words), inputs)


@invariant(
    "options",
    "another scale, mask, softcap, length, page table, bias, sink or slope changes the result, which is right",
    calls=3,
    needs=(BACKEND, SHORT),
)
def options(probe: Probe) -> str:
    """Each option makes the difference that it should, whatever was asked before.

    Exact attention with the option changed lies far from that without, so who is within the budget of one is not of the other.
    """
    at_once = (_at_once,) if probe.compiles_options and not probe.thorough else ()  # one is asked: compiled anew for each
    return _derived(probe, (*at_once, _lengths, _pages, _softcap, _mask, _scale, _left_out), options.calls)


# -- the same attention said otherwise ---------------------------------------------------------------------------------------


def _alone(inputs: Inputs) -> Iterator[Variation]:
    """One sequence of a packed, padded or paged batch, dense and without padding: the shortest, then the last."""
    w = inputs.workload
    if w.kv_lens is None or w.bias or inputs.descales is not None or w.band is None:
        return
    lengths = sequence_lengths(w)
    whole = [batch for batch, (q_len, kv_len) in enumerate(lengths) if q_len and kv_len]
    shortest = min(whole, key=lambda batch: lengths[batch][1])
    for batch in dict.fromkeys((shortest, whole[-1])):
        yield Variation(f"sequence {batch} alone, without padding, packing and pages", one_sequence(inputs, batch))


def one_sequence(inputs: Inputs, batch: int) -> Inputs:
    """Return one sequence as a dense batch of 1."""
    w = inputs.workload
    q_len, kv_len = sequence_lengths(w)[batch]
    k, v = inputs.gathered()

    def taken(tensor: Tensor, lengths: tuple[int, ...] | None, length: int) -> Tensor:
        if not w.is_packed or tensor.dim() == 4:  # keys out of pages lie side by side
            return tensor[batch : batch + 1, :, :length].contiguous()
        start = sum((lengths or ())[:batch])
        return tensor[start : start + length].transpose(0, 1)[None].contiguous()

    changed = w.replace(batch=1, q_len=q_len, kv_len=kv_len, q_lens=None, kv_lens=None, kv_pages=None)
    bias = inputs.bias[batch : batch + 1] if inputs.bias is not None and "b" in (w.bias or "") else inputs.bias
    slopes = inputs.alibi_slopes
    return dataclasses.replace(
        inputs,
        workload=changed,
        q=taken(inputs.q, w.q_lens, q_len),
        k=taken(k, w.kv_lens, kv_len),
        v=taken(v, w.kv_lens, kv_len),
        dout=taken(inputs.dout, w.q_lens, q_len),
        bias=bias,
        alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[batch : batch + 1],
        **dict.fromkeys(("cu_seqlens", "cu_seqlens_kv", "kv_lens", "page_table")),  # type: ignore[arg-type]
    )


def _pages_elsewhere(inputs: Inputs) -> Iterator[Variation]:
    if inputs.page_table is None or len(inputs.k) == 1:
        return
    pages, places = len(inputs.k), inputs.page_table
    k, v = (pool.roll(1, 0) for pool in (inputs.k, inputs.v))
    moved = dataclasses.replace(inputs, k=k, v=v, page_table=(places + 1) % pages)
    yield Variation("every page at the next place of the pool", moved)


def _mask_written_otherwise(inputs: Inputs) -> Iterator[Variation]:
    """A causal mask as a window, a window as a window of more keys than there are, a mask as a function."""
    w = inputs.workload
    mask = w.plain_mask
    if mask is None and not w.is_packed:
        yield replaced(inputs, "no mask as a window of all keys", mask=Window(w.q_len + w.kv_len, w.q_len + w.kv_len))
    if mask is None or mask.band is None or w.kv_lens is not None or not _ends_together(w):
        return
    if mask.is_causal:
        yield replaced(inputs, "causal as a window without a left end", mask=Window(None, 0))
    words, (left, right, _) = "causal" if mask.is_causal else "a window", mask.band
    yield replaced(inputs, f"{words} as a mask function", mask=_window(left, right, w.kv_len - w.q_len))


def _window(left: int | None, right: int | None, offset: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at = q_idx + offset
        after = kv_idx >= 0 if left is None else kv_idx >= at - left
        return after if right is None else after & (kv_idx <= at + right)

    return seen


def _heads_repeated(inputs: Inputs) -> Iterator[Variation]:
    w = inputs.workload
    if w.group == 1 or inputs.descales is not None:
        return
    axis = 2 if w.kv_pages else 1
    k, v = (repeated(t, w, axis) for t in (inputs.k, inputs.v))
    changed = w.replace(kv_heads=w.heads)
    yield Variation("key heads repeated for every query head", dataclasses.replace(inputs, workload=changed, k=k, v=v))


def _last_row(inputs: Inputs) -> Iterator[Variation]:
    w = inputs.workload
    is_one = w.is_packed or w.q_len == 1
    if is_one or not _ends_together(w) or w.score_mod is not None or w.bias or inputs.descales is not None:
        return
    mask = Causal(bottom_right=True) if w.band is not None and w.band.top_left else w.mask
    q, dout = (t[:, :, -1:].contiguous() for t in (inputs.q, inputs.dout))
    changed = w.replace(q_len=1, kv_len=w.kv_len, mask=mask)
    yield Variation("the last row alone, as in decoding", dataclasses.replace(inputs, workload=changed, q=q, dout=dout))


def _ends_together(w: Workload) -> bool:
    """Return whether the mask is a band, or none, whose last row stands at the last key."""
    return w.band is not None and (not w.band.top_left or (w.q_len == w.kv_len and w.kv_lens is None))


@invariant(
    "equivalence",
    "the same attention, expressed in another way, is right as well: masks, sequences, pages, groups, decoding",
    calls=2,
    needs=(BACKEND, SHORT),
)
def equivalence(probe: Probe) -> str:
    """A mask written as another, sequences one by one, keys out of their pages, heads repeated, the last row alone."""
    ways = (_alone, _pages_elsewhere, _heads_repeated, _last_row, _mask_written_otherwise)
    return _derived(probe, ways, equivalence.calls)


@invariant(
    "batch",
    "a batch entry gives the same result alone",
    calls=1,
    needs=(
        BACKEND,
        Need(lambda probe: probe.workload.batch > 1, "a batch of 1"),
        Need(lambda probe: probe.workload.kv_lens is None, "sequences of their own lengths are run under equivalence"),
        Need(lambda probe: not probe.workload.is_quantized, "descales belong to the entries of the whole batch"),
        Need(
            lambda probe: probe.workload.has_positional_mask and probe.workload.score_mod is None,
            "a function of the mask or score may depend on the entry's number",
        ),
        SHORT,
    ),
)
def batch(probe: Probe) -> str:
    """The last entry of a batch, alone, gives what it gave among the others."""
    if probe.is_compiled and not probe.thorough:
        raise NotApplicable("a batch of 1 would be compiled anew; the check compares each entry with exact attention")
    last = probe.workload.batch - 1
    alone = probe.on(one_sequence(probe.inputs, last))
    if alone is None:
        raise NotApplicable("the backend refuses a batch of 1")
    among = {name: t[last:] for name, t in probe.base.items()}
    changed = alone.change(alone.base, among)
    return prefixed(f"entry {last} alone, against the same in its batch", changed)


#: (q_len, kv_len): one row, one key, beside tiles of 32, 64 and 128, and lengths that differ either way
_LENGTHS = ((1, 1), (1, 65), (63, 64), (64, 65), (127, 129), (129, 257), (257, 33), (33, 1), (160, 160))
_HEAD_DIMS = (8, 16, 40, 80, 96, 128, 192)
_HEADS = ((1, 1), (3, 1), (5, 5), (6, 2), (7, 1))


def _fits_any_shape(probe: Probe) -> bool:
    w = probe.workload
    return not w.v_in_k and not w.is_packed and w.kv_lens is None and w.band is not None


@invariant(
    "shapes",
    "the workload's mask and options are right with other lengths, head dimensions and groups",
    calls=len(_LENGTHS) + len(_HEAD_DIMS) + len(_HEADS),
    needs=(BACKEND, Need(_fits_any_shape, "the mask or the lengths belong to this shape")),
    thorough=True,
)
def shapes(probe: Probe) -> str:
    """The same attention in other shapes is right, too."""
    w, seed = probe.workload, probe.spec.seed
    sizes: list[dict[str, object]] = [{"q_len": q_len, "kv_len": kv_len} for q_len, kv_len in _LENGTHS]
    sizes += [{"head_dim": head_dim} for head_dim in _HEAD_DIMS]
    sizes += [{"heads": heads, "kv_heads": kv_heads} for heads, kv_heads in _HEADS]
    words = (", ".join(f"{field} {size}" for field, size in shape.items()) for shape in sizes)
    drawn = (draw_inputs(w.replace(**shape), "structured", seed, probe.device) for shape in sizes)
    return judge_variations(probe, map(Variation, words, drawn), len(sizes))
