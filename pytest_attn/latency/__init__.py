"""How long a kernel takes, and whether that is longer than it was."""
