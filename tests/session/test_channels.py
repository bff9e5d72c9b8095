"""What our processes speak over: nobody else can reach it, a message is bounded, and nothing that comes is unpickled."""

import os
import socket
import stat
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pytest_attn.processes.channel import Channel
from pytest_attn.reports.files import ProcessFolder

NOBODY = 65534


@pytest.fixture
def ends():
    mine, theirs = Channel.pair()
    yield mine, Connection(os.dup(theirs.fileno()))
    mine.close()
    theirs.close()


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("was unpickled",))


def test_a_message_is_what_was_sent(ends):
    mine, theirs = ends
    other = Channel(theirs)
    other.send(name="\udcff\n", numbers=[1, 1e308, None, True], within={"a": []})
    assert mine.recv(1) == {"name": "\udcff\n", "numbers": [1, 1e308, None, True], "within": {"a": []}}
    with pytest.raises(TimeoutError):
        mine.recv(0)


@pytest.mark.parametrize(
    "send",
    [
        lambda end: end.send(Trap()),
        lambda end: end.send_bytes(b"\xff\xfe"),
        lambda end: end.send_bytes(b"[1]"),
        lambda end: end.send_bytes(b"[" * 200_000),
        lambda end: os.write(end.fileno(), struct.pack("!i", 0x7FFFFFFF) + b"{}"),
    ],
    ids=["pickled", "bytes", "array", "deep", "too long"],
)
def test_anything_else_that_comes_is_no_message(ends, send):
    mine, theirs = ends
    send(theirs)
    assert mine.recv(1) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads the credentials of Linux")
def test_a_channel_has_no_address_and_both_ends_are_of_one_user(ends):
    for end in ends:
        with socket.socket(fileno=os.dup(end.fileno())) as one:
            assert (one.getsockname(), one.getpeername()) == ("", "")
            credentials = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            assert struct.unpack("3i", credentials)[1] == os.getuid()


def test_what_processes_share_lies_in_a_folder_of_their_user_alone():
    before = os.umask(0)
    folder = ProcessFolder()
    os.umask(before)
    try:
        path = Path(folder.name)
        (path / "store").touch(0o666)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        if os.getuid() == 0:
            assert another_user("ls", path) == another_user("cat", path / "store") == "Permission denied"
            path.chmod(0o755)
            assert another_user("ls", path) == another_user("cat", path / "store") == ""
    finally:
        folder.cleanup()


def another_user(command, path):
    """Return what a command says of a path last, as another user runs it."""
    done = subprocess.run(
        [command, path], user=NOBODY, extra_groups=[], group=NOBODY, capture_output=True, text=True, check=False
    )
    return done.stderr.strip().rpartition(": ")[2]
