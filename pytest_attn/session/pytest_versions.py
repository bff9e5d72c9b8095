"""Differences between the releases of pytest that are supported; each says which oldest pytest makes it needless."""

from collections.abc import Sequence

import pytest


def verbosity_of(config: pytest.Config) -> int:
    """Return how often -v was given, less -q; from 8.0 on config.get_verbosity()."""
    verbosity: int = config.getoption("verbose", 0)
    return verbosity


def items_of(session: pytest.Session) -> Sequence[pytest.Item]:
    """Return what was collected, nothing by xdist's controller; from 8.0 on session.items."""
    return getattr(session, "items", ())
