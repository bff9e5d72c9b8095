"""Time that a kernel takes, and the gate that asks whether it is longer than it was."""
