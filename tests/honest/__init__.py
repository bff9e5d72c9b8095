"""Kernels that no check may call wrong: variants of the package's honest kernel, and faults that no result shows."""
