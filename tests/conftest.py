import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._inductor.test_operators  # it registers operators, which a pytester run in this process cannot do again
from left_out import LEFT_OUT

os.environ["OMP_NUM_THREADS"] = "1"  # as many for the processes that tests start as for this one: xdist's share the cores
torch.set_num_threads(1)

TESTS = Path(__file__).parent
_LISTED = {(path, test) for files in LEFT_OUT.values() for path, tests in files.items() for test in tests}

#: What pytest and the plugin read of the place they run in: a CI job's summary is longer, xdist's workers are told how wide
#: the terminal is, and a log may be colored. A test that is about one of them sets it itself.
_OF_THE_HOST = (
    *("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"),
    *("COLUMNS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS"),
)


def pytest_collection_modifyitems(config, items):
    """Leave out what tests/left_out.py says, unless ATTN_TESTS=all."""
    if os.environ.get("ATTN_TESTS") == "all":
        return
    left_out = {item for item in items if _is_told_again(item) or item.get_closest_marker("slow") or _is_listed(item)}
    left_out |= _between([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Let no collection of garbage look at torch and thousands of tests again, which took a fifth of the time."""
    gc.freeze()


def _between(items):
    """Return the cases that `one_in` leaves out: of each test all but the first, and every n-th after it."""
    seen, left_out = Counter(), set()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                left_out.add(item)
            seen[test] += 1
    return left_out


def _is_listed(item):
    path = item.path.relative_to(TESTS).as_posix() if TESTS in item.path.parents else ""
    return (path, item.originalname) in _LISTED


def _is_told_again(item):
    callspec = getattr(item, "callspec", None)
    through_xdist = callspec is not None and callspec.params.get("run") == "xdist"
    return through_xdist and item.path.parent.name == "plugin" and not item.get_closest_marker("twice")


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch):
    """Let a test see the same everywhere, and draw the same numbers whatever ran before it."""
    torch.manual_seed(0)
    for name in _OF_THE_HOST:
        monkeypatch.delenv(name, raising=False)
