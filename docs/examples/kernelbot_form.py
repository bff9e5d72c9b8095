"""KernelBot's form, a submission with `custom_kernel(data)`, judged by `pytest_attn.judge`: here of the problem mixed-mla.

    python kernelbot_form.py SUBMISSION.py '{"batchsize": 4, "qseqlen": 1, "kvseqlen": 1024}' [cuda]

The fields are those of a line of its task.yml. Of the caches, a submission is given "bf16" alone; one that reads another is
not judged (exit status 2). The submission runs only in a process of its own.
"""

import json
import sys
from pathlib import Path

import pytest_attn
from pytest_attn import Workload

#: heads, dimensions of q and of v
HEADS, DIM, V_DIM = 16, 576, 512
#: what a submission imports of the problem
BEFORE = """
import sys as _sys, types as _types
_sys.modules["task"] = _types.SimpleNamespace(input_t=object, output_t=object)
"""
AFTER = """
class _Caches(dict):
    def __missing__(self, name):
        raise NotImplementedError(f"the cache {name} is not given")

def attention(q, k, v):
    import torch
    batch, heads, rows, dim = q.shape
    keys, v_dim = k.shape[2], v.shape[3]
    config = {"batch_size": batch, "num_heads": heads, "num_kv_heads": 1, "q_seq_len": rows, "kv_seq_len": keys}
    config |= {"qk_head_dim": dim, "qk_rope_head_dim": dim - v_dim, "kv_lora_rank": v_dim, "v_head_dim": v_dim}
    config["sm_scale"] = dim**-0.5
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    queries, cache = q.transpose(1, 2).reshape(-1, heads, dim), k.transpose(1, 2).reshape(-1, 1, dim)
    out = custom_kernel((queries, _Caches(bf16=cache), offsets * rows, offsets * keys, config))
    return out.view(batch, rows, heads, v_dim).transpose(1, 2)
"""


def workload_of(test, heads=HEADS, dim=DIM, v_dim=V_DIM):
    """Return the workload of a line of task.yml: one query of each sequence sees all of its keys."""
    if test["qseqlen"] != 1:
        raise ValueError(f"qseqlen: found {test['qseqlen']}, expected 1: the problem does not say which keys others see")
    return Workload(
        1, test["kvseqlen"], batch=test["batchsize"], heads=heads, kv_heads=1, head_dim=dim, v_head_dim=v_dim, v_in_k=True
    )


def judge(submission, workload, **options):
    """Return the judgment of a submission's text on a workload."""
    return pytest_attn.judge(f"{BEFORE}{submission}{AFTER}", workload, **options)


if __name__ == "__main__":
    path, test, device = [*sys.argv[1:], "auto"][:3]
    found = judge(Path(path).read_text(), workload_of(json.loads(test)), measure=True, device=device)
    print(json.dumps(found.as_dict("cause")))
    sys.exit(found.exit_code)
