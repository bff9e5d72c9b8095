"""The judge is judged: after each judgment it is given a pair of results that it must tell apart.

What a callable can replace in its judge's process has no end: below each list of names lie others, down to the dictionaries
of torch's C types. So nothing is looked for here. The judge's own code is asked about numbers that are new each time, whose
exact attention Python's floats compute: it has to pass them, and to refuse them with one element that is wrong by a little.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_attn.backends.precision import DEFAULT, PRECISIONS
from pytest_attn.correctness.call import is_cuda_error
from pytest_attn.correctness.judge import judge_output
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.correctness.replaced_functions import functions_kept
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

#: of the sum of p |v|: two to six times what the limits leave to float32, whichever numbers are drawn
_WRONG_BY = 4e-6
Rows = list[list[float]]


class JudgeChangedError(RuntimeError):
    """The judge calls wrong numbers right, or right ones wrong: nothing that it says from now on counts."""


@contextmanager
def judge_kept(where: str, device: torch.device) -> Iterator[None]:
    """Surround a judgment: put back what a callable replaces, then see that the judge still tells right from wrong.

    where: the callable, and on what it is judged. Raises ContractError as `functions_kept` does, and JudgeChangedError.
    """
    _last.append((where, device))
    try:
        with functions_kept(where):
            yield
    finally:
        require_unchanged()


#: what was judged last, and on which device
_last: deque[tuple[str, torch.device]] = deque(maxlen=1)


def require_unchanged() -> None:
    """Raise JudgeChangedError where something was judged, and the judge does not tell a known pair apart any more."""
    for where, device in _last:
        if not tells_apart(device):
            raise JudgeChangedError(
                f"the judge in this process no longer tells right from wrong, since {where} was judged: something has replaced"
                " code of pytest-attn, or what it computes with. Nothing more is judged here; --attn-isolated keeps a kernel"
                " apart from its judge"
            )


def tells_apart(device: torch.device) -> bool:
    """Return whether the judge passes a right result of numbers drawn anew, and refuses one of which an element is wrong."""
    draw = random.Random()  # seeded by the system
    spec = _spec(draw.randint(2, 4), draw.randint(3, 6), device)
    w = spec.workload
    q, k, v = (_drawn(draw, length) for length in (w.q_len, w.kv_len, w.kv_len))
    right = _attention(q, k, v)
    wrong = [row.copy() for row in right]
    row, column = draw.randrange(w.q_len), draw.randrange(4)
    wrong[row][column] += _WRONG_BY * _attention(q, k, [[*map(abs, one)] for one in v])[row][column]
    try:
        tensor = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        query, key, value, *outs = (tensor([[rows]]) for rows in (q, k, v, right, wrong))
        given = Inputs(w, device, query, key, value, dout=torch.zeros_like(query))
        reference = compute_reference(given, PRECISIONS[DEFAULT])
        passed = [judge_output(out, spec, reference).passed for out in outs]
    except Exception as error:  # a device that is lost or full says nothing of the judge
        return isinstance(error, torch.OutOfMemoryError | MemoryError) or is_cuda_error(error)
    return passed == [True, False]


@functools.cache
def _spec(q_len: int, kv_len: int, device: torch.device) -> CheckSpec:
    return CheckSpec(Workload(q_len, kv_len, head_dim=4, dtype="float32"), device)


def _drawn(draw: random.Random, length: int) -> Rows:
    """Return rows of four floats that float32 has."""
    return [[draw.getrandbits(20) / (1 << 19) - 1 for _ in range(4)] for _ in range(length)]


def _attention(q: Rows, k: Rows, v: Rows) -> Rows:
    """Return softmax(q k^T / 2) v."""
    out = []
    for query in q:
        weights = [math.exp(sum(map(float.__mul__, query, key)) / 2) for key in k]
        total = sum(weights)
        out.append([sum(map(float.__mul__, weights, column)) / total for column in zip(*v, strict=True)])
    return out
