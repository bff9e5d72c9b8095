"""The judge for programs: a verdict on a function, a file or a text, as data."""
