"""Which backend is the fastest that is right, and which of its configurations."""
