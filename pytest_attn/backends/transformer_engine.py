"""How a workload is said to Transformer Engine's DotProductAttention, and what of its globals is put aside around a call."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.contexts import environment
from pytest_attn.backends.defects import sees_nothing
from pytest_attn.backends.dense import boolean_mask
from pytest_attn.backends.layouts import sequence_boundaries
from pytest_attn.backends.library import Library
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.masks import Causal, Document, Window
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: its kernels by the names of its log, with the variables that allow them, in the order of its list of available ones
KERNELS = {
    "FlashAttention": "NVTE_FLASH_ATTN",
    "FusedAttention": "NVTE_FUSED_ATTN",
    "UnfusedDotProductAttention": "NVTE_UNFUSED_ATTN",
}


def _cudnn_of_torch() -> dict[str, str]:
    """Point Transformer Engine to torch's own cuDNN: it looks for a system's first, and two of them do not go together."""
    if os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH"):
        return {}
    nvidia = find_spec("nvidia")
    folders = [os.path.join(folder, "cudnn") for folder in (nvidia and nvidia.submodule_search_locations) or ()]
    return next(({"CUDNN_HOME": folder} for folder in folders if os.path.isdir(folder)), {})


TRANSFORMER_ENGINE = Library(
    ("transformer-engine-torch", "transformer-engine"),
    "transformer_engine.pytorch.attention.dot_product_attention",
    "pip install --no-build-isolation transformer-engine[pytorch]",
    _cudnn_of_torch,
)


# -- how a workload is said -------------------------------------------------------------------------------------------


def needs_tensor(w: Workload) -> bool:
    """Whether no type of mask says it: a mask given as a tensor or function, or what sequences end to end cannot have."""
    if isinstance(w.mask, Document):
        return w.kv_lens is not None or w.bias is not None
    return not isinstance(w.mask, Causal | Window | None) or bool(w.bias and w.kv_lens)


def goes_in_sequence(w: Workload) -> bool:
    """Whether the tokens go in end to end: packed sequences, documents, and padded keys with the padding left out."""
    return not needs_tensor(w) and (w.kv_lens is not None or isinstance(w.mask, Document))


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
    import torch

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
        cu_q, cu_kv, longest_q, longest_kv = sequence_boundaries(inputs)
        kind = "padding" if kind == "no_mask" else f"padding_{kind}"
        options.update(qkv_format="thd", attn_mask_type=kind, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
        options.update(max_seqlen_q=longest_q, max_seqlen_kv=longest_kv)
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
    mask = w.plain_mask
    if needs_tensor(w):
        return "arbitrary", (-1, -1)
    if mask == Causal() or (isinstance(mask, Document) and mask.causal):
        return "causal", (-1, 0)
    if isinstance(mask, Causal):
        return "causal_bottom_right", (-1, 0)
    if not isinstance(mask, Window):
        return "no_mask", (-1, -1)
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return ("causal_bottom_right" if right == 0 else "no_mask"), (left, right)


def fully_masked_rows_refused(w: Workload, device: str) -> list[str]:
    """Refuse queries that see no key: they get the mean of the values, or zeros, as the shape has it."""
    if needs_tensor(w):
        visible = boolean_mask(unfilled_inputs(w, device))
        fully_masked = visible is not None and not bool(visible.any(-1).all())
    else:
        fully_masked = sees_nothing(w)
    return ["gives queries that see no key other results than zeros"] if fully_masked else []


def half_open_window_refused(w: Workload) -> list[str]:
    """Refuse a window that its pair of numbers cannot say."""
    is_half_open = isinstance(w.mask, Window) and (w.mask.left is None) != (w.mask.right is None)
    return ["takes no window that is open on one side"] if is_half_open and w.mask != Window(None, 0) else []


# -- its globals ------------------------------------------------------------------------------------------------------


@contextmanager
def selected(te: ModuleType, kernel: str, remembered: dict[str, Any]) -> Iterator[None]:
    """Allow one of KERNELS only, with what a module remembered of its own last selection instead of another's."""
    selection = te._attention_backends
    allowed = {name: str(int(kernel == other)) for other, name in KERNELS.items()}
    with environment(allowed), restored(selection), restored(te.dot_product_attention._alibi_cache):
        selection.update(remembered or {"attention_params": None})
        yield
        remembered.update(selection)


@contextmanager
def restored(state: dict[str, Any]) -> Iterator[None]:
    """Put a global dictionary back as it was."""
    before = dict(state)
    try:
        yield
    finally:
        state.clear()
        state.update(before)


@contextmanager
def listening(te: ModuleType, said: list[str]) -> Iterator[None]:
    """Take down what the module logs, all of it, and keep it from the terminal."""
    levels, logger = te.utils.AttentionLogging, logging.getLogger("DotProductAttention")
    before = levels._log_level, logger.level, logger.handlers, logger.propagate
    levels._log_level, logger.handlers, logger.propagate = logging.DEBUG, [_TakeDown(said)], False
    try:
        yield
    finally:
        levels._log_level, level, logger.handlers, logger.propagate = before
        logger.setLevel(level)


class _TakeDown(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def unfilled_inputs(w: Workload, device: str) -> Inputs:
    """Return inputs with all the shapes and lengths of a workload, and no values."""
    import torch

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
