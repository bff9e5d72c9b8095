"""Hold one call of a model against exact attention on its own tensors, forward and backward, at the limits of every check."""

from __future__ import annotations

from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.calling import fault_of_change
from pytest_attn.correctness.compare import compare_all
from pytest_attn.correctness.comparison import Comparison, Mismatch, Suggestion
from pytest_attn.correctness.confirm import Returned, WholeCase
from pytest_attn.correctness.contract import ContractError, check_contract
from pytest_attn.correctness.diagnose import explain
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.models.call import AttentionCall
from pytest_attn.models.honest import with_honest_limits
from pytest_attn.workloads.inputs import Inputs

#: what reports call the inputs of a call
DISTRIBUTION = "of the model"


def judge_call(call: AttentionCall, limits: str = "default") -> Comparison:
    """Compare a call with exact attention.

    Gradients are compared where they arrived. A subject that quantizes is held to what it makes of q, k and v. Rows that see
    no key must be finite: libraries return there what they like, and no loss may depend on it. Raises ContractError for a
    result that cannot be compared.
    """
    inputs, workload = call.complete_inputs(), call.workload
    subject = call.subject
    if call.missing:
        name = call.missing[0]
        raise ContractError(f"{name} is missing: out does not depend on {name[1:]}, as autograd sees it")
    if call.changes and not (subject and subject.known_to_change.issuperset(call.changes)):
        raise ContractError(fault_of_change(call.changes))
    is_approximate = subject is not None and subject.is_approximate
    if subject is not None and is_approximate:
        inputs = subject.dequantized(inputs)
    gradients = call.gradients if call.has_dout else {}
    reference = compute_reference(inputs, precision_named(call.precision), backward=bool(gradients))
    tensors = {"out": call.out.to(inputs.device)} | {name: t.to(inputs.device) for name, t in sorted(gradients.items())}
    check_contract(tensors["out"], ("out",), reference, workload, "thd" if workload.is_packed else "bhsd")
    for name, tensor in tensors.items():
        expected = getattr(inputs, "out" if name == "out" else name[1:], None)
        if expected is not None and tensor.shape != expected.shape:
            raise ContractError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(expected.shape)}")
    if call.empty_rows is not None:
        tensors = call.empty_rows.forget(tensors)
    both = limits_named(limits)
    rows = tuple(compare_all(DISTRIBUTION, tensors, reference, workload, both))
    rows = with_honest_limits(rows, tensors, reference, inputs)
    failed = next((row for row in rows if not row.passed), None)
    mismatch = None
    if failed is not None:
        _require_finite(inputs)
        case = WholeCase(workload, [Returned(DISTRIBUTION, reference, tensors)], rows, both)
        location, suggestions = explain(failed, tensors[failed.name], reference, case)
        mismatch = Mismatch(failed, location, tuple(map(_in_a_model, suggestions)))
    name = call.function if subject is None else subject.name
    sampled = reference.sampled
    facts = workload.id, name, rows, reference.is_sampled, is_approximate, mismatch, call.changes
    return Comparison(*facts, sampled=sampled)


def _require_finite(inputs: Inputs) -> None:
    """Raise ContractError for q, k or v with NaN or infinite elements: what is wrong was wrong before attention."""
    for name in "qkv":
        finite = getattr(inputs, name).isfinite()
        if not finite.all():
            number = int(finite.numel() - finite.sum())
            raise ContractError(
                f"its {name} holds {number:,} elements that are NaN or infinite, so nothing can be said of this call; what"
                " computed them? the first call that is named may be where the model diverges"
            )


def _in_a_model(suggestion: Suggestion) -> Suggestion:
    """Say of rows that see no key what holds in a model: its marker has no empty_rows."""
    is_about_empty_rows = suggestion.kind in ("no key", "NaN without keys")
    return suggestion._replace(kind="not finite without keys") if is_about_empty_rows else suggestion
