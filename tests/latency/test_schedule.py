"""When a measurement has blocks enough, by a clock of the tests."""

import pytest
from judging import Clock

from pytest_attn.latency.protocol import LOOKS, Schedule, is_narrow, seconds_for_blocks, wanted_half_width

#: as the half-width of an interval that no scatter of the tests reaches
NEVER = 0.0


def taken(schedule, clock, lengths, sample=lambda number: 1.0 + number):
    """Take blocks of these lengths, in seconds, as long as another one is wanted; return how many."""
    blocks = []
    while schedule.wants_another(blocks):
        clock.now += lengths[len(blocks) % len(lengths)]
        blocks.append([sample(len(blocks))] * 3)
    return len(blocks)


@pytest.mark.parametrize(("seconds", "number"), [(0.0, 3), (0.049, 3), (0.051, 4), (0.063, 5)])
def test_a_block_that_would_end_too_late_is_not_begun_but_three_are_taken(seconds, number):
    clock = Clock()
    assert taken(Schedule(clock, seconds, NEVER), clock, [0.0125]) == number


def test_a_block_that_was_repeated_tells_nothing_of_how_long_the_next_takes():
    clock = Clock()
    assert taken(Schedule(clock, 1.05, NEVER), clock, [0.1, 0.1, 0.7, 0.1]) == 4


def test_an_interval_that_is_narrow_ends_a_measurement_at_the_next_look_only():
    clock = Clock()
    assert taken(Schedule(clock, 100.0, 0.01), clock, [1.0], lambda number: 1.0) == LOOKS[0]
    assert taken(Schedule(clock, 100.0, 0.01), clock, [1.0], lambda number: 2.0 if number == 0 else 1.0) == LOOKS[1]


def test_the_last_look_ends_every_measurement():
    clock = Clock()
    assert taken(Schedule(clock, float("inf"), NEVER), clock, [1.0]) == LOOKS[-1]


@pytest.mark.parametrize(
    ("kind", "seconds", "narrow"), [("cuda", 99e-6, True), ("cuda", 101e-6, False), ("cpu", 101e-6, True), ("xpu", 1e-6, True)]
)
def test_short_kernels_need_not_be_known_as_well(kind, seconds, narrow):
    blocks = [[1.0 + share] for share in (-0.003, -0.002, 0.0, 0.0, 0.002, 0.003)]
    assert is_narrow(blocks, wanted_half_width(kind, seconds)) is narrow


@pytest.mark.parametrize(("spent", "left"), [(0.1, 0.3), (0.2, 0.25), (5.0, 0.1)])
def test_a_measurement_on_a_gpu_ends_within_half_a_second(spent, left):
    assert seconds_for_blocks("cuda", spent) == pytest.approx(left)
    assert seconds_for_blocks("cpu", spent) == seconds_for_blocks("xpu", spent) == 1.2
