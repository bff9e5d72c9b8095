"""How far a p50 can be trusted: many new processes time the same kernels, beside triton's do_bench and CUPTI.

    python benchmarks/noise.py --out FILE.json [--processes 30] [--device cuda|cpu] [--disturb process|heat]
    python benchmarks/noise.py --out FILE.json --cpus 2 --minutes 60

Each process measures every case with pytest_attn's protocol, the same case with extra work put behind each call (slowdowns
of 3 and 5 %; on a CPU 25 %), and, on a GPU, behind all of these, with do_bench; every fifth process then asks CUPTI of the
very launches that the protocol times.
Adjusted: for the anchors, by the sensitivities that the gate would fit to all of the other processes.
--disturb runs another process that computes on the same device, or heats the GPU for seconds before each measurement, and
takes the plain cases only. --cpus has so many cores to itself, and measures the plain cases there in one condition after the
other until the minutes are over: quiet, beside one to eight processes that multiply, copy, attend or compile, or do each in
bursts. FILE.json keeps every p50, anchor and sample; benchmarks/peers.py resamples it. Runs are
appended, so that several calls make one series, each in the conditions that follow the last one's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pytest_attn import Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.kernel_work import work_of
from pytest_attn.latency.protocol import Stopwatch, protocol_of, threads
from pytest_attn.latency.statistics import Run, expected_sensitivity, fit
from pytest_attn.latency.timer import Timer
from pytest_attn.latency.work import Work

FLUX = Workload(4608, heads=24, head_dim=128, name="flux-L512")
LLAMA = Workload(2048, heads=32, kv_heads=8, head_dim=128, mask="causal", name="llama3-8b-prefill")
GPU_CASES = (
    (FLUX, "sdpa_cudnn", "forward"),
    (FLUX, "sdpa_flash", "forward"),
    (FLUX, "sdpa_cudnn", "backward"),
    (LLAMA, "sdpa_cudnn", "forward"),
    (LLAMA, "sdpa_flash", "forward"),
    (Workload(1024, heads=24, head_dim=128, name="s1024"), "sdpa_cudnn", "forward"),
    (Workload(512, heads=24, head_dim=128, name="s512"), "sdpa_flash", "forward"),
    (Workload(128, heads=24, head_dim=128, name="s128"), "sdpa_cudnn", "forward"),
    (Workload(128, heads=24, head_dim=128, name="s128"), "sdpa_flash", "forward"),
    (Workload(196, batch=8, heads=12, name="vit-196"), "sdpa_cudnn", "forward"),
    (Workload(196, batch=8, heads=12, name="vit-196"), "sdpa_flash", "backward"),
    (Workload(257, heads=2, name="s257"), "sdpa_flash", "backward"),
)
CPU_CASES = (
    (Workload(256, heads=4, name="s256"), "sdpa", "forward"),
    (Workload(256, heads=4, name="s256"), "sdpa", "backward"),
    (Workload(128, heads=2, dtype="float32", name="s128-fp32"), "sdpa", "forward"),
    (Workload(512, heads=4, dtype="float32", name="s512-fp32"), "sdpa", "forward"),
    (Workload(128, heads=2, name="s128-eager"), "eager", "forward"),
    (Workload(1024, heads=4, dtype="float32", name="s1024-eager"), "eager", "forward"),
)
#: kinds and numbers of other processes, "" for none
CONDITIONS = (
    *(
        "",
        "copies 1",
        "attention 1",
        "",
        "bursts 2",
        "products 1",
        "",
        "compiling 1",
        "copies 2",
        "",
        "bursts 1",
        "products 2",
    ),
    *("", "attention 2", "bursts 4", "", "compiling 2", "copies 4", "", "bursts 8"),
)
_IN_ONE_CONDITION = 17
SLOWDOWNS = {"cuda": (0.03, 0.05), "cpu": (0.25,)}
_HEAT_SECONDS = 1.5
#: seconds of a call from which an extra few percent can be put behind it; no case comes near
_SLOWED_FROM = 60e-6
#: for which the device waits while a sample is launched beside the profiler: about 3 ms
_BEFORE_CYCLES = 6_000_000
_MOST_FAILURES, _CHILD_SECONDS = 3, 300


def slowed(work: Work, seconds: float) -> None:
    """Put extra work of `seconds` behind each call of a work's kernel."""
    kernel = work.kernel

    def on_gpu(*tensors: torch.Tensor) -> Any:
        out = kernel(*tensors)
        torch.cuda._sleep(int(seconds * 1.98e9))
        return out

    def on_cpu(*tensors: torch.Tensor) -> Any:
        out = kernel(*tensors)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return out

    work.kernel = on_gpu if work.device.type == "cuda" else on_cpu


def one_process(device: torch.device, number: int, disturbed: str, is_plain: bool) -> dict[str, Any]:
    """Measure every case once."""
    registry, stopwatch = Registry(), Stopwatch(device)
    cases = {f"{case[0].name} {case[1]} {case[2]}": case for case in (GPU_CASES if device.type == "cuda" else CPU_CASES)}
    order = random.Random(number).sample(list(cases), len(cases))  # as the gate's processes: in another one each time
    found: dict[str, Any] = dict.fromkeys(cases)
    for key in order:
        workload, backend, direction = cases[key]
        measure = functools.partial(measured, stopwatch, registry[backend], workload, direction)
        if disturbed == "heat":
            heat(device)
        plain = measure()
        found[key] = {"plain": plain, "flops": workload.flops(), "bytes": workload.bytes()}
        if disturbed or is_plain or direction != "forward" or (device.type == "cuda" and plain["p50"] < _SLOWED_FROM):
            continue
        for share in SLOWDOWNS[device.type]:
            found[key][f"slower {share}"] = measure(share * plain["p50"])
    if device.type == "cuda" and not disturbed:
        tools = OTHERS if number % 5 == 0 else {} if is_plain else {"do_bench": with_do_bench}
        for name, tool in tools.items():  # behind all of ours: with CUPTI in a process, every launch takes longer
            for key in order:
                workload, backend, direction = cases[key]
                found[key][name] = tool(work_of(registry[backend], CheckSpec(workload, device), direction), stopwatch.timer)
    return {"process": number, "cases": found}


def measured(stopwatch: Stopwatch, backend: Any, workload: Workload, direction: Any, extra: float = 0.0) -> dict[str, Any]:
    """Measure one case, with extra seconds of work behind each call."""
    work = work_of(backend, CheckSpec(workload, stopwatch.device), direction)
    if extra:
        slowed(work, extra)
    latency = stopwatch.measure(work, workload.id, backend.name)
    kept = {name: getattr(latency, name) for name in ("p50", "mode", "calls", "spent", "disturbances", "notes")}
    return {
        **kept,
        "host": latency.launch,
        "anchors": dict(latency.anchors),
        "samples": latency.samples,
        "interval": latency.interval.half_width / latency.p50,
    }


def with_do_bench(work: Work, timer: Timer) -> float:
    """Return what triton's do_bench, as it comes (25 and 100 ms), says of one call, the median in seconds."""
    from triton.testing import do_bench

    del timer
    with work.context():
        return float(do_bench(one_call(work), return_mode="median")) * 1e-3


def one_call(work: Work) -> Callable[[], object]:
    """Return a call as the tools of others take it, which may be made again and again."""
    if work.direction == "forward":
        return functools.partial(work.kernel, *work.sets[0])
    out = work.kernel(*work.sets[0])
    out = out[0] if isinstance(out, tuple) else out
    return functools.partial(torch.autograd.grad, out, work.sets[0], work.dout, retain_graph=True)


def with_cupti(work: Work, timer: Timer) -> float:
    """Return the seconds of a call by CUPTI in the very launches that the timer would time, the median of twelve samples.

    From the start of a sample's first kernel to the end of its last, per call; launched while the device is kept waiting. NaN
    for a kernel that the host's clock times, or that was never launched in time.
    """
    from torch.profiler import ProfilerActivity, profile

    timer.peak_memory(work)
    plan = timer.plan(work)
    if plan.mode == "host":
        return math.nan
    held: list[bool] = []
    time.sleep(0.1)  # what follows at once meets the power limiter
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=work.device)
    with work.context(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(12):
            sample = plan.stage()
            flush.zero_()
            begun = time.perf_counter()
            torch.cuda._sleep(_BEFORE_CYCLES)
            awake = torch.cuda.Event()
            awake.record()
            sample()
            torch.cuda._sleep(1)  # so that the next flush is told from what is timed
            held.append(not awake.query())
            torch.cuda.synchronize()
            time.sleep(3 * (time.perf_counter() - begun))
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(("aten", "cuda"))
    )
    sleeps = [number for number, (_, _, name) in enumerate(events) if "spin_kernel" in name]
    samples = [events[before + 1 : behind] for before, behind in zip(sleeps[::2], sleeps[1::2], strict=True)]
    spans = [
        max(end for _, end, _ in kernels) - kernels[0][0] for kernels, in_time in zip(samples, held, strict=True) if in_time
    ]
    return statistics.median(spans) * 1e-6 / plan.calls if spans else math.nan


OTHERS = {"do_bench": with_do_bench, "cupti": with_cupti}


def heat(device: torch.device) -> None:
    """Keep the tensor cores busy until the power limiter has acted."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    end = time.perf_counter() + _HEAT_SECONDS
    while time.perf_counter() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def compete(device: torch.device, kind: str) -> None:
    """Do one kind of work on the device, or each in bursts, until the parent ends this process."""
    a = torch.randn(2048 if device.type == "cuda" else 1024, 2048, device=device)
    source, q = torch.zeros(1 << 26, dtype=torch.uint8, device=device), torch.randn(1, 4, 512, 64, device=device)
    target, text = torch.empty_like(source), Path(random.__file__).read_text(encoding="utf-8")
    works: dict[str, Callable[[], object]] = {
        "products": lambda: a @ a.T,
        "copies": lambda: target.copy_(source),
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
        "compiling": lambda: compile(text, "random.py", "exec"),
    }
    while True:
        work = works.get(kind) or random.choice(list(works.values()))
        end = time.monotonic() + random.expovariate(1.5)
        while time.monotonic() < end:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
        if kind == "bursts":
            time.sleep(random.expovariate(1.5))


@contextmanager
def beside(condition: str, command: list[str]) -> Iterator[None]:
    """Have other processes compute meanwhile. condition: of which kind, and how many; "" for none."""
    kind, _, number = condition.partition(" ")
    others = [subprocess.Popen([*command, "--compete", kind]) for _ in range(int(number or 0))]
    try:
        time.sleep(8 if others else 0)
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def new_processes(command: list[str], number: int) -> Iterator[dict[str, Any]]:
    """Yield what new processes have measured, one after the other. number: of the first."""
    failures = 0
    while failures < _MOST_FAILURES:
        child = [*command, "--child", str(number)]
        number += 1
        try:
            done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True, timeout=_CHILD_SECONDS)
            yield json.loads(done.stdout.splitlines()[-1])
        except subprocess.SubprocessError as error:
            failures += 1
            print(f"process {number}: {error}", file=sys.stderr)


def main() -> None:
    """Start the processes one after the other, and print what they agree on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--disturb", choices=("process", "heat"), default="")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no process after so long")
    parser.add_argument("--cpus", type=int, help="measure on so many cores, in one condition after the other")
    parser.add_argument("--plain", action="store_true", help="no slowdowns, and others in every fifth process only")
    parser.add_argument("--child", type=int)
    parser.add_argument("--compete", default="")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])  # which all processes inherit
        options.device, options.plain = "cpu", True
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    if options.compete:
        with threads(1):
            compete(device, options.compete)
    if options.child is not None:
        with threads(options.threads if device.type == "cpu" else None):
            print(json.dumps(one_process(device, options.child, options.disturb, options.plain)))
        return
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    kind = {"device": name, "disturb": options.disturb, "protocol": protocol_of(device.type)}
    series = json.loads(options.out.read_text()) if options.out.exists() else {"runs": [], **kind}
    for what, mine in kind.items():
        if series.get(what) != mine:
            sys.exit(f"{options.out} is of {what} {series.get(what)}, this is {mine}: name another file")
    series["torch"] = torch.__version__
    command = [sys.executable, __file__, "--out", os.devnull, "--device", options.device, "--threads", str(options.threads)]
    plain = ["--disturb", options.disturb] if options.disturb else ["--plain"] if options.plain else []
    conditions = CONDITIONS if options.cpus else ("",)
    end = time.monotonic() + 60 * options.minutes
    visit = 1 + max((run["visit"] for run in series["runs"]), default=-1)
    for number in range(visit, visit + len(conditions) if math.isinf(options.minutes) else sys.maxsize):
        condition = conditions[number % len(conditions)] or ("products 1" if options.disturb == "process" else "")
        with beside(condition, command):
            processes = _IN_ONE_CONDITION if options.cpus else options.processes
            for run in itertools.islice(new_processes([*command, *plain], len(series["runs"])), processes):
                series["runs"].append({**run, "condition": condition or "quiet", "visit": number})
                part = options.out.with_suffix(".part")
                part.write_text(json.dumps(series))
                part.replace(options.out)
                if time.monotonic() > end:
                    break
        if time.monotonic() > end or not options.cpus:
            break
    if not series["runs"]:
        sys.exit("no process has timed anything")
    report(series)


def report(series: dict[str, Any]) -> None:
    """Print the run-to-run spread of each case, whoever timed it."""
    runs = series["runs"]
    print(f"{series['device']}, torch {series['torch']}, {len(runs)} new processes; spread: CV of the p50 over processes")
    columns = ("do_bench",)
    print(
        f"{'case':38} {'p50 us':>9} {'mode':>8} {'spread':>7} {'adjusted':>8} {'CUPTI us':>9}", *(f"{c:>24}" for c in columns)
    )
    left_out = 0
    for key in runs[0]["cases"]:
        cases = [run["cases"][key] for run in runs if series["disturb"] or not run["cases"][key]["plain"]["disturbances"]]
        left_out += len(runs) - len(cases)
        if not cases:
            print(f"{key:38} {'-':>9}")
            continue
        p50 = [case["plain"]["p50"] for case in cases]
        timed = [Run(case["plain"]["p50"], case["plain"]["anchors"]) for case in cases]
        prior = expected_sensitivity(cases[0]["flops"], cases[0]["bytes"], statistics.median(p50))
        modes = "/".join(sorted({case["plain"]["mode"] for case in cases}))
        seen = [case["cupti"] for case in cases if "cupti" in case]
        cells = [time_and_spread([case[c] for case in cases if c in case]) for c in columns]
        print(
            f"{key:38} {statistics.median(p50) * 1e6:9.2f} {modes:>8} {spread(p50):7.2%}"
            f" {spread(adjusted(timed, prior)):8.2%} {statistics.median(seen) * 1e6 if seen else math.nan:9.2f}",
            *(f"{cell:>24}" for cell in cells),
        )
    spent = [case["plain"]["spent"] for run in runs for case in run["cases"].values()]
    print(f"seconds per measurement: median {statistics.median(spent):.2f}, most {max(spent):.2f}")
    if left_out:
        print(f"{left_out} of {len(spent)} measurements were disturbed, and are left out above")


def adjusted(runs: list[Run], prior: dict[str, float]) -> list[float]:
    """Return each p50 adjusted for the anchors, by the sensitivities that the gate would fit to the other runs."""
    centers = fit(runs, prior).anchor_centers
    found = []
    for number, run in enumerate(runs):
        if others := runs[:number] + runs[number + 1 :]:
            found.append(math.exp(replace(fit(others, prior), anchor_centers=centers).adjusted(run)))
    return found


def time_and_spread(found: list[float]) -> str:
    return f"{statistics.median(found) * 1e6:.2f} us {spread(found):8.2%}" if found else "-"


def spread(found: list[float]) -> float:
    return statistics.stdev(found) / statistics.mean(found) if len(found) > 1 else math.nan


if __name__ == "__main__":
    main()
