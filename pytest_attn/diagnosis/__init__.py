"""Diagnosis of a wrong result: hypotheses of faults, and the one rule by which one explains what was returned."""
