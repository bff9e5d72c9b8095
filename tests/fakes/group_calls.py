"""Every collective that a library may call, on a group of two ranks, with what must come of it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def calls(q, k, v, group):
    """Ask the group everything once, then return attention to the gathered keys."""
    rank, other = dist.get_rank(group), 1 - dist.get_rank(group)
    assert type(group).__name__ == "HostGroup"
    mine = torch.arange(6.0).view(2, 3).bfloat16() + 10 * rank
    both = [torch.arange(6.0).view(2, 3).bfloat16() + 10 * one for one in (0, 1)]

    found = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(found, mine, group=group)
    assert all(map(torch.equal, found, both))
    summed = mine.clone()
    dist.all_reduce(summed, group=group)
    assert torch.equal(summed, both[0] + both[1])
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, both[1])
    part = torch.empty(1, 3, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, mine, group=group)
    assert torch.equal(part[0], (both[0] + both[1])[rank])
    dist.reduce_scatter(part, [mine[:1].clone(), mine[1:].clone()], group=group)
    assert torch.equal(part[0], (both[0] + both[1])[rank])
    swapped = torch.empty_like(mine)
    dist.all_to_all_single(swapped, mine, group=group)
    assert torch.equal(swapped, torch.stack([both[0][rank], both[1][rank]]))
    uneven = torch.empty(2 * (rank + 1), dtype=torch.int64)
    dist.all_to_all_single(uneven, torch.arange(3) + 10 * rank, [rank + 1] * 2, [1, 2], group=group)
    assert uneven.tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
    pieces = [torch.empty(3, dtype=torch.bfloat16) for _ in range(2)]
    dist.all_to_all(pieces, list(mine.clone()), group=group)
    assert torch.equal(torch.stack(pieces), swapped)
    told = mine.clone()
    dist.broadcast(told, 1, group=group)
    assert torch.equal(told, both[1])
    received, own = torch.empty_like(mine), torch.empty_like(mine)
    messages = [
        (dist.isend, mine, other),
        (dist.irecv, received, other),
        (dist.isend, mine + 1, rank),
        (dist.irecv, own, rank),
    ]
    for work in dist.batch_isend_irecv([dist.P2POp(*one, group=group) for one in messages]):
        work.wait()
    assert torch.equal(received, both[other])
    assert torch.equal(own, mine + 1)
    dist.barrier(group=group)

    whole = []
    for tensor in (k, v):
        rows = torch.empty(2, *tensor.shape, dtype=tensor.dtype)
        dist.all_gather_into_tensor(rows, tensor.contiguous(), group=group)
        whole.append(torch.cat(list(rows), 2))
    return F.scaled_dot_product_attention(q, *whole)
