"""Kernels of a file, as a program would write them, and answers that the shipped schema describes."""

import json
from pathlib import Path

import jsonschema

import pytest_attn

SCHEMA = json.loads((Path(pytest_attn.__file__).parent / "schemas" / "judgment.json").read_text())
KERNELS = """
import os, sys, time
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
print("imported")
calls, buffer, known = [], [], {}
def right(q, k, v, workload): return sdpa(q, k, v, is_causal=workload.mask is not None, enable_gqa=True)
def wrong(q, k, v): return sdpa(q, k, v, is_causal=True)
def exits(q, k, v): sys.exit(0)
def exits_at_once(q, k, v): os._exit(0)
def aborts(q, k, v): os.abort()
def raises(q, k, v): raise RuntimeError("no luck")
def raises_much(q, k, v): raise RuntimeError(chr(233) * (3 << 20))  # 18 MB of JSON
def declines(q, k, v): raise NotImplementedError("not today")
def sleeps(q, k, v): time.sleep(1000)
def other_shape(q, k, v): return v[:, :, :1]
def on_meta(q, k, v): return v.to("meta")
def sparse(q, k, v): return v.to_sparse()
def printing(q, k, v):
    print('{"right": false}', flush=True)
    os.write(1, b'{"right": false}')
    return sdpa(q, k, v)
def leaves_cudnn_off(q, k, v):
    torch.backends.cudnn.enabled = False
    return sdpa(q, k, v)
def casts(q, k, v):
    return (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype) @ v
def casts_dq_too_large(q, k, v):
    return casts(q * 1.03 - (q * 0.03).detach(), k, v)
def same_buffer(q, k, v):
    buffer.append(buffer[0] if buffer else torch.empty_like(q))
    return buffer[0].copy_(sdpa(q, k, v))
def knows_addresses(q, k, v):
    place = q.data_ptr(), k.data_ptr()
    known[place] = known[place] if place in known else sdpa(q, k, v)
    return known[place]
def drifts(q, k, v):
    calls.append(1)
    return sdpa(q, k, v) + (len(calls) > 4) * 1e-7
"""


def as_described(answer):
    """Return an answer, after a look whether it is JSON as the schema describes it."""
    jsonschema.validate(json.loads(json.dumps(answer, allow_nan=False)), SCHEMA)
    return answer
