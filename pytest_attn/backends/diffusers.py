"""The attention dispatcher of diffusers, one of its backends at a time: "diffusers:NAME" with a name of its own list."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, Kernel, KnownDefect, LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.dense import additive_or_boolean_mask, is_plain_causal
from pytest_attn.backends.layouts import bottom_right_window, in_bshd
from pytest_attn.backends.library import Library, words
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import DTYPES, Workload

if TYPE_CHECKING:
    import torch


def _may_say(*words: str, masks: tuple[str, ...]) -> Capabilities:
    """Declare what a dispatched function may be told; dtypes and sizes are the matter of the kernel behind it."""
    features = frozenset(("scale", "grouped heads", *words))
    return Capabilities(frozenset(masks), features, tuple(DTYPES), head_dim=None, head_dim_step=1, v_head_dim=True)


_ANY_MASK = _may_say("bias", "alibi", "padded", "backward", masks=("top-left", "any"))
_TOP_LEFT = _may_say("backward", masks=("top-left",))
_BOTTOM_RIGHT = _may_say("backward", masks=("bottom-right",))
_BOTTOM_RIGHT_FORWARD = _may_say(masks=("bottom-right",))
_PADDED = _may_say("padded", "backward", masks=("bottom-right",))


@dataclass(frozen=True)
class _Dispatched:
    """A name of diffusers: our own backend of the same kernel, which knows its limits and rounding, and what it is told."""

    kernel: str
    capabilities: Capabilities


_NAMES = {
    "native": _Dispatched("sdpa", _ANY_MASK),
    "_native_math": _Dispatched("math", _ANY_MASK),
    "_native_efficient": _Dispatched("sdpa_efficient", _ANY_MASK),
    "_native_cudnn": _Dispatched("sdpa_cudnn", _ANY_MASK),
    "_native_flash": _Dispatched("sdpa_flash", _TOP_LEFT),
    # it calls flex_attention without torch.compile, which writes out the scores in float32
    "flex": _Dispatched("eager", _ANY_MASK),
    "flash": _Dispatched("flash2", _BOTTOM_RIGHT),
    "flash_varlen": _Dispatched("flash2", _PADDED),
    "flash_hub": _Dispatched("hub:kernels-community/flash-attn2@v3", _BOTTOM_RIGHT),
    "flash_varlen_hub": _Dispatched("hub:kernels-community/flash-attn2@v3", _PADDED),
    # diffusers wraps it into a custom operator without a backward pass
    "_flash_3": _Dispatched("flash3", _BOTTOM_RIGHT_FORWARD),
    "_flash_varlen_3": _Dispatched("flash3", _PADDED),
    "_flash_3_hub": _Dispatched("hub:kernels-community/flash-attn3@v1", _BOTTOM_RIGHT),
    "_flash_3_varlen_hub": _Dispatched("hub:kernels-community/flash-attn3@v1", _PADDED),
    "flash_4_hub": _Dispatched("hub:kernels-community/flash-attn4@v0", _BOTTOM_RIGHT),
    "aiter_fa2_hub": _Dispatched("hub:kernels-community/aiter-flash-attn-ck@v1", _BOTTOM_RIGHT),
    "xformers": _Dispatched("xformers", _TOP_LEFT),
}
#: for names that `broken_because` refuses, which only diffusers can tell from unknown ones
_NOT_JUDGED = _Dispatched("math", _ANY_MASK)

_FLEX_IGNORES_CAUSAL = KnownDefect(
    issue="diffusers flex ignores is_causal (no report found)",
    summary="is_causal=True without an attn_mask computes full attention",
    applies=lambda workload, _machine: is_plain_causal(workload),
    tensors=("out", "dq", "dk", "dv"),
)


class DiffusersDispatch(LibraryBackend):
    """dispatch_attention_fn(query, key, value, attn_mask, is_causal=, scale=, enable_gqa=, backend=NAME).

    The dispatcher is told what its signature can say and decides by itself: what it makes of that is what is judged.
    """

    source = Library(("diffusers",), "diffusers.models.attention_dispatch", "pip install diffusers")
    needs = "what the kernel needs"

    def __init__(self, name: str) -> None:
        self.name, self.dispatched = f"diffusers:{name}", name
        known = _NAMES.get(name, _NOT_JUDGED)
        self.kernel, self.capabilities = known.kernel, known.capabilities
        self.variants = ("compile", "max_autotune") if name == "flex" or "_native" in f"_{name}" else ()
        self.precision = "sdpa" if name == "flex" else self._kernel.precision  # uncompiled flex rounds scale * dS
        self.known_defects = (_FLEX_IGNORES_CAUSAL,) if name == "flex" else self._kernel.known_defects

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where diffusers or the kernel that is dispatched to is not there."""
        return self.source.missing_because() or self._kernel.unavailable_because(machine)

    def broken_because(self) -> str | None:
        """Import diffusers, and ask it whether the name may be used."""
        reason = self.source.broken_because()
        if reason is not None:
            return reason
        dispatch = self.source.load()
        names = [member.value for member in dispatch.AttentionBackendName]
        if self.dispatched not in names:
            return f"diffusers has no attention backend {self.dispatched!r}; it has {', '.join(names)}"
        try:
            with dispatch.attention_backend(self.dispatched):  # checks what it needs, and loads a kernel of the Hub
                pass
        except Exception as error:  # of diffusers, of the Hub, or of a kernel's own import
            return words(error)
        if self.dispatched not in _NAMES:
            return f"{self.dispatched} quantises or is for another device: not judged; judged are {', '.join(_NAMES)}"
        return self._kernel.broken_because()

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse what the kernel refuses."""
        if self.dispatched == "flex" and backward and machine.kind == "cpu":
            return ["FlexAttention does not support backward on CPU"]
        return self._kernel.unsupported_because(workload, machine, backward)

    def precision_on(self, kind: str) -> str:
        """The kernel's."""
        return self.precision if self.dispatched == "flex" else self._kernel.precision_on(kind)

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The kernel's."""
        return self._kernel.workspace(workload, backward)

    def prepare(self, inputs: Inputs, backward: bool = False) -> Kernel:
        """Close over the flags and the mask."""
        dispatch, w = self.source.load(), inputs.workload
        options: dict[str, Any] = {"scale": w.scale, "enable_gqa": w.group > 1}
        options["backend"] = dispatch.AttentionBackendName(self.dispatched)
        if "top-left" in self.capabilities.masks:
            options["is_causal"] = is_plain_causal(w)
            options["attn_mask"] = None if is_plain_causal(w) else additive_or_boolean_mask(inputs)
        else:
            options["is_causal"] = bottom_right_window(w) == (-1, 0)
            options["attn_mask"] = _is_key(inputs)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return dispatch.dispatch_attention_fn(q, k, v, **options)

        return in_bshd(call)

    @cached_property
    def _kernel(self) -> Backend:
        """Our own backend of the kernel behind the name."""
        from pytest_attn.backends.registry import Registry

        return Registry()[self.kernel]


def _is_key(inputs: Inputs) -> torch.Tensor | None:
    """Return which keys there are, (batch, kv_len), None where there is no padding."""
    import torch

    if inputs.kv_lens is None:
        return None
    return torch.arange(inputs.workload.kv_len, device=inputs.device) < inputs.kv_lens[:, None]
