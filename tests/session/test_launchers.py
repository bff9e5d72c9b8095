"""--attn-shard=auto: what each launcher sets, and what it leaves open."""

import pytest

from pytest_attn.session.launchers import Shard, shard_of
from pytest_attn.session.options import shard


def array(task, low=0, high=7, step=1, count=None):
    values = {"ID": task, "MIN": low, "MAX": high, "STEP": step, "COUNT": count or (high - low) // step + 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def srun(task, tasks):
    return {"SLURM_PROCID": str(task), "SLURM_NTASKS": str(tasks), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks)}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (array(0), "1/8"),
        (array(7), "8/8"),
        (array(3, low=1, high=8), "3/8"),
        (array(8, low=0, high=12, step=4), "3/4"),
        (srun(0, 8), "1/8"),
        (srun(7, 8), "8/8"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, "3/4"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", **array(4)}, "5/8"),
        ({**array(1, high=3), **srun(1, 2)}, "4/8"),
        ({**srun(1, 2), "SLURM_NTASKS": "16"}, "2/2"),
        ({"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "8"}, "1/8"),
        ({"JOB_COMPLETION_INDEX": "7", "JOB_COMPLETIONS": "8"}, "8/8"),
        ({"CI_NODE_INDEX": "1", "CI_NODE_TOTAL": "4"}, "1/4"),
        ({"CI_NODE_INDEX": "4", "CI_NODE_TOTAL": "4"}, "4/4"),
        ({"CIRCLE_NODE_INDEX": "0", "CIRCLE_NODE_TOTAL": "4"}, "1/4"),
        ({"BUILDKITE_PARALLEL_JOB": "3", "BUILDKITE_PARALLEL_JOB_COUNT": "4"}, "4/4"),
        ({"RANK": "5", "WORLD_SIZE": "8"}, "6/8"),
        ({"CI_NODE_INDEX": "2", "CI_NODE_TOTAL": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "2/4"),
        ({**srun(2, 4), "RANK": "2", "WORLD_SIZE": "4"}, "3/4"),
    ],
)
def test_auto_reads_what_launchers_set(environment, wanted):
    found = shard_of("auto", environment)
    assert str(found) == wanted
    assert all(name in environment for name in found.source.split(" and "))


def test_every_task_of_a_job_has_a_part_of_its_own():
    tasks = [{**array(job, high=3), **srun(task, 4)} for job in range(4) for task in range(4)]
    assert sorted(shard_of("auto", one)[:2] for one in tasks) == [(number, 16) for number in range(1, 17)]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "finds no variables of Slurm, GitLab, .*; say which part this is, such as --attn-shard=3/8"),
        ({"GITHUB_ACTIONS": "true"}, "GitHub Actions sets none: give it from the job's matrix; say which part"),
        ({"CI_NODE_TOTAL": "1"}, "finds no variables"),
        (
            {"JOB_COMPLETION_INDEX": "3"},
            "finds JOB_COMPLETION_INDEX of Kubernetes, and no JOB_COMPLETIONS; set it to the Job's",
        ),
        ({"CI_NODE_INDEX": "3"}, "finds CI_NODE_INDEX of GitLab, and no CI_NODE_TOTAL; say which part"),
        (
            {"CI_NODE_INDEX": "0", "CI_NODE_TOTAL": "4"},
            "finds part 0 of 4 in CI_NODE_INDEX and CI_NODE_TOTAL, which there is not",
        ),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "finds part 9 of 8 in RANK and WORLD_SIZE, which there is not"),
        ({"RANK": "first", "WORLD_SIZE": "8"}, "needs a whole number in RANK, which is 'first'"),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, "needs a whole number in RANK, which is '-1'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "finds 8 tasks of Slurm, but srun did not start this process; type srun"),
        (array(3, low=1, high=7, count=3), "finds a job array of 3 tasks between 1 and 7, with gaps; say which part"),
        (array(3, low=3, high=3), "finds a job array that begins with task 3, and not with 0 or 1; say which part"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "needs a whole number in SLURM_ARRAY_TASK_COUNT, which is ''"),
        (
            {**srun(1, 2), "RANK": "3", "WORLD_SIZE": "4"},
            "finds 2/2 from SLURM_PROCID .* and 4/4 from RANK and WORLD_SIZE; say",
        ),
    ],
)
def test_auto_refuses_what_launchers_leave_open(environment, text):
    with pytest.raises(ValueError, match=text):
        shard_of("auto", environment)


@pytest.mark.parametrize("text", ["1/1", "3/8", "8/8", "08/8"])
def test_a_part_in_numbers(text):
    found = shard_of(shard(text), {"RANK": "0", "WORLD_SIZE": "2"})
    assert found == Shard(int(text.split("/")[0]), int(text.split("/")[1]), "")


@pytest.mark.parametrize("text", ["", "3", "3/", "/8", "3/8/2", "a/b", "3-8", "-1/8", "1.5/8", "automatic", "3 of 8"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(ValueError, match="must be I/N, such as 3/8 for the third of eight parts, or auto, got"):
        shard(text)


@pytest.mark.parametrize("text", ["0/8", "9/8", "1/0", "0/0"])
def test_a_part_that_there_is_not_is_refused(text):
    number, parts = text.split("/")
    with pytest.raises(ValueError, match=f"there is no part {number} of {parts}; parts are counted from 1"):
        shard(text)
