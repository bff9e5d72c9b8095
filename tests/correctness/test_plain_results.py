"""Reading a result runs torch's code alone: tensors are plain ones, whatever else a callable may return in their place."""

import re
from typing import NamedTuple

import pytest
import torch
from judging import SMALL, attention, failure, timed, with_gradients, with_lse

import pytest_attn
from pytest_attn.correctness.contract import ContractError
from pytest_attn.guests.ranks.rank_server import RankServer
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.latency.work import verified
from pytest_attn.workloads.inputs import draw_inputs

CPU = torch.device("cpu")


class Lazy(torch.Tensor):
    """A tensor that is computed where it is read."""

    @classmethod
    def of(cls, like, compute):
        made = torch.empty_like(like).as_subclass(cls)
        made.compute = compute
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [one.compute() if isinstance(one, cls) else one for one in args]
        return function(*args, **(kwargs or {}))


class Equal(torch.Tensor):
    """A tensor that is as expected, whatever is expected."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function in (torch.equal, torch.Tensor.__eq__):
                return function(args[0], args[0])
            return function(*args, **(kwargs or {}))


def lazy(q, k, v):
    return Lazy.of(q, lambda: attention(q, k, v))


def lazily_cloned(q, k, v):
    out = attention(q, k, v)
    out.clone, out.detach = lambda **_: attention(q, k, v), lambda: attention(q, k, v)
    return out


def equal(q, k, v):
    return attention(q, k, v).as_subclass(Equal)


class Unread(list):
    """A list that computes what it holds where that is read."""

    def __iter__(self):
        raise ValueError("its own code ran")

    __getitem__ = __len__ = __iter__


LAZY = with_gradients(lambda backward, dout: tuple(Lazy.of(one, one.clone) for one in backward(dout)))
REFUSED = {
    "lazy": (lazy, "out is of type Lazy, a subclass of torch.Tensor"),
    "equal": (equal, "out is of type Equal, a subclass of torch.Tensor"),
    "attributes": (lazily_cloned, "out has attributes of its own in place of torch.Tensor's (clone, detach)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_result_with_code_of_its_own_is_refused(name):
    kernel, words = REFUSED[name]
    assert words in failure(kernel, SMALL)
    with pytest.raises(ContractError, match=re.escape(words)):
        verified(timed(kernel, SMALL, CPU))


def test_lse_is_read_like_out():
    kernel = with_lse(lambda lse: lse.as_subclass(Equal))
    assert "lse is of type Equal" in failure(kernel, SMALL, returns_lse=True)
    assert "lse is of type Equal" in failure(kernel, SMALL, returns=("out", "lse"))


def test_gradients_are_read_like_out():
    assert "dq is of type Lazy" in failure(LAZY, SMALL, backward=True)
    with pytest.raises(AssertionError, match="dq is of type Lazy"):
        pytest_attn.check_invariants(LAZY, SMALL, only="rerun", backward=True, device="cpu")
    for direction in ("backward", "forward+backward"):
        with pytest.raises(ContractError, match="dq is of type Lazy"):
            verified(timed(LAZY, SMALL, CPU, direction))


def test_a_rank_reads_what_its_callable_returns_likewise():
    inputs = draw_inputs(SMALL)
    given = {name: getattr(inputs, name) for name in "qkv"}
    for kernel, words in REFUSED.values():
        with pytest.raises(ContractError, match="^rank 1: " + re.escape(words)):
            RankServer(kernel, Sharding(SMALL, "contiguous", 2), 1, "bhsd", False).forward(1, given, False)
    server = RankServer(LAZY, Sharding(SMALL, "contiguous", 2), 1, "bhsd", False)
    server.forward(1, given, True)
    with pytest.raises(ContractError, match=r"^rank 1: dq is of type Lazy"):
        server.backward(1, inputs.dout)


def test_what_holds_results_is_read_without_its_code():
    class Pair(NamedTuple):
        out: torch.Tensor
        lse: torch.Tensor

    def pair(q, k, v):
        return Pair(*with_lse()(q, k, v))

    for declared in ({"returns_lse": True}, {"returns": ("out", "lse")}):
        assert pytest_attn.check(pair, SMALL, device="cpu", **declared).passed
        assert pytest_attn.check(lambda *qkv: Unread(pair(*qkv)), SMALL, device="cpu", **declared).passed
    assert "a Unread of 1" in failure(lambda *qkv: Unread([attention(*qkv)]), SMALL)
    verified(timed(lambda *qkv: Unread(pair(*qkv)), SMALL, CPU))


@pytest.mark.parametrize(
    "result",
    [torch.nn.Parameter, lambda out: out.as_subclass(torch.Tensor), lambda out: out.mT.contiguous().mT],
    ids=["parameter", "plain", "view"],
)
def test_honest_results_are_taken(result):
    def kernel(q, k, v):
        out = result(attention(q, k, v))
        out.scale = 2.0
        return out

    assert pytest_attn.check(kernel, SMALL, device="cpu").passed


def test_what_a_collective_has_not_yet_written_is_waited_for():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    assert pytest_attn.check(lambda *qkv: AsyncCollectiveTensor(attention(*qkv)), SMALL, device="cpu").passed
    assert "out is of type Lazy" in failure(lambda *qkv: AsyncCollectiveTensor(lazy(*qkv)), SMALL)


def test_a_dtensor_is_its_local_part():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(2), Replicate(), Partial()):

            def kernel(q, k, v, placement=placement):
                return DTensor.from_local(attention(q, k, v), mesh, [placement], run_check=False)

            assert pytest_attn.check(kernel, SMALL, device="cpu", backward=True).passed
    finally:
        dist.destroy_process_group()
