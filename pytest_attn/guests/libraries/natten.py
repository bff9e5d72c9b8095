"""NATTEN: neighborhood attention over 1-, 2- and 3-D token layouts."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.configured import Options
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, scores_bytes
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Neighborhood
from pytest_attn.workloads.workload import Workload

_INSTALL = "pip install natten"
#: The extension with NATTEN's own kernels, which the source distribution leaves out.
_LIBNATTEN = Library(("natten",), "natten.libnatten", _INSTALL)
#: Its own choices, in its order: of neighborhood attention, and of full windows, which it hands to plain attention.
_CHECKS = ("can_run_cutlass_blackwell_fna", "can_run_cutlass_hopper_fna", "can_run_cutlass_fna")
#: Its kernels with tiles, by the name of `backend=` and of the function that lists them, and its words for Hopper's schedules.
_TUNED = (("blackwell-fna", "cutlass_blackwell_fna"), ("hopper-fna", "cutlass_hopper_fna"), ("cutlass-fna", "cutlass_fna"))
_TILES = ("q_tile_shape", "kv_tile_shape")
_SCHEDULES = {"NonPersistent": "non", "WarpSpecializedCooperative": "coop", "WarpSpecializedPingpong": "pp"}
_FULL_CHECKS = ("can_run_cutlass_blackwell_fmha", "can_run_cutlass_hopper_fmha", "can_run_cutlass_fmha")


class Natten(LibraryBackend):
    """na1d, na2d and na3d with the kernel that NATTEN chooses.

    Without its compiled library, libnatten, that is `flex-fna`: torch's flex_attention without torch.compile, which
    writes out all scores and builds its block mask at every call. The version says so.
    """

    name = "natten"
    source = Library(("natten",), "natten.functional", _INSTALL)
    # cutlass-fna is CUTLASS's fmha; flex-fna and the repeated heads of the others round dk and dv per query head.
    precision = "sdpa"
    needs = "CUDA, sm80 to sm121"
    capabilities = Capabilities(
        masks=frozenset(("neighborhood",)),
        features=frozenset(("scale", "grouped heads", "backward")),
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        v_head_dim=True,
    )

    tunable = frozenset(("backend", "kernel_schedule", *(f"{way}{tile}" for way in ("", "backward_") for tile in _TILES)))

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Every kernel of its library that takes the workload, with every tile shape that this has.

        Those of the forward pass, or of the backward pass where there is one. Tile shapes of one dimension are numbers.
        """
        mask = workload.plain_mask
        if not isinstance(mask, Neighborhood) or _is_handed_to_plain_attention(mask):
            return ()
        tensors = _empty_tensors(workload, mask, machine, backward)
        natten, found = import_module("natten"), []
        for kernel, name in _TUNED:
            ask = getattr(natten, f"get_{'bwd_' if backward else ''}configs_for_{name}", None)
            found += [_as_options(kernel, one, "backward_" if backward else "") for one in (ask(*tensors) if ask else ())]
        return found

    def version(self) -> str:
        """Say where NATTEN runs without kernels of its own."""
        missing = _LIBNATTEN.missing_because() is not None
        return f"{super().version()} (without libnatten)" if missing else super().version()

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse all but neighborhoods, then say in NATTEN's own words why none of its kernels can run."""
        mask = workload.plain_mask
        if not isinstance(mask, Neighborhood):
            return ["takes neighborhood masks only"]
        if len(mask.shape) > 3:
            return [f"takes token layouts of at most 3 dimensions, not {len(mask.shape)}"]
        if min(mask.kernel) < 2:
            return [f"takes kernels of at least 2 tokens in each dimension, not {mask.kernel}"]
        self.source.load()
        kernels = import_module("natten.backends")
        tensors, checks, options = _empty_tensors(workload, mask, machine, backward), _CHECKS, dict[str, bool]()
        if _is_handed_to_plain_attention(mask):
            tensors = [t.flatten(1, len(mask.shape)) for t in tensors]
            checks, options = _FULL_CHECKS, {"is_causal": _causal_flags(mask)[0], "is_varlen": False}
        arguments_of = {**dict.fromkeys(checks, options), "can_run_flex_attention": {**options, "torch_compile": False}}
        reasons = [_refusal_of(getattr(kernels, check), tensors, arguments) for check, arguments in arguments_of.items()]
        return [] if None in reasons else [reason for reason in reasons if reason]  # none where one kernel can run

    def refusal_in(self, error: Exception) -> str | None:
        """Return its words where this build lacks the kernel that its selection chose."""
        words = " ".join(str(error).split())
        return words if "kernel dispatch failed" in words else None

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """Without libnatten the scores, in float32, and the indices that its mask is made of."""
        if _LIBNATTEN.missing_because() is None:
            return 0
        indices = 8 * workload.q_len * workload.kv_len
        return scores_bytes(workload, backward, copies=5) + 8 * indices

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Lay the tokens out in the mask's shape, heads behind it."""
        w = inputs.workload
        mask = w.plain_mask
        assert isinstance(mask, Neighborhood)
        shape = mask.shape
        function = getattr(self.source.load(), f"na{len(shape)}d")
        options = {
            "kernel_size": mask.kernel,
            "stride": mask.stride,
            "dilation": mask.dilation,
            "is_causal": _causal_flags(mask),
            "scale": w.softmax_scale,
            **{name: (value,) if isinstance(value, int) else value for name, value in self.configuration.items()},
        }

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            out = function(*(t.view(len(t), *shape, *t.shape[2:]) for t in (q, k, v)), **options)
            return out.flatten(1, len(shape))

        return in_bshd(call)


def _causal_flags(mask: Neighborhood) -> tuple[bool, ...]:
    assert isinstance(mask.causal, tuple)
    return tuple(bool(flag) for flag in mask.causal)


def _empty_tensors(w: Workload, mask: Neighborhood, machine: Machine, backward: bool) -> list[torch.Tensor]:
    """Return q, k and v as NATTEN lays them out, which looks at shapes only; of one element, however large they look."""
    one = torch.zeros((), dtype=getattr(torch, w.dtype), device=machine.device, requires_grad=backward)
    sizes = (w.heads, w.head_dim), (w.kv_heads, w.head_dim), (w.kv_heads, w.v_head_dim)
    return [one.expand(w.batch, *mask.shape, *size) for size in sizes]


def _as_options(kernel: str, config: Any, prefix: str) -> Options:
    """Return one of NATTEN's configurations as arguments: (q tile, kv tile), or ((q tile, kv tile), schedule) on Hopper."""
    options: dict[str, Any] = {"backend": kernel}
    tiles = config
    if hasattr(config[1], "name"):
        tiles = config[0]
        options["kernel_schedule"] = _SCHEDULES[config[1].name]
    shapes = (tuple(shape) if len(shape) > 1 else shape[0] for shape in tiles)
    return {**options, **{prefix + name: shape for name, shape in zip(_TILES, shapes, strict=True)}}


def _refusal_of(check: Callable[..., bool], tensors: list[torch.Tensor], options: dict[str, bool]) -> str | None:
    try:
        check(*tensors, raise_error=True, **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return " ".join(str(error).split())
    return None


def _is_handed_to_plain_attention(mask: Neighborhood) -> bool:
    """Return whether every window is full: NATTEN then calls its plain attention, in one dimension also where it is causal."""
    full = mask.kernel == mask.shape
    return full and (len(mask.shape) == 1 or not any(_causal_flags(mask)))
