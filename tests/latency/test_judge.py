"""The decision over one latency: what is asked of new processes, what becomes of their answer, why there is none."""

import pytest
from fakes.latencies import CPU, FOLDER, GPU, H200, KEY, SCATTERED, Fresh, case, judged, measured, recorded

from pytest_attn.latency.anchors import anchor_hashes
from pytest_attn.latency.baseline_file import BaselineFile, Identity
from pytest_attn.latency.gate import shared_prior
from pytest_attn.latency.protocol import protocol_of
from pytest_attn.latency.regression import RECORD, DeviceBaselines, DisturbedError, FreshError, SharedCpu, StartError
from pytest_attn.reports.verdict import Cause, Verdict

# -- one measurement, and what new processes say of it -----------------------------------------------------------------


def test_an_equal_time_passes_by_itself():
    decision = judged(measured(1.001e-4))
    assert (decision.verdict, decision.reason, decision.cause, decision.remedy) == (Verdict.PASSED, "", "", "")
    assert decision.runs == (1.001e-4,)
    assert decision.recorded == pytest.approx(1.0045e-4)
    assert not decision.is_faster


def test_a_faster_time_passes_by_itself_and_says_so():
    decision = judged(measured(5e-5))
    assert (decision.verdict, decision.is_faster) == (Verdict.PASSED, True)
    assert decision.change == pytest.approx(-0.5, abs=0.01)


def test_a_slower_time_is_decided_by_the_times_of_fresh_processes():
    fresh = Fresh(1.51e-4, 1.5e-4, 1.52e-4, 1.5e-4)
    decision = judged(measured(1.6e-4), fresh)
    assert (decision.verdict, decision.reason) == (Verdict.REGRESSED, "")
    assert decision.runs == (1.51e-4, 1.5e-4, 1.52e-4, 1.5e-4)
    assert decision.change == pytest.approx(0.5, abs=0.01)
    assert decision.anchors == {"compute": pytest.approx(0), "memory": pytest.approx(0)}
    assert fresh.asked == 1


def test_a_slower_time_that_fresh_processes_do_not_confirm_passes():
    decision = judged(measured(1.5e-4), Fresh(1e-4, 1.01e-4, 1e-4, 1e-4))
    assert decision.verdict == Verdict.PASSED
    assert decision.runs == (1e-4, 1.01e-4, 1e-4, 1e-4)


def test_a_regression_in_fresh_processes_only_is_not_looked_for():
    fresh = Fresh(1.5e-4, 1.5e-4, 1.5e-4, 1.5e-4)
    assert judged(measured(1e-4), fresh).verdict == Verdict.PASSED
    assert fresh.asked == 0


def test_a_slow_machine_is_inconclusive_and_no_pass():
    decision = judged(measured(3e-4, anchor=3), Fresh(3e-4, 3e-4, 3e-4, 3e-4, anchor=3))
    assert (decision.verdict, decision.reason) == (
        Verdict.INCONCLUSIVE,
        "the compute control moved by +200.0% since the recording",
    )


def test_a_machine_that_was_slow_for_a_moment_is_judged_by_fresh_processes():
    assert judged(measured(3e-4, anchor=3), Fresh(1e-4, 1e-4, 1e-4, 1e-4)).verdict == Verdict.PASSED


def test_a_kernel_that_scatters_too_much_is_inconclusive_after_fresh_processes_were_asked():
    fresh = Fresh(1e-4, 1.6e-4, 0.7e-4, 1.3e-4)
    decision = judged(measured(1e-4), fresh, recorded(p50=SCATTERED))
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "a slowdown of 25% cannot be excluded")
    assert (fresh.asked, len(decision.runs)) == (1, 4)
    assert decision.detectable > 0.5


@pytest.mark.parametrize(("slowdown", "verdict"), [(0.6, Verdict.PASSED), (0.4, Verdict.REGRESSED)])
def test_the_policy_says_which_slowdown_fails(slowdown, verdict):
    assert judged(measured(1.5e-4), Fresh(1.5e-4, 1.5e-4, 1.5e-4, 1.5e-4), slowdown=slowdown).verdict == verdict


# -- new processes that do not answer ----------------------------------------------------------------------------------


def test_a_fresh_process_that_cannot_run_hides_no_slowdown():
    decision = judged(measured(1.5e-4), Fresh(error=StartError("a new process could not run it: no more")))
    assert (decision.verdict, decision.reason) == (Verdict.UNCONFIRMED, "a new process could not run it: no more")
    assert decision.change == pytest.approx(0.5, abs=0.01)


def test_a_fresh_process_that_cannot_run_makes_no_slowdown_of_one_that_is_too_small():
    decision = judged(measured(1.2e-4), Fresh(error=StartError("no more")), recorded(p50=SCATTERED))
    assert 0 < decision.change < 0.1
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "no more")


@pytest.mark.parametrize("error", [FreshError("3 of 4 new processes timed it"), DisturbedError("hot")])
def test_a_slower_time_that_fresh_processes_could_not_take_is_inconclusive(error):
    decision = judged(measured(1.5e-4), Fresh(error=error))
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, f"not confirmed: {error}")
    assert decision.change == pytest.approx(0.5, abs=0.01)


# -- disturbances --------------------------------------------------------------------------------------------------------


DISTURBED = {"disturbances": ("hot", "shared")}


@pytest.mark.parametrize(("p50", "verdict"), [(3e-4, Verdict.REGRESSED), (1e-4, Verdict.PASSED)])
def test_a_disturbed_time_is_decided_by_fresh_processes_on_a_cpu(p50, verdict):
    fresh = Fresh(p50, p50, p50, p50)
    decision = judged(measured(1e-4, latency=DISTURBED), fresh)
    assert (decision.verdict, decision.runs, fresh.asked) == (verdict, (p50,) * 4, 1)


def test_a_disturbed_time_on_a_gpu_is_inconclusive_and_nobody_is_asked():
    crowd = SharedCpu()
    decision = judged(measured(3e-4, "cuda", latency=DISTURBED), crowd=crowd)
    assert (decision.verdict, decision.reason, decision.change) == (Verdict.INCONCLUSIVE, "hot; shared", None)
    assert not crowd.is_there


def test_a_disturbed_time_stays_what_it_is_where_fresh_processes_are_disturbed_as_well():
    decision = judged(measured(3e-4, latency=DISTURBED), Fresh(error=DisturbedError("hotter")))
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "hot; shared")


@pytest.mark.parametrize("error", [FreshError("3 of 4 new processes timed it"), StartError("no more")])
def test_a_disturbed_time_says_why_fresh_processes_did_not_decide(error):
    decision = judged(measured(3e-4, latency=DISTURBED), Fresh(error=error))
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, f"hot; shared; {error}")


def test_where_fresh_processes_were_disturbed_as_well_they_are_not_asked_again():
    crowd, disturbed = SharedCpu(), Fresh(error=DisturbedError("hot"))
    judged(measured(3e-4, latency=DISTURBED), disturbed, crowd=crowd)
    assert crowd.is_there
    assert judged(measured(3e-4, latency=DISTURBED), disturbed, crowd=crowd).verdict == Verdict.INCONCLUSIVE
    assert disturbed.asked == 1


def test_a_slower_time_among_a_crowd_is_confirmed_all_the_same():
    fresh = Fresh(3e-4, 3e-4, 3e-4, 3e-4)
    assert judged(measured(3e-4), fresh, crowd=SharedCpu(is_there=True)).verdict == Verdict.REGRESSED


def test_an_undisturbed_time_says_that_the_crowd_has_gone():
    crowd = SharedCpu(is_there=True)
    judged(measured(1e-4), crowd=crowd)
    assert not crowd.is_there
    fresh = Fresh(1e-4, 1e-4, 1e-4, 1e-4)
    judged(measured(1e-4, latency=DISTURBED), fresh, crowd=crowd)
    assert fresh.asked == 1


@pytest.mark.parametrize("error", [FreshError("it took more than 1800 s"), StartError("no more")])
def test_fresh_processes_that_were_not_disturbed_are_no_crowd(error):
    crowd = SharedCpu()
    judged(measured(3e-4, latency=DISTURBED), Fresh(error=error), crowd=crowd)
    assert not crowd.is_there


def test_disturbed_fresh_processes_of_a_gpu_are_no_crowd():
    crowd = SharedCpu()
    judged(measured(3e-4, "cuda"), Fresh(error=DisturbedError("hot")), crowd=crowd)
    assert not crowd.is_there


# -- without a baseline that can be used ---------------------------------------------------------------------------------


def without(baselines, **changes):
    return judged(measured(9e-4, **changes), baselines=baselines)


def test_a_case_that_was_never_recorded_says_where_and_what_to_type():
    decision = without(DeviceBaselines(BaselineFile(FOLDER / "cpu.json", CPU, {}), {}, shared_prior([], "cpu")))
    assert (decision.verdict, decision.cause) == (Verdict.NO_BASELINE, Cause.NONE_RECORDED.value)
    assert (decision.reason, decision.remedy) == ("none recorded in baselines", RECORD)


@pytest.mark.parametrize(
    ("key", "changes", "cause", "reason"),
    [
        (
            KEY.replace("1 thread", "2 threads"),
            {},
            Cause.RECORDED_OTHERWISE,
            "recorded warm, 2 threads, this is warm, 1 thread",
        ),
        (KEY.replace("tiny", "huge"), {}, Cause.NONE_RECORDED, "none recorded in baselines"),
        (KEY, {"shape": "h2-s48-d32"}, Cause.ANOTHER_SHAPE, "recorded for h2-s48-d32, this is h2-s32-d32"),
        (KEY, {"protocol": 1}, Cause.ANOTHER_PROTOCOL, f"recorded with protocol 1, this is {protocol_of('cpu')}"),
    ],
    ids=["threads", "workload", "shape", "protocol"],
)
def test_a_case_of_something_else_says_of_what_and_is_recorded_anew(key, changes, cause, reason):
    decision = without(recorded(key=key, **changes))
    assert (decision.verdict, decision.cause, decision.reason) == (Verdict.NO_BASELINE, cause.value, reason)
    assert decision.remedy == RECORD
    assert decision.change is None


def test_a_file_that_cannot_be_used_is_said_and_not_recorded_over():
    decision = without(DeviceBaselines(problem="cpu.json: is damaged; restore it from version control"))
    assert (decision.verdict, decision.cause, decision.remedy) == (Verdict.NO_BASELINE, Cause.UNUSABLE_FILE.value, "")
    assert decision.reason == "cpu.json: is damaged; restore it from version control"


def test_a_file_in_place_of_the_folder_is_said_and_not_recorded_over(tmp_path):
    there = tmp_path / "test_mine.py"
    there.write_text("")
    decision = without(DeviceBaselines.read(there, CPU, "cpu"), folder=there)
    assert (decision.verdict, decision.cause, decision.remedy) == (Verdict.NO_BASELINE, Cause.UNUSABLE_FILE.value, "")
    assert decision.reason == f"{there}: is a file; --attn-baselines must be a folder"


def test_more_memory_than_nothing_is_no_regression():
    assert without(DeviceBaselines(), latency={"memory": 1 << 40}).verdict == Verdict.NO_BASELINE


# -- what was recorded, as read from the file of a machine ---------------------------------------------------------------


def test_the_baselines_of_a_machine_are_read_from_its_file(tmp_path):
    BaselineFile(tmp_path / "nvidia-h200.json", H200, anchor_hashes("cuda")).write({KEY: case(kind="cuda")})
    found = DeviceBaselines.read(tmp_path, H200, "cuda")
    assert (found.problem, set(found.fits)) == ("", {KEY})
    assert found.of(KEY).gpu == GPU
    assert found.of("another") is None
    assert judged(measured(1e-4, "cuda"), baselines=found).verdict == Verdict.PASSED
    other = DeviceBaselines.read(tmp_path, Identity("cuda", "NVIDIA H200", 66, 70), "cuda")
    assert judged(measured(1e-4, "cuda"), baselines=other).cause == Cause.NONE_RECORDED.value


def test_cases_of_another_protocol_are_read_and_never_fitted(tmp_path):
    cases = {KEY: case(), "older": case(protocol=1)}
    BaselineFile(tmp_path / f"{CPU.slug}.json", CPU, anchor_hashes("cpu")).write(cases)
    found = DeviceBaselines.read(tmp_path, CPU, "cpu")
    assert set(found.fits) == {KEY}
    assert found.of("older").protocol == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: "{", "is damaged"),
        (lambda text: text.replace('"flops": 1000000', '"flops": "many"'), "is damaged"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "has schema 99"),
    ],
    ids=["half a file", "a number in words", "of tomorrow"],
)
def test_a_file_that_cannot_be_read_is_a_problem_of_every_case_and_no_error(tmp_path, damage, words):
    path = tmp_path / f"{CPU.slug}.json"
    BaselineFile(path, CPU, anchor_hashes("cpu")).write({KEY: case()})
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    decision = judged(measured(3e-4), baselines=DeviceBaselines.read(tmp_path, CPU, "cpu"))
    assert (decision.verdict, decision.cause) == (Verdict.NO_BASELINE, Cause.UNUSABLE_FILE.value)
    assert decision.reason.startswith(f"{path}: ")
    assert words in decision.reason


# -- whether it is the device and the software of the recording ----------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "of_recording", "is_known"),
    [(GPU, GPU, True), ("0badf00d", GPU, False), (GPU, "", False), ("", GPU, False), ("", "", False)],
)
def test_a_gpu_is_that_of_the_recording_or_may_be_slower_by_itself(gpu, of_recording, is_known):
    """Of one kernel, two GPUs of one name differed by 2.4 %; of none by 3.6 %."""
    baselines = recorded("cuda", gpu=of_recording)

    def slower_by(share):
        p50 = (1 + share) * 1.0045e-4
        fresh = Fresh(p50, p50, p50, launch=3e-5)
        decision = judged(measured(p50, "cuda", gpu=gpu), fresh, baselines, cases=200)
        return decision.verdict, decision.reason, fresh.asked

    if is_known:
        assert slower_by(0.024) == slower_by(0.036) == (Verdict.REGRESSED, "", 1)
    else:
        assert slower_by(0.024) == (Verdict.PASSED, "", 0)
        words = "a slowdown of 5% cannot be excluded; not known to be recorded on this very device"
        assert slower_by(0.036) == (Verdict.INCONCLUSIVE, words, 1)


def test_a_cpu_needs_no_name_to_be_that_of_the_recording():
    fresh = Fresh(1e-4, 1.6e-4, 0.7e-4, 1.3e-4)
    decision = judged(measured(1e-4), fresh, recorded(p50=SCATTERED, gpu="48f07d55"))
    assert (decision.reason, fresh.asked) == ("a slowdown of 25% cannot be excluded", 1)


@pytest.mark.parametrize("changes", [{"conditions": {"torch": "2.14.0"}}, {"version": "2.8.3"}])
def test_other_software_needs_anchors_that_agree(changes):
    fresh = Fresh(*[1.5e-4] * 4, anchor=1.1)
    decision = judged(measured(1.5e-4, anchor=1.1, **changes), fresh)
    assert (decision.verdict, decision.reason) == (
        Verdict.INCONCLUSIVE,
        "the compute control moved by +10.0% since the recording, and the software is another",
    )
    assert judged(measured(1.5e-4, anchor=1.1), fresh).verdict == Verdict.REGRESSED
    assert judged(measured(1.5e-4, **changes), Fresh(*[1.5e-4] * 4)).verdict == Verdict.REGRESSED


# -- what is gated beside the time ---------------------------------------------------------------------------------------


def test_more_memory_is_a_regression():
    decision = judged(measured(1e-4, latency={"memory": 5 << 20}))
    assert (decision.verdict, decision.reason) == (Verdict.REGRESSED, "peak memory 5.0 MiB, recorded 0.0 MiB")


@pytest.mark.parametrize("memory", [None, 1 << 20, 1000])
def test_memory_that_nobody_knows_or_that_is_little_more_passes(memory):
    assert judged(measured(1e-4, latency={"memory": memory})).verdict == Verdict.PASSED


def test_less_accuracy_is_a_regression():
    decision = judged(measured(1e-4, z=(1.0, 0.05, 0.5)))
    assert (decision.verdict, decision.reason) == (
        Verdict.REGRESSED,
        "less accurate: z 1 in one element, recorded 0.1; less accurate: z 0.5 in one head, recorded 0.01",
    )


@pytest.mark.parametrize("changes", [{"check": "structured seed 1", "z": (1.0, 1.0, 1.0)}, {"z": None}])
def test_accuracy_is_held_against_that_of_the_same_check_only(changes):
    assert judged(measured(1e-4, **changes)).verdict == Verdict.PASSED


def test_a_time_of_which_nothing_can_be_said_is_a_regression_for_its_memory_and_says_both():
    decision = judged(measured(1e-4, "cuda", latency={**DISTURBED, "memory": 5 << 20}))
    assert (decision.verdict, decision.reason) == (Verdict.REGRESSED, "hot; shared; peak memory 5.0 MiB, recorded 0.0 MiB")


def test_a_host_that_launches_far_slower_is_a_regression_of_a_gpu_kernel():
    decision = judged(measured(1e-4, "cuda", latency={"launch": 5e-4}), Fresh(*[1e-4] * 3, launch=5e-4))
    assert (decision.verdict, decision.reason) == (
        Verdict.REGRESSED,
        "the host takes 500 us to launch a call, recorded at most 30 us",
    )


def test_the_host_s_clock_times_the_kernel_itself_and_no_launch():
    one = measured(1e-4, "cuda", latency={"mode": "host", "launch": 5e-4})
    assert one.launch == 0
    assert measured(1e-4, "cuda", latency={"launch": 5e-4}).launch == 5e-4
    assert judged(one).verdict == Verdict.PASSED


def test_small_changes_that_were_accepted_one_by_one_are_said():
    history = (("2026-01-01", 6e-5, "first recording"), ("2026-11-21", 1e-4, "accepted"))
    decision = judged(measured(1e-4), baselines=recorded(history=history))
    assert decision.verdict == Verdict.PASSED
    assert decision.reason == "+66.7% since the first recording on 2026-01-01"
