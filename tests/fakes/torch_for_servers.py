"""A torch that a server of new processes imports within no time; FAKE_TORCH plants what it must not have done."""

TORCH = """
import os, signal, threading, time

planted = os.environ.get("FAKE_TORCH", "")

def wake(*_):
    global planted
    planted = "initialized"

class cuda:
    is_initialized = staticmethod(lambda: planted == "initialized")
    _is_in_bad_fork = staticmethod(lambda: planted == "asked")

if planted == "later":
    signal.signal(signal.SIGUSR1, wake)
if planted == "thread":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if planted == "device":
    opened = open("/dev/full")
if planted == "unwatched":
    del os.pidfd_open
if planted == "crash":
    os._exit(3)
if planted == "missing":
    raise ImportError("no torch")
"""
