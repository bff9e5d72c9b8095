"""Transformer Engine's DotProductAttention: with each of its three kernels, over ranks, and as layers of a model call it."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from pytest_attn.backends.attention_args import AttentionArguments, AttentionFunction, UnreadableError, first_of, refuse_unread
from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import ANY_SIZE, Capabilities, refusals_of
from pytest_attn.backends.compilers import keeping_flash4
from pytest_attn.backends.contexts import environment
from pytest_attn.backends.defects import (
    CUDNN_NAN,
    CUDNN_NAN_OF_ONE_TILE,
    FLASH4_DQ,
    KnownDefect,
    sees_nothing,
)
from pytest_attn.backends.dense import boolean_mask
from pytest_attn.backends.layouts import (
    as_packed,
    bottom_right_window,
    in_bshd,
    mask_of_window,
    sequence_boundaries,
    without_padding,
)
from pytest_attn.backends.libraries.flash_attention import FLASH4, refused_by_compiler, refused_head_dims
from pytest_attn.backends.library import Library, refusal_of_trial
from pytest_attn.backends.machine import Machine, release
from pytest_attn.backends.subject import AttentionFn, scores_bytes
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Causal, Mask
from pytest_attn.workloads.workload import Workload

#: its kernels by the names of its log, with the variables that allow them, in the order of its list of available ones
KERNELS = {
    "FlashAttention": "NVTE_FLASH_ATTN",
    "FusedAttention": "NVTE_FUSED_ATTN",
    "UnfusedDotProductAttention": "NVTE_UNFUSED_ATTN",
}


def _environment() -> dict[str, str]:
    """Return what its import needs, and what has flash-attn 4, which it imports, keep what it compiles.

    It is pointed to torch's own cuDNN: it looks for a system's first, and two of them do not go together.
    """
    if os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH"):
        return keeping_flash4()
    nvidia = find_spec("nvidia")
    folders = [os.path.join(folder, "cudnn") for folder in (nvidia and nvidia.submodule_search_locations) or ()]
    return keeping_flash4() | next(({"CUDNN_HOME": folder} for folder in folders if os.path.isdir(folder)), {})


TRANSFORMER_ENGINE = Library(
    ("transformer-engine-torch", "transformer-engine"),
    "transformer_engine.pytorch.attention.dot_product_attention",
    "pip install --no-build-isolation transformer-engine[pytorch]",
    _environment,
)


# -- how a workload is said -------------------------------------------------------------------------------------------


def needs_tensor(w: Workload) -> bool:
    """Return whether no type of mask says it: one given as a tensor or function, or what sequences end to end cannot have."""
    if w.documents:
        return w.kv_lens is not None or w.bias is not None
    return w.band is None or bool(w.bias and w.kv_lens)


def goes_in_sequence(w: Workload) -> bool:
    """Return whether the tokens go in end to end: packed sequences, documents, and padded keys with the padding left out."""
    return not needs_tensor(w) and (w.kv_lens is not None or bool(w.documents))


def module_options(w: Workload) -> dict[str, Any]:
    """Return the arguments with which the module is made, beside heads and head dimensions."""
    options: dict[str, Any] = {"num_gqa_groups": w.kv_heads, "attention_type": "cross", "softmax_scale": w.softmax_scale}
    if w.softcap is not None:
        options["softcap"] = w.softcap
    if w.sinks:
        options["softmax_type"] = "learnable"
    return options


def module_of(te: ModuleType, inputs: Inputs, backward: bool) -> Any:
    """Return the module of a workload, trained where there is a backward pass, else evaluated."""
    w = inputs.workload
    module = te.DotProductAttention(w.heads, (w.head_dim, w.v_head_dim), **module_options(w)).requires_grad_(False)
    if inputs.sinks is not None:
        with torch.no_grad():
            module.softmax_offset.copy_(inputs.sinks)
    return module.train(backward)


def call_options(inputs: Inputs, in_sequence: bool) -> dict[str, Any]:
    """Return the arguments of the call beside q, k and v."""
    w = inputs.workload
    kind, window = _mask_type(w)
    options: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": kind, "window_size": window}
    if in_sequence:
        kind = "padding" if kind == "no_mask" else f"padding_{kind}"
        options.update(qkv_format="thd", attn_mask_type=kind)
        options |= zip((*_LENGTHS, "max_seqlen_q", "max_seqlen_kv"), sequence_boundaries(inputs), strict=True)
    if kind == "arbitrary":
        visible = boolean_mask(inputs)
        options["attention_mask"] = None if visible is None else ~visible  # True is masked
    if inputs.bias is not None:
        bias = inputs.bias.expand(-1, -1, w.q_len, w.kv_len).contiguous()
        options.update(core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    if inputs.alibi_slopes is not None:
        options.update(core_attention_bias_type="alibi", alibi_slopes=inputs.alibi_slopes)
    return options


def _mask_type(w: Workload) -> tuple[str, tuple[int, int]]:
    """Return the mask's type, as of one sequence, and its window, which is aligned to the last key; -1 is open."""
    if needs_tensor(w):
        return "arbitrary", (-1, -1)
    if w.documents:
        return ("causal", (-1, 0)) if w.mask.is_causal else ("no_mask", (-1, -1))
    assert w.band is not None
    left, right = (-1 if side is None else side for side in (w.band.left, w.band.right))
    causal = "causal" if w.band.top_left else "causal_bottom_right"
    return (causal if right == 0 else "no_mask"), (left, right)


def half_open_window_refused(w: Workload) -> list[str]:
    """Refuse a window that its pair of numbers cannot say."""
    is_half_open = w.band is not None and (w.band.left is None) != (w.band.right is None) and not w.band.is_causal
    return ["takes no window that is open on one side"] if is_half_open else []


# -- its globals ------------------------------------------------------------------------------------------------------


@contextmanager
def selected(te: ModuleType, kernel: str, remembered: dict[str, Any]) -> Iterator[None]:
    """Allow one of KERNELS only, with what a module remembered of its own last selection instead of another's."""
    selection = te._attention_backends
    allowed = {name: str(int(kernel == other)) for other, name in KERNELS.items()}
    with environment(allowed), patch.dict(selection), patch.dict(te.dot_product_attention._alibi_cache):
        selection.update(remembered or {"attention_params": None})
        yield
        remembered.update(selection)


@contextmanager
def listening(te: ModuleType, said: list[str]) -> Iterator[None]:
    """Take down what the module logs, all of it, and keep it from the terminal."""
    levels, logger = te.utils.AttentionLogging, logging.getLogger("DotProductAttention")
    before = levels._log_level, logger.level, logger.handlers, logger.propagate
    taking_down = logging.Handler()
    taking_down.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    levels._log_level, logger.handlers, logger.propagate = logging.DEBUG, [taking_down], False
    try:
        yield
    finally:
        levels._log_level, level, logger.handlers, logger.propagate = before
        logger.setLevel(level)


def unfilled_inputs(w: Workload, device: str) -> Inputs:
    """Return inputs with all the shapes and lengths of a workload, and no values."""
    place, dtype = torch.device(device), getattr(torch, w.dtype)
    lengths = draw_inputs(w.replace(heads=1, kv_heads=1, head_dim=1, v_head_dim=1, bias=None), "flat", device=place)

    def empty(like: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        shape = (like.shape[0], heads, dim) if w.is_packed else (w.batch, heads, like.shape[2], dim)
        return torch.empty(shape, dtype=dtype, device=place)

    sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
    return Inputs(
        w,
        place,
        q=empty(lengths.q, w.heads, w.head_dim),
        k=empty(lengths.k, w.kv_heads, w.head_dim),
        v=empty(lengths.v, w.kv_heads, w.v_head_dim),
        dout=empty(lengths.q, w.heads, w.v_head_dim),
        bias=torch.empty([sizes[d] if d in w.bias else 1 for d in sizes], dtype=dtype, device=place) if w.bias else None,
        sinks=torch.zeros(w.heads, dtype=dtype, device=place) if w.sinks else None,
        alibi_slopes=torch.zeros(w.heads, device=place) if w.alibi else None,
        cu_seqlens=lengths.cu_seqlens,
        cu_seqlens_kv=lengths.cu_seqlens_kv,
        kv_lens=lengths.kv_lens,
    )


# -- its three kernels -------------------------------------------------------------------------------------------------------


_MASKS = frozenset(("causal", "causal-bottom-right", "window", "documents"))
_FEATURES = frozenset(("scale", "grouped heads", "packed", "padded", "backward"))


class TransformerEngine(LibraryBackend):
    """DotProductAttention with one of its kernels allowed, in "bshd", or "thd" for packed sequences, documents and padding.

    The module is trained where there is a backward pass, else evaluated. Around each call the switches of its selection,
    what it remembers of the last one and its log are put aside and come back.
    """

    source = TRANSFORMER_ENGINE
    variants = ("graph",)
    #: which of `KERNELS`
    kernel: str
    #: of flash-attn, as its selection has last said; None for none
    flash_version: object = None

    def refusal_in(self, error: Exception) -> str | None:
        """It reads the layout of packed tensors off their addresses, and refuses some."""
        words = "The provided qkv memory layout is not supported"
        return words if words in str(error) else None

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        reasons = self.unsaid(workload, machine)
        if reasons:
            return reasons
        te = self.source.load()
        known = inspect.signature(te.DotProductAttention).parameters
        missing = [option for option in module_options(workload) if option not in known]
        if missing:
            return [f"this release has no {missing[0]}"]
        return self._not_selected_because(te, unfilled_inputs(workload, machine.device), backward)

    def unsaid(self, w: Workload, machine: Machine) -> list[str]:
        """List what its arguments cannot say of a workload, or say in another sense."""
        reasons = half_open_window_refused(w)
        if w.is_packed and needs_tensor(w):
            reasons.append("takes no mask of its own for packed sequences")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        return self._kernel(inputs, backward, [])

    def _kernel(self, inputs: Inputs, backward: bool, said: list[str]) -> AttentionFn:
        """Return the callable; what the module logs while it is called goes to `said`."""
        te, w = self.source.load(), inputs.workload
        in_sequence = goes_in_sequence(w)
        kernel_of: Callable[[AttentionFn], AttentionFn] = in_bshd
        if in_sequence:
            inputs, kernel_of = without_padding(inputs)
        module, options = module_of(te, inputs, backward), call_options(inputs, in_sequence)
        remembered: dict[str, Any] = {}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with selected(te, self.kernel, remembered), listening(te, said):
                out: torch.Tensor = module(*self.as_taken(q, k, v), **options)
            return out.view(*out.shape[:-1], w.heads, w.v_head_dim)

        return kernel_of(as_packed(call, inputs.workload) if in_sequence else call)

    def as_taken(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v in memory as the kernel reads them."""
        return tensors

    def _not_selected_because(self, te: ModuleType, inputs: Inputs, backward: bool) -> list[str]:
        """Let the module ask its selection about these tensors, and stop before it computes."""
        said: list[str] = []
        available: list[bool] = []
        select = te.utils.get_attention_backend

        def ask_only(params: Any) -> tuple[Any, ...]:
            *selected, offered = select(params)
            self.flash_version = selected[1]
            available.extend(map(bool, offered))
            return (*(False for _ in selected), offered)

        kernel = self._kernel(inputs, backward, said)
        te.utils.get_attention_backend = ask_only
        try:
            kernel(inputs.q, inputs.k, inputs.v)
        except ValueError:  # no kernel is available: raised for the answer of `ask_only`
            if not available:
                raise
        finally:
            te.utils.get_attention_backend = select
        if available[list(KERNELS).index(self.kernel)]:
            return []
        about = [" ".join(line.split()) for line in said if line.startswith("Disabling")]
        reasons = [line for line in about if self.kernel in line or "all backends" in line]
        return list(dict.fromkeys(reasons)) or [f"has no {self.kernel} here, and does not say why"]


class TeFused(TransformerEngine):
    """cuDNN's kernels."""

    name, kernel, precision, makes_plans = "te_fused", "FusedAttention", "cudnn", True
    launches = ("cuDNN", "flash")
    needs = "CUDA, sm80 to sm121"
    capabilities = Capabilities(masks=_MASKS, features=_FEATURES | {"bias", "sinks"}, v_head_dim=True)
    known_defects = (CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE)

    def as_taken(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copied where they are not contiguous: it takes strides from the format's name, not from the tensor."""
        return tuple(t.contiguous() for t in tensors)


def _goes_to_flash4(workload: Workload) -> bool:
    """Return whether flash-attn 4 is there, which is preferred where it takes the workload."""
    return FLASH4.missing_because() is None and workload.softcap is None and not workload.alibi


class TeFlash(TransformerEngine):
    """flash-attn's kernels, of the version that Transformer Engine prefers among those installed."""

    name, kernel, precision, runs_kernels_of = "te_flash", "FlashAttention", "flash2", "flash4"
    launches = ("FlashAttention",)
    needs = "CUDA, sm80 to sm121, flash-attn"
    capabilities = Capabilities(masks=_MASKS - {"causal"}, features=_FEATURES | {"softcap", "alibi"}, v_head_dim=True)
    known_defects = (
        KnownDefect(
            issue="seen on an H200 with transformer-engine 2.20.2 and flash-attn 4.0.0b36, no report found",
            summary="a causal mask goes to flash-attn 4 as a window (-1, 0), where -1 does not mean an open side: out is zero",
            applies=lambda workload, machine: _goes_to_flash4(workload) and bottom_right_window(workload) == (-1, 0),
            tensors=("out", "dq", "dk", "dv"),
            shows=lambda comparison, workload: comparison.found == 0,
        ),
        replace(
            FLASH4_DQ, applies=lambda workload, machine: _goes_to_flash4(workload) and FLASH4_DQ.applies(workload, machine)
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self.compiles = FLASH4.missing_because() is None

    def refusal_in(self, error: Exception) -> str | None:
        return refused_by_compiler(error) or super().refusal_in(error)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Ask the selection, then for what flash-attn's build, or flash-attn 4, has no kernel: the selection does not know."""
        reasons = super().native_refusals(workload, machine, backward)
        if reasons or release(str(self.flash_version))[:1] >= (4,):
            return reasons or refused_head_dims(workload, machine, backward)
        w = workload
        token = Workload(
            1, head_dim=w.head_dim, v_head_dim=w.v_head_dim, dtype=w.dtype, alibi=w.alibi, softcap=w.softcap
        )  # what decides on flash-attn's version
        reason = _refused_by_build(token, machine.device)
        return [reason] if reason else []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """ALiBi's distances, which it writes out twice and does not use."""
        return scores_bytes(workload, False) // workload.batch if workload.alibi else 0


class TeUnfused(TransformerEngine):
    """Two matrix products with a softmax between, in the workload's dtype."""

    name, kernel, precision = "te_unfused", "UnfusedDotProductAttention", "eager"
    launches = ("softmax",)  # its own, or torch's for few rows
    needs = "CUDA, sm80 to sm121"
    capabilities = replace(ANY_SIZE, masks=_MASKS | {"any"}, features=_FEATURES | {"softcap", "bias", "alibi", "sinks"})
    known_defects = (
        KnownDefect(
            issue="transformer_engine/pytorch/utils.py, attention_mask_func",
            summary="masked scores become -10000, which exceeds scores further below",
            applies=lambda workload, machine: workload.mask is not None or workload.kv_lens is not None,
            tensors=("out", "dq", "dk", "dv"),
            inputs="large",
        ),
    )

    def unsaid(self, w: Workload, machine: Machine) -> list[str]:
        """Refuse also what it rounds more often than an eager implementation, other distances, and queries without a key.

        These get the mean of the values, or zeros, as the shape has it.
        """
        is_half = w.dtype != "float32"
        reasons = super().unsaid(w, machine) + refusals_of(
            {
                f"would round the scores with ALiBi to {w.dtype}": is_half and w.alibi,
                f"would round the scores with a bias to {w.dtype}": is_half and w.bias is not None,
                f"would round each step of softcap to {w.dtype}": is_half and w.softcap is not None,
                "takes no ALiBi for packed or padded sequences": w.alibi and (goes_in_sequence(w) or w.kv_lens is not None),
                "aligns ALiBi to the first key with such a mask": w.alibi and w.mask == Causal() and w.q_len != w.kv_len,
            }
        )
        if reasons:
            return reasons
        visible = boolean_mask(unfilled_inputs(w, machine.device)) if needs_tensor(w) else None
        is_empty = sees_nothing(w) if not needs_tensor(w) else visible is not None and not bool(visible.any(-1).all())
        return ["gives queries that see no key other results than zeros"] if is_empty else []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return scores_bytes(workload, backward, copies=4)


@cache
def _refused_by_build(token: Workload, device: str) -> str | None:
    """Try one token: flash-attn is often built for a few head dimensions, of which Transformer Engine knows nothing."""
    inputs = draw_inputs(token, device=device)
    return refusal_of_trial(lambda: TeFlash().prepare(inputs)(inputs.q, inputs.k, inputs.v))


# -- calls of a model --------------------------------------------------------------------------------------------------------


_TENSORS = ("query_layer", "key_layer", "value_layer")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv")
_PARAMETERS = (
    *("self", *_TENSORS, "attention_mask", "qkv_format", *_LENGTHS, "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size"),
)
_READ = {*(*_PARAMETERS, "bottom_right_diagonal", "core_attention_bias_type", "core_attention_bias", "alibi_slopes")} - {
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
}
_WITHOUT_EFFECT = frozenset(("checkpoint_core_attention", "fast_zero_fill", "num_splits", "pad_between_seqs", "bf16_backward"))
#: of a format, the order that makes it (batch, heads, rows, dim), and the order back
_ORDERS = {"bshd": ((0, 2, 1, 3), (0, 2, 1, 3)), "sbhd": ((1, 2, 0, 3), (2, 0, 1, 3))}
_BACKEND_OF_KERNEL = {
    "use_flash_attention": "te_flash",
    "use_fused_attention": "te_fused",
    "use_unfused_attention": "te_unfused",
}
_SUBMODULES = ("fused_attention", "flash_attention", "unfused_attention")


def _ran() -> str:
    """Return the backend that has the kernel which the module selected last, "" where it does not say."""
    module: Any = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen: Mapping[str, Any] = getattr(module, "_attention_backends", None) or {}
    return next((name for key, name in _BACKEND_OF_KERNEL.items() if chosen.get(key)), "")


def _read(given: Mapping[str, Any]) -> AttentionArguments:
    """Read a call, for which the module has the defaults."""
    refuse_unread(given, _READ, _WITHOUT_EFFECT)
    module, qkv_format = given["self"], given.get("qkv_format") or given["self"].qkv_format
    if getattr(module, "cp_group", None) is not None:
        raise UnreadableError("keys that are spread over a context-parallel group are not read")
    if getattr(module, "fp8", False):
        raise UnreadableError("attention in float8 is not read")
    if qkv_format not in ("thd", *_ORDERS):
        raise UnreadableError(f"its format {qkv_format!r} is not read; 'bshd', 'sbhd' and 'thd' are")
    is_packed = qkv_format == "thd"
    to, back = ((0, 1, 2), (0, 1, 2)) if is_packed else _ORDERS[qkv_format]
    heads = given["query_layer"].shape[-2]
    q, k = (given[name].permute(to) for name in _TENSORS[:2])
    visible, mask = _mask(given, module, q, k, is_packed)
    return AttentionArguments.in_layout(
        lambda tensor: tensor.permute(to),
        given,
        _TENSORS,
        visible=visible,
        mask=mask,
        **_scores(given, module),
        dropout=float(module.attention_dropout or 0.0) if module.training else 0.0,
        cu_seqlens=given["cu_seqlens_q"] if is_packed else None,
        cu_seqlens_kv=given["cu_seqlens_kv"] if is_packed else None,
        take_out=first_of,
        out_to_native=lambda out: out.view(*out.shape[:-1], heads, -1).permute(to),
        to_result=lambda out: out.permute(back).flatten(-2),
        asks_more="the largest score" if getattr(module, "return_max_logit", False) else "",
    )


def _scores(given: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """Return what changes scores: scale, softcap, bias, slopes and sinks."""
    kind, bias = given.get("core_attention_bias_type") or "no_bias", given.get("core_attention_bias")
    slopes = given.get("alibi_slopes")
    if kind not in ("no_bias", "post_scale_bias", "alibi") or (kind == "alibi" and (slopes is None or slopes.dim() != 1)):
        raise UnreadableError(f"its core_attention_bias_type={kind!r} is not read; 'post_scale_bias' and slopes per head are")
    scales = (getattr(getattr(module, name, None), "softmax_scale", None) for name in _SUBMODULES)
    sinks = getattr(module, "softmax_offset", None)
    return {
        "scale": next((float(scale) for scale in scales if scale is not None), None),
        "softcap": getattr(module, "softcap", None) or None,
        "bias": bias.detach() if kind == "post_scale_bias" and bias is not None else None,
        "alibi_slopes": slopes if kind == "alibi" else None,
        "sinks": None if sinks is None else sinks.flatten(),
    }


def _mask(
    given: Mapping[str, Any], module: Any, q: torch.Tensor, k: torch.Tensor, is_packed: bool
) -> tuple[torch.Tensor | None, Mask | None]:
    """Return what is visible as a tensor, where one is given, and the mask that the type of it names."""
    kind = given.get("attn_mask_type") or module.attn_mask_type
    kind = kind.replace(",", "_").replace("causal_padding", "padding_causal")
    window = given.get("window_size") or getattr(module, "window_size", None)
    named = _named_mask(kind, window, is_packed or q.shape[2] == k.shape[2])
    if is_packed:
        return None, named
    found = given.get("attention_mask")
    if kind == "arbitrary" and found is not None:
        return ~found.expand(-1, -1, q.shape[2], k.shape[2]), named
    return (_padded(given, q, k) if "padding" in kind else None), named


def _named_mask(kind: str, window: Any, is_square: bool) -> Mask | None:
    """Return the mask of a type. is_square: as many queries as keys, so that both corners are one."""
    left = -1 if window is None else window[0]
    if "causal" not in kind:
        return mask_of_window(False, window)
    if "bottom_right" in kind or (is_square and left is not None and left >= 0):
        return mask_of_window(True, (left, 0))
    if left is not None and left >= 0:
        raise UnreadableError(f"its window {tuple(window)} is counted from the top left, which is not read")
    return Causal()


def _padded(given: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return what padded sequences see, (batch, 1, q_len, kv_len); a query that is padded sees nothing."""
    found = given.get("attention_mask")
    if found is not None:
        rows, keys = found if isinstance(found, tuple | list) else (found, found)
        rows, keys = (~t.reshape(q.shape[0], -1) for t in (rows, keys))
    else:
        ends = [given.get(name) for name in _LENGTHS]
        if any(end is None for end in ends):
            raise UnreadableError("neither attention_mask nor cu_seqlens_q and cu_seqlens_kv say what is padding")
        sides = zip((q, k), ends, strict=True)
        rows, keys = (torch.arange(t.shape[2], device=t.device) < end.diff()[:, None] for t, end in sides)  # type: ignore[union-attr]
    visible: torch.Tensor = rows[:, None, :, None] & keys[:, None, None, :]
    return visible


FUNCTIONS = (
    AttentionFunction(
        "transformer_engine.pytorch",
        "DotProductAttention.forward",
        _PARAMETERS,
        _read,
        "te_fused",
        _TENSORS,
        "transformer_engine.DotProductAttention",
        ran=_ran,
    ),
)
