"""Why a result is wrong: hypotheses of faults, and the one rule by which one explains what was returned."""
