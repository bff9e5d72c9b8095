"""Streams of CUDA on a CPU: who reads or writes what another stream made, and has not waited for it, is written down."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    """A stream that knows up to which work of each stream it has waited."""

    def __init__(self, device=None):
        self.done, self.seen = 0, {}

    def wait_stream(self, other):
        for stream, number in {**other.seen, other: other.done}.items():
            self.seen[stream] = max(self.seen.get(stream, 0), number)


class _Watch(TorchDispatchMode):
    def __init__(self, streams):
        super().__init__()
        self.streams, self.made, self.races = streams, {}, []
        self.kept = []  # a storage at an address that is used again would be taken for the one before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        here = self.streams[-1]
        here.done += 1
        for tensor in self._tensors((args, kwargs)):
            stream, number = self.made.get(tensor.untyped_storage()._cdata, (here, 0))
            if stream is not here and here.seen.get(stream, 0) < number:
                self.races.append(f"{func} of what another stream made")
        result = func(*args, **(kwargs or {}))
        for tensor in self._tensors(result):
            self.made[tensor.untyped_storage()._cdata] = here, here.done
            self.kept.append(tensor)
        return result

    @staticmethod
    def _tensors(tree):
        return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


@contextmanager
def watched_streams(monkeypatch):
    """Yield what read or wrote too early, in words, while torch's streams are these."""
    streams = [Stream()]

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    for name, stand_in in {"Stream": Stream, "stream": on, "current_stream": lambda *_: streams[-1]}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    with _Watch(streams) as watch:
        yield watch.races
