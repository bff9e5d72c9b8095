"""Marked tests on workloads that Hypothesis draws."""
