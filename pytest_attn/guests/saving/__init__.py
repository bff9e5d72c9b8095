"""Saved failures: what a failing judgment saw, kept in a folder, read back and judged again."""
