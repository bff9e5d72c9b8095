"""Servers that outlive the run which has started them, so that a story need not wait until one has imported torch again."""

from contextlib import contextmanager
from pathlib import Path

from pytest_attn.processes import fork_server


class _LastingServer(fork_server.ForkServer):
    """One of these."""

    def close(self):
        pass


@contextmanager
def lasting_servers():
    """Return what stands for `ForkServer`: gives the one that an earlier story has started with these modules."""
    lasting = {}

    def serving(like, modules):
        key = (*modules, like.environment.get("PYTHONPATH"))
        if key not in lasting or lasting[key]._process.poll() is not None:
            lasting[key] = _LastingServer(like._replace(folder=Path("/")), modules)
        return lasting[key]

    yield serving
    for one in lasting.values():
        fork_server.ForkServer.close(one)
