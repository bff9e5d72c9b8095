"""What explains a fault is looked for as long as there is time, and what was left out is said."""

import pytest
import torch.nn.functional as F
from judging import Clock, spec_of

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.diagnosis import diagnose as diagnosing
from pytest_attn.diagnosis.diagnose import TimeBudget, diagnose

CAUSAL = Workload(64, heads=2, head_dim=32, mask="causal")


@pytest.mark.parametrize(("seconds", "tried"), [(3, [0, 1, 2]), (0, [*range(9)]), (100, [*range(9)])])
def test_a_search_ends_between_two_steps(seconds, tried):
    budget = TimeBudget(seconds, Clock(step=1.0))
    assert list(budget.each("these", range(9))) == tried
    assert list(budget.each("those", range(2))) == ([] if len(tried) < 9 else [0, 1])
    assert budget.left_out == ([] if len(tried) == 9 else ["these", "those"])


def test_nothing_is_left_out_of_what_was_done_in_time():
    budget = TimeBudget(3, Clock(step=1.0))
    assert list(budget.each("these", range(2))) == [0, 1]
    assert budget.left_out == []


def judged(monkeypatch, seconds, kernel, backward=False):
    """Judge a wrong kernel with a clock of steps; return what is said of it."""
    monkeypatch.setattr(diagnosing, "TimeBudget", lambda seconds: TimeBudget(seconds, Clock(step=1.0)))
    spec = spec_of(CAUSAL, backward=backward, precision="torch_cpu")
    return describe(diagnose(judge(spec.subject(Registry(), kernel), spec, ReferenceCache()), seconds))


@pytest.fixture
def tried(monkeypatch):
    """Return the hypotheses that a diagnosis tries, in a list that it adds to."""
    found, plain = [], diagnosing.explains
    monkeypatch.setattr(diagnosing, "explains", lambda one, seen: found.append(one.words) or plain(one, seen))
    return found


def full(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def test_faults_of_out_are_tried_as_long_as_there_is_time(monkeypatch, tried):
    named = judged(monkeypatch, 1000, full)
    without_end = len(tried)
    assert "suggests" in named
    assert "left out" not in named
    tried.clear()
    text = judged(monkeypatch, 5, full)
    assert len(tried) == 5 < without_end
    assert "suggests" not in text
    assert "left out   after 5 s (--attn-diagnosis-timeout), not all of these were tried: likely mistakes" in text


def test_faults_of_a_gradient_too(monkeypatch, tried):
    def scaled_gradient(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.register_hook(lambda gradient: gradient.roll(1, 2))
        return out

    text = judged(monkeypatch, 4, scaled_gradient, backward=True)
    assert 0 < len([words for words in tried if "a backward pass" in words]) <= 4
    assert "mistakes in steps of the backward pass" in text
