"""Calls of the kernel under audit: computed by another one, and whether its fault is beyond rounding in them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.judge import compare_all
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.guests.libraries.flash_attention import mask_of_window
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    DropoutError,
    UnreadableError,
    asks_the_same,
    swap_rows_and_heads,
    to_inputs,
    unchanged,
)
from pytest_attn.guests.models.calls.flash_attention_calls import OPTIONS, read_flash
from pytest_attn.guests.models.interception import InterceptedCall
from pytest_attn.guests.mutants.kernel import KernelBackend
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: references that are kept: the runs of a test ask for the same few
_KEPT = 16
#: from the order of dimensions of a repository's function to (batch, heads, rows, dim), and back
LAYOUTS = {"bhsd": unchanged, "bshd": swap_rows_and_heads}
#: what is read here of its arguments; those that ask for more than out are answered as by its own kernel
_READ = {"causal", "window_size", "return_lse", "return_softmax_lse", "return_attn_probs", "out"}


def in_layout(function: AttentionFunction, layout: str) -> AttentionFunction:
    """Return a function whose tensors lie in a layout; `causal` aligns as in flash-attn, `is_causal` as in torch."""
    swap = LAYOUTS[layout]

    def read(given: Mapping[str, Any]) -> AttentionArguments:
        given = {**{name: value for name, value in function.defaults.items() if name in OPTIONS}, **given}
        if given.get("cu_seqlens_q") is not None:
            return _read_packed(given, function.tensors)
        tensors = {name: swap(given[name]) for name in function.tensors if getattr(given[name], "ndim", 0) == 4}
        found = function.read({name: value for name, value in {**given, **tensors}.items() if name not in _READ})
        mask = mask_of_window(given.get("causal"), given.get("window_size")) or found.mask
        return dataclasses.replace(found, mask=mask, to_native=swap, to_result=_into(given.get("out"), swap))

    return dataclasses.replace(function, read=read)


def with_pages(function: AttentionFunction) -> AttentionFunction:
    """Return a function of a library with calls read whose packed queries have keys in pages, which no model makes."""

    def read(given: Mapping[str, Any]) -> AttentionArguments:
        is_paged = given.get("cu_seqlens_q") is not None and given.get("block_table") is not None
        return _read_packed(given, function.tensors) if is_paged else function.read(given)

    return dataclasses.replace(function, read=read) if "block_table" in function.parameters else function


def _read_packed(given: Mapping[str, Any], names: tuple[str, str, str]) -> AttentionArguments:
    """Read the arguments of flash_attn_varlen_func, and of vLLM's: keys lie end to end, or in pages (`block_table`)."""
    table, ends, used = (given.get(name) for name in ("block_table", "cu_seqlens_k", "seqused_k"))
    if used is None:
        if ends is None:
            raise UnreadableError("neither cu_seqlens_k nor seqused_k says how many keys there are")
        used = ends.diff()
    rows, last = len(given[names[0]]), int(given["cu_seqlens_q"][-1])
    if rows != last:
        raise UnreadableError(f"{names[0]} has {rows} rows, and cu_seqlens_q ends at {last}")
    known, pages = {"out"}, dict[str, Any]()
    if table is not None:
        known, pages = {"out", "block_table", "seqused_k"}, {"page_table": table, "kv_lens": tuple(used.tolist())}
    to_result = _into(given.get("out"), unchanged)
    return read_flash({**given, "cu_seqlens_k": ends}, True, frozenset(known), names, to_result=to_result, **pages)


def _into(
    there: torch.Tensor | None, layout: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what lays out a result, and writes it to the tensor that the caller has for it."""

    def write(out: torch.Tensor) -> torch.Tensor:
        assert there is not None
        with torch.inference_mode(there.is_inference()):
            return there.copy_(layout(out))

    return layout if there is None else write


@dataclass
class Run:
    """What the calls of one run of a test show.

    functions: those that were called, by their place. asked: workloads of the kernel's calls, and whether a gradient was
    wanted. results: what its own kernel returned; out alone is expected where it failed. unread: calls that cannot be
    replaced, and why. off: the largest error beyond rounding, as a share of the tensor's norm; 0 for none.
    """

    functions: dict[tuple[str, str], str] = field(default_factory=dict)
    asked: list[tuple[Workload, bool]] = field(default_factory=list)
    results: list[tuple[Any, ...]] = field(default_factory=list)
    unread: dict[str, None] = field(default_factory=dict)
    off: float = 0.0


class KernelCalls:
    """Hands the calls of the functions at `places`, of all where that is empty, to `kernel`; None leaves them as they are."""

    def __init__(self) -> None:
        self.places: set[tuple[str, str]] = set()
        self.kernel: KernelBackend | None = None
        self.own, self.run = Run(), Run()
        self._references: deque[tuple[Inputs, Reference]] = deque(maxlen=_KEPT)

    def start(self, kernel: KernelBackend | None) -> None:
        """Begin a run of a test; one without a kernel says in which form the results of others are returned."""
        self.kernel, self.run = kernel, Run()
        self.own = self.own if kernel else self.run

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Return the result of a call."""
        function = intercepted.function
        self.run.functions[function.place] = function.shown
        if self.places and function.place not in self.places:
            return intercepted.compute()
        try:
            arguments = intercepted.read()
            inputs = to_inputs(arguments)
        except (UnreadableError, DropoutError) as error:
            self.unread("", function.shown, str(error))
            return intercepted.compute()
        number = len(self.run.asked)
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in intercepted.tensors)
        self.run.asked.append((inputs.workload, wants_gradient and not inputs.workload.has_no_gradient_because))
        if self.kernel is None:
            result = intercepted.compute()
            self.run.results.append(result if isinstance(result, tuple) else (result,))
            return result
        first, *others = self.own.results[number] if number < len(self.own.results) else (inputs.q,)
        if not isinstance(first, torch.Tensor):
            self.unread("", function.shown, f"it returns {type(first).__name__}, and not out")
            return intercepted.compute()
        return self._replaced(self.kernel, arguments, inputs, tuple(others))

    def unread(self, module: str, function: str, reason: str) -> None:
        """Note why a call is not replaced."""
        del module
        self.run.unread[f"{function}: {reason}"] = None

    def _replaced(self, kernel: KernelBackend, arguments: AttentionArguments, inputs: Inputs, others: tuple[Any, ...]) -> Any:
        """Compute a call by another kernel. others: what its own returns beside out, of which lse is replaced, too."""
        leaves = {f"d{name}": getattr(arguments, name).view_as(getattr(arguments, name)) for name in "qkv"}
        awaited = {"dout", *(name for name, leaf in leaves.items() if leaf.requires_grad)}
        given: dict[str, Any] = {name: getattr(inputs, name).detach().clone() for name in "qkv"}
        arrived: dict[str, torch.Tensor] = {}

        def arrive(name: str, gradient: torch.Tensor) -> None:
            arrived[name] = gradient.detach().clone()
            if set(arrived) == awaited:
                self._look(dataclasses.replace(inputs, **given, dout=arrived.pop("dout")), arrived)
                arrived.clear()

        for name in awaited - {"dout"}:  # before the call, which may write to them
            leaves[name].register_hook(partial(arrive, name))
        out, lse = kernel.prepare(inputs, len(awaited) > 1)(*leaves.values())
        gives_lse = bool(others) and getattr(others[0], "shape", None) == lse.shape
        found = {"out": out.detach()} | ({"lse": lse.detach()} if gives_lse else {})
        self._look(dataclasses.replace(inputs, **given, dout=torch.zeros_like(out)), found)
        if out.requires_grad:
            out = out.view_as(out)  # a faulty kernel may return the same tensor twice
            out.register_hook(partial(arrive, "dout"))
        result = arguments.to_result(out)
        result = result[0] if isinstance(result, tuple) else result
        return (result, *([lse, *others[1:]] if gives_lse else others)) if others else result

    def _look(self, inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note how far tensors are off, where that is beyond rounding."""
        reference = self._reference(inputs, backward="out" not in tensors)
        for row in compare_all("", tensors, reference, inputs.workload, limits_named("default")):
            if not row.passed:
                self.run.off = max(self.run.off, math.inf if row.wrong_positions else row.relative_l2)

    def _reference(self, inputs: Inputs, backward: bool) -> Reference:
        for known, reference in self._references:
            if asks_the_same(known.workload, inputs.workload) and all(
                torch.equal(getattr(known, name), getattr(inputs, name)) for name in ("q", "k", "v", "dout")
            ):
                return reference
        reference = compute_reference(inputs, precision_named("flash"), backward)
        self._references.append((inputs, reference))
        return reference
