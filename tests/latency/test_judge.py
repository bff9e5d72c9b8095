"""The decision over one latency: what is asked of new processes, what becomes of their answer, why there is none."""

from dataclasses import replace

import pytest
from fakes.latencies import CPU, FOLDER, GPU, H200, KEY, SCATTERED, Fresh, case, judged, measured, recorded

from pytest_attn.latency.anchors import anchor_hashes
from pytest_attn.latency.baseline_file import BaselineFile, Identity
from pytest_attn.latency.gate import Decision, shared_prior
from pytest_attn.latency.protocol import protocol_of
from pytest_attn.latency.regression import (
    RECORD,
    DeviceBaselines,
    DisturbedError,
    FreshError,
    SharedCpu,
    StartError,
    describe_undecided,
)
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
    assert decision.runs == (1.51e-4, 1.5e-4, 1.52e-4, 1.5e-4) * 2
    assert decision.change == pytest.approx(0.5, abs=0.01)
    assert decision.anchors == {"compute": pytest.approx(0), "memory": pytest.approx(0)}
    assert fresh.asked == 2


def test_a_slowdown_on_a_cpu_that_is_gone_some_time_later_accuses_nobody(monkeypatch):
    waited, rounds = [], [Fresh(*[1.5e-4] * 3), Fresh(*[1e-4] * 3)]
    monkeypatch.setattr("pytest_attn.latency.regression.time.sleep", waited.append)
    decision = judged(measured(1.5e-4), lambda: rounds.pop(0)(), pause=10.0)
    assert (decision.verdict, waited) == (Verdict.INCONCLUSIVE, [10.0])
    assert decision.reason == "new processes 10 s later do not confirm that it is slower"


def test_a_regression_in_fresh_processes_only_is_not_looked_for():
    fresh = Fresh(1.5e-4, 1.5e-4, 1.5e-4, 1.5e-4)
    assert judged(measured(1e-4), fresh).verdict == Verdict.PASSED
    assert fresh.asked == 0


def test_a_kernel_that_scatters_too_much_is_inconclusive_after_fresh_processes_were_asked():
    fresh = Fresh(1e-4, 1.6e-4, 0.7e-4, 1.3e-4)
    decision = judged(measured(1e-4), fresh, recorded(p50=SCATTERED))
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "a slowdown of 25% cannot be excluded")
    assert (fresh.asked, len(decision.runs)) == (1, 4)
    assert decision.detectable > 0.5


DISTURBED = {"disturbances": ("hot", "shared")}
NO_MORE, TOO_FEW = StartError("no more"), FreshError("3 of 4 new processes timed it")
ACCEPTED = (("2026-01-01", 6e-5, "first recording"), ("2026-11-21", 1e-4, "accepted"))
MEMORY = "peak memory 5.0 MiB, recorded 0.0 MiB"
ACCURACY = "less accurate: z 1.00 in one element, recorded 0.10; less accurate: z 0.50 in one head, recorded 0.01"
LAUNCHES = "the host takes 500 us to launch a call, recorded at most 30 us"


def alike(p50, number=4, **more):
    return Fresh(*[p50] * number, **more)


#: what was measured, what new processes say if they may be asked, what else is known, the verdict and its reason
DECISIONS = {
    "not confirmed": (measured(1.5e-4), Fresh(1e-4, 1.01e-4, 1e-4, 1e-4), {}, Verdict.PASSED, ""),
    "the limit is 60 %": (measured(1.5e-4), None, {"slowdown": 0.6}, Verdict.PASSED, ""),
    "the limit is 40 %": (measured(1.5e-4), alike(1.5e-4), {"slowdown": 0.4}, Verdict.REGRESSED, ""),
    "a slow machine": (
        *(measured(3e-4, anchor=3), alike(3e-4, anchor=3), {}),
        *(Verdict.INCONCLUSIVE, "the compute control moved by +200.0% since the recording"),
    ),
    "a machine that was slow for a moment": (measured(3e-4, anchor=3), alike(1e-4), {}, Verdict.PASSED, ""),
    "a gpu's name is nothing to a CPU": (
        *(measured(1e-4), Fresh(1e-4, 1.6e-4, 0.7e-4, 1.3e-4), {"baselines": recorded(p50=SCATTERED, gpu="48f07d55")}),
        *(Verdict.INCONCLUSIVE, "a slowdown of 25% cannot be excluded"),
    ),
    "no new process runs": (measured(1.5e-4), Fresh(error=NO_MORE), {}, Verdict.UNCONFIRMED, "no more"),
    "too few run": (measured(1.5e-4), Fresh(error=TOO_FEW), {}, Verdict.INCONCLUSIVE, f"not confirmed: {TOO_FEW}"),
    "they are disturbed": (
        *(measured(1.5e-4), Fresh(error=DisturbedError("hot")), {}, Verdict.INCONCLUSIVE, "not confirmed: hot"),
    ),
    "disturbed here, slower there": (measured(1e-4, latency=DISTURBED), alike(3e-4), {}, Verdict.REGRESSED, ""),
    "disturbed here, equal there": (measured(1e-4, latency=DISTURBED), alike(1e-4), {}, Verdict.PASSED, ""),
    "disturbed here and there": (
        *(measured(3e-4, latency=DISTURBED), Fresh(error=DisturbedError("hotter")), {}, Verdict.INCONCLUSIVE, "hot; shared"),
    ),
    "disturbed here, too few there": (
        *(measured(3e-4, latency=DISTURBED), Fresh(error=TOO_FEW), {}, Verdict.INCONCLUSIVE, f"hot; shared; {TOO_FEW}"),
    ),
    "disturbed here, none there": (
        *(measured(3e-4, latency=DISTURBED), Fresh(error=NO_MORE), {}, Verdict.INCONCLUSIVE, "hot; shared; no more"),
    ),
    "slower among a crowd": (measured(3e-4), alike(3e-4), {"crowd": SharedCpu(is_there=True)}, Verdict.REGRESSED, ""),
    "more memory": (measured(1e-4, latency={"memory": 5 << 20}), None, {}, Verdict.REGRESSED, MEMORY),
    "more memory, disturbed": (
        *(measured(1e-4, "cuda", latency={**DISTURBED, "memory": 5 << 20}), None, {}),
        *(Verdict.REGRESSED, f"hot; shared; {MEMORY}"),
    ),
    "unknown memory": (measured(1e-4, latency={"memory": None}), None, {}, Verdict.PASSED, ""),
    "little more memory": (measured(1e-4, latency={"memory": 1 << 20}), None, {}, Verdict.PASSED, ""),
    "the same memory": (measured(1e-4, latency={"memory": 1000}), None, {}, Verdict.PASSED, ""),
    "less accuracy": (measured(1e-4, z=(1.0, 0.05, 0.5)), None, {}, Verdict.REGRESSED, ACCURACY),
    "of another check": (measured(1e-4, check="structured seed 1", z=(1.0, 1.0, 1.0)), None, {}, Verdict.PASSED, ""),
    "unknown accuracy": (measured(1e-4, z=None), None, {}, Verdict.PASSED, ""),
    "a host that launches far slower": (
        *(measured(1e-4, "cuda", latency={"launch": 5e-4}), alike(1e-4, 3, launch=5e-4), {}, Verdict.REGRESSED, LAUNCHES),
    ),
    "small changes, accepted one by one": (
        *(measured(1e-4), None, {"baselines": recorded(history=ACCEPTED)}),
        *(Verdict.PASSED, "+66.7% since the first recording on 2026-01-01"),
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_measurement_and_new_processes_make_a_decision(name):
    one, fresh, known, verdict, reason = DECISIONS[name]
    decision = judged(one, fresh, **known)
    assert (decision.verdict, decision.reason) == (verdict, reason)
    if fresh:
        rounds = 2 if one.kind == "cpu" and verdict == Verdict.REGRESSED else 1
        assert fresh.asked == rounds
        assert fresh.error or decision.runs == tuple(run.p50 for run in fresh.runs) * rounds


# -- new processes that do not answer ----------------------------------------------------------------------------------


def test_a_fresh_process_that_cannot_run_makes_no_slowdown_of_one_that_is_too_small():
    decision = judged(measured(1.2e-4), Fresh(error=StartError("no more")), recorded(p50=SCATTERED))
    assert 0 < decision.change < 0.1
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "no more")


# -- disturbances --------------------------------------------------------------------------------------------------------


def test_a_disturbed_time_on_a_gpu_is_inconclusive_and_nobody_is_asked():
    crowd = SharedCpu()
    decision = judged(measured(3e-4, "cuda", latency=DISTURBED), crowd=crowd)
    assert (decision.verdict, decision.reason, decision.change) == (Verdict.INCONCLUSIVE, "hot; shared", None)
    assert not crowd.is_there


def test_where_fresh_processes_were_disturbed_as_well_they_are_not_asked_again():
    crowd, disturbed = SharedCpu(), Fresh(error=DisturbedError("hot"))
    judged(measured(3e-4, latency=DISTURBED), disturbed, crowd=crowd)
    assert crowd.is_there
    assert judged(measured(3e-4, latency=DISTURBED), disturbed, crowd=crowd).verdict == Verdict.INCONCLUSIVE
    assert disturbed.asked == 1


def test_an_undisturbed_time_says_that_the_crowd_has_gone():
    crowd = SharedCpu(is_there=True)
    judged(measured(1e-4), crowd=crowd)
    assert not crowd.is_there
    fresh = Fresh(1e-4, 1e-4, 1e-4, 1e-4)
    judged(measured(1e-4, latency=DISTURBED), fresh, crowd=crowd)
    assert fresh.asked == 1


@pytest.mark.parametrize(
    ("one", "error"),
    [
        (measured(3e-4, latency=DISTURBED), FreshError("it took more than 1800 s")),
        (measured(3e-4, latency=DISTURBED), StartError("no more")),
        (measured(3e-4, "cuda"), DisturbedError("hot")),
    ],
)
def test_new_processes_that_were_not_disturbed_or_are_of_a_gpu_are_no_crowd(one, error):
    crowd = SharedCpu()
    judged(one, Fresh(error=error), crowd=crowd)
    assert not crowd.is_there


# -- without a baseline that can be used ---------------------------------------------------------------------------------


def without(baselines, **changes):
    return judged(measured(9e-4, **changes), baselines=baselines)


def test_a_case_that_was_never_recorded_says_where_and_what_to_type():
    decision = without(DeviceBaselines(BaselineFile(FOLDER / "cpu.json", CPU, {}), {}, shared_prior([], "cpu")))
    assert (decision.verdict, decision.cause) == (Verdict.NO_BASELINE, Cause.NONE_RECORDED.value)
    said = "none recorded in baselines; there is nvidia-h200.json, of other machines"
    assert (decision.reason, decision.remedy) == (said, RECORD)


@pytest.mark.parametrize(
    ("key", "changes", "cause", "reason"),
    [
        (
            KEY.replace("1 thread", "2 threads"),
            {},
            Cause.RECORDED_OTHERWISE,
            "recorded warm, 2 threads, this is warm, 1 thread",
        ),
        (
            KEY.replace("tiny", "huge"),
            {},
            Cause.NONE_RECORDED,
            "none recorded in baselines; the same shape is recorded there as"
            f" {KEY.replace('tiny', 'huge')}: if it was renamed or moved, rename it in baselines/machine.json",
        ),
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


ON_A_CPU = {name: case().p50 for name in anchor_hashes("cpu")}


def test_cases_of_another_protocol_are_read_and_never_fitted(tmp_path):
    cases = {KEY: case(anchors=ON_A_CPU), "older": case(anchors=ON_A_CPU, protocol=1)}
    BaselineFile(tmp_path / f"{CPU.slug}.json", CPU, anchor_hashes("cpu")).write(cases)
    found = DeviceBaselines.read(tmp_path, CPU, "cpu")
    assert set(found.fits) == {KEY}
    assert found.of("older").protocol == 1


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


def test_the_host_s_clock_times_the_kernel_itself_and_no_launch():
    one = measured(1e-4, "cuda", latency={"mode": "host", "launch": 5e-4})
    assert one.launch == 0
    assert measured(1e-4, "cuda", latency={"launch": 5e-4}).launch == 5e-4
    assert judged(one).verdict == Verdict.PASSED


@pytest.mark.parametrize("threads", [1, None])
def test_an_inconclusive_case_is_no_first_recording_and_names_what_decides_on_a_cpu(threads):
    latency = replace(measured().latency, threads=threads)
    text = describe_undecided("mine", Decision(Verdict.INCONCLUSIVE, "busy", change=0.2), latency, "pytest test_mine.py")
    assert "first recording" not in text
    assert ("--attn-against=REV" in text) == (threads is not None)
