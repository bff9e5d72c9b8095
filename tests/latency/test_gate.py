"""The gate on runs drawn at random: when it alarms, when it passes, when it says that it cannot know."""

import math
import random
from dataclasses import replace

import pytest

from pytest_attn.latency import gate
from pytest_attn.latency.gate import FEWEST_RUNS, POLICIES, GateContext, policy_for, shared_prior
from pytest_attn.latency.statistics import Prior, Run, expected_sensitivity, fit

GPU = POLICIES["cuda"]
PRIOR = Prior(0.003**2, 6.0)
SENSITIVITY = {"compute": 0.5, "memory": 0.0}


def decide(runs, *context, **more):
    return gate.decide(runs, GateContext(*context, **more))


def screen(run, *context, **more):
    return gate.screen(run, GateContext(*context, **more))


def runs_of(number, seed=0, p50=1e-3, sd=0.002, slower=0.0, drift=0.0, follow=0.5):
    """Draw runs: the machine drifts by `drift`, which the kernel follows by `follow`."""
    generator = random.Random(seed)
    found = []
    for _ in range(number):
        moved = generator.gauss(drift, 0.001)
        time = p50 * (1 + slower) * math.exp(follow * moved + generator.gauss(0, sd))
        found.append(Run(time, {"compute": 2e-4 * math.exp(moved), "memory": 1e-4}, 30e-6))
    return found


def recorded(seed=100, **how):
    return fit(runs_of(FEWEST_RUNS, seed, **how), SENSITIVITY)


@pytest.mark.parametrize("seed", range(20))
def test_equal_runs_pass(seed):
    decision = decide(runs_of(3, seed), recorded(seed + 500), PRIOR, GPU, cases=200)
    assert decision.verdict == "passed"
    assert not decision.reason
    low, high = decision.interval
    assert low < decision.change < high


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slower", [0.03, 0.05, 0.5, 3.0])
def test_slower_runs_are_regressed(seed, slower):
    decision = decide(runs_of(3, seed, slower=slower), recorded(), PRIOR, GPU, cases=200)
    assert decision.verdict == "regressed"
    assert decision.change == pytest.approx(slower, abs=0.006 * (1 + slower))
    assert decision.detectable < 0.03
    assert decision.recorded == pytest.approx(1e-3, rel=0.005)


def test_a_change_below_what_matters_passes_however_certain():
    decision = decide(runs_of(3, sd=1e-5, slower=0.015), recorded(sd=1e-5), Prior(1e-9, 50), GPU, cases=200)
    assert decision.verdict == "passed"
    assert decision.interval[0] > 0.01
    strict = replace(GPU, slowdown=0.01)
    assert decide(runs_of(3, sd=1e-5, slower=0.015), recorded(sd=1e-5), Prior(1e-9, 50), strict, 200).verdict == "regressed"


def test_a_change_below_the_floor_of_seconds_passes():
    """5 % of 2 us are 0.1 us: less than a GPU's clock can be trusted with."""
    short = {"p50": 2e-6, "sd": 0.001}
    assert decide(runs_of(3, slower=0.05, **short), recorded(**short), PRIOR, GPU, cases=200).verdict == "passed"
    assert decide(runs_of(3, slower=0.15, **short), recorded(**short), PRIOR, GPU, cases=200).verdict == "regressed"


def test_noise_that_hides_the_bound_is_inconclusive():
    decision = decide(runs_of(3, sd=0.08), recorded(sd=0.08), Prior(0.08**2, 6), GPU, cases=200)
    assert decision.verdict == "inconclusive"
    assert "cannot be excluded" in decision.reason
    assert decision.detectable > 0.2


def test_one_slow_process_does_not_make_a_regression():
    fresh = runs_of(3)
    fresh[1] = replace(fresh[1], p50=fresh[1].p50 * 1.3)
    assert decide(fresh, recorded(), PRIOR, GPU, cases=200).verdict != "regressed"


def test_a_kernel_with_two_speeds_does_not_alarm():
    """Each process gets one of two speeds, 6 % apart: of 300 suites with such a case, few may call it a regression."""
    alarms = 0
    for seed in range(300):
        generator = random.Random(seed)

        def speeds(number, generator=generator):
            return [replace(run, p50=run.p50 * generator.choice((1.0, 1.06))) for run in runs_of(number, generator.random())]

        decision = decide(speeds(3), fit(speeds(10), SENSITIVITY), PRIOR, GPU, cases=200)
        alarms += decision.verdict == "regressed"
    assert alarms <= 1


def test_a_slow_machine_is_told_from_a_slow_kernel():
    drifted = runs_of(3, drift=0.03)
    decision = decide(drifted, recorded(), PRIOR, GPU, cases=200)
    assert decision.verdict == "passed"
    assert decision.anchors["compute"] == pytest.approx(0.03, abs=0.003)
    assert abs(decision.change) < 0.01


def test_more_cases_need_more_certainty():
    fresh, noisy = runs_of(3, sd=0.012, slower=0.07), recorded(sd=0.012)
    found = [decide(fresh, noisy, Prior(0.012**2, 6), GPU, cases) for cases in (1, 100_000_000)]
    assert [d.verdict for d in found] == ["regressed", "inconclusive"]
    assert found[0].detectable < found[1].detectable


def test_faster_runs_pass_and_say_so():
    decision = decide(runs_of(3, slower=-0.1), recorded(), PRIOR, GPU, cases=200)
    assert decision.verdict == "passed"
    assert decision.is_faster
    assert not decide(runs_of(3), recorded(), PRIOR, GPU, cases=200).is_faster


def test_the_screen_lets_equal_runs_through_and_stops_slow_ones():
    stopped = sum(screen(runs_of(1, seed)[0], recorded(seed + 500), PRIOR, GPU, 200)[1] for seed in range(300))
    assert stopped / 300 < 0.05
    assert all(screen(runs_of(1, seed, slower=0.03)[0], recorded(), PRIOR, GPU, 200)[1] for seed in range(50))


def test_the_screen_stops_no_change_that_cannot_become_a_failure():
    """Half a percent, however certain: another GPU of the same name. New processes could not call that a regression."""
    exact = recorded(sd=2e-4)
    prior = Prior(4e-8, 50)
    for slower, is_suspect in ((0.005, False), (0.018, False), (0.0199, True), (0.021, True)):
        decision, suspected = screen(runs_of(1, sd=1e-6, slower=slower)[0], exact, prior, GPU, 200)
        assert (decision.interval[0] > 0, suspected) == (True, is_suspect)


def test_the_screen_stops_slowdowns_that_the_first_run_shows_too_small():
    """3 % of 8 us are 0.24 us, barely what fails; half of the first runs show less than 0.2."""
    short = {"p50": 8e-6, "sd": 0.007}
    stopped = [screen(runs_of(1, seed, slower=0.03, **short)[0], recorded(**short), PRIOR, GPU, 200)[1] for seed in range(200)]
    assert sum(stopped) > 190


@pytest.mark.parametrize(
    ("slower", "verdict", "elsewhere", "is_suspect"),
    [
        (0.024, "regressed", "passed", False),
        (0.036, "regressed", "inconclusive", False),
        (0.08, "regressed", "regressed", True),
    ],
)
def test_another_device_of_the_name_may_be_slower_by_itself(slower, verdict, elsewhere, is_suspect):
    """Of cuDNN's forward pass, two H200s differed by 2.4 %."""
    here = decide(runs_of(3, slower=slower), recorded(), PRIOR, GPU, cases=200)
    there = decide(runs_of(3, slower=slower), recorded(), PRIOR, GPU, cases=200, is_same_device=False)
    assert (here.verdict, there.verdict) == (verdict, elsewhere)
    assert here.detectable < 0.03 < there.detectable < 0.06
    assert screen(runs_of(1, slower=slower)[0], recorded(), PRIOR, GPU, 200, is_same_device=False)[1] is is_suspect
    if elsewhere == "inconclusive":
        assert there.reason == "a slowdown of 5% cannot be excluded; not known to be recorded on this very device"


def test_the_reference_loop_tells_of_others_on_a_core_but_not_of_another_interpreter():
    cpu = POLICIES["cpu"]

    def beside(number, loop, **how):
        return [replace(run, anchors={**run.anchors, "pace": loop}, launch=0.0) for run in runs_of(number, sd=0.02, **how)]

    noted = fit(beside(10, 70e-6), SENSITIVITY)
    assert "pace" not in noted.sensitivity
    prior = Prior(0.02**2, 10)
    shared = decide(beside(4, 110e-6, slower=0.5), noted, prior, cpu, cases=20)
    assert (shared.verdict, shared.reason) == ("inconclusive", "the pace control moved by +57.1% since the recording")
    assert decide(beside(4, 76e-6, slower=0.5), noted, prior, cpu, cases=20).verdict == "regressed"
    assert decide(beside(4, 110e-6, slower=0.5), noted, prior, cpu, cases=20, agreed=False).verdict == "regressed"


def test_suites_on_another_device_alarm_in_at_most_one_of_a_hundred():
    """Kernels that differ between devices as far as any family of kernels was seen to."""
    alarms = 0
    for suite in range(40):
        generator = random.Random(suite)
        fits = [recorded(generator.random()) for _ in range(20)]
        prior = shared_prior(fits, "cuda")
        by_themselves = [math.expm1(generator.gauss(0, GPU.between)) for _ in fits]
        verdicts = [
            decide(runs_of(3, generator.random(), slower=slower), f, prior, GPU, 20, is_same_device=False).verdict
            for f, slower in zip(fits, by_themselves, strict=True)
        ]
        alarms += "regressed" in verdicts
    assert alarms <= 1


def test_sensitivities_are_learned_and_stay_between_none_and_all():
    def spread(follow, seed=3):
        generator = random.Random(seed)
        found = []
        for _ in range(40):
            moved = generator.gauss(0, 0.02)
            p50 = 1e-3 * math.exp(follow * moved + generator.gauss(0, 0.001))
            found.append(Run(p50, {"compute": 2e-4 * math.exp(moved), "memory": 1e-4 * math.exp(generator.gauss(0, 0.001))}))
        return found

    assert fit(spread(0.9), SENSITIVITY).sensitivity["compute"] == pytest.approx(0.9, abs=0.05)
    assert fit(spread(0.1), SENSITIVITY).sensitivity["compute"] == pytest.approx(0.1, abs=0.05)
    assert fit(spread(1.8), SENSITIVITY).sensitivity["compute"] == 1
    assert fit(spread(-0.8), SENSITIVITY).sensitivity["compute"] == 0
    assert fit(runs_of(2), SENSITIVITY).sensitivity["compute"] == pytest.approx(0.5, abs=0.1)


def test_what_bounds_a_kernel_is_what_it_is_expected_to_follow():
    assert expected_sensitivity(1e12, 1e8, 1e-3) == {"compute": 0.5, "memory": 0.0}
    assert expected_sensitivity(1e8, 1e8, 1e-3) == {"compute": 0.0, "memory": 0.5}
    assert max(expected_sensitivity(1e8, 1e5, 6e-6).values()) < 0.5


def test_a_host_that_launches_far_slower_is_a_regression():
    slow = [replace(run, launch=500e-6) for run in runs_of(3)]
    decision = decide(slow, recorded(), PRIOR, GPU, cases=200)
    assert decision.verdict == "regressed"
    assert decision.reason == "the host takes 500 us to launch a call, recorded at most 30 us"
    assert decide([*slow[:2], runs_of(1)[0]], recorded(), PRIOR, GPU, cases=200).verdict == "passed"
    assert decide([replace(run, launch=90e-6) for run in slow], recorded(), PRIOR, GPU, cases=200).verdict == "passed"
    assert screen(slow[0], recorded(), PRIOR, GPU, 200)[1]


def test_anchors_that_were_not_recorded_are_left_out():
    bare = [replace(run, anchors={}) for run in runs_of(10)]
    assert decide(runs_of(3), fit(bare, SENSITIVITY), PRIOR, GPU, cases=1).verdict == "passed"
    assert decide([replace(r, anchors={}) for r in runs_of(3)], recorded(), PRIOR, GPU, cases=1).verdict == "passed"


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="without runs"):
        fit([], SENSITIVITY)
    with pytest.raises(ValueError, match="no runs"):
        decide([], recorded(), PRIOR, GPU, 1)


def test_the_prior_of_a_file_comes_from_its_cases():
    fits = [recorded(seed, sd=0.004) for seed in range(60)]
    assert shared_prior(fits, "cuda").variance == pytest.approx(0.004**2, rel=0.3)
    assert shared_prior(fits[:2], "cuda").degrees == 4
    assert shared_prior([], "xpu") == shared_prior([], "cpu")
    assert policy_for("xpu") == POLICIES["cpu"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sd", [0.001, 0.002, 0.004])
def test_suites_without_a_slowdown_alarm_in_at_most_one_of_a_hundred(sd):
    """Screen, then three fresh runs, over suites of 40 cases whose variances differ; a family-wise rate of 1 % by design."""
    alarms = 0
    for suite in range(40):
        generator = random.Random(suite)
        spreads = [sd * math.exp(generator.gauss(0, 0.5)) for _ in range(25)]
        fits = [recorded(generator.random(), sd=s) for s in spreads]
        prior = shared_prior(fits, "cuda")
        verdicts = []
        for f, s in zip(fits, spreads, strict=True):
            _, is_suspect = screen(runs_of(1, generator.random(), sd=s)[0], f, prior, GPU, 25)
            if is_suspect:
                verdicts.append(decide(runs_of(3, generator.random(), sd=s), f, prior, GPU, 25).verdict)
        alarms += "regressed" in verdicts
    assert alarms <= 1


# -- a CPU, on which others compute unseen -----------------------------------------------------------------------------

CPU = POLICIES["cpu"]
NOTED = Prior(0.02**2, 10)


def beside(number, seed=0, slower=0.0, machine=0.0, follow=1.0, sd=0.02):
    """Draw runs beside attention like the case, both slowed by others, which the case follows more or less."""
    draw = random.Random(seed).gauss
    return [
        Run(
            3e-3 * (1 + slower) * math.exp(follow * machine + draw(0, sd)),
            {"attention": 2e-3 * math.exp(machine + draw(0, sd))},
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    ("then", "now", "verdict"),
    [
        ({}, {}, "passed"),
        ({}, {"slower": 0.3}, "regressed"),
        ({}, {"machine": 0.05}, "passed"),
        ({}, {"machine": 0.3}, "inconclusive"),
        ({}, {"machine": 0.3, "slower": 0.3}, "inconclusive"),
        ({}, {"machine": 0.08, "follow": 2.5}, "inconclusive"),
        ({"machine": 0.04, "follow": 0.0}, {}, "passed"),
        ({}, {"machine": -0.08, "follow": 0.0, "slower": 0.13, "sd": 0.003}, "inconclusive"),
        ({"machine": 0.3}, {}, "inconclusive"),
        ({"machine": 0.3}, {"slower": 0.3}, "inconclusive"),
    ],
    ids=[
        "equal",
        "slower",
        "followed",
        "busy",
        "slower while busy",
        "more than followed",
        "not followed",
        "control faster",
        "was busy",
        "slower",
    ],
)
def test_on_a_cpu_the_times_and_their_ratio_to_attention_must_agree(then, now, verdict):
    recording = fit(beside(FEWEST_RUNS, 1, **then), SENSITIVITY)
    assert recording.sensitivity == {"attention": 1.0}
    assert decide(beside(3, 2, **now), recording, NOTED, CPU, cases=2).verdict == verdict


def test_what_was_recorded_while_a_cpu_was_busy_does_not_pass_as_fast():
    """A kernel that is 30 % slower, and took as long beside what slowed the core."""
    recording = fit([Run(1.3e-3, {"pace": 9e-5 * (1 + number / 1000)}) for number in range(10)], SENSITIVITY)
    found = decide([Run(1.3e-3, {"pace": 7e-5})] * 3, recording, NOTED, CPU, cases=2)
    assert (found.verdict, found.reason[:8]) == ("inconclusive", "the pace")


def test_new_processes_on_a_cpu_that_differ_more_than_recorded_ones_accuse_nobody():
    """An unchanged kernel of 3 ms beside other work; the controls moved by at most 5 %."""
    then, now = (2.71, 2.8, 2.84, 2.9, 2.93, 2.95, 3.0, 3.1, 3.3, 3.53), (5.34, 3.58, 3.6)
    recording = fit([Run(p50 * 1e-3, {}) for p50 in then], SENSITIVITY)
    found = decide([Run(p50 * 1e-3, {}) for p50 in now], recording, NOTED, CPU, cases=2)
    assert (found.verdict, found.change > 0.3) == ("inconclusive", True)
    assert decide([Run(p50 * 1e-3, {}) for p50 in (4.4, 4.5, 4.6)], recording, NOTED, CPU, cases=2).verdict == "regressed"


@pytest.mark.parametrize(("slower", "verdict"), [(0.0, "passed"), (0.05, "passed"), (0.09, "inconclusive")])
def test_one_process_on_a_cpu_that_may_have_been_lucky_does_not_pass_alone(slower, verdict):
    """A kernel that is 30 % slower took 9 % longer in one process of eight, beside controls as recorded."""
    recording = fit(beside(FEWEST_RUNS, 1, sd=0.005), SENSITIVITY)
    now = [Run(3e-3 * (1 + slower), {"attention": 2e-3})] * 3
    decision, needs_others = screen(now[0], recording, NOTED, CPU, cases=6)
    assert (decision.verdict, needs_others) == (verdict, verdict != "passed")
    assert decide(now, recording, NOTED, CPU, cases=6).verdict == "passed"


def test_on_a_cpu_whose_hours_differ_nobody_is_accused_and_nearly_each_slowdown_is_found():
    """Recorded in one hour, run in another; a case and the attention beside it are slowed by others, each its own way."""
    found = {0.0: [], 0.3: []}
    for seed in range(150):
        generator = random.Random(seed)
        hours = [
            {"machine": generator.choice((0.0, abs(generator.gauss(0, 0.1)))), "follow": generator.uniform(0.7, 1.3)}
            for _ in range(2)
        ]
        hours[1]["machine"] += generator.gauss(0, 0.03)
        recording = fit(beside(FEWEST_RUNS, seed, **hours[0]), SENSITIVITY)
        for slower, verdicts in found.items():
            decision = decide(beside(3, seed + 1000, slower=slower, **hours[1]), recording, NOTED, CPU, cases=10)
            verdicts.append((decision.verdict, hours))
    assert all(verdict != "regressed" for verdict, _ in found[0.0])
    assert all(verdict != "passed" for verdict, _ in found[0.3])
    quiet = [verdict for verdict, hours in found[0.3] if max(hour["machine"] for hour in hours) < 0.03]
    assert len(quiet) > 10
    assert set(quiet) == {"regressed"}
