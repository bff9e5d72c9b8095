"""The attention functions of transformers, as its models call them: "transformers:NAME" with a name of its interface."""

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from pytest_attn.backends.defects import KnownDefect, sees_nothing
from pytest_attn.backends.dense import additive_or_boolean_mask, alibi_bias, is_plain_causal
from pytest_attn.backends.layouts import bottom_right_window, is_key, sequence_boundaries
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.dispatcher import ANY_MASK, COMPILABLE, Dispatched, Dispatcher, may_say
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

_SINKS_FROM_ROUNDED_LSE = KnownDefect(
    issue="transformers flex_attention rounds lse before it applies sinks (no report found)",
    summary="the share of the sink is computed from an lse in the workload's dtype",
    applies=lambda workload, _machine: bool(workload.sinks) and workload.dtype != "float32",
    tensors=("out", "dq", "dk", "dv"),
)

#: the arguments that say where packed sequences end, for flash-attention
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
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

    stands_for = "what transformers makes of one of its names"
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
        if self.dispatched == "flex_attention":  # what transformers and torch refuse where nobody names a kernel
            if workload.is_packed:
                return ["does not support packed sequences"]
            if workload.sinks and machine.kind == "cpu":
                return ["Attention sinks cannot be run on CPU with flex attention"]
            if machine.kind != "cpu" and workload.q_len < 128 < workload.q_len * workload.group:
                return [f"finds no kernel for q_len * group = {workload.q_len * workload.group} rows"]
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
        arguments.update(zip(BOUNDARIES, sequence_boundaries(inputs), strict=True))
    return arguments


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
