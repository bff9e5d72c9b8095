"""torch's context_parallel on a CPU: its own ring around the CPU's kernel, which its tables lack.

`install` puts two entries into the table from which context_parallel takes what replaces a kernel of SDPA; the ring, its
rotation and its load balance are torch's.
"""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: how the ring was asked to work, by call
ASKED = []


def _local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def _mesh_of(args):
    return next(arg.device_mesh for arg in args if isinstance(arg, DTensor))


def _wrapped(results, mesh):
    return tuple(DTensor.from_local(one.contiguous(), mesh, [Shard(2)], run_check=False) for one in results)


def _forward(op_call, args, kwargs):
    mesh, (q, k, v, *rest) = _mesh_of(args), map(_local, args)
    _, is_causal = [*rest, 0.0, False][:2] if len(rest) < 2 else rest[:2]
    ASKED.append((ring._cp_options.rotate_method.name, ring._cp_options.enable_load_balance, is_causal))
    results = ring._templated_ring_attention(
        mesh.get_group(), 2, FORWARD, query=q, key=k, value=v, is_causal=bool(is_causal), scale=kwargs.get("scale")
    )
    return _wrapped(results[:2], mesh)


def _kernel_of_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale):
    tensors = (t.contiguous() for t in (grad_out, query, key, value, out, logsumexp))
    return BACKWARD(*tensors, 0.0, is_causal, scale=scale)


def _backward(op_call, args, kwargs):
    mesh, (grad_out, q, k, v, out, lse, _, is_causal) = _mesh_of(args), map(_local, args)
    results = ring._templated_ring_attention_backward(
        mesh.get_group(),
        2,
        _kernel_of_backward,
        grad_out=grad_out.contiguous(),
        grad_out_name="grad_out",
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse,
        is_causal=bool(is_causal),
        scale=kwargs.get("scale"),
    )
    return _wrapped(results[:3], mesh)


def install():
    """Teach context_parallel the CPU's kernel."""
    assert _context_parallel
    ring.custom_ops[FORWARD], ring.custom_ops[BACKWARD] = _forward, _backward
