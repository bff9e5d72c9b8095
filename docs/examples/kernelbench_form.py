"""KernelBench's form, a problem with `Model` and a solution with `ModelNew`, judged by `pytest_attn.judge`.

    python kernelbench_form.py PROBLEM.py SOLUTION.py [cuda]

For problems whose `forward(Q, K, V)` is plain attention, as 97_ScaledDotProductAttention of level 1: `Model` is judged first,
and must be right. The problem runs in this process, the solution only in one of its own.
"""

import json
import runpy
import sys
from pathlib import Path

import torch

import pytest_attn
from pytest_attn import Workload

GLUE = """

_MODELS = []


def attention(q, k, v):
    if not _MODELS:
        _MODELS.append(ModelNew(*{init!r}).to(q.device))
    return _MODELS[0](q, k, v)
"""


def workload_of(problem):
    """Return the workload of the tensors that a problem's `get_inputs` makes, which take no memory here."""
    with torch.device("meta"):
        q, k, v = problem["get_inputs"]()
    batch, heads, rows, dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    return Workload(
        rows, k.shape[2], batch=batch, heads=heads, kv_heads=k.shape[1], head_dim=dim, v_head_dim=v.shape[3], dtype=dtype
    )


def judge(problem, solution, **options):
    """Return the judgment of a solution's text. problem: the names of its file. Raises ValueError for other problems."""
    init, workload = problem["get_init_inputs"](), workload_of(problem)
    model = problem["Model"](*init)
    if not (own := pytest_attn.judge(model, workload, isolated=False, device=options.get("device", "auto"))).right:
        raise ValueError(f"the problem's Model is not attention of {workload.id}: {own.as_dict()['workloads'][0]['text']}")
    return pytest_attn.judge(f"{solution}{GLUE.format(init=init)}", workload, **options)


if __name__ == "__main__":
    device = sys.argv[3] if len(sys.argv) > 3 else "auto"
    found = judge(runpy.run_path(sys.argv[1]), Path(sys.argv[2]).read_text(), measure=True, device=device)
    print(json.dumps(found.as_dict("cause")))
    sys.exit(found.exit_code)
