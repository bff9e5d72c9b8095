"""`attn_model.check_invariants`: what must hold of a model, mostly of one of tokens, whatever its weights.

It is compared with itself.

Where the same sums run over the same shapes, rows must be bit-equal; where shapes differ, a row may move as far as correct
rounding does (`TokenModel.scatter`).
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pytest_attn.backends.contexts import unlimited_recompiles
from pytest_attn.guests.models.calls.transformers_calls import may_hide_more
from pytest_attn.guests.models.siblings import built_alike, odd_one
from pytest_attn.guests.models.step import untouched
from pytest_attn.guests.models.token_model import TokenModel, TokenStep
from pytest_attn.invariants.all_invariants import Names, chosen_names
from pytest_attn.invariants.invariant import NotApplicable
from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.reports.lines import count, some
from pytest_attn.workloads.functions import type_name
from pytest_attn.workloads.workload import Workload

#: what one of the model's own forward passes raises where it does not support what it is asked
_RAISED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)

#: models of transformers that hash, pool or approximate over all tokens, padding too, or find padding by their own token
_PADDED_OTHERWISE = {"cpmant", "funnel", "mra", "nystromformer", "reformer", "yoso"}


def layer_windows(model: TokenModel) -> list[int | None]:
    """Return the window of each layer in tokens, the token itself included; None of a layer that sees all before it.

    Empty where the configuration knows layers of other kinds, whose windows it need not name.
    """
    kinds = model.says("layer_types") or ["sliding_attention"] * int(model.says("num_hidden_layers") or 0)
    if not set(kinds) <= {"sliding_attention", "full_attention"}:
        return []
    return [model.window if kind == "sliding_attention" else None for kind in kinds]


def reach(model: TokenModel) -> int | None:
    """Return how many tokens back the last row of the last layer sees through all windows; None where a layer sees all."""
    windows = layer_windows(model)
    return None if not windows or None in windows else sum(window - 1 for window in windows if window is not None)


def has_windows(model: TokenModel) -> bool:
    """Return whether it is sure that layers have the window of the configuration: it names them, or the model asks for one."""
    if model.window is None:
        return False
    masks = (call.workload.mask for call in model.requests.calls)
    asks = any(mask is not None and mask.band is not None and mask.band.left is not None for mask in masks)
    return bool(model.says("layer_types")) or asks or any("sliding" in name for name in model.requests.masks)


def wrong_masks(model: TokenModel) -> str:
    """Say which layer asks for another mask than the configuration names; "" where none does, or none is a causal window's."""
    windows, tokens = layer_windows(model), model.ids.shape[1]
    for call in model.requests.calls:
        layer, mask = re.search(r"(?:^|\.)(\d+)(?:\.|$)", call.module), call.workload.mask
        if layer is None or int(layer[1]) >= len(windows) or mask is None or mask.band is None:
            continue
        window = windows[int(layer[1])]
        wanted = "Causal" if window is None or window >= tokens else f"a window of {window}"
        if mask.band.left is None and may_hide_more(call.function):
            continue  # whether its function applies the window is seen by what rows depend on
        asked = "Causal" if mask.band.left is None else f"a window of {mask.band.left + 1}"
        if mask.band.left is not None and mask.band.right not in (0, None):
            continue  # a window to both sides, which the configuration counts in another way
        if asked != wanted:
            return f"{call.module} asks for {asked} tokens".replace("Causal tokens", "all tokens before") + (
                f"; the configuration says {'all' if wanted == 'Causal' else wanted}"
            )
    return ""


def wrong_scores(model: TokenModel) -> str:
    """Say which layer asks for what it should not; "" where none does.

    That is another soft-cap than the configuration names, no sinks though it has some, another scale or causal mask than
    layers that are built like it, or a scale that a model of transformers has from nowhere.
    """
    softcap, (calls, *_, tracker) = model.says("attn_logit_softcapping"), model.requests
    for call in calls:
        if softcap and call.workload.softcap != softcap:
            asked = "no soft-cap" if call.workload.softcap is None else f"a soft-cap of {call.workload.softcap:g}"
            return f"{call.module} asks for {asked}; the configuration says {softcap:g}"
        sinks = getattr(tracker.callers.get(call.module), "sinks", None)
        if isinstance(sinks, torch.Tensor) and not call.workload.sinks:
            return f"{call.module} asks for no sinks, and has some"
    if odd := odd_one(calls, tracker):
        return odd
    for alike in built_alike(calls, tracker):
        call, w = alike[0], alike[0].workload
        is_one = len({one.workload.softmax_scale for one in alike}) == 1
        if is_one and not (model.says("scale_attn_by_inverse_layer_idx") or _is_named(model, alike.modules[0], w)):
            said = f"its scale is {w.softmax_scale:.6g}, not 1 / sqrt({w.head_dim})"
            return f"{call.module}: {said}, and its configuration names none like it"
    return ""


def _is_named(model: TokenModel, module: Any, workload: Workload) -> bool:
    """Return whether a scale is usual, or of a configuration; True of what transformers does not define."""
    rope, scale = str(model.says("rope_parameters") or model.says("rope_scaling") or ""), workload.softmax_scale
    if not type(getattr(model.module, "_orig_mod", model.module)).__module__.startswith("transformers.") or "mscale" in rope:
        return True
    says = {**vars(model.config), **vars(getattr(module, "config", None) or model.config)}
    sizes, scales = (_numbers(says, parts) for parts in (_OF_SIZES, _OF_SCALES))
    named = [1.0, *(v**-0.5 for v in (workload.head_dim, *sizes, *scales)), *scales, *(1 / v for v in scales)]
    return any(abs(scale / one - 1) < 1e-4 for one in named)


def _numbers(says: Mapping[str, Any], parts: Sequence[str]) -> list[int | float]:
    """Return the positive numbers of a configuration whose names have one of these parts."""
    numbers = {name: value for name, value in says.items() if isinstance(value, int | float) and value > 0}
    return [value for name, value in numbers.items() if any(part in name for part in parts)]


#: parts of the names of numbers of a configuration: scores may be divided by the root of one, or else multiplied with it
_OF_SIZES, _OF_SCALES = ("dim", "channels", "d_kv"), ("scal", "mult", "temperature")


# -- the invariants ----------------------------------------------------------------------------------------------------------


def future(model: TokenModel) -> str:
    """Rows before a token that changes stay as they are."""
    if model.is_named_causal is False:
        raise NotApplicable("the model is not causal")
    if model.is_named_causal is None and model.seeing:
        if any("bidirectional" in name for name in model.requests.masks):
            raise NotApplicable("the model makes masks to both sides")
        why = "nothing says that the model is causal"
        raise NotApplicable(f"not run: {why}, and {model.seeing}; say causal=True where that is wrong, else causal=False")
    by_calls = "; all its calls are causal: say causal=False where the model is not" * model.is_causal_by_calls
    return model.seeing and f"{model.seeing}{by_calls}"


def receptive_field(model: TokenModel) -> str:
    """Each layer asks for what the configuration and layers like it ask for, and rows beyond all windows are bit-equal."""
    is_windowed = model.batch.has_tokens and has_windows(model)
    if wrong := wrong_scores(model) or (is_windowed and wrong_masks(model)):
        return wrong
    if not is_windowed and len(model.requests.calls) < 2:
        raise NotApplicable("its configuration names no window, and fewer than two of its attention calls are seen")
    field, tokens = reach(model) if is_windowed else None, model.ids.shape[1]
    if is_windowed and model.window is not None and tokens <= model.window:
        model.note = f"{tokens} tokens lie within a window of {model.window}; give longer sequences to see its edge"
    if field is None or not model.is_causal or tokens < field + 2:
        return ""
    what = f"a row sees token 0, and the windows of all layers reach back {field} tokens only"
    return model.moved(model.rows_with_another_token(0), slice(field + 1, None), what)


def padding(model: TokenModel, side: str) -> str:
    """A sequence that is padded gives the rows that it gives without; on the left, its next tokens do, too."""
    if not model.takes("attention_mask"):
        raise NotApplicable("its forward pass takes no attention_mask")
    is_left = side == "left"
    if is_left and not model.takes("position_ids"):
        raise NotApplicable("its forward pass takes no position_ids")
    if model.says("model_type") in _PADDED_OTHERWISE:
        raise NotApplicable("its rows depend on padding by design")
    padded = _padded(model, is_left)
    if is_left:
        evidence = _decoded_after(model, padded)
    elif evidence := _after_padded_source(model):
        pass
    else:
        rows = model.rows_of(padded.ids, padded.places, attention_mask=padded.real.long())
        evidence = model.far_rows(rows.where(padded.real[..., None], 0), padded.expected, padded.what)
    if evidence and model.mixes_otherwise:
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


def _padded(model: TokenModel, is_left: bool) -> _Padded:
    (batch, tokens), extra = model.ids.shape, _PADDING
    lengths = [tokens] * batch
    arguments = {"position_ids": torch.arange(tokens, device=model.ids.device).expand_as(model.ids)} if is_left else {}
    rows = list(model.rows_of(model.ids, model.places, **arguments) if is_left else model.rows)
    if batch > 1:
        lengths[-1] = short = tokens - _SHORTER
        arguments = {name: positions[-1:, :short] for name, positions in arguments.items()}
        rows[-1] = model.rows_of(model.ids[-1:, :short], model.places[-1:, :short], **arguments)[0]
    ids = (
        model.ids[:, :1].expand(-1, tokens + extra)
        if model.pad_id is None
        else model.ids.new_full((batch, tokens + extra), model.pad_id)
    )
    ids, places = ids.clone(), model.places.new_full(ids.shape, -1)
    real, expected = torch.zeros_like(ids, dtype=torch.bool), rows[0].new_zeros(*ids.shape, rows[0].shape[-1])
    for row, length in enumerate(lengths):
        here = row, slice(tokens + extra - length, None) if is_left else slice(length)
        ids[here], places[here], real[here] = model.ids[row, :length], model.places[row, :length], True
        expected[here] = rows[row]
    more = f" or {extra + _SHORTER}" if batch > 1 else ""
    return _Padded(
        ids, places, real, expected, f"with {extra}{more} tokens of padding on the {'left' if is_left else 'right'}"
    )


def _decoded_after(model: TokenModel, padded: _Padded) -> str:
    """Say how rows differ after padding on the left, and those of the next tokens through a cache, where there is one."""
    mask, width = padded.real.long(), padded.ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def far(rows: torch.Tensor, start: int, end: int, what: str) -> str:
        real = padded.real[:, start:end, None]
        return model.far_rows(rows.where(real, 0), padded.expected[:, start:end], what, start)

    rows = model.rows_of(padded.ids, padded.places, attention_mask=mask, position_ids=positions)
    if evidence := far(rows, 0, width, padded.what):
        return evidence
    if not (model.is_causal and model.cache_name) or _cache_may_cut(model):
        return ""
    cache, middle = None, _PADDING + model.ids.shape[1] // 2
    for start, end in ((0, middle), *((step, step + 1) for step in range(middle, middle + 3))):
        arguments = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        try:
            rows, cache = _cached(model, cache, padded.ids[:, start:end], padded.places[:, start:end], **arguments)
        except _RAISED as error:
            model.note = f"what follows padding is not decoded: the model raises {_in_a_line(error)}"
            return ""
        if cache is None:
            return ""
        if evidence := far(rows, start, end, f"{padded.what}, decoding"):
            return evidence
    return ""


def _after_padded_source(model: TokenModel) -> str:
    """Say how rows of a decoder differ where its encoder is given padding, through a cache, too; "" for not at all."""
    padded = model.with_padded_source
    if padded is None:
        return ""
    what = "with padding on the right of what the encoder is given"
    if evidence := model.far_rows(padded.rows_of(model.ids, model.places), model.rows, what):
        return evidence
    evidence = _decoded(padded, "dynamic") if model.is_causal and model.cache_name else ""
    return evidence and f"{evidence}, {what}"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _cache_may_cut(model: TokenModel) -> bool:
    """Return whether its caches cut keys at a window that no layer is sure to have."""
    return model.window is not None and not has_windows(model)


def packed(model: TokenModel) -> str:
    """Two documents in one row, told apart by position_ids, give what each gives alone."""
    if not (model.is_causal and model.takes("position_ids") and model.requests.masks):
        raise NotApplicable("it is not a causal model of transformers that takes position_ids")
    if not model.requests.tells_documents:
        raise NotApplicable("it makes its masks without position_ids, so documents of one row are not told apart")
    if model.mixes_otherwise:
        raise NotApplicable("it mixes tokens by more than attention, which position_ids do not tell apart")
    ids, places = model.ids[:1], model.places[:1]  # packing is of batch 1 where kernels do it
    length = ids.shape[1] // 2
    documents = {"first": slice(0, length), "second": slice(length, None)}
    positions = torch.cat([torch.arange(len(places[0, part]), device=ids.device) for part in documents.values()])
    for name, part in documents.items():
        alone, known = model.part(part), torch.full_like(places, -1)
        known[:, part] = alone.places
        found = alone.rows_of(ids, known, position_ids=positions[None])[:, part]
        if evidence := alone.far_rows(found, alone.rows, f"the {name} of two packed documents", part.start):
            return evidence
    return ""


def decoding(model: TokenModel, kind: str) -> str:
    """Prefill, then one token after the other through a cache, gives the rows of the whole."""
    if not (model.is_causal and model.cache_name):
        raise NotApplicable("it is not a causal model of transformers that takes a cache; step= has another cache asked")
    if model.batch.is_decoder and kind != "dynamic":
        raise NotApplicable("a decoder beside an encoder has a cache of its own kind")
    if kind == "sliding" and model.window is None:
        raise NotApplicable("its configuration names no window")
    if kind != "dynamic" and _cache_may_cut(model):
        raise NotApplicable("its configuration names a window, and no layer asks for one")
    module: Any = getattr(model.module, "_orig_mod", model.module)
    supports_static = getattr(module, "_supports_static_cache", getattr(module, "_can_compile_fullgraph", True))
    if kind == "static" and not supports_static:
        raise NotApplicable("its class does not say that it supports a static cache")
    try:
        evidence = _decoded(model, kind)
    except _RAISED as error:
        raise NotApplicable(f"not run: with a {kind} cache the model raises {_in_a_line(error)}") from error
    if evidence and model.unknown_kinds:
        raise NotApplicable(f"not run: {some(model.unknown_kinds)} may choose keys otherwise with a cache ({evidence})")
    return evidence


def _decoded(model: TokenModel, kind: str) -> str:
    """Say how rows through a cache differ, "" for not at all."""
    tokens, transformers = model.ids.shape[1], importlib.import_module("transformers")
    cache: Any = None  # the model's own
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=tokens + 3)
    elif kind == "dynamic" and model.window is not None and not model.mixes_otherwise:  # which keeps all
        cache = transformers.DynamicCache()
    positions = torch.arange(tokens, device=model.ids.device).expand_as(model.ids)
    arguments: dict[str, torch.Tensor] = {}
    for number, (start, end, doing) in enumerate(_steps(model)):
        part, places, before = model.ids[:, start:end], model.places[:, start:end], None
        what = f"{doing} with a {kind} cache"
        if number == 1 and model.mixes_otherwise and model.takes("position_ids"):
            before = copy.deepcopy(cache)
        if arguments:
            arguments = {"position_ids": positions[:, start:end]}
        rows, cache = _cached(model, cache, part, places, **arguments)
        if cache is None:
            raise NotApplicable("it returns no cache")
        evidence = model.far_rows(rows, model.rows[:, start:end], what, start)
        if evidence and before is not None:  # some hybrids count positions from 0 in each call, and leave it to `generate`
            from_0, _ = _cached(model, copy.deepcopy(before), part, places, position_ids=positions[:, :1])
            arguments = {"position_ids": positions[:, start:end]}
            if not model.far_rows(rows, from_0, what):
                model.note = "it counts positions from 0 in each call: give position_ids where it decodes"
                rows, cache = _cached(model, before, part, places, **arguments)
                evidence = model.far_rows(rows, model.rows[:, start:end], what, start)
        if evidence:
            return evidence
    return ""


def _steps(model: TokenModel) -> Iterator[tuple[int, int, str]]:
    """Yield from where to where tokens go through a cache at once, and in which words."""
    tokens = model.ids.shape[1]
    middle = 1 if model.batch.is_decoder else tokens // 2  # beside an encoder it begins with one token
    yield 0, middle, "prefill"
    if not (model.mixes_otherwise or model.batch.is_decoder):
        yield middle, middle + 3, "three tokens at once"
        middle += 3
    yield from ((at, at + 1, "decoding") for at in range(middle, tokens))


def _cached(model: TokenModel, cache: Any, ids: torch.Tensor, places: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
    """Run some tokens through a cache, None for the one that the model makes itself; return rows and cache."""
    given = {} if cache is None else {model.cache_name: cache}
    rows, returned = model.run(ids, places, use_cache=True, **given, **more)
    return rows, cache if cache is not None else getattr(returned, model.cache_name, None)


#: how much later all positions begin, and of how many tokens: far from 0 the rounding of angles in float32 counts for more
_SHIFT, _SHIFTED = 7, 24
_ABSOLUTE = re.compile(r"pos|wpe").search


def _ran(model: TokenModel) -> Iterator[tuple[str, torch.nn.Module]]:
    ran = set(map(id, model.requests.tracker.ran.values()))
    return ((name, part) for name, part in model.module.named_modules() if id(part) in ran)


#: kinds of rotary embeddings whose angles depend on how long a sequence is
_BY_LENGTH = ("dynamic", "longrope")


def _has_few_angles(model: TokenModel) -> bool:
    says = {**vars(model.config), **(model.says("rope_parameters") or {})}
    is_by_length = any(kind in str(says.get("rope_parameters")) for kind in _BY_LENGTH)
    return is_by_length or min(_numbers(says, ("max_position", "floor")), default=_SHIFT) < _SHIFT + _SHIFTED


#: why positions that all begin later may give other rows: what is asked first comes first
_UNSHIFTED: Mapping[str, Callable[[TokenModel], bool]] = {
    "it is not a model of transformers that takes position_ids": lambda model: (
        not (model.takes("position_ids") and model.requests.masks and not model.mixes_otherwise)
    ),
    "the rounding of its angles may decide between experts": lambda model: bool(model.routing),
    "it rotates nothing by position_ids": lambda model: (
        not any("rotary" in type(part).__name__.lower() for _, part in _ran(model))
    ),
    "it learns an embedding of each position": lambda model: any(
        isinstance(part, torch.nn.Embedding) and _ABSOLUTE(name.rpartition(".")[2]) for name, part in _ran(model)
    ),
    "its angles depend on the length, or its positions end early": _has_few_angles,
}


def shifted(model: TokenModel) -> str:
    """Rotation tells how far tokens are apart, so positions that all begin later give the same rows."""
    if reason := next((reason for reason, holds in _UNSHIFTED.items() if holds(model)), ""):
        raise NotApplicable(reason)
    ids, places = model.ids[:, :_SHIFTED], model.places[:, :_SHIFTED]
    at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first, later = (model.rows_of(ids, places, position_ids=at + start) for start in (0, _SHIFT))
    return model.far_rows(later, first, f"with positions that begin at {_SHIFT}")


def batch_order(model: TokenModel) -> str:
    """A sequence gives the same rows wherever it stands in the batch, and alone."""
    if len(model.ids) < 2:
        raise NotApplicable("the batch has one sequence")
    if any(isinstance(part, _BatchNorm) and part.training for part in model.module.modules()):
        raise NotApplicable("it normalizes over the batch")
    reverse = model.rows_of(model.ids.flip(0), model.places.flip(0)).flip(0)
    if evidence := model.far_rows(reverse, model.rows, "with the batch in reverse"):
        return evidence
    return model.far_rows(model.rows_of(model.ids[-1:], model.places[-1:]), model.rows[-1:], "without the rest of the batch")


def stepping(model: TokenModel, kind: str) -> str:
    """A step of the test's own gives the rows of the whole: token by token, several at once, or after other tokens."""
    if model.step is None:
        raise NotApplicable("step= is not given, which runs tokens through a cache of the model's own")
    ids, places, tokens = model.ids, model.places, model.ids.shape[1]
    cuts = [0, *range(tokens // 2, tokens + 1)] if kind != "chunks" else [0, tokens // 3, tokens // 3 + 3, tokens]
    if kind == "warm":
        for _ in model.stepped(model.step, ids.roll(1, 1), torch.full_like(places, -1), cuts):
            pass
    for rows, first, what in model.stepped(model.step, ids, places, cuts):
        words = f"{what}, after other tokens" if kind == "warm" else what
        if evidence := model.far_rows(rows, model.rows[:, first : first + rows.shape[1]], words, first):
            return evidence
    return ""


#: by name, in the order in which they are run: a step may leave its cache in the model
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
    "decoding": partial(stepping, kind="decoding"),
    "chunks": partial(stepping, kind="chunks"),
    "warm": partial(stepping, kind="warm"),
}


#: which hold of models that take no token ids, too
_OF_ANY = ("field", "order")


def judge_model_invariants(
    model: torch.nn.Module,
    batch: Any,
    only: Names = None,
    skip: Names = None,
    causal: bool | None = None,
    step: TokenStep | None = None,
) -> InvariantReport:
    """Return what each invariant finds; raises as `attn_model.check_invariants` does, but for broken ones."""
    names = chosen_names(only, skip, INVARIANTS, INVARIANTS)
    with unlimited_recompiles(), untouched(model):
        tried = TokenModel(model, batch, causal, step)
        tried.prepare()
        findings = [_finding(name, tried) for name in names]
    quiet = [number for number, one in enumerate(findings) if one.outcome == "passed" and not one.evidence]
    if quiet:  # it is of all of them
        findings[quiet[-1]] = replace(findings[quiet[-1]], evidence=tried.routing.note)
    what = f"{tuple(tried.ids.shape)} tokens" if tried.batch.has_tokens else count(len(tried.ids), "entry", "entries")
    return InvariantReport(what, type_name(model), tuple(findings))


def _finding(name: str, model: TokenModel) -> Finding:
    model.note = ""
    try:
        if not model.batch.has_tokens and name not in _OF_ANY:
            raise NotApplicable("the batch has no token ids")
        fields = vars(model.config or object) if model.routing and name != "field" else {}
        if limit := next((field for field, value in fields.items() if "capacity" in field and value), ""):
            raise NotApplicable(f"experts take so many tokens at most ({limit}), so that each token depends on the others")
        evidence = INVARIANTS[name](model)
    except NotApplicable as reason:
        return Finding(name, "not applicable", str(reason), 0)
    except _RAISED as error:
        if not model.has_more:
            raise
        return Finding(name, "not applicable", f"not run: the model raises {_in_a_line(error)}", 0)
    return Finding(name, "broken" if evidence else "passed", evidence or model.note, 1)
