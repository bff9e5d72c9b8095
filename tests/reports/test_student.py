"""Student's t against its table and by integration."""

import itertools

import pytest
import torch

from pytest_attn.reports.student import incomplete_beta, t_quantile, t_tail


@pytest.mark.parametrize(
    ("t", "degrees", "tail"),
    [(12.7062, 1, 0.025), (2.262157, 9, 0.025), (1.833113, 9, 0.05), (3.249836, 9, 0.005), (1.959964, 1e7, 0.025)],
)
def test_student_s_t_by_its_table(t, degrees, tail):
    assert t_tail(t, degrees) == pytest.approx(tail, rel=1e-5)
    assert t_tail(-t, degrees) == pytest.approx(1 - tail, rel=1e-5)
    assert t_quantile(tail, degrees) == pytest.approx(t, rel=1e-5)


@pytest.mark.parametrize("tail", [0.4, 0.02, 1e-4, 5e-5, 1e-7])
@pytest.mark.parametrize("degrees", [2, 9.5, 109])
def test_quantile_and_tail_are_inverse_far_out(tail, degrees):
    assert t_tail(t_quantile(tail, degrees), degrees) == pytest.approx(tail, rel=1e-6)


@pytest.mark.parametrize(("a", "b"), list(itertools.product((0.5, 2.0, 7.5), (0.5, 3.0))))
def test_incomplete_beta_by_integration(a, b):
    x = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)[1:-1]
    density = x ** (a - 1) * (1 - x) ** (b - 1)
    upto = x <= 0.4
    expected = density[upto].sum() / density.sum()
    assert incomplete_beta(a, b, 0.4) == pytest.approx(float(expected), abs=2e-3)
