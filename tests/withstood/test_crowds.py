"""2,000 checks in one session: memory, file descriptors and threads; and what a kernel leaves changed of its process."""

import json

import attempts
import pytest

from pytest_attn.reports.records import read_records

#: 20 workloads, each 100 times; after a tenth of them and after the last hundred it is noted what the process holds
TEST = """
import json, os
import pytest, torch
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

CHECKS, seen, notes = 2000, [], []

def noted():
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return [resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]

@pytest.fixture(autouse=True)
def counted():
    yield
    seen.append(1)
    own = CHECKS // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if len(seen) % 100 == 0 and len(seen) >= own // 10:
        notes[1:] = [noted()]
        with open(f"notes-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.json", "w") as file:
            json.dump(notes, file)
"""
LENGTHS = range(16, 36)
JUDGED = f"""
@pytest.mark.attention(*[Workload(length, heads=2, head_dim=32) for length in {LENGTHS}], device="cpu")
@pytest.mark.parametrize("number", range(100))
def test_kernel(attn, number): attn.check(sdpa)
"""
CALLED = f"""
@pytest.mark.parametrize("length", {LENGTHS})
@pytest.mark.parametrize("number", range(100))
def test_kernel(length, number): [sdpa(*torch.randn(3, 1, 2, length, 32).bfloat16()) for _ in range(3)]
"""


@pytest.mark.slow("2,000 checks")
@pytest.mark.parametrize("workers", [0, 2])
def test_2000_checks_in_one_session(runs, workers, withstood):
    grown = {}
    for name, body in (("judged", JUDGED), ("called", CALLED)):
        with attempts.own_folder() as folder:
            (folder / "test_it.py").write_text(TEST + body)
            options = ["-q", "-n", str(workers), "--attn-unjudged=ignore", "--attn-output=run.jsonl"]
            status = runs.status(runs.start(folder, *options))
            if name == "judged":
                verdicts = [one["verdict"] for one in read_records(folder / "run.jsonl")]
                assert (status, verdicts) == (0, ["passed"] * 2000), (folder / "output").read_text()[-2000:]
            noted = [json.loads(path.read_text()) for path in folder.glob("notes-*.json")]
            assert len(noted) == max(workers, 1)
            grown[name] = [last[0] - first[0] for first, last in noted]
            assert all(first[1:] == last[1:] for first, last in noted), noted
            assert attempts.left_by_processes(folder, 5) == []
    more = (max(grown["judged"]) - max(grown["called"])) / 2**20
    assert more < 50, grown
    withstood(
        "a crowd",
        f"2,000 checks, -n {workers}",
        "CPU",
        f"as many descriptors and threads, {more:.0f} MB more than called alone",
    )
