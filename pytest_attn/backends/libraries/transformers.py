"""The attention functions of transformers, as its models call them: "transformers:NAME" with a name of its interface."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from pytest_attn.backends.attention_args import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    first_of,
    refuse_unread,
    shortened,
    swap_rows_and_heads,
)
from pytest_attn.backends.defects import KnownDefect, sees_nothing
from pytest_attn.backends.dense import additive_or_boolean_mask, alibi_bias, is_plain_causal, visible_and_bias
from pytest_attn.backends.layouts import bottom_right_window, is_key, sequence_boundaries
from pytest_attn.backends.libraries.dispatcher import ANY_MASK, COMPILABLE, Dispatched, Dispatcher, may_say
from pytest_attn.backends.libraries.flex import read_block_mask
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Causal, Mask, Window
from pytest_attn.workloads.workload import Workload

_SINKS_FROM_ROUNDED_LSE = KnownDefect(
    issue="transformers flex_attention rounds lse before it applies sinks (no report found)",
    summary="the share of the sink is computed from an lse in the workload's dtype",
    applies=lambda workload, _machine: bool(workload.sinks) and workload.dtype != "float32",
    tensors=("out", "dq", "dk", "dv"),
)

#: the arguments that say where packed sequences end, for flash-attention
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_FLASH_MASKS = ("causal-bottom-right", "window", "documents")
_FLEX = may_say("bias", "alibi", "softcap", "sinks", "padded", "backward", masks=("causal", "any"))
# what flash_attn_varlen_func has no parameter for, transformers drops: sinks reach FlashAttention 4 only
_FLASH = may_say("softcap", "packed", "padded", "backward", masks=_FLASH_MASKS)
_FLASH_WITH_SINKS = may_say("softcap", "sinks", "packed", "padded", "backward", masks=_FLASH_MASKS)

_NAMES = {
    "eager": Dispatched("eager", ANY_MASK, COMPILABLE),
    "sdpa": Dispatched("sdpa", ANY_MASK, COMPILABLE),
    "flex_attention": Dispatched("flex", _FLEX, known_defects=(_SINKS_FROM_ROUNDED_LSE,)),
    "flash_attention_2": Dispatched("flash2", _FLASH),
    "flash_attention_3": Dispatched("flash3", _FLASH),
    "flash_attention_4": Dispatched("flash4", _FLASH_WITH_SINKS),
}


class TransformersDispatch(Dispatcher):
    """ALL_ATTENTION_FUNCTIONS[NAME], and Llama's eager_attention_forward as "eager".

    Masks, windows and padding are handed over as the models hand them to that function.
    """

    source = Library(("transformers",), "transformers.modeling_utils", "pip install transformers")
    judged, noun, others = _NAMES, "attention function", "takes masks or a cache of its own"

    def names(self) -> list[str]:
        """Read its interface, which leaves out what each model has of its own."""
        return ["eager", *self.source.load().ALL_ATTENTION_FUNCTIONS.keys()]

    def broken_because(self) -> str | None:
        """Import transformers and the kernel's library, and ask the one whether it sees the other."""
        reason = super().broken_because() or self._kernel.broken_because()
        if reason or not self._is_flash:
            return reason
        versions = import_module("transformers.modeling_flash_attention_utils").FLASH_ATTENTION_COMPATIBILITY_MATRIX
        seen = versions[int(self.dispatched[-1])]["general_availability_check"]()  # else it looks for another on the Hub
        return None if seen else f"transformers does not find the library of {self.dispatched}"

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        if self._is_flash:
            padded = workload.replace(v_head_dim=workload.head_dim)  # as transformers hands values to FlashAttention
            return _beyond_flash(workload) or super().native_refusals(padded, machine, backward)
        if self.dispatched == "eager" and (sees_nothing(workload) or 0 in (workload.kv_lens or ())):
            return ["averages all values in rows that see no key"]
        if self.dispatched == "flex_attention":
            return _beyond_flex(workload, machine) or super().native_refusals(workload, machine, backward)
        return super().native_refusals(workload, machine, backward)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        function, module, packed = self._load(), self._module(inputs.workload), inputs.workload.is_packed
        arguments = self._arguments(inputs)
        compiling: Any = nullcontext()
        if self.dispatched == "flex_attention":  # for each shape, as for a model's first: cases do not depend on their order
            compiling = import_module("torch._dynamo.config").patch(automatic_dynamic_shapes=False)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if packed:
                q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            with compiling:
                out, _ = function(module, q, k, v, **arguments)
            return out[0] if packed else out.transpose(1, 2)

        return call

    def _load(self) -> Any:
        if self.dispatched != "eager":
            return self.source.load().ALL_ATTENTION_FUNCTIONS[self.dispatched]
        return import_module("transformers.models.llama.modeling_llama").eager_attention_forward

    def _module(self, w: Workload) -> Any:
        """Return what the functions read of an attention layer; is_causal is passed to them."""
        module: Any = torch.nn.Module()
        module.num_key_value_groups = w.group
        module.is_causal = False
        module.config = SimpleNamespace(_attn_implementation=self.dispatched)
        return module.eval()

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        w = inputs.workload
        shared = {"scaling": w.softmax_scale, "dropout": 0.0}
        if self._is_flash:
            return {**shared, **_flash_arguments(inputs)}
        if self.dispatched == "flex_attention":
            return {**shared, **_flex_arguments(inputs)}
        # one query is taken for decoding: is_causal then hides nothing
        flagged = is_plain_causal(w) and w.q_len > 1 and self.dispatched != "eager"
        mask = None if flagged else additive_or_boolean_mask(inputs)
        if self.dispatched != "eager":
            return {**shared, "is_causal": flagged, "attention_mask": mask}
        if mask is not None:  # the dtype's lowest number, not infinity, where a key is hidden
            lowest = torch.finfo(inputs.q.dtype).min
            bare = torch.zeros_like(mask, dtype=inputs.q.dtype)
            mask = bare.masked_fill_(~mask, lowest) if mask.dtype == torch.bool else mask.clamp(min=lowest)
        return {**shared, "attention_mask": mask}

    @property
    def _is_flash(self) -> bool:
        return self.dispatched.startswith("flash_attention_")


def _beyond_flash(w: Workload) -> list[str]:
    """Refuse what a sliding_window, a padding mask and padded values cannot say."""
    if w.v_head_dim > w.head_dim:
        return ["pads values up to head_dim: takes no larger v_head_dim"]
    if w.kv_lens is not None and not w.is_packed and w.q_len > 1:
        return ["drops queries along with padded keys: takes padded keys for q_len == 1 only"]
    if w.band is not None and w.band.right != 0 and not w.band.is_open:
        if w.band.left is None or w.band.left != w.band.right:
            return ["takes windows (left, 0) and (n, n) only"]
        if w.q_len > w.kv_len or (w.is_packed and w.q_lens != w.kv_lens):
            return ["leaves out a window as long as the keys: takes (n, n) for q_len <= kv_len only"]
    return []


def _flash_arguments(inputs: Inputs) -> dict[str, Any]:
    w = inputs.workload
    window = bottom_right_window(w)
    assert window is not None
    arguments: dict[str, Any] = {
        "attention_mask": is_key(inputs),
        "is_causal": window[1] == 0,
        "sliding_window": None if window[0] == -1 else window[0] + 1,  # counts the query's own key
        "softcap": w.softcap,
        "s_aux": inputs.sinks,
    }
    if w.is_packed or w.documents:
        arguments.update(zip(_BOUNDARIES, sequence_boundaries(inputs), strict=True))
    return arguments


def _beyond_flex(w: Workload, machine: Machine) -> list[str]:
    """Refuse what transformers and torch refuse where nobody names a kernel."""
    if w.is_packed:
        return ["does not support packed sequences"]
    if w.sinks and machine.kind == "cpu":
        return ["Attention sinks cannot be run on CPU with flex attention"]
    if machine.kind != "cpu" and w.q_len < 128 < w.q_len * w.group:
        return [f"finds no kernel for q_len * group = {w.q_len * w.group} rows"]
    return []


def _flex_arguments(inputs: Inputs) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    w = inputs.workload
    mask_mod = inputs.mask_mod()
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, w.batch, w.heads, w.q_len, w.kv_len, device=str(inputs.device))
    bias = inputs.bias
    if w.alibi:
        bias = alibi_bias(inputs) if bias is None else bias + alibi_bias(inputs)
    if bias is not None:
        bias = bias.expand(w.batch, w.heads, w.q_len, w.kv_len)
    return {"attention_mask": block_mask, "position_bias": bias, "softcap": w.softcap, "s_aux": inputs.sinks}


# -- calls of a model --------------------------------------------------------------------------------------------------------


_PROFILES = {"eager": "eager", "sdpa": "sdpa", "flex_attention": "flex", "flash_attention_2": "flash2"}


def function_called(implementation: str, original: Callable[..., Any]) -> AttentionFunction:
    """Return how the function is read that a model fetches where it is set to an implementation."""
    return AttentionFunction(
        "transformers.modeling_utils",
        "AttentionInterface",
        _POSITIONAL,
        functools.partial(_read, implementation, original),
        _PROFILES.get(implementation, "math"),
        ("query", "key", "value"),
        f"transformers:{implementation}",
    )


_POSITIONAL = ("module", "query", "key", "value", "attention_mask")
_SCORES = ("scaling", "dropout", "softcap", "s_aux", "position_bias", "is_causal", "sliding_window")
_KNOWN = frozenset((*_POSITIONAL, *_SCORES, *_BOUNDARIES, "cache", "output_attentions"))
#: what forward passes hand on to every layer, and what says where and how, not of what attention is computed
# fmt: off
_HANDED_ON = frozenset((
    "position_ids", "cache_position", "use_cache", "return_dict", "past_key_values", "num_items_in_batch", "labels",
    "shift_labels", "logits_to_keep", "token_type_ids", "mm_token_type_ids", "seq_idx", "layer_idx", "deterministic",
))
# fmt: on
_OF_INPUTS = ("output_", "input", "decoder_input", "pixel_", "image_", "video_", "audio_")


def _read(implementation: str, original: Callable[..., Any], given: Mapping[str, Any]) -> AttentionArguments:
    """Read a call, and refuse an argument that nothing is known of, unless its function takes no notice of it."""
    unknown = {n: v for n, v in given.items() if n not in _KNOWN | _HANDED_ON and not n.startswith(_OF_INPUTS)}
    named = _parameters(original)
    is_ignored = implementation in _STOCK
    refuse_unread({n: v for n, v in unknown.items() if n in named or not is_ignored}, set())
    unread = [f"{n}={shortened(v)}" for n, v in unknown.items() if v is not None and v is not False]
    return dataclasses.replace(read_call(implementation, given), unread=", ".join(unread))


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of one that Python cannot look into
        return frozenset()


#: what transformers itself has that is handed masks of pairs of a query and a key
_STOCK = ("eager", "sdpa", "flex_attention")


def is_stock(function: AttentionFunction) -> bool:
    """Return whether transformers itself has a function that is handed masks of pairs of a query and a key."""
    return function.name.removeprefix("transformers:") in _STOCK


def read_call(implementation: str, given: Mapping[str, Any]) -> AttentionArguments:
    """Read the arguments of an attention function of transformers: q, k and v "bhsd", out "bshd"."""
    if given.get("cache") is not None:
        raise UnreadableError("a paged cache is not read")
    if _is_flash(implementation) and _has_boundaries(given):
        return _read_packed(given)
    q, k, v = given["query"], given["key"], given["value"]
    visible, bias, mask = _mask(implementation, given, q, k)
    position_bias = given.get("position_bias")
    if position_bias is not None:
        position_bias = position_bias.detach().expand(-1, -1, q.shape[2], -1)[..., : k.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    return AttentionArguments(
        *(q, k, v, visible, mask, bias),
        **_scores(given),
        out_to_native=swap_rows_and_heads,
        to_result=lambda out: (swap_rows_and_heads(out).contiguous(), None),
    )


def _read_packed(given: Mapping[str, Any]) -> AttentionArguments:
    """Read what flash-attention is called with where the model says where sequences end: (1, heads, tokens, dim)."""
    batch = given["query"].shape[0]

    return AttentionArguments.in_layout(
        lambda tensor: swap_rows_and_heads(tensor).flatten(0, 1),
        given,
        ("query", "key", "value"),
        mask=_named_mask(given, is_flash=True, keys=int(given["max_length_k"])),
        cu_seqlens=given["cu_seq_lens_q"],
        cu_seqlens_kv=given["cu_seq_lens_k"],
        **_scores(given),
        out_to_native=lambda out: out.flatten(0, 1),
        to_result=lambda out: (out.view(batch, -1, *out.shape[1:]), None),
    )


def _is_flash(implementation: str) -> bool:
    return implementation.startswith("flash") or "/" in implementation


def _has_boundaries(given: Mapping[str, Any]) -> bool:
    """Return whether a call without a mask says all that transformers wants of packed sequences."""
    return given.get("attention_mask") is None and all(given.get(name) is not None for name in _BOUNDARIES)


def _scores(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes scores, and how out is taken of what a function returns."""
    sinks = given.get("s_aux")
    return {
        "sinks": None if sinks is None else sinks.flatten(),
        "scale": given.get("scaling"),
        "softcap": given.get("softcap"),
        "dropout": float(given.get("dropout") or 0.0),
        "take_out": first_of,
        "asks_more": "attention weights" if given.get("output_attentions") else "",
    }


def _mask(
    implementation: str, given: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, Mask | None]:
    """Return what the call's mask hides and adds, and what it is without a tensor."""
    found, is_flash = given.get("attention_mask"), _is_flash(implementation)
    if found is None or (is_flash and found.dim() == 2):
        visible = None if found is None else found[:, None, None, : k.shape[2]].bool()
        if implementation == "eager" or (q.shape[2] == 1 and not is_flash):
            return visible, None, None
        return visible, None, _named_mask(given, is_flash, k.shape[2])
    if type(found).__name__ == "BlockMask":
        visible, mask = read_block_mask(found, q, k)
        return visible, None, mask
    if found.dim() != 4:
        raise UnreadableError(f"its attention_mask has shape {tuple(found.shape)}; expected four dimensions")
    visible, bias = visible_and_bias(found[..., : k.shape[2]], tuple(q.shape[:-2]), q, k)
    return visible, bias, None


def _named_mask(given: Mapping[str, Any], is_flash: bool, keys: int) -> Mask | None:
    """Return the mask of is_causal and sliding_window, which counts the query's own key; the latter is flash-attention's."""
    causal, window = given.get("is_causal"), given.get("sliding_window") if is_flash else None
    if causal is None:
        causal = getattr(given["module"], "is_causal", True)
    if window and (causal or keys > window):
        return Window(window - 1, 0 if causal else window - 1)
    return Causal(bottom_right=is_flash) if causal else None
