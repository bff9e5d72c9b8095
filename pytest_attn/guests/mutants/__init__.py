"""A fault-free kernel in small steps, and mutants that get one of them wrong."""
