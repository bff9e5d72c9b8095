"""The peak of a call's memory is what it asked for. With stand-ins for CUDA's allocator, and on a GPU with its own."""

import pytest
import torch

from pytest_attn.latency.work import peak_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Allocator:
    """One that hands out more than it is asked for: 1 MiB more for each tensor."""

    def __init__(self, counts_requests):
        self.counts_requests = counts_requests
        self.held = self.peak = 1000
        self.tensors = self.peak_tensors = 2

    def reset(self, device):
        self.peak, self.peak_tensors = self.held, self.tensors

    def take(self, size):
        self.held, self.tensors = self.held + size, self.tensors + 1
        self.peak, self.peak_tensors = max(self.peak, self.held), max(self.peak_tensors, self.tensors)

    def give_back(self, size):
        self.held, self.tensors = self.held - size, self.tensors - 1

    def memory_stats(self, device):
        of = {"current": (self.held, self.tensors), "peak": (self.peak, self.peak_tensors)}
        requested = {f"requested_bytes.all.{when}": held * self.counts_requests for when, (held, _) in of.items()}
        return requested | {f"allocated_bytes.all.{when}": held + (tensors << 20) for when, (held, tensors) in of.items()}


@pytest.mark.parametrize(("counts_requests", "expected"), [(True, 700), (False, 700 + (2 << 20))])
def test_what_is_asked_for_counts_and_not_what_is_handed_out(monkeypatch, counts_requests, expected):
    allocator = Allocator(counts_requests)
    for name, stand_in in {
        "memory_stats": allocator.memory_stats,
        "reset_peak_memory_stats": allocator.reset,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    monkeypatch.setattr(torch, "empty", lambda size, device: None)

    def call():
        allocator.take(500)
        allocator.take(200)
        allocator.give_back(200)

    allocator.take(10_000)
    allocator.give_back(10_000)  # a peak of before does not count
    assert peak_of(call, torch.device("cuda", 0)) == expected


@needs_cuda
def test_a_block_that_is_larger_than_asked_for_does_not_count():
    """A free one of 2.5 MiB between two others is handed out whole to who asks for 2 MiB."""
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    row = [torch.empty(5 << 19, dtype=torch.uint8, device=device) for _ in range(3)]
    del row[1]
    assert peak_of(lambda: torch.empty(2 << 20, dtype=torch.uint8, device=device), device) == 2 << 20
