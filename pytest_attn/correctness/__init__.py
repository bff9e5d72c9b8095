"""Exact attention, the error budget of each element, and the comparison of a result with both: "right"."""
