"""Cheats that a judge in the process of the kernel can stop are stopped there."""

import pytest
from left_out import one_in

from cheats.runs import JUDGMENTS, outcomes, source_of
from cheats.table import CHEATS

#: a hint says why a result is wrong, and takes longer than to find out that it is
QUICKLY = ("-p", "no:cacheprovider", "-v", "--tb=no", "--attn-diagnosis-timeout=0.01", "--attn-declines=fail")
STOPPED = [cheat for cheat in CHEATS if cheat.stopped == "judge" and not cheat.needs_cuda and not cheat.passes]


@pytest.fixture
def ask(pytester):
    """Return a function that asks cheats in one run, and returns how each judgment of each ended."""

    def run(cheats, judgments_of, start):
        for cheat in cheats:
            (pytester.path / f"{cheat.name}.py").write_text(cheat.text)
        asked = [cheat.asked_by(*judgments_of(cheat)) for cheat in cheats]
        pytester.makepyfile(test_cheats=source_of(asked))
        return outcomes(start(*QUICKLY).outlines)

    return run


def test_each_is_refused_by_the_judgment_that_can(ask, pytester):
    quick = one_in(3, (cheat for cheat in STOPPED if not cheat.slow))
    found = ask(quick, lambda cheat: (cheat.refused_by,), pytester.runpytest_inprocess)
    assert {name: outcome for name, outcome in found.items() if outcome != "failed"} == {}
    assert len(found) == len(quick)


@pytest.mark.slow("makes many calls")
@pytest.mark.parametrize("cheat", [cheat for cheat in STOPPED if cheat.slow], ids=lambda cheat: cheat.name)
def test_those_that_take_long_are_refused_too(ask, pytester, cheat):
    found = ask([cheat], lambda cheat: JUDGMENTS, pytester.runpytest_subprocess)
    assert "failed" in found.values()
