"""Cheats are no better off where `pytest_attn.judge` judges them, in a process of their own."""

import pytest
from left_out import one_in

from cheats.own_process import OWN_PROCESS
from cheats.table import CHEATS
from pytest_attn import Window, Workload, judge
from pytest_attn.guests.judging.judge_kernel import Judgment

#: kinds that have no effect on another process, or of which nothing is promised
_WITHOUT_EFFECT = ("replaces the judge", "files", "watched")
CAN_PASS = [one for one in CHEATS if one.needs_cuda or one.passes or one.kind in _WITHOUT_EFFECT or "late_exit" in one.name]
REFUSED = [one for one in CHEATS if one not in CAN_PASS]
#: in a process of its own each call gets other memory, so that what keeps results by their place shows once it is timed
BY_CHECK = [one for one in REFUSED if one.refused_by == "check" and not one.slow]
TIMED = [one for one in (*REFUSED, *OWN_PROCESS) if one not in BY_CHECK and "thread" not in one.does]


def arguments_of(*workloads, **declared):
    return list(workloads), declared


def judged(cheat, folder, **options) -> Judgment:
    """Judge a cheat on what its marker says."""
    (folder / f"{cheat.name}.py").write_text(cheat.text)
    named = {"arguments_of": arguments_of, "Workload": Workload, "Window": Window}
    workloads, declared = eval(f"arguments_of({cheat.marker})", named)
    return judge(f"{folder}/{cheat.name}.py", workloads, device="cpu", **declared, **options)


def test_what_a_check_can_refuse_is_wrong(tmp_path):
    found = {cheat.name: judged(cheat, tmp_path, feedback="verdict").right for cheat in one_in(3, BY_CHECK)}
    assert {name: right for name, right in found.items() if right is not False} == {}
    assert len(found) > 9


@pytest.mark.slow("makes many calls")
@pytest.mark.parametrize("cheat", TIMED, ids=lambda cheat: cheat.name)
def test_what_a_time_can_refuse_is_never_right_with_a_time(cheat, tmp_path):
    found = judged(cheat, tmp_path, measure=True, feedback="verdict")
    assert found.right is not True or not any(one.times for one in found.workloads)
