"""--attn-shard=auto: which part of how many this process is, as Slurm, Kubernetes, a CI service or torchrun tell it.

What they leave open is refused in words: a wrong guess would run some tests twice, and others not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

EXPLICIT = "say which part this is, such as --attn-shard=3/8"


class Shard(NamedTuple):
    """One of several parts. number: from 1 on. source: which variables say so, "" where the command line does."""

    number: int
    parts: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"


class _Launcher(NamedTuple):
    """Two variables of a launcher; first: how it numbers the first part. remedy: what to do where there is no total."""

    name: str
    variable: str
    total: str
    first: int
    remedy: str = ""


_LAUNCHERS = (
    _Launcher("GitLab", "CI_NODE_INDEX", "CI_NODE_TOTAL", 1),
    _Launcher("CircleCI", "CIRCLE_NODE_INDEX", "CIRCLE_NODE_TOTAL", 0),
    _Launcher("Buildkite", "BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT", 0),
    _Launcher(
        "Kubernetes",
        "JOB_COMPLETION_INDEX",
        "JOB_COMPLETIONS",
        0,
        "set it to the Job's `completions` in the container's `env`",
    ),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", 0),
)


def shard_of(text: str, environment: Mapping[str, str]) -> Shard:
    """Return the part that --attn-shard names, once it is read. Raises ValueError where `auto` finds none, or two answers."""
    if text != "auto":
        number, _, parts = text.partition("/")
        return Shard(int(number), int(parts))
    found = [*_slurm(environment), *_others(environment)]
    divided = {(one.number, one.parts): one for one in found if one.parts > 1}
    if len(divided) > 1:
        said = " and ".join(f"{one} from {one.source}" for one in divided.values())
        raise ValueError(f"auto finds {said}; {EXPLICIT}")
    if not found:
        known = ", ".join(("Slurm", *(launcher.name for launcher in _LAUNCHERS)))
        of_github = "GitHub Actions sets none: give it from the job's matrix; " if "GITHUB_ACTIONS" in environment else ""
        raise ValueError(f"auto finds no variables of {known}; {of_github}{EXPLICIT}")
    return next(iter(divided.values()), found[0])


def _others(environment: Mapping[str, str]) -> Iterator[Shard]:
    for launcher in _LAUNCHERS:
        if launcher.variable not in environment:
            continue
        if launcher.total not in environment:
            remedy = launcher.remedy or EXPLICIT
            raise ValueError(f"auto finds {launcher.variable} of {launcher.name}, and no {launcher.total}; {remedy}")
        index, total = _number(environment, launcher.variable), _number(environment, launcher.total)
        yield _shard(index - launcher.first, total, f"{launcher.variable} and {launcher.total}")


def _slurm(environment: Mapping[str, str]) -> Iterator[Shard]:
    """Yield the part that a job array, the tasks of srun, or both together make of a process."""
    index, total, sources = 0, 1, []
    if "SLURM_ARRAY_TASK_ID" in environment:
        index, total = _of_array(environment)
        sources.append("SLURM_ARRAY_TASK_ID")
    is_step = "SLURM_STEP_ID" in environment
    name = "SLURM_STEP_NUM_TASKS" if is_step and "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    if "SLURM_PROCID" in environment and name in environment:
        task, tasks = _number(environment, "SLURM_PROCID"), _number(environment, name)
        if tasks > 1 and task == 0 and not is_step:  # a batch script is task 0 as well, and nobody runs the others
            raise ValueError(f"auto finds {tasks} tasks of Slurm, but srun did not start this process; type srun pytest ...")
        index, total = index * tasks + task, total * tasks
        sources += ["SLURM_PROCID", name]
    if sources:
        yield _shard(index, total, " and ".join(sources))


def _of_array(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the place, from 0, of a task in its job array, and how many tasks that has."""
    identity, total, low, high = (_number(environment, f"SLURM_ARRAY_TASK_{one}") for one in ("ID", "COUNT", "MIN", "MAX"))
    step = _number(environment, "SLURM_ARRAY_TASK_STEP") if "SLURM_ARRAY_TASK_STEP" in environment else 1
    if low > 1:  # as where some parts run again
        raise ValueError(f"auto finds a job array that begins with task {low}, and not with 0 or 1; {EXPLICIT}")
    if step < 1 or (high - low) % step or (high - low) // step + 1 != total or (identity - low) % step:
        raise ValueError(f"auto finds a job array of {total} tasks between {low} and {high}, with gaps; {EXPLICIT}")
    return (identity - low) // step, total


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"auto needs a whole number in {name}, which is {text!r}; {EXPLICIT}")
    return int(text)


def _shard(index: int, total: int, source: str) -> Shard:
    if not 0 <= index < total:
        raise ValueError(f"auto finds part {index + 1} of {total} in {source}, which there is not; {EXPLICIT}")
    return Shard(index + 1, total, source)
