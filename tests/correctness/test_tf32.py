"""float32 kernels whose products are those of tf32 tensor cores: excused under the profile that says so, and no fault is."""

import pytest
import torch
from honest.variants import VARIANTS, Tf32Products
from judging import judged

from pytest_attn.backends.declaration import Declaration
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import KernelBackend
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
#: for all that is asked here: the reference of a case takes longer than a kernel on it
REFERENCES = ReferenceCache()
INPUTS = ("structured", "flat")
TF32 = [variant for variant in VARIANTS if variant.precision == "tf32"]
SMALL = [
    w for group in ("smoke", "features", "edges") for w in builtin_catalog().select(group) if not (w.dropout or w.is_quantized)
]
WORKLOADS = {workload.id: workload for workload in (small.replace(dtype="float32") for small in SMALL)}
#: what tf32 excuses as well, or what is no fault in float32
EXCUSED = {
    *("lse-in-the-tensors-dtype", "scores-in-float16", "values-summed-in-float16", "values-summed-in-the-tensors-dtype"),
    *("denominator-in-the-tensors-dtype", "exponent-in-the-tensors-dtype", "products-in-tf32"),
}
FAULTS = [mutant for mutant in MUTANTS if mutant.condition == "call" and mutant.name not in EXCUSED]


def spec(workload, precision="tf32", inputs=tuple(DISTRIBUTIONS), **more):
    return CheckSpec(workload, CPU, not workload.has_no_gradient_because, inputs, Declaration(precision=precision), **more)


@pytest.mark.one_in(60)
@pytest.mark.parametrize("variant", TF32, ids=lambda variant: variant.name)
@pytest.mark.parametrize("workload", [w for w in WORKLOADS.values() if "edges" not in w.id], ids=lambda w: w.id)
def test_products_in_tf32_are_excused_and_far_from_the_limits(variant, workload):
    comparison = judged(variant.backend(), spec(workload), REFERENCES)
    assert comparison.passed
    for row in comparison.tensors:
        if row.name != "lse":
            assert row.z_element < 4
            assert row.z_row < 2.5
            assert row.z_head < 1.2


@pytest.mark.parametrize("variant", TF32, ids=lambda variant: variant.name)
def test_under_another_profile_the_hint_names_them(variant):
    workload = WORKLOADS["smoke-full-fp32"]
    comparison = judged(callable_of(variant, workload), spec(workload, "flash", INPUTS), REFERENCES)
    assert not comparison.passed
    assert comparison.faults == ("precision-tf32",)


def callable_of(variant, workload):
    """Return the variant as a function, which declares nothing."""
    kernel, inputs = variant.make(), draw_inputs(workload, "structured", 0, CPU)
    return lambda q, k, v: kernel(inputs, q, k, v)[0]


@pytest.mark.one_in(131)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_fault_is_excused(fault):
    """A kernel with tf32 products and one fault more is wrong on a workload that reaches it."""
    faulty = type("Faulty", (Tf32Products, fault.kernel), {})
    reached = (workload for workload in WORKLOADS.values() if fault.applies(workload, 64))
    assert any(is_wrong(KernelBackend(fault.name, faulty(), "tf32"), workload) for workload in reached)


def is_wrong(backend, workload):
    try:
        return not judged(backend, spec(workload, inputs=INPUTS), REFERENCES).passed
    except ContractError:
        return True
