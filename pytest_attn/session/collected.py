"""How many cases a run has collected, and under --attn-list how many of them would run."""

from __future__ import annotations

from collections import Counter


class Collected:
    """Counts. tests: with cases; selected: cases that are left after deselection; runnable, obstacles: of a listing."""

    def __init__(self) -> None:
        self.tests = self.cases = self.selected = self.runnable = 0
        #: why the others would not run: by reason, how many of each backend
        self.obstacles: dict[str, Counter[str]] = {}

    def add_test(self, cases: int) -> None:
        """Count a test that was collected, and its cases."""
        self.tests += 1
        self.cases += cases

    def select(self, cases: int) -> None:
        """Set how many cases are left after deselection, which share the rate of false alarms."""
        self.selected = cases

    @property
    def listed(self) -> int:
        """The cases of a listing: another parametrize of the test multiplies those that its marker has."""
        return max(self.cases, self.runnable + sum(sum(kernels.values()) for kernels in self.obstacles.values()))

    def count(self, reason: str | None, kernel: str) -> None:
        """Count a case of a listing: reason says why it would not run, None where it would."""
        self.runnable += reason is None
        if reason:
            self.obstacles.setdefault(reason, Counter())[kernel] += 1
