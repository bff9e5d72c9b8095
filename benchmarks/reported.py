"""How many faulty kernels of tests/reported_faults are found by the default groups: by check, or by check_invariants.

    python benchmarks/reported.py [--groups smoke,edges,features] [--faults NAME,...] [--twins] [--out FILE.json]

Every fault runs on the workloads of the groups that have the options of its report, forward and backward, on the inputs of
the bundled suite, until it is found; its kernel lives through them all, as a library does. Then its twin, the same kernel
without the fault, runs through everything: whatever fails there is a false alarm. --twins: these alone. CPU, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from pytest_attn.workloads.catalog import builtin_catalog

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from reported_faults.judging import (
    CHECK,
    INVARIANTS,
    MISSED,
    UNREACHED,
    Case,
    Found,
    cases_of,
    check,
    check_invariants,
    fails,
    find,
    where,
)
from reported_faults.table import FAULTS, Fault


def main() -> None:
    """Print a line for each fault, the share that is found, and the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="smoke,edges,features")
    parser.add_argument("--faults", default="")
    parser.add_argument("--twins", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workloads = [w for group in options.groups.split(",") for w in builtin_catalog().select(group)]
    chosen = [fault for fault in FAULTS if not options.faults or fault.name in options.faults.split(",")]
    began, rows = time.monotonic(), []
    for fault in () if options.twins else chosen:
        rows.append(find(fault, list(cases_of(fault, workloads))))
        print(
            f"{time.monotonic() - began:6.0f} s {fault.name:48} {rows[-1].by:12} {rows[-1].cases:4}  {rows[-1].where}",
            flush=True,
        )
    if rows:
        report(rows)
    if options.out:
        options.out.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    alarms = false_alarms(chosen, [Case(w, backward) for w in workloads for backward in (False, True)])
    print(f"{alarms} false alarms")


def report(rows: list[Found]) -> None:
    count = Counter(row.by for row in rows)
    found = count[CHECK] + count[INVARIANTS]
    print(f"\n{found} of {len(rows)} found, {found / len(rows):.1%}:", ", ".join(f"{n} {by}" for by, n in count.items()))
    for row in rows:
        if row.by in (MISSED, UNREACHED):
            print(f"{row.by}: {row.name} ({row.report})")


def false_alarms(faults: list[Fault], cases: list[Case]) -> int:
    """Run every twin, forward and backward, through both judges; print and count what fails."""
    alarms = judged = 0
    parameters = tuple({name for fault in faults for name in fault.parameters})
    for twin in dict.fromkeys(fault.twin for fault in faults):
        for case in cases:
            if case.backward and case.workload.has_no_gradient_because:
                continue
            for ask in (check, check_invariants):
                judged += 1
                asked = case._replace(parameters=parameters) if case.backward and ask is check else case
                if said := fails(ask, twin(), asked):
                    alarms += 1
                    print(f"FALSE ALARM: {twin.__name__} on {where(case)}: {said}", flush=True)
    print(f"{judged} judgments of kernels without a fault")
    return alarms


if __name__ == "__main__":
    main()
