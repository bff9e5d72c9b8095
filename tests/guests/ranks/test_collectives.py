"""The last collective of a process is in its file while it waits there; one that is late waits before it begins."""

import pytest

from pytest_attn.guests.ranks import communication
from pytest_attn.guests.ranks.communication import Collectives, last_collective


@pytest.fixture
def record(tmp_path):
    return Collectives(tmp_path / "last"), tmp_path / "last"


def test_a_collective_says_where_it_is(record):
    made, path = record
    inner = made.watching("all_gather", "", lambda tensors, tensor: last_collective(path))
    outer = made.watching("all_gather_object", "", lambda tensors, tensor: inner(tensors, tensor))
    receive = made.watching("recv", "from", lambda tensor, source: last_collective(path))
    assert outer([], None) == "waits in all_gather_object, its collective 1"
    assert last_collective(path) == "has left all_gather_object, its collective 1"
    assert receive(None, 3) == "waits in recv from 3, its collective 2"


def test_a_late_rank_begins_each_collective_late(record, monkeypatch):
    made, _ = record
    slept = []
    monkeypatch.setattr(communication.time, "sleep", slept.append)
    reduce = made.watching("all_reduce", "", lambda tensor: tensor)
    reduce(1)
    made.is_late = True
    reduce(1)
    assert slept == [0.002]


def test_nothing_is_said_before_the_first(tmp_path):
    assert last_collective(tmp_path / "missing") == ""
