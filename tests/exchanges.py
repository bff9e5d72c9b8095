"""How ranks of the tests hand tensors to one another: threads of one process, or processes over gloo."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from pytest_attn.backends.raised import RemoteRaisedError
from pytest_attn.correctness.contract import ContractError
from pytest_attn.guests.ranks.rank_group import RankGroup
from pytest_attn.guests.ranks.rank_server import RankServer


class Threads:
    """The meeting point of ranks that are threads."""

    def __init__(self, ranks):
        self.ranks, self.barrier, self.slots = ranks, threading.Barrier(ranks, timeout=60), [None] * ranks

    def of(self, rank):
        return ThreadExchange(self, rank)


class ThreadExchange:
    """What one thread sends and receives: everything is one all-gather of objects."""

    def __init__(self, threads, rank):
        self.threads, self.rank, self.ranks = threads, rank, threads.ranks

    def all_gather(self, mine):
        self.threads.barrier.wait()
        self.threads.slots[self.rank] = mine
        self.threads.barrier.wait()
        found = [one.clone() if isinstance(one, torch.Tensor) else one for one in self.threads.slots]
        self.threads.barrier.wait()  # after which its owner may change it
        return found

    def shift(self, mine, by=1):
        """Send to rank + by, return what rank - by has sent."""
        return self.all_gather(mine)[(self.rank - by) % self.ranks]

    def all_to_all(self, parts):
        """Send the i-th to rank i, return what each rank has sent here."""
        return [sent[self.rank] for sent in self.all_gather(parts)]


class GlooExchange:
    """The same between processes, whose group is `attn.group`. Shapes travel ahead: shards may be uneven."""

    def __init__(self, rank, ranks, group):
        self.rank, self.ranks, self.group = rank, ranks, group

    def all_gather(self, mine):
        found = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def shift(self, mine, by=1):
        to, source = (self.rank + by) % self.ranks, (self.rank - by) % self.ranks
        if to == self.rank:
            return mine.clone()
        shape = torch.empty(mine.dim(), dtype=torch.int64)
        sent = [dist.isend(torch.tensor(mine.shape), to, group=self.group)]
        dist.recv(shape, source, group=self.group)
        sent.append(dist.isend(mine.contiguous(), to, group=self.group))
        received = torch.empty(shape.tolist(), dtype=mine.dtype)
        dist.recv(received, source, group=self.group)
        for one in sent:
            one.wait()
        return received

    def all_to_all(self, parts):
        return [sent[self.rank] for sent in self.all_gather(parts)]


class EmulatedTeam(RankGroup):
    """Ranks that are threads. kernel_of: makes the callable of a rank from its exchange."""

    def __init__(self, kernel_of, sharding, layout="bhsd", returns_lse=False):
        self.threads, self.sharding = Threads(sharding.ranks), sharding
        layout = "thd" if sharding.workload.is_packed else layout
        kernels = [kernel_of(self.threads.of(rank)) for rank in range(sharding.ranks)]
        self.servers = [RankServer(one, sharding, rank, layout, returns_lse) for rank, one in enumerate(kernels)]

    def forward(self, number, tensors, backward):
        return self.on_all(lambda server: server.forward(number, tensors, backward))

    def backward(self, number, dout):
        return self.on_all(lambda server: server.backward(number, dout))

    def on_all(self, ask):
        def run(rank):
            try:
                return ask(self.servers[rank])
            except ContractError:
                raise
            except threading.BrokenBarrierError:
                return {}
            except Exception as error:
                self.threads.barrier.abort()
                raise RemoteRaisedError(f"rank {rank} raised {type(error).__name__}: {error}") from error

        with ThreadPoolExecutor(len(self.servers)) as threads:
            return list(threads.map(run, range(len(self.servers))))
