import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import HONEST, case_of, causal, stack

from pytest_attn import check_model
from pytest_attn.guests.models.check_model import judge_model


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", [None, "math", "sdpa_flash"])
def test_an_honest_model_is_about_as_far_from_exact_as_honest_rounding(backend):
    model, step = HONEST["causal"](torch.bfloat16)

    ratios = check_model(model, step, backend).ratios

    weights = {name: ratio for name, ratio in ratios.items() if name.endswith(".weight")}
    assert len(weights) == len([name for name, _ in model.named_parameters() if name.endswith(".weight")])
    least = 0 if backend == "math" else 0.2  # math is bit-equal to exact attention here
    assert all(least <= ratio < 2 for ratio in weights.values())
    assert "loss" in ratios


def test_a_key_that_is_lost_shows_end_to_end():
    def loses(q, k, v, workload):
        seen = torch.ones(workload.q_len, workload.kv_len, dtype=torch.bool).tril()
        seen[:, 0] = torch.arange(workload.q_len) == 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    model, step = case_of(stack(causal), torch.bfloat16)

    assert judge_model(model, step, loses).ratios["gradient of blocks.0.attn.k.weight"] > 5


def test_runs_are_the_same_each_time_and_none_are_made_where_none_are_wanted():
    model, step = HONEST["causal"](torch.bfloat16)
    steps = []

    def counted():
        steps.append(step)
        return step()

    first = check_model(model, counted, scatter=2).ratios
    assert len(steps) == 1 + 1 + 2
    assert check_model(model, counted, scatter=2).ratios == first
    steps.clear()
    assert not check_model(model, counted, scatter=0).ratios
    assert len(steps) == 1


def test_single_precision_has_no_ratios_as_its_sums_are_not_emulated():
    assert not check_model(*HONEST["causal"](torch.float32)).ratios


def test_rows_whose_mask_is_the_lowest_number_are_not_held_against_rows_of_nothing():
    """Eager code averages all values there, exact attention to what is visible gives 0."""
    lowest = torch.full((1, 1, 45, 45), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mask = lowest.triu(1)
    mask[:, :, :5] = lowest[:, :, :5]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = judge_model(*case_of(stack(attend), torch.bfloat16), backward=False)

    assert found.passed
    assert not found.ratios
    assert any(note.startswith("rows that see no key are not 0 in some calls") for note in found.notes)
