"""Pytest once more in another process: started or forked, spoken to, awaited, and ended."""
