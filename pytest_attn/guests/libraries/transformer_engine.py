"""Transformer Engine's DotProductAttention: with each of its three kernels."""

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import ANY_SIZE, Capabilities, refusals_of
from pytest_attn.backends.compilers import keeping_flash4
from pytest_attn.backends.contexts import environment
from pytest_attn.backends.defects import CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE, FLASH4_DQ, KnownDefect, sees_nothing
from pytest_attn.backends.dense import boolean_mask
from pytest_attn.backends.flex import refused_head_dims
from pytest_attn.backends.layouts import bottom_right_window, in_bshd, sequence_boundaries
from pytest_attn.backends.library import FLASH4, Library, refusals_of_trial
from pytest_attn.backends.machine import Machine, release
from pytest_attn.backends.subject import AttentionFn, scores_bytes
from pytest_attn.guests.libraries.flash_attention import refused_by_compiler, without_padding
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Causal
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
        options |= zip(
            ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"), sequence_boundaries(inputs), strict=True
        )
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
    return replace(
        lengths,
        workload=w,
        q=empty(lengths.q, w.heads, w.head_dim),
        k=empty(lengths.k, w.kv_heads, w.head_dim),
        v=empty(lengths.v, w.kv_heads, w.v_head_dim),
        dout=empty(lengths.q, w.heads, w.v_head_dim),
        bias=torch.empty([sizes[d] if d in w.bias else 1 for d in sizes], dtype=dtype, device=place) if w.bias else None,
        sinks=torch.zeros(w.heads, dtype=dtype, device=place) if w.sinks else None,
        alibi_slopes=torch.zeros(w.heads, device=place) if w.alibi else None,
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

        return kernel_of(call)

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
        return [*_refused_by_build(token, machine.device)]

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
        if needs_tensor(w):
            visible = boolean_mask(unfilled_inputs(w, machine.device))
            is_empty = visible is not None and not bool(visible.any(-1).all())
        else:
            is_empty = sees_nothing(w)
        return ["gives queries that see no key other results than zeros"] if is_empty else []

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return scores_bytes(workload, backward, copies=4)


@cache
def _refused_by_build(token: Workload, device: str) -> tuple[str, ...]:
    """Try one token: flash-attn is often built for a few head dimensions, of which Transformer Engine knows nothing."""
    inputs = draw_inputs(token, device=device)
    return refusals_of_trial(lambda: TeFlash().prepare(inputs)(inputs.q, inputs.k, inputs.v))
