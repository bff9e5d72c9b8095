"""A new kind of mask is a file of its own and one line of registration; all else works with it."""

import json
import re
from pathlib import Path

import pytest
from dilated import Dilated
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Capabilities, Workload, check
from pytest_attn.backends.dense import boolean_mask
from pytest_attn.guests.models.capture import workload_as_code
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend
from pytest_attn.strategies import workloads
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import as_mask, register, unregister
from pytest_attn.workloads.source import decode_workload, encode_workload, write_workload
from pytest_attn.workloads.traits import traits_of

WORKLOAD = Workload(48, 80, heads=2, head_dim=32, mask=Dilated(3))


@pytest.fixture(autouse=True)
def registered():
    register(Dilated)
    yield
    unregister(Dilated)


def attention(workload):
    seen = boolean_mask(draw_inputs(workload, "flat"))
    return lambda q, k, v: sdpa(q, k, v, attn_mask=seen.to(q.device))


def test_a_kernel_is_judged_on_it_and_its_mistake_is_named():
    assert check(attention(WORKLOAD), WORKLOAD, backward=True, device="cpu").passed
    for own in ("eager", KernelBackend("fault-free", Kernel())):
        assert check(own, WORKLOAD, backward=True, device="cpu").passed
    for other, words in ((Dilated(4), "whose steps are one key too long"), ("causal-bottom-right", "whose steps are ignored")):
        with pytest.raises(AssertionError, match=words):
            check(attention(WORKLOAD.replace(mask=other)), WORKLOAD, device="cpu")


def test_it_has_an_id_and_can_be_written_in_code():
    assert WORKLOAD.id == "h2-q48-k80-d32-dilated3"
    assert traits_of(WORKLOAD) == {"dilated", "fewer queries", "plain"}
    text, imports = write_workload(WORKLOAD)
    assert imports == {("dilated", "Dilated"), ("pytest_attn", "Workload")}
    assert eval(text, {"Workload": Workload, "Dilated": Dilated}) == WORKLOAD
    assert "mask=Dilated(step=3)" in workload_as_code(WORKLOAD)[0]
    with pytest.raises(
        ValueError, match=re.escape("BooleanMask, a mask_mod(b, h, q_idx, kv_idx) or Dilated, got 'longnet'; say mask=")
    ):
        as_mask("longnet")


def test_a_backend_says_whether_it_takes_it():
    assert Capabilities(masks=frozenset(("dilated",))).refusals(WORKLOAD) == []
    assert Capabilities(masks=frozenset(("any",))).refusals(WORKLOAD) == []
    assert Capabilities(masks=frozenset(("window", "causal"))).refusals(WORKLOAD) == ["has no dilated causal mask"]
    only_square = Capabilities(masks=frozenset(("window", "dilated")), square=True)
    assert only_square.refusals(WORKLOAD) == ["takes a dilated causal mask for q_len == kv_len only"]
    assert only_square.row()[2] == "window, dilated, if q_len == kv_len"


def test_a_failure_on_it_is_saved_read_and_judged_again(pytester):
    written = json.loads(json.dumps(encode_workload(WORKLOAD)))
    assert written["mask"] == {"kind": "Dilated", "step": 3}
    assert decode_workload(written) == WORKLOAD
    pytester.makepyfile("""
        import pytest
        import torch
        from dilated import Dilated
        from pytest_attn import Workload

        def too_wide(q, k, v):
            back = torch.arange(64)[:, None] - torch.arange(64)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back % 4 == 0))

        @pytest.mark.attention(Workload(64, heads=2, head_dim=16, mask=Dilated(3)))
        def test_mine(attn):
            attn.check(too_wide)
        """)
    done = pytester.runpytest_inprocess("--attn-save-failures=saved", "--attn-device=cpu")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*whose steps are one key too long*"])
    (folder,) = Path("saved").iterdir()
    failure = pytest_attn.load_failure(folder)
    assert failure.workload.mask == Dilated(3)
    with pytest.raises(AssertionError, match="whose steps are one key too long"):
        failure.check(attention(failure.workload.replace(mask=Dilated(4))))
    failure.check(attention(failure.workload))


def test_afterwards_it_is_gone():
    unregister(Dilated)
    try:
        with pytest.raises(ValueError, match="Capabilities: masks has no 'dilated'"):
            Capabilities(masks=frozenset(("dilated",)))
        with pytest.raises(ValueError, match="mask must be None"):
            workloads(masks=("dilated",))
        with pytest.raises(ValueError, match="no kind of mask is called 'Dilated'; there are Causal, Window"):
            decode_workload(encode_workload(WORKLOAD))
    finally:
        register(Dilated)


def test_no_two_kinds_have_a_name_or_a_word_in_common():
    with pytest.raises(ValueError, match="Dilated: there is a kind of mask of this name already"):
        register(type("Dilated", (Dilated,), {}))
    with pytest.raises(ValueError, match="Other: there is a kind of mask of this name already, Dilated"):
        register(type("Other", (Dilated,), {}))


def test_mutants_know_nothing_of_near_misses():
    """Else the hints, which are made of near misses, would be measured by themselves."""
    mutants = (Path(pytest_attn.__file__).parent / "guests" / "mutants").rglob("*.py")
    assert [path.name for path in mutants if "near_miss" in path.read_text() or "NearMiss" in path.read_text()] == []
