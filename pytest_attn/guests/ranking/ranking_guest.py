"""The guest ranking: `--attn-rank`, `--attn-rank-to`, `--attn-tune`, and the command `rank`."""

import os
from typing import TYPE_CHECKING

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import action, switch, writable

if TYPE_CHECKING:
    from pytest_attn.session.options import Settings

_HERE = "pytest_attn.guests.ranking"


def _one_backend(text: str) -> str:
    if not text.strip() or "," in text:
        raise ValueError(f"must be the name of one backend, got {text!r}")
    return text


def _stem_of_files(text: str) -> str:
    """Return the path of files without their suffix, links followed."""
    path = os.path.realpath(os.path.expanduser(text))
    is_stem = os.path.basename(text) and not os.path.isdir(path) and not path.endswith((".json", ".py"))
    if not is_stem or not os.path.isdir(os.path.dirname(path)):
        raise ValueError(f"must be a name without suffix in a folder that exists, got {text!r}")
    return writable(path, os.path.dirname(path))


_OPTIONS = {
    "tune": action(
        "Check and time each configuration of one backend, in tests that use attn_backend, and rank these",
        "BACKEND",
        _one_backend,
        in_child=True,
        group="run",
        short="check and time each configuration of one backend",
    ),
    "rank": switch(
        "Print for each workload the fastest backend that is right, and those tied with it",
        in_child=False,
        group="latency",
        short="the fastest backend that is right, and its ties",
    ),
    "rank_to": action(
        "Same as --attn-rank, and write STEM.json, and STEM.py with tables {workload: backend} that a model can load",
        "STEM",
        _stem_of_files,
        group="outputs",
        short="--attn-rank, written to STEM.json and STEM.py",
    ),
}


def contradiction(settings: "Settings") -> str:
    """Say which option does not go with a ranking; "" where all do."""
    given = {"--attn-tune": "tune", "--attn-rank-to": "rank_to", "--attn-rank": "rank"}
    flag = next((flag for flag, name in given.items() if settings.more[name]), "")
    if flag and settings.latency == "off":
        return f"{flag}: needs times; leave out --attn-latency=off, or say --attn-latency=auto"
    if settings.more["tune"] and settings.latency == "require":
        return "--attn-tune: configurations have no baselines; say --attn-latency=auto"
    return ""


GUEST = Guest(
    options=_OPTIONS,
    contradiction=f"{_HERE}.ranking_guest:contradiction",
    kernels={"tune": f"{_HERE}.ranking_run:Configurations"},
    closing=dict.fromkeys(("rank", "rank_to", "tune"), f"{_HERE}.ranking_run:report_ranking"),
    commands=(f"{_HERE}.ranking_run:add_rank",),
)
