"""Backends over ranks, in real processes over gloo: torch's own ring, and the real libraries where they are installed.

What needs a flash kernel gets one of the tests, in signature and meaning (fakes/kernels_of_ranks). Each way to be wrong is
planted on the ranks, and found.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
#: lets CUDA backends run on a CPU, and teaches torch's ring the CPU's kernel; `plant` makes one thing wrong on the ranks
CONFTEST = """
import pytest
from pytest_attn.guests.ranks.libraries import ring_flash, torch_cp, yunchang

for cls in (torch_cp.TorchCp, ring_flash.RingFlash, ring_flash.Zigzag, ring_flash.Llama3, yunchang.Ulysses, yunchang.Usp):
    cls.unavailable_because = lambda self, machine: None

@pytest.fixture
def plant(attn, monkeypatch):
    from fakes.rank_faults import FAULTS
    return lambda fault: attn.group and FAULTS[fault](monkeypatch)
"""
HEAD = """
import pytest
from pytest_attn import Workload
CAUSAL = Workload(64, heads=4, kv_heads=2, head_dim=32, mask="causal", name="causal")
FULL = Workload(64, 128, batch=2, heads=4, head_dim=32, name="full")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a module with ranks that find what the tests import."""

    def running(module, *arguments):
        own = [TESTS / "fakes" / name for name in ("kernels_of_ranks", "transformers_of_rings")]
        folders = [TESTS, *own, os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(HEAD + module)
        return pytester.runpytest_subprocess("--attn-device=cpu", "--attn-output=run.jsonl", "-rsf", *arguments)

    return running


@pytest.mark.slow("starts processes")
def test_torch_rotates_and_balances_as_it_is_asked(run, pytester):
    faults = ["nothing", "rotation by all-to-all", "rotation by all-gather", "half of the balanced gradient"]
    result = run(
        f"""
from fakes import ring_of_torch
ring_of_torch.install()

@pytest.mark.parametrize("fault", {faults})
@pytest.mark.attention(CAUSAL, ranks=2, shard="head-tail", backward=True)
def test_balanced(attn, attn_backend, fault, plant):
    plant(fault)
    attn.check(attn_backend)

@pytest.mark.attention(CAUSAL, CAUSAL.replace(mask=None, name="plain"), ranks=(2, 4), backward=True)
def test_in_order(attn, attn_backend):
    attn.check(attn_backend)
""",
        "--attn-backends=torch_cp,torch_cp@rotate=alltoall",
    )
    result.assert_outcomes(passed=4 + 8, failed=4)
    failed = [line.partition("-ranks2-")[2].partition("]")[0] for line in result.outlines if line.startswith("FAILED")]
    assert sorted(failed) == [
        "torch_cp-half of the balanced gradient",
        "torch_cp-rotation by all-gather",
        "torch_cp@rotate=alltoall-half of the balanced gradient",
        "torch_cp@rotate=alltoall-rotation by all-to-all",
    ]


@pytest.mark.slow("starts processes")
@pytest.mark.skipif(not (find_spec("ring_flash_attn") and find_spec("yunchang")), reason="needs ring-flash-attn and yunchang")
def test_rings_around_a_flash_kernel_are_right_and_their_faults_are_found(run):
    result = run("""
PACKED = Workload(q_lens=(16, 64, 32), heads=4, head_dim=32, mask="causal", name="packed")
HALF = Workload(64, heads=4, head_dim=32, dtype="float16", name="half")
SOFTCAP = Workload(64, heads=4, head_dim=32, softcap=5.0, mask="causal", name="softcap")
ORDERED = ("ring_flash", "llama3", "ulysses", "usp")
BALANCED = ("zigzag", "usp@ulysses=1")

@pytest.mark.attention(CAUSAL, FULL, PACKED, HALF, SOFTCAP, ranks=2, backward=True, backends=ORDERED)
def test_in_order(attn, attn_backend):
    attn.check(attn_backend)

@pytest.mark.attention(CAUSAL, PACKED, ranks=4, shard="head-tail", backward=True, backends=BALANCED)
def test_balanced(attn, attn_backend):
    attn.check(attn_backend)

@pytest.mark.parametrize("fault", ["lse in bfloat16", "dk of a chunk's last key"])
@pytest.mark.attention(CAUSAL, ranks=2, backward=True, backends=("ring_flash", "llama3", "ulysses"))
def test_faulty(attn, attn_backend, fault, plant):
    plant(fault)
    attn.check(attn_backend)
""")
    # a rounded lse is read by the merge of a ring, and by the backward pass of all three
    result.assert_outcomes(passed=15, failed=6, xfailed=2, skipped=7)
    result.stdout.fnmatch_lines(["*known defect  ring_flash on half-fp16 backward: *dq to bfloat16*"])


@pytest.mark.slow("imports diffusers on each rank")
@pytest.mark.skipif(not find_spec("diffusers"), reason="needs diffusers")
def test_diffusers_shares_heads(run):
    result = run("""
@pytest.mark.parametrize("fault", ["nothing", "heads of diffusers"])
@pytest.mark.attention(CAUSAL.replace(mask=None, kv_heads=4, name="plain"), ranks=(2, 4), backward=True)
def test_it(attn, fault, plant):
    plant(fault)
    attn.check("diffusers_cp")
""")
    result.assert_outcomes(passed=2, failed=2)
