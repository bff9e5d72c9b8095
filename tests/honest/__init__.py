"""Kernels that no check may call wrong: variants of the package's fault-free kernel, and faults that no result shows."""
