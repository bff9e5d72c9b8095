"""Invariants that did not apply are named, with the reason, wherever a run is reported."""

import pytest
import vl_convert  # noqa: F401  # its extension cannot be loaded a second time by a run in this process

from pytest_attn.reports.records import read_records

TEST = """
import pytest
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)
    def forward(self, input_ids):
        q, k, v = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in self.qkv(self.embed(input_ids)).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))

@pytest.mark.attention_model(device="cpu")
def test_model(attn_model):
    attn_model.check_invariants(Plain().eval(), torch.arange(24).view(2, 12))
"""
KERNEL = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa
@pytest.mark.attention("smoke-full")
def test_kernel(attn): attn.check_invariants(sdpa, only={only!r})
"""
LEFT_OUT = ("packed", "dynamic", "static", "sliding")


def test_a_model_whose_caches_were_not_asked(pytester):
    pytester.makepyfile(TEST)
    outputs = [f"--attn-output=run.{suffix}" for suffix in ("md", "html", "jsonl")]
    result = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider", *outputs)
    result.assert_outcomes(passed=1)
    (record,) = read_records(pytester.path / "run.jsonl")
    reasons = {one["invariant"]: one["reason"] for one in record["inapplicable"]}
    assert reasons.keys() >= set(LEFT_OUT)
    texts = [(pytester.path / f"run.{suffix}").read_text() for suffix in ("md", "html")]
    for text in (result.stdout.str(), *texts):
        assert "1 with all invariants that apply" in text
        for name in LEFT_OUT:
            assert f"{name} of model on" in text
            assert reasons[name].partition(" ")[2] in text.replace("\\", "")


@pytest.mark.parametrize(("only", "words"), [("rerun", "1 with all invariants;"), ("rerun, gradients", "that apply;")])
def test_all_is_said_where_all_applied(pytester, only, words):
    pytester.makepyfile(KERNEL.format(only=only.split(", ")))
    assert words in pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout.str()
