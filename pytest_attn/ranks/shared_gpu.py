"""Ranks that share one GPU: NCCL as of 2.30 with its own consent, or a process group that goes through the host.

The group on the host exists to run code that is written for several GPUs where there is one. What it moves arrives as it was
sent, and sums are formed in float32. Each call waits for the device: races between streams do not show.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: how ranks may share a GPU: not at all, or over which transport
WAYS = ("no", "gloo", "nccl")
#: what the group through the host is called where groups are named
BACKEND = "pytest_attn_host"
#: the first NCCL that takes several ranks on one GPU
_FIRST_NCCL = (2, 30)


def nccl_refuses_because() -> str:
    """Say why this torch's NCCL does not put several ranks on one GPU, "" where it does."""
    import torch

    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if found >= _FIRST_NCCL:
        return ""
    return f"NCCL {'.'.join(map(str, found))} takes one rank for each GPU, 2.30 takes more; --attn-ranks-share-gpu=gloo does"


def permit_in_nccl() -> None:
    """Set what NCCL reads as a process begins to use it."""
    os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


def register_host_group() -> None:
    """Teach torch.distributed the backend, for the world and for all groups that libraries make of it."""
    import torch.distributed as dist

    group = _group_class()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, lambda *given: group(*given), devices=["cpu", "cuda"])


# -- bytes ---------------------------------------------------------------------------------------------------------------


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes on the host, one-dimensional."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).to("cpu", copy=True)


def _put(target: torch.Tensor, found: torch.Tensor) -> None:
    """Fill a tensor with bytes from the host."""
    target.detach().copy_(found.view(target.dtype).view(target.shape))


def _summed(parts: Sequence[torch.Tensor], like: torch.Tensor, options: Any) -> torch.Tensor:
    """Return the sum, or what else was asked for, of parts in bytes, rounded once."""
    import torch
    import torch.distributed as dist

    stack = torch.stack([one.view(like.dtype) for one in parts])
    wide = stack.double() if like.dtype == torch.float64 else stack.float() if like.dtype.is_floating_point else stack
    made: dict[Any, Callable[[], torch.Tensor]] = {
        dist.ReduceOp.SUM: lambda: wide.sum(0),
        dist.ReduceOp.AVG: lambda: wide.mean(0),
        dist.ReduceOp.MAX: lambda: wide.amax(0),
        dist.ReduceOp.MIN: lambda: wide.amin(0),
    }
    wanted = next((how for how in made if options.reduceOp == how), None)
    if wanted is None:
        raise NotImplementedError(f"ranks that share a GPU through the host do not reduce by {options.reduceOp}")
    return made[wanted]().to(like.dtype).view(torch.uint8)


def _group_class() -> type[Any]:
    """Make the class where torch is imported."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    def done() -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return _create_work_from_future(future)

    class Arriving(dist.Work):
        """A message under way, which is put into its tensor when somebody waits for it."""

        def __init__(self, arrive: Callable[[], None]) -> None:
            super().__init__()
            self._arrive: Callable[[], None] | None = arrive

        def wait(self, timeout: timedelta | None = None) -> bool:
            del timeout
            if self._arrive is not None:
                self._arrive()
                self._arrive = None
            return True

    process_group: Any = dist.ProcessGroup  # its methods, and gloo's, are typed in few releases of torch

    class HostGroup(process_group):  # type: ignore[misc]
        """A process group of gloo that copies each tensor to the host and back."""

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(rank, size)
            self._rank, self._size = rank, size
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._to_itself: dict[int, deque[torch.Tensor]] = {}
            for device in ("cpu", "cuda"):  # for those who ask a group what it can
                self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)

        def getBackendName(self) -> str:  # noqa: N802 - torch's own
            return BACKEND

        # -- what all others are made of -----------------------------------------------------------------------------------

        def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            mine = _sent(tensor)
            found = [torch.empty_like(mine) for _ in range(self._size)]
            self._gloo.allgather([found], [mine]).wait()
            return found

        def _exchanged(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
            """Send the i-th bytes to rank i, and return what came of each."""
            mine = torch.cat(list(parts))
            found = torch.empty(sum(sizes), dtype=torch.uint8)
            self._gloo.alltoall_base(found, mine, list(sizes), [len(one) for one in parts], dist.AllToAllOptions()).wait()
            return list(torch.split(found, list(sizes)))

        def _scattered(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> None:
            sent = [_sent(one) for one in parts]
            _put(output, _summed(self._exchanged(sent, [len(sent[self._rank])] * self._size), output, opts))

        # -- what torch.distributed calls ------------------------------------------------------------------------------------

        def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            for targets, tensor in zip(outputs, inputs, strict=True):
                for target, found in zip(targets, self._gathered(tensor), strict=True):
                    _put(target, found)
            return done()

        def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
            _put(output, torch.cat(self._gathered(tensor)))
            return done()

        def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._allgather_base(output, tensor)
            return done()

        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                _put(tensor, _summed(self._gathered(tensor), tensor, opts or dist.AllreduceOptions()))
            return done()

        allreduce_coalesced = allreduce

        def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            for output, parts in zip(outputs, inputs, strict=True):
                self._scattered(output, parts, opts or dist.ReduceScatterOptions())
            return done()

        def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
            self._scattered(output, tensor.chunk(self._size), opts or dist.ReduceScatterOptions())
            return done()

        def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter_base(output, tensor, opts)
            return done()

        def alltoall_base(self, output: Any, tensor: Any, to: Any = (), sent: Any = (), opts: Any = None) -> Any:
            received = to or [output.shape[0] // self._size] * self._size
            parts = tensor.split(list(sent)) if sent else tensor.chunk(self._size)
            row = output[:1].numel() * output.element_size()
            _put(output, torch.cat(self._exchanged([_sent(one) for one in parts], [rows * row for rows in received])))
            return done()

        # as torch 2.13 calls them
        all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
        reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
        all_to_all_single = alltoall_base

        def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            sizes = [output.numel() * output.element_size() for output in outputs]
            for output, found in zip(outputs, self._exchanged([_sent(one) for one in inputs], sizes), strict=True):
                _put(output, found)
            return done()

        def broadcast(self, tensors: Any, opts: Any = None) -> Any:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                found = _sent(tensor)
                self._gloo.broadcast([found], opts or dist.BroadcastOptions()).wait()
                _put(tensor, found)
            return done()

        def barrier(self, opts: Any = None) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._gloo.barrier(dist.BarrierOptions()).wait()
            return done()

        def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
            mine = _sent(tensors[0])
            if to == self._rank:
                self._to_itself.setdefault(tag, deque()).append(mine)
                return done()
            return Arriving(_keeping(mine, self._gloo.send([mine], to, tag)))

        def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
            target = tensors[0]
            if source == self._rank:
                return Arriving(lambda: _put(target, self._to_itself[tag].popleft()))
            found = torch.empty(target.numel() * target.element_size(), dtype=torch.uint8)
            work = self._gloo.recv([found], source, tag)

            def arrive() -> None:
                work.wait()
                _put(target, found)

            return Arriving(arrive)

    return HostGroup


def _keeping(tensor: torch.Tensor, work: Any) -> Callable[[], None]:
    """Return what waits for a message; until then its bytes stay."""

    def wait() -> None:
        work.wait()
        del kept[:]

    kept = [tensor]
    return wait
