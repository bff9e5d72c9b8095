"""A model that is compared with itself: its runs, what they say it is, and how far rounding moves them.

One of token ids: (batch, tokens), of a decoder its own where it has an encoder. Of any other, as of images, nothing is known
but which entries its batch has: they stand in for ids, one for each entry.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_attn.guests.models.call_to_workload import DropoutError
from pytest_attn.guests.models.capture import AttentionCall, Recorder
from pytest_attn.guests.models.compiled import is_compiled
from pytest_attn.guests.models.exact_attention import SeededGenerators
from pytest_attn.guests.models.interception import Tracker, intercept_attention, is_of_transformers
from pytest_attn.guests.models.model_comparison import CallComparison, Traits
from pytest_attn.guests.models.siblings import last_of
from pytest_attn.guests.models.step import named_tensors
from pytest_attn.workloads.functions import describe

#: stochastic roundings that honest scatter is the root mean square of, and by how many units in the last place they move
_RUNS = 4
#: how far honest arithmetic may move a row of the output, in units of the typical row's scatter: the largest of many rows,
#: whose sums ran in another order in every layer
LIMIT = 4.0
#: what transformers calls a cache, in its versions
_CACHES = ("cache", "past_key_values")
#: kinds of layers that mix tokens by attention, or not at all
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}
#: kinds that mix them otherwise, and with a cache as without; others may see more of a prompt, or rounding chooses their keys
_OTHERS = {"linear_attention", "hybrid", "hybrid_sliding", "conv", "attention", "mamba", "recurrent"}
_CONVOLUTIONS = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d


#: a test's function of ids and positions, (batch, tokens), and a state, None for a new one: returns logits and the state
TokenStep: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, Any]]


class Requests(NamedTuple):
    """Requests of a model in one run.

    calls: its attention calls, which nothing judged. masks: functions of transformers that it had make its masks.
    tells_documents: whether it handed them position_ids, which tell documents of one row apart. tracker: who ran.
    """

    calls: list[CallComparison]
    masks: set[str]
    tells_documents: bool
    tracker: Tracker


@dataclass(frozen=True)
class TokenBatch:
    """A batch as the forward pass takes it, without padding, cut to its shortest sequence.

    ids: (batch, tokens); the numbers of the entries, (batch, 1), of a model that takes no token ids. length: tokens of a
    sequence. per_token: tensors (batch, tokens, ...) by name; per_sequence: tensors (batch, ...); rest: what is neither.
    has_tokens: whether it has token ids. is_decoder: whether they are a decoder's, which attends to what an encoder makes of
    the rest.
    """

    ids: torch.Tensor
    length: int
    has_tokens: bool
    is_decoder: bool
    per_token: Mapping[str, torch.Tensor]
    per_sequence: Mapping[str, torch.Tensor]
    rest: Mapping[str, Any]

    @classmethod
    def read(cls, batch: Any, takes_ids: bool) -> TokenBatch:
        """Return a batch as a test gives it: a mapping, or a tensor. Raises TypeError and ValueError where it is neither."""
        given = _named(batch, takes_ids)
        is_decoder = "decoder_input_ids" in given
        prefix = "decoder_" if is_decoder else ""
        has_tokens = f"{prefix}input_ids" in given
        ids: Any = given.pop(f"{prefix}input_ids") if has_tokens else _entries(given)
        if not hasattr(ids, "dim") or ids.dim() != 2 or ids.is_floating_point():
            raise TypeError(
                "check_invariants: batch must be a tensor of token ids (batch, tokens), a tensor of other inputs whose first"
                " dimension is the batch, or a mapping of such tensors, in which token ids are named input_ids"
            )
        mask = given.pop(f"{prefix}attention_mask", None) if has_tokens else None
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device).bool()
        length = int(seen.sum(1).min())
        if has_tokens and length < 8:
            raise ValueError(f"check_invariants: sequences of {length} tokens say little; give at least 8")
        held: dict[str, dict[str, Any]] = {"token": {}, "sequence": {}, "batch": {}}
        dropped = {f"{prefix}position_ids", "labels", "use_cache", *_CACHES}
        for name in [name for name in given if name not in dropped]:
            unit = _unit_of(given[name], ids, is_of_tokens=has_tokens and name.startswith(prefix))
            held[unit][name] = given[name]
        per_token = {name: _cut(t, seen, length) for name, t in held["token"].items()}
        return cls(_cut(ids, seen, length), length, has_tokens, is_decoder, per_token, held["sequence"], held["batch"])

    def name_of(self, name: str) -> str:
        """Return what the forward pass calls an argument: of those of tokens the decoder's where it has one."""
        is_of_tokens = name in ("input_ids", "attention_mask", "position_ids")
        return f"decoder_{name}" if self.is_decoder and is_of_tokens else name

    def at(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what belongs to tokens, and to their sequences. places: (batch, tokens), as of `TokenModel.rows_of`."""
        found = {}
        for name, values in self.per_token.items():
            flat, at = values.flatten(0, 1), places.to(values.device)
            found[name] = torch.where(
                at.view(*at.shape, *[1] * (flat.dim() - 1)) >= 0, flat[at.clamp(min=0)], flat.new_zeros(())
            )
        sequences = places.amax(1).clamp(min=0) // self.length  # of a row, which one it is of
        return found | {name: values[sequences.to(values.device)] for name, values in self.per_sequence.items()}


class TokenModel:
    """A model that is compared with itself. batch: as `Batch.read` takes it.

    causal: whether a token may see only those before it; None for what the model says. step: runs tokens through a cache of
    its own, which makes it causal unless `causal` says otherwise.
    """

    def __init__(self, module: torch.nn.Module, batch: Any, causal: bool | None = None, step: TokenStep | None = None) -> None:
        self.module, self.step = module, step
        self._causal = True if causal is None and step is not None else causal
        self._inner: Any = getattr(module, "_orig_mod", module)
        parameters = inspect.signature(self._inner.forward).parameters
        self._parameters = frozenset(parameters)
        self.batch = TokenBatch.read(batch, takes_ids="input_ids" in parameters)
        takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._takes_use_cache = "use_cache" in parameters or (takes_more and bool(self.cache_name))
        #: of each token, which one it is
        self.places = torch.arange(self.ids.numel(), device=self.ids.device).view_as(self.ids)
        self.routing = Routing(self.ids.numel(), LIMIT)
        #: what is worth knowing of the invariant that is tried
        self.note = ""

    @property
    def ids(self) -> torch.Tensor:
        """The token ids, (batch, tokens), or the numbers of the entries, (batch, 1)."""
        return self.batch.ids

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The configuration of its text part, None where it has none."""
        config = getattr(self._inner, "config", None)
        get = getattr(config, "get_text_config", None)
        return get() if callable(get) else config

    @property
    def cache_name(self) -> str:
        """Name that its forward pass has for a cache of keys and values, "" where it takes none."""
        return next((name for name in _CACHES if self.takes(name)), "") if is_of_transformers(self.module) else ""

    def says(self, name: str) -> Any:
        """Return a field of its configuration, None where it has none, or one per layer."""
        with contextlib.suppress(Exception):  # transformers has an error of its own for the latter
            return getattr(self.config, name, None)
        return None

    @property
    def window(self) -> int | None:
        """The window of its configuration in tokens, the token itself included, None for none."""
        found = self.says("sliding_window")
        return found if isinstance(found, int) and found > 0 else None

    def takes(self, name: str) -> bool:
        """Return whether the forward pass names an argument, of those of tokens the decoder's where it has one."""
        return self.batch.name_of(name) in self._parameters

    @property
    def with_padded_source(self) -> TokenModel | None:
        """The same decoder whose encoder is given padding on the right; None where that takes no tokens and mask."""
        batch = self.batch
        source = batch.per_sequence.get("input_ids") if batch.is_decoder else None
        if source is None or source.is_floating_point() or "attention_mask" not in self._parameters:
            return None
        mask = batch.per_sequence.get("attention_mask", torch.ones_like(source))
        more = source.new_full((len(source), 7), self.pad_id or 0), mask.new_zeros(len(source), 7)
        padded = {"input_ids": torch.cat([source, more[0]], 1), "attention_mask": torch.cat([mask, more[1]], 1)}
        one = copy.copy(self)
        one.batch = replace(batch, per_sequence={**batch.per_sequence, **padded})
        one.__dict__.update(rows=self.rows, scatter=self.scatter)
        return one

    @cached_property
    def pad_id(self) -> int | None:
        """The token that its configuration, or its embedding, says is padding."""
        found = self.says("pad_token_id")
        embeddings = [part for part in self.module.modules() if isinstance(part, torch.nn.Embedding)]
        if not isinstance(found, int):
            found = next((part.padding_idx for part in embeddings), None)
        size = max((part.num_embeddings for part in embeddings), default=0)
        return found if isinstance(found, int) and 0 <= found < size else None

    @property
    def has_more(self) -> bool:
        """True where its batch has more than tokens, as images, of which a part of the tokens may stand for none."""
        batch = self.batch
        held = (*batch.per_token.values(), *batch.per_sequence.values(), *batch.rest.values())
        return batch.has_tokens and any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in held)

    @cached_property
    def _stands_for_more(self) -> torch.Tensor:
        """The tokens that stand for images and the like, as its configuration names them."""
        says = vars(getattr(self._inner, "config", None) or object) if self.has_more else {}
        ids = [
            value for name, value in says.items() if isinstance(value, int) and re.search("(image|video|audio).*token_", name)
        ]
        return self.ids.new_tensor(ids)

    @cached_property
    def requests(self) -> Requests:
        """Requests of its attention calls, in a run of all tokens."""
        calls: list[CallComparison] = []

        def made(call: AttentionCall) -> None:
            traits = Traits(last=last_of(call))
            facts = call.module, call.label, call.function, call.workload
            calls.append(CallComparison(*facts, None, order=call.order, traits=traits))

        recorder = Recorder(backward=False, made=made)
        with _masks_watched(self.module) as masks, intercept_attention(recorder, self.module) as tracker:
            self.rows_of(self.ids, self.places)
        recorder.finish()
        return Requests(calls, set(masks), any(masks.values()), tracker)

    @property
    def mixes_otherwise(self) -> bool:
        """True where it mixes tokens by more than attention: by convolutions, or by a state that goes from token to token."""
        # the weights of those of one dimension may be used where the module itself does not run
        parts = (part for part in self.module.modules() if isinstance(part, _CONVOLUTIONS))
        ran = set(map(id, self.requests.tracker.ran.values()))
        is_convolving = any({*p.kernel_size} != {1} and (id(p) in ran or len(p.kernel_size) == 1) for p in parts)
        kinds = set(self.says("layer_types") or ())
        return is_convolving or not kinds <= _ATTENTION or "create_recurrent_attention_mask" in self.requests.masks

    @property
    def unknown_kinds(self) -> list[str]:
        """Kinds of its layers, as its configuration names them, that may give something else with a cache."""
        return sorted({str(kind) for kind in self.says("layer_types") or ()} - _ATTENTION - _OTHERS)

    @cached_property
    def is_named_causal(self) -> bool | None:
        """True where a token may see only those before it, as the test or the model says; None where neither does.

        A model says so by is_decoder of its configuration, by is_causal of each module that calls attention, by the functions
        of transformers that make its masks, or by each of its calls.
        """
        if self._causal is not None:
            return self._causal
        makes_causal = any("causal" in name for name in self.requests.masks)
        if self.batch.is_decoder:
            return makes_causal or None
        is_encoder_decoder = getattr(getattr(self._inner, "config", None), "is_encoder_decoder", False)
        if is_encoder_decoder or self.says("use_bidirectional_attention") or self.says("is_causal") is False:
            return None  # functions that make causal masks make others then
        makes_others = any("bidirectional" in name for name in self.requests.masks)
        is_said = self.says("is_decoder") is True or self._calls_are_causal()
        return is_said or (makes_causal and not makes_others) or None

    @property
    def is_causal_by_calls(self) -> bool:
        """True where nothing but its calls, or the modules that make them, names it causal."""
        names_none = self._causal is None and self.says("is_decoder") is not True and not self.batch.is_decoder
        return names_none and not self.requests.masks and self._calls_are_causal()

    def _calls_are_causal(self) -> bool:
        """Return whether each module that calls attention says so, or each of its calls asks for that."""
        parts = dict(self._inner.named_modules())
        callers = [parts[call.module] for call in self.requests.calls if call.module in parts] or list(parts.values())
        said = {part.is_causal for part in callers if isinstance(getattr(part, "is_causal", None), bool)}
        asked = [call.workload for call in self.requests.calls]
        bands = [w.mask.band if w.mask is not None else None for w in asked if w.q_len == w.kv_len]
        return said == {True} or (bool(bands) and all(band is not None and band.right == 0 for band in bands))

    @cached_property
    def seeing(self) -> str:
        """Say which token is seen by those before it, "" for none."""
        tokens = self.ids.shape[1]
        for at in sorted({tokens // 3, tokens // 2 + 1, tokens - 1}):
            if evidence := self.moved(
                self.rows_with_another_token(at), slice(0, at), f"another token at {at} changes rows before it"
            ):
                return evidence
        return ""

    @property
    def is_causal(self) -> bool:
        """True where it is named causal, or is: where it is not named so, by whether rows see what comes after them."""
        return not self.seeing if self.is_named_causal is None else self.is_named_causal

    # -- its runs -----------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows of the batch as it is."""
        return self.rows_of(self.ids, self.places)

    def rows_of(self, ids: torch.Tensor, places: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return the logits, or the last hidden state, (batch, tokens, features); (batch, 1, numbers) without tokens.

        places: of each id, which token of the batch it is, -1 for any other.
        """
        return self.run(ids, places, **more)[0]

    def run(self, ids: torch.Tensor, places: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
        """Return the rows, and all that the forward pass returned."""
        more = {self.batch.name_of(name): value for name, value in more.items()}
        if self._takes_use_cache:
            more.setdefault("use_cache", False)
        more |= self.batch.at(places)
        with torch.no_grad(), self.routing.held(places):
            has_tokens = self.batch.has_tokens
            named = {self.batch.name_of("input_ids"): ids} if has_tokens and self.takes("input_ids") else {}
            first = [more.pop("")] if "" in more else [ids] if has_tokens and not named else []
            returned = self.module(*first, **named, **self.batch.rest, **more)
        outputs = named_tensors(returned).outputs
        rows = next(
            (t for t in map(self._rows_of_output, outputs.values()) if t.shape[:2] == ids.shape and t.dim() == 3), None
        )
        if rows is None:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in outputs.items())
            pairs = "" if has_tokens else "; (batch, batch) may be scores of pairs, which a batch of another size tells"
            wanted = "(batch, tokens, features)" if has_tokens else "whose first dimension is the batch"
            raise TypeError(f"check_invariants: the model returned {shapes}; expected a tensor {wanted}{pairs}")
        return rows, returned

    def stepped(
        self, step: TokenStep, ids: torch.Tensor, places: torch.Tensor, cuts: list[int]
    ) -> Iterator[tuple[torch.Tensor, int, str]]:
        """Yield the rows that a step gives of the tokens between one cut and the next, with a new state.

        Beside them the number of the first, and how they came about.
        """
        if not callable(step):
            raise TypeError(f"check_invariants: step must be a function of (ids, positions, state), got {describe(step)}")
        _ = self.rows, self.scatter  # of a model that no step has changed
        positions, state = torch.arange(ids.shape[1], device=ids.device).expand_as(ids), None
        for start, end in pairwise(cuts):
            with torch.no_grad(), self.routing.held(places[:, start:end]):
                returned = step(ids[:, start:end], positions[:, start:end], state)
            rows, state = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
            batch, tokens, features = *ids[:, start:end].shape, self.rows.shape[-1]
            if getattr(rows, "shape", None) not in ((batch, tokens, features), (batch, 1, features)):
                found = type(returned).__name__ if rows is None else getattr(rows, "shape", type(rows).__name__)
                wanted = (
                    f"(logits, state), logits ({batch}, {tokens}, {features}), or ({batch}, 1, {features}) of the last token"
                )
                raise TypeError(f"check_invariants: step returned {found}; expected {wanted}")
            kind = "prefill" if not start else f"{end - start} tokens at once" if end - start > 1 else "decoding"
            yield rows, end - rows.shape[1], f"{kind} by step"

    def _rows_of_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output as it is; where there are no tokens, all of an entry as its row, but of scores between entries."""
        is_of_pairs = output.dim() == 2 and len({*output.shape}) == 1
        return output if self.batch.has_tokens or is_of_pairs or output.dim() < 2 else output.flatten(1)[:, None]

    def rows_with_another_token(self, at: int) -> torch.Tensor:
        """Return the rows after the token at one position became another one of the batch, in every sequence."""
        known: torch.Tensor = torch.unique(self.ids)
        known, own = known[~torch.isin(known, self._stands_for_more)], self.ids[:, at].contiguous()
        if not len(known):
            return self.rows
        order = torch.searchsorted(known, own)
        ids, places = self.ids.clone(), self.places.clone()
        ids[:, at] = torch.where(torch.isin(own, self._stands_for_more), own, known[(order + 1) % len(known)])
        places[:, at] = -1
        return self.rows_of(ids, places)

    def part(self, columns: slice) -> TokenModel:
        """Return the same model with some tokens of its first sequence."""
        one = copy.copy(self)
        per_token = {name: values[:1, columns] for name, values in self.batch.per_token.items()}
        one.batch = replace(self.batch, ids=self.ids[:1, columns], per_token=per_token)
        one.places = torch.arange(one.ids.numel(), device=one.ids.device)[None]
        one.__dict__.pop("rows", None)
        if self.routing:
            one.routing = Routing(one.ids.numel(), LIMIT)
            one.__dict__.pop("scatter", None)
            one.prepare()
        return one

    def prepare(self) -> None:
        """Note its routers' choices. Raises DropoutError where two runs on the same tokens differ by more than rounding.

        ValueError for experts that torch.compile hides.
        """
        is_hidden = is_compiled(self.module)
        routed = next((name for name, _ in self.module.named_modules() if name.rpartition(".")[2] == "experts"), "")
        if is_hidden and routed:
            raise ValueError(
                f"check_invariants: {routed} is a mixture of experts, whose choice cannot be held where torch.compile made the"
                " model; give check_invariants the model before it is compiled"
            )
        torch.manual_seed(0)
        with contextlib.nullcontext() if is_hidden else self.routing.first():
            one = self.rows_of(self.ids, self.places)
        torch.manual_seed(1)
        other = self.rows_of(self.ids, self.places)
        if not torch.equal(one, other) and float((one.double() - other.double()).norm() / one.double().norm()) > 1e-3:
            raise DropoutError("the model gives something else each time it runs: set dropout to 0, or call model.eval()")
        if self.routing:
            _ = self.scatter  # whose runs say how far rounding moves scores

    # -- how far rows are from each other -----------------------------------------------------------------------------

    def moved(self, found: torch.Tensor, rows: slice, what: str) -> str:
        """Say which rows are not what they were, "" for none.

        Bit for bit where the same sums run. Experts sum over as many tokens as go to them, so there as far as rounding does.
        """
        if self.routing:
            return self.far_rows(found[:, rows], self.rows[:, rows], what, rows.start)
        moved = (found[:, rows] != self.rows[:, rows]).any(-1)
        seeing = moved.any(0).nonzero().flatten().tolist()
        return f"{what}: {len(seeing)} of {moved.shape[1]}, the last is {seeing[-1] + rows.start}" if seeing else ""

    def far_rows(self, found: torch.Tensor, expected: torch.Tensor, what: str, first: int = 0) -> str:
        """Say which rows are further off than honest rounding explains, "" for none. first: number of the first row."""
        distances = (found.double() - expected.double()).norm(dim=-1).nan_to_num(torch.inf) / self.scatter
        is_far = distances > LIMIT
        if not bool(is_far.any()):
            return ""
        row = int(distances.flatten().argmax()) % distances.shape[-1] + first
        return (
            f"{what}: {int(is_far.sum())} of {distances.numel()} rows differ, row {row} by {float(distances.max()):.3g} times"
            f" what honest rounding does (limit {LIMIT:g})"
        )

    @cached_property
    def scatter(self) -> float:
        """The typical distance of a row from itself under honest rounding.

        The root mean square over rows and runs. In each run the output of every innermost module moves at random by up to a
        unit in the last place. Another order of sums, or another kernel, would move it so.
        """
        exact = self.rows.double()
        total = 0.0
        for seed in range(_RUNS):
            with _rounded_otherwise(self.module, seed), self.routing.measuring():
                total += float((self.rows_of(self.ids, self.places).double() - exact).square().sum(-1).mean())
        return max(float((total / _RUNS) ** 0.5), 1e-30)


def _named(batch: Any, takes_ids: bool) -> dict[str, Any]:
    """Return a batch by name, "" of a tensor of numbers for a model that does not take ids."""
    if isinstance(batch, Mapping):
        return dict(batch)
    has_none = isinstance(batch, torch.Tensor) and batch.is_floating_point() and not takes_ids
    return {"" if has_none else "input_ids": batch}


def _cut(of_tokens: torch.Tensor, seen: torch.Tensor, length: int) -> torch.Tensor:
    """Return what belongs to the first tokens that are seen of each sequence."""
    return torch.stack([row[is_seen][:length] for row, is_seen in zip(of_tokens, seen.to(of_tokens.device), strict=True)])


def _unit_of(value: Any, ids: torch.Tensor, is_of_tokens: bool) -> str:
    """Return what a value has an entry of: "token", "sequence", or "batch" where it is one for all."""
    if not isinstance(value, torch.Tensor):
        return "batch"
    if is_of_tokens and value.shape[:2] == ids.shape:
        return "token"
    return "sequence" if value.dim() > 0 and len(value) == len(ids) else "batch"


def _entries(given: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the numbers of the entries, which tensors hold in their first dimension, (batch, 1); None where these differ."""
    tensors = [t for t in given.values() if isinstance(t, torch.Tensor) and t.dim() > 0]
    lengths = {len(t) for t in tensors if t.dim() > 2}
    return torch.arange(*lengths, device=tensors[0].device)[:, None] if len(lengths) == 1 else None


@contextlib.contextmanager
def _rounded_otherwise(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Move every floating-point output of the model's innermost modules by random fractions of a unit in the last place."""

    def moved(_module: Any, _args: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        ulp = torch.finfo(out.dtype).eps * (1.0 if out.element_size() <= 2 else 4.0)
        noise = torch.rand(out.shape, generator=generators[out.device], device=out.device, dtype=torch.float32) * 2 - 1
        return (out.double() * (1 + ulp * noise.double())).to(out.dtype)

    generators = SeededGenerators(seed)
    with contextlib.ExitStack() as stack:
        for part in model.modules():
            if not any(True for _ in part.children()):
                stack.callback(part.register_forward_hook(moved).remove)
        yield


@contextlib.contextmanager
def _masks_watched(model: torch.nn.Module) -> Iterator[dict[str, bool]]:
    """Yield the functions of transformers that a model's code has make its masks: name -> whether given position_ids."""
    seen: dict[str, bool] = {}
    modules = {type(part).__module__ for part in model.modules()}

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] = seen.get(name, False) or kwargs.get("position_ids") is not None
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module in filter(None, map(sys.modules.get, modules)):
            for name, function in list(vars(module).items()):
                if name.startswith("create_") and getattr(function, "__module__", "") == "transformers.masking_utils":
                    stack.enter_context(patch.object(module, name, watched(name, function)))
        yield seen


# -- experts that each token goes to: noted in one run, and held in others where nothing but rounding decides it -------------


_aten = torch.ops.aten
#: operators that a router can choose with
_CHOOSING = {_aten.topk.default, _aten.max.dim, _aten.argmax.default, _aten.sort.default, _aten.sort.stable}


class _Choice:
    """The choice of one router in the first run: scores (tokens, experts), and the chosen (tokens, experts per token)."""

    def __init__(self, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        self.scores, self.chosen = scores.clone(), chosen.clone()
        #: how far honest rounding moves a score at most, as far as was seen
        self.moved = 0.0


class Routing:
    """The choices of a model's routers, token by token.

    In the first run they are noted, in those of `measuring` held, so that the scores' own rounding is seen. After these a
    token keeps its experts where another choice is within `room` times that rounding of a tie. Any other choice stays: that is
    none of rounding's.
    """

    def __init__(self, tokens: int, room: float) -> None:
        self._room, self._choices = room, list[_Choice]()
        self.is_measuring = False
        #: which tokens would have gone to other experts by rounding
        self._near = torch.zeros(tokens, dtype=torch.bool)

    def __bool__(self) -> bool:
        return bool(self._choices)

    @property
    def note(self) -> str:
        """Say how many tokens were held, "" for none."""
        many = int(self._near.sum())
        return (
            f"{many} of {len(self._near)} tokens kept their experts, because only rounding decided between them"
            if many
            else ""
        )

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Note the choices of a run of all tokens."""

        def note(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            self._choices.append(_Choice(scores, chosen))
            return chosen

        with _Choosing(len(self._near), note):
            yield

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold every choice of the runs within, and see how far scores move."""
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False

    def held(self, places: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        """Hold the choices of one run. places: of each of its tokens, which one of the first run it is, -1 for none."""
        if not self:
            return contextlib.nullcontext()
        flat, waiting = places.flatten(), iter(self._choices)

        def hold(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            before = next(waiting, None)
            if before is None or (before.scores.shape[1], before.chosen.shape[1]) != (scores.shape[1], chosen.shape[1]):
                return chosen
            at = flat.to(scores.device)
            wanted, is_known = before.chosen[at.clamp(min=0)], at >= 0
            if self.is_measuring:
                moved = (scores - before.scores[at.clamp(min=0)]).abs()[is_known]
                before.moved = max(before.moved, float(moved.nan_to_num(0.0, 0.0, 0.0).amax() if len(moved) else 0.0))
            else:
                one, other = (scores.gather(1, those).sort(1).values for those in (chosen, wanted))
                gap = torch.where(one == other, 0.0, (one - other).abs()).amax(1)
                is_known = is_known & (gap <= self._room * before.moved)
                differs = (chosen.sort(1).values != wanted.sort(1).values).any(1) & is_known
                self._near[at[differs].cpu()] = True
            return torch.where(is_known[:, None], wanted, chosen)

        return _Choosing(len(flat), hold)


class _Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each choice among experts that is made for so many tokens to a function, which returns the choice that holds."""

    def __init__(self, tokens: int, decide: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self._decide = tokens, decide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _CHOOSING:
            return found
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        scores, dim = args[0], given.get("dim", None if func is _aten.argmax.default else -1)
        is_of_tokens = scores.dim() > 1 and scores.is_floating_point() and scores.shape[:-1].numel() == self._tokens
        if not is_of_tokens or dim not in (-1, scores.dim() - 1) or scores.shape[-1] < 2:
            return found
        indices = found if isinstance(found, torch.Tensor) else found[1]
        flat = scores.reshape(self._tokens, -1)
        held = self._decide(flat, indices.reshape(self._tokens, -1))
        if isinstance(found, torch.Tensor):
            return held.reshape(indices.shape)
        return flat.gather(1, held).reshape(indices.shape), held.reshape(indices.shape)
