"""Faults of rank backends, planted on the ranks with monkeypatch: each in one step of a library."""

from importlib import import_module


def _ring():
    return import_module("torch.distributed.tensor.experimental._context_parallel._attention")


def _stale(cls_name):
    """Have a rotation return what the first rotation of this rank sent away: its own keys and values."""

    def plant(monkeypatch):
        cls = getattr(_ring(), cls_name)
        exchange = cls.exchange_buffers

        def kept(self, buffer):
            self.kept = getattr(self, "kept", buffer.clone())
            exchange(self, buffer)

        plain = cls.next_buffer

        def stale(self):
            found = plain(self)
            return self.kept if found.dtype == self.kept.dtype and self.kept.dtype.itemsize == 2 else found

        monkeypatch.setattr(cls, "exchange_buffers", kept)
        monkeypatch.setattr(cls, "next_buffer", stale)

    return plant


def _other_half(monkeypatch):
    ring = _ring()
    plain = ring._partial_update

    def swapped(original, new, dim, n_chunks, idx, add):
        return plain(original, new, dim, n_chunks, 1 - idx if add else idx, add)

    monkeypatch.setattr(ring, "_partial_update", swapped)


def _mask_in_order(monkeypatch):
    ring = _ring()
    plain = ring._context_parallel_shard
    stub = import_module("torch.distributed.tensor.experimental._attention")
    monkeypatch.setattr(
        stub, "_context_parallel_shard", lambda mesh, buffers, dims, balancer: plain(mesh, buffers, dims, None)
    )


def _of_flash(fault):
    def plant(monkeypatch):
        monkeypatch.setattr(import_module("flash_attn.flash_attn_interface"), "FAULT", fault)

    return plant


def _heads_of_diffusers(monkeypatch):
    dispatch = import_module("diffusers.models.attention_dispatch")
    plain = dispatch._all_to_all_single
    monkeypatch.setattr(dispatch, "_all_to_all_single", lambda x, group: plain(x, group).flip(0))


FAULTS = {
    "nothing": lambda monkeypatch: None,
    "rotation by all-to-all": _stale("_AllToAllRotater"),
    "rotation by all-gather": _stale("_AllGatherRotater"),
    "half of the balanced gradient": _other_half,
    "a mask in another order": _mask_in_order,
    "lse in bfloat16": _of_flash("lse"),
    "dk of a chunk's last key": _of_flash("dk"),
    "heads of diffusers": _heads_of_diffusers,
}
