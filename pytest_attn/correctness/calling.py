"""One call of a kernel on the inputs of a check: what it returns, what it changes, and what it refuses as late as here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from pytest_attn.backends.subject import AttentionFn, RefusedError, Subject
from pytest_attn.correctness.caches import fault_of_caches
from pytest_attn.correctness.contract import ContractError, check_contract
from pytest_attn.correctness.dropout import seeded
from pytest_attn.correctness.empty_rows import EmptyRows
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.correctness.strides import StridePattern
from pytest_attn.correctness.switches import switches_kept
from pytest_attn.workloads.kv_cache import watching_caches

if TYPE_CHECKING:
    import torch


def call_kernel(
    kernel: AttentionFn, spec: CheckSpec, reference: Reference, pattern: StridePattern
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Call the kernel on copies of the inputs, in its layout.

    Returns out, lse and gradients by name, in native layout, and by how much it changed each input that it changed.
    Raises ContractError for a result that cannot be compared.
    """
    __tracebackhide__ = True
    import torch

    pristine = reference.called_with
    kept = spec.untouched(pristine)
    if spec.workload.kv_pages is None:
        laid = [pattern.of(name, t, spec.layout) for name, t in zip("qkv", kept, strict=True)]
    else:
        laid = list(spec.handed(pristine))
    if spec.workload.v_in_k:
        laid[2] = laid[1][..., : spec.workload.v_head_dim]
    given = [t.requires_grad_(spec.backward) for t in laid]
    names = spec.results
    empty_rows = EmptyRows(pristine, spec.declared.empty_rows)
    gradients = nullcontext() if spec.backward else torch.no_grad()
    with seeded(spec), gradients, watching_caches() as caches, switches_kept(spec.device.type):
        result = kernel(*given)
    if fault := fault_of_caches(spec.workload, caches):
        raise ContractError(fault)
    handed_out = check_contract(result, names, reference, spec.workload, spec.layout)
    tensors = dict(zip(names, handed_out, strict=True))
    if spec.backward:
        dout = spec.in_layout(empty_rows.blanked(pristine.dout))
        leaves = {**dict(zip("qkv", given, strict=True)), **spec.parameters}
        tensors.update(_gradients(tensors["out"], leaves, pattern.of("dout", dout, spec.layout)))
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)
    changes = changes_of(dict(zip("qkv", given, strict=True)), dict(zip("qkv", kept, strict=True)))
    laid_out = ("out", "dq", "dk", "dv")
    native = {name: spec.in_layout(t) if name in laid_out else t for name, t in tensors.items()}
    return empty_rows.forget(native), changes


def _gradients(out: torch.Tensor, leaves: dict[str, torch.Tensor], dout: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if not out.requires_grad:
        raise ContractError(
            "out carries no gradient; backward=True needs a callable that autograd can follow (no detach, no no_grad)"
        )
    grads = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None:
            raise ContractError(f"d{name} is missing: out does not depend on {name}, as autograd sees it{_advice(name)}")
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
            raise ContractError(
                f"d{name} is a {grad.dtype} tensor of shape {tuple(grad.shape)}; expected {leaf.dtype} {tuple(leaf.shape)}"
            )
        yield f"d{name}", grad.to(out.device)  # what a kernel closes over may be a copy of a tensor elsewhere


def _advice(name: str) -> str:
    """Say what a kernel has to close over for the gradient of a parameter."""
    return "" if name in "qkv" else f"; the callable must use attn.{'alibi_slopes' if name == 'alibi' else name} itself"


@contextmanager
def late_refusals_of(subject: Subject) -> Iterator[None]:
    """Turn what a backend knows as a refusal that only its compiler found out into RefusedError."""
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        if reason := subject.refusal_in(error):
            raise RefusedError(reason) from error
        raise


def changes_of(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return by how much at most each tensor is not what it was before; nothing of those that are."""
    import torch

    changes = {}
    for name, tensor in now.items():
        tensor, kept = tensor.detach(), before[name].to(tensor.device)
        if torch.equal(tensor, kept):
            continue
        is_now, was = tensor.double(), kept.double()
        differs = (is_now != was) & ~(is_now.isnan() & was.isnan())
        if differs.any():
            changes[name] = float((is_now - was)[differs].abs().max())
    return changes


def fault_of_change(changes: dict[str, float]) -> str:
    """Say which input a callable changed first, and by how much."""
    name, largest = next(iter(changes.items()))
    return f"the callable changed its input {name} in place (by up to {largest:.3g})"
