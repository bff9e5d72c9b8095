"""The arithmetic of the gate: medians with exact intervals, and variances that cases lend one another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import torch

from pytest_attn.latency.anchors import ATTENTION, COMPUTE, MEMORY


class Interval(NamedTuple):
    """Two bounds and the probability with which they hold the true value."""

    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the distance of the bounds."""
        return (self.high - self.low) / 2


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return order statistics that hold the median of independent values with at least `confidence`.

    No distribution is assumed: the number of values below the median is binomial(n, 1/2). Fewer than six values cannot
    reach 95 %; then the bounds are the extremes, with the confidence that these have. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    ordered, n = sorted(values), len(values)
    below = [math.comb(n, i) / 2**n for i in range(n + 1)]
    rank, reached = 0, 1 - 2 * below[0]  # bounds ordered[rank] and ordered[n - 1 - rank]
    while rank + 1 < (n + 1) // 2 and (narrower := reached - 2 * below[rank + 1]) >= confidence:
        rank, reached = rank + 1, narrower
    return Interval(ordered[rank], ordered[n - 1 - rank], max(0.0, reached))


class Prior(NamedTuple):
    """Knowledge of a case's variance before it was looked at: as if `degrees` more values had shown `variance`."""

    variance: float
    degrees: float


def prior_of(variances: Sequence[float], degrees: float) -> Prior:
    """Fit a scaled inverse chi-square prior to the sample variances of many cases, each with `degrees` of freedom.

    Smyth 2004, "Linear models and empirical Bayes methods", section 6.2: moments of the logarithms of the variances. Where
    the cases do not differ by more than chance, the prior is worth 100 degrees. Raises ValueError for no variances.
    """
    if not variances:
        raise ValueError("a prior needs at least one variance")
    floor = max(1e-12, 1e-4 * median(variances))
    logs = [math.log(max(v, floor)) for v in variances]
    centered = [value - digamma(degrees / 2) + math.log(degrees / 2) for value in logs]
    center = sum(centered) / len(centered)
    spread = sum((c - center) ** 2 for c in centered) / max(1, len(centered) - 1) - trigamma(degrees / 2)
    most = 100.0
    if len(variances) < 3:  # too few to say how cases differ
        return Prior(math.exp(center), 2.0)
    prior_degrees = min(most, 2 * _inverse_trigamma(spread)) if spread > 0 else most
    return Prior(math.exp(center + digamma(prior_degrees / 2) - math.log(prior_degrees / 2)), prior_degrees)


def moderated(variance: float, degrees: float, prior: Prior) -> tuple[float, float]:
    """Return (variance, degrees of freedom) of a case after its prior: the weighted mean of both."""
    total = degrees + prior.degrees
    return (degrees * variance + prior.degrees * prior.variance) / total, total


def digamma(x: float) -> float:
    """Return the derivative of lgamma, for x > 0."""
    return float(torch.special.digamma(torch.tensor(x, dtype=torch.float64)))


def trigamma(x: float) -> float:
    """Return the derivative of digamma, for x > 0."""
    return float(torch.special.polygamma(1, torch.tensor(x, dtype=torch.float64)))


def _inverse_trigamma(value: float) -> float:
    """Return the x > 0 with trigamma(x) = value, by bisection of the logarithm."""
    low, high = -15.0, 15.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if trigamma(math.exp(middle)) > value else (low, middle)
    return math.exp((low + high) / 2)


#: how sensitivities to the anchors scatter around their prior, and the residual variance assumed for fitting them
SENSITIVITY_SD, _RESIDUAL_VARIANCE = 0.25, 0.003**2


@dataclass(frozen=True)
class Run:
    """One process: the p50 of a case, the medians of its anchors, and the launch of one call, in seconds.

    launch is 0 if the host's clock is what was timed.
    """

    p50: float
    anchors: Mapping[str, float]
    launch: float = 0.0


@dataclass(frozen=True)
class Recording:
    """The recorded runs of one case: their center, scatter, and how its p50 follows the anchors. Logarithms of seconds.

    Anchors without a sensitivity only tell of the machine.
    """

    runs: tuple[Run, ...]
    sensitivity: Mapping[str, float]
    anchor_centers: Mapping[str, float]
    values: tuple[float, ...]

    @property
    def center(self) -> float:
        """The mean of the adjusted values."""
        return fmean(self.values)

    @property
    def variance(self) -> float:
        """Their sample variance."""
        return sum((v - self.center) ** 2 for v in self.values) / max(1, len(self.values) - 1)

    @property
    def degrees(self) -> int:
        """Its degrees of freedom."""
        return max(1, len(self.values) - 1)

    def as_timed(self) -> Recording:
        """Return it without what the anchors say."""
        return replace(self, sensitivity={}, values=tuple(math.log(run.p50) for run in self.runs))

    @property
    def slow(self) -> float:
        """The second slowest value: one slow process of ten does not make slow ones likely."""
        return sorted(self.values)[-2] if len(self.values) > 2 else max(self.values)

    def drift(self, runs: Sequence[Run]) -> dict[str, float]:
        """Return by how much the anchors have moved since the recording, in logarithms."""
        return {
            name: fmean(math.log(run.anchors[name]) for run in runs) - center
            for name, center in self.anchor_centers.items()
            if all(run.anchors.get(name) for run in runs)
        }

    def adjusted(self, run: Run) -> float:
        """Return the logarithm of the p50 as it would be on the machine of the recording."""
        return _adjusted(run, self.sensitivity, self.anchor_centers)


def fit(runs: Sequence[Run], prior: Mapping[str, float]) -> Recording:
    """Fit the sensitivities of a case to its anchors by ridge regression toward `prior`, each between 0 and 1.

    Beside attention like it, a case is taken to follow that and nothing else.

    prior: the expected sensitivity per anchor; see `expected_sensitivity`. Raises ValueError for no runs.
    """
    if not runs:
        raise ValueError("a baseline without runs")
    everywhere = [name for name in runs[0].anchors if all(run.anchors.get(name) for run in runs)]
    centers = {name: fmean(math.log(run.anchors[name]) for run in runs) for name in everywhere}
    prior = {name: slope for name, slope in prior.items() if name in centers}
    sensitivity = {ATTENTION: 1.0} if ATTENTION in centers else _sensitivity(runs, centers, prior)
    return Recording(tuple(runs), sensitivity, centers, tuple(_adjusted(run, sensitivity, centers) for run in runs))


def _sensitivity(runs: Sequence[Run], centers: Mapping[str, float], prior: Mapping[str, float]) -> dict[str, float]:
    """Return by how much the logarithm of the p50 moves with that of each anchor of the prior."""
    middle = fmean(math.log(run.p50) for run in runs)
    x = [[math.log(run.anchors[name]) - centers[name] for name in prior] for run in runs]
    y = [math.log(run.p50) - middle for run in runs]
    slopes = _ridge(x, y, list(prior.values()), _RESIDUAL_VARIANCE / SENSITIVITY_SD**2)
    return {name: min(1.0, max(0.0, slope)) for name, slope in zip(prior, slopes, strict=True)}


def expected_sensitivity(flops: float, nbytes: float, seconds: float) -> dict[str, float]:
    """Return how a kernel's time is expected to follow the anchors: half of the one that bounds it, none for a short one.

    flops, nbytes: of the workload; more than 100 operations per byte count as bound by arithmetic.
    """
    share = 0.5 if seconds > 20e-6 else 0.2
    bound = COMPUTE if flops > 100 * nbytes else MEMORY
    return {name: share if name == bound else 0.0 for name in (COMPUTE, MEMORY)}


def _adjusted(run: Run, sensitivity: Mapping[str, float], centers: Mapping[str, float]) -> float:
    moved = sum(b * (math.log(run.anchors[name]) - centers[name]) for name, b in sensitivity.items() if run.anchors.get(name))
    return math.log(run.p50) - moved


def _ridge(x: list[list[float]], y: list[float], prior: list[float], penalty: float) -> list[float]:
    """Minimize |y - x b|^2 + penalty |b - prior|^2, by the normal equations."""
    rows, wanted = (torch.tensor(one, dtype=torch.float64) for one in (x, prior))
    rows = rows.view(len(y), len(prior))
    left = rows.T @ rows + penalty * torch.eye(len(prior), dtype=torch.float64)
    right = rows.T @ torch.tensor(y, dtype=torch.float64) + penalty * wanted
    solved: list[float] = torch.linalg.solve(left, right).tolist()
    return solved
