"""No unusual kernel that is honest is refused by check, invariants or measure, here or where another process computes."""

from pathlib import Path

import pytest

from cheats.runs import Asked, has_cuda, outcomes, source_of

KERNELS = Path(__file__).with_name("honest_kernels.py")
SMALL = 'Workload(64, heads=2, head_dim=32, dtype="float32")'
BACKWARD = f"{SMALL}, backward=True"
CAUSAL = 'Workload(64, heads=4, kv_heads=2, head_dim=32, dtype="float32", mask="causal"), backward=True'
#: the marker's arguments of each kernel; one whose marker asks for gradients is timed with them, too
HONEST = {
    **dict.fromkeys(
        ("workspace", "mapped", "lazy_import", "operator_with_scratch", "static_buffers", "replayed_steps"), SMALL
    ),
    **dict.fromkeys(("cached_mask", "partial"), CAUSAL),
    **dict.fromkeys(("plan_by_shape", "autotuned", "thread_pool", "logged", "view_of_larger", "padded"), BACKWARD),
    **dict.fromkeys(("scratch_in_place", "lazily_compiled", "module", "bound_method", "switches_restored"), BACKWARD),
    **dict.fromkeys(("without_collector", "under_a_mode", "custom_operator", "forked", "cached_on_disk"), BACKWARD),
    **dict.fromkeys(("with_an_alarm", "in_an_event_loop", "process_restored", "counts_living_results"), BACKWARD),
}
ON_CUDA = {**HONEST, "replayed_graph": SMALL, "streams": SMALL}
del ON_CUDA["lazy_import"], ON_CUDA["mapped"]


@pytest.fixture
def ask(pytester):
    """Return a function that asks kernels in one run, in which each must pass."""

    def run(markers, *args, device="cpu", isolated=False, in_process=False, **options):
        pytester.makepyfile(honest_kernels=KERNELS.read_text())
        asked = [Asked("honest_kernels", name, marker, **options) for name, marker in markers.items()]
        pytester.makepyfile(test_honest=source_of(asked, isolated, device))
        start = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        result = start("-p", "no:cacheprovider", "-v", *args)
        found = outcomes(result.outlines)
        assert len(found) == sum(len(one.judgments) for one in asked)
        fine = (
            ("passed", "skipped") if isolated else ("passed",)
        )  # beside other work, no clock but a process's own tells a time
        assert [name for name, outcome in found.items() if outcome not in fine] == []

    return run


def test_no_honest_kernel_is_refused(ask):
    ask(HONEST, judgments=("check",), in_process=True)  # once: an operator can be registered once in a process


@pytest.mark.slow("makes many calls")
@pytest.mark.parametrize("options", [{}, {"measure": 'backward="both"'}])
def test_none_is_refused_by_invariants_or_by_measure(ask, options):
    markers = {name: marker for name, marker in HONEST.items() if not options or "backward" in marker}
    ask(markers, judgments=("invariants", "measure"), **options)


@pytest.mark.slow("starts processes")
def test_none_is_refused_where_another_process_computes(ask):
    ask(HONEST, "--attn-isolated", isolated=True)


@pytest.mark.slow("makes many calls")
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")
def test_none_is_refused_on_cuda(ask):
    ask(ON_CUDA, device="cuda")
