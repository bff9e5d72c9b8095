"""Attention kernels of the Hugging Face Hub, loaded by the `kernels` library: "hub:ORG/REPO", "...@v1", "...@REVISION"."""

import inspect
import os
import re
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.layouts import (
    bottom_right_window,
    first_of,
    in_bshd,
    sequence_boundaries,
)
from pytest_attn.backends.library import Library, describe_error, refusal_of_build
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.libraries.flash_attention import BOUNDARIES, without_padding
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: Both are flash-attention's; a kernel needs one of them.
_DENSE, _PACKED = "flash_attn_func", "flash_attn_varlen_func"


class HubKernel(LibraryBackend):
    """A kernel with flash-attention's functions, of version 2, 3 or 4: what its signature lacks is refused.

    `address` is a repository, with the version "@v1" or the revision (branch, tag, commit) behind it; without, "main".
    LOCAL_KERNELS="ORG/REPO=/path" replaces the download by a folder.
    """

    stands_for = "a kernel of the Hugging Face Hub"
    source = Library(("kernels",), "kernels", "pip install kernels")
    variants = ("compile", "max_autotune")
    full_graph = False
    is_contained = False  # anybody's code
    needs = "what the kernel was built for"
    capabilities = Capabilities(
        masks=frozenset(("causal-bottom-right", "window", "documents")),
        features=frozenset(("softcap", "alibi", "scale", "grouped heads", "packed", "padded", "backward")),
    )

    def __init__(self, address: str) -> None:
        self.name = f"hub:{address}"
        self.repo, _, version = address.partition("@")
        self.revision = version or "main"

    @property
    def library(self) -> str:  # type: ignore[override]
        return self.repo

    def version(self) -> str:
        """The commit that was loaded, "local" for a folder of LOCAL_KERNELS, what was asked for where nothing was."""
        for loaded in [] if self.broken_because() else self.source.load().get_loaded_kernels():
            if loaded.module is self._loaded:
                return str(loaded.repo_info.revision) if loaded.repo_info else "local"
        return self.revision

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where `kernels` is not installed; for which devices there is a build, the repository says."""
        return self.source.missing_because()

    def broken_because(self) -> str | None:
        return self.source.broken_because() or (self._loaded if isinstance(self._loaded, str) else None)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Refuse what the kernel's functions have no parameter for, then what it refuses of one token, in its own words."""
        name = _PACKED if _goes_packed(workload) else self._dense_name
        function = getattr(self._module, name, None)
        if function is None:
            return [f"its module has no {name}"]
        known, window = inspect.signature(function).parameters, bottom_right_window(workload)
        needed = {
            "causal": window == (-1, 0),
            "window_size": workload.mask is not None and not workload.documents and window not in (None, (-1, 0)),
            "softmax_scale": workload.scale is not None,
            "softcap": workload.softcap is not None,
            "alibi_slopes": workload.alibi,
        }
        reasons = [
            f"its {name} has no {parameter}" for parameter, is_needed in needed.items() if is_needed and parameter not in known
        ]
        return reasons or self._refusals_of_one_token(workload, machine, backward)

    def precision_on(self, kind: str) -> str | Precision:
        """FlashAttention 2 is the one that takes dropout_p."""
        function = getattr(self._loaded, _DENSE, None) or getattr(self._loaded, _PACKED, None)
        return "flash2" if function and "dropout_p" in inspect.signature(function).parameters else "flash"

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        if _goes_packed(inputs.workload) or self._dense_name == _PACKED:
            inputs, kernel_of = without_padding(inputs)
            ends = dict(zip(BOUNDARIES, sequence_boundaries(inputs), strict=True))
            return kernel_of(_bare(getattr(self._module, _PACKED), inputs.workload, alibi_slopes=inputs.alibi_slopes, **ends))
        return in_bshd(_bare(getattr(self._module, _DENSE), inputs.workload, alibi_slopes=inputs.alibi_slopes))

    @property
    def _dense_name(self) -> str:
        return _DENSE if hasattr(self._module, _DENSE) else _PACKED

    @property
    def _module(self) -> ModuleType:
        if isinstance(self._loaded, str):
            raise RuntimeError(self._loaded)
        return self._loaded

    @cached_property
    def _loaded(self) -> ModuleType | str:
        """The kernel's module, or why there is none."""
        kernels = self.source.load()
        version = re.fullmatch(r"v(\d+)", self.revision)
        chosen: dict[str, Any] = {"version": int(version[1])} if version else {"revision": self.revision}
        try:
            module: ModuleType = kernels.get_kernel(self.repo, **chosen)
        except Exception as error:  # of the Hub, or of the kernel's own import
            is_local = f"{self.repo}=" in os.environ.get("LOCAL_KERNELS", "")
            advice = "" if is_local else f" (go online, or name a local copy: LOCAL_KERNELS={self.repo}=/path/to/repository)"
            return f"{self.repo} cannot be loaded: {describe_error(error)}{advice}"
        if not (hasattr(module, _DENSE) or hasattr(module, _PACKED)):
            exported = [name for name in dir(module) if not name.startswith("_")]
            return f"{self.repo} has neither {_DENSE} nor {_PACKED}; it exports {', '.join(exported) or 'nothing'}"
        return module

    def _refusals_of_one_token(self, w: Workload, machine: Machine, backward: bool) -> list[str]:
        """Run the smallest call: builds differ in dtypes, head dimensions and devices, and in whether they have gradients."""
        dtype = getattr(torch, w.dtype)
        one = torch.zeros(1, 1, 1, w.head_dim, dtype=dtype, device=machine.device, requires_grad=backward)
        one_token = w.replace(
            q_len=1, kv_len=1, batch=1, heads=1, kv_heads=1, q_lens=None, kv_lens=None, mask=None, alibi=False, softcap=None
        )
        inputs = Inputs(one_token, one.device, one, one, one, one)
        try:
            out = self.prepare(inputs, backward)(one, one, one)
        except (RuntimeError, AssertionError) as error:
            if refusal_of_build(error) is None:
                raise
            return [f"refuses one token: {describe_error(error)}"]
        return ["its output carries no gradient"] if backward and not out.requires_grad else []


def _goes_packed(w: Workload) -> bool:
    return w.is_packed or w.kv_lens is not None or bool(w.documents)


def _bare(function: Any, w: Workload, **tensors: Any) -> AttentionFn:
    """Return `function` of q, k and v alone, with the workload's options in its own words."""
    known = inspect.signature(function).parameters
    options = {name: value for name, value in tensors.items() if value is not None}
    window = bottom_right_window(w)
    assert window is not None
    if window == (-1, 0):
        options["causal"] = True
    elif window != (-1, -1):
        is_open, _, *rest = known["window_size"].default  # -1 in FlashAttention 2 and 3, None in 4; a third one in AITER
        options["window_size"] = (*(is_open if side == -1 else side for side in window), *rest)
    options |= {name: value for name, value in (("softmax_scale", w.scale), ("softcap", w.softcap)) if value is not None}

    return lambda q, k, v: first_of(function(q, k, v, **options))
