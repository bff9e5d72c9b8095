"""`attn_model.check_invariants`: what must hold of a model, mostly of one of tokens, whatever its weights.

It is compared with itself.

Where the same sums run over the same shapes, rows must be bit-equal; where shapes differ, a row may move as far as correct
rounding does (`TokenModel.scatter`).
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pytest_attn.backends.contexts import unlimited_recompiles
from pytest_attn.guests.models.siblings import odd_scales
from pytest_attn.guests.models.step import untouched
from pytest_attn.guests.models.token_model import TokenModel
from pytest_attn.invariants.all_invariants import Names, chosen_names
from pytest_attn.invariants.invariant import NotApplicable
from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.reports.lines import count, some
from pytest_attn.workloads.workload import Workload

#: what one of the model's own forward passes raises where it does not support what it is asked
_RAISED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)

#: models of transformers that hash, pool or approximate over all tokens, padding too, or find padding by their own token
_PADDED_OTHERWISE = {"cpmant", "funnel", "mra", "nystromformer", "reformer", "yoso"}

# -- what a configuration says of each layer ---------------------------------------------------------------------------------


def layer_windows(of: TokenModel) -> list[int | None]:
    """Return the window of each layer in tokens, the token itself included; None of a layer that sees all before it.

    Empty where the configuration knows layers of other kinds, whose windows it need not name.
    """
    kinds = of.says("layer_types") or ["sliding_attention"] * int(of.says("num_hidden_layers") or 0)
    if not set(kinds) <= {"sliding_attention", "full_attention"}:
        return []
    return [of.window if kind == "sliding_attention" else None for kind in kinds]


def reach(of: TokenModel) -> int | None:
    """Return how many tokens back the last row of the last layer sees through all windows; None where a layer sees all."""
    windows = layer_windows(of)
    return None if not windows or None in windows else sum(window - 1 for window in windows if window is not None)


def has_windows(of: TokenModel) -> bool:
    """Whether it is sure that layers have the window of the configuration: it names them, or the model asks for one."""
    if of.window is None:
        return False
    asks = any(w.mask is not None and w.mask.band is not None and w.mask.band.left is not None for _, w in of.asked.calls)
    return bool(of.says("layer_types")) or asks or any("sliding" in name for name in of.asked.masks)


def _layer_of(module: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return None if found is None else int(found[1])


def wrong_masks(of: TokenModel) -> str:
    """Say which layer asks for another mask than the configuration names; "" where none does, or none is a causal window's."""
    windows, tokens = layer_windows(of), of.ids.shape[1]
    for module, workload in of.asked.calls:
        layer, mask = _layer_of(module), workload.mask
        if layer is None or layer >= len(windows) or mask is None or mask.band is None:
            continue
        window = windows[layer]
        wanted = "Causal" if window is None or window >= tokens else f"a window of {window}"
        asked = "Causal" if mask.band.left is None else f"a window of {mask.band.left + 1}"
        if mask.band.left is not None and mask.band.right not in (0, None):
            continue  # a window to both sides, which the configuration counts in another way
        if asked != wanted:
            return f"{module} asks for {asked} tokens".replace("Causal tokens", "all tokens before") + (
                f"; the configuration says {'all' if wanted == 'Causal' else wanted}"
            )
    return ""


def wrong_scores(of: TokenModel) -> str:
    """Say which layer asks for what it should not; "" where none does.

    That is another soft-cap than the configuration names, no sinks though it has some, another scale than layers that are
    built like it, or one that a model of transformers has from nowhere.
    """
    softcap = of.says("attn_logit_softcapping")
    parts = dict(of.model.named_modules())
    alike: dict[tuple[Any, ...], list[tuple[str, Workload]]] = {}
    for module, workload in of.asked.calls:
        if softcap and workload.softcap != softcap:
            return f"{module} asks for {_or_none('a soft-cap of', workload.softcap)}; the configuration says {softcap:g}"
        part = parts.get(module)
        if isinstance(getattr(part, "sinks", None), torch.Tensor) and not workload.sinks:
            return f"{module} asks for no sinks, and has some"
        alike.setdefault((type(part), workload.head_dim), []).append((module, workload))
    if of.says("scale_attn_by_inverse_layer_idx"):
        return ""
    for calls in alike.values():
        odd = odd_scales([workload for _, workload in calls], parts.get(calls[0][0]))
        for at, (scale, sibling) in odd.items():
            (module, workload), (other, _) = calls[at], calls[sibling]
            asked = f"{module} asks for a scale of {workload.softmax_scale:.6g}"
            return f"{asked}, and {other}, which is built like it, for {scale:.6g}"
        module, workload = calls[0]
        if len({w.softmax_scale for _, w in calls}) == 1 and not _is_named(of, parts.get(module), workload):
            asked = f"{module} asks for a scale of {workload.softmax_scale:.6g}"
            return f"{asked}, not 1 / sqrt({workload.head_dim}), and its configuration names none like it"
    return ""


def _is_named(of: TokenModel, module: Any, workload: Workload) -> bool:
    """Whether a scale is usual, or of a configuration; True of what transformers does not define."""
    rope, scale = str(of.says("rope_parameters") or of.says("rope_scaling") or ""), workload.softmax_scale
    if not type(getattr(of.model, "_orig_mod", of.model)).__module__.startswith("transformers.") or "mscale" in rope:
        return True
    says = {**vars(of.config), **vars(getattr(module, "config", None) or of.config)}
    positive = {name: value for name, value in says.items() if isinstance(value, int | float) and value > 0}
    sizes, scales = ([v for n, v in positive.items() if any(part in n for part in parts)] for parts in (_OF_SIZES, _OF_SCALES))
    named = [1.0, *(v**-0.5 for v in (workload.head_dim, *sizes, *scales)), *scales, *(1 / v for v in scales)]
    return any(abs(scale / one - 1) < 1e-4 for one in named)


#: parts of the names of numbers of a configuration: scores may be divided by the root of one, or else multiplied with it
_OF_SIZES, _OF_SCALES = ("dim", "channels", "d_kv"), ("scal", "mult", "temperature")


def _or_none(what: str, value: float | None) -> str:
    return f"no {what.rpartition(' ')[0].removeprefix('a ')}" if value is None else f"{what} {value:g}"


# -- the invariants ----------------------------------------------------------------------------------------------------------


def future(of: TokenModel) -> str:
    """Rows before a token that changes stay as they are."""
    if of.is_named_causal is False:
        raise NotApplicable("the model is not causal")
    if of.is_named_causal is None and of.seeing:
        if any("bidirectional" in name for name in of.asked.masks):
            raise NotApplicable("the model makes masks to both sides")
        why = "nothing says that the model is causal"
        raise NotApplicable(f"not run: {why}, and {of.seeing}; say causal=True where that is wrong, else causal=False")
    return of.seeing


def receptive_field(of: TokenModel) -> str:
    """Each layer asks for what the configuration and layers like it ask for, and rows beyond all windows are bit-equal."""
    is_windowed = of.has_tokens and has_windows(of)
    if wrong := wrong_scores(of) or (is_windowed and wrong_masks(of)):
        return wrong
    if not is_windowed and len(of.asked.calls) < 2:
        raise NotApplicable("its configuration names no window, and fewer than two of its attention calls are seen")
    field, tokens = reach(of) if is_windowed else None, of.ids.shape[1]
    if is_windowed and of.window is not None and tokens <= of.window:
        of.note = f"{tokens} tokens lie within a window of {of.window}; give longer sequences to see its edge"
    if field is None or not of.is_causal or tokens < field + 2:
        return ""
    what = f"a row sees token 0, and the windows of all layers reach back {field} tokens only"
    return of.moved(of.rows_with_another_token(0), slice(field + 1, None), what)


def padding(of: TokenModel, side: str) -> str:
    """A sequence that is padded gives the rows that it gives without; on the left, its next tokens do, too."""
    if not of.takes("attention_mask"):
        raise NotApplicable("its forward pass takes no attention_mask")
    is_left = side == "left"
    if is_left and not of.takes("position_ids"):
        raise NotApplicable("its forward pass takes no position_ids")
    if of.says("model_type") in _PADDED_OTHERWISE:
        raise NotApplicable("its rows depend on padding by design")
    padded = _padded(of, is_left)
    if is_left:
        evidence = _decoded_after(of, padded)
    elif evidence := _after_padded_source(of):
        pass
    else:
        rows = of.rows_of(padded.ids, padded.places, attention_mask=padded.real.long())
        evidence = of.far_rows(rows.where(padded.real[..., None], 0), padded.expected, padded.what)
    if evidence and of.mixes_otherwise:
        raise NotApplicable(f"not run: it mixes tokens by more than attention, which may see padding ({evidence})")
    return evidence


#: tokens of padding, and by how many the last of several sequences is shorter
_PADDING, _SHORTER = 7, 3


class _Padded(NamedTuple):
    """A batch with padding, (batch, width).

    ids, places: as of `rows_of`. real: which are tokens of the batch. expected: their rows without padding. what: where it is.
    """

    ids: torch.Tensor
    places: torch.Tensor
    real: torch.Tensor
    expected: torch.Tensor
    what: str


def _padded(of: TokenModel, is_left: bool) -> _Padded:
    (batch, tokens), extra = of.ids.shape, _PADDING
    lengths = [tokens] * batch
    told = {"position_ids": torch.arange(tokens, device=of.ids.device).expand_as(of.ids)} if is_left else {}
    rows = list(of.rows_of(of.ids, of.places, **told) if is_left else of.rows)
    if batch > 1:
        lengths[-1] = short = tokens - _SHORTER
        told = {name: positions[-1:, :short] for name, positions in told.items()}
        rows[-1] = of.rows_of(of.ids[-1:, :short], of.places[-1:, :short], **told)[0]
    ids = (
        of.ids[:, :1].expand(-1, tokens + extra) if of.pad_id is None else of.ids.new_full((batch, tokens + extra), of.pad_id)
    )
    ids, places = ids.clone(), of.places.new_full(ids.shape, -1)
    real, expected = torch.zeros_like(ids, dtype=torch.bool), rows[0].new_zeros(*ids.shape, rows[0].shape[-1])
    for row, length in enumerate(lengths):
        here = row, slice(tokens + extra - length, None) if is_left else slice(length)
        ids[here], places[here], real[here] = of.ids[row, :length], of.places[row, :length], True
        expected[here] = rows[row]
    more = f" or {extra + _SHORTER}" if batch > 1 else ""
    return _Padded(
        ids, places, real, expected, f"with {extra}{more} tokens of padding on the {'left' if is_left else 'right'}"
    )


def _decoded_after(of: TokenModel, padded: _Padded) -> str:
    """Say how rows differ after padding on the left, and those of the next tokens through a cache, where there is one."""
    mask, width = padded.real.long(), padded.ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def far(rows: torch.Tensor, start: int, end: int, what: str) -> str:
        real = padded.real[:, start:end, None]
        return of.far_rows(rows.where(real, 0), padded.expected[:, start:end], what, start)

    rows = of.rows_of(padded.ids, padded.places, attention_mask=mask, position_ids=positions)
    if evidence := far(rows, 0, width, padded.what):
        return evidence
    if not (of.is_causal and of.cache_name) or _cuts_unasked(of):
        return ""
    cache, middle = None, _PADDING + of.ids.shape[1] // 2
    for start, end in ((0, middle), *((step, step + 1) for step in range(middle, middle + 3))):
        told = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        try:
            rows, cache = _cached(of, cache, padded.ids[:, start:end], padded.places[:, start:end], **told)
        except _RAISED as error:
            of.note = f"what follows padding is not decoded: the model raises {_in_a_line(error)}"
            return ""
        if cache is None:
            return ""
        if evidence := far(rows, start, end, f"{padded.what}, decoding"):
            return evidence
    return ""


def _after_padded_source(of: TokenModel) -> str:
    """Say how rows of a decoder differ where its encoder is given padding, through a cache, too; "" for not at all."""
    padded = of.with_padded_source
    if padded is None:
        return ""
    what = "with padding on the right of what the encoder is given"
    if evidence := of.far_rows(padded.rows_of(of.ids, of.places), of.rows, what):
        return evidence
    evidence = _decoded(padded, "dynamic") if of.is_causal and of.cache_name else ""
    return evidence and f"{evidence}, {what}"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _cuts_unasked(of: TokenModel) -> bool:
    """Whether its caches cut keys at a window that no layer is sure to have."""
    return of.window is not None and not has_windows(of)


def packed(of: TokenModel) -> str:
    """Two documents in one row, told apart by position_ids, give what each gives alone."""
    if not (of.is_causal and of.takes("position_ids") and of.asked.masks):
        raise NotApplicable("it is not a causal model of transformers that takes position_ids")
    if not of.asked.tells_documents:
        raise NotApplicable("it makes its masks without position_ids, so documents of one row are not told apart")
    if of.mixes_otherwise:
        raise NotApplicable("it mixes tokens by more than attention, which position_ids do not tell apart")
    ids, places = of.ids[:1], of.places[:1]  # packing is of batch 1 where kernels do it
    length = ids.shape[1] // 2
    documents = {"first": slice(0, length), "second": slice(length, None)}
    positions = torch.cat([torch.arange(len(places[0, part]), device=ids.device) for part in documents.values()])
    for name, part in documents.items():
        alone, known = of.part(part), torch.full_like(places, -1)
        known[:, part] = alone.places
        found = alone.rows_of(ids, known, position_ids=positions[None])[:, part]
        if evidence := alone.far_rows(found, alone.rows, f"the {name} of two packed documents", part.start):
            return evidence
    return ""


def decoding(of: TokenModel, kind: str) -> str:
    """Prefill, then one token after the other through a cache, gives the rows of the whole."""
    if not (of.is_causal and of.cache_name):
        raise NotApplicable("it is not a causal model of transformers that takes a cache")
    if of.is_decoder and kind != "dynamic":
        raise NotApplicable("a decoder beside an encoder has a cache of its own kind")
    if kind == "sliding" and of.window is None:
        raise NotApplicable("its configuration names no window")
    if kind != "dynamic" and _cuts_unasked(of):
        raise NotApplicable("its configuration names a window, and no layer asks for one")
    if kind == "static" and not _supports_static(of):
        raise NotApplicable("its class does not say that it supports a static cache")
    try:
        evidence = _decoded(of, kind)
    except _RAISED as error:
        raise NotApplicable(f"not run: with a {kind} cache the model raises {_in_a_line(error)}") from error
    if evidence and of.unknown_kinds:
        raise NotApplicable(f"not run: {some(of.unknown_kinds)} may choose keys otherwise with a cache ({evidence})")
    return evidence


def _supports_static(of: TokenModel) -> bool:
    model: Any = getattr(of.model, "_orig_mod", of.model)
    return bool(getattr(model, "_supports_static_cache", getattr(model, "_can_compile_fullgraph", True)))


def _decoded(of: TokenModel, kind: str) -> str:
    """Say how rows through a cache differ, "" for not at all."""
    transformers: Any = importlib.import_module("transformers")
    tokens = of.ids.shape[1]
    middle = 1 if of.is_decoder else tokens // 2  # beside an encoder it begins with one token
    cache = None  # the model's own
    if kind == "static":
        cache = transformers.StaticCache(config=of.config, max_cache_len=tokens + 3)
    elif kind == "dynamic" and of.window is not None and not of.mixes_otherwise:
        cache = transformers.DynamicCache()  # that keeps all
    steps = [(0, middle, f"prefill with a {kind} cache")]
    if not (of.mixes_otherwise or of.is_decoder):
        steps.append((middle, middle + 3, f"three tokens at once with a {kind} cache"))
    steps += [(at, at + 1, f"decoding with a {kind} cache") for at in range(steps[-1][1], tokens)]
    positions = torch.arange(tokens, device=of.ids.device).expand_as(of.ids)
    told: dict[str, torch.Tensor] = {}
    for start, end, what in steps:
        part, places, before = of.ids[:, start:end], of.places[:, start:end], None
        if start == middle and of.mixes_otherwise and of.takes("position_ids"):
            before = copy.deepcopy(cache)
        if told:
            told = {"position_ids": positions[:, start:end]}
        rows, cache = _cached(of, cache, part, places, **told)
        if cache is None:
            raise NotApplicable("it returns no cache")
        evidence = of.far_rows(rows, of.rows[:, start:end], what, start)
        if evidence and before is not None:  # some hybrids count positions from 0 in each call, and leave it to `generate`
            from_0, _ = _cached(of, copy.deepcopy(before), part, places, position_ids=positions[:, :1])
            told = {"position_ids": positions[:, start:end]}
            if not of.far_rows(rows, from_0, what):
                of.note = "it counts positions from 0 in each call: give position_ids where it decodes"
                rows, cache = _cached(of, before, part, places, **told)
                evidence = of.far_rows(rows, of.rows[:, start:end], what, start)
        if evidence:
            return evidence
    return ""


def _cached(of: TokenModel, cache: Any, ids: torch.Tensor, places: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
    """Run some tokens through a cache, None for the one that the model makes itself; return rows and cache."""
    given = {} if cache is None else {of.cache_name: cache}
    rows, returned = of.run(ids, places, use_cache=True, **given, **more)
    return rows, cache if cache is not None else getattr(returned, of.cache_name, None)


#: how much later all positions begin, and of how many tokens: far from 0 the rounding of angles in float32 counts for more
_SHIFT, _SHIFTED = 7, 24
_ABSOLUTE = re.compile(r"pos|wpe").search


def shifted(of: TokenModel) -> str:
    """Rotation tells how far tokens are apart, so positions that all begin later give the same rows."""
    if not (of.takes("position_ids") and of.asked.masks and not of.mixes_otherwise):
        raise NotApplicable("it is not a model of transformers that takes position_ids")
    ran = {id(part) for part in of.asked.parts}
    ran_parts = [(name, part) for name, part in of.model.named_modules() if id(part) in ran]
    if of.routing:
        raise NotApplicable("the rounding of its angles may decide between experts")
    if not any("rotary" in type(part).__name__.lower() for _, part in ran_parts):
        raise NotApplicable("it rotates nothing by position_ids")
    if any(isinstance(part, torch.nn.Embedding) and _ABSOLUTE(name.rpartition(".")[2]) for name, part in ran_parts):
        raise NotApplicable("it learns an embedding of each position")
    says = {**vars(of.config), **(of.says("rope_parameters") or {})}
    bounds = [v for name, v in says.items() if isinstance(v, int) and v > 0 and ("max_position" in name or "floor" in name)]
    if min(bounds, default=_SHIFT) < _SHIFT + _SHIFTED or any(kind in str(says.get("rope_parameters")) for kind in _BY_LENGTH):
        raise NotApplicable("its angles depend on the length, or its positions end early")
    ids, places = of.ids[:, :_SHIFTED], of.places[:, :_SHIFTED]
    at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first, later = (of.rows_of(ids, places, position_ids=at + start) for start in (0, _SHIFT))
    return of.far_rows(later, first, f"with positions that begin at {_SHIFT}")


#: kinds of rotary embeddings whose angles depend on how long a sequence is
_BY_LENGTH = ("dynamic", "longrope")


def batch_order(of: TokenModel) -> str:
    """A sequence gives the same rows wherever it stands in the batch, and alone."""
    if len(of.ids) < 2:
        raise NotApplicable("the batch has one sequence")
    if any(isinstance(part, _BatchNorm) and part.training for part in of.model.modules()):
        raise NotApplicable("it normalizes over the batch")
    reverse = of.rows_of(of.ids.flip(0), of.places.flip(0)).flip(0)
    if evidence := of.far_rows(reverse, of.rows, "with the batch in reverse"):
        return evidence
    return of.far_rows(of.rows_of(of.ids[-1:], of.places[-1:]), of.rows[-1:], "without the rest of the batch")


#: by name, in the order in which they are run
INVARIANTS: dict[str, Callable[[TokenModel], str]] = {
    "future": future,
    "field": receptive_field,
    "padded-left": partial(padding, side="left"),
    "padded-right": partial(padding, side="right"),
    "packed": packed,
    "dynamic": partial(decoding, kind="dynamic"),
    "static": partial(decoding, kind="static"),
    "sliding": partial(decoding, kind="sliding"),
    "shifted": shifted,
    "order": batch_order,
}


#: which hold of models that take no token ids, too
_OF_ANY = ("field", "order")


def judge_model_invariants(
    model: torch.nn.Module, batch: Any, only: Names = None, skip: Names = None, causal: bool | None = None
) -> InvariantReport:
    """Return what each invariant finds. The model is left as it was.

    batch: token ids (batch, tokens), or a mapping with input_ids; of a decoder with decoder_input_ids; of models that take no
    token ids what they take, whose first dimension is the batch. causal: whether a token may see only those before it; by
    default what the model says. Raises ValueError for an unknown name, DropoutError for a model that drops at random,
    TypeError where a batch is none of these.
    """
    names = chosen_names(only, skip, INVARIANTS, INVARIANTS)
    with unlimited_recompiles(), untouched(model):
        of = TokenModel(model, batch, causal)
        of.prepare()
        findings = [_finding(name, of) for name in names]
    quiet = [number for number, one in enumerate(findings) if one.outcome == "passed" and not one.evidence]
    if quiet:  # it is of all of them
        findings[quiet[-1]] = replace(findings[quiet[-1]], evidence=of.routing.note)
    what = f"{tuple(of.ids.shape)} tokens" if of.has_tokens else count(len(of.ids), "entry", "entries")
    return InvariantReport(what, type(model).__name__, tuple(findings))


def _finding(name: str, of: TokenModel) -> Finding:
    of.note = ""
    try:
        if not of.has_tokens and name not in _OF_ANY:
            raise NotApplicable("the batch has no token ids")
        if of.routing and name != "field" and (limit := _capacity(of)):
            raise NotApplicable(f"experts take so many tokens at most ({limit}), so that each token depends on the others")
        evidence = INVARIANTS[name](of)
    except NotApplicable as reason:
        return Finding(name, "not applicable", str(reason), 0)
    except _RAISED as error:
        if not of.has_more:
            raise
        return Finding(name, "not applicable", f"not run: the model raises {_in_a_line(error)}", 0)
    return Finding(name, "broken" if evidence else "passed", evidence or of.note, 1)


def _capacity(of: TokenModel) -> str:
    """Return the field of the configuration that bounds how many tokens an expert takes, "" for none."""
    return next((name for name, value in vars(of.config or object).items() if "capacity" in name and value), "")
