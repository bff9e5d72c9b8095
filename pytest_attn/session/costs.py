"""How long a test will take: as in an earlier run where a file says so, or else an estimate from its workload.

Every host must come to the same number, so nothing here asks the machine, its caches or its clock, and every number is whole.
The estimates only make parts alike: a poor one makes a part take longer, and loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from pytest_attn.reports.durations import SECONDS, digest_of_text
from pytest_attn.session.items import (
    CaseParameter,
    FuzzParameter,
    ModelParameter,
    RankedParameter,
    parameter_of,
    test_of,
    workload_group,
)
from pytest_attn.session.splitting import Cost
from pytest_attn.workloads.workload import Workload

#: microseconds of a case beside its workload, of any other test, of a drawn workload, and of a model
_CASE, _OTHER, _DRAW, _MODEL = 30_000, 50_000, 100_000, 2_000_000
#: between what exact attention takes on a few CPU cores and on a GPU
_FLOPS_PER_MICROSECOND = 300_000
#: longer workloads are compared in about so many rows
_ROWS = 2048
#: a kernel takes less than exact attention does, which the backends of one workload share
_KERNELS_PER_REFERENCE = 8
#: microseconds that a variant, or a backend whose name begins so, needs to compile
_COMPILED = {"compile": 20_000_000, "max_autotune": 120_000_000, "graph": 500_000}
_ALWAYS_COMPILED = ("flex", 10_000_000)


def costs_of(items: Mapping[str, pytest.Item], known: Mapping[str, int], draws: int) -> dict[str, Cost]:
    """Return what each test costs, by its id.

    known: microseconds of tests in an earlier run; the estimates of the others are brought to the same scale. draws: of
    --attn-fuzz.
    """
    estimated = {name: _estimate(item, draws) for name, item in items.items()}
    both = [name for name in estimated if name in known]
    taken = sum(known[name] for name in both)
    expected = sum(estimated[name].own + estimated[name].shared for name in both)
    if not taken or not expected:
        return estimated
    found = {}
    for name, cost in estimated.items():
        if name in known:
            found[name] = cost._replace(own=known[name], shared=0)
        else:
            found[name] = cost._replace(own=cost.own * taken // expected, shared=cost.shared * taken // expected)
    return found


def _estimate(item: pytest.Item, draws: int) -> Cost:
    parameter, marker = parameter_of(item), item.get_closest_marker("xdist_group")
    named = str(marker.args[0] if marker.args else marker.kwargs.get("name", "default")) if marker else ""
    if parameter is None or isinstance(parameter, ModelParameter):
        cost = Cost(item.nodeid, _OTHER if parameter is None else _MODEL)
    elif isinstance(parameter, FuzzParameter):
        cost = Cost(item.nodeid, draws * _DRAW)
    else:
        cost = _of_case(item, parameter)
    if named and (parameter is None or named != workload_group(item, parameter)):
        return cost._replace(group=f"xdist_group {named}", is_bound=True)
    return cost


def _of_case(item: pytest.Item, parameter: CaseParameter) -> Cost:
    marker = item.get_closest_marker("attention")
    work = _microseconds(parameter.workload, bool(marker and marker.kwargs.get("backward")))
    ranks = parameter.ranks if isinstance(parameter, RankedParameter) else 1
    own = ranks * (_CASE + work // _KERNELS_PER_REFERENCE) + _compiling(parameter.backend or "")
    return Cost(f"{test_of(item)} {parameter.workload.id}", own, work)


@lru_cache(maxsize=4096)  # every backend asks for the same workload
def _microseconds(workload: Workload, backward: bool) -> int:
    """Return what exact attention takes of a workload, about."""
    flops = 4 * workload.batch * workload.heads * workload.q_len * workload.kv_len * workload.head_dim
    with contextlib.suppress(Exception):  # of a user's mask, which fails when the case runs, and is reported then
        flops = workload.flops("forward") + (workload.flops("backward") if backward else 0)
    return int(flops) * min(_ROWS, workload.q_len) // workload.q_len // _FLOPS_PER_MICROSECOND


def _compiling(backend: str) -> int:
    name, *variants = backend.split("+")
    always = _ALWAYS_COMPILED[1] if name.startswith(_ALWAYS_COMPILED[0]) else 0
    return max([always, *(_COMPILED.get(variant, 0) for variant in variants)])


def known_durations(path: Path) -> dict[str, int]:
    """Return the microseconds that a file of `python -m pytest_attn durations` has, by the ids of tests.

    Raises ValueError where the file is not one of costs, or not the one that its name promises. Hosts that read different
    files under one name would divide the tests in different ways.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)[SECONDS]
        known = {str(name): round(1_000_000 * seconds) for name, seconds in found.items()}
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; python -m pytest_attn durations writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(f"{path} was not written by python -m pytest_attn durations") from None
    named = re.fullmatch(r".*-([0-9a-f]{12})\.json", path.name)
    if not named or named[1] != digest_of_text(text):
        raise ValueError(
            f"{path.name} should end in -{digest_of_text(text)}.json, as python -m pytest_attn durations wrote it: the name"
            " says what is in it, so that every host divides the tests in the same way"
        )
    return known


def names_of(items: Sequence[pytest.Item], stable: Mapping[pytest.Item, str]) -> dict[str, pytest.Item]:
    """Return one item of each id."""
    return {stable[item]: item for item in reversed(items)}
