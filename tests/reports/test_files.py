"""A file that is written whole or not at all: what is left behind when it works, and when it does not."""

import errno
import os
import signal
import stat
import tempfile

import pytest

from pytest_attn.reports import files
from pytest_attn.reports.files import uninterrupted, write_atomically

not_on_windows = pytest.mark.skipif(os.name == "nt", reason="links and permissions as POSIX has them")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, "old"])
def test_a_text_is_put_in_place_of_a_file(tmp_path, before):
    path = tmp_path / "file"
    if before:
        path.write_text(before)
    write_atomically(str(path), "new: µ\n")
    assert path.read_text(encoding="utf-8") == "new: µ\n"
    assert names(tmp_path) == ["file"]


def test_it_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: done.append(name) or real(*given))
    write_atomically(tmp_path / "file", "new")
    assert done == ["fsync", "replace"]


@not_on_windows
@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_stays_one(tmp_path, is_dangling):
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    target.parent.mkdir()
    if not is_dangling:
        target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path) == ["link", "there"]
    assert names(target.parent) == ["file"]


@not_on_windows
@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_permissions_that_the_umask_leaves_and_an_old_one_keeps_its_own(tmp_path, mask, expected):
    path, before = tmp_path / "file", os.umask(mask)
    try:
        write_atomically(path, "new")
        assert permissions(path) == expected
        path.chmod(0o664)
        write_atomically(path, "newer")
        assert permissions(path) == 0o664
    finally:
        os.umask(before)


@not_on_windows
def test_what_is_no_plain_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", os.devnull):
        with pytest.raises(OSError, match="is not a plain file"):
            write_atomically(path, "new")
    assert names(tmp_path) == ["pipe"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "gone" / "file", "new")
    assert names(tmp_path) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_or_is_interrupted_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, function, error):
    def fail(*_):
        raise error

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(files.os, function, fail)
    with pytest.raises(error):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@not_on_windows
def test_an_interrupt_waits_for_the_end_of_a_file(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a worker of xdist ignores
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    done = []

    def write():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("written")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert (done, signal.getsignal(signal.SIGINT)) == (["written"], signal.default_int_handler)


# -- one process at a time ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "another file"])
def locked(request, monkeypatch):
    """Have folders be locked, or not, as where a file system of a network cannot."""
    locks = files._locks

    def of_files_alone(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "no locks here")
        return locks(descriptor)

    if request.param != "folder":
        monkeypatch.setattr(files, "_locks", of_files_alone)


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), os.mkfifo])
def test_what_stands_where_a_lock_should_be_stays(tmp_path, make):
    make(tmp_path / "a.lock")
    with files.Lock(tmp_path / "a.lock").acquire(0):
        pass
    assert (tmp_path / "a.lock").exists()


def test_two_that_write_into_a_folder_wait_for_each_other(tmp_path, monkeypatch, locked):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "baselines").mkdir()
    busy = pytest.raises(TimeoutError, match=r"another process has been writing into .*baselines")
    with files.written_alone(tmp_path / "baselines"), busy, files.written_alone(tmp_path / "baselines"):
        raise AssertionError("both write")
    with files.written_alone(tmp_path / "baselines"):
        pass
    assert [*(tmp_path / "baselines").iterdir(), *(tmp_path / "temporary").iterdir()] == []


def test_what_cannot_be_written_is_named_as_it_was_typed(tmp_path):
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError) as refused:
        write_atomically(path, "")
    assert refused.value.filename == str(path)
