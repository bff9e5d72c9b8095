import pytest
from fakes.judged import A100, B200, H200, RTX

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry


@pytest.mark.parametrize("machine", [A100, H200, B200, RTX], ids=lambda machine: machine.architecture)
def test_it_has_kernels_for_each_architecture(installed, machine):
    assert installed("flash4").unavailable_because(machine) is None


@pytest.mark.parametrize(("head_dim", "wrong"), [(72, True), (48, True), (64, False), (88, False), (144, False)])
def test_the_known_defect_is_that_of_head_dims_rounded_to_16(head_dim, wrong):
    workload = Workload(48, 80, heads=4, kv_heads=2, head_dim=head_dim)
    for name in ("flash4", "flex_flash"):
        defect = Registry()[name].known_defects[0]
        assert defect.applies(workload, H200) is wrong
        assert not defect.applies(workload, B200)
