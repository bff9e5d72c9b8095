"""`attn_model.check_invariants`: what must hold of a model of tokens whatever its weights: it is compared with itself.

Where the same sums run over the same shapes, rows must be bit-equal; where shapes differ, a row may move as far as correct
rounding does (`TokenModel.scatter`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from pytest_attn.backends.contexts import unlimited_recompiles
from pytest_attn.invariants.invariant import NotApplicable
from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.models.capture import capture
from pytest_attn.models.interception import is_of_transformers
from pytest_attn.models.mask_recognition import DropoutError
from pytest_attn.models.step import named_tensors, untouched

#: stochastic roundings that honest scatter is the root mean square of, and by how many units in the last place they move
_RUNS = 4
#: how far honest arithmetic may move a row of the output, in units of the typical row's scatter: the largest of many rows,
#: whose sums ran in another order in every layer
LIMIT = 4.0


class TokenModel:
    """A model whose forward pass takes token ids, which is compared with itself.

    ids: (batch, tokens), cut to the shortest sequence of the batch. is_causal: whether a token may see only those before it;
    None for what the model's configuration or its class's name says.
    """

    def __init__(self, model: torch.nn.Module, batch: Any, is_causal: bool | None = None) -> None:
        given = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        ids = given.pop("input_ids", None)
        if ids is None or not hasattr(ids, "dim") or ids.dim() != 2 or ids.is_floating_point():
            raise TypeError(
                "check_invariants: batch must be a tensor of token ids (batch, tokens), or a mapping with input_ids"
            )
        self.model = model
        inner = getattr(model, "_orig_mod", model)
        self._parameters = frozenset(inspect.signature(inner.forward).parameters)
        is_named_so = type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        is_decoder = bool(getattr(getattr(inner, "config", None), "is_decoder", False))
        self.is_causal = is_named_so or is_decoder if is_causal is None else is_causal
        mask = given.pop("attention_mask", None)
        given.pop("position_ids", None)
        given.pop("labels", None)
        self._given = given
        lengths = [ids.shape[1]] * len(ids) if mask is None else [int(row.sum()) for row in mask]
        self.ids = ids[:, : min(lengths)]
        if self.ids.shape[1] < 8:
            raise ValueError(f"check_invariants: sequences of {self.ids.shape[1]} tokens say little; give at least 8")

    @property
    def config(self) -> Any:
        """The configuration of its text part, None where it has none."""
        config = getattr(self.model, "config", None)
        get = getattr(config, "get_text_config", None)
        return get() if callable(get) else config

    def takes(self, name: str) -> bool:
        """Whether the forward pass names an argument."""
        return name in self._parameters

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows of the batch as it is."""
        return self.rows_of(self.ids)

    def rows_of(self, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return the logits, or the last hidden state, (batch, tokens, features)."""
        if self.takes("use_cache"):
            more.setdefault("use_cache", False)
        with torch.no_grad():
            returned = self.model(input_ids=ids, **self._given, **more) if self.takes("input_ids") else self.model(ids, **more)
        outputs = named_tensors(returned).outputs
        rows = next((t for t in outputs.values() if t.dim() == 3 and t.shape[:2] == ids.shape), None)
        if rows is None:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in outputs.items())
            raise TypeError(f"check_invariants: the model returned {shapes}; expected a tensor (batch, tokens, features)")
        return rows

    def rows_with_another_token(self, at: int) -> torch.Tensor:
        """Return the rows after the token at one position became another one of the batch, in every sequence."""
        known: torch.Tensor = torch.unique(self.ids)
        places = torch.searchsorted(known, self.ids[:, at].contiguous())
        ids = self.ids.clone()
        ids[:, at] = known[(places + 1) % len(known)]
        return self.rows_of(ids)

    def refuse_dropout(self) -> None:
        """Raise DropoutError where two runs on the same tokens differ by more than the order of sums explains."""
        torch.manual_seed(0)
        one = self.rows_of(self.ids)
        torch.manual_seed(1)
        other = self.rows_of(self.ids)
        if not torch.equal(one, other) and float((one.double() - other.double()).norm() / one.double().norm()) > 1e-3:
            raise DropoutError("the model gives something else each time it runs: set dropout to 0, or call model.eval()")

    def far_rows(self, found: torch.Tensor, expected: torch.Tensor, what: str, first: int = 0) -> str:
        """Say which rows are further off than honest rounding explains, "" for none. first: number of the first row."""
        distances = (found.double() - expected.double()).norm(dim=-1) / self.scatter
        worst = float(distances.max())
        if worst <= LIMIT:
            return ""
        row = int(distances.flatten().argmax()) % distances.shape[-1] + first
        many = int((distances > LIMIT).sum())
        return (
            f"{what}: {many} of {distances.numel()} rows differ, row {row} by {worst:.3g} times what honest rounding does"
            f" (limit {LIMIT:g})"
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
            with _rounded_otherwise(self.model, seed):
                total += float((self.rows_of(self.ids).double() - exact).square().sum(-1).mean())
        return max(float((total / _RUNS) ** 0.5), 1e-30)


@contextlib.contextmanager
def _rounded_otherwise(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Move every floating-point output of the model's innermost modules by random fractions of a unit in the last place."""

    def moved(_module: Any, _args: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        ulp = torch.finfo(out.dtype).eps * (1.0 if out.element_size() <= 2 else 4.0)
        noise = torch.rand(out.shape, generator=generator(out.device), device=out.device, dtype=torch.float32) * 2 - 1
        return (out.double() * (1 + ulp * noise.double())).to(out.dtype)

    made: dict[str, torch.Generator] = {}

    def generator(device: torch.device) -> torch.Generator:
        if str(device) not in made:
            made[str(device)] = torch.Generator(device).manual_seed(seed)
        return made[str(device)]

    hooks = [part.register_forward_hook(moved) for part in model.modules() if not any(True for _ in part.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# -- windows of a configuration ----------------------------------------------------------------------------------------------


def layer_windows(config: Any) -> list[int | None]:
    """Return the window of each layer in tokens, the token itself included; None of a layer that sees all before it."""
    layers = int(getattr(config, "num_hidden_layers", 0))
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def reach(config: Any) -> int | None:
    """Return how many tokens back the last row of the last layer sees through all windows; None where a layer sees all."""
    windows = layer_windows(config)
    return None if not windows or None in windows else sum(window - 1 for window in windows if window is not None)


def wrong_masks(of: TokenModel, config: Any) -> str:
    """Say which layer asks for another mask than the configuration names; "" where none does, or none is a causal window's."""
    windows, tokens = layer_windows(config), of.ids.shape[1]
    for call in capture(lambda: of.rows_of(of.ids), of.model):
        layer = re.search(r"layers\.(\d+)(?:\.|$)", call.module)
        mask = call.workload.mask
        if layer is None or int(layer[1]) >= len(windows) or mask is None or mask.band is None:
            continue
        window = windows[int(layer[1])]
        wanted = "Causal" if window is None or window >= tokens else f"a window of {window}"
        asked = "Causal" if mask.band.left is None else f"a window of {mask.band.left + 1}"
        if mask.band.left is not None and mask.band.right not in (0, None):
            continue  # a window to both sides, which the configuration counts in another way
        if asked != wanted:
            return f"{call.module} asks for {asked} tokens".replace("Causal tokens", "all tokens before") + (
                f"; the configuration says {'all' if wanted == 'Causal' else wanted}"
            )
    return ""


# -- the invariants ----------------------------------------------------------------------------------------------------------


def future(of: TokenModel) -> str:
    """Rows before a token that changes stay bit-equal."""
    if not of.is_causal:
        raise NotApplicable("the model is not causal")
    tokens = of.ids.shape[1]
    for at in sorted({tokens // 3, tokens // 2 + 1, tokens - 1}):
        moved = (of.rows_with_another_token(at)[:, :at] != of.rows[:, :at]).any(-1)
        if bool(moved.any()):
            seeing = moved.any(0).nonzero().flatten().tolist()
            return f"another token at {at} changes rows before it: {len(seeing)} of {at}, the last is {seeing[-1]}"
    return ""


def receptive_field(of: TokenModel) -> str:
    """Each layer asks for the mask of the configuration, and rows beyond all windows are bit-equal."""
    config = of.config
    if config is None or not getattr(config, "sliding_window", None):
        raise NotApplicable("its configuration names no window")
    if wrong := wrong_masks(of, config):
        return wrong
    field, tokens = reach(config), of.ids.shape[1]
    if field is None or not of.is_causal or tokens < field + 2:
        return ""
    beyond = (of.rows_with_another_token(0)[:, field + 1 :] != of.rows[:, field + 1 :]).any(-1)
    if not bool(beyond.any()):
        return ""
    row = int(beyond.any(0).nonzero()[-1]) + field + 1
    return f"row {row} sees token 0, and the windows of all layers reach back {field} tokens only"


def padding(of: TokenModel, side: str) -> str:
    """A sequence that is padded gives the rows that it gives without."""
    if not of.takes("attention_mask"):
        raise NotApplicable("its forward pass takes no attention_mask")
    is_left, takes_positions = side == "left", of.takes("position_ids")
    if is_left and not takes_positions:
        raise NotApplicable("its forward pass takes no position_ids")
    ids, tokens, extra = of.ids, of.ids.shape[1], 7
    blank = ids[:, :1].expand(-1, extra)
    mask = torch.ones(len(ids), tokens + extra, dtype=torch.long, device=ids.device)
    mask[:, slice(0, extra) if is_left else slice(tokens, None)] = 0
    padded = torch.cat([blank, ids] if is_left else [ids, blank], 1)
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if takes_positions else {}
    found = of.rows_of(padded, attention_mask=mask, **positions)
    found = found[:, extra:] if is_left else found[:, :tokens]
    return of.far_rows(found, of.rows, f"with {extra} tokens of padding on the {side}")


def packed(of: TokenModel) -> str:
    """Two documents in one row, told apart by position_ids, give what each gives alone."""
    if not (of.is_causal and of.takes("position_ids") and is_of_transformers(of.model)):
        raise NotApplicable("it is not a causal model of transformers that takes position_ids")
    ids = of.ids[:1]  # packing is of batch 1 where kernels do it
    length = ids.shape[1] // 2
    documents = {"first": ids[:, :length], "second": ids[:, length:]}
    positions = torch.cat([torch.arange(one.shape[1], device=ids.device) for one in documents.values()])
    found = of.rows_of(ids, position_ids=positions[None])
    at = 0
    for name, document in documents.items():
        rows = found[:, at : at + document.shape[1]]
        if evidence := of.far_rows(rows, of.rows_of(document), f"the {name} of two packed documents", at):
            return evidence
        at += document.shape[1]
    return ""


def decoding(of: TokenModel, kind: str) -> str:
    """Prefill, then one token after the other through a cache, gives the rows of the whole."""
    if not (of.is_causal and of.takes("past_key_values") and is_of_transformers(of.model)):
        raise NotApplicable("it is not a causal model of transformers that takes past_key_values")
    transformers: Any = importlib.import_module("transformers")
    tokens = of.ids.shape[1]
    if kind == "static":
        cache = transformers.StaticCache(config=of.config, max_cache_len=tokens + 3)
    elif kind == "dynamic":
        cache = transformers.DynamicCache()
    elif not getattr(of.config, "sliding_window", None):
        raise NotApplicable("its configuration names no window")
    else:
        cache = transformers.DynamicCache(config=of.config)
    prefill = tokens // 2
    steps = [(0, prefill, f"prefill with a {kind} cache")]
    steps += [(at, at + 1, f"decoding with a {kind} cache") for at in range(prefill, tokens)]
    for start, end, what in steps:
        rows = of.rows_of(of.ids[:, start:end], past_key_values=cache, use_cache=True)
        if evidence := of.far_rows(rows, of.rows[:, start:end], what, start):
            return evidence
    return ""


def batch_order(of: TokenModel) -> str:
    """A sequence gives the same rows wherever it stands in the batch."""
    if len(of.ids) < 2:
        raise NotApplicable("the batch has one sequence")
    return of.far_rows(of.rows_of(of.ids.flip(0)).flip(0), of.rows, "with the batch in reverse")


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
    "order": batch_order,
}
Names = Iterable[str] | str | None


def judge_model_invariants(
    model: torch.nn.Module, batch: Any, only: Names = None, skip: Names = None, causal: bool | None = None
) -> InvariantReport:
    """Return what each invariant finds. The model is left as it was.

    batch: token ids (batch, tokens), or a mapping with input_ids. causal: whether a token may see only those before it; by
    default what the model's configuration or its class's name says. Raises ValueError for an unknown name and for a mixture of
    experts, DropoutError for a model that drops at random, TypeError for a model of anything but tokens.
    """
    names = _chosen(only, skip)
    _refuse_experts(model)
    with unlimited_recompiles(), untouched(model):
        of = TokenModel(model, batch, causal)
        of.refuse_dropout()
        findings = tuple(_finding(name, of) for name in names)
    return InvariantReport(f"{tuple(of.ids.shape)} tokens", type(model).__name__, findings)


def _finding(name: str, of: TokenModel) -> Finding:
    try:
        evidence = INVARIANTS[name](of)
    except NotApplicable as reason:
        return Finding(name, "not applicable", str(reason), 0)
    return Finding(name, "broken" if evidence else "passed", evidence, 1)


def _chosen(only: Names, skip: Names) -> list[str]:
    def listed(names: Names) -> list[str]:
        return [names] if isinstance(names, str) else list(names or ())

    for name in (*listed(only), *listed(skip)):
        if name not in INVARIANTS:
            raise ValueError(f"check_invariants: unknown invariant {name!r}; known: {', '.join(INVARIANTS)}")
    found = [name for name in INVARIANTS if name in (listed(only) or INVARIANTS) and name not in listed(skip)]
    if not found:
        raise ValueError("check_invariants: no invariant is left; leave out skip=, or name others in only=")
    return found


def _refuse_experts(model: torch.nn.Module) -> None:
    """Raise ValueError for a mixture of experts: a token's expert, and the shape of its sums, depend on the other tokens."""
    routed = next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"), "")
    if routed:
        raise ValueError(
            f"check_invariants: {routed} is a mixture of experts: which one a token goes to may turn on a rounding error, so"
            " rows cannot be compared; check the model's calls with attn_model.check"
        )
