"""How options are shown: five groups, a short text for `pytest --help`, and those that an ini file sets first.

The long text of an option stands where it is declared (session/settings.py) and on docs/reference/options.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptionGroup:
    """A group of options by the names of their fields in `Settings`.

    shown: the short text of each that `pytest --help` lists. rarely: those that it leaves to ini files and the reference page.
    """

    name: str
    title: str
    shown: Mapping[str, str]
    rarely: tuple[str, ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, those that are shown first."""
        return (*self.shown, *self.rarely)


GROUPS = (
    OptionGroup(
        "run",
        "what to run",
        {
            "backends": "all, available, NAME,NAME, -NAME; NAME+compile",
            "workloads": "names, groups or globs of the catalog; -NAME",
            "list_only": "list backends, workloads and cases; run nothing",
            "fuzz": "also run each test on N drawn workloads",
            "mutants": "run faulty kernels: which do the tests find?",
            "tune": "check and time each configuration of one backend",
        },
    ),
    OptionGroup(
        "on",
        "on what",
        {
            "device": "auto, cpu, cuda, cuda:N, xpu or mps",
            "dtypes": "such as bf16,fp16,fp32",
            "seed": "of the inputs",
            "gpu_per_worker": "one GPU for each xdist worker",
        },
        ("memory",),
    ),
    OptionGroup(
        "judge",
        "what to judge",
        {
            "timeout": "stop a callable that takes longer",
            "thorough": "all invariants, with more repetitions",
            "profile": "which kernels each right case launches",
        },
        ("limits", "unjudged", "rank_timeout", "diagnosis_timeout"),
    ),
    OptionGroup(
        "latency",
        "latency",
        {
            "latency": "off, auto or require (a missing baseline fails)",
            "update_baselines": "record, in ten new processes, and why",
            "rank": "the fastest backend that is right, and its ties",
            "max_slowdown": "below this no slowdown fails",
        },
        ("baselines", "threads", "l2", "fresh", "lock_clocks", "cupti"),
    ),
    OptionGroup(
        "outputs",
        "outputs",
        {
            "outputs": "NAME.jsonl, .html, .md or .support.md; repeatable",
            "save_failures": "tensors and a script for each failing case",
            "rank_to": "--attn-rank, written to STEM.json and STEM.py",
        },
        ("json", "report", "summary", "support", "json_samples"),
    ),
)
