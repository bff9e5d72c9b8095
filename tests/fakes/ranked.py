"""Records of backends that were checked and timed, and what a rank of them says."""

from pytest_attn.guests.ranking.ranking import rank
from pytest_attn.guests.ranking.ranking_output import rank_summary, to_python
from pytest_attn.reports.records import new_record

H200 = {"name": "NVIDIA H200", "device": "cuda:0", "kind": "cuda", "torch": "2.11.0"}


def case(subject, workload="flux-L512", direction="forward", machine=H200, test="t.py::test_f", shape="b1", **changed):
    known = {"family": "callable"} if changed.pop("is_callable", False) else {"family": "own"}
    facts = {
        "test": f"{test}[{workload}-{subject}]",
        "workload": workload,
        "shape": {"id": shape},
        "subject": subject,
        "tags": known,
        "version": "1.0",
        "machine": machine,
        "direction": direction,
        "backward": direction != "forward",
        "date": "2026-11-21T00:00:00+00:00",
    }
    return new_record(**{**facts, **changed})


def checked(subject, verdict="passed", error=1e-3, names=("out",), is_approximate=False, failed=(), **changed):
    tensors = [{"name": name, "passed": name not in failed, "relative_l2": error} for name in names]
    given = {"verdict": verdict, "tensors": tensors, "is_approximate": is_approximate, "question": "check"}
    return case(subject, latency=None, **{**given, **changed})


def timed(subject, p50, verdict="no baseline", memory=1 << 20, processes=(), date="2026-11-20", off=0.001, **changed):
    baseline = {"baseline": {"p50": list(processes), "date": date}} if processes else {}
    latency = {"p50": p50, "interval": [p50 * (1 - off), p50 * (1 + off), 0.96], "memory": memory, "l2": "cold", **baseline}
    latency |= changed.pop("latency", {})
    return case(subject, question="latency", verdict=verdict, latency=latency, **changed)


def right(subject, p50, **changed):
    of_check = {name: changed.pop(name) for name in ("error", "names", "is_approximate") if name in changed}
    shared = {k: v for k, v in changed.items() if k in ("workload", "direction", "machine", "test", "shape", "is_callable")}
    return [checked(subject, **of_check, **shared), timed(subject, p50, **changed)]


def only(records, tuned=""):
    (line,) = rank(records, tuned).lines
    return line


def names(candidates):
    return [one.name for one in candidates]


def text(records, verbose=False, tuned=""):
    return [words for words, _ in rank_summary(rank(records, tuned), verbose)]


def tables(records, tuned=""):
    found = {}
    exec(compile(to_python(rank(records, tuned)), "dispatch.py", "exec"), found)
    return found


PROCESSES = [1e-3 * (1 + n / 1e5) for n in range(10)]
RECORDED = {"verdict": "passed", "processes": PROCESSES}
TUNED = (
    right("mine", 2e-3) + right("mine@BLOCK=32:warps=4", 1e-3) + right("mine@BLOCK=64:warps=4", 1.5e-3) + right("other", 1e-4)
)
