"""The pools of a run: one for each number of ranks and kind of device, which stay for later cases and end with the run."""

from __future__ import annotations

import pytest

from pytest_attn.ranks.launching import Launcher
from pytest_attn.ranks.pool import Pool


class Pools:
    """Starts pools when they are first needed, and again where a case has spoilt one."""

    def __init__(self, config: pytest.Config) -> None:
        self._launcher = Launcher(config)
        self._pools: dict[tuple[int, str], Pool] = {}
        self.started = 0

    @classmethod
    def of(cls, config: pytest.Config) -> Pools:
        """Return those of a run, which end with it."""
        if _POOLS not in config.stash:
            config.stash[_POOLS] = made = cls(config)
            config.add_cleanup(made.close)
        return config.stash[_POOLS]

    def pool(self, ranks: int, kind: str, seconds: float, share: str) -> Pool:
        """Return the pool of so many ranks. share: how they share a GPU. Raises RanksLostError where it does not start."""
        found = self._pools.get((ranks, kind))
        if found is None or not found.is_usable:
            found = self._pools[ranks, kind] = Pool(self._launcher, ranks, kind, seconds, share)
            self.started += 1
        return found

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        self._launcher.close()


_POOLS = pytest.StashKey[Pools]()
