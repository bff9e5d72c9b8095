import pytest


@pytest.fixture(autouse=True)
def _no_screen(monkeypatch):
    """Let tables be as wide as they are: xdist says in COLUMNS how wide the terminal of its workers is."""
    monkeypatch.delenv("COLUMNS", raising=False)
