"""The attention dispatcher of diffusers: "diffusers:NAME" with a name of its own list."""

from functools import partial
from typing import Any

import torch

from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.dense import additive_or_boolean_mask, is_plain_causal
from pytest_attn.backends.layouts import bottom_right_window, in_bshd, is_key
from pytest_attn.backends.library import Library, describe_error
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision, uncompiled_flex_precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.dispatcher import ANY_MASK, COMPILABLE, Dispatched, Dispatcher, may_say
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

_TOP_LEFT = may_say("backward", masks=("causal",))
_BOTTOM_RIGHT = may_say("backward", masks=("causal-bottom-right",))
_BOTTOM_RIGHT_FORWARD = may_say(masks=("causal-bottom-right",))
_PADDED = may_say("padded", "backward", masks=("causal-bottom-right",))

_FLEX_IGNORES_CAUSAL = KnownDefect(
    issue="diffusers flex ignores is_causal (no report found)",
    summary="is_causal=True without an attn_mask computes full attention",
    applies=lambda workload, _machine: is_plain_causal(workload),
    tensors=("out", "dq", "dk", "dv"),
)

_NAMES = {
    "native": Dispatched("sdpa", ANY_MASK, COMPILABLE),
    "_native_math": Dispatched("math", ANY_MASK, COMPILABLE),
    "_native_efficient": Dispatched("sdpa_efficient", ANY_MASK, COMPILABLE),
    "_native_cudnn": Dispatched("sdpa_cudnn", ANY_MASK, COMPILABLE),
    "_native_flash": Dispatched("sdpa_flash", _TOP_LEFT, COMPILABLE),
    # it calls flex_attention without torch.compile; precision_on says how that rounds
    "flex": Dispatched("eager", ANY_MASK, COMPILABLE, precision="sdpa", known_defects=(_FLEX_IGNORES_CAUSAL,)),
    "flash": Dispatched("flash2", _BOTTOM_RIGHT),
    "flash_varlen": Dispatched("flash2", _PADDED),
    "flash_hub": Dispatched("hub:kernels-community/flash-attn2@v3", _BOTTOM_RIGHT),
    "flash_varlen_hub": Dispatched("hub:kernels-community/flash-attn2@v3", _PADDED),
    # diffusers wraps it into a custom operator without a backward pass
    "_flash_3": Dispatched("flash3", _BOTTOM_RIGHT_FORWARD),
    "_flash_varlen_3": Dispatched("flash3", _PADDED),
    "_flash_3_hub": Dispatched("hub:kernels-community/flash-attn3@v1", _BOTTOM_RIGHT),
    "_flash_3_varlen_hub": Dispatched("hub:kernels-community/flash-attn3@v1", _PADDED),
    "flash_4_hub": Dispatched("hub:kernels-community/flash-attn4@v0", _BOTTOM_RIGHT),
    "aiter_fa2_hub": Dispatched("hub:kernels-community/aiter-flash-attn-ck@v1", _BOTTOM_RIGHT),
    "xformers": Dispatched("xformers", _TOP_LEFT),
}


class DiffusersDispatch(Dispatcher):
    """dispatch_attention_fn(query, key, value, attn_mask, is_causal=, scale=, enable_gqa=, backend=NAME).

    The dispatcher gets what its signature can say, and decides by itself. Its decision is judged.
    """

    stands_for = "what diffusers' dispatcher makes of one of its names"
    source = Library(("diffusers",), "diffusers.models.attention_dispatch", "pip install diffusers")
    judged, noun, others = _NAMES, "attention backend", "quantizes or is for another device"

    def names(self) -> list[str]:
        return [member.value for member in self.source.load().AttentionBackendName]

    def broken_because(self) -> str | None:
        if reason := super().broken_because():
            return reason
        try:
            with self.source.load().attention_backend(self.dispatched):
                pass
        except Exception as error:  # of diffusers, of the Hub, or of a kernel's own import
            return describe_error(error)
        return self._kernel.broken_because()

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse what flex_attention without torch.compile refuses, or the kernel."""
        if self.dispatched == "flex" and backward and machine.kind == "cpu":
            return ["FlexAttention does not support backward on CPU"]
        return super().native_refusals(workload, machine, backward)

    def precision_on(self, kind: str) -> str | Precision:
        """The kernel's, but for flex_attention without torch.compile, which rounds by torch's release."""
        return uncompiled_flex_precision(torch.__version__) if self.dispatched == "flex" else super().precision_on(kind)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        dispatch, w = self.source.load(), inputs.workload
        options: dict[str, Any] = {"scale": w.scale, "enable_gqa": w.group > 1}
        options["backend"] = dispatch.AttentionBackendName(self.dispatched)
        if "causal" in self.capabilities.masks:
            options["is_causal"] = is_plain_causal(w)
            options["attn_mask"] = None if is_plain_causal(w) else additive_or_boolean_mask(inputs)
        else:
            options["is_causal"] = bottom_right_window(w) == (-1, 0)
            options["attn_mask"] = is_key(inputs)

        return in_bshd(partial(dispatch.dispatch_attention_fn, **options))
