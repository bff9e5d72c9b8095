"""A callable in a process of its own, which believes nothing that comes from there."""
