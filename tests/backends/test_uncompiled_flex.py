"""flex_attention without torch.compile is judged by what this release of torch rounds, compiled it is judged as `flex`."""

import functools

import pytest
import torch
from judging import judged, spec_of
from torch.nn.attention.flex_attention import flex_attention

from pytest_attn import Workload
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.flex import Packing, score_mod_of
from pytest_attn.backends.precision import uncompiled_flex_precision
from pytest_attn.backends.registry import Registry
from pytest_attn.guests.models.calls.torch_calls import FLEX
from pytest_attn.guests.models.capture import precision_of
from pytest_attn.guests.models.interception import InterceptedCall
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")
OLD = uncompiled_flex_precision("2.9.1")


@pytest.mark.parametrize(
    ("version", "rounds_scores"), [("2.6.0+cu124", True), ("2.9.1", True), ("2.10.0", False), ("2.15.0+cu132", False)]
)
def test_releases_before_2_10_round_the_scores(version, rounds_scores):
    assert uncompiled_flex_precision(version).rounds_scores == rounds_scores


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_torch_as_it_is_here_passes_its_own_profile(dtype):
    spec = spec_of(Workload(64, heads=2, dtype=dtype), precision=uncompiled_flex_precision(torch.__version__))
    assert judged(flex_attention, spec).passed


@pytest.mark.parametrize("scale", [1.02, 0.98])
def test_rounded_scores_excuse_no_scale_that_is_two_percent_off(scale):
    def faulty(q, k, v):
        scores = (q @ k.mT).float() * (q.shape[-1] ** -0.5 * scale)
        return scores.softmax(-1).to(q.dtype) @ v

    for profile in (OLD, uncompiled_flex_precision("2.10.0")):
        spec = spec_of(Workload(64, heads=2, dtype="fp16"), precision=profile)
        assert not judged(faulty, spec).passed


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_call_of_a_model_is_judged_by_whether_it_was_compiled(kind):
    call = functools.partial(InterceptedCall, "blocks.0", FLEX, {})
    with quiet():  # compiling imports what warns
        compiled = torch.compile(flex_attention)
    here = uncompiled_flex_precision(torch.__version__)
    assert precision_of(call(flex_attention), Registry(), kind) == here
    assert precision_of(call(compiled), Registry(), kind) == "flash"


def by_place(score, b, h, q, kv):
    return score + 512 * b + 8 * q + kv


@pytest.mark.parametrize(("q_lens", "kv_lens"), [((3, 4), (3, 4)), ((1, 0, 1), (257, 85, 0)), ((0, 1, 2), (85, 3, 257))])
def test_scores_of_packed_sequences_are_changed_by_places_in_their_own(q_lens, kv_lens):
    w = Workload(heads=2, alibi="batch", score_mod=by_place, q_lens=q_lens, kv_lens=kv_lens)
    inputs = draw_inputs(w, "flat", 0, CPU)
    score_mod = score_mod_of(inputs, Packing.of(inputs))
    b, h, begin_q, begin_kv = torch.tensor(0), torch.tensor(1), 0, 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
        found = score_mod(torch.zeros(q_len, kv_len), b, h, i + begin_q, j + begin_kv)
        alibi = -inputs.alibi_slopes[sequence, 1] * (i + kv_len - q_len - j).abs()
        assert torch.equal(found, by_place(alibi, sequence, h, i, j))
        begin_q, begin_kv = begin_q + q_len, begin_kv + kv_len
